"""The calls of a check as lines of Python: a departure is reported as a program that anyone can run."""

import re
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, ClassVar

PREFACE = """\
# {seen}
# That was seen with tinker {sdk}; this needs it and NumPy, and the key in TINKER_API_KEY.
import os
import numpy as np
import tinker
from tinker import types

MODEL = {model!r}
service = tinker.ServiceClient(base_url={base_url!r}, api_key=os.environ["TINKER_API_KEY"])

def wait(call):
    return call.result(timeout=300) if hasattr(call, "result") else call

def datum(tokens, targets, **inputs):
    inputs = {{name: np.asarray(value, np.float32) for name, value in inputs.items()}}
    inputs["target_tokens"] = np.asarray(targets, np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)

def logprobs(output):
    return np.concatenate([o["logprobs"].to_numpy().ravel() for o in output.loss_fn_outputs])
"""

RESULT = re.compile(r"[olr]\d+ = wait\(")  # of a pass, of compute_logprobs, of sample
PRINTED = {
    "o": "print('{0}: loss:sum', {0}.metrics.get('loss:sum'), 'logprobs', logprobs({0}))",
    "l": "print('{0}:', {0})",
    "r": "print('{0}:', [list(one.tokens) for one in {0}.sequences])",
}
PROBE = re.compile(r"p\d+ = logprobs\(")
DATUM = re.compile(r"datum\([^()]*\)")


@dataclass
class Journal:
    """Lines of the running check, with those of what it uses from before in front of them."""

    lines: list[str] = field(default_factory=list[str])
    _counter: int = 0
    _used: set[str] = field(default_factory=set[str])
    _cache: dict[str, tuple[Any, list[str]]] = field(default_factory=dict[str, tuple[Any, list[str]]])

    def add(self, line: str) -> None:
        self.lines.append(line)

    def name(self, prefix: str) -> str:
        """A variable name that no other line uses."""
        self._counter += 1
        return f"{prefix}{self._counter}"

    @contextmanager
    def check(self) -> Generator[None]:
        """A new program starts."""
        self.lines, self._used = [], set()
        yield

    def cached(self, key: str, make: Callable[[], Any], *, record: bool = True) -> Any:
        """`make()` once; every check that uses the value has its lines, unless not `record`."""
        if key not in self._cache:
            outer, used = self.lines, self._used
            self.lines, self._used = [], set()
            try:
                value = make()
            finally:
                made, self.lines, self._used = self.lines, outer, used
            self._cache[key] = (value, made if record else [])
        value, made = self._cache[key]
        if key not in self._used:
            self._used.add(key)
            there = set(self.lines)  # of what `made` stands on; a line that `made` has twice is two calls
            self.lines.extend(line for line in made if line not in there)
        return value

    def results(self, prefix: str) -> list[str]:
        """The variables of the running check that hold a call's result: o of passes, l of scores, r of samples."""
        return [line.split(" = ", 1)[0] for line in self.lines if re.match(prefix + r"\d+ = wait\(", line)]

    def drop(self, prefix: str) -> None:
        """Forget the cached values whose keys begin so."""
        self._cache = {key: value for key, value in self._cache.items() if not key.startswith(prefix)}

    def program(self, base_url: str, model: str, seen: str) -> str:
        """`seen`, then the lines with what they need, each datum named once.

        It prints distances, else what moved, else its last results.
        """
        lines = [*self.lines]
        results, probes = ([line.split(" = ", 1)[0] for line in lines if kind.match(line)] for kind in (RESULT, PROBE))
        if not any(line.startswith("print(") for line in lines):
            if len(probes) > 1:
                change = f"np.abs({probes[-1]} - {probes[0]}).max()"
                lines.append(f"print('largest change of a logprob since the first probe:', {change})")
            elif results:
                last = [name for name in results if name[0] == results[-1][0]]
                last = last[-5:] if last[-1][0] == "r" else last[-2:]
                lines.extend(PRINTED[name[0]].format(name) for name in last)
        data: dict[str, str] = {}
        lines = [DATUM.sub(lambda code: data.setdefault(code[0], f"d{len(data) + 1}"), line) for line in lines]
        named = [f"{name} = {code}" for code, name in data.items()]
        comment = textwrap.fill(" ".join(seen.split()), 116, subsequent_indent="# ")
        preface = PREFACE.format(base_url=base_url, model=model, seen=comment, sdk=version("tinker"))
        return preface + "\n".join(["", *named, "", *lines, ""])


def number(value: float) -> str:
    """A float32 value as short Python."""
    return f"{value:.9g}"


def numbers(values: Any) -> str:
    """A nested list of numbers as Python."""
    if isinstance(values, Sequence) or hasattr(values, "__iter__"):
        return "[" + ", ".join(numbers(value) for value in values) + "]"
    return str(int(values)) if float(values).is_integer() and abs(values) < 1e9 else number(float(values))


class PathCode:
    """Which variable of the program holds a saved path: another run's path would be another one."""

    _names: ClassVar[dict[str, str]] = {}

    @classmethod
    def of(cls, path: str) -> str:
        return cls._names.get(path, repr(path))

    @classmethod
    def remember(cls, path: str, name: str) -> None:
        cls._names[path] = name
