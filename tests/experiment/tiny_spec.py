"""A small real experiment: the local spec with the tiny model, two steps of two tasks with two rollouts."""

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TINY = "paritygate/tiny-qwen3"


def local_spec() -> dict[str, Any]:
    """spec/sdpo-local.json as data."""
    return json.loads((ROOT / "spec" / "sdpo-local.json").read_text())


def small_spec(**protocol: Any) -> dict[str, Any]:
    """The local experiment made small: every phase but the warm start, gates that an untrained model can pass.

    Keys of `protocol` replace those of the spec's protocol.
    """
    spec = copy.deepcopy(local_spec())
    spec["base_model"] = TINY
    spec["steps"], spec["batch_size"], spec["dataset"]["n_examples"], spec["eval"]["n_examples"] = 2, 4, 4, 4
    spec["budget"]["max_wall_minutes"] = 600
    spec["experiment_features"]["warmup_adaptation"] = False
    train, held_out = spec["protocol"]["train"], spec["protocol"]["evaluation"]
    train["tasks"], held_out["tasks"] = train["tasks"][:4], held_out["tasks"][:4]
    spec["protocol"]["rollout"] = {
        "tasks_per_step": 2,
        "rollouts_per_task": 2,
        "max_turns": 2,
        "max_tokens_per_turn": 12,
    }
    spec["protocol"]["warm_start"] = None
    spec["protocol"]["service"] = {"embedded_model": "tiny"}
    spec["protocol"] |= protocol
    for check in spec["activation_gate"]["checks"]:
        if check["metric"] == "executed_base_model":
            check["one_of"] = [TINY]
        if check["metric"] == "grpo_frac_groups_nonzero_adv":
            check["min"] = 0.0
        if check["metric"].startswith("sdpo_frac_tokens"):
            check["min"] = 0.0
    return spec


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    """The spec as a file in `folder`."""
    path = folder / "spec.json"
    path.write_text(json.dumps(spec, indent=1))
    return path


def small_at_a_service(**protocol: Any) -> dict[str, Any]:
    """The same with GPU hours to spend: behind an address it counts as a service."""
    spec = small_spec(**protocol)
    spec["budget"]["gpu_hours"] = 100
    return spec
