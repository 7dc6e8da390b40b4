"""git as a child process that nothing around it can point at another repository."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

SETTINGS = ("core.autocrlf=false", "core.fsmonitor=false", f"core.hooksPath={os.devnull}", "safe.directory=*")
"""No hook and no monitor of the repository or of its user runs; who owns the files does not matter."""


def git(folder: Path | str, *arguments: str, inherited: Mapping[str, str] = os.environ, timeout: float = 60) -> str:
    """Output of `git ARGUMENTS` in `folder`, without the newline at its end.

    No `GIT_*` variable of `inherited` reaches it: hooks, linked worktrees and `git rebase --exec` set GIT_DIR, and
    every command would then read and write the caller's repository. Nor is a repository looked for above `folder`.
    Raises OSError where git cannot be run, subprocess.CalledProcessError (with its stderr) and TimeoutExpired.
    """
    folder = Path(folder).absolute()
    environment = {name: value for name, value in inherited.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CEILING_DIRECTORIES": os.pathsep.join({str(folder.parent), str(folder.resolve().parent)}),
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_OPTIONAL_LOCKS": "0",  # `git status` would write the index of a repository that is only asked
        "GIT_TERMINAL_PROMPT": "0",
    }
    command = ["git", *(part for setting in SETTINGS for part in ("-c", setting)), *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
    ).stdout.rstrip("\n")
