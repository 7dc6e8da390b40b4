"""First contact: address, key, models and tokenizers are named within ten seconds, before anything is shown."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate.backend import BackendError
from paritygate.backend import contact as contacts
from paritygate.backend.contact import Need, first_contact
from paritygate.backend.tokenizers import load_tokenizer
from paritygate.errors import BadInputError
from tests.foreign_service import KEY, serving
from tests.scripted_service import JUDGE, POLICY, USER

NEEDS = (Need("policy", POLICY, trained=True), Need("user simulator", USER), Need("judge", JUDGE))


@pytest.fixture(autouse=True)
def no_other_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key of the environment or of this machine's user takes part."""
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "PARITYGATE_TOKENIZERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def contact(service, needs=NEEDS, key=KEY):
    return asyncio.run(first_contact(needs, service.url, key))


@pytest.fixture
def tokenizer_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tokenizers, laid out both ways; the hub is away."""
    import shutil

    from paritygate.server.model.sources import resolve

    folder = tmp_path / "tokenizers"
    for place in (USER, JUDGE.rsplit("/", 1)[-1]):
        (folder / place).mkdir(parents=True)
        for path in Path(resolve("tiny").folder).glob("*token*"):
            shutil.copy(path, folder / place)
        (folder / place / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    monkeypatch.setenv("PARITYGATE_TOKENIZERS", str(folder))
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    load_tokenizer.cache_clear()
    return folder


def test_first_contact_names_what_is_missing_within_ten_seconds(tokenizer_folder: Path):
    started = time.monotonic()
    with serving() as service:
        summary = contact(service)
        assert summary.context_lengths[JUDGE] == 131072
        assert set(summary.tokenizers) == {POLICY, USER, JUDGE}
        assert summary.tokenizers[USER].encode("<|im_end|>", add_special_tokens=False) == [
            summary.tokenizers[USER].convert_tokens_to_ids("<|im_end|>")
        ]
        with pytest.raises(BackendError, match="refuses the API key"):
            contact(service, key="tml-other")
        with pytest.raises(BackendError, match=rf"does not serve my/model, the judge; it serves {POLICY}"):
            contact(service, [Need("judge", "my/model")])
        with pytest.raises(BackendError, match=rf"reports {USER}, the policy, as not trainable"):
            contact(service, [Need("policy", USER, trained=True)])
        assert service.requests["create_session"] == 0
    for status, says in ((401, "refuses the API key"), (403, "refuses the API key"), (402, r"billing \(HTTP 402")):
        # many a health route answers whoever asks
        faults = {"status": lambda kind, n, status=status: status if kind == "capabilities" else None}
        with serving(**faults) as service, pytest.raises(BackendError, match=says):
            contact(service)
    silent = {"status": lambda kind, n: 404 if kind == "capabilities" else None}
    with serving(**silent) as service, pytest.raises(BackendError, match=r"does not say which models it serves.*404"):
        contact(service)
    assert time.monotonic() - started < 30


def test_a_tokenizer_that_no_training_client_will_name_is_missed_at_once(tokenizer_folder: Path):
    """A service behind a tunnel has a local address: of a model that it does not train it names no folder either."""
    import shutil

    shutil.rmtree(tokenizer_folder / USER)
    with serving() as service, pytest.raises(BadInputError, match=f"tokenizer of {USER} cannot be loaded"):
        contact(service)
    models = {POLICY: {}, USER: {}, JUDGE: {}}  # says nothing of their use
    with serving(models=models) as service:
        assert contact(service).tokenizers[USER] is None


def test_a_dead_address_is_named_before_the_sdk_is_imported():
    """The seconds of two tries are all it takes, not those of importing torch."""
    lines = (
        "import asyncio, sys",
        "from paritygate.backend.contact import first_contact",
        "try:",
        f"    asyncio.run(first_contact([], 'http://127.0.0.1:9', {KEY!r}))",
        "except Exception as error:",
        "    print(type(error).__name__, {'tinker', 'torch', 'transformers', 'renderers'} & set(sys.modules))",
    )
    impl = str(Path(contacts.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=os.environ | {"PYTHONPATH": impl},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "ServiceDown set()\n"


def test_probe_and_capabilities_share_the_seconds_of_first_contact(monkeypatch: pytest.MonkeyPatch):
    """Of ten seconds eight are the service's: two tries of 3 with 0.5 between them, and the models in what is left."""
    assert (contacts.SECONDS, contacts.TRY_SECONDS) == (8.0, 3.0)
    granted: list[float] = []

    async def slow(base_url: str, token: str, *, seconds: float) -> None:
        granted.append(seconds)
        await asyncio.sleep(0.2)

    async def models(base_url: str, token: str, seconds: float) -> dict[str, Any]:
        granted.append(seconds)
        return {}

    monkeypatch.setattr(contacts, "probe", slow)
    monkeypatch.setattr(contacts, "_capabilities", models)
    asyncio.run(first_contact((), "http://127.0.0.1:9", KEY))
    assert granted[0] == 3.0
    assert 5.0 < granted[1] <= 7.8


def test_a_tokenizer_that_is_nowhere_is_named_with_what_helps(tokenizer_folder: Path, monkeypatch):
    assert load_tokenizer(POLICY).name_or_path == POLICY  # the package's vocabulary
    sentence = r"tokenizer of some/model cannot be loaded .*FOLDER/some/model.*PARITYGATE_TOKENIZERS=FOLDER.*HF_HOME"
    with pytest.raises(BadInputError, match=sentence):
        load_tokenizer("some/model")
    (tokenizer_folder / "some/model").mkdir(parents=True)
    with pytest.raises(BadInputError, match=r"some/model holds no tokenizer of some/model"):
        load_tokenizer("some/model")
    monkeypatch.setenv("PARITYGATE_TOKENIZERS", str(tokenizer_folder / "nothing"))
    with pytest.raises(BadInputError, match=r"PARITYGATE_TOKENIZERS names .*nothing, which is no folder"):
        load_tokenizer("another/model")


@pytest.mark.parametrize("flag", ["trainable", "sampleable"])
def test_what_is_trained_is_sampled_too(flag: str):
    trained, asked = Need("policy", POLICY, trained=True), Need("judge", POLICY)
    served = {POLICY: {"trainable": True, "sampleable": True, flag: False}}
    with pytest.raises(BackendError, match=rf"reports {POLICY}, the policy, as not {flag}\."):
        contacts._require("http://service", trained, served)
    if flag == "trainable":
        contacts._require("http://service", asked, served)
