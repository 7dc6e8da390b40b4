"""A digest of a tokenizer: a run's numbers are about its token ids, and a service may change its vocabulary."""

import hashlib
from typing import Any

from paritygate.receipts import digest

PROBE = (
    "Your order #W0000000 is cancelled: $1,234.50 goes back to gift_card_0000000.",
    '{"name": "get_user_details", "arguments": {"user_id": "yusuf_rossi_9620"}}',
    "naïve façade \u4f60\u597d \U0001f600\n\n\t  end",
)


def tokenizer_digest(tokenizer: Any) -> dict[str, str]:
    """{"of", "sha256"}: of its serialised form, else of its vocabulary, else of the ids of a fixed text.

    A fast tokenizer of transformers gives its `tokenizer.json`; an adapter gives no more than encodings.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        return {"of": "tokenizer.json", "sha256": hashlib.sha256(backend.to_str().encode()).hexdigest()}
    if hasattr(tokenizer, "get_vocab"):
        return {"of": "vocabulary", "sha256": digest(dict(tokenizer.get_vocab()))}
    ids = [[int(token) for token in tokenizer.encode(text)] for text in PROBE]
    return {"of": "the ids of a fixed text", "sha256": digest(ids)}
