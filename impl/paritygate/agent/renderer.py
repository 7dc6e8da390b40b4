"""Which renderer a model needs: one of `renderers`, or our ChatML; with text that cannot pass for control tokens."""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from renderers.base import (
    MODEL_RENDERER_MAP,
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    Renderer,
    create_renderer,
)

from paritygate.agent.chatml import ChatMLRenderer
from paritygate.errors import BadInputError

__all__ = [
    "Completion",
    "Effort",
    "GuardedRenderer",
    "GuardedTokenizer",
    "ParsedResponse",
    "RenderedTokens",
    "Renderer",
    "load",
    "read_completion",
    "resolve",
]

Effort = Literal["low", "medium", "high"]

# Harmony writes a date into its preamble, by default today's: a run must not change with the calendar.
HARMONY_DATE = "2026-01-01"
OUR_MODELS = ("HuggingFaceTB/SmolLM2-", "paritygate/tiny")
NAMES = ("chatml", "qwen3", "qwen3.5", "gpt-oss")

# A noncharacter of Unicode, which no text interchanges: between `<` and a tag's name it says that the tag is text.
_QUOTE = "\ufdd0"
_CONTROL = re.compile(rf"<(?=\|[^|<>\s]{{1,40}}\|>)|<(?={_QUOTE})|{_QUOTE}")
# Tags that are single tokens of Qwen's models, and that its templates also write themselves, in system text.
_TAG = re.compile(r"<(?=/?(?:think|tool_call|tool_response)>)")


def quoted(text: str) -> str:
    """The text with its tags marked as text, for `GuardedTokenizer`; a mark that it held before is dropped."""
    return _TAG.sub("<" + _QUOTE, text.replace(_QUOTE, ""))


class GuardedTokenizer:
    """A tokenizer for which `<|...|>` in text is text: a user or a tool cannot end a message or open another.

    The same holds for tags that `quoted` marked. Renderers emit control tokens by id, so only what somebody wrote is
    affected; decoding gives the text back.
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
            pieces.append(text[start : match.end()].rstrip(_QUOTE))
            start = match.end()
        pieces.append(text[start:])
        return [int(t) for piece in pieces if piece for t in self._tokenizer.encode(piece, add_special_tokens=False)]

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        """The text of token ids, control tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token."""
        return self._tokenizer.convert_tokens_to_ids(tokens)


class GuardedRenderer:
    """A renderer in which what a user or a tool wrote is text: no `<tool_response>` of theirs is a tool's result.

    Everything else is the wrapped renderer's. tokenizer: the guarded one, for those who read completions.
    """

    def __init__(self, renderer: Any, tokenizer: GuardedTokenizer) -> None:
        self._renderer = renderer
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Any], **options: Any) -> RenderedTokens:
        """As the wrapped renderer's, over guarded messages."""
        return self._renderer.render(_guarded(messages), **options)

    def render_ids(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """As the wrapped renderer's, over guarded messages."""
        return self._renderer.render_ids(_guarded(messages), **options)

    def bridge_to_next_turn(
        self, previous: Sequence[int], completion: Sequence[int], new_messages: Sequence[Any], **options: Any
    ) -> RenderedTokens | None:
        """As the wrapped renderer's, over guarded messages."""
        return self._renderer.bridge_to_next_turn(previous, completion, _guarded(new_messages), **options)


def _guarded(messages: Sequence[Any]) -> list[Any]:
    return [
        {**message, "content": quoted(message["content"])}
        if message["role"] in ("user", "tool") and isinstance(message["content"], str)
        else message
        for message in messages
    ]


@dataclass(frozen=True)
class Completion:
    """A sampled message, read. thinking: it never left its thoughts, and says and calls nothing, whatever they hold.

    content: its text before any call; calls: the calls after its thoughts; text: all that stands after its thoughts,
    markup included, for readers to whom tags inside a string are text; raw: everything that was sampled.
    """

    raw: str
    content: str = ""
    calls: tuple[ParsedToolCall, ...] = ()
    text: str = ""
    thinking: bool = False
    error: str | None = None  # why the renderer could not read it: the name of an exception


def read_completion(renderer: Renderer, tokens: Sequence[int], prompt: Sequence[int], tools: Any = None) -> Completion:
    """Read sampled tokens; whatever they are, there is no exception."""
    ids, guarded = list(tokens), cast(GuardedRenderer, renderer)
    stops = set(guarded.get_stop_token_ids())
    raw = guarded.tokenizer.decode(ids[: next((i for i, token in enumerate(ids) if token in stops), len(ids))])
    harmony = getattr(getattr(guarded, "config", None), "name", "") == "gpt-oss"  # its channels are no tags
    context: list[int] | None = list(prompt)
    if not harmony:
        # Thoughts are cut off here, not left to the parsers: those let a call end an open thought, and do not see, in a
        # guarded vocabulary, that the prompt opened one; then what is rehearsed is run, and what is thought is said.
        opened = guarded.tokenizer.decode(list(prompt[-8:])).rstrip().endswith("<think>")
        while opened or guarded.tokenizer.decode(ids[:8]).lstrip().startswith("<think>"):
            end = _thought_end(guarded.tokenizer, ids)
            if end is None:
                return Completion(raw, thinking=True)
            ids, opened, context = ids[end:], False, None
    try:
        parsed = renderer.parse_response(ids, tools=tools, prompt_ids=context)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, IndexError) as error:
        # Parsers of other people's formats meet text that they were not written for.
        return Completion(raw, error=type(error).__name__)
    if parsed.reasoning_complete is False:
        return Completion(raw, thinking=True)
    if harmony:
        text = "" if parsed.tool_calls else parsed.content
    else:
        text = guarded.tokenizer.decode([token for token in ids if token not in stops])
    return Completion(raw, parsed.content, tuple(parsed.tool_calls), text.strip())


def _thought_end(tokenizer: GuardedTokenizer, ids: list[int]) -> int | None:
    """The number of tokens up to and with the first end of a thought, None where there is none."""
    token = tokenizer.convert_tokens_to_ids("</think>")
    if isinstance(token, int) and token != tokenizer.unk_token_id:
        return ids.index(token) + 1 if token in ids else None
    if "</think>" not in tokenizer.decode(ids):
        return None
    return bisect.bisect_left(range(len(ids)), 1, key=lambda n: int("</think>" in tokenizer.decode(ids[:n])))


def resolve(name: str, model: str) -> str:
    """The renderer's name for `model` when `name` is "auto", else `name`; BadInputError where none is known."""
    if name != "auto":
        if name not in NAMES:
            raise BadInputError(f"There is no renderer {name!r}; there are auto, {', '.join(NAMES)}.")
        return name
    if model.startswith(OUR_MODELS):
        return "chatml"
    renderer_name = MODEL_RENDERER_MAP.get(model) or ("gpt-oss" if model.startswith("openai/gpt-oss") else None)
    if renderer_name not in NAMES:
        raise BadInputError(f"No renderer is known for {model!r}; name one of {', '.join(NAMES)} in protocol.renderer.")
    return renderer_name


def load(
    name: str, tokenizer: Any, *, model: str | None = None, thinking: bool = False, effort: Effort | None = None
) -> Renderer:
    """The renderer called `name` ("auto": by the model's name) over `tokenizer`; non-thinking unless asked.

    effort: how hard a gpt-oss model reasons (None: medium, its own default); other models have no such setting.

    Raises BadInputError when no renderer is known, the tokenizer lacks the tokens that its format needs, or harmony's
    own vocabulary (gpt-oss) cannot be loaded.
    """
    resolved = resolve(name, model or str(getattr(tokenizer, "name_or_path", "")))
    guarded = tokenizer if isinstance(tokenizer, GuardedTokenizer) else GuardedTokenizer(tokenizer)
    try:
        if resolved == "chatml":
            _require(guarded, "<|im_start|>", "<|im_end|>")
            return cast(Renderer, GuardedRenderer(ChatMLRenderer(guarded), guarded))
        made = create_renderer(guarded, _config(resolved, thinking=thinking, effort=effort))
        return cast(Renderer, GuardedRenderer(made, guarded))
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


def _config(name: str, *, thinking: bool, effort: Effort | None) -> Any:
    from renderers import configs

    # "all": a trajectory is extended over thinking turns too, where the templates would drop old thoughts.
    if name == "qwen3":
        return configs.Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all")
    if name == "qwen3.5":
        return configs.Qwen35RendererConfig(enable_thinking=thinking, thinking_retention="all")
    return configs.GptOssRendererConfig(conversation_start_date=HARMONY_DATE, reasoning_effort=effort or "medium")


def _require(tokenizer: GuardedTokenizer, *tokens: str) -> None:
    for token in tokens:
        if tokenizer.convert_tokens_to_ids(token) in (None, tokenizer.unk_token_id):
            raise AssertionError(f"token {token} is not in its vocabulary")
