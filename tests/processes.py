"""Whether a process that a test did not start itself has ended."""

import time
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie, after at most two seconds for its end."""
    for _ in range(40):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True
