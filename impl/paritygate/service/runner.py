"""Run the checks in order, judge each, confirm a departure and look for its smallest case."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from paritygate.errors import BackendError, BadInputError, printable, redacted
from paritygate.service.checks import CHECKS, Check
from paritygate.service.connection import ANSWERS, Broken, Lost, NoAnswer, Refusal
from paritygate.service.lab import Lab, measure_noise
from paritygate.service.obligations import Obligation, Obligations
from paritygate.service.outcome import OUTCOMES, Outcome, Undecided, judge

T = TypeVar("T")
SHAPE = (ValueError, IndexError, KeyError, TypeError, AttributeError)  # of what reads an answer of another shape


@dataclass(frozen=True)
class Result:
    """One obligation's outcome: what was measured, the bound that decided, why; `program` shows a departure."""

    name: str
    outcome: Outcome
    figure: float | None = None
    bound: float | None = None
    contrast: float | None = None
    because: str = ""
    program: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "because", printable(self.because))  # what a service said is in it
        object.__setattr__(self, "program", self.program and redacted(self.program))

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@contextmanager
def _in_one_sentence(lab: Lab) -> Generator[None]:
    """BackendError for what the service does not answer, or refuses, before anything can be checked."""
    try:
        yield
    except NoAnswer as error:
        raise BackendError(
            f"{lab.connection.base_url}: {error}; a slow service needs a larger --limit, one that speaks another wire "
            f"than tinker {version('tinker')} another SDK."
        ) from error
    except Refusal as error:
        raise BackendError(
            f"{lab.connection.base_url} refuses what every check starts with: {_ended(error)}"
        ) from error
    except Broken as error:
        raise BackendError(
            f"{lab.connection.base_url} fails at what every check starts with: {_ended(error)}"
        ) from error
    except SHAPE as error:
        raise BackendError(
            f"{lab.connection.base_url} fails at what every check starts with: an answer has another shape than "
            f"tinker {version('tinker')} reads ({type(error).__name__}: {_ended(error)[:-1]})."
        ) from error


def _ended(error: Exception | str) -> str:
    """What was said, with one full stop."""
    return f"{str(error).rstrip('.')}."


def first_contact(lab: Lab) -> list[str]:
    """Open a session and ask for the models; BackendError in one sentence where that fails."""
    with _in_one_sentence(lab):
        return list(lab.long.models())


def prepare(lab: Lab) -> None:
    """Open the session, warm and calibrate, measure the noise.

    Where an answer cannot be read, or no step does anything, `lab.unusable` says so, and the checks that need no warmed
    state find out by which obligation that is. Raises BackendError in one sentence for all else.
    """
    models = first_contact(lab)
    if models and lab.connection.model not in models:
        raise BadInputError(
            f"{lab.connection.base_url} does not serve {lab.connection.model!r}; it serves {', '.join(models)}."
        )
    with _in_one_sentence(lab):
        try:
            answered(lab, lambda: (lab.warmed(), lab.adam))
            lab.noise = answered(lab, lambda: measure_noise(lab))
        except (Broken, Undecided) as error:
            lab.unusable = str(error)
        except Refusal as error:
            if not error.by_sdk:
                raise
            lab.unusable = str(error)


def prove(
    lab: Lab, obligations: Obligations, done: Mapping[str, Result], report: Callable[[Result], None]
) -> list[Result]:
    """All results in order; those in `done` are not run again.

    Raises BackendError when the service is gone, or when it is unusable and no obligation says why.
    """
    results: dict[str, Result] = {}
    for entry in obligations.entries:
        result = done.get(entry.name) or run_one(lab, entry, results)
        results[entry.name] = result
        report(result)
    if lab.unusable and not any(result.outcome == "departs" for result in results.values()):
        raise BackendError(f"{lab.connection.base_url} cannot be proved: {_ended(lab.unusable)}")
    return list(results.values())


def run_one(lab: Lab, entry: Obligation, before: Mapping[str, Result]) -> Result:
    """Check one obligation. A departure counts when it shows twice, the second time with the smallest material."""
    check = CHECKS.get(entry.name)
    if check is None:
        raise BadInputError(f"{entry.name}: no check of that name; the obligations file is of another version.")
    fallen = [need for need in entry.needs if need in before and before[need].outcome == "departs"]
    result = _attempt(lab, entry, check)
    if result.outcome == "departs" and not fallen:
        result = _confirmed(lab, entry, check, result)
    if fallen and result.outcome in ("holds", "departs"):
        because = f"{result.because}; it stands on {fallen[0]}, which departs"
        return Result(entry.name, "undecided", result.figure, result.bound, result.contrast, because, result.program)
    return result


def _confirmed(lab: Lab, entry: Obligation, check: Check, first: Result) -> Result:
    limit = lab.connection.limit
    lab.small, lab.connection.limit = True, lab.connection.patience
    try:
        small = _attempt(lab, entry, check)
    finally:
        lab.small, lab.connection.limit = False, limit
    if small.outcome == "departs":
        return Result(entry.name, "departs", first.figure, first.bound, first.contrast, first.because, small.program)
    again = _attempt(lab, entry, check)
    if again.outcome == "departs":
        return again
    because = f"{first.because}; it departed once, and the second time not: {again.because}"
    return Result(entry.name, "undecided", again.figure, again.bound, again.contrast, because)


def _attempt(lab: Lab, entry: Obligation, check: Check) -> Result:
    journal, connection = lab.connection.journal, lab.connection

    def program(seen: str) -> str:
        return journal.program(connection.base_url, connection.model, seen)

    try:
        measured = answered(lab, lambda: check(lab))
    except (Undecided, *SHAPE) as error:
        because = str(error)
        if not isinstance(error, Undecided):  # answers of another shape than the check expects
            because = f"the check fails at the answers ({type(error).__name__}: {error}); please report it"
        return Result(entry.name, "undecided", because=because)
    except Refusal as error:
        if error.by_sdk:
            return Result(entry.name, "undecided", because=f"the SDK itself fails: {error}")
        return Result(entry.name, "refused", because=str(error))
    except Broken as error:
        return Result(entry.name, "departs", because=str(error), program=program(str(error)))
    except NoAnswer as error:
        shown = program(str(error))
        _still_there(lab, error)
        return Result(entry.name, "departs", because=f"hangs: {error}, while others are answered", program=shown)
    judged = judge(measured, entry.bound)
    shown = program(judged.because) if judged.outcome == "departs" else None
    return Result(
        entry.name,
        judged.outcome,
        _finite(measured.figure),
        judged.bound,
        _finite(measured.contrast),
        judged.because,
        shown,
    )


def answered(lab: Lab, check: Callable[[], T]) -> T:
    """`check` from its beginning, which restores what it needs; again where the service lost an answer, ANSWERS times.

    Raises Undecided where each time one is lost.
    """
    for left in range(ANSWERS - 1, -1, -1):
        try:
            with lab.connection.journal.check():
                return check()
        except Lost as error:
            if not left:
                raise Undecided(f"its answers were lost {ANSWERS} times: {error}") from None
            lab.renew()  # a client that waits for what is lost takes no further request
    raise AssertionError("unreachable: the last try returns or raises")


def _still_there(lab: Lab, error: NoAnswer) -> None:
    """A call without an answer says something about that call only where an ordinary one, of a new client, has one.

    The SDK sends a client's requests in order: behind a call that it repeats for ever, a client's next ones wait.
    """
    lab.renew()
    try:
        lab.held().forward(lab.probes())
    except (NoAnswer, Broken, Refusal) as later:
        raise BackendError(f"{lab.connection.base_url} stopped answering: {error}; then {later}.") from later


def _finite(value: float | None) -> float | None:
    return None if value is None or not abs(value) < float("inf") else float(value)


def outcomes(results: Iterable[Result]) -> dict[str, int]:
    """How many of each."""
    names = [result.outcome for result in results]
    return {name: names.count(name) for name in OUTCOMES}
