"""What the component writes: per-seed results, a small audit that a reader can recompute, and digests of the code."""

import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paritygate.receipts import ParityReceipt, sha256_file
from paritygate.receipts.parity import git_state
from paritygate.spec.synthetic import Synthetic
from paritygate.synthetic.training import SeedResult, TrainingBatch

NOTE = (
    "Losses (nats), counts of protected actions and gradient norms of a random student under a random teacher on a "
    "synthetic environment. None of them is a success rate, and nothing here says what an agent can do."
)
RUNNER = "impl/run.py"
MODULES = ("impl/paritygate/synthetic", "impl/paritygate/losses", "impl/paritygate/native")
SOURCES = (".py", ".cpp", ".hpp")


def artifact(
    root: Path, spec: Synthetic, results: Sequence[SeedResult], *, device: str, parity: ParityReceipt
) -> dict[str, Any]:
    """The artifact as JSON data: the same for the same tree, spec, seeds, device and torch (no clock is read).

    `commit` is the full id that git gives for HEAD, and `dirty` whether files differ from it; None outside a checkout.
    """
    return {
        "recipe": spec.recipe,
        "title": spec.title,
        "note": NOTE,
        "spec": dict(spec.frozen),
        "seeds": [result.seed for result in results],
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **git_state(root),
        "parity_receipt": parity.sha256,
        "sha256": digests(root),
        "results": [
            {"seed": result.seed, "updates": [dataclasses.asdict(update) for update in result.updates]}
            for result in results
        ],
        "audit": [row for result in results for row in audit(result, spec.audited_actions)],
    }


def digests(root: Path) -> dict[str, str]:
    """Path -> sha256 of the runner and of every source of the component, of the losses and of what compiles them."""
    modules = sorted(path for folder in MODULES for path in (root / folder).rglob("*") if path.suffix in SOURCES)
    return {str(path.relative_to(root)): sha256_file(path) for path in [root / RUNNER, *modules]}


def audit(result: SeedResult, count: int) -> list[dict[str, Any]]:
    """Up to `count` actions of the first update with everything that their gate and loss come from.

    They are taken in turn from the protected ones, the distilled ones of successful episodes, and those of failed ones.
    """
    batch = result.batches[0]
    gate = batch.loss.gate.tolist()
    succeeded = batch.packed.success[batch.packed.episode_index].tolist()
    kinds = [
        [place for place, protected in enumerate(gate) if protected],
        [place for place, protected in enumerate(gate) if succeeded[place] and not protected],
        [place for place, ok in enumerate(succeeded) if not ok],
    ]
    turns = [kind[turn] for turn in range(len(gate)) for kind in kinds if turn < len(kind)]
    return [_row(result.seed, batch, place) for place in sorted(turns[:count])]


def _row(seed: int, batch: TrainingBatch, place: int) -> dict[str, Any]:
    loss, packed = batch.loss, batch.packed
    owner = int(packed.episode_index[place])
    state = place - int((packed.episode_index < owner).sum())
    episode = batch.episodes[owner]
    at = packed.action_index == place
    return {
        "seed": seed,
        "update": 1,
        "episode": owner,
        "state": state,
        "public_history": list(episode.history[: episode.starts[state]]),
        "action": list(episode.action(state)),
        "success": episode.success,
        "student_logits": batch.student_logits.detach()[at].tolist(),
        "teacher_logits": batch.teacher_logits[at].tolist(),
        "l_p": float(loss.student_logprob[place]),
        "l_q": float(loss.teacher_logprob[place]),
        "gate": bool(loss.gate[place]),
        "kl": float(loss.kl[place]),
        "floor": float(loss.floor[place]),
        "weight": 1.0 / (len(episode.starts) * len(batch.episodes)),
    }
