"""Findings in a spec, each with the JSON pointer of the place."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paritygate.errors import BadInputError, printable

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where (RFC 6901 JSON pointer; "" is the whole document)."""

    pointer: str
    message: str

    def __str__(self) -> str:
        text = f"{self.pointer or '(whole file)'}: {self.message}"
        return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)  # a key may hold a terminal's commands


class SpecError(BadInputError):
    """A spec that cannot be used (exit 2); `findings` has every reason with its JSON pointer."""

    def __init__(self, path: Path | str, findings: Iterable[Finding]) -> None:
        self.path = path
        self.findings = tuple(findings)
        if len(self.findings) == 1:
            self._lines = [f"{path}: {self.findings[0]}"]
        else:
            self._lines = [f"{path}: {len(self.findings)} findings", *map(str, self.findings)]
        super().__init__("\n  ".join(self._lines))

    def __str__(self) -> str:
        return "\n  ".join(map(printable, self._lines))


def pointer(parts: Sequence[str | int]) -> str:
    """The JSON pointer of a path of keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
