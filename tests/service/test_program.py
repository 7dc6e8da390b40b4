"""The program of a departure: each sequence stands in it once, what was dropped does not, and it shows the figure."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paritygate import server
from paritygate.server.engine.losses import LossInputs
from paritygate.server.engine.training import Datum, Pass
from paritygate.service.__main__ import main
from paritygate.service.journal import Journal


def test_a_sequence_is_named_once() -> None:
    journal = Journal()
    one, two = "datum([5, 6], [6, 7], weights=[1, 0.5])", "datum([5, 6], [[6, 7], [7, 6]])"
    with journal.check():
        journal.add("t1 = wait(service.create_lora_training_client(MODEL, rank=8))")
        journal.add(f"o2 = wait(t1.forward([{one}, {two}], 'cross_entropy'))")
        journal.add(f"o3 = wait(t1.forward_backward([{one}], 'cross_entropy'))")
        lines = journal.program("http://127.0.0.1:8000", "tiny", "it is off").splitlines()
    assert lines[0] == "# it is off"
    assert lines[-8:] == [
        f"d1 = {one}",
        f"d2 = {two}",
        "",
        "t1 = wait(service.create_lora_training_client(MODEL, rank=8))",
        "o2 = wait(t1.forward([d1, d2], 'cross_entropy'))",
        "o3 = wait(t1.forward_backward([d1], 'cross_entropy'))",
        "print('o2: loss:sum', o2.metrics.get('loss:sum'), 'logprobs', logprobs(o2))",
        "print('o3: loss:sum', o3.metrics.get('loss:sum'), 'logprobs', logprobs(o3))",
    ]
    compile("\n".join(lines), "program", "exec")


def test_a_call_that_is_made_twice_is_made_twice_by_the_program() -> None:
    """A shared state stands on two equal steps; what it stands on itself is not done again."""
    journal = Journal()

    def start() -> int:
        journal.add("t1 = create()")
        return 1

    def warm() -> int:
        journal.cached("start", start)
        journal.add("wait(t1.optim_step(1))")
        journal.add("wait(t1.optim_step(1))")
        return 2

    for first in ([], [("start", start)]):
        with journal.check():
            for key, make in first:
                journal.cached(key, make)
            journal.cached("warmed", warm)
            journal.cached("warmed", warm)
            assert journal.lines == ["t1 = create()", "wait(t1.optim_step(1))", "wait(t1.optim_step(1))"]


def test_the_program_shows_the_figure_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that averages over a call's datums: the program prints what its first line says, and the contrast."""
    begin = Pass.__init__

    def averaging(self: Pass, network: Any, adapter: Any, data: list[Datum], *rest: Any, **options: Any) -> None:
        shares = [{name: values / len(data) for name, values in datum.inputs.tensors.items()} for datum in data]
        inputs = [LossInputs(d.inputs.target_tokens, share) for d, share in zip(data, shares, strict=True)]
        data = [Datum(d.tokens, each) for d, each in zip(data, inputs, strict=True)]
        begin(self, network, adapter, data, *rest, **options)

    monkeypatch.setattr(Pass, "__init__", averaging)
    path = tmp_path / "p.json"
    with server.start("tiny", api_key="tml-test") as running:
        monkeypatch.setenv("TINKER_API_KEY", running.api_key)
        assert main(["--base-url", running.base_url, "--only", "sums/split", "--json", str(path), "--quiet"]) == 3
        (entry,) = [one for one in json.loads(path.read_text())["obligations"] if one["name"] == "sums/split"]
        done = subprocess.run(
            [sys.executable, "-c", entry["program"]], capture_output=True, text=True, check=True, env=dict(os.environ)
        )
    ours, contrast = done.stdout.splitlines()
    seen = re.search(r"# the step after two calls is (\S+) \(relative\) from that after one", entry["program"])
    assert seen is not None
    (shown,) = re.findall(r"^the step after two calls, from that after one .*: (\S+) \(relative\)$", ours)
    assert float(shown) == pytest.approx(float(seen[1]), rel=0.01)
    assert float(shown) > 0.2
    assert re.fullmatch(r"the contrast, that after the second call alone, from .*: \S+ \(relative\)", contrast)
