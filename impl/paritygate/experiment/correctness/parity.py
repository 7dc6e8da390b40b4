"""The guard of an experiment: against a service parity is shown again, on the embedded server its receipt is read."""

import asyncio
import os
from pathlib import Path

from paritygate.errors import BadInputError
from paritygate.experiment.run.entry_points import guarded
from paritygate.experiment.run.state import State
from paritygate.receipts import ParityReceipt, guard


def is_full_run() -> bool:
    """Whether the run goes against a service (TINKER_BASE_URL), and not to the embedded server."""
    return bool(os.environ.get("TINKER_BASE_URL"))


async def show_parity(state: State) -> ParityReceipt:
    """The receipt that lets this run start; for a full run parity is shown again by a pytest subprocess (or signed).

    Raises Refused (exit 3) with one sentence.
    """
    options = state.options
    return await asyncio.to_thread(
        guard,
        options.root,
        state.exp.losses,
        options.device,
        full_run=is_full_run(),
        trust_receipt=options.trust_receipt,
        say=state.progress.line,
    )


async def show_entry_points(state: State) -> dict[str, ParityReceipt]:
    """The same of each loss that an arm names by its entry point, in its own repository; raises Refused (exit 3)."""
    options = state.options
    full_run, trust = is_full_run(), options.trust_receipt
    return {
        name: await asyncio.to_thread(guarded, name, full_run=full_run, trust_receipt=trust, say=state.progress.line)
        for name in state.exp.entry_points
    }


async def show_parity_of_a_resumed_run(state: State) -> str | None:
    """Show parity again where the run began without a service and goes on at one: sha256 of what that left, else None.

    The receipt that the run began with still has to fit the tree (`require_parity`), so this can only refuse.
    """
    facts = state.facts("correctness_preflight")
    if not is_full_run() or facts.get("full_run", False) or not facts:
        return None
    await show_entry_points(state)
    return (await show_parity(state)).sha256


def refuse_another_service(directory: Path, began: str | None) -> None:
    """BadInputError (exit 2) when a run that used the embedded server goes on at a service, or the other way round.

    began: the endpoint that its service preflight recorded, None before. Its saved states lie there. A service may have
    moved to another address: that is not judged.
    """
    if began is None or (began == "embedded") != is_full_run():
        return
    here = os.environ.get("TINKER_BASE_URL") or "the embedded server"
    then = "the embedded server" if began == "embedded" else began
    raise BadInputError(
        f"{directory} was begun with {then}, where its weights are saved, and cannot go on at {here}: "
        + ("unset TINKER_BASE_URL." if began == "embedded" else f"set TINKER_BASE_URL={began}.")
    )
