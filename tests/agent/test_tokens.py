"""The trajectory is the tokens: whatever is sampled, what was recorded is exactly what the model saw and said."""

import asyncio
import json
import random

import pytest

from paritygate.agent import Limits, Trajectory, run_episode
from paritygate.agent.prompt import Context
from paritygate.agent.renderer import Renderer
from tests.agent.fakes import TOOLS, Script, Store, Talker, phrase
from tests.counts import soak

NAMES = ("chatml", "qwen3.5", "qwen3", "qwen3-thinking")


def completion(rng: random.Random, renderer: Renderer, tokenizer) -> list[int]:
    """Anything that a model may sample: texts, calls good and bad, several a turn, random ids, stops anywhere."""
    stops = renderer.get_stop_token_ids()
    parts: list[int] = []
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(6)
        if kind == 0:
            parts += [rng.randrange(200) for _ in range(rng.randrange(8))]
        elif kind == 1:
            parts += tokenizer.encode(phrase(rng))
        else:
            name = rng.choice([tool["function"]["name"] for tool in TOOLS] + ["nobody", ""])
            body = json.dumps({"name": name, "arguments": rng.choice(({"x": phrase(rng)}, {}, [1], "text", None))})
            xml = f"<function={name}>\n<parameter=x>\n{phrase(rng)}\n</parameter>\n</function>"
            text = f"\n{rng.choice((body, body[:-3], xml, xml[:-4], 'nonsense', ''))}\n"
            marks = [tokenizer.convert_tokens_to_ids(t) for t in ("<tool_call>", "</tool_call>")]
            if None in marks:
                parts += tokenizer.encode(f"<tool_call>{text}" + rng.choice(("</tool_call>", "")))
            else:
                parts += [marks[0], *tokenizer.encode(text), *rng.choice(([marks[1]], []))]
        if rng.random() < 0.1:
            parts.append(rng.choice(stops))
    return parts + rng.choice(([stops[0]], [stops[0]], [stops[-1]], []))


def play(seed: int, renderer: Renderer, context: Context) -> tuple[Trajectory, Script, Limits]:
    """One random episode."""
    rng = random.Random(seed)
    tokenizer = renderer._tokenizer  # pyright: ignore[reportAttributeAccessIssue]
    start = len(renderer.render_ids([{"role": "system", "content": context.system}], tools=context.rendered_tools))
    limits = Limits(
        max_turns=rng.randrange(1, 7),
        max_tokens_per_turn=rng.choice((1, 5, 40, 200)),
        max_seq_len=start + rng.choice((1, 30, 100, 400, 3000)),
    )
    script = Script(lambda prompt, turn_seed: completion(rng, renderer, tokenizer))
    user = Talker([phrase(rng) for _ in range(rng.randrange(1, 6))])
    episode = run_episode(Store(), renderer, script, user, context=context, limits=limits, seed=seed)
    return asyncio.run(episode), script, limits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["full", "compact"])
def test_the_parts_of_a_trajectory_are_the_tokens_that_the_model_saw(renderers, contexts, name, kind):
    renderer, context = renderers[name], contexts[kind]
    stops = set(renderer.get_stop_token_ids())
    endings = set()
    for seed in range(soak(quick=60, full=2000)):
        trajectory, script, limits = play(seed, renderer, context)
        endings.add(trajectory.ended_by)
        assert len(script.calls) == trajectory.turns == len(trajectory.spans)
        position = 0
        for call, (start, end) in zip(script.calls, trajectory.spans, strict=True):
            prompt, returned, max_tokens = call
            until = next((i + 1 for i, token in enumerate(returned) if token in stops), len(returned))
            assert list(trajectory.tokens[:start]) == prompt
            assert list(trajectory.tokens[start:end]) == returned[:until]
            assert not any(trajectory.mask[position:start])
            assert all(trajectory.mask[start:end])
            assert max_tokens <= limits.max_tokens_per_turn
            position = end
        # Nothing follows the last sampled token, and nothing is longer than what may be trained on.
        assert len(trajectory.tokens) == position <= limits.max_seq_len
        for number, (start, end) in enumerate(trajectory.spans, start=1):
            assert [-lp for lp in trajectory.sampler_logprobs[start:end]] == pytest.approx(
                [number + i / 1000 for i in range(end - start)]
            )
        unmasked = [lp for lp, m in zip(trajectory.sampler_logprobs, trajectory.mask, strict=True) if not m]
        assert unmasked == [None] * len(unmasked)
        assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory
        assert trajectory.turns <= limits.max_turns
    assert {"user_stop", "turn_limit", "token_limit", "sequence_limit"} <= endings


def test_a_trajectory_of_unequal_lists_is_refused(renderers, contexts):
    trajectory, _, _ = play(1, renderers["chatml"], contexts["full"])
    with pytest.raises(ValueError, match="must be as many"):
        Trajectory.from_json(trajectory.to_json() | {"mask": [0]})
