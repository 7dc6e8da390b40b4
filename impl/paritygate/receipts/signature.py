"""A parity receipt vouched for by a person: an SSH signature by a key in spec/allowed_signers."""

import subprocess
from pathlib import Path

from paritygate.errors import Refused
from paritygate.receipts.parity import ParityReceipt

NAMESPACE = "paritygate-parity"


def require_signature(root: Path, receipt: ParityReceipt) -> str:
    """The principal in spec/allowed_signers whose key signed `receipt` (receipts/parity-<sha256>.json.sig).

    Raises Refused when there is no signature, none by an allowed key, or one over other bytes. A receipt is signed with
    `ssh-keygen -Y sign -f KEY -n paritygate-parity receipts/parity-<sha256>.json`.
    """
    signature = receipt.path.with_name(f"{receipt.path.name}.sig")
    allowed = root / "spec" / "allowed_signers"
    how = f"sign it with `ssh-keygen -Y sign -f KEY -n {NAMESPACE} {receipt.path.name}`, or leave out --trust-receipt"
    if not signature.is_file() or signature.is_symlink():
        raise Refused(f"{receipt.path.name} has no signature beside it ({signature.name}): {how}.")
    common = ["-n", NAMESPACE, "-s", str(signature), "-f", str(allowed)]
    found = ssh_keygen(["-Y", "find-principals", "-s", str(signature), "-f", str(allowed)], b"")
    principals = found.stdout.decode(errors="replace").splitlines() if found.returncode == 0 else []
    if not principals:
        raise Refused(f"{signature.name} is not by a key in spec/allowed_signers: {how}.")
    for principal in principals:
        checked = ssh_keygen(["-Y", "verify", "-I", principal, *common], receipt.path.read_bytes())
        if checked.returncode == 0:
            return principal
    raise Refused(f"{signature.name} does not verify for the bytes of {receipt.path.name} ({NAMESPACE}): {how}.")


def ssh_keygen(arguments: list[str], data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run ssh-keygen with `data` on its standard input; raises Refused where it is not installed."""
    try:
        return subprocess.run(["ssh-keygen", *arguments], input=data, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(f"--trust-receipt needs ssh-keygen (OpenSSH 8.2 or later): {error}.") from error
