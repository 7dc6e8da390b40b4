"""Forward, backward and Adam for one adapter: packed datums in, logprobs and accumulated gradients out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paritygate.server.attention import PlainAttention
from paritygate.server.limits import RequestError
from paritygate.server.lora import Adapter
from paritygate.server.losses import Config, LossInputs, find_loss
from paritygate.server.network import MIN_ROWS, Network

CHUNK = 128  # rows of logits held at once


@dataclass(frozen=True)
class Datum:
    """`tokens` (N) fed to the model, and what the loss reads; position i predicts `target_tokens[i]`."""

    tokens: list[int]
    inputs: LossInputs


@dataclass
class Outcome:
    """Logprobs of every target, shaped as the targets, per datum; the summed loss."""

    logprobs: list[Tensor] = field(default_factory=list[Tensor])
    loss: float = 0.0


@dataclass(frozen=True)
class AdamParams:
    """One step's hyperparameters; defaults are the SDK's. `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class Pass:
    """One forward_backward request as bounded pieces: iterate `steps()`, then read `outcome`."""

    recompute_over = 2048  # tokens of a piece from which activations are recomputed: 4 MB a token for 135M parameters

    def __init__(
        self, network: Network, adapter: Adapter, data: list[Datum], loss: str, config: Config, *, forward_only: bool
    ) -> None:
        self.network = network
        self.adapter = adapter
        self.data = data
        self.loss, _ = find_loss(loss, config)
        self.config = config
        self.forward_only = forward_only
        self.outcome = Outcome()

    def steps(self, budget: int) -> Iterator[None]:
        """Run the datums in order, whole sequences packed up to `budget` tokens a piece.

        Gradients reach the adapter only when every piece has succeeded.
        """
        gradients: dict[str, Tensor] = {}
        piece: list[Datum] = []
        for datum in self.data:
            if piece and sum(len(d.tokens) for d in piece) + len(datum.tokens) > budget:
                self._piece(piece, gradients)
                yield
                piece = []
            piece.append(datum)
        self._piece(piece, gradients)
        for name, parameter in self.adapter.parameters():
            if name in gradients:
                total = gradients[name]
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        yield

    def _piece(self, data: list[Datum], gradients: dict[str, Tensor]) -> None:
        lengths = [len(datum.tokens) for datum in data]
        padding = max(0, MIN_ROWS - sum(lengths))
        tokens = torch.tensor([token for datum in data for token in datum.tokens] + [0] * padding)
        positions = torch.cat([torch.arange(n) for n in [*lengths, *([padding] if padding else [])]])
        attention = PlainAttention([*lengths, *([padding] if padding else [])])
        with self.network.routed([(0, len(tokens), self.adapter)], attention):
            with torch.set_grad_enabled(not self.forward_only):
                hidden = self.network.forward(tokens, positions, recompute=sum(lengths) > self.recompute_over)
            wanted, rows = self._losses(data, hidden[: sum(lengths)].detach())
            if not self.forward_only:
                self._backward(hidden, rows, data, wanted, gradients)

    def _losses(self, data: list[Datum], rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs and losses of a piece from its hidden states; returns (d loss / d logprobs, rows)."""
        with torch.no_grad():
            logprobs = torch.cat(
                [
                    self._logprobs(rows[start : start + CHUNK], targets)
                    for start, targets in _chunks([d.inputs.target_tokens for d in data])
                ]
            )
        return self._loss_gradients(data, logprobs.split([len(d.tokens) for d in data])), rows

    def _loss_gradients(self, data: list[Datum], logprobs: tuple[Tensor, ...]) -> Tensor:
        """Add each datum's loss and logprobs to the outcome; return d loss / d logprobs, rows of (K,) end to end."""
        wanted: list[Tensor] = []
        width = max(values.shape[1] for values in logprobs)
        for datum, values in zip(data, logprobs, strict=True):
            shape = datum.inputs.target_tokens.shape
            columns = 1 if len(shape) == 1 else shape[1]
            leaf = values[:, :columns].reshape(shape).clone().requires_grad_()
            loss = self.loss(leaf, datum.inputs, self.config)
            if not bool(torch.isfinite(loss)):
                raise RequestError(
                    f"the loss of datum {len(self.outcome.logprobs)} is {float(loss.detach())}: check its sampling "
                    "logprobs and advantages"
                )
            self.outcome.loss += float(loss.detach())
            self.outcome.logprobs.append(leaf.detach())
            (grad,) = torch.autograd.grad(loss, leaf)
            wanted.append(torch.nn.functional.pad(grad.reshape(len(values), -1), (0, width - columns)))
        return torch.cat(wanted)

    def _logprobs(self, hidden: Tensor, targets_MK: Tensor) -> Tensor:
        """(M, hidden), (M, K) ids -> (M, K) fp32 logprobs."""
        count = hidden.shape[0]
        if count < MIN_ROWS:
            hidden = torch.cat([hidden, hidden.new_zeros(MIN_ROWS - count, hidden.shape[1])])
        logits = self.network.head(hidden, [(0, hidden.shape[0], self.adapter)])[:count].float()
        return logits.gather(1, targets_MK) - torch.logsumexp(logits, 1, keepdim=True)

    def _backward(
        self, hidden: Tensor, rows: Tensor, data: list[Datum], wanted: Tensor, gradients: dict[str, Tensor]
    ) -> None:
        """Differentiate sum(wanted * logprobs): through the head where it is not 0, then through the body."""
        targets = torch.cat([_columns(d.inputs.target_tokens, wanted.shape[1]) for d in data])
        needed = (wanted != 0).any(1).nonzero()[:, 0]
        if len(needed) == 0:
            return
        named = list(self.adapter.parameters())
        head = [(n, p) for n, p in named if n.startswith("unembed.")]
        body = [(n, p) for n, p in named if not n.startswith("unembed.")]
        into_hidden = torch.zeros_like(rows)
        for index in needed.split(CHUNK):
            leaf = rows[index].requires_grad_()
            value = (wanted[index] * self._logprobs(leaf, targets[index])).sum()
            grads = torch.autograd.grad(value, [leaf, *(p for _, p in head)])
            into_hidden[index] = grads[0]
            _add(gradients, head, grads[1:])
        if body:
            full = torch.zeros_like(hidden)
            full[: len(rows)] = into_hidden
            _add(gradients, body, torch.autograd.grad(hidden, [p for _, p in body], full))


def adam_step(adapter: Adapter, params: AdamParams) -> float:
    """Apply the accumulated gradients (absent ones count as 0) and clear them; return their norm before clipping.

    AdamW with decoupled weight decay, as torch.optim.AdamW, which the SDK's documentation names.
    """
    named = list(adapter.parameters())
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
    norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])))
    if not math.isfinite(norm):
        for _, parameter in named:
            parameter.grad = None
        raise RequestError(
            f"optim_step: the gradient norm is {norm}; no weight was changed, the gradients were dropped"
        )
    clip = params.grad_clip_norm
    factor = clip / norm if 0 < clip < norm else 1.0
    adapter.steps += 1
    first, second = 1 - params.beta1**adapter.steps, 1 - params.beta2**adapter.steps
    with torch.no_grad():
        for name, parameter in named:
            grad = grads[name] * factor
            m, v = adapter.moments.get(name) or (torch.zeros_like(parameter), torch.zeros_like(parameter))
            m.mul_(params.beta1).add_(grad, alpha=1 - params.beta1)
            v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
            adapter.moments[name] = (m, v)
            parameter.mul_(1 - params.learning_rate * params.weight_decay)
            parameter.addcdiv_(m / first, (v / second).sqrt_().add_(params.eps), value=-params.learning_rate)
            parameter.grad = None
    return norm


def _chunks(targets: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """(start, (M, K) ids) of CHUNK rows at a time; K is the widest of the datums, narrower ones
    repeat their first id."""
    width = max(1 if t.ndim == 1 else t.shape[1] for t in targets)
    every = torch.cat([_columns(t, width) for t in targets])
    for start in range(0, len(every), CHUNK):
        yield start, every[start : start + CHUNK]


def _columns(targets: Tensor, width: int) -> Tensor:
    ids = targets[:, None] if targets.ndim == 1 else targets
    return ids if ids.shape[1] == width else torch.cat([ids, ids[:, :1].expand(-1, width - ids.shape[1])], 1)


def _add(gradients: dict[str, Tensor], named: list[tuple[str, Tensor]], grads: tuple[Tensor, ...]) -> None:
    for (name, _), grad in zip(named, grads, strict=True):
        gradients[name] = gradients[name] + grad if name in gradients else grad
