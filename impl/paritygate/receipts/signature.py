"""A parity receipt vouched for by a person: an SSH signature by a key in spec/allowed_signers."""

import subprocess
from pathlib import Path

from paritygate.errors import Refused
from paritygate.receipts.parity import ParityReceipt

NAMESPACE = "paritygate-parity"
RUN_NAMESPACE = "paritygate-run"


def require_signature(root: Path, receipt: ParityReceipt) -> str:
    """The principal in spec/allowed_signers whose key signed `receipt` (receipts/parity-<sha256>.json.sig).

    Raises Refused when there is no signature, none by an allowed key, or one over other bytes. A receipt is signed with
    `ssh-keygen -Y sign -f KEY -n paritygate-parity receipts/parity-<sha256>.json`.
    """
    how = f"sign it with `ssh-keygen -Y sign -f KEY -n {NAMESPACE} {receipt.path.name}`, or leave out --trust-receipt"
    return signer(root, receipt.path, NAMESPACE, how)


def run_signer(root: Path, run_dir: Path) -> str | None:
    """The principal in spec/allowed_signers who signed the run, None where receipt.json.sig is not there.

    A run is signed with `ssh-keygen -Y sign -f KEY -n paritygate-run RUN_DIR/receipt.json`: the receipt names the
    digest of every file of the run. Raises Refused for a signature that does not hold.
    """
    path = run_dir / "receipt.json"
    if not path.with_name(f"{path.name}.sig").exists():
        return None
    how = f"sign it with `ssh-keygen -Y sign -f KEY -n {RUN_NAMESPACE} {path}`, or remove the signature"
    return signer(root, path, RUN_NAMESPACE, how)


def signer(root: Path, path: Path, namespace: str, how: str) -> str:
    """The principal in spec/allowed_signers whose key signed the file at `path`; Refused with `how` where none did."""
    signature = path.with_name(f"{path.name}.sig")
    allowed = root / "spec" / "allowed_signers"
    if not signature.is_file() or signature.is_symlink():
        raise Refused(f"{path.name} has no signature beside it ({signature.name}): {how}.")
    common = ["-n", namespace, "-s", str(signature), "-f", str(allowed)]
    process = ssh_keygen(["-Y", "find-principals", "-s", str(signature), "-f", str(allowed)], b"")
    principals = process.stdout.decode(errors="replace").splitlines() if process.returncode == 0 else []
    if not principals:
        raise Refused(f"{signature.name} is not by a key in spec/allowed_signers: {how}.")
    for principal in principals:
        checked = ssh_keygen(["-Y", "verify", "-I", principal, *common], path.read_bytes())
        if checked.returncode == 0:
            return principal
    raise Refused(f"{signature.name} does not verify for the bytes of {path.name} ({namespace}): {how}.")


def ssh_keygen(arguments: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run ssh-keygen with `data` on its standard input; raises Refused where it is not installed."""
    try:
        return subprocess.run(["ssh-keygen", *arguments], input=data, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(f"--trust-receipt needs ssh-keygen (OpenSSH 8.2 or later): {error}.") from error
