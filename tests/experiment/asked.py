"""spec/sdpo.json at any size: the arms, gates, partners and rule as asked for; compact prompts where speed counts."""

import json
from typing import Any

from small import ROOT


def asked_for(steps: int, items: int, **protocol: Any) -> dict[str, Any]:
    """The experiment as asked for, with `steps` steps an arm, `items` held-out tasks and other protocol keys."""
    spec = json.loads((ROOT / "spec" / "sdpo.json").read_text())
    spec["steps"], spec["dataset"]["n_examples"], spec["eval"]["n_examples"] = steps, 4 * steps, items
    spec["protocol"] = spec.get("protocol", {}) | {
        "train": {"split": "train", "shuffle_seed": 0, "first": 4 * steps},
        "evaluation": {"split": "test", "first": items},
        **protocol,
    }
    return spec


def brief(steps: int = 2, items: int = 2, **protocol: Any) -> dict[str, Any]:
    """The same with a compact prompt: episodes of hundreds of tokens, not of thousands."""
    return asked_for(steps, items, context={"kind": "compact", "why": "a test"}, **protocol)
