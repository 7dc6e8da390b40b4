"""The C++ sources beside this file, compiled for the machine that runs them; see design/080."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from paritygate import bootstrap

SOURCES = (
    "vector.hpp", "rows.hpp", "problem.hpp", "wide.hpp", "spod.cpp", "divergence.cpp", "truncated.cpp",
)  # fmt: skip
FLAGS = ("-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-w", "-shared", "-fPIC", "-pthread")
WIDE = "-mprefer-vector-width=512"


class Unavailable(Exception):  # noqa: N818 - what a caller catches to take the torch path
    """No compiled kernel here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built at the first call; raises Unavailable, at every call, where there is no compiler.

    In a session whose own modules are read from their sources alone (`bootstrap`), the sources are compiled afresh and
    their digests recorded with those of the modules. Anywhere else a library built before from the same sources, flags
    and compiler is taken from the user's cache, if its bytes still have the digest in its name.
    """
    if os.environ.get("PARITYGATE_KERNELS") == "off":
        raise Unavailable("PARITYGATE_KERNELS=off")
    folder = Path(__file__).parent
    sources = {name: (folder / name).read_bytes() for name in SOURCES}
    command = compiler()
    if bootstrap.LOADED:
        for name, source in sources.items():
            bootstrap.LOADED[os.path.realpath(folder / name)] = hashlib.sha256(source).hexdigest()
        return load(build(command, sources))
    return load(cached(command, sources))


def available() -> str | None:
    """None where the compiled kernels can be used, else why they cannot."""
    try:
        library()
    except Unavailable as reason:
        return str(reason)
    return None


def compiler() -> tuple[str, ...]:
    """The compiler and the flags that make it use this machine's vectors."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named or [path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))][:1]
    if not found:
        raise Unavailable("no C++ compiler: none of c++, g++, clang++ is on PATH, and CXX is not set")
    for target in (["-march=native", WIDE], ["-march=native"], []):
        if _succeeds([*found, *target, "-E", "-x", "c++", os.devnull]):
            return (*found, *target)
    raise Unavailable(f"{found[0]} cannot be run")


def build(command: tuple[str, ...], sources: dict[str, bytes]) -> bytes:
    """The bytes of the shared library that `command` makes of `sources`; raises Unavailable with its words."""
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        for name, source in sources.items():
            (Path(folder) / name).write_bytes(source)
        made = Path(folder) / "kernels.so"
        units = [name for name in sources if name.endswith(".cpp")]
        _run([[*command, *FLAGS, "-c", name, "-o", f"{name}.o"] for name in units], folder)
        _run([[*command, *FLAGS, "-o", str(made), *(f"{name}.o" for name in units)]], folder)
        return made.read_bytes()


def cached(command: tuple[str, ...], sources: dict[str, bytes]) -> bytes:
    """`build`, kept in `$PARITYGATE_CACHE/kernels` under the digest of all that decides its bytes, and its own."""
    macros = subprocess.run(  # the version of the compiler and every instruction set that it found
        [*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, check=False
    ).stdout
    key = hashlib.sha256(repr((command, FLAGS, macros, sorted(sources.items()))).encode()).hexdigest()[:32]
    home = Path(os.environ.get("PARITYGATE_CACHE") or Path.home() / ".cache" / "paritygate") / "kernels"
    for path in home.glob(f"{key}-*.so"):
        data = path.read_bytes()
        if path.stem == f"{key}-{hashlib.sha256(data).hexdigest()}" and path.stat().st_uid == os.getuid():
            return data
    data = build(command, sources)
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=home, delete=False) as file:
            file.write(data)
        os.replace(file.name, home / f"{key}-{hashlib.sha256(data).hexdigest()}.so")
    except OSError:
        pass  # a cache that cannot be written costs two seconds next time, nothing else
    return data


def load(data: bytes) -> ctypes.CDLL:
    """The library of these very bytes: written to a private folder, opened, and unlinked."""
    with tempfile.TemporaryDirectory(prefix="paritygate-") as folder:
        path = Path(folder) / f"kernels-{hashlib.sha256(data).hexdigest()[:16]}.so"
        path.write_bytes(data)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _run(commands: list[list[str]], folder: str) -> None:
    """All of them side by side; raises Unavailable with the compiler's words for the first that fails."""
    try:
        running = [
            subprocess.Popen(c, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for c in commands
        ]
    except OSError as error:
        raise Unavailable(f"{commands[0][0]} cannot be run: {error}") from error
    words = [process.communicate()[1] for process in running]
    for process, said in zip(running, words, strict=True):
        if process.returncode:
            errors = [line for line in said.splitlines() if "error" in line] or [f"exit code {process.returncode}"]
            raise Unavailable(f"{commands[0][0]} could not compile the kernels: {errors[0]}")


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
