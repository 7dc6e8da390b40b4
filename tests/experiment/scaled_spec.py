"""spec/sdpo.json at any size: the arms, gates, partners and rule as asked for; small steps where speed counts."""

import json
from typing import Any

from tests.experiment.tiny_spec import ROOT


def asked_for(steps: int, items: int, tasks: int = 4, **protocol: Any) -> dict[str, Any]:
    """The experiment as asked for, with `steps` steps of `tasks` tasks an arm, `items` held-out tasks, other keys."""
    spec = json.loads((ROOT / "spec" / "sdpo.json").read_text())
    spec["steps"], spec["dataset"]["n_examples"], spec["eval"]["n_examples"] = steps, tasks * steps, items
    spec["protocol"] = spec.get("protocol", {}) | {
        "train": {"split": "train", "shuffle_seed": 0, "first": tasks * steps},
        "evaluation": {"split": "test", "first": items},
        **protocol,
    }
    return spec


def brief(steps: int = 2, items: int = 2, **protocol: Any) -> dict[str, Any]:
    """The same with two tasks of two rollouts a step and a compact prompt: hundreds of tokens, not thousands."""
    spec = asked_for(steps, items, tasks=2, context={"kind": "compact", "why": "a test"}, **protocol)
    spec["batch_size"] = 4
    spec["protocol"]["rollout"] = {"tasks_per_step": 2, "rollouts_per_task": 2}
    return spec
