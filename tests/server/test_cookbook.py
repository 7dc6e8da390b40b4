"""tinker-cookbook's own trainers, a few steps each, against the embedded server, where the cookbook is installed.

`make cookbook` installs it. Datasets and environments are ours and tiny; clients, batching, losses, checkpoints and
metrics are the cookbook's.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from paritygate import server

pytest.importorskip("tinker_cookbook", reason="make cookbook installs tinker-cookbook")
chz = pytest.importorskip("chz", reason="make cookbook installs chz")

from tinker_cookbook import renderers, tokenizer_utils  # noqa: E402
from tinker_cookbook.distillation import sdft, train_on_policy  # noqa: E402
from tinker_cookbook.distillation.datasets import DistillationDatasetConfig, TeacherConfig  # noqa: E402
from tinker_cookbook.preference import train_dpo  # noqa: E402
from tinker_cookbook.rl import train as rl  # noqa: E402
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult  # noqa: E402
from tinker_cookbook.supervised import train as supervised  # noqa: E402
from tinker_cookbook.supervised.types import (  # noqa: E402
    ChatDatasetBuilder,
    ChatDatasetBuilderCommonConfig,
    SupervisedDataset,
    SupervisedDatasetBuilder,
)

pytestmark = pytest.mark.filterwarnings("default")  # the cookbook's own warnings are not ours

MODEL = "paritygate/tiny-qwen3"
RENDERER = "role_colon"
QUESTION, ANSWER, OTHER = "Where is the order?", "The order is on its way.", "No."


@pytest.fixture(autouse=True)
def at_the_server(running: server.Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server's key and tokenizer; the price list, which lies on the network, is not asked for."""
    monkeypatch.setenv("TINKER_API_KEY", running.api_key)
    monkeypatch.setattr("tinker_cookbook.utils.cost_estimation.load_model_pricing", lambda **_: None)
    tokenizer_utils.register_tokenizer(MODEL, lambda: running.service.engine.decoder)
    yield running.base_url
    tokenizer_utils.unregister_tokenizer(MODEL)


def renderer() -> Any:
    return renderers.get_renderer(RENDERER, tokenizer_utils.get_tokenizer(MODEL))


def datum(answer: str) -> tinker.Datum:
    """The answer trained on after the question, by the cookbook's renderer."""
    from tinker_cookbook.supervised.common import datum_from_model_input_weights

    messages: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
    return datum_from_model_input_weights(*renderer().build_supervised_example(messages), max_length=None)


class Batches(SupervisedDataset):
    def __init__(self, answers: list[str]) -> None:
        self.answers = answers

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return [datum(answer) for answer in self.answers]

    def __len__(self) -> int:
        return 4

    def set_epoch(self, seed: int = 0) -> None:
        pass


@chz.chz
class Answers(SupervisedDatasetBuilder):
    def __call__(self) -> tuple[SupervisedDataset, None]:
        return Batches([ANSWER, OTHER]), None


@chz.chz
class Pairs(ChatDatasetBuilder):
    def __call__(self) -> tuple[SupervisedDataset, None]:
        return Batches([ANSWER, OTHER]), None


class Even(Env):
    """The reward is the share of even tokens."""

    async def initial_observation(self) -> Any:
        return renderer().build_generation_prompt([{"role": "user", "content": QUESTION}]), []

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        share = sum(token % 2 == 0 for token in action) / max(len(action), 1)
        return StepResult(share, True, tinker.ModelInput.empty(), [])


class Group(EnvGroupBuilder):
    async def make_envs(self) -> list[Env]:
        return [Even() for _ in range(4)]


class Groups(RLDataset):
    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [Group(), Group()]

    def __len__(self) -> int:
        return 3


@chz.chz
class GroupsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, None]:
        return Groups(), None


class Demonstrations:
    """What self-distillation takes: groups, their questions, their golden answers."""

    def get_batch(self, index: int) -> tuple[list[EnvGroupBuilder], list[str], list[str]]:
        return [Group()], [QUESTION], [ANSWER]

    def __len__(self) -> int:
        return 2


def options(folder: Path, base_url: str) -> dict[str, Any]:
    return {
        "log_path": str(folder),
        "model_name": MODEL,
        "recipe_name": "test",
        "renderer_name": RENDERER,
        "base_url": base_url,
        "lora_rank": 4,
        "learning_rate": 0.005,
    }


def rows(folder: Path, name: str) -> list[float]:
    """A metric, step by step, of the steps that have it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def test_supervised_and_a_resumed_run(at_the_server: str, tmp_path: Path) -> None:
    config = options(tmp_path, at_the_server) | {"dataset_builder": Answers(), "lr_schedule": "constant"}
    asyncio.run(supervised.main(supervised.Config(**config, max_steps=2, save_every=1)))
    assert len(rows(tmp_path, "train_mean_nll")) == 2
    lines = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    (tmp_path / "checkpoints.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines if line["name"] != "final")
    )
    asyncio.run(supervised.main(supervised.Config(**config, max_steps=4)))  # from the checkpoint of step 1
    losses = rows(tmp_path, "train_mean_nll")
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]
    rest = tinker.ServiceClient(base_url=at_the_server).create_rest_client()
    run = rest.get_training_run_by_tinker_path(lines[0]["state_path"]).result()
    assert run.user_metadata is not None
    assert run.user_metadata["renderer_name"] == RENDERER


@pytest.mark.parametrize("mode", ["sync", "async", "streaming", "kl"])
def test_reinforcement_learning(at_the_server: str, tmp_path: Path, mode: str) -> None:
    more: dict[str, Any] = {
        "sync": {"loss_fn": "ppo"},
        "async": {"async_config": rl.AsyncConfig(max_steps_off_policy=1, groups_per_batch=2, loss_fn="ppo")},
        "streaming": {"stream_minibatch_config": rl.StreamMinibatchConfig(groups_per_batch=2, num_minibatches=2)},
        "kl": {"kl_penalty_coef": 0.1, "kl_reference_config": rl.KLReferenceConfig(base_model=MODEL)},
    }[mode]
    config = options(tmp_path, at_the_server) | {"dataset_builder": GroupsBuilder(), "max_tokens": 8}
    asyncio.run(rl.main(rl.Config(**config, **more, save_every=1)))
    rewards = rows(tmp_path, "env/all/reward/total")
    assert len(rewards) == 3
    assert all(0.0 < reward < 1.0 for reward in rewards)
    [*difference] = rows(tmp_path, "optim/kl_sample_train_v1")
    assert abs(difference[0]) < 1e-6  # what was sampled is scored alike by the trainer, to float32
    names = [json.loads(line)["name"] for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert names[-1] == "final"


def test_on_policy_distillation_of_a_trained_teacher(at_the_server: str, tmp_path: Path) -> None:
    """By a fresh adapter the student is its base model: a base teacher is as near as float32 has it."""
    client = tinker.ServiceClient(base_url=at_the_server)
    trainer = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for _ in range(3):
        trainer.forward_backward([datum(ANSWER)], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    taught = trainer.save_weights_for_sampler("teacher").result().path
    first: dict[str | None, float] = {}
    for path in (None, taught):
        folder = tmp_path / ("base" if path is None else "taught")
        teacher = TeacherConfig(base_model=MODEL, load_checkpoint_path=path)
        config = options(folder, at_the_server) | {
            "dataset_configs": [
                DistillationDatasetConfig(dataset_builder=GroupsBuilder(), teacher_config=teacher, groups_per_batch=2)
            ],
            "max_tokens": 8,
        }
        asyncio.run(train_on_policy.main(train_on_policy.Config(**config, max_steps=2)))
        distances = rows(folder, "teacher_kl")
        assert len(distances) == 2
        first[path] = distances[0]
    assert abs(first[None]) < 1e-5
    assert first[taught] > 0.05
    client.close("success").result()


@pytest.mark.parametrize("way", [{"topk": 4}, {"topk": 0, "loss_fn": "importance_sampling"}])
def test_self_distillation(at_the_server: str, tmp_path: Path, way: dict[str, Any]) -> None:
    config = sdft.Config(**options(tmp_path, at_the_server), **way, max_tokens=6)
    asyncio.run(sdft.main(config, Demonstrations()))
    assert len(rows(tmp_path, "progress/batch")) == 2
    names = [json.loads(line)["name"] for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert names[-1] == "final"


def test_preferences(at_the_server: str, tmp_path: Path) -> None:
    """DPO's loss is log 2 where the policy is its reference, and falls; its margin rises from 0."""
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL, renderer_name=RENDERER, max_length=None, batch_size=2
    )
    config = options(tmp_path, at_the_server) | {"dataset_builder": Pairs(common_config=common), "save_every": 0}
    train_dpo.main(train_dpo.Config(**config, lr_schedule="constant"))
    losses, margins = rows(tmp_path, "dpo_loss"), rows(tmp_path, "margin")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses == sorted(losses, reverse=True)
    assert margins == sorted(margins)
    assert margins[-1] > 0.01
