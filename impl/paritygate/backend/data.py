"""What a training request carries: a full token sequence and per-token lists, shifted here and nowhere else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tinker


@dataclass(frozen=True)
class Datum:
    """One sequence of a batch: `inputs` are the service's loss inputs, already shifted to the targets.

    tokens: the full sequence, length L. inputs: name -> list of length L - 1 (or (L - 1) x K for soft targets).
    """

    tokens: tuple[int, ...]
    inputs: dict[str, list[float] | list[int] | list[list[int]] | list[list[float]]]

    def to_tinker(self) -> "tinker.Datum":
        """The SDK's datum: model input tokens[:-1]."""
        import tinker

        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(self.tokens[:-1])), loss_fn_inputs=_arrays(self.inputs)
        )


def policy_gradient_datum(
    tokens: Sequence[int],
    mask: Sequence[int],
    sampler_logprobs: Sequence[float | None],
    advantages: Sequence[float | None],
) -> Datum:
    """A datum for importance_sampling, ppo or cispo: the four lists of length L of one trajectory, in nats.

    Lists are shifted by one (target_tokens = tokens[1:]); where mask is 0, logprob and advantage are sent as 0.0 in any
    case, since the wire has no mask key. Raises ValueError naming the position when lengths differ, when a
    masked-in entry is None or not finite, or when position 0, which nothing predicts, is masked in.
    """
    length = len(tokens)
    for name, values in (("mask", mask), ("sampler_logprobs", sampler_logprobs), ("advantages", advantages)):
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries for {length} tokens; they must be as long.")
    _check_length(length)
    if mask[0]:
        raise ValueError("Token 0 is masked in, but nothing predicts the first token; its mask must be 0.")
    return Datum(
        tuple(tokens),
        {
            "target_tokens": list(tokens[1:]),
            "logprobs": _masked("sampler_logprobs", sampler_logprobs, mask),
            "advantages": _masked("advantages", advantages, mask),
        },
    )


def cross_entropy_datum(tokens: Sequence[int], weights: Sequence[float]) -> Datum:
    """A datum for cross_entropy: weights[t] (length L) multiplies -log p(tokens[t]); weights[0] must be 0.

    Raises ValueError when the lengths differ, a weight is not finite, or position 0 has a weight.
    """
    if len(weights) != len(tokens):
        raise ValueError(f"weights has {len(weights)} entries for {len(tokens)} tokens; they must be as long.")
    _check_length(len(tokens))
    if weights[0]:
        raise ValueError("Token 0 has a weight, but nothing predicts the first token; its weight must be 0.")
    shifted = [_finite("weights", index + 1, weight) for index, weight in enumerate(weights[1:])]
    return Datum(tuple(tokens), {"target_tokens": list(tokens[1:]), "weights": shifted})


def soft_cross_entropy_datum(
    tokens: Sequence[int], target_ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
) -> Datum:
    """A datum for cross_entropy over K candidates a position: target_ids and weights are L x K, row 0 unused.

    Row t scores candidates for position t: the loss is -sum over k of weights[t][k] log p(target_ids[t][k]). Raises
    ValueError when the rows are not L x K each, or a weight is not finite.
    """
    length = len(tokens)
    _check_length(length)
    if len(target_ids) != length or len(weights) != length:
        raise ValueError(f"target_ids has {len(target_ids)} rows and weights {len(weights)} for {length} tokens.")
    width = len(target_ids[-1])
    for t in range(1, length):
        if len(target_ids[t]) != width or len(weights[t]) != width:
            raise ValueError(
                f"Row {t} has {len(target_ids[t])} ids and {len(weights[t])} weights, not {width} of each."
            )
    return Datum(
        tuple(tokens),
        {
            "target_tokens": [list(row) for row in target_ids[1:]],
            "weights": [[_finite("weights", t, w) for w in weights[t]] for t in range(1, length)],
        },
    )


def _check_length(length: int) -> None:
    if length < 2:
        raise ValueError(f"A sequence of {length} token(s) predicts nothing; at least 2 are needed.")


def _masked(name: str, values: Sequence[float | None], mask: Sequence[int]) -> list[float]:
    return [_finite(name, t, values[t]) if mask[t] else 0.0 for t in range(1, len(mask))]


def _finite(name: str, index: int, value: float | None) -> float:
    if value is None or not math.isfinite(value):
        raise ValueError(f"{name}[{index}] is {value}; a token that trains needs a finite number.")
    return float(value)


def _arrays(
    inputs: dict[str, list[float] | list[int] | list[list[int]] | list[list[float]]],
) -> "dict[str, tinker.TensorData]":
    import numpy as np
    import tinker

    return {
        name: tinker.TensorData.from_numpy(np.asarray(values, np.int64 if name == "target_tokens" else np.float32))
        for name, values in inputs.items()
    }
