"""Parity receipts: an in-toto statement (test-result) of what was shown, for which bytes, on which machine."""

import hashlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritygate.errors import Refused
from paritygate.receipts.environment import DECIDING, environment, installed
from paritygate.receipts.files import canonical, digest, read_canonical, write_atomic
from paritygate.receipts.git import git
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import device_class, load_losses, required, shortfalls
from paritygate.spec.project import project_at
from paritygate.spec.schema import check_schema
from paritygate.spec.strict import read_plain

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
NAME = re.compile(r"parity-([0-9a-f]{64})\.json")
WRITTEN = (":!receipts", ":!runs")
HOW = "run `pytest tests/parity` and try again"


@dataclass(frozen=True)
class ParityReceipt:
    """A receipt that was read and is whole: its file, the sha256 of its bytes (its name), and the statement."""

    path: Path
    sha256: str
    statement: dict[str, Any]

    @property
    def subjects(self) -> dict[str, str]:
        """Path -> sha256 of every file that the receipt is about (the installed versions left out)."""
        named = {entry["name"]: entry["digest"]["sha256"] for entry in self.statement["subject"]}
        return {name: value for name, value in named.items() if name != "installed"}

    def part(self, name: str) -> dict[str, Any]:
        """The `environment`, `installed`, `hypothesis`, `session` or `obligations` part of its configuration."""
        for entry in self.statement["predicate"]["configuration"]:
            if entry["name"] == name:
                return entry["annotations"]
        raise Refused(f"{self.path.name} has no part {name!r}: {HOW}.")


def statement_of(
    root: Path,
    *,
    device: str,
    files: Mapping[str, str],
    results: Mapping[str, Any],
    hypothesis: Mapping[str, Any],
    session: Mapping[str, Any],
) -> dict[str, Any]:
    """The statement that the obligations in `results` (from the ledger) were met on the bytes in `files`."""
    versions = installed(root)
    parts = {
        "environment": environment(device),
        "installed": versions,
        "hypothesis": dict(hypothesis),
        "session": {**session, **git_state(root)},
        "obligations": dict(results),
    }
    listed = [*files.items(), ("installed", digest(versions))]
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sorted(listed)],
        "predicateType": TEST_RESULT,
        "predicate": {
            "result": "PASSED",
            "configuration": [
                {"name": name, "digest": {"sha256": digest(part)}, "annotations": part} for name, part in parts.items()
            ],
            "passedTests": sorted(results),
            "warnedTests": [],
            "failedTests": [],
        },
    }


def write_parity_receipt(root: Path, statement: Mapping[str, Any]) -> Path:
    """Write receipts/parity-<sha256 of its bytes>.json under `root` (whole or not at all) and return its path."""
    data = canonical(statement)
    path = root / project_at(root).receipts / f"parity-{hashlib.sha256(data).hexdigest()}.json"
    try:
        if not path.exists() or read_plain(path) != data:
            write_atomic(path, data)
    except OSError as error:
        raise Refused(f"{path} cannot be written ({error.strerror}): parity was shown, and nothing says so.") from error
    return path


def show_parity(root: Path, statement: Mapping[str, Any], device: str, losses: Iterable[str] | None = None) -> Path:
    """`write_parity_receipt`, for a statement that lets a run of `losses` (None: all) on `device` start here and now.

    Raises Refused, and leaves no receipt, where the guard would refuse it.
    """
    path = root / project_at(root).receipts / f"parity-{digest(statement)}.json"
    check_schema(statement, "parity-receipt", path)
    receipt = ParityReceipt(path, digest(statement), dict(statement))
    if reason := misfit(receipt, root, subjects(root), required(load_losses(root), device, losses), device):
        raise Refused(reason[1])
    return write_parity_receipt(root, statement)


def read_parity_receipt(path: Path) -> ParityReceipt:
    """The receipt at `path`; raises Refused unless its name is its digest, its form canonical and its schema kept."""
    name = NAME.fullmatch(path.name)
    if name is None:
        raise Refused(f"{path} is not named parity-<sha256 of its bytes>.json: {HOW}.")
    try:
        data = read_plain(path)
    except OSError as error:
        raise Refused(f"{path} cannot be read ({error.strerror}): {HOW}.") from error
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != name[1]:
        raise Refused(f"{path} was edited or cut short: its bytes no longer have the digest in its name; {HOW}.")
    statement, _ = read_canonical(path, "parity-receipt")
    for entry in statement["predicate"]["configuration"]:
        if digest(entry["annotations"]) != entry["digest"]["sha256"]:
            raise Refused(f"{path}: the part {entry['name']!r} does not have the digest beside it; {HOW}.")
    receipt = ParityReceipt(path, sha256, statement)
    names = [entry["name"] for entry in statement["subject"]]
    versions = {entry["digest"]["sha256"] for entry in statement["subject"] if entry["name"] == "installed"}
    if names != sorted(set(names)) or versions != {digest(receipt.part("installed"))}:
        raise Refused(f"{path} names a subject twice, out of order, or other versions than it lists; {HOW}.")
    if statement["predicate"]["passedTests"] != sorted(receipt.part("obligations")):
        raise Refused(f"{path} says that other obligations were met than it has results for; {HOW}.")
    return receipt


def require_parity(
    root: Path | str, losses: Iterable[str], device: str, *, resumed: Path | str | None = None
) -> ParityReceipt:
    """A receipt in receipts/ that shows `losses` for exactly this tree, these versions and this `device`.

    Raises Refused with the reason for which the closest receipt does not hold, and, for the run directory `resumed`,
    when the run was begun by other code. Files that are no subject (caches, runs/, data/, receipts/ itself) do not
    matter, nor does git: only the bytes of the subjects do.
    """
    root = Path(root).resolve()
    files = subjects(root)
    spec = load_losses(root)
    wanted = required(spec, device, losses)
    candidates = by_likeness(root, files)
    if not candidates:
        raise Refused(f"no parity receipt in {root / project_at(root).receipts}: {HOW}.")
    if resumed is not None:
        refuse_other_tree(Path(resumed), files)
    closest: tuple[float, str] = (-1, "")
    for path in candidates:
        try:
            receipt = read_parity_receipt(path)
        except Refused as refusal:
            closest = max(closest, (0, str(refusal)), key=how_far)
            continue
        verdict = misfit(receipt, root, files, wanted, device)
        if verdict is None:
            return receipt
        closest = max(closest, verdict, key=how_far)
    raise Refused(closest[1])


def how_far(reason: tuple[float, str]) -> float:
    """How far a receipt got before it was found not to hold; of equals the first, the likest, is told."""
    return reason[0]


def by_likeness(root: Path, files: Mapping[str, str]) -> list[Path]:
    """The receipts worth reading: all that name every digest in `files`, then the few that name most of them.

    Of equals, one that names a file with another digest goes before one that does not name it, and then the newest.
    """
    entries = [(canonical(name), value.encode()) for name, value in files.items()]
    ranked: list[tuple[int, int, float, Path]] = []
    for path in sorted((root / project_at(root).receipts).glob("parity-*.json")):
        try:
            data, written = read_plain(path), path.stat().st_mtime
        except OSError:
            data, written = b"", 0.0  # whoever asks for this one is told what is wrong with it; it hides no other
        other = [name for name, value in entries if value not in data]
        ranked.append((len(other), sum(name not in data for name in other), -written, path))
    ranked.sort()
    whole = [path for missing, *_, path in ranked if missing == 0]
    return whole + [path for missing, *_, path in ranked if missing > 0][:4]


def refuse_other_tree(run_dir: Path, files: Mapping[str, str]) -> None:
    """Raise Refused when the run in `run_dir` was begun with other bytes than `files`: its receipts would not hold."""
    for path in sorted(run_dir.glob("parity-*.json")):
        if change := difference(read_parity_receipt(path).subjects, files):
            raise Refused(f"{change} since the run in {run_dir} was begun: the code that began a run has to end it.")


def misfit(
    receipt: ParityReceipt, root: Path, files: Mapping[str, str], wanted: Mapping[str, Any], device: str
) -> tuple[float, str] | None:
    """Why `receipt` does not hold here, with how far it got (more is closer), or None when it holds."""
    shown = receipt.part("environment")
    kind = device_class(device)
    how = HOW
    if any(argument.startswith("--losses") for argument in receipt.part("session")["arguments"]):
        names = ",".join(sorted({name.partition("/")[0] for name in wanted}))
        how = f"run `pytest --losses {names}` and try again"
    if shown["device"] != kind:
        hint = f"run `pytest -m gpu --device {device}`" if kind == "cuda" else how
        return (
            1,
            f"no parity receipt for device {kind}, {receipt.path.name} is for {shown['device']}: {hint}.",
        )
    if change := difference(receipt.subjects, files):
        return 2, f"{change} since parity was shown ({receipt.path.name}): {how}."
    here = environment(device)
    for place, key in enumerate(DECIDING):
        if here[key] != shown.get(key):
            stated = shown.get(key, "nothing said of it")
            return 3 + place / 100, f"{key} is {here[key]} here, {receipt.path.name} was shown with {stated}: {how}."
    if change := version_change(receipt, root):
        return 4, f"{change}, in {receipt.path.name}: {how}."
    if missing := shortfalls(wanted, receipt.part("obligations")):
        return 5, f"{receipt.path.name} does not cover the experiment: {missing[0]}; {how}."
    return None


def version_change(receipt: ParityReceipt, root: Path) -> str | None:
    """The first installed version that differs from the receipt's, as a sentence, or None."""
    here, shown = installed(root), receipt.part("installed")
    for name in sorted(here.keys() | shown.keys()):
        if here.get(name) != shown.get(name):
            return f"{name} is {here.get(name, 'not named')} here, {shown.get(name, 'not named')} when parity was shown"
    return None


def git_state(root: Path) -> dict[str, Any]:
    """commit and dirty (information only: bytes decide), what runs write left out; both None outside a git checkout."""
    try:
        commit = git(root, "rev-parse", "--verify", "HEAD")
        return {"commit": commit, "dirty": bool(git(root, "status", "--porcelain", "--", ".", *WRITTEN))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
