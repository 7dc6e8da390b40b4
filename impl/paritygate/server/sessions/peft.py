"""An adapter as files that PEFT and vLLM load over the base model."""

import json
from pathlib import Path

from safetensors.torch import save_file

from paritygate.server.errors import RequestError
from paritygate.server.model.lora import ALPHA, Adapter
from paritygate.server.model.network import Network

FILES = ("adapter_config.json", "adapter_model.safetensors")


def check_exportable(adapter: Adapter, network: Network) -> None:
    """RequestError where the files would say something else than the server computes.

    With tied embeddings an adapted unembedding is no adapter of the base model: whoever merges it moves the input
    embeddings too.
    """
    if network.tied and "unembed" in adapter.a:
        raise RequestError(
            "this model's unembedding is adapted and shares its weight with the input embeddings, so no PEFT adapter "
            "can say what was trained; train with train_unembed=False to export weights"
        )


def write_adapter(folder: Path, adapter: Adapter, network: Network) -> None:
    """Write FILES into `folder`: LoRA A (r, in) and B (out, r) in fp32, scale lora_alpha / r.

    The base model is named by its folder here: with other weights under the same name logprobs would differ.
    """
    tensors = {}
    for name, parameter in adapter.parameters():
        target, _, matrix = name.rpartition(".")
        tensors[f"base_model.model.{network.module_name(target)}.{matrix}.weight"] = parameter.detach().contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(network.folder),
        "r": adapter.spec.rank,
        "lora_alpha": ALPHA,
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted({network.module_name(target).rpartition(".")[2] for target in adapter.a}),
    }
    (folder / FILES[0]).write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / FILES[1], metadata={"format": "pt"})
