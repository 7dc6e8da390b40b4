"""JSON that two readers read differently is read by none of ours: a key twice, another encoding, what is no number."""

import gzip
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate.agent.judge.judgement import parse_judgement
from paritygate.errors import BadInputError, Refused
from paritygate.experiment.run import replay
from paritygate.experiment.run.journal import Journal, read_lines
from paritygate.harness.conformance import known
from paritygate.harness.pieces import write_pieces
from paritygate.receipts import PhaseChain
from paritygate.receipts.files import read_json, sha256_file
from paritygate.receipts.parity import read_parity_receipt
from paritygate.report import files as report_files
from paritygate.retail import layout
from paritygate.server.errors import RequestError
from paritygate.server.http.requests import parse
from paritygate.server.sessions.checkpoints import Store
from paritygate.service import obligations, receipt, report
from paritygate.spec import SpecError, load
from paritygate.spec.losses import load_losses
from paritygate.spec.prices import load_prices
from paritygate.spec.project import project_at
from tests.guard.small_tree import ROOT, Tree

WRONG: dict[str, tuple[bytes, str]] = {
    "a key twice": (b'{"reward": 1, "reward": 0}', "'reward' occurs twice"),
    "a key twice inside": (b'{"a": [{"b": {"c": 1, "c": 1}}]}', "'c' occurs twice"),
    "the same key escaped": (b'{"a": 1, "\\u0061": 2}', "'a' occurs twice"),
    "a byte order mark": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), "not JSON"),
    "UTF-32": ('{"a": 1}'.encode("utf-32"), "not UTF-8"),
    "Latin-1": ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    "half of a surrogate pair": (b'{"a": "\\ud800"}', "surrogate"),
    "NaN": (b'{"a": NaN}', "NaN is no JSON number"),
    "-Infinity": (b'{"a": -Infinity}', "-Infinity is no JSON number"),
    "a float that overflows": (b'{"a": 1e999}', "too large"),
    "an integer beyond 2^53": (b'{"a": 9007199254740993}', "beyond 2\\^53"),
    "an integer beyond 2^64": (b'{"a": 18446744073709551616}', "beyond 2\\^"),
    "nesting": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "two values": (b'{"a": 1} {"a": 2}', "not JSON"),
}
INTEGERS = {"an integer beyond 2^53", "an integer beyond 2^64"}
NOT_FOR_REQUESTS = {"half of a surrogate pair", "NaN", "-Infinity", "a float that overflows"} | INTEGERS


def of_losses(path: Path) -> Any:
    shutil.copy(ROOT / "pyproject.toml", path.parent)
    (path.parent / "spec").mkdir()
    path.rename(path.parent / "spec" / "losses.json")
    return load_losses(path.parent)


def of_a_parity_receipt(path: Path) -> Any:
    return read_parity_receipt(path.rename(path.with_name(f"parity-{sha256_file(path)}.json")))


def of_a_phase(path: Path) -> Any:
    (path.parent / "phases").mkdir()
    path.rename(path.parent / "phases" / "01-design_check.json")
    return PhaseChain(path.parent)


def of_a_unit(path: Path) -> Any:
    journal = Journal(path.parent)
    (path.parent / "units").mkdir()
    path.rename(path.parent / "units" / "step-000.json")
    return journal.committed("step-000")


def of_items(path: Path) -> Any:
    path.rename(path.parent / "items.jsonl")
    return replay.verdict(path.parent)


def of_a_frozen_spec(path: Path) -> Any:
    (path.parent / "items.jsonl").write_text("")
    path.rename(path.parent / "spec.json")
    return replay.verdict(path.parent)


def of_a_checkpoint(path: Path) -> Any:
    folder = path.parent / "run" / "weights" / "a"
    folder.mkdir(parents=True)
    path.rename(folder / "checkpoint.json")
    return Store(path.parent).find("tinker://run/weights/a")


def of_tau_bench(path: Path) -> Any:
    return layout.read(path.rename(path.with_name(f"{layout.TABLES[0]}.json")).parent)


def of_packed_tau_bench(path: Path) -> Any:
    path.with_name(f"{layout.TABLES[0]}.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return layout.read(path.parent)


def line_of(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """The same for JSON Lines: one line, ended."""

    def reader(path: Path) -> Any:
        path.write_bytes(path.read_bytes() + b"\n")
        return read(path)

    return reader


READERS: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "spec/losses.json": (of_losses, Refused),
    "an experiment": (load, SpecError),
    "spec/service.json": (obligations.load, BadInputError),
    "a parity receipt": (of_a_parity_receipt, Refused),
    "a phase's receipt": (of_a_phase, Refused),
    "a unit of a run": (of_a_unit, Refused),
    "a line of a run": (line_of(read_lines), Refused),
    "verdict.json, record.json": (read_json, Refused),
    "items.jsonl": (of_items, Refused),
    "spec.json of a run": (of_a_frozen_spec, Refused),
    "a file of the report": (report_files.read_object, BadInputError),
    "a line of the report": (line_of(report_files.read_lines), BadInputError),
    "a price table": (load_prices, SpecError),
    "known departures": (known.load, BadInputError),
    "tau-bench retail": (of_tau_bench, BadInputError),
    "tau-bench retail, packed": (of_packed_tau_bench, BadInputError),
    "a service receipt": (receipt.verify, Refused),
    "an unfinished service proof": (report.read, BadInputError),
    "a saved state": (of_a_checkpoint, RequestError),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_takes_it(reader: str, kind: str, tmp_path: Path) -> None:
    """Refused for what is wrong with it, in a sentence, not for the keys that it lacks."""
    (data, words), (read, error) = WRONG[kind], READERS[reader]
    if (reader, kind) == ("a saved state", "an integer beyond 2^53"):  # as seeds are
        words = "cannot be read"
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(error, match=words) as refused:
        read(path)
    assert "Traceback" not in str(refused.value)


def test_packed_data_that_is_damaged_inside(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"{}" * 1000))
    packed[12:16] = b"\xff\xff\xff\xff"
    (tmp_path / f"{layout.TABLES[0]}.json.gz").write_bytes(packed)
    with pytest.raises(BadInputError, match="cannot be read"):
        layout.read(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", '{"departures": ["x"]}', '{"departures": {}}', '{"departures": [{"reason": 1}]}']
)
def test_known_departures_of_another_form(text: str, tmp_path: Path) -> None:
    (tmp_path / "known.json").write_text(text)
    with pytest.raises(BadInputError, match=r"is expected|has no reason"):
        known.load(tmp_path / "known.json")


@pytest.mark.parametrize("kind", sorted(WRONG.keys() - NOT_FOR_REQUESTS))
def test_a_request_is_not_answered(kind: str) -> None:
    with pytest.raises(RequestError, match="the body is not JSON"):
        parse(WRONG[kind][0])


def test_a_request_may_have_what_the_sdk_sends() -> None:
    assert parse(b'{"seed": 9223372036854775807, "x": "\xc3\xa9"}') == {"seed": 2**63 - 1, "x": "é"}
    assert parse(b"") == {}


SCORES = '"invalid_tool_use": 1, "ungrounded_claims": 1, "upfront_clarification": 1, "rationale": "fine"'


@pytest.mark.parametrize(
    "text", [f'{{{SCORES}, "invalid_tool_use": 1}}', f"\ufeff{{{SCORES}}}", f"{{{SCORES}}}".replace(" 1,", " NaN,", 1)]
)
def test_a_judge_s_answer(text: str) -> None:
    assert parse_judgement(f"{{{SCORES}}}") is not None
    assert parse_judgement(text) is None


def test_a_new_loss_is_not_added_to_a_file_that_readers_read_differently(bare: Tree) -> None:
    path = bare.root / "spec" / "losses.json"
    text = path.read_text()
    path.write_text(text.replace("{", '{"version": 1, ', 1))
    with pytest.raises(BadInputError, match="'version' occurs twice"):
        write_pieces(project_at(bare.root), "gspo")


@pytest.mark.parametrize("wide", ["1e308", "1e999", "-1e-9", '"1e-9"', "true", "null"])
def test_a_tolerance_that_holds_nothing(tmp_path: Path, wide: str) -> None:
    """A number of a tolerance class, replaced in a copy of the real file."""
    text = (ROOT / "spec" / "losses.json").read_text()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "spec").mkdir()
    for name in ("rtol", "atol"):
        changed = re.sub(rf'("{name}": )[-0-9.e]+', rf"\g<1>{wide}", text, count=1)
        assert changed != text
        (tmp_path / "spec" / "losses.json").write_text(changed)
        with pytest.raises(Refused):
            load_losses(tmp_path)
