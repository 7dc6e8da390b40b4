"""Where the data may come from, what it must be, and what a person reads when it is not."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate import retail
from paritygate.errors import ParityGateError
from paritygate.retail import layout, source
from paritygate.spec.pins import TAU_BENCH_DATABASE_SHA256


@pytest.fixture
def copied(tau_bench_dir: Path, tmp_path: Path) -> Path:
    """A writable copy, some of it unpacked: both spellings are read."""
    folder = tmp_path / "tau"
    folder.mkdir()
    for path in tau_bench_dir.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    packed = folder / "products.json.gz"
    if packed.exists():
        (folder / "products.json").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(retail.DataError) as caught:
        retail.load(folder)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "\n" not in text
    assert "make data" in text
    return text


def test_data_has_the_pinned_hash_and_says_where_it_came_from(copied: Path) -> None:
    loaded = retail.load(copied)
    assert loaded.initial_hash == TAU_BENCH_DATABASE_SHA256
    facts = loaded.provenance
    assert facts["initial_database_hash"] == TAU_BENCH_DATABASE_SHA256
    assert facts["revision"] == "59a200c6d575d595120f1cb70fea53cef0632f6b"
    assert set(facts["parts_sha256"]) == {"orders", "products", "users", "wiki", "rules", "tools"} | {
        f"tasks/{split}" for split in ("train", "dev", "test")
    }
    assert str(copied) not in json.dumps(facts)


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    packed = path.with_name(f"{path.name}.gz")
    data = json.loads(gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes())
    packed.unlink(missing_ok=True)
    path.write_text(json.dumps(change(data)), encoding="utf-8")


def raised_price(orders: Any) -> Any:
    next(iter(orders.values()))["items"][0]["price"] += 0.01
    return orders


def other_order_of_keys(users: Any) -> Any:
    """Invisible to upstream's hash, visible in every observation."""
    return {key: dict(sorted(user.items(), reverse=True)) for key, user in users.items()}


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("orders.json", "orders", raised_price),
        ("users.json", "users", other_order_of_keys),
        ("users.json", "users", lambda users: dict(list(users.items())[1:])),
        ("retail_tasks_test.json", "tasks/test", lambda tasks: tasks[1:]),
        ("retail_tasks_train.json", "tasks/train", lambda tasks: [{**tasks[0], "outputs": ["x"]}, *tasks[1:]]),
        ("rules.json", "rules", lambda rules: rules[:-1]),
        ("tools_info.json", "tools", lambda tools: tools[::-1]),
    ],
)
def test_changed_data_is_refused_naming_the_part(
    copied: Path, name: str, part: str, change: Callable[[Any], Any]
) -> None:
    edit(copied / name, change)
    assert f"{part} is not tau-bench's at 59a200c6" in refusal(copied)


def test_a_changed_policy_is_refused(copied: Path) -> None:
    (copied / "wiki.md").write_text((copied / "wiki.md").read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert "wiki is not tau-bench's" in refusal(copied)
    (copied / "wiki.md").write_bytes(b"\xff")
    assert "wiki.md: not UTF-8" in refusal(copied)


@pytest.mark.parametrize("name", ["orders.json.gz", "retail_tasks_dev.json", "wiki.md", "tools_info.json"])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    (copied / name).unlink(missing_ok=True)
    (copied / name.removesuffix(".gz")).unlink(missing_ok=True)
    assert name.removesuffix(".gz") in refusal(copied)


@pytest.mark.parametrize(
    ("name", "content"),
    [("retail_tasks_dev.json", content) for content in (b"", b"[1]", b'[{"user_id": 1}]', b"null", b'"text"')]
    + [("rules.json", b"{"), ("rules.json", b"\xff\xfe"), ("products.json", b"null"), ("products.json", b"[1]")],
)
def test_a_file_that_is_not_the_data_is_named(copied: Path, name: str, content: bytes) -> None:
    (copied / name).write_bytes(content)
    assert name.removesuffix(".json").replace("retail_tasks_", "") in refusal(copied)


def test_broken_gzip_and_a_folder_in_a_files_place(copied: Path) -> None:
    (copied / "orders.json").unlink(missing_ok=True)
    (copied / "orders.json.gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    assert "orders.json" in refusal(copied)
    (copied / "orders.json.gz").unlink()
    (copied / "orders.json").mkdir()
    assert "orders.json" in refusal(copied)


@pytest.mark.parametrize("kind", ["missing", "file", "empty"])
def test_a_folder_that_is_none(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "file":
        folder.write_text("x", encoding="utf-8")
    if kind == "empty":
        folder.mkdir()
    assert str(folder) in refusal(folder)


def test_places_are_tried_in_order(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(source, "BESIDE", tmp_path / "beside")
    monkeypatch.delenv("PARITYGATE_TAU_BENCH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(retail.DataError, match="run `make data`, or name a folder with --tau-bench or PARITYGATE_TAU"):
        retail.load()
    shutil.copytree(copied, tmp_path / "beside")
    assert retail.load().place == "beside the checkout"
    shutil.copytree(copied, tmp_path / "checkout" / "data" / "tau_bench_retail")
    assert retail.load().place == "data/tau_bench_retail"
    monkeypatch.setenv("PARITYGATE_TAU_BENCH", str(copied))
    assert retail.load().place == "PARITYGATE_TAU_BENCH"
    monkeypatch.setenv("PARITYGATE_TAU_BENCH", str(tmp_path / "gone"))
    with pytest.raises(retail.DataError, match="gone: no such folder"):  # named and missing is no reason to look on
        retail.load()
    assert retail.load(copied).place == "--tau-bench"


def test_an_error_of_the_data_is_bad_input() -> None:
    assert issubclass(retail.DataError, ParityGateError)
    assert retail.DataError.exit_code == 2
    assert tuple(sorted(layout.TABLES)) == layout.TABLES


def test_the_files_are_read_at_each_call(copied: Path) -> None:
    """One Source while they are the same; what is changed later is refused all the same, and found when put back."""
    first = retail.load(copied)
    assert retail.load(copied) is first
    for name in ("products.json", "retail_tasks_test.json", "wiki.md", "rules.json", "tools_info.json"):
        right = (copied / name).read_bytes()
        (copied / name).write_bytes(right.replace(b"the", b"teh", 1) if name != "products.json" else right + b" {")
        with pytest.raises(ParityGateError, match="`make data` fetches it again"):
            retail.load(copied)
        (copied / name).write_bytes(right)
    assert retail.load(copied).provenance == first.provenance
