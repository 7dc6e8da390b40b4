"""Running the component: input first (exit 2), then the parity receipt (exit 3), then every seed, then one new file."""

import dataclasses
import json as json_module
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError
from paritygate.receipts import guard, refuse_other_code, write_atomic
from paritygate.receipts.environment import require_device
from paritygate.spec.synthetic import Synthetic

ROOT = Path(__file__).resolve().parents[3]
DEFAULT_OUTPUT = Path("runs") / "spod-component.json"
MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class Outcome:
    """What a person or a machine reads after the command."""

    facts: dict[str, Any]
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON data."""
        return self.facts

    def text(self) -> str:
        """The facts in words."""
        return "\n".join(self.lines)


def run(
    spec: Synthetic,
    *,
    root: Path,
    output: Path | None = None,
    device: str = "cpu",
    seeds: str | Iterable[int] | None = None,
    quiet: bool = False,
    json: bool = False,
) -> Outcome:
    """Train every seed and write the artifact to `output`, a new .json file (by default runs/spod-component.json).

    Raises BadInputError (a seed, a device, an output that exists; nothing is touched), Refused (no parity receipt for
    this tree), GateStopped (a loss or gradient that is not finite).
    """
    spec = with_seeds(spec, seeds)
    target = checked_output(output or root / DEFAULT_OUTPUT)
    require_device(device)
    parity = guard(root, spec.losses, device)
    from paritygate.synthetic.artifact import artifact
    from paritygate.synthetic.training import train_seed

    def say(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    results = [train_seed(spec, seed, device, say) for seed in spec.seeds]
    refuse_other_code(root, parity)  # modules that were imported after the guard
    facts = artifact(root, spec, results, device=device, parity=parity)
    try:
        write_atomic(target, (json_module.dumps(facts, indent=1, allow_nan=False) + "\n").encode(), exclusive=True)
    except FileExistsError:
        raise BadInputError(f"--output {target} appeared while this ran; it was not overwritten.") from None
    except OSError as error:
        raise BadInputError(f"--output {target} cannot be written: {error.strerror}.") from error
    return Outcome({"output": str(target), **facts}, (*_table(facts), facts["note"], f"Written to {target}."))


def plan(
    spec: Synthetic,
    *,
    output: Path | None = None,
    device: str = "cpu",
    seeds: str | Iterable[int] | None = None,
    quiet: bool = False,
    json: bool = False,
) -> Outcome:
    """What `run` would do, and what its input would be refused for; nothing is run, written or refused here."""
    findings: list[str] = []
    target = output or ROOT / DEFAULT_OUTPUT
    for check in (lambda: with_seeds(spec, seeds), lambda: require_device(device), lambda: checked_output(target)):
        try:
            check()
        except BadInputError as error:
            findings.append(str(error))
    if not findings:
        spec = with_seeds(spec, seeds)
    states = spec.states_per_episode
    lines = (
        f"{spec.title} ({spec.recipe})",
        f"seeds {', '.join(map(str, spec.seeds))} on {device}: {spec.updates} updates of {spec.episodes_per_update} "
        f"episodes, {states.least} to {states.most} states each, {spec.action_tokens} tokens and an end token a state",
        f"output: {target}, a new file",
        f"before it may start: a green parity receipt for exactly this tree and device, of {', '.join(spec.losses)}",
        *(f"would be refused: {finding}" for finding in findings),
    )
    return Outcome({"spec": dict(spec.frozen), "seeds": list(spec.seeds), "findings": findings}, lines)


def with_seeds(spec: Synthetic, seeds: str | Iterable[int] | None) -> Synthetic:
    """`spec` with other seeds, in its frozen form too; BadInputError for what is no list of different seeds."""
    if seeds is None:
        return spec
    try:
        chosen = tuple(int(seed) for seed in (seeds.split(",") if isinstance(seeds, str) else seeds))
    except ValueError:
        chosen = ()
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= seed <= MAX_SEED for seed in chosen):
        raise BadInputError(f"--seeds {seeds}: expected different whole numbers from 0 to {MAX_SEED}, e.g. 42,43,44.")
    return dataclasses.replace(spec, seeds=chosen, frozen={**spec.frozen, "seeds": list(chosen)})


def checked_output(target: Path) -> Path:
    """The artifact's path, which does not exist and can be made; BadInputError otherwise."""
    if target.suffix != ".json":
        raise BadInputError(f"--output {target}: the synthetic component writes one file, whose name ends in .json.")
    if os.path.lexists(target):
        raise BadInputError(f"--output {target} exists and is never overwritten: name another file.")
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadInputError(f"--output {target}: {folder} is no folder that can be written to.")
    return target


def _table(facts: dict[str, Any]) -> list[str]:
    rows = [f"{facts['title']} ({facts['recipe']}, {facts['device']})"]
    rows.append(
        f"{'seed':>10} {'update':>6} {'loss':>9} {'gradient':>9} {'protected':>9} {'of':>4} {'below floor':>11}"
    )
    for result in facts["results"]:
        for update in result["updates"]:
            rows.append(
                f"{result['seed']:>10} {update['update']:>6} {update['loss']:>9.4f} {update['gradient_norm']:>9.4f} "
                f"{update['protected']:>9} {update['actions']:>4} {update['protected_below_floor']:>11}"
            )
    return rows
