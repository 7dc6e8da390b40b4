"""The decision, by the rule that was declared before any data."""

from paritygate.experiment.run.journal import Record, finite, read_lines
from paritygate.experiment.run.outcome import Decided, PhaseStopped
from paritygate.experiment.run.state import State
from paritygate.receipts import canonical, write_atomic
from paritygate.statistics import decide_frozen

VERDICT = "verdict.json"


async def decide(state: State) -> Decided:
    """The verdict from items.jsonl and the frozen spec alone, written to verdict.json."""
    items = read_lines(state.directory / "items.jsonl")
    verdict = decide_frozen(state.exp.frozen, items)
    write_atomic(state.directory / VERDICT, canonical(finite(verdict.to_json())))
    facts: Record = {"outcome": verdict.outcome}
    if verdict.outcome == "incomplete":
        raise PhaseStopped(Decided(verdict.why, "nothing is imputed", facts, [VERDICT, "items.jsonl"]))
    return Decided(verdict.why, "the pre-declared rule, nothing else", facts, [VERDICT, "items.jsonl"])
