"""The gate before a run: one call, one receipt, or one sentence that says why not."""

from collections.abc import Callable, Iterable
from pathlib import Path

from paritygate.bootstrap import refuse_foreign, refuse_optimised
from paritygate.receipts.origins import refuse_shadowed
from paritygate.receipts.parity import ParityReceipt, require_parity
from paritygate.receipts.provenance import refuse_other_code
from paritygate.receipts.rerun import rerun_parity
from paritygate.receipts.signature import require_signature


def guard(
    root: Path | str,
    losses: Iterable[str],
    device: str,
    *,
    full_run: bool = False,
    trust_receipt: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> ParityReceipt:
    """The parity receipt that lets a run of `losses` on `device` start from the checkout at `root`.

    A full run (against a service) does not take a receipt's word: parity is run again in a clean worktree, or, with
    `trust_receipt`, the receipt must carry a signature by a key in spec/allowed_signers. `say` hears what takes long.
    Raises Refused (exit 3) with one sentence.
    """
    root = Path(root).resolve()
    refuse_optimised("a run")
    refuse_foreign(root)
    receipt = require_parity(root, losses, device)
    refuse_shadowed(root)
    refuse_other_code(root, receipt)
    if full_run and trust_receipt:
        principal = require_signature(root, receipt)
        say(f"{receipt.path.name} is trusted: signed by {principal}")
    elif full_run:
        say("a full run: showing parity again in a clean worktree")
        receipt = rerun_parity(root, receipt, device)
    return receipt
