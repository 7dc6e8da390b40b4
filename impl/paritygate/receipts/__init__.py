"""Receipts: digests, statements, verification, atomic writing. Imports no torch."""

from paritygate.receipts.files import canonical, digest, sha256_file, write_atomic
from paritygate.receipts.parity import ParityReceipt, read_parity_receipt, require_parity, write_parity_receipt

__all__ = [
    "ParityReceipt",
    "canonical",
    "digest",
    "read_parity_receipt",
    "require_parity",
    "sha256_file",
    "write_atomic",
    "write_parity_receipt",
]
