"""The command: exit codes, one sentence for each bad input, results kept and resumed, and the files that it writes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paritygate import server
from paritygate.server.sessions.checkpoints import Store
from paritygate.service import receipt, report
from paritygate.service.__main__ import main
from paritygate.service.obligations import load
from tests.counts import SOAK
from tests.service.broken_services import accepting, answering, unused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")


def sentence(capsys: Any) -> str:
    """What the command said last: one line."""
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--base-url", "nonsense"], "is no address"),
        (["--base-url", "http://127.0.0.1:99999"], "is no address"),
        ([], "Name the service"),
        (["--base-url", "http://127.0.0.1:1", "--only", "gradients"], "no group or obligation"),
        (["--base-url", "http://127.0.0.1:1", "--tokens", "5-250"], "no LOW:HIGH"),
        (["--base-url", "http://127.0.0.1:1", "--tokens", "5:9"], "at least 32 ids"),
        (["--base-url", "http://127.0.0.1:1", "--rank", "0"], "--rank 0 must be above 0"),
        (["--base-url", "http://127.0.0.1:1", "--obligations", "nowhere.json"], "cannot be read"),
    ],
)
def test_bad_arguments(options: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    assert main([*options, "--json", str(tmp_path / "p.json")]) == 2
    assert words in sentence(capsys)
    assert not list(tmp_path.iterdir())


def test_a_missing_key(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    assert main(["--base-url", "http://127.0.0.1:1", "--json", str(tmp_path / "p.json")]) == 2
    assert "TINKER_API_KEY" in sentence(capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"obligations": {}, "obligations": {}}', "the key 'obligations' occurs twice"),
        ('{"tolerances": {"t": {"bound": NaN, "unit": "u"}}, "obligations": {}}', "NaN is no JSON number"),
        ("\ufeff{}", "not JSON that can be used"),
        ("[]", "no file of service obligations"),
    ],
)
def test_an_obligations_file_that_cannot_be_used(text: str, words: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "o.json"
    path.write_text(text, encoding="utf-8")
    options = ["--base-url", unused(), "--obligations", str(path), "--json", str(tmp_path / "p.json")]
    assert main(options) == 2
    assert words in sentence(capsys)
    assert [file.name for file in tmp_path.iterdir()] == ["o.json"]


@pytest.mark.parametrize("place", ["no/such/folder/p.json", ".", "file/p.json", "p.json"])
def test_an_output_that_cannot_be_written_is_said_before_anything_is_asked(
    place: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    if place == "p.json":
        (tmp_path / place).mkdir()
    assert main(["--base-url", "http://127.0.0.1:1", "--json", str(tmp_path / place)]) == 2
    assert "cannot be written" in (words := sentence(capsys)) or "is a folder" in words


@pytest.mark.parametrize(
    "text", ['{"format": "paritygate service proof 1"}', '{"format": "paritygate service proof', ""]
)
def test_a_damaged_file_of_ours_is_left_alone(text: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    assert main(["--base-url", "http://127.0.0.1:1", "--json", str(path)]) == 2
    assert str(path) in sentence(capsys)
    assert path.read_text() == text


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "p.json"
    path.write_text('{"mine": 1}')
    assert main(["--base-url", unused(), "--json", str(path)]) == 2
    assert "no service proof of ours" in sentence(capsys)
    assert path.read_text() == '{"mine": 1}'


def test_services_that_are_none(tmp_path: Path, capsys: Any) -> None:
    page = b"<!doctype html><html><body>It works!</body></html>"
    cases = [
        (answering(body=page, kind="text/html"), "HTML page"),
        (answering(status=404), "status 404"),
        (answering(status=401), "refuses the API key"),
        (answering(status=502), "status 502"),
        (accepting(closes=True), ""),
    ]
    for service, words in cases:
        with service as url:
            assert main(["--base-url", url, "--json", str(tmp_path / "p.json")]) == 5
            error = sentence(capsys)
            assert words in error
            assert url in error
    url = unused()
    assert main(["--base-url", url, "--json", str(tmp_path / "p.json")]) == 5
    assert "refused" in sentence(capsys)
    assert not list(tmp_path.iterdir())


SESSION = {
    "config": (200, b'{"pjwt_auth_enabled": false}'),
    "create_session": (200, b'{"type": "create_session", "session_id": "s"}'),
}


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((200, b"null"), 5, "an answer has another shape than tinker"),
        ((200, b"[1]"), 5, "invalid for expected schema"),
        ((402, b'{"detail": "no funds"}'), 5, "a matter of billing (HTTP 402: "),
        ((500, b"oops"), 5, "no answer within 2 s, HTTP 500 was the last failure meanwhile"),
        (
            (200, b'{"supported_models": [{"model_name": "a\\nb\\u001b[31m\\u2028"}, {}, {"model_name": "c"}]}'),
            2,
            "a b [31m , c.",
        ),
        ((200, b'{"supported_models": [{"model_name": "\\ud800x"}]}'), 5, "surrogates not allowed"),
    ],
)
def test_a_list_of_models_that_is_none(
    answer: tuple[int, bytes], code: int, words: str, tmp_path: Path, capsys: Any
) -> None:
    """One sentence without what steers a terminal, and nothing but whole files."""
    with answering(others={**SESSION, "get_server_capabilities": answer}) as url:
        options = ["--base-url", url, "--json", str(tmp_path / "p.json"), "--limit", "2", "--quiet"]
        assert main([*options, "--only", "value/ppo"]) == code
    out, err = capsys.readouterr()
    assert words in (last := err.splitlines()[-1])
    assert last.startswith("paritygate.service: ")
    assert last.isprintable()
    assert len(err.splitlines()) == 2  # the price and the sentence
    assert not out
    assert {path.name for path in tmp_path.iterdir()} <= {"p.json", "p.html"}


def test_an_answer_that_is_no_http_is_one_line(tmp_path: Path, capsys: Any) -> None:
    with accepting(closes=True, first=b"\x00\xff\x1b[31m\r\nno\r\n\r\n") as url:
        assert main(["--base-url", url, "--json", str(tmp_path / "p.json")]) == 5
    assert f"No Tinker service answers at {url} (BadStatusLine: " in (last := sentence(capsys))
    assert last.isprintable()


def test_a_service_that_takes_connections_and_says_nothing(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    from paritygate.service import connection

    monkeypatch.setattr(connection.probe, "__defaults__", (1.0,))
    with accepting(closes=False) as url:
        assert main(["--base-url", url, "--json", str(tmp_path / "p.json")]) == 5
        assert "no answer within" in sentence(capsys)


def test_a_wrong_key_and_a_model_that_is_not_served(
    running: server.Running, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    options = ["--base-url", running.base_url, "--json", str(tmp_path / "p.json")]
    monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
    assert main(options) == 5
    assert "refuses the API key" in sentence(capsys)
    monkeypatch.setenv("TINKER_API_KEY", running.api_key)
    assert main([*options, "--model", "Qwen/Qwen3-8B"]) == 2
    assert "does not serve 'Qwen/Qwen3-8B'" in sentence(capsys)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("service.Service.create_session", "this SDK is too old"),
        ("trainers.Trainers.create", "rank 8 is not served to [key]"),
        ("trainers.Trainers.forward_backward", "loss_fn_config is missing"),
    ],
)
def test_what_every_check_starts_with_is_refused(
    method: str, words: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Loud faults: an SDK that is rejected, a rank that is not served, a forward whose body is read otherwise."""
    from paritygate.server.errors import RequestError

    def refuse(*_: object) -> None:
        raise RequestError(words.replace("[key]", "tml-test"), 422)

    monkeypatch.setattr(f"paritygate.server.sessions.{method}", refuse)
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    with server.start("tiny", api_key="tml-test") as running:
        options = ["--base-url", running.base_url, "--json", str(tmp_path / "p.json"), "--limit", "20"]
        assert main([*options, "--only", "value/ppo"]) == 5
    words_shown = sentence(capsys)
    assert "refuses what every check starts with" in words_shown
    assert words in words_shown
    assert running.base_url in words_shown


def test_a_proof_from_the_command(running: server.Running, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TINKER_API_KEY", running.api_key)
    path = tmp_path / "p.json"
    assert (
        main(["--base-url", running.base_url, "--only", "value/ppo", "--only", "gradient/ppo", "--json", str(path)])
        == 0
    )
    out, err = capsys.readouterr()
    assert "3 obligations (value, gradient): about" in err
    assert "nothing departs" in out
    value = json.loads(path.read_text())
    assert {"endpoint", "model", "sdk", "noise", "obligations"} <= set(value)
    assert [entry["name"] for entry in value["obligations"]] == ["value/ppo", "gradient/cross_entropy", "gradient/ppo"]
    assert {entry["outcome"] for entry in value["obligations"]} == {"holds"}
    page = path.with_suffix(".html").read_text()
    assert "gradient/ppo" in page
    assert "http" not in page.replace(running.base_url, "")
    signed = receipt.verify(path.with_suffix(".receipt.json"))
    assert signed["model"] == running.model_name
    assert running.api_key not in path.read_text() + page + json.dumps(signed)
    a_finished_proof_is_not_replaced_by_another(running, path, capsys, monkeypatch)


def a_finished_proof_is_not_replaced_by_another(
    running: server.Running, path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Nor its receipt left beside one that replaces it and does not finish."""
    files = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    assert files.keys() == {"p.json", "p.html", "p.receipt.json"}
    options = ["--base-url", running.base_url, "--json", str(path), "--quiet"]
    for others in (["--only", "value/ppo"], ["--model", "other"], ["--base-url", unused()]):
        assert main([*options, *others]) == 2
        assert f"{path} holds a finished proof of {running.base_url}" in (refusal := sentence(capsys))
        assert "3 obligations" in refusal
        assert "--fresh" in refusal
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == files

    def interrupted(*_: Any, save: Any, earlier: Any, **__: Any) -> None:
        begun = report.read(path)
        assert begun is not None
        begun.complete = False
        save(begun)
        raise KeyboardInterrupt

    monkeypatch.setattr("paritygate.service.proof.prove_at", interrupted)
    for again in (["--only", "value/ppo", "--fresh"], ["--only", "value/ppo", "--only", "gradient/ppo"]):
        for name, data in files.items():
            path.with_name(name).write_bytes(data)
        assert main([*options, *again]) == 130
        assert {file.name for file in path.parent.iterdir()} == {"p.json", "p.html"}


def test_what_a_killed_proof_leaves_is_deleted_by_the_service(
    running: server.Running, tmp_path: Path, monkeypatch: Any
) -> None:
    limits: list[int | None] = []
    save = Store.save

    def spy(*arguments: Any, **options: Any) -> Any:
        limits.append(options["ttl_seconds"])
        return save(*arguments, **options)

    monkeypatch.setattr(Store, "save", spy)
    monkeypatch.setenv("TINKER_API_KEY", running.api_key)
    assert main(["--base-url", running.base_url, "--only", "gradient/ppo", "--json", str(tmp_path / "p.json")]) == 0
    assert set(limits) == {86_400}  # a day
    assert running.service.trainers.models == {}
    assert running.service.store.listed() == []


def test_a_service_that_stops_half_way_is_gone_on_with(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    first = server.start("tiny", api_key="tml-test")
    path = tmp_path / "p.json"

    def stop_after_three() -> None:
        while not path.exists() or len(json.loads(path.read_text())["obligations"]) < 3:
            time.sleep(0.02)
        first.stop()

    stopper = threading.Thread(target=stop_after_three)
    stopper.start()
    options = ["--base-url", first.base_url, "--only", "value", "--json", str(path)]
    assert main(options) == 5
    assert first.base_url in (last_line := sentence(capsys))
    assert last_line.endswith(" The same command goes on from here.")
    stopper.join()
    kept = json.loads(path.read_text())
    assert kept["complete"] is False
    assert len(kept["obligations"]) >= 3
    second = server.start("tiny", api_key="tml-test", port=int(first.base_url.rsplit(":", 1)[1]))
    try:
        assert main(options) == 0
    finally:
        second.stop()
    assert f"what it has of {len(kept['obligations'])} obligations is kept" in capsys.readouterr().err
    whole = json.loads(path.read_text())
    assert whole["complete"] is True
    assert whole["obligations"][: len(kept["obligations"])] == kept["obligations"]


def test_ctrl_c_keeps_what_is_known_and_the_same_command_goes_on(
    running: server.Running, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """One sentence and exit code 130, as everywhere; in the end the table is that of a proof without it."""
    monkeypatch.setenv("TINKER_API_KEY", running.api_key)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "impl"))
    path, whole = tmp_path / "p.json", tmp_path / "whole.json"
    options = ["--base-url", running.base_url, "--only", "value", "--json"]
    command = [sys.executable, "-m", "paritygate.service", *options, str(path)]
    proof = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
    while not path.exists() or len(json.loads(path.read_text())["obligations"]) < 2:
        assert proof.poll() is None
        time.sleep(0.01)
    proof.send_signal(signal.SIGINT)
    out, err = proof.communicate(timeout=60)
    assert proof.returncode == 130
    assert err.splitlines()[-1] == "paritygate.service: interrupted; the same command goes on from here."
    assert "Traceback" not in out + err
    kept = json.loads(path.read_text())
    assert kept["complete"] is False
    assert 2 <= len(kept["obligations"]) < 11
    assert {file.name for file in tmp_path.iterdir()} == {"p.json", "p.html"}
    assert running.service.trainers.models == {}
    assert running.service.store.listed() == []  # nothing is left at the service, either

    assert main([*options, str(path)]) == 0
    assert f"what it has of {len(kept['obligations'])} obligations is kept" in capsys.readouterr().err
    resumed = json.loads(path.read_text())["obligations"]
    assert resumed[: len(kept["obligations"])] == kept["obligations"]
    if SOAK:  # it costs as much again
        assert main([*options, str(whole)]) == 0
        assert table(resumed) == table(json.loads(whole.read_text())["obligations"])
    assert [one["name"] for one in resumed] == [entry.name for entry in load().only(["value"]).entries]
    assert {one["outcome"] for one in resumed} == {"holds"}


def table(obligations: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """What does not depend on when it was measured."""
    return [(one["name"], one["outcome"], one["bound"]) for one in obligations]


def test_ctrl_c_before_anything_is_known(tmp_path: Path) -> None:
    """A service that takes the connection and says nothing: the first question is what is interrupted."""
    environment = os.environ | {"TINKER_API_KEY": "tml-test", "PYTHONPATH": str(ROOT / "impl")}
    with accepting(closes=False) as url:
        options = ["--base-url", url, "--json", str(tmp_path / "p.json")]
        command = [sys.executable, "-m", "paritygate.service", *options]
        proof = subprocess.Popen(command, env=environment, stderr=-1, text=True)
        assert proof.stderr is not None
        assert "about" in proof.stderr.readline()  # the price; then it asks for the service's health
        time.sleep(0.5)
        proof.send_signal(signal.SIGINT)
        _, err = proof.communicate(timeout=30)
    assert proof.returncode == 130
    assert err == "paritygate.service: interrupted; the same command goes on from here.\n"
    assert not list(tmp_path.iterdir())
