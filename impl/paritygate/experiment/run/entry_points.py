"""A loss of an arm that another repository has: found by its entry point, guarded by that repository's own receipt.

A distribution offers it in the group `paritygate.losses`: `gspo = "my_losses.gspo:advantages"`; an arm names it
`my_losses:gspo`, its top-level package and the name of the loss in that repository's spec. Design/021 has the steps.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from paritygate import bootstrap
from paritygate.bootstrap import refuse_foreign
from paritygate.errors import BadInputError, Refused
from paritygate.receipts import ParityReceipt, require_parity, rerun_parity
from paritygate.receipts.origins import refuse_shadowed
from paritygate.receipts.provenance import refuse_other_sources
from paritygate.receipts.signature import require_signature
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import load_losses, required, shortfalls
from paritygate.spec.project import Project, project_around

GROUP = "paritygate.losses"
FOLDER = "losses"
"""Where a run keeps the parity receipts of such losses: losses/PACKAGE.LOSS/parity-<sha256>.json."""
DEVICE = "cpu"  # advantages of an experiment are computed on the CPU


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One rollout of a group, as long as its tokens (L,): nats, NaN where nothing was scored.

    composite: the judge's, in [0, 1]. mask: 1 on the tokens that the policy sampled. logprobs: the policy's, as it
    sampled or scored again. teacher_logprobs: of the same tokens by the teacher; None where the arm asks for none.
    """

    composite: float
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    teacher_logprobs: tuple[float, ...] | None


class GroupAdvantages(Protocol):
    """What an entry point of `paritygate.losses` is: the rollouts of one task in, one advantage a token (L,) out.

    A row a rollout, finite, 0 where the mask is 0. Sent to `importance_sampling`, whose gradient in a token's logprob
    at the weights that sampled is minus its advantage: a loss of logprobs trains by minus its gradient there. Rollouts
    without a judgement are left out of the group. A ValueError stops the run with its sentence.
    """

    def __call__(self, group: Sequence[ScoredRollout], /) -> Sequence[Sequence[float]]: ...


def find(name: str) -> importlib.metadata.EntryPoint:
    """The entry point behind PACKAGE:LOSS; raises BadInputError (exit 2) where no installed distribution offers it."""
    offered = {
        f"{one.module.partition('.')[0]}:{one.name}": one for one in importlib.metadata.entry_points(group=GROUP)
    }
    if name not in offered:
        others = f"those there are {', '.join(sorted(offered))}" if offered else "there are none"
        raise BadInputError(
            f"no installed distribution offers the loss {name} in the entry point group {GROUP}; {others}."
        )
    return offered[name]


def project_of(name: str) -> Project:
    """The repository that proves PACKAGE:LOSS, from where its package is imported; raises BadInputError or Refused."""
    package = find(name).module.partition(".")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise BadInputError(f"the loss {name} is offered by an installed distribution, but {package} is nowhere.")
    place = Path(spec.origin).resolve().parent
    try:
        project = project_around(place)
    except Refused:
        project = None
    if project is None or project.package != package:
        raise Refused(
            f"{package} is imported from {place}, which is the implementation of no repository with "
            "[tool.paritygate]: there its parity would be shown; install it from there with `pip install -e`."
        )
    return project


def require(name: str, run_dir: Path | None = None) -> ParityReceipt:
    """The receipt that shows the loss for the bytes that are there now; Refused (exit 3) where none does.

    run_dir: a run that goes on, which has to have been begun with these bytes.
    """
    root, loss = project_of(name).root, name.partition(":")[2]
    try:
        return require_parity(root, [loss], DEVICE, resumed=run_dir and folder(run_dir, name))
    except Refused as refusal:
        raise Refused(f"the loss {name} of {root}: {refusal}") from refusal


def guarded(
    name: str, *, full_run: bool, trust_receipt: bool, say: Callable[[str], None] = lambda line: None
) -> ParityReceipt:
    """What `paritygate.receipts.guard` asks of a run's own losses, of this one; raises Refused (exit 3)."""
    root, receipt = project_of(name).root, require(name)
    if full_run and trust_receipt:
        say(f"{receipt.path.name} of {name} is trusted: signed by {require_signature(root, receipt)}")
    elif full_run:
        say(f"a full run: showing parity of {name} again in a clean worktree of {root}")
        receipt = rerun_parity(root, receipt, DEVICE)
    imported(name, receipt)
    return receipt


@functools.cache
def load(name: str) -> GroupAdvantages:
    """The function behind a loss whose bytes have a receipt; raises BadInputError or Refused."""
    return imported(name, require(name))


def imported(name: str, receipt: ParityReceipt) -> GroupAdvantages:
    """The function, imported from its sources; Refused where what was loaded is not what `receipt` was shown for."""
    project, point = project_of(name), find(name)
    package = project.package
    for module, loaded in sorted(sys.modules.items()):
        ours = module == package or module.startswith(f"{package}.")
        if ours and str(Path(loaded.__file__ or "").resolve()) not in bootstrap.LOADED:
            raise Refused(f"{module} was imported before its loss was guarded: nothing says which bytes run.")
    if package not in sys.modules:
        bootstrap.read_sources_only(*project.homes.values())
    try:
        function = point.load()
    except (ImportError, AttributeError) as error:
        raise Refused(f"the loss {name} cannot be imported from {point.value}: {error}.") from error
    refuse_foreign(project.root, project.homes)
    refuse_shadowed(project.root, project.homes)
    refuse_other_sources(project.root, receipt)
    if not callable(function):
        raise Refused(f"the loss {name} is {point.value}, which is no function of a group's rollouts.")
    return cast("GroupAdvantages", function)


def folder(run_dir: Path, name: str) -> Path:
    """Where the run keeps the receipt of the loss."""
    return run_dir / FOLDER / name.replace(":", ".")


def as_it_ran(name: str, receipt: ParityReceipt) -> GroupAdvantages:
    """The function of a finished run, to compute its advantages anew; Refused where its sources here are others."""
    try:
        project = project_of(name)
    except BadInputError as error:
        raise Refused(f"{error} Its advantages cannot be computed anew without it.") from error
    if change := difference(receipt.subjects, subjects(project.root)):
        raise Refused(f"{project.root}/{change} since parity was shown for the loss {name} ({receipt.path.name}).")
    wanted = required(load_losses(project.root), DEVICE, [name.partition(":")[2]])
    if missing := shortfalls(wanted, receipt.part("obligations")):
        raise Refused(f"{receipt.path} does not cover the loss {name}: {missing[0]}.")
    return imported(name, receipt)
