"""How close a step of 16 episodes comes to its longest episode's own chain of calls, over a service with latency.

    python benchmarks/rollouts.py [--seconds 0.2] [--repeats 3]

Every call (agent turn, user turn, judge, teacher score) takes `--seconds` and computes nothing, so the best possible
wall time of a step is the longest chain of calls that wait for each other. A step must stay within 1.15 of it.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "impl")]

from paritygate.agent import Limits, collect_step, run_episode  # noqa: E402
from paritygate.agent.judge import DIMENSIONS, ModelJudge  # noqa: E402
from paritygate.agent.prompt import full  # noqa: E402
from paritygate.agent.renderer import load  # noqa: E402
from paritygate.agent.seeds import derive  # noqa: E402
from paritygate.agent.teacher import teacher_context, teacher_logprobs  # noqa: E402
from paritygate.agent.user import STOP, ModelUser  # noqa: E402
from paritygate.backend import Sample  # noqa: E402
from paritygate.backend.vocabulary import offline  # noqa: E402

BOUND = 1.15
TASKS, ROLLOUTS = (0, 1, 2, 3), 4
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
# About as long as the retail policy.
CONTEXT = full("Follow the policy of the shop. " * 500, [TOOL])
LIMITS = Limits(max_turns=12, max_tokens_per_turn=512, max_seq_len=8192)
VERDICT = json.dumps(dict.fromkeys(DIMENSIONS, 0.5) | {"rationale": "It could have asked first, and then acted."})


@dataclass(frozen=True)
class Grade:
    """A grade of nothing."""

    reward: float = 0.0


@dataclass
class Shop:
    """A task and its environment; every call of a tool is answered at once."""

    index: int
    split: str = "train"
    done: bool = False
    instruction: str = "Ask for the price."

    def call(self, name: str, arguments: Any) -> str:
        """A result of the usual size."""
        return json.dumps({"name": name, "arguments": arguments, "items": ["lamp 19.95"] * 40})

    def grade(self, agent_messages: Any) -> Grade:
        """No reward."""
        return Grade()

    def cut(self) -> Grade:
        """No reward."""
        return Grade()


class Service:
    """Answers every call after `seconds`, with texts in turn, the last one for ever; counts calls under `key`."""

    def __init__(self, renderer: Any, seconds: float, texts: list[str], calls: Counter[Any], key: Any) -> None:
        self._renderer, self._seconds, self._texts, self._calls, self._key = renderer, seconds, texts, calls, key
        self._answered = 0

    async def _wait(self) -> None:
        self._calls[self._key] += 1
        await asyncio.sleep(self._seconds)

    async def sample(self, tokens: Any, **_: Any) -> list[Sample]:
        """The next text."""
        await self._wait()
        text = self._texts[min(self._answered, len(self._texts) - 1)]
        self._answered += 1
        ids = (*self._renderer._tokenizer.encode(text), self._renderer.get_stop_token_ids()[0])
        return [Sample(ids, (-1.0,) * len(ids), "stop")]

    async def score(self, tokens: Any, last: int | None = None) -> list[float | None]:
        """A constant, of every position whatever is asked for."""
        del last
        await self._wait()
        return [None, *[-1.0] * (len(tokens) - 1)]


async def step(renderer: Any, seconds: float) -> Counter[Any]:
    """Collect one step of 16 episodes with 2 to 10 agent turns each; returns the calls of each episode."""
    calls: Counter[Any] = Counter()
    call = "<tool_call>\n<function=look>\n</function>\n</tool_call>"

    def service(texts: list[str], task: int, rollout: int) -> Any:
        return Service(renderer, seconds, texts, calls, (task, rollout))

    async def play(task: int, rollout: int) -> Any:
        turns = 1 + derive(0, task, rollout) % 5
        env = Shop(task)
        replies = ["How much is the lamp, and can I have it in blue, please?"] * turns + [STOP]
        user: Any = ModelUser(
            env,
            service(replies, task, rollout),
            renderer,
            prompt="{instruction}",
            temperature=1.0,
            max_tokens=256,
            seed=0,
        )
        agent = service([call, "It is 19.95, and I could order it in blue."] * turns, task, rollout)
        return await run_episode(
            env, renderer, agent, user, context=CONTEXT, limits=LIMITS, seed=derive(1, task, rollout), rollout=rollout
        )

    async def judge(trajectory: Any) -> Any:
        served = service([VERDICT], trajectory.task_index, trajectory.rollout)
        model = ModelJudge(served, renderer, prompt="Grade.", temperature=1.0, max_tokens=1024, seed=0)
        return await model.judge(trajectory, None)

    async def teach(rollout: int, group: Any) -> Any:
        trajectory, judgement = group[rollout].trajectory, group[rollout].judged.judgement
        sibling = group[rollout - 1].trajectory
        context = teacher_context(
            renderer, CONTEXT, trajectory, feedback=judgement.rationale, sibling=sibling, limit=LIMITS.max_seq_len
        )
        return await teacher_logprobs(service([""], trajectory.task_index, rollout), context, trajectory)

    await collect_step(TASKS, ROLLOUTS, play, judge, teach)
    return calls


def measure(seconds: float, repeats: int) -> dict[str, Any]:
    """The best of `repeats` steps against the longest chain; a first step, not counted, fills the caches."""
    renderer = load("auto", offline("Qwen/Qwen3.5-4B"))
    asyncio.run(step(renderer, 0.0))
    walls: list[float] = []
    calls: Counter[Any] = Counter()
    for _ in range(repeats):
        started = time.perf_counter()
        calls = asyncio.run(step(renderer, seconds))
        walls.append(time.perf_counter() - started)
    chain = max(calls.values()) * seconds
    return {
        "episodes": len(calls),
        "calls": sum(calls.values()),
        "longest_chain_calls": max(calls.values()),
        "longest_chain_s": chain,
        "one_after_the_other_s": sum(calls.values()) * seconds,
        "wall_s": [round(wall, 3) for wall in walls],
        "ratio": round(min(walls) / chain, 4),
        "bound": BOUND,
    }


def main() -> int:
    """Print the measurement as JSON; exit 1 above the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=0.2, help="latency of a call (default 0.2)")
    parser.add_argument("--repeats", type=int, default=3, help="steps measured; the best one counts (default 3)")
    arguments = parser.parse_args()
    result = measure(arguments.seconds, arguments.repeats)
    print(json.dumps(result, indent=1))
    return 0 if result["ratio"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
