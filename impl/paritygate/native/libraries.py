"""C++ sources to a loaded library: find the compiler, build or take from the cache, open; see design/080."""

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from paritygate import bootstrap

FLAGS = ("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-w", "-g0", "-shared", "-fPIC", "-pthread")
INHERITED = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "HOME", "SDKROOT", "DEVELOPER_DIR")
WIDE = "-mprefer-vector-width=512"

logger = logging.getLogger(__name__)
_announced: set[str] = set()


class Unavailable(Exception):  # noqa: N818 - what a caller catches to take the torch path
    """No compiled kernel here; the message says why."""


def load(*sources: Path) -> ctypes.CDLL:
    """The library that the `*.cpp` among `sources` make; raises Unavailable, at every call, where there is no compiler.

    A library built before from the same sources, flags and compiler is taken from the user's cache, if its bytes still
    have the digest in its name. In a session whose Python modules are read from their sources alone (`bootstrap`) the
    sources' digests are recorded with those of the modules, and they are compiled afresh, unless the process that
    started this one has built them, when only those very bytes are taken, or vouches for nothing.
    """
    kernels_off()
    texts = {path.name: path.read_bytes() for path in sources}
    units = " ".join(sorted(name for name in texts if name.endswith(".cpp")))
    try:
        command = compiler_command()
        if bootstrap.LOADED:
            for path in sources:
                bootstrap.record(path, texts[path.name])
        built = bootstrap.BUILT if bootstrap.LOADED else {"*": "*"}
        data = cached(command, texts, built.get(units, built.get("*", "")))
        library = open_library(data)
    except Unavailable as reason:
        announce(f"{reason}; torch computes what {units} would, more slowly (PARITYGATE_KERNELS=off says so quietly)")
        raise
    bootstrap.LIBRARIES[units] = sha256(data)
    return library


def announce(sentence: str) -> None:
    """Log a sentence as a warning, once in a process: by default that is a line on stderr."""
    if sentence not in _announced:
        _announced.add(sentence)
        logger.warning("paritygate: %s", sentence)


def kernels_off() -> None:
    """Raise Unavailable where the environment says that nothing is to be compiled."""
    if os.environ.get("PARITYGATE_KERNELS") == "off":
        raise Unavailable("PARITYGATE_KERNELS=off")


def bfloat16_asked() -> str:
    """How the environment wants bfloat16 multiplied in the embedded server (PARITYGATE_BFLOAT16): "dots", "widened",
    or anything else for the fastest way that rounds nothing away."""
    return os.environ.get("PARITYGATE_BFLOAT16", "")


TILES_REFUSED: list[str] = []  # why the AMX tiles that the CPU claims are not used, once that has been tried


def compiler_command() -> tuple[str, ...]:
    """The compiler and the flags that make it use this machine's vectors."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise Unavailable(f"CXX={os.environ['CXX']} is no command ({error})") from error
    compilers = named or [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))][:1]
    if not compilers:
        raise Unavailable("no C++ compiler: none of c++, g++, clang++ is on PATH, and CXX is not set")
    for target in (["-march=native", WIDE], ["-march=native"], []):
        if _succeeds([*compilers, *target, "-E", "-x", "c++", os.devnull]):
            return (*compilers, *target)
    raise Unavailable(f"{compilers[0]} cannot be run")


def predefined_macros(command: tuple[str, ...]) -> bytes:
    """What `command` defines by itself: the version of the compiler and every instruction set that it found."""
    asked = [*command, "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(asked, env=environment(), capture_output=True, check=False).stdout


def environment() -> dict[str, str]:
    """What a compiler is run with: nothing of the caller's that names headers, libraries or flags besides CXX."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | {"LC_ALL": "C"}


def sha256(data: bytes) -> str:
    """Hexadecimal digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def build(command: tuple[str, ...], sources: dict[str, bytes]) -> bytes:
    """The bytes of the shared library that `command` makes of `sources`; raises Unavailable with its words."""
    units = [name for name in sources if name.endswith(".cpp")]
    announce(f"compiling {' '.join(units)} with {command[0]}, which takes some seconds")
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        for name, source in sources.items():
            (Path(folder) / name).write_bytes(source)
        made = Path(folder) / "kernels.so"
        _run([[*command, *FLAGS, "-c", name, "-o", f"{name}.o"] for name in units], folder)
        _run([[*command, *FLAGS, "-o", str(made), *(f"{name}.o" for name in units)]], folder)
        return made.read_bytes()


def cached(command: tuple[str, ...], sources: dict[str, bytes], digest: str = "*") -> bytes:
    """`build`, kept in `$PARITYGATE_CACHE/kernels` under the digest of all that decides its bytes, and its own.

    Only bytes of that `digest` are taken from there: "*" for any that have the one in their name, "" for none.
    """
    decides = (command, FLAGS, predefined_macros(command), sorted(sources.items()))
    key = hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
    home = Path(os.environ.get("PARITYGATE_CACHE") or Path.home() / ".cache" / "paritygate") / "kernels"
    for path in home.glob(f"{key}-{digest}.so"):
        data = path.read_bytes()
        if path.stem == f"{key}-{sha256(data)}" and path.stat().st_uid == os.getuid():
            return data
    data = build(command, sources)
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=home, delete=False) as file:
            file.write(data)
        os.replace(file.name, home / f"{key}-{sha256(data)}.so")
    except OSError:
        pass  # a cache that cannot be written costs two seconds next time, nothing else
    return data


def open_library(data: bytes) -> ctypes.CDLL:
    """The library of these very bytes: written to a private folder, opened, and unlinked."""
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        path = Path(folder) / f"kernels-{sha256(data)[:16]}.so"
        path.write_bytes(data)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _run(commands: list[list[str]], folder: str) -> None:
    """All of them side by side; raises Unavailable with the compiler's words for the first that fails."""
    try:
        running = [
            subprocess.Popen(
                c,
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for c in commands
        ]
    except OSError as error:
        raise Unavailable(f"{commands[0][0]} cannot be run: {error}") from error
    messages = [process.communicate()[1] for process in running]
    for process, message in zip(running, messages, strict=True):
        if process.returncode:
            errors = [line for line in message.splitlines() if "error" in line] or [f"exit code {process.returncode}"]
            raise Unavailable(f"{commands[0][0]} could not compile the kernels: {errors[0]}")


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, env=environment(), capture_output=True, check=False).returncode == 0
    except OSError:
        return False
