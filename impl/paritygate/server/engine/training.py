"""Forward, backward and Adam for one adapter: packed datums in, logprobs and accumulated gradients out."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paritygate.server.engine.losses import Config, LossInputs, find_loss
from paritygate.server.errors import RequestError
from paritygate.server.model.attention import PlainAttention
from paritygate.server.model.lora import Adapter
from paritygate.server.model.network import Network
from paritygate.server.model.products import normalizers_back

CHUNK = 192  # rows of logits computed at once
KEPT = 1 << 29  # bytes of logits that wait for their gradient; those of further rows are computed again


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


class Packing:
    """Datums as rows of one forward pass: what all of them begin with once, then the rest of each, end to end.

    Shared are the rows on which all agree in token and targets: a prompt that rollouts have in common is computed once.
    """

    def __init__(self) -> None:
        self.data: list[Datum] = []
        self.tables: list[Tensor] = []  # (N, 1 + K): token and the targets asked for
        self.shared = 0

    def add(self, datum: Datum) -> None:
        """Append a datum; the pass sees it with the others."""
        self.shared = self._shared_with(datum)
        self.data.append(datum)
        self.tables.append(_table(datum))

    def rows_with(self, datum: Datum) -> int:
        """Rows of the pass if `datum` were added."""
        shared = self._shared_with(datum)
        return shared + sum(len(d.tokens) - shared for d in [*self.data, datum])

    def _shared_with(self, datum: Datum) -> int:
        if not self.data:
            return len(datum.tokens)
        first, new = self.tables[0], _table(datum)
        if first.shape[1] != new.shape[1]:
            return 0
        length = min(self.shared, len(new))
        different = (first[:length] != new[:length]).any(1).nonzero()
        return int(different[0, 0]) if len(different) else length

    def laid_out(self) -> "Layout":
        """The rows themselves."""
        width = max(table.shape[1] for table in self.tables)
        tables = [torch.cat([t, t[:, 1:2].expand(-1, width - t.shape[1])], 1) for t in self.tables]
        shared, rests = self.shared, [len(t) - self.shared for t in tables]
        joined = torch.cat([tables[0][:shared], *(t[shared:] for t in tables)])
        places = [torch.arange(len(t)) for t in tables]
        positions = torch.cat([torch.arange(shared), *(place[shared:] for place in places)])
        starts = itertools.accumulate(rests, initial=0)  # datum i, position p >= shared is row p + starts[i]
        indices = [torch.where(p < shared, p, p + start) for p, start in zip(places, starts, strict=False)]
        return Layout(joined[:, 0], positions, joined[:, 1:], shared, rests, indices)


@dataclass(frozen=True)
class Layout:
    """`tokens` and `positions` (R,), `targets` (R, K; narrower ones repeat their first id); the first `shared` rows
    begin every datum, `rests` are the rows that each adds, `indices[i]` the rows of datum i in order."""

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    shared: int
    rests: list[int]
    indices: list[Tensor]


def _table(datum: Datum) -> Tensor:
    targets = datum.inputs.target_tokens
    return torch.cat([torch.tensor(datum.tokens)[:, None], targets[:, None] if targets.ndim == 1 else targets], 1)


class Pass:
    """One forward_backward request as bounded pieces: iterate `steps()`, then read `outcome`."""

    recompute_over = 2048  # tokens of a piece from which activations are recomputed: 1 MB a token for 135M parameters

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
        """Run the datums in order, whole sequences packed up to `budget` rows a piece.

        Gradients reach the adapter only when every piece has succeeded.
        """
        gradients: dict[str, Tensor] = {}
        packing = Packing()
        for datum in self.data:
            if packing.data and packing.rows_with(datum) > budget:
                self._piece(packing, gradients)
                yield
                packing = Packing()
            packing.add(datum)
        self._piece(packing, gradients)
        for name, parameter in self.adapter.parameters():
            if name in gradients:
                total = gradients[name]
                parameter.grad = total if parameter.grad is None else parameter.grad + total
        yield

    def _piece(self, packing: Packing, gradients: dict[str, Tensor]) -> None:
        layout = packing.laid_out()
        count = len(layout.tokens)
        padding = max(0, self.network.min_rows - count)
        tokens = torch.cat([layout.tokens, torch.zeros(padding, dtype=torch.long)])
        positions = torch.cat([layout.positions, torch.arange(padding)])
        attention = PlainAttention(layout.shared, [*layout.rests, padding])
        with self.network.routed([(0, len(tokens), self.adapter)], attention):
            with torch.set_grad_enabled(not self.forward_only):
                hidden = self.network.forward(tokens, positions, recompute=count > self.recompute_over)
            rows = hidden[:count].detach()
            kept: list[Scores | None] = []
            each_logprobs: list[Tensor] = []
            for part, targets in zip(rows.split(CHUNK), layout.targets.split(CHUNK), strict=True):
                scores = self._scores(part)
                logits, normalizers = scores
                each_logprobs.append(logits.gather(1, targets).float() - normalizers[:, None])
                waits = not self.forward_only and (len(kept) + 1) * logits.nbytes <= KEPT
                kept.append(scores if waits else None)
            logprobs = torch.cat(each_logprobs)
            each = self._loss_gradients(packing.data, tuple(logprobs[index] for index in layout.indices))
            if not self.forward_only:
                grad_logprobs = torch.zeros_like(logprobs).index_add_(0, torch.cat(layout.indices), each)
                self._backward(hidden, kept, layout.targets, grad_logprobs, gradients)

    def _loss_gradients(self, data: list[Datum], logprobs: tuple[Tensor, ...]) -> Tensor:
        """Add each datum's loss and logprobs to the outcome; return d loss / d logprobs, rows of (K,) end to end."""
        grad_logprobs: list[Tensor] = []
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
            grad_logprobs.append(torch.nn.functional.pad(grad.reshape(len(values), -1), (0, width - columns)))
        return torch.cat(grad_logprobs)

    def _scores(self, rows: Tensor) -> "Scores":
        """(M, hidden) -> (M, V) logits and (M,) log sum exp of each row, fp32, without a graph."""
        with torch.no_grad():
            return self.network.head(rows, self.adapter)

    def _backward(
        self,
        hidden: Tensor,
        kept: "list[Scores | None]",
        targets: Tensor,
        grad_logprobs: Tensor,
        gradients: dict[str, Tensor],
    ) -> None:
        """Differentiate sum(grad_logprobs * logprobs): through the head where it is not 0, then through the body.

        `kept` are the scores of every CHUNK rows, overwritten, or None: they are computed again.
        """
        if not bool((grad_logprobs != 0).any()):
            return
        body = [(n, p) for n, p in self.adapter.parameters() if not n.startswith("unembed.")]
        back = self.network.head_back()
        grad_hidden = torch.zeros_like(hidden)
        for i, start in enumerate(range(0, len(targets), CHUNK)):
            part = slice(start, min(start + CHUNK, len(targets)))
            needed = (grad_logprobs[part] != 0).any(1).nonzero()[:, 0]
            scores, kept[i] = kept[i], None
            if len(needed) == 0:
                continue
            index = needed + start
            rows = hidden.detach()[index]
            if scores is None:
                scores = self._scores(rows)
            elif len(needed) < part.stop - part.start:
                scores = scores[0][needed], scores[1][needed]
            grad_logits = normalizers_back(*scores, grad_logprobs[index].sum(1))
            grad_logits.scatter_add_(1, targets[index], grad_logprobs[index])
            grad_rows = back(grad_logits)
            with torch.no_grad():
                delta = self.adapter.gradients("unembed", rows, grad_logits)
            if delta is not None:
                grad_rows = grad_rows + delta[0]
                _add(gradients, ["unembed.lora_A", "unembed.lora_B"], delta[1:])
            grad_hidden[index] = grad_rows
        if body:
            _add(gradients, [n for n, _ in body], torch.autograd.grad(hidden, [p for _, p in body], grad_hidden))


Scores = tuple[Tensor, Tensor]  # (M, V) logits, (M,) log sum exp of each row


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


def _add(gradients: dict[str, Tensor], names: list[str], grads: tuple[Tensor, ...]) -> None:
    for name, grad in zip(names, grads, strict=True):
        gradients[name] = gradients[name] + grad if name in gradients else grad
