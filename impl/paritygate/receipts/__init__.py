"""Receipts: digests, statements, verification, atomic writing. Imports no torch."""

from paritygate.bootstrap import bootstrap
from paritygate.receipts.files import canonical, digest, sha256_file, write_atomic
from paritygate.receipts.guard import guard, require_parity
from paritygate.receipts.lock import lock_run
from paritygate.receipts.parity import ParityReceipt, read_parity_receipt, write_parity_receipt
from paritygate.receipts.phases import PhaseChain
from paritygate.receipts.provenance import refuse_other_code, verify_run, write_run_receipt
from paritygate.receipts.rerun import rerun_parity

__all__ = [
    "ParityReceipt",
    "PhaseChain",
    "bootstrap",
    "canonical",
    "digest",
    "guard",
    "lock_run",
    "read_parity_receipt",
    "refuse_other_code",
    "require_parity",
    "rerun_parity",
    "sha256_file",
    "verify_run",
    "write_atomic",
    "write_parity_receipt",
    "write_run_receipt",
]
