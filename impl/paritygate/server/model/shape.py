"""The sizes of a model, and which models the packed attention can run."""

from dataclasses import dataclass
from typing import Any

from paritygate.errors import BadInputError

_UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling", "num_experts")


@dataclass(frozen=True)
class Shape:
    """The sizes that the cache needs, and the longest sequence."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context: int
    end_tokens: frozenset[int]


def read_shape(config: Any, generation: Any) -> Shape:
    """Read the sizes; raise BadInputError for what the packed attention would get wrong."""
    for name in _UNSUPPORTED:
        if getattr(config, name, None) not in (None, 0, 1, 1.0):
            raise BadInputError(f"model type {config.model_type}: its config sets {name}, which is not supported")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or getattr(config, "use_sliding_window", False):
        raise BadInputError(f"model type {config.model_type}: only full causal attention is supported")
    heads = config.num_attention_heads
    ends = generation.eos_token_id if generation and generation.eos_token_id is not None else config.eos_token_id
    return Shape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        end_tokens=frozenset([ends] if isinstance(ends, int) else ends or []),
    )
