"""Somebody else's service, through the real SDK: lost answers, billing, a failing health route, keys, models."""

import asyncio
import time
from pathlib import Path

import pytest

from paritygate.backend import BackendError, ServiceDown, connect, policy_gradient_datum
from paritygate.backend import connection as connections
from paritygate.backend.retry_after import retry_after
from paritygate.errors import BadInputError
from tests.foreign_service import KEY, serving
from tests.scripted_service import JUDGE, POLICY, USER, Script

TOKENS = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def no_other_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key of the environment or of this machine's user takes part."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "PARITYGATE_TOKENIZERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers have tests of their own."""
    monkeypatch.setattr(connections, "load_tokenizer", lambda model, tokenizer_id=None: f"words of {model}")


def call(service, act, *, key=KEY, **options):
    """act(backend) in a session at the service."""

    async def main():
        async with connect(service.url, key, **options) as backend:
            return await act(backend)

    return asyncio.run(main())


async def sampled(backend):
    sampler = await backend.sampling(base_model=USER)
    [sample] = await sampler.sample(TOKENS, max_tokens=50, temperature=1.0, seed=1, stop=[248046])
    return sample, await sampler.score(TOKENS)


async def trained(backend):
    trainer = await backend.training(POLICY, rank=8, seed=0)
    datum = policy_gradient_datum(TOKENS, [0, 1, 1, 1], [None, -1.0, -1.0, -1.0], [None, 0.5, 0.5, 0.5])
    return await trainer.forward_backward([datum])


@pytest.mark.usefixtures("any_tokenizer")
def test_a_lost_answer_is_asked_for_again_and_only_so_often():
    """410: the service has forgotten a promise; the sample or score is submitted again, a training pass never."""
    with serving(
        status=lambda kind, n: 410 if kind in ("result:asample", "result:score") and n < 2 else None
    ) as service:
        sample, scores = call(service, sampled)
        assert service.requests["asample"] == service.requests["score"] == 3
    with serving() as clean:
        assert call(clean, sampled) == (sample, scores)
    with serving(status=lambda kind, n: 410 if kind == "result:score" else None) as service:
        with pytest.raises(ServiceDown, match="Scoring failed"):
            call(service, sampled)
        assert service.requests["score"] == 4
    with serving(status=lambda kind, n: 410 if kind == "result:forward_backward" else None) as service:
        with pytest.raises(BackendError, match="forward_backward failed"):
            call(service, trained)
        assert service.requests["forward_backward"] == 1


@pytest.mark.usefixtures("any_tokenizer")
def test_another_session_waits_as_long_as_the_one_that_opened_it():
    """And hears of the end of the same embedded server."""

    async def main(url: str) -> None:
        async with connect(url, KEY, patience=7.0, limit=9.0) as backend:
            backend._guard.process_ended = lambda: None
            async with backend.session() as other:
                for name in ("patience", "limit", "process_ended", "credential"):
                    assert getattr(other._guard, name) == getattr(backend._guard, name), name

    with serving() as service:
        asyncio.run(main(service.url))


@pytest.mark.usefixtures("any_tokenizer")
def test_an_answer_lost_after_long_work_is_asked_for_again():
    """The patience that ends retries of what the SDK has retried already does not count here."""
    lost = {
        "status": lambda kind, n: 410 if kind == "result:asample" and n == 0 else None,
        "seconds": lambda model: 0.8,
    }
    with serving(**lost) as service:
        call(service, sampled, patience=0.5)
        assert service.requests["asample"] == 2


BILLING = [
    ("asample", sampled),
    ("result:asample", sampled),
    ("forward_backward", trained),
    ("result:forward_backward", trained),
    ("create_session", sampled),
    ("config", sampled),
    ("capabilities", sampled),
    ("healthz", sampled),
]


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(("kind", "act"), BILLING, ids=[kind for kind, _ in BILLING])
def test_billing_is_named_at_once_and_is_nobodys_bad_answer(kind, act):
    started = time.monotonic()
    sentence = r"http://127\.0\.0\.1:\d+ .*billing \(HTTP 402.*--resume"
    faults = {"status": lambda k, n: 402 if k == kind else None, "detail": "no funds on ACME"}
    with serving(**faults) as service, pytest.raises(ServiceDown, match=sentence):
        call(service, act)
    assert time.monotonic() - started < 10


@pytest.mark.usefixtures("any_tokenizer")
def test_a_key_that_is_revoked_while_work_goes_on_is_named():
    sentence = r"Sampling failed: the service at http://127\.0\.0\.1:\d+ refuses the API key; correct it, then --resume"
    with serving(status=lambda k, n: 401 if k == "asample" else None) as service:
        with pytest.raises(BackendError, match=sentence):
            call(service, sampled)
        assert service.refused["asample 401"] == 1


@pytest.mark.usefixtures("any_tokenizer")
def test_too_many_requests_are_waited_out_as_long_as_the_service_says():
    """The SDK would sample again after one second: one of 1.5 s is refused once, not twice."""
    asked: list[float] = []

    def status(kind: str, number: int) -> int | None:
        if kind == "asample":
            asked.append(time.monotonic())
        return 429 if kind == "asample" and number < 1 else None

    with serving(status=status, headers={"Retry-After": "1.5"}) as service:
        call(service, sampled)
        assert service.refused == {"asample 429": 1}
    assert len(asked) == 2
    assert asked[1] - asked[0] >= 1.49


RETRY_AFTER = [
    (429, "7", 7.0),
    (503, "0.5", 0.5),
    (429, "86400", 60.0),  # bounded: then it is asked again
    (429, "inf", 60.0),
    (429, "nan", 0.0),
    (429, "-3", 0.0),
    (429, "soon", 0.0),
    (429, "Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    (429, "Fri, 21 Oct 2363 07:28:00 GMT", 60.0),
    (200, "7", 0.0),
    (429, None, 0.0),
]


@pytest.mark.parametrize(("status", "value", "seconds"), RETRY_AFTER)
def test_how_long_a_service_asks_to_be_left_alone(status: int, value: str | None, seconds: float):
    assert retry_after(status, {} if value is None else {"retry-after": value}) == seconds


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("witness", ["the service names its models", "its answers alone"])
def test_a_failing_health_route_kills_nothing_while_answers_arrive(witness):
    """90 s at a patience of 60, here 2.5 s at 0.8: the wait for the result answers 408 all the while."""

    async def act(backend):
        backend._guard.interval = 0.1
        sampler = await backend.sampling(base_model=USER)
        service.faults.unhealthy = (0.0, 1e9)
        if witness == "its answers alone":
            service.faults.status = lambda kind, n: 503 if kind == "capabilities" else None
        return await sampler.score(TOKENS)

    with serving(seconds=lambda model: 2.5, poll=0.2) as service:
        assert len(call(service, act, patience=0.8)) == len(TOKENS)
        assert service.requests["score"] == 1
        assert service.refused["healthz 503"] >= 1


@pytest.mark.usefixtures("any_tokenizer")
def test_a_service_that_answers_nothing_any_more_is_left():
    async def act(backend):
        backend._guard.interval = 0.1
        sampler = await backend.sampling(base_model=USER)
        service.faults.unhealthy = (0.0, 1e9)
        service.faults.status = lambda kind, n: 503
        return await sampler.score(TOKENS)

    started = time.monotonic()
    with serving() as service, pytest.raises(ServiceDown, match="No healthy Tinker service"):
        call(service, act, patience=1.0)
    assert time.monotonic() - started < 10


def test_a_model_is_used_only_for_what_it_is_served_for():
    async def act(backend):
        backend.require(USER, trained=False)
        backend.require(POLICY, trained=True)
        with pytest.raises(BackendError, match=rf"serves {USER} only to be sampled from"):
            await backend.training(USER)
        with pytest.raises(BackendError, match="does not serve nobody/model; it serves Qwen"):
            await backend.sampling(base_model="nobody/model")
        with pytest.raises(BackendError, match=rf"serves {JUDGE} only to be trained"):
            await backend.sampling(base_model=JUDGE)

    models = {
        POLICY: {"max_context_length": 4096},  # says nothing: may be used for either
        USER: {"trainable": False, "sampleable": True},
        JUDGE: {"trainable": True, "sampleable": False},
    }
    with serving(models=models) as service:
        call(service, act)


def test_the_sdks_other_credentials_open_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def act(backend):
        return backend.models

    with serving() as service:
        with pytest.raises(BadInputError, match=r"TINKER_API_KEY.*TINKER_CREDENTIAL_CMD.*tinker auth login"):
            call(service, act, key=None)
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {KEY}")
        assert POLICY in call(service, act, key=None)
        assert service.requests["healthz"] == 2  # the first contact, and the end of the session
        monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo oops >&2")
        with pytest.raises(BadInputError, match="empty credential"):
            call(service, act, key=None)
        monkeypatch.delenv("TINKER_CREDENTIAL_CMD")
        _store(tmp_path)
        assert POLICY in call(service, act, key=None)


def _store(home: Path) -> None:
    """As `tinker auth login` stores a key."""
    from tinker.lib.credentials import JsonCredentialStore, ManualKey, default_credentials_path

    assert default_credentials_path().is_relative_to(home)
    store = JsonCredentialStore(default_credentials_path())
    store.add_key("mine", ManualKey(key=KEY, name="mine"))
    store.set_default("mine")


@pytest.mark.usefixtures("any_tokenizer")
def test_noise_is_what_the_script_says():
    async def act(backend):
        sampler = await backend.sampling(base_model=POLICY)
        first, second = [await sampler.score(list(range(2, 402))) for _ in range(2)]
        return [a - b for a, b in zip(first[1:], second[1:], strict=True)]

    with serving(Script(noise=1e-3)) as service:
        differences = call(service, act)
    spread = (sum(d * d for d in differences) / len(differences) / 2) ** 0.5
    assert 0.8e-3 < spread < 1.2e-3


@pytest.mark.usefixtures("any_tokenizer")
def test_what_is_saved_has_a_time_limit_where_one_is_asked_for_and_can_be_deleted():
    async def act(backend):
        trainer = await backend.training(POLICY, rank=8, seed=0)
        state = await trainer.save("state", 60)
        sampler = await trainer.snapshot("sampler", 60)
        kept = await trainer.snapshot("kept")
        for path in (state, sampler.path, state):  # what is gone already is no error
            await backend.delete(path)
        with pytest.raises(BackendError, match="not yours"):
            await backend.delete(kept.path)
        return state, sampler.path, kept.path

    def status(kind, number):
        return 403 if kind == "delete" and number == 3 else None

    with serving(status=status, detail="not yours") as service:
        state, sampler, kept = call(service, act)
    assert [(save["kind"], save["ttl_seconds"]) for save in service.saves] == [
        ("weights", 60),
        ("sampler_weights", 60),
        ("sampler_weights", None),
    ]
    assert service.deleted == [state, sampler]
    assert kept in service.scripted.saved


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize(("faults", "asked"), [({}, [2, 2]), ({"scores_the_end": False}, [None, None, None])])
def test_the_last_positions_alone_are_asked_for_where_the_service_can(faults, asked):
    """An older service answers with everything, which the SDK takes for a failure: it is asked so once, and no more."""

    async def act(backend):
        sampler = await backend.sampling(base_model=USER)
        return [await sampler.score(TOKENS, 2) for _ in range(2)], await sampler.score(TOKENS)

    with serving(**faults) as service:
        ends, whole = call(service, act)
    assert [scores["last"] for scores in service.scripted.scores] == [*asked, None]
    assert len(whole) == len(TOKENS)
    assert all(end[-2:] == whole[-2:] for end in ends)
    if not faults:
        assert all(end[:-2] == [None, None] for end in ends)


@pytest.mark.usefixtures("any_tokenizer")
def test_a_service_that_refuses_the_field_is_asked_without_it():
    async def act(backend):
        sampler = await backend.sampling(base_model=USER)
        return [await sampler.score(TOKENS, 2) for _ in range(2)]

    def status(kind, number):
        return 422 if kind == "score" and number == 0 else None

    with serving(status=status) as service:
        ends = call(service, act)
    assert [scores["last"] for scores in service.scripted.scores] == [None, None]
    assert None not in ends[0][1:]


@pytest.mark.usefixtures("any_tokenizer")
def test_what_a_client_has_saved_is_listed_and_of_an_unknown_one_nothing(monkeypatch):
    async def act(backend):
        trainer = await backend.training(POLICY, rank=8, seed=0)
        paths = [await trainer.save("state", 60), (await trainer.snapshot("sampler", 60)).path]
        return paths, await backend.checkpoints(trainer.model_id), await backend.checkpoints("nobody:train:0")

    with serving() as service:
        paths, listed, nothing = call(service, act)
    assert (listed, nothing) == (paths, [])
    monkeypatch.setattr(connections, "LIST_SECONDS", 0.5)
    unknown = {"status": lambda kind, n: 501 if kind == "list" else None}
    with serving(**unknown) as service, pytest.raises(BackendError, match=r"did not list what .* saved in 0\.5 s"):
        call(service, act)


@pytest.mark.usefixtures("any_tokenizer")
@pytest.mark.parametrize("code", [400, 422])
def test_a_service_that_takes_no_time_limit_saves_without_one(code):
    """It is shown once; what is refused without a limit too stays a failure."""

    async def act(backend):
        trainer = await backend.training(POLICY, rank=8, seed=0)
        return [(await trainer.snapshot("a", 60)).path, await trainer.save("b", 60), await trainer.save("c")]

    with serving(takes_limits=False, status_of_limits=code) as service:
        paths = call(service, act)
        assert [(save["path"], save["ttl_seconds"]) for save in service.saves] == [(path, None) for path in paths]
        assert service.refused == {f"limit {code}": 1}
    with serving(status=lambda kind, n: code if kind.startswith("save_weights") else None) as service:
        with pytest.raises(BackendError, match="Saving sampler weights failed"):
            call(service, act)
        assert service.requests["save_weights_for_sampler"] == 2
