"""Which renderer a model needs: one of `renderers`, or our ChatML; with text that cannot pass for control tokens."""

import re
from typing import Any

from renderers.base import MODEL_RENDERER_MAP, ParsedResponse, RenderedTokens, Renderer, create_renderer

from paritygate.agent.chatml import ChatMLRenderer
from paritygate.errors import BadInputError

__all__ = ["GuardedTokenizer", "ParsedResponse", "RenderedTokens", "Renderer", "load", "resolve"]

# Harmony writes a date into its preamble, by default today's: a run must not change with the calendar.
HARMONY_DATE = "2026-01-01"
OUR_MODELS = ("HuggingFaceTB/SmolLM2-", "paritygate/tiny")
NAMES = ("chatml", "qwen3", "qwen3.5", "gpt-oss")

_CONTROL = re.compile(r"<(?=\|[^|<>\s]{1,40}\|>)")


class GuardedTokenizer:
    """A tokenizer for which `<|...|>` in text is text: a user or a tool cannot end a message or open another.

    Renderers emit control tokens by id, so only what somebody wrote is affected; decoding gives the text back.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name_or_path: str = getattr(tokenizer, "name_or_path", "")
        self.unk_token_id: int | None = getattr(tokenizer, "unk_token_id", None)
        self.eos_token_id: int | None = getattr(tokenizer, "eos_token_id", None)

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Token ids of text, without special tokens added, and with none of the `<|...|>` kind recognised in it."""
        pieces: list[str] = []
        start = 0
        for match in _CONTROL.finditer(text):
            pieces.append(text[start : match.end()])
            start = match.end()
        pieces.append(text[start:])
        return [int(t) for piece in pieces if piece for t in self._tokenizer.encode(piece, add_special_tokens=False)]

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """The text of token ids, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token."""
        return self._tokenizer.convert_tokens_to_ids(tokens)


def resolve(name: str, model: str) -> str:
    """The renderer's name for `model` when `name` is "auto", else `name`; BadInputError where none is known."""
    if name != "auto":
        if name not in NAMES:
            raise BadInputError(f"There is no renderer {name!r}; there are auto, {', '.join(NAMES)}.")
        return name
    if model.startswith(OUR_MODELS):
        return "chatml"
    found = MODEL_RENDERER_MAP.get(model) or ("gpt-oss" if model.startswith("openai/gpt-oss") else None)
    if found not in NAMES:
        raise BadInputError(f"No renderer is known for {model!r}; name one of {', '.join(NAMES)} in protocol.renderer.")
    return found


def load(name: str, tokenizer: Any, *, model: str | None = None, thinking: bool = False) -> Renderer:
    """The renderer called `name` ("auto": by the model's name) over `tokenizer`; non-thinking unless asked.

    Raises BadInputError when no renderer is known, the tokenizer lacks the tokens that its format needs, or harmony's
    own vocabulary (gpt-oss) cannot be loaded.
    """
    resolved = resolve(name, model or str(getattr(tokenizer, "name_or_path", "")))
    guarded = tokenizer if isinstance(tokenizer, GuardedTokenizer) else GuardedTokenizer(tokenizer)
    try:
        if resolved == "chatml":
            _require(guarded, "<|im_start|>", "<|im_end|>")
            return ChatMLRenderer(guarded)  # pyright: ignore[reportReturnType]
        return create_renderer(guarded, _config(resolved, thinking=thinking))
    except AssertionError as error:
        fit = f"Renderer {resolved} does not fit the tokenizer {guarded.name_or_path!r}: {error}"
        raise BadInputError(fit) from None
    except Exception as error:
        if resolved != "gpt-oss":
            raise
        # openai-harmony loads its vocabulary by itself, from the network unless it finds a copy.
        raise BadInputError(
            f"The harmony vocabulary of gpt-oss cannot be loaded ({error}); put o200k_base.tiktoken into a folder and "
            "name that folder in TIKTOKEN_ENCODINGS_BASE."
        ) from error


def _config(name: str, *, thinking: bool) -> Any:
    from renderers import configs

    # "all": a trajectory is extended over thinking turns too, where the templates would drop old thoughts.
    if name == "qwen3":
        return configs.Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all")
    if name == "qwen3.5":
        return configs.Qwen35RendererConfig(enable_thinking=thinking, thinking_retention="all")
    return configs.GptOssRendererConfig(conversation_start_date=HARMONY_DATE)


def _require(tokenizer: GuardedTokenizer, *tokens: str) -> None:
    for token in tokens:
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise AssertionError(f"token {token} is not in its vocabulary")
