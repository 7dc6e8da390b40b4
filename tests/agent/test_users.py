"""The user simulator: what it hears and says, what stops a conversation, what is its fault."""

import asyncio

import pytest

from paritygate import retail
from paritygate.agent import Limits, run_episode
from paritygate.agent.prompt import full
from paritygate.agent.user import ModelUser, ScriptedUser, SimulatorFault, asks_to_confirm, opening, read_reply
from paritygate.backend import BackendError, ServiceDown
from tests.agent.fakes import TOOLS, Script, Store, Task, in_order

PROMPT = "Play this customer:\n{instruction}"


@pytest.mark.parametrize(
    "text",
    [
        "I will cancel order #W1. Do you confirm (yes/no)?",
        "Shall I proceed with the return?",
        "Would you like me to go ahead?",
        "Please confirm the details above.",
        "Is this correct?",
        "Do you want me to cancel it",
        "Can you please confirm that you want to return both items?",
        "Reply below: is everything right?",
        "Should I cancel the order?",
        "Do you want me to return the lamp?",
        "Do you wish to proceed?",
        "Let me know if you'd like me to go ahead.",
        "Let me know if everything looks right.",
        'To continue, reply with "yes".',
        "Please say YES to cancel the order.",
        "I need your explicit confirmation before I change it.",
        "Once you confirm, I will process the refund.",
        "Are you sure that you want to cancel?",
        "Does that look correct to you?",
        "Are these the right items, is that okay with you?",
        "To go ahead with this exchange, may I continue?",
    ],
)
def test_the_agent_waits_for_a_confirmation(text):
    assert asks_to_confirm(text)


@pytest.mark.parametrize(
    "text",
    [
        "Is there anything else I can help you with?",
        "Your order has been cancelled.",
        "What is your email?",
        "Which item would you like to return?",
        "I have confirmed your identity.",
        "You will get an email with a confirmation.",
        "Yes, the lamp is available.",
        "I am sorry, I cannot do that.",
        "What is the reason for the return?",
        "Do you have another payment method?",
        "",
    ],
)
def test_the_agent_does_not_wait_for_a_confirmation(text):
    assert not asks_to_confirm(text)


CONFIRM = "I will cancel it. Do you confirm (yes/no)?"


@pytest.mark.parametrize(
    ("text", "agent", "expected"),
    [
        ("Hello.", None, ("Hello.", False)),
        ("Thanks! ###STOP###", "Done.", ("Thanks! ###STOP###", True)),
        ("###STOP###", "Is there anything else?", ("###STOP###", True)),
        # A marker in thinking is no marker, and thinking is not said.
        ("<think>I could ###STOP### here</think>Please go on.", "Done?", ("Please go on.", False)),
        ("<think>###STOP###", "Done.", ("", False)),
        ("hidden ###STOP###</think>Yes.", "Done.", ("Yes.", False)),
        ("<think>a</think>bye ###STOP###", "Done.", ("bye ###STOP###", True)),
        # While a confirmation is awaited, nothing stops.
        ("Yes, go ahead. ###STOP###", CONFIRM, ("Yes, go ahead.", False)),
        ("No, leave it. ###STOP###", CONFIRM, ("No, leave it.", False)),
        ("###STOP###", CONFIRM, ("", False)),
        ("   ", "Done.", ("", False)),
    ],
)
def test_what_a_reply_says_and_whether_it_stops(text, agent, expected):
    assert read_reply(text, agent) == expected


class Says:
    """A sampler for `ModelUser` that writes texts (an exception is raised instead), remembering prompts and seeds."""

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
        return await Script(in_order([[*self._tokenizer.encode(text), self._stop]])).sample(tokens, max_tokens=10_000)


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


@pytest.mark.parametrize("bad", ["", "   ", "<think>only thought", BackendError("400: too long")])
def test_an_empty_or_failing_reply_is_asked_for_again_with_another_seed(renderers, bad):
    user, says = model_user(renderers["chatml"], [bad, bad, "Here I am."])
    assert asyncio.run(user.reply(None)) == ("Here I am.", False)
    assert user.retries == 2
    assert len(set(says.seeds)) == 3


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


def test_a_stop_while_confirming_is_said_without_its_marker(renderers):
    trajectory, _ = play(renderers["chatml"], ["Cancel it.", "Yes ###STOP###", "###STOP###"], (CONFIRM, "Done."))
    assert trajectory.ended_by == "user_stop"
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == ["Cancel it.", "Yes", "###STOP###"]


def test_the_scripted_user_opens_confirms_and_stops():
    async def talk():
        user = ScriptedUser(Task())
        return [await user.reply(text) for text in (None, CONFIRM, "It is done.")]

    said = asyncio.run(talk())
    assert said[0] == ("Hi. My name is Ann Lee and my zip code is 12345. Cancel order #W1234567.", False)
    assert said[1:] == [("Yes.", False), ("###STOP###", True)]


def test_the_scripted_user_repeats_its_wish_once_and_confirms_whenever_asked():
    async def talk(texts):
        user = ScriptedUser(Task())
        return [await user.reply(text) for text in texts]

    asked = asyncio.run(talk([None, "What is your order id?", "What is your order id?"]))
    assert asked[1] == asked[0]
    assert asked[2] == ("###STOP###", True)
    assert asyncio.run(talk([None, "", ""]))[1:] == [asked[0], ("###STOP###", True)]
    assert [stop for _, stop in asyncio.run(talk([None, *[CONFIRM] * 4]))] == [False] * 5
    assert asyncio.run(talk([None, "Anything else?"]))[1] == ("###STOP###", True)


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
