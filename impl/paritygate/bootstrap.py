"""The first thing a command imports: our own code is compiled from its source files, and from this checkout only."""

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from paritygate.errors import BadInputError, ParityGateError, Refused

LOADED: dict[str, str] = {}
"""Absolute path -> sha256 of the source bytes that were compiled, for every module of ours since `bootstrap`."""

LIBRARIES: dict[str, str] = {}
"""The C++ sources of a native library -> sha256 of its bytes, for every library that was opened since `bootstrap`."""


class SourceOnly(SourceFileLoader):
    """Compiles a module from its source: a cached `.pyc`, whatever its header says, is never read or written."""

    def get_code(self, fullname: str) -> CodeType:
        """Code of `fullname`, compiled from bytes whose digest is kept in LOADED."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        LOADED[os.path.realpath(path)] = hashlib.sha256(source).hexdigest()
        return compile(source, path, "exec", dont_inherit=True)


def read_sources_only(*folders: Path) -> None:
    """Make imports from `folders` (and below) use SourceOnly; bytecode-only modules there do not exist any more."""
    roots = tuple(f"{folder.resolve()}{os.sep}" for folder in folders)
    hook = FileFinder.path_hook((SourceOnly, [".py"]))

    def ours(path: str) -> Any:
        if not (os.path.realpath(path) + os.sep).startswith(roots):
            raise ImportError(path, "not ours: the next hook takes it")
        return hook(path)

    sys.path_hooks.insert(0, ours)
    for path in list(sys.path_importer_cache):
        if (os.path.realpath(path) + os.sep).startswith(roots):
            del sys.path_importer_cache[path]


def bootstrap(script: str) -> Path:
    """Root of the checkout that `script` (impl/run.py or impl/verify.py) lies in, made safe to import from.

    Expects `sys.pycache_prefix = os.devnull` to be set before this module is imported, so that no cached bytecode of
    it can exist; sets it back. Raises Refused under `python -O` and when paritygate is not the one of the checkout.
    """
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    refuse_optimised("a run")
    impl = Path(script).resolve().parent
    refuse_foreign(impl.parent)
    read_sources_only(impl)
    return impl.parent


DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EFBIG)
READER_GONE = 141  # what a shell calls a process that SIGPIPE ended


def exit_code(program: str, work: Callable[[], str], *, interrupted: str = "interrupted.") -> int:
    """Print what `work` returns; the exit code. All that is not a bug of ours is one sentence on stderr.

    A reader that leaves, as `head` does, is no error once the work is done.
    """
    try:
        text = work()
    except ParityGateError as error:
        return complain(f"{program}: {error}", error.exit_code)
    except KeyboardInterrupt:
        return complain(f"{program}: {interrupted}", 130)
    except BrokenPipeError:
        silence()
        return READER_GONE
    except OSError as error:
        if error.errno not in DISK:
            raise
        what = error.filename or "the output"
        return complain(f"{program}: {what} cannot be written: {error.strerror}.", BadInputError.exit_code)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence()
    except OSError as error:
        silence()
        return complain(f"{program}: the output cannot be written: {error.strerror}.", BadInputError.exit_code)
    return 0


def complain(sentence: str, code: int) -> int:
    """Print `sentence` on stderr, as far as anybody reads it; the exit code."""
    with contextlib.suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)
    return code


def silence() -> None:
    """Let nothing more be written to a stdout that takes nothing: Python would complain about it when it ends."""
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed at the start
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command(module: str) -> list[str]:
    """How to start `module` of ours in a process of its own that reads sources only; its arguments follow."""
    impl = str(Path(__file__).resolve().parents[1])
    code = (
        f"import os, sys; sys.path.insert(0, {impl!r}); sys.pycache_prefix = os.devnull; "
        f"from paritygate.bootstrap import run_module; run_module({module!r})"
    )
    return [sys.executable, "-c", code]


def run_module(module: str) -> None:
    """What `python -m MODULE` does, from sources only."""
    import runpy

    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    read_sources_only(Path(__file__).resolve().parent)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def refuse_optimised(what: str) -> None:
    """Raise Refused when this interpreter drops assert statements (`python -O`, PYTHONOPTIMIZE)."""
    if sys.flags.optimize:
        raise Refused(f"python -O removes the assertions that {what} stands on: start it again without -O.")


def refuse_foreign(root: Path, homes: Mapping[str, Path] | None = None) -> None:
    """Raise Refused when a loaded module comes from outside the folder in `homes` under its top-level name.

    None stands for paritygate, its reference and its tests in the checkout at `root`. A paritygate that is in no home
    has to be this one. What links lead to counts: a checkout may be reached through one.
    """
    checkout = {"paritygate": root / "impl", "paritygate_reference": root / "reference", "tests": root / "tests"}
    this = Path(__file__).resolve().parents[1]
    homes = {"paritygate": this, "paritygate_pytest": this, **(checkout if homes is None else homes)}
    for name, module in sorted(sys.modules.items()):
        home = homes.get(name.partition(".")[0])
        origin = getattr(module, "__file__", None)
        if home is None or origin is None:
            continue
        if not Path(os.path.realpath(origin)).is_relative_to(os.path.realpath(home)):
            raise Refused(
                f"{name} was imported from {origin}, outside {home}: remove it from PYTHONPATH and try again."
            )
