"""The gate before a run: one call, one receipt, or one sentence that says why not."""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from paritygate import bootstrap
from paritygate.bootstrap import expect, refuse_foreign, refuse_optimised
from paritygate.errors import Refused
from paritygate.receipts import parity
from paritygate.receipts.origins import refuse_shadowed
from paritygate.receipts.parity import ParityReceipt
from paritygate.receipts.provenance import refuse_other_code
from paritygate.receipts.rerun import rerun_parity
from paritygate.receipts.signature import require_signature
from paritygate.spec.project import Project, project_around, project_at


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
    homes = project_at(root).homes
    refuse_foreign(root, homes)
    receipt = parity.require_parity(root, losses, device)
    refuse_shadowed(root, homes)
    refuse_other_code(root, receipt)
    if full_run and trust_receipt:
        principal = require_signature(root, receipt)
        say(f"{receipt.path.name} is trusted: signed by {principal}")
    elif full_run:
        say("a full run: showing parity again in a clean worktree")
        receipt = rerun_parity(root, receipt, device)
    expect(root, receipt.subjects)  # what is imported from here on, and by the embedded server, is what was proven
    return receipt


class NotStarted(Refused, SystemExit):
    """A script is refused: where nobody catches it, Python ends with exit code 3 and no traceback."""

    def __init__(self, sentence: str) -> None:
        Refused.__init__(self, sentence)
        self.code = self.exit_code


def require_parity(
    root: Path | str | None = None,
    losses: Iterable[str] = (),
    device: str = "cpu",
    *,
    resumed: Path | str | None = None,
) -> ParityReceipt:
    """A receipt that shows `losses` on `device` for exactly the code, the versions and the machine that are here.

    In a training script, `require_parity(losses=["gspo"])` before its own losses are imported: the repository is the
    one around the script (else around the working folder), its losses are imported here, from their sources, and a
    refusal ends the script with one sentence and exit code 3. With a `root`, as `receipts.parity.require_parity`:
    only the files there are judged. Raises Refused.
    """
    if root is not None:
        return parity.require_parity(root, losses, device, resumed=resumed)
    try:
        main: Any = getattr(sys.modules.get("__main__"), "__file__", None)
        place = Path(main).resolve().parent if main else Path.cwd()
        try:
            project = project_around(place)
        except Refused:
            project = project_around(Path.cwd())
        return _show_script(project, list(losses), device)
    except Refused as refusal:
        print(f"paritygate: {refusal}", file=sys.stderr)
        raise NotStarted(str(refusal)) from None


def _show_script(project: Project, losses: list[str], device: str) -> ParityReceipt:
    """The receipt for the losses of `project`, which are imported for it; raises Refused."""
    refuse_optimised("a training run")
    package = project.package
    if early := next((name for name in sys.modules if name == package or name.startswith(f"{package}.")), None):
        raise Refused(f"{early} was imported before require_parity: call it first, so that its source is what runs.")
    sys.path.insert(0, str(project.homes[package.partition(".")[0]]))
    bootstrap.read_sources_only(*project.homes.values(), Path(bootstrap.__file__).parent)
    refuse_foreign(project.root, project.homes)
    refuse_shadowed(project.root, project.homes)  # before the losses import it
    receipt = parity.require_parity(project.root, losses, device)
    for loss in losses:
        try:
            importlib.import_module(f"{package}.{loss}")
        except ImportError as error:
            raise Refused(f"{package}.{loss} cannot be imported: {error}.") from error
    refuse_shadowed(project.root, project.homes)
    refuse_other_code(project.root, receipt)
    return receipt
