"""The first thing a command imports: our own code is compiled from its source files, and from this checkout only."""

import argparse
import contextlib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from paritygate.errors import BadInputError, ParityGateError, Refused, redacted

_IMPL = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
NOT_PROVEN = "is not the source that parity was shown for: it was edited meanwhile."

LOADED: dict[str, str] = {}
"""Absolute path -> sha256 of the source bytes that were compiled, for every module of ours since `bootstrap`."""

LIBRARIES: dict[str, str] = {}
"""The C++ sources of a native library -> sha256 of its bytes, for every library that was opened since `bootstrap`."""

BUILT: dict[str, str] = {}
"""The same of the process that started this one, not to be built again; {"*": "*"} where that vouches for nothing."""

PROVEN: dict[str, str] = {}
"""Absolute path -> sha256 of every source file that a parity receipt was shown for; empty before there is a receipt."""


def expect(root: Path, shown: Mapping[str, str]) -> None:
    """From now on load only the sources that `shown` (path relative to `root` -> sha256) lists, where they are ours."""
    home = os.path.realpath(root)
    if os.path.join(home, "impl") == _IMPL:
        PROVEN.update({os.path.join(home, *name.split("/")): value for name, value in shown.items()})


def record(path: str | Path, source: bytes) -> None:
    """Put `source`, read from `path`, into LOADED; raises Refused if PROVEN has other bytes, or none, for that file."""
    real, value = os.path.realpath(path), hashlib.sha256(source).hexdigest()
    if PROVEN and real.startswith(_IMPL + os.sep) and PROVEN.get(real) != value:
        raise Refused(f"{real} {NOT_PROVEN}")
    LOADED[real] = value


def merge(loaded: Mapping[str, str], libraries: Mapping[str, str]) -> None:
    """Add another process's LOADED and LIBRARIES to ours; what has two digests is equal to no proof."""
    for theirs, ours in ((loaded, LOADED), (libraries, LIBRARIES)):
        for name, value in theirs.items():
            if ours.setdefault(name, value) != value:
                ours[name] = "two processes loaded different bytes"


class SourceOnly(SourceFileLoader):
    """Compiles a module from its source: a cached `.pyc`, whatever its header says, is never read or written."""

    def get_code(self, fullname: str) -> CodeType:
        """Code of `fullname`, compiled from bytes whose digest is kept in LOADED."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        record(path, source)
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
ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
READER_GONE = 141  # what a shell calls a process that SIGPIPE ended


def exit_code(program: str, work: Callable[[], str | int], *, interrupted: str = "interrupted.") -> int:
    """Do `work` and print the text that it returns; the exit code, which is the number where it returns one.

    All that is not a bug of ours is one sentence on stderr. A reader that leaves, as `head` does, is no error once the
    work is done.
    """
    try:
        result = work()
        if isinstance(result, int):
            print(end="", flush=True)
            return result
    except ParityGateError as error:
        return complain(f"{program}: {error}", error.exit_code)
    except KeyboardInterrupt:
        return complain(f"{program}: {interrupted}", 130)
    except BrokenPipeError:
        silence()
        return READER_GONE
    except OSError as error:
        if error.errno not in (*DISK, *NAMES):
            raise
        silence()
        what = f"{error.filename or 'the output'} cannot be written"
        if error.errno in NAMES:
            what = f"{str(error.filename)[:80]} is no usable path"
        return complain(f"{program}: {what}: {error.strerror}.", BadInputError.exit_code)
    return write(program, result)


def write(program: str, text: str) -> int:
    """Print `text`; 0, or 2 with one sentence on stderr where the output takes nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence()
    except OSError as error:
        silence()
        return complain(f"{program}: the output cannot be written: {error.strerror}.", BadInputError.exit_code)
    return 0


class Parser(argparse.ArgumentParser):
    """A parser whose --help that cannot be written is a sentence and exit code 2; argparse's own ends with 0."""

    def print_help(self, file: Any = None) -> None:
        """Print the help on stdout, or to `file`."""
        if file is not None:
            super().print_help(file)
        elif code := write(self.prog, self.format_help().rstrip("\n")):
            sys.exit(code)


def complain(sentence: str, code: int) -> int:
    """Print `sentence` on stderr, as far as anybody reads it; the exit code."""
    with contextlib.suppress(OSError):
        print(redacted(sentence), file=sys.stderr, flush=True)
    return code


def silence() -> None:
    """Let nothing more be written to a stdout that takes nothing: Python would complain about it when it ends."""
    if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - None where it was closed at the start
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def alone() -> tuple[list[str], dict[str, str]]:
    """How to start this interpreter so that it finds what it has by itself: argv and environment.

    Nothing of the working folder, of PYTHONPATH or of any other PYTHON* variable, PYTHONUSERBASE included.
    """
    return [sys.executable, "-E", "-P"], {name: value for name, value in os.environ.items() if name[:6] != "PYTHON"}


def command(module: str) -> tuple[list[str], dict[str, str], str]:
    """How to start `module` of ours in a process that reads sources only: argv, environment, a line for its stdin.

    A native library that this process has opened is not built again: that process takes it from the user's cache by its
    digest. Where PROVEN is known, it refuses (exit 3) every source of ours that differs from it, and starts `alone`:
    what only it imports comes from where the guard looked for what this process imports. The code that checks the first
    three files comes with the command, from this process, whose own sources have been checked.
    """
    python, environment = alone() if PROVEN else ([sys.executable, "-P"], dict(os.environ))
    program = f"{_START}start({_IMPL!r}, {module!r}, {NOT_PROVEN!r})"
    return [*python, "-c", program], environment, json.dumps([PROVEN, LIBRARIES if LOADED else {"*": "*"}]) + "\n"


def watched(*argv: str, session: bool = False) -> list[str]:
    """How to start `argv` so that it is killed where this process ends before it, however that comes about.

    Its stdin has to be that of `watch`; `argv` itself gets none. session: of one that leads a session of its own
    (start_new_session) the children are killed too.
    """
    whom = "0" if session else "$$"  # the process group, or what the shell becomes
    watch = f"(read -r _ || kill -s KILL {whom}) <&3 3<&- >/dev/null 2>&1 &"
    return ["/bin/sh", "-c", f'exec 3<&0; {watch} exec "$@" </dev/null 3<&-', "sh", *argv]


@contextlib.contextmanager
def watch() -> Generator[int]:
    """A pipe to start a `watched` process with; at the end of the context that, or what it left, is let be."""
    stdin, held = os.pipe()
    try:
        yield stdin
    finally:
        os.write(held, b"\n")
        os.close(held)
        os.close(stdin)


_START = """
import hashlib, importlib.util, json, os, sys

def start(impl, module, not_proven):
    (proven, built), sources = json.loads(sys.stdin.readline()), {}
    for name in ("paritygate", "paritygate.errors", "paritygate.bootstrap"):
        package = None if "." in name else [os.path.join(impl, "paritygate")]
        path = os.path.join(impl, "paritygate", f"{name.partition('.')[2] or '__init__'}.py")
        with open(path, "rb") as file:
            source = sources[path] = file.read()
        if proven and proven.get(path) != hashlib.sha256(source).hexdigest():
            print(f"{path} {not_proven}", file=sys.stderr)
            sys.exit(3)
        spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=package)
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        exec(compile(source, path, "exec", dont_inherit=True), loaded.__dict__)
    sys.modules["paritygate.bootstrap"].run_module(module, proven, built, sources)

"""


def run_module(module: str, proven: Mapping[str, str], built: Mapping[str, str], sources: Mapping[str, bytes]) -> None:
    """What `python -m MODULE` does, from sources only; `sources` (path -> bytes) are those loaded before this call."""
    import runpy

    PROVEN.update(proven)
    BUILT.update(built)
    for path, source in sources.items():
        record(path, source)
    read_sources_only(Path(_IMPL))
    sys.path.insert(0, _IMPL)  # not before: what lies beside our packages is held to PROVEN too
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Refused as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


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
