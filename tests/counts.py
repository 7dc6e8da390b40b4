"""How often a test repeats: small counts for `make test`, the full counts of the claims for `make soak`."""

import os

SOAK = os.environ.get("PARITYGATE_SOAK", "") == "1"


def soak(*, quick: int, full: int) -> int:
    """`full` under PARITYGATE_SOAK=1 (`make soak`), else `quick`."""
    return full if SOAK else quick
