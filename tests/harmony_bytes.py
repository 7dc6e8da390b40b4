"""Bytes and harmony's control tokens, where gpt-oss's own vocabulary is in no package; and its message structure."""

import json
from typing import Any

SPECIAL = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|constrain|>")


class Bytes:
    """A vocabulary of 256 bytes and harmony's control tokens; text never becomes a control token."""

    name_or_path = "openai/gpt-oss-120b"
    unk_token_id = None
    eos_token_id = 256 + SPECIAL.index("<|return|>")

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        parts = [bytes([i]) if i < 256 else SPECIAL[i - 256].encode() for i in ids]
        return b"".join(parts).decode(errors="replace")

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return 256 + SPECIAL.index(token) if token in SPECIAL else None


class Structure:
    """Harmony's message structure over `Bytes`, where the reference encoder needs its downloaded vocabulary."""

    def __init__(self) -> None:
        self._bytes = Bytes()

    def render(self, message: Any) -> list[int]:
        special = {name: self._bytes.convert_tokens_to_ids(name) for name in SPECIAL}
        header = message.author.role.value + (f" to={message.recipient}" if message.recipient else "")
        ids = [special["<|start|>"], *self._bytes.encode(header)]
        if message.channel:
            ids += [special["<|channel|>"], *self._bytes.encode(message.channel)]
        ids.append(special["<|message|>"])
        for content in message.content:
            ids += self._bytes.encode(getattr(content, "text", None) or json.dumps(content.to_dict()))
        return [*ids, special["<|end|>"]]

    def render_conversation(self, conversation: Any) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]


def encoded(text: str) -> list[int]:
    """Token ids of harmony text in which control tokens are written out."""
    ids: list[int] = []
    while text:
        name = next((s for s in SPECIAL if text.startswith(s)), None)
        ids += [256 + SPECIAL.index(name)] if name else list(text[0].encode())
        text = text[len(name) if name else 1 :]
    return ids


def stand_in(replace: Any = setattr) -> None:
    """Where no hub and no harmony vocabulary are: bytes for gpt-oss, Qwen3.5's tokens for every other model."""
    from renderers import gpt_oss

    from paritygate.backend import connection, contact
    from paritygate.backend.vocabulary import offline

    def load(model: str, tokenizer_id: str | None = None, **_: Any) -> Any:
        return Bytes() if "gpt-oss" in model else offline("Qwen/Qwen3.5-4B")

    replace(gpt_oss, "load_harmony_encoding", lambda name: Structure())
    for module in (connection, contact):
        replace(module, "load_tokenizer", load)
