"""What an adapter can offer, and what each function is held to: inputs, options, definition, stresses, promises."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]
Keywords = Mapping[str, Any]


class Outputs(NamedTuple):
    """A value of any shape, its gradient in the differentiated argument (None: it has none), the value's dtype."""

    value: Array
    gradient: Array | None
    dtype: str = "float64"


class Refusal(NamedTuple):
    """Why nothing was returned: the exception's type and sentence."""

    kind: str
    sentence: str

    def __str__(self) -> str:
        """For a person: `ValueError: ...`."""
        return f"{self.kind}: {self.sentence}" if self.sentence else self.kind


class Option(NamedTuple):
    """One way to ask for a function: its name in a report, the keywords, what it shares with others (its group)."""

    label: str
    keywords: dict[str, Any]
    group: str = ""


@dataclass(frozen=True)
class Stress:
    """Inputs at which losses go wrong.

    make: draws the arrays for an option, None where it does not apply. inside: whether arrays are still of this kind,
    which keeps the smallest input what it is called. tolerance: other (rtol, atol) than the dtype's. zero_is_fine: an
    answer of 0 with a gradient of 0 is as good as a refusal. either: the inputs as another tie would have it.
    """

    name: str
    make: Callable[[np.random.Generator, Keywords], Arrays | None]
    inside: Callable[[Arrays, Keywords], bool]
    dtypes: tuple[str, ...] = ("float64",)
    tolerance: tuple[float, float] | None = None
    zero_is_fine: bool = False
    either: Callable[[Arrays, Keywords], tuple[int, int]] | None = None


class Refused(NamedTuple):
    """An input that has to be refused: what is wrong with it, arrays, further keywords."""

    what: str
    arrays: Arrays
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Function:
    """A function of an adapter: `name` as in paritygate.losses, `arrays` in the order of its arguments.

    axes: the axes of each array by name ("BTV"), along which the smallest input is looked for. leaf: the argument that
    is differentiated. draw: plain inputs. define: value and gradient by the reference. inside: which arrays are an
    input at all. refused: what `paritygate.losses` refuses.
    """

    name: str
    axes: dict[str, str]
    leaf: str | None
    options: tuple[Option, ...]
    draw: Callable[[np.random.Generator, Keywords], Arrays]
    define: Callable[[Arrays, Keywords], Outputs]
    inside: Callable[[Arrays], bool]
    stresses: tuple[Stress, ...] = ()
    refused: tuple[Refused, ...] = ()
    by_keyword: frozenset[str] = field(default_factory=frozenset[str])
    tie_order: bool = False

    @property
    def module(self) -> str:
        """The submodule that the function stands in."""
        return self.name.partition(".")[0]


def reference(module: str) -> Any:
    """The definitions of a loss; only a process that holds other implementations asks for them, a run never does."""
    return importlib.import_module(f"paritygate_reference.{module}")


def found_in(adapter: Any, function: Function) -> Callable[..., Any] | None:
    """The adapter's function, or None where it has none."""
    home = getattr(adapter, function.module, None)
    if home is None and hasattr(adapter, "__path__"):
        try:
            home = importlib.import_module(f"{adapter.__name__}.{function.module}")
        except ModuleNotFoundError as error:
            if error.name != f"{adapter.__name__}.{function.module}":
                raise
    return getattr(home, function.name.partition(".")[2], None)
