"""The bounds of one server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of one server; every one has an error that names it. Bytes, tokens, seconds and counts as named."""

    request_bytes: int = 64 * 1024 * 1024
    samples_per_request: int = 256
    waiting_samples: int = 4096
    datums_per_request: int = 1024
    top_logprobs: int = 128
    scored_cells: int = 1_048_576
    adapters: int = 16
    lora_rank: int = 256
    sessions: int = 1024
    sampler_bytes: int = 1024**3
    rows: int = 64
    prefill_tokens: int = 512
    train_tokens: int = 1536
    active_cache_bytes: int = 4 * 1024**3
    prefix_cache_bytes: int = 2 * 1024**3
    result_bytes: int = 512 * 1024**2
    poll_seconds: float = 30.0
    body_seconds: float = 60.0
    out_of_order_seconds: float = 60.0
    silent_seconds: float = 35.0  # three heartbeats of the SDK, which sends one every 10 s, and some patience
    session_seconds: float = 300.0
