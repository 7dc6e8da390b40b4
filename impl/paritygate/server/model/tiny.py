"""A small Qwen3 with its own tokenizer, both built from nothing and the same everywhere."""

import json
from pathlib import Path

VERSION = "1"  # part of the cache key: raise it when anything below changes what is built

VOCABULARY = 480  # a multiple of 32; the grammar below has merges enough for it
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_SUBJECTS = ("The customer", "An agent", "The store", "A reader", "Somebody", "The reviewer")
_VERBS = ("returns", "exchanges", "cancels", "asks about", "confirms", "looks up", "pays for", "describes")
_OBJECTS = ("an order", "the blue lamp", "two shirts", "a gift card", "the address", "a bicycle", "the refund")
_ENDINGS = (
    "before the end of the week.",
    "and says why: it was no longer needed.",
    'with the tool call {"name": "get_order", "arguments": {"order_id": "#W1234567"}}.',
    "because the price was 19.95 instead of 24.50!",
    "after the identity was checked, as the policy asks.",
    "while the system, the user and the assistant wait?",
)


def corpus() -> list[str]:
    """The text that the tokenizer is trained on: every sentence of a small grammar, 2,016 lines of our own."""
    return [f"{s} {v} {o} {e}" for s in _SUBJECTS for v in _VERBS for o in _OBJECTS for e in _ENDINGS]


def build(folder: Path) -> None:
    """Write the model (safetensors, fp32), its config and its tokenizer into `folder`; the same bytes every time."""
    _tokenizer(folder)
    _model(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))


def _model(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        bos_token_id=None,
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    for name, value in sorted(model.state_dict().items()):
        # Variance 1 / fan-in keeps the logits of order one: neither uniform nor certain.
        scale = value.shape[-1] ** -0.5
        weights[name] = (
            torch.ones_like(value) if value.ndim == 1 else torch.randn(value.shape, generator=generator) * scale
        )
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config.eos_token_id}) + "\n")
