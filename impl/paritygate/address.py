"""The address of a service: usable, and without a secret in it, since it is shown and stored as it is."""

import re
from urllib.parse import unquote, urlsplit

from paritygate.errors import BadInputError, redacted

KEY = re.compile(r"(?<![\w-])(tml-|eyJ)")  # as the SDK's keys begin


def checked_url(url: str, name: str) -> str:
    """`url`, which the user gave as `name`, without a final slash; BadInputError unless it is http(s) with a host.

    Refused as well, and not shown: a user name or password before the host, a query, a fragment. No request of the SDK
    would carry the first, and none could be made of the others. So is a key between slashes: an address is in every
    receipt, journal and page, and one with [key] in it would be none.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(char.isspace() or not char.isprintable() for char in url):
        raise BadInputError(f"{name} {shown(url)!r} is no address; it looks like http://127.0.0.1:8000.")
    if shown(url) != url:
        raise BadInputError(
            f"{name} {shown(url)!r} holds more than an address, which is not shown here: the key belongs in "
            "TINKER_API_KEY, not before the host or between slashes (tml-..., eyJ...), and nothing after a ? or #."
        )
    return url.rstrip("/")


def shown(text: str) -> str:
    """What may be shown of a text that was given as an address: of one with an @, ?, # or a key, the scheme alone."""
    rest = unquote(text).partition("://")[2] or f"/{unquote(text)}"
    key = redacted(text) != text or KEY.search(rest.partition("/")[2])  # a host may be called tml-gateway
    if not key and not any(mark in text for mark in "@?#"):
        return text
    scheme, mark, _ = text.partition("://")
    return f"{scheme}://..." if mark and scheme.isalpha() else "..."
