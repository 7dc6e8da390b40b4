"""What the pages name is there: files, tests and modules between backticks; and their lines fit a screen."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("impl", "reference", "tests", "spec", "design", "benchmarks", "examples", "receipts")
FILES = [
    *(path for folder in SOURCES for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts),
    *(path for path in ROOT.iterdir() if path.is_file()),
]
PATHS = {f"/{path.relative_to(ROOT).as_posix()}" for path in FILES}
HISTORY = {"LOG.md", "CHANGELOG.md"}  # say what was there
PAGES = sorted(path for path in FILES if path.suffix == ".md" and path.name not in HISTORY)
WRITTEN = {
    "report.html",
    "items.jsonl",
    "metrics.jsonl",
    "receipt.json",
    "service-proof.json",
    "vocabulary.json",
    "report.json",
}  # by a run, not here
FILE = re.compile(r"[\w./-]+\.(?:py|md|json|cpp|hpp|j2|toml)")
MODULE = re.compile(r"paritygate(?:_reference)?(?:\.\w+)+")
EXAMPLES = re.compile(r"entropy_kl|gspo\.py|verify\.py|their_pkg|my_|small_|NAME|<")


def identifiers(page: Path) -> list[str]:
    """Everything between single backticks."""
    return re.findall(r"`([^`\n]+)`", page.read_text())


def missing(text: str) -> str | None:
    """What of `text` is a name of something that is not there."""
    name, _, test = text.partition("::")
    if FILE.fullmatch(name) and not EXAMPLES.search(name) and Path(name).name not in WRITTEN:
        there = [path for path in PATHS if path.endswith(f"/{name.removeprefix('./')}")]
        if not there:
            return name
        if test and not re.search(
            rf"\b{test.replace('*', '')}", "".join((ROOT / path[1:]).read_text() for path in there)
        ):
            return text
    if MODULE.fullmatch(text):
        parts = text.split(".")
        for last in range(len(parts), 0, -1):
            module = "/".join(parts[:last])
            files = [path for path in PATHS if path.endswith((f"/{module}.py", f"/{module}/__init__.py"))]
            if files:
                rest = parts[last : last + 1]
                texts = "".join((ROOT / path[1:]).read_text() for path in files)
                return None if not rest or re.search(rf"\b{rest[0]}\b", texts) else text
        return text
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    gone = [name for text in identifiers(page) if (name := missing(text))]
    assert not gone, f"{page.name} names what is not there: {', '.join(gone)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_fit_a_screen(page: Path) -> None:
    long = [
        f"{number}: {len(line)}"
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 118 and not (line.startswith("|") and page.parent.name == "guard")  # a table that a test reads
    ]
    assert not long, f"{page.name} has lines of more than 118 characters: {', '.join(long)}"
