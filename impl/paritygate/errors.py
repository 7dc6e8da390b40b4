"""The errors a person sees: each carries the exit code of the command line and one sentence, without a key in it."""

import json
import os
import re
from urllib.parse import quote

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")  # lone surrogates, too
SHORTEST = 8  # characters of a key that is a secret: tml-none is taken for one, tml- is not
JWT = re.compile(r"eyJ[\w-]{6,}\.[\w-]{6,}\.[\w-]*")  # what an SDK may have been given for a key
_KEYS: set[str] = set()


class ParityGateError(Exception):
    """Base of every error that is not a bug of ours; `exit_code` is what the command line returns."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


def remember_key(key: str | None) -> None:
    """Never show `key`, which a request carries; TINKER_API_KEY need not be named."""
    if key is not None and len(key) >= SHORTEST:
        _KEYS.add(key)


def redacted(text: str) -> str:
    """`text` with [key] for every key that requests carry: TINKER_API_KEY, what `remember_key` was given, any JWT.

    A service may say in an answer what it was sent. All that is printed or written of what a service said goes through
    here, before it is cut: half of a key is shown as little as a whole one.
    """
    given = os.environ.get("TINKER_API_KEY", "")
    keys = _KEYS | {given} if len(given) >= SHORTEST else _KEYS
    for key in sorted(keys, key=len, reverse=True):
        for form in {key: 0, repr(key)[1:-1]: 0, json.dumps(key)[1:-1]: 0, quote(key, safe=""): 0}:
            text = text.replace(form, "[key]")
    return JWT.sub("[key]", text)


def printable(text: str) -> str:
    """`text` redacted and in one line: a blank for what would end it, steer a terminal or be no UTF-8."""
    return redacted(UNPRINTABLE.sub(" ", text))


def one_line(text: str, most: int) -> str:
    """What a service said, as a clause of a sentence: printable, of at most `most` characters."""
    return printable(" ".join(text.split()))[:most]


class BadInputError(ParityGateError):
    """Arguments, a spec or data that cannot be used (exit 2)."""

    exit_code = 2


class Refused(ParityGateError):  # noqa: N818 - the field's word: a guard refuses
    """No green parity for this tree, or a receipt that does not verify (exit 3)."""

    exit_code = 3


class GateStopped(ParityGateError):  # noqa: N818
    """A gate of the protocol stopped the run (exit 4)."""

    exit_code = 4


class BackendError(ParityGateError):
    """The service failed after its retries; the run can be resumed (exit 5)."""

    exit_code = 5
