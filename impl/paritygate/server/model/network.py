"""A transformers causal LM run on packed rows: any mix of sequences, positions and adapters in one forward pass.

Every row's result has the same bits whatever else is in the batch (design/030): rows are never fewer than
`min_rows`, and attention is computed sequence by sequence over key ranges that depend on the row's position only.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paritygate.errors import BadInputError
from paritygate.server.model.attention import PlainAttention, Span, cached
from paritygate.server.model.cache import Sequence
from paritygate.server.model.fused import fuse
from paritygate.server.model.layers import Layers
from paritygate.server.model.lora import BASE, Adapter, LoraLinear, Routes, Target, Weights, apply_linear
from paritygate.server.model.products import FrozenLinear, dots, log_normalizers, min_rows
from paritygate.server.model.shape import read_shape


class Attention(Protocol):
    """Attention of one pass, fp32: q (H, T, D), k and v (K, T, D) -> (H, T, D); `scale` multiplies the scores.

    `rows_read` are the rows whose final hidden states are asked for, None for all.
    """

    rows_read: Tensor | None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


class Network:
    """One loaded model; not thread-safe: one thread runs it. Weights are held in `dtype`, activations in float32."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoModelForCausalLM

        _register_attention()
        self.folder = folder
        self.dtype = dtype
        self.min_rows = min_rows(dtype)
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, use_safetensors=True, local_files_only=True, attn_implementation=_NAME
            )
        self.model: nn.Module = cast(nn.Module, model).eval().requires_grad_(False)
        self.arch = type(model).__name__
        self._fused: Layers | None = None
        self.shape = read_shape(model.config, model.generation_config)
        self.routes = Routes()
        self._attention: Attention | None = None
        self.body: Any = model.get_decoder() if hasattr(model, "get_decoder") else model.model
        model.get_input_embeddings().register_forward_hook(_in_float32)
        head = cast(nn.Linear, model.get_output_embeddings())
        names = {id(module): name for name, module in model.named_modules()}
        self._body_name, self._head_name = names[id(self.body)], names[id(head)]
        self.tied = model.get_input_embeddings().weight is head.weight
        self._head = FrozenLinear(head.weight, head.bias)
        self.targets = self._adapt()
        fuse(self.body)
        self._layers: list[Any] = [
            module
            for module in self.body.modules()
            if hasattr(module, "gradient_checkpointing") and module is not self.body
        ]
        for layer in self._layers:
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        self._check_packed_attention()
        self._fused = self._same_bits(Layers.of(self.body, dtype))

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Network":
        """The network of a folder that anybody may have written: BadInputError, in one line, for what cannot be."""
        try:
            return cls(folder, dtype)
        except BadInputError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise BadInputError(
                f"--model {folder}: transformers cannot load it ({type(error).__name__}: {reason})"
            ) from error

    def _check_packed_attention(self) -> None:
        """BadInputError unless packed rows give what the model gives by itself: no list of features can promise it."""
        length = min(32, self.shape.context)
        tokens = torch.arange(length) % self.shape.vocabulary
        with torch.no_grad(), self.routed([], PlainAttention(0, [length])):
            packed = self.forward(tokens, torch.arange(length)).float()
        config: Any = self.body.config
        config._attn_implementation = "eager"
        try:
            with torch.no_grad():
                plain = self.body(input_ids=tokens[None], use_cache=False).last_hidden_state[0].float()
        finally:
            config._attn_implementation = _NAME
        difference = float((packed - plain).norm() / plain.norm())
        # A wrong mask, scale or position moves this by tenths; rounding to bfloat16 by .04 over the layers of SmolLM2.
        if not difference <= (0.2 if dots(self.dtype) else 1e-4):
            raise BadInputError(
                f"{self.folder}: packed attention differs from the model's own by {difference:.2g} of the hidden "
                "states' norm, so this architecture is not supported"
            )

    def _same_bits(self, fused: Layers | None) -> Layers | None:
        """`fused`, if it gives the bits of the modules."""
        if fused is None:
            return None
        length = min(16, self.shape.context)
        tokens, positions = torch.arange(length) * 7 % self.shape.vocabulary, torch.arange(length)
        got: list[Tensor] = []
        for self._fused in (None, fused):
            sequence = Sequence(self.shape, tokens.tolist(), length)
            with torch.no_grad(), self.routed([(0, length, BASE)], cached([Span(sequence, 0, 0, length)], length)):
                got += [self.forward(tokens, positions), sequence.kv]
        return fused if torch.equal(got[0], got[2]) and torch.equal(got[1], got[3]) else None

    def _adapt(self) -> list[Target]:
        """Replace every linear layer of the body by one that adapters can reach; list what can be adapted."""
        targets: list[Target] = []
        for name, module in list(self.body.named_modules()):
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "_paritygate_network", self)
            if not isinstance(module, nn.Linear):
                continue
            kind = "attn" if "attn" in name else "mlp" if "mlp" in name else None
            if kind is None:
                raise BadInputError(
                    f"{self.folder}: layer {name} is neither attention nor MLP: this model is not known"
                )
            parent, _, leaf = name.rpartition(".")
            setattr(self.body.get_submodule(parent), leaf, LoraLinear(module, name, self.routes))
            targets.append(Target(name, kind, module.in_features, module.out_features))
        missing = {"attn", "mlp"} - {target.kind for target in targets}
        if missing:
            raise BadInputError(
                f"{self.folder}: no linear layers of {min(missing)} were found: this model is not known"
            )
        targets.append(Target("unembed", "unembed", self.shape.hidden, self.shape.vocabulary))
        return targets

    def module_name(self, target: str) -> str:
        """The name of an adapted layer in the whole transformers model."""
        return self._head_name if target == "unembed" else f"{self._body_name}.{target}"

    @contextlib.contextmanager
    def routed(self, ranges: list[tuple[int, int, Weights]], attention: Attention) -> Generator[None]:
        """Set which rows use which weights and what attends, for the passes (and their backward) inside."""
        self.routes.ranges, self._attention = ranges, attention
        try:
            yield
        finally:
            self.routes.ranges, self._attention = [], None

    def forward(self, tokens: Tensor, positions: Tensor, *, recompute: bool = False) -> Tensor:
        """(T,) ids at (T,) positions -> (T, hidden) final hidden states, of the rows that are read; inside `routed`.

        With `recompute`, layers keep only their input and run again in the backward pass: less memory, a third slower.
        """
        if self._fused is not None and self._fused.takes(self._attention, self.routes.ranges):
            rows = cast(Any, self.model).get_input_embeddings()(tokens)
            return self.body.norm(self._fused.forward(rows, positions, self.routes.ranges, self._attention))
        if self._fused is not None and self._fused.trains(self._attention, self.routes.ranges, len(tokens)):
            rows = cast(Any, self.model).get_input_embeddings()(tokens)
            adapter, attention = cast(Adapter, self.routes.ranges[0][2]), cast(PlainAttention, self._attention)
            return self.body.norm(self._fused.train(rows, positions, adapter, attention, recompute=recompute))
        for layer in self._layers:
            layer.gradient_checkpointing = recompute
            layer.training = recompute  # of the layer alone: its parts stay as they are, so nothing is dropped out
        out = self.body(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        rows = out.last_hidden_state[0]
        return rows if self._attention is None or self._attention.rows_read is None else rows[self._attention.rows_read]

    def head(self, hidden: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """(M, hidden) -> (M, vocabulary) logits, (M,) log sum exp of each row, all fp32."""
        count = hidden.shape[0]
        if count < self.min_rows:
            hidden = torch.cat([hidden, hidden.new_zeros(self.min_rows - count, hidden.shape[1])])
        logits = apply_linear(hidden, self._head, "unembed", [(0, hidden.shape[0], weights)])
        return logits[:count], log_normalizers(logits)[:count]

    def head_back(self) -> Callable[[Tensor], Tensor]:
        """What takes gradients of logits (M, vocabulary) to (M, hidden), but for an adapter's part."""
        return self._head.transposed()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        assert self._attention is not None, "attention outside a forward pass of the network"
        return self._attention.attend(layer, q, k, v, scale)


def _in_float32(module: nn.Module, arguments: Any, rows: Tensor) -> Tensor:
    """What every layer after the embedding is computed from: rounded to bfloat16 a step would be some percent off."""
    del module, arguments
    return rows.float()


@contextlib.contextmanager
def _no_progress_bar() -> Generator[None]:
    """Standard error belongs to the program that uses the server."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_NAME = "paritygate_packed"


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    network = cast(Network, module._paritygate_network)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = network.attend(cast(int, module.layer_idx), query[0], key[0], value[0], scale)
    return out.transpose(0, 1)[None], None


def _register_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _packed_attention)
