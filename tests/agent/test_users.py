"""The user simulator: what it hears and says, what stops a conversation, what is its fault."""

import asyncio

import pytest

from paritygate import retail
from paritygate.agent import Limits, run_episode
from paritygate.agent.prompt import full
from paritygate.agent.user import ModelUser, ScriptedUser, SimulatorFault, opening, read_reply
from paritygate.backend import BackendError, Sample, ServiceDown
from tests.agent.fakes import TOOLS, Script, Store, Task, in_order

PROMPT = "Play this customer:\n{instruction}"


CONFIRM = "I will cancel it. Do you confirm (yes/no)?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello.", ("Hello.", False)),
        # Words beside the marker are said and are the last ones; the marker alone is all there is.
        ("Thanks! ###STOP###", ("Thanks!", True)),
        ("###STOP### Yes, go ahead.", ("Yes, go ahead.", True)),
        ("No, ###STOP### leave it. ###STOP###", ("No,  leave it.", True)),
        ("###STOP###", ("###STOP###", True)),
        (" ###STOP###\n###STOP###", ("###STOP###", True)),
        ("**###STOP###**", ("###STOP###", True)),
        ('"###STOP###."', ("###STOP###", True)),
        ("__###STOP###__", ("###STOP###", True)),
        ("\u00ab\u200b###STOP###\u2026\u00bb \U0001f44d", ("###STOP###", True)),
        ("\u0441\u043f\u0430\u0441\u0438\u0431\u043e ###STOP###", ("\u0441\u043f\u0430\u0441\u0438\u0431\u043e", True)),
        ("\uff13 ###STOP###", ("\uff13", True)),
        # Not the marker, whatever it looks like: the prompt asks for it exactly.
        ("\uff03\uff03\uff03STOP\uff03\uff03\uff03", ("\uff03\uff03\uff03STOP\uff03\uff03\uff03", False)),
        ("###stop###", ("###stop###", False)),
        # A marker in thinking is no marker, and thinking is not said.
        ("<think>I could ###STOP### here</think>Please go on.", ("Please go on.", False)),
        ("<think>###STOP###", ("", False)),
        ("hidden ###STOP###</think>Yes.", ("Yes.", False)),
        ("<think>a</think>bye ###STOP###", ("bye", True)),
        ("   ", ("", False)),
    ],
)
def test_what_a_reply_says_and_whether_it_stops(text, expected):
    assert read_reply(text) == expected


class Says:
    """A sampler for `ModelUser` that writes texts (an exception is raised, a tuple is cut), with prompts and seeds."""

    def __init__(self, renderer, texts):
        self._tokenizer, self._stop = renderer._tokenizer._tokenizer, renderer.get_stop_token_ids()[0]
        self._texts = list(texts)
        self.prompts: list[str] = []
        self.seeds: list[int] = []

    async def sample(self, tokens, *, seed, **_):
        self.prompts.append(self._tokenizer.decode(list(tokens)))
        self.seeds.append(seed)
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text
        if isinstance(text, tuple):
            ids = self._tokenizer.encode(text[0])
            return [Sample(tuple(ids), (0.0,) * len(ids), "length")]
        return await Script(in_order([[*self._tokenizer.encode(text), self._stop]])).sample(tokens, max_tokens=100_000)


def model_user(renderer, texts, **options):
    says = Says(renderer, texts)
    settings = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 100, "seed": 3} | options
    return ModelUser(Task(), says, renderer, **settings), says


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen3.5"])
def test_the_simulator_hears_no_thinking_and_says_none(renderers, name):
    user, says = model_user(
        renderers[name], ["<think>plan</think>Cancel it.", "<think>###STOP###</think>Yes.", "###STOP###"]
    )

    async def talk():
        first = await user.reply(None)
        second = await user.reply(f"<think>the agent's secret</think>{CONFIRM}")
        return first, second, await user.reply("Done.")

    assert asyncio.run(talk()) == (("Cancel it.", False), ("Yes.", False), ("###STOP###", True))
    assert Task().instruction in says.prompts[0]
    assert "{instruction}" not in says.prompts[0]
    assert "secret" not in says.prompts[1]
    assert CONFIRM in says.prompts[1]
    assert "plan" not in says.prompts[1].split("Cancel it.")[0].split(Task().instruction)[1]
    assert "Yes." in says.prompts[2]


NESTED = '<tool_call>{"name": "look", "arguments": ' + "[" * 50_000 + "</tool_call>"


@pytest.mark.parametrize(
    "bad", ["", "   ", "<think>only thought", BackendError("400: too long"), ("I want to",), NESTED], ids=range(6)
)
def test_an_empty_or_failing_reply_is_asked_for_again_with_another_seed(renderers, bad):
    user, says = model_user(renderers["chatml"], [bad, bad, "Here I am."])
    assert asyncio.run(user.reply(None)) == ("Here I am.", False)
    assert user.retries == 2
    assert len(set(says.seeds)) == 3


@pytest.mark.parametrize("name", ["chatml", "qwen3", "qwen3.5"])
def test_deeply_nested_json_of_a_simulator_is_no_reply(renderers, name):
    user, _ = model_user(renderers[name], [NESTED, "Here I am."])
    reply, stop = asyncio.run(user.reply(None))
    assert (reply, stop, user.retries) == ("Here I am.", False, 1)


def test_a_cut_reply_is_counted_and_asked_for_again(renderers):
    user, _ = model_user(renderers["chatml"], [("I want to cancel ###STOP###",), "Cancel it."])
    assert asyncio.run(user.reply(None)) == ("Cancel it.", False)
    assert (user.retries, user.cut_replies) == (1, 1)
    user, _ = model_user(renderers["chatml"], [("a",), ("b",), ("c",)])
    with pytest.raises(SimulatorFault):
        asyncio.run(user.reply(None))
    assert user.cut_replies == 3


def test_three_bad_replies_are_a_fault(renderers):
    user, _ = model_user(renderers["chatml"], ["", "", BackendError("500")])
    with pytest.raises(SimulatorFault):
        asyncio.run(user.reply(None))


def test_a_service_that_is_gone_is_nobodys_fault(renderers):
    user, _ = model_user(renderers["chatml"], [ServiceDown("gone")])
    with pytest.raises(ServiceDown):
        asyncio.run(user.reply(None))


def play(renderer, texts, turns=("Hello.", "Bye.")):
    user, _ = model_user(renderer, texts)
    stop = renderer.get_stop_token_ids()[0]
    script = Script(in_order([[*renderer._tokenizer.encode(text), stop] for text in turns]))
    env = Store()
    limits = Limits(max_tokens_per_turn=1000, max_seq_len=50_000)
    episode = run_episode(env, renderer, script, user, context=full("Be kind.", TOOLS), limits=limits, seed=0)
    return asyncio.run(episode), env


@pytest.mark.parametrize("texts", [["", "", ""], ["Hi.", "", "", ""]])
def test_a_fault_ends_the_episode_which_is_counted_and_never_trained_on(renderers, texts):
    trajectory, env = play(renderers["chatml"], texts)
    assert (trajectory.ended_by, trajectory.reward, env.ended) == ("user_fault", 0.0, "cut")
    assert not trajectory.trains
    assert trajectory.user_retries == 3


def test_every_reply_and_every_try_has_a_seed_of_its_own(renderers):
    user, says = model_user(renderers["chatml"], ["Hi.", "", "And?", "Bye."])
    for heard in (None, "Hello.", "What?"):
        asyncio.run(user.reply(heard))
    assert len(set(says.seeds)) == len(says.seeds) == 4


def said_by_user(trajectory):
    return [m["content"] for m in trajectory.messages if m["role"] == "user"]


CALL = '<tool_call>{"name": "cancel_pending_order", "arguments": {"x": "#W1"}}</tool_call>'


def test_the_last_words_are_said_acted_on_and_answered(renderers):
    """The agent calls what the user agreed to, then speaks: there the episode ends, without another reply."""
    turns = (CONFIRM, CALL, CALL, "It is cancelled.", "never sampled")
    trajectory, env = play(renderers["chatml"], ["Cancel it.", "Yes, go ahead. ###STOP###"], turns)
    assert (trajectory.ended_by, trajectory.reward, trajectory.turns) == ("user_stop", 1.0, 4)
    assert said_by_user(trajectory) == ["Cancel it.", "Yes, go ahead."]
    assert len(env.called) == 2
    assert trajectory.messages[-1]["content"] == "It is cancelled."


def test_a_marker_alone_ends_at_once_whatever_the_agent_said(renderers):
    """A pattern that guessed whether the agent waits for a yes was wrong both ways: these two sentences."""
    for sentence in ("I can confirm your order was cancelled.", "Do you authorize this exchange?", CONFIRM):
        trajectory, _ = play(renderers["chatml"], ["Hi.", "###STOP###"], (sentence, "never sampled"))
        assert (trajectory.ended_by, trajectory.turns) == ("user_stop", 1)
        assert said_by_user(trajectory) == ["Hi.", "###STOP###"]
        trajectory, _ = play(renderers["chatml"], ["Hi.", "Yes ###STOP###"], (sentence, CALL, "Done.", "never"))
        assert (trajectory.ended_by, trajectory.turns) == ("user_stop", 3)
        assert said_by_user(trajectory) == ["Hi.", "Yes"]


def test_an_agent_that_only_calls_after_the_last_words_meets_the_turn_limit(renderers):
    trajectory, env = play(renderers["chatml"], ["Hi.", "Yes ###STOP###"], (CONFIRM, *[CALL] * 11))
    assert (trajectory.ended_by, trajectory.reward, env.ended) == ("turn_limit", 0.0, "cut")


def test_cut_replies_are_counted_with_the_episode(renderers):
    trajectory, _ = play(renderers["chatml"], [("Canc",), "Cancel it.", ("Th",), "###STOP###"], ("Done.",))
    assert (trajectory.user_retries, trajectory.user_cut_replies) == (2, 2)
    assert trajectory.from_json(trajectory.to_json()) == trajectory


def scripted(*texts):
    async def talk():
        user = ScriptedUser(Task())
        return [await user.reply(text) for text in (None, *texts)]

    return asyncio.run(talk())


def test_the_scripted_user_opens_confirms_and_stops():
    replies = scripted(CONFIRM, "It is done.")
    assert replies[0] == ("Hi. My name is Ann Lee and my zip code is 12345. Cancel order #W1234567.", False)
    assert replies[1:] == [("Yes.", False), ("###STOP###", True)]


def test_the_scripted_user_repeats_its_wish_once_and_confirms_whenever_asked():
    opening, *asked = scripted("What is your order id?", "What is your order id?")
    assert asked == [opening, ("Yes.", True)]
    assert scripted("", "")[1:] == [opening, ("###STOP###", True)]
    assert scripted(*[CONFIRM] * 4)[1:] == [("Yes.", False)] * 4
    assert scripted("Anything else?")[1] == ("###STOP###", True)
    assert scripted("I can confirm your order was cancelled.")[1] == ("Yes.", True)
    assert scripted("Shall I proceed?", "Do you authorize this exchange?")[1:] == [opening, ("Yes.", True)]


def test_every_opening_is_in_the_first_person_and_holds_what_the_gold_needs(tau_bench_dir):
    source = retail.load(tau_bench_dir)
    for task in source.tasks("train"):
        text = opening(task)
        assert "Your" not in text
        assert "You " not in text
        assert text == opening(task)
        for arguments in (action.arguments for action in task.actions):
            needed = [*arguments.get("item_ids", ()), *arguments.get("new_item_ids", ()), arguments.get("order_id", "")]
            assert all(value in text for value in needed)
