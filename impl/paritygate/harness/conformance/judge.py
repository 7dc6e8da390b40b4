"""One call of the function under test against its definition: what was returned, and what departs."""

import contextlib
import inspect
import io
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paritygate.harness import Unsupported
from paritygate.harness.conformance.functions import Array, Arrays, Function, Keywords, Outputs, Refusal

TOLERANCES = {
    "float64": (1e-8, 1e-11),
    "float32": (1e-5, 1e-6),
    "float16": (4e-3, 1e-3),
    "bfloat16": (3e-2, 4e-3),
}
"""(rtol, atol) of a value, and of a gradient where rtol is of its largest entry: loose enough for any sound order of
operations in that dtype. `pytest tests/parity` has the tolerances of the spec."""


@dataclass(frozen=True)
class Question:
    """A function, how it is asked for, and at which tolerance the answer is held to the definition."""

    function: Function
    call: Callable[..., Any]
    keywords: Keywords
    dtype: str
    tolerance: tuple[float, float]
    zero_is_fine: bool = False
    swap: tuple[int, int] | None = None

    def theirs(self, arrays: Arrays) -> Outputs | Refusal:
        """What the function under test makes of them; raises Unsupported."""
        return ask(self, arrays)

    def defined(self, arrays: Arrays) -> Outputs | Refusal:
        """What the definition makes of the same numbers."""
        try:
            return self.function.define(arrays, self.keywords)
        except ValueError as error:
            return Refusal("ValueError", str(error))

    def departures(self, arrays: Arrays) -> dict[str, str]:
        """Quantity ("value", "gradient", "answer") -> how it departs; {} where all agrees."""
        theirs, defined = self.theirs(arrays), self.defined(arrays)
        departing = compare(theirs, defined, self.tolerance, self.zero_is_fine)
        if departing and self.swap is not None:
            i, j = self.swap
            order = np.arange(arrays["student_logits"].shape[-1])
            order[i], order[j] = j, i
            swapped = {name: a[..., order] if a.ndim == 3 else a for name, a in arrays.items()}
            other = self.defined(swapped)
            if isinstance(other, Outputs) and other.gradient is not None:
                other = Outputs(other.value, other.gradient[..., order])
            departing = compare(theirs, other, self.tolerance, self.zero_is_fine)
        return departing


def rounded(arrays: Arrays, dtype: str) -> Arrays:
    """Floating arrays rounded to the dtype, as float64: what both sides are given."""
    kind = getattr(torch, dtype)
    return {
        name: torch.tensor(array, dtype=torch.float64).to(kind).double().numpy() if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }


def ask(question: Question, arrays: Arrays) -> Outputs | Refusal:
    """Call the function under test; raises Unsupported, and whatever is no Exception."""
    function, kind = question.function, getattr(torch, question.dtype)
    tensors = {
        name: torch.tensor(array, dtype=torch.float64).to(kind) if array.dtype.kind == "f" else torch.tensor(array)
        for name, array in arrays.items()
    }
    leaf = tensors.get(function.leaf or "")
    if leaf is not None:
        leaf.requires_grad_()
    named = {name: tensors[name] for name in function.by_keyword if name in tensors}
    positional = [tensors[name] for name in function.axes if name in tensors and name not in named]
    refuse_keywords(question, (*named, *question.keywords))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            value = question.call(*positional, **named, **question.keywords)
            return answer(value, leaf)
    except Unsupported:
        raise
    except Exception as error:
        return Refusal(type(error).__name__, (str(error).splitlines() or [""])[0][:200])


def refuse_keywords(question: Question, names: tuple[str, ...]) -> None:
    """Raise Unsupported for an option that the function's signature does not have."""
    try:
        parameters = inspect.signature(question.call).parameters.values()
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    if unknown := [name for name in names if name not in {parameter.name for parameter in parameters}]:
        raise Unsupported(f"it has no {unknown[0]}")


def answer(value: Any, leaf: torch.Tensor | None) -> Outputs:
    """The value, or its `loss`, and its gradient in `leaf` as float64; a loss that reaches it nowhere has one of 0."""
    value = getattr(value, "loss", value)
    result = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    gradient = None
    if leaf is not None:
        gradient = torch.zeros_like(leaf)
        if result.requires_grad:
            gradient = torch.autograd.grad(result.sum(), leaf, allow_unused=True, materialize_grads=True)[0]
        gradient = gradient.double().numpy()
    dtype = str(result.dtype).removeprefix("torch.")
    return Outputs(result.detach().double().cpu().numpy(), gradient, dtype)


def compare(
    theirs: Outputs | Refusal, defined: Outputs | Refusal, tolerance: tuple[float, float], zero_is_fine: bool = False
) -> dict[str, str]:
    """Quantity -> how `theirs` departs; a gradient that the definition has as NaN (the value is +inf) is not held."""
    if isinstance(defined, Refusal):
        if isinstance(theirs, Refusal):
            return {}
        nothing = not theirs.value.any() and (theirs.gradient is None or not theirs.gradient.any())
        return {} if zero_is_fine and nothing else {"answer": "given where the definition refuses"}
    if isinstance(theirs, Refusal):
        return {"answer": f"refused ({theirs.kind})"}
    departing = {"value": how(theirs.value, defined.value, tolerance, largest=False)}
    if defined.gradient is not None and not np.isnan(defined.gradient).any():
        given = np.zeros(()) if theirs.gradient is None else theirs.gradient
        departing["gradient"] = how(given, defined.gradient, tolerance, largest=True)
    return {quantity: text for quantity, text in departing.items() if text}


def how(actual: Array, expected: Array, tolerance: tuple[float, float], *, largest: bool) -> str:
    """In a word how `actual` departs, "" where it does not; `largest`: rtol is of the largest entry."""
    if actual.shape != expected.shape:
        return "of another shape"
    rtol, atol = tolerance
    finite = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    allowed = atol + rtol * (finite.max(initial=0.0) if largest else finite)
    with np.errstate(invalid="ignore"):
        agree = (np.abs(actual - expected) <= allowed) | (actual == expected)
    if bool(agree.all()):
        return ""
    if np.isnan(actual[~agree]).any():
        return "NaN"
    if not np.isfinite(actual[~agree]).all():
        return "infinite"
    return "finite where it is infinite" if not np.isfinite(expected[~agree]).all() else "another number"


def factor(pairs: list[tuple[Outputs, Outputs]], tolerance: tuple[float, float]) -> float | None:
    """The one constant that all of theirs are off by, value and gradient, or None."""
    constant = None
    for theirs, defined in pairs:
        for actual, expected in ((theirs.value, defined.value), (theirs.gradient, defined.gradient)):
            if actual is None or expected is None or not np.isfinite(expected).all() or not expected.any():
                continue
            if actual.shape != expected.shape or not np.isfinite(actual).all():
                return None
            at = np.unravel_index(int(np.abs(expected).argmax()), expected.shape)
            constant = float(actual[at] / expected[at]) if constant is None else constant
            if constant == 0.0 or how(actual / constant, expected, tolerance, largest=True):
                return None
    return constant


def plain_numbers(outputs: Outputs | Refusal) -> dict[str, Any]:
    """Value and gradient as JSON has them: infinities and NaN as strings."""
    if isinstance(outputs, Refusal):
        return {"refused": str(outputs)}
    result: dict[str, Any] = {"value": as_json(outputs.value)}
    if outputs.gradient is not None:
        result["gradient"] = as_json(outputs.gradient)
    return result


def as_json(array: Any) -> Any:
    """Nested lists of numbers; what JSON has no number for as "nan", "inf", "-inf"."""
    array = np.asarray(array)
    if array.ndim:
        return [as_json(part) for part in array]
    number = array.item()
    return number if isinstance(number, int) or np.isfinite(number) else str(number)


def inputs_as_json(arrays: Arrays, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays and keywords of a call."""
    return {name: as_json(array) for name, array in arrays.items()} | {
        name: as_json(value) if isinstance(value, float) else value for name, value in keywords.items()
    }
