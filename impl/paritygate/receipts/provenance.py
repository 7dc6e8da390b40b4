"""Run receipts: SLSA provenance of a run directory, and the offline check of one."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from paritygate import __version__
from paritygate.bootstrap import LIBRARIES, LOADED
from paritygate.errors import Refused
from paritygate.receipts.environment import DECIDING, environment, installed
from paritygate.receipts.files import canonical, digest, read_canonical, sha256_file, write_atomic
from paritygate.receipts.lock import LOCK
from paritygate.receipts.origins import refuse_shadowed
from paritygate.receipts.parity import STATEMENT, ParityReceipt, read_parity_receipt
from paritygate.receipts.phases import PhaseChain
from paritygate.receipts.subjects import difference, subjects
from paritygate.spec.losses import load_losses, required, shortfalls

PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:paritygate:run:v1"
RECEIPT = "receipt.json"
SIGNATURE = "receipt.json.sig"
PARITY = "parity receipt"


def write_run_receipt(
    run_dir: Path | str,
    *,
    root: Path | str,
    spec: Mapping[str, Any],
    parity: ParityReceipt,
    losses: Iterable[str],
    device: str,
    dependencies: Iterable[Mapping[str, Any]] = (),
    results: Iterable[str] = ("verdict.json", "report.html"),
) -> Path:
    """Write receipt.json (whole or not at all) over every file of `run_dir`, and return its path.

    `spec` is the frozen spec, `parity` what the guard returned; its copy is put into the directory. `dependencies` are
    in-toto resource descriptors (name with uri, digest or annotations); `results` the files that the run is for.
    Raises Refused when code that ran is not the code that parity was shown for.
    """
    run_dir, root = Path(run_dir), Path(root).resolve()
    refuse_other_code(root, parity)
    refuse_shadowed(root)
    copy = run_dir / parity.path.name
    if not copy.exists():
        write_atomic(copy, canonical(parity.statement))
    remove_empty_folders(run_dir)
    files = files_of(run_dir)
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": files[name]}} for name in results if name in files],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"spec": dict(spec)},
                "internalParameters": {
                    "device": device,
                    "losses": sorted(set(losses)),
                    "phases": PhaseChain(run_dir).head,
                    "environment": environment(device),
                    "installed": installed(root),
                },
                "resolvedDependencies": [
                    {"name": PARITY, "digest": {"sha256": parity.sha256}},
                    *(dict(dependency) for dependency in dependencies),
                ],
            },
            "runDetails": {
                "builder": {"id": "urn:paritygate:local", "version": {"paritygate": __version__}},
                "metadata": {"invocationId": ""},
                "byproducts": [{"name": name, "digest": {"sha256": value}} for name, value in files.items()],
            },
        },
    }
    write_atomic(run_dir / RECEIPT, canonical(named(statement)))
    read_canonical(run_dir / RECEIPT, "run-receipt")
    return run_dir / RECEIPT


def named(statement: dict[str, Any]) -> dict[str, Any]:
    """`statement` with its own name in invocationId: the digest of its canonical form with that field empty."""
    metadata = statement["predicate"]["runDetails"]["metadata"]
    metadata["invocationId"] = ""
    metadata["invocationId"] = f"sha256:{digest(statement)}"
    return statement


def refuse_other_code(root: Path | str, parity: ParityReceipt) -> None:
    """Raise Refused when a module or native library of this process has other bytes than parity was shown for."""
    refuse_other_sources(root, parity)
    refuse_other_libraries(LIBRARIES, parity)


def refuse_other_sources(root: Path | str, parity: ParityReceipt) -> None:
    """Raise Refused when a module of this process under `root` has other bytes than parity was shown for."""
    shown, root = parity.subjects, Path(root).resolve()
    for path, sha256 in sorted(LOADED.items()):
        name = os.path.relpath(path, root).replace(os.sep, "/")
        if name.startswith("../"):
            continue  # not of this checkout: `refuse_foreign` judges it
        if shown.get(name) != sha256:
            raise Refused(
                f"{name} ran with other bytes than {parity.path.name} was shown for: it was edited meanwhile."
            )


def refuse_other_libraries(opened: Mapping[str, str], parity: ParityReceipt) -> None:
    """Raise Refused when a native library (C++ sources -> sha256) is not, byte for byte, the one that parity shows."""
    libraries = parity.part("environment").get("libraries", {})
    for name, sha256 in sorted(opened.items()):
        if libraries.get(name) != sha256:
            raise Refused(
                f"the library compiled from {name} has other bytes than the one of {parity.path.name}: the compiler, "
                "or what it reads, changed; run `pytest tests/parity` and try again."
            )


def remove_empty_folders(run_dir: Path) -> None:
    """Remove what a server or a writer left: a folder with nothing in it has no digest, and would not be seen."""
    for folder, _, _ in os.walk(run_dir, topdown=False):
        if Path(folder) != run_dir and not os.listdir(folder):
            os.rmdir(folder)


def files_of(run_dir: Path) -> dict[str, str]:
    """Name -> sha256 of every file in `run_dir` but the receipt and the lock; raises Refused for a symbolic link."""
    digests: dict[str, str] = {}
    for folder, folders, names in os.walk(run_dir):
        for name in [*folders, *names]:
            path = Path(folder) / name
            if path.is_symlink():
                raise Refused(f"{path} is a symbolic link: a run directory holds plain files.")
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(run_dir).as_posix()
            if relative == LOCK and path.stat().st_size:
                raise Refused(f"{path} holds something: the lock of a run is an empty file.")
            if relative not in (RECEIPT, SIGNATURE, LOCK):
                digests[relative] = digest_of(path)
    return dict(sorted(digests.items()))


def digest_of(path: Path) -> str:
    """sha256 of the plain file at `path`; raises Refused for anything else."""
    try:
        return sha256_file(path)
    except OSError as error:
        why = error.strerror if path.is_file() else "not a plain file"
        raise Refused(f"{path} cannot be read ({why}): a run directory holds plain files.") from error


def verify_run(
    run_dir: Path | str,
    *,
    root: Path | str,
    stands_on: Callable[[Path], Iterable[str]] | None = None,
    recompute: Callable[[Path], Any] | None = None,
) -> dict[str, Any]:
    """Check a finished run offline against the checkout at `root`, return its receipt; Refused names the file.

    `stands_on` gives the losses of the spec in the run directory, `recompute` the verdict anew, as JSON, from its
    per-item results. Installed versions and the machine are not judged: the receipt tells those of the run.
    """
    run_dir, root = Path(run_dir), Path(root).resolve()
    if not (run_dir / RECEIPT).is_file():
        raise Refused(f"{run_dir / RECEIPT} is missing: the run is not finished, or this is no run directory.")
    receipt, data = read_canonical(run_dir / RECEIPT, "run-receipt")
    if canonical(named(receipt)) != data:
        raise Refused(f"{run_dir / RECEIPT} was edited: its invocationId is no longer its own digest.")
    predicate = receipt["predicate"]
    definition = predicate["buildDefinition"]
    listed = {entry["name"]: entry["digest"]["sha256"] for entry in predicate["runDetails"]["byproducts"]}
    if change := difference(listed, files_of(run_dir)):
        raise Refused(f"{run_dir}/{change} since the run ended.")
    for folder, folders, names in os.walk(run_dir):
        if not folders and not names:
            raise Refused(f"{folder} is an empty folder: a run leaves none.")
    for entry in receipt["subject"]:
        if listed.get(entry["name"]) != entry["digest"]["sha256"]:
            raise Refused(f"{run_dir / RECEIPT} names {entry['name']} with a digest that the file does not have.")
    if "spec.json" not in listed or (run_dir / "spec.json").read_bytes() != canonical(
        definition["externalParameters"]["spec"]
    ):
        raise Refused(f"{run_dir / 'spec.json'} is not the spec that {RECEIPT} names.")
    chain = PhaseChain(run_dir)
    chain.verify()
    if chain.head != definition["internalParameters"]["phases"]:
        raise Refused(f"{run_dir / 'phases'} is not the chain that {RECEIPT} names: its last link differs.")
    verify_parity_copy(run_dir, root, definition)
    if stands_on is not None and sorted(set(stands_on(run_dir))) != definition["internalParameters"]["losses"]:
        raise Refused(f"{run_dir / RECEIPT} names other losses than {run_dir / 'spec.json'} stands on.")
    if recompute is not None:
        verify_verdict(run_dir, chain, recompute)
    return receipt


def verify_parity_copy(run_dir: Path, root: Path, definition: Mapping[str, Any]) -> None:
    """Raise Refused unless the parity receipt in `run_dir` covers the run and was shown for the checkout at `root`."""
    inner = definition["internalParameters"]
    named_digests = {
        entry["digest"]["sha256"] for entry in definition["resolvedDependencies"] if entry.get("name") == PARITY
    }
    copies = sorted(run_dir.glob("parity-*.json"))
    if len(copies) != 1 or len(named_digests) != 1:
        raise Refused(f"{run_dir} holds {len(copies)} parity receipts and names {len(named_digests)}: it must be one.")
    parity = read_parity_receipt(copies[0])
    if parity.sha256 not in named_digests:
        raise Refused(f"{copies[0]} is not the parity receipt that {RECEIPT} names.")
    shown, ran = parity.part("environment"), inner["environment"]
    for key in DECIDING:
        if shown.get(key) != ran.get(key):
            claims = f"{RECEIPT} says that the run had {key} {ran.get(key)}"
            raise Refused(f"{claims}, {copies[0].name} was shown with {shown.get(key)}.")
    refuse_other_libraries(ran.get("libraries", {}), parity)
    if change := difference(parity.subjects, subjects(root)):
        commit = parity.part("session")["commit"]
        hint = f"check out commit {commit}" if commit else "check out the tree of the run"
        raise Refused(f"{root}/{change} since parity was shown for the run ({copies[0].name}): {hint} and try again.")
    for key in DECIDING:
        if key not in shown:  # of neither receipt, that is: equal, and yet not compared
            raise Refused(f"{copies[0].name} and {RECEIPT} say nothing of {key}, which decides what a run computes.")
    if missing := shortfalls(required(load_losses(root), inner["device"], inner["losses"]), parity.part("obligations")):
        raise Refused(f"{copies[0]} does not cover the run: {missing[0]}.")


def verify_verdict(run_dir: Path, chain: PhaseChain, recompute: Callable[[Path], Any]) -> None:
    """Raise Refused unless verdict.json holds what `recompute` gives; a run that a gate stopped has no verdict."""
    path = run_dir / "verdict.json"
    last = chain.completed[-1:]
    if not path.is_file() and last and chain.record(last[0]).get("outcome") == "stopped":
        return
    if not path.is_file():
        raise Refused(f"{path} is missing: a finished run has a verdict.")
    if path.read_bytes() != canonical(recompute(run_dir)):
        raise Refused(f"{path} is not the verdict that the per-item results give.")
