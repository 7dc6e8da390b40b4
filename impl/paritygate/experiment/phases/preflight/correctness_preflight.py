"""The correctness preflight: parity green for this tree, both advantage paths against recorded numbers.

What a model makes of the losses, the service shows itself, in the phase service_proof.
"""

from pathlib import Path

from paritygate.errors import Refused
from paritygate.experiment.correctness import paths
from paritygate.experiment.correctness.comparison import Comparison
from paritygate.experiment.correctness.parity import is_full_run, show_entry_points, show_parity
from paritygate.experiment.run.entry_points import folder
from paritygate.experiment.run.journal import Record
from paritygate.experiment.run.outcome import Decided
from paritygate.experiment.run.state import State
from paritygate.receipts import ParityReceipt, canonical, write_atomic

EXPECTED = {"grpo_via_new_advantage_path", "sdpo_token_advantage"}


async def correctness_preflight(state: State) -> Decided:
    """Raises Refused (exit 3) unless parity holds and every comparison is within the spec's tolerances."""
    receipt = await show_parity(state)
    keep_alone(receipt, state.directory)
    receipts = await show_entry_points(state)
    copies = {name: keep_alone(shown, folder(state.directory, name)) for name, shown in receipts.items()}
    comparisons: list[Comparison] = []
    for path in state.exp.correctness_preflight.paths:
        if path.id not in EXPECTED:
            raise Refused(f"correctness path {path.id!r} is not one that this version can check: {sorted(EXPECTED)}.")
        state.progress.update(path.id)
        check = paths.grpo_path if path.id == "grpo_via_new_advantage_path" else paths.sdpo_path
        comparisons += check(path)
    failed = [comparison for comparison in comparisons if not comparison.passed]
    if failed:
        raise Refused(f"correctness preflight, {failed[0].sentence()}; the run does not start.")
    facts: Record = {
        "parity": receipt.sha256,
        "full_run": is_full_run(),  # whether parity was shown again, not only its receipt read
        "obligations": _covered(receipt, state.exp.losses),
        "entry_points": {name: shown.sha256 for name, shown in receipts.items()},
        "comparisons": [comparison.to_json() for comparison in comparisons],
        "cookbook": "live and recorded"
        if paths.cookbook_installed()
        else "recorded numbers (the pinned tinker-cookbook is not installed)",
    }
    losses = ", ".join([*state.exp.losses, *receipts])
    return Decided(
        f"parity holds for {losses}; {len(comparisons)} comparisons on both paths pass",
        f"{receipt.path.name} fits this tree; losses and gradients agree; cookbook: {facts['cookbook']}",
        facts,
        [receipt.path.name, *(str(path.relative_to(state.directory)) for path in copies.values())],
    )


def keep_alone(receipt: ParityReceipt, kept_in: Path) -> Path:
    """A copy of the receipt; a process that was killed in this phase may have left one of an earlier session."""
    for left in kept_in.glob("parity-*.json"):
        if left.name != receipt.path.name:
            left.unlink()
    path = kept_in / receipt.path.name
    write_atomic(path, canonical(receipt.statement))
    return path


def _covered(receipt: ParityReceipt, losses: tuple[str, ...]) -> Record:
    """How often each obligation of the arms' losses was compared, from the receipt."""
    obligations = receipt.part("obligations")
    return {name: value for name, value in obligations.items() if name.partition("/")[0] in losses}
