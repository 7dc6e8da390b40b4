"""The causal GRU that student and teacher are, sampling from it, and its logits over a history."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paritygate.synthetic.environment import CONTENT, END


class CausalGru(nn.Module):
    """Next-token logits over the vocabulary from the tokens so far; float32, initialised from `seed` alone."""

    def __init__(self, *, vocabulary: int, hidden: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary, hidden)
            self.cell = nn.GRUCell(hidden, hidden)
            self.head = nn.Linear(hidden, vocabulary)

    def step(self, token: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """(logits (V,) of the next token, state (1, H)) after one more token."""
        embedded = self.embedding(torch.tensor([token], device=self.head.weight.device))
        following: Tensor = self.cell(embedded, state)
        return self.head(following)[0], following

    def forward(self, tokens: Sequence[int]) -> Tensor:
        """Logits (L, V): row j is over the token that follows tokens[: j + 1], and depends on nothing later."""
        rows: list[Tensor] = []
        state: Tensor | None = None
        for token in tokens:
            logits, state = self.step(token, state)
            rows.append(logits)
        return torch.stack(rows)


@torch.no_grad()
def sample_action(model: CausalGru, history: Sequence[int], length: int, generator: torch.Generator) -> list[int]:
    """`length` content tokens sampled at temperature 1 after a public history, and END.

    Other tokens are left out of the sampling only: SPOD scores an action by the model's raw probabilities. `generator`
    lives on the CPU, so that a seed draws the same numbers on every device.
    """
    logits, state = torch.empty(0), None
    for token in history:
        logits, state = model.step(token, state)
    action: list[int] = []
    for _ in range(length):
        weights = logits[CONTENT.start : CONTENT.stop].double().softmax(0).cpu()
        action.append(CONTENT.start + int(torch.multinomial(weights, 1, generator=generator)))
        logits, state = model.step(action[-1], state)
    return [*action, END]
