"""Seeds that depend on what they are for, and on nothing else."""

import hashlib


def derive(seed: int, *purpose: int | str) -> int:
    """A seed in [0, 2^31) from `seed` and the whole purpose: not from time, order or concurrency."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
