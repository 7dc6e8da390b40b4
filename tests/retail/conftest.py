"""The real retail data and its transcripts, loaded once a session."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paritygate import retail


@pytest.fixture(scope="session")
def source(tau_bench_dir: Path) -> retail.Source:
    return retail.load(tau_bench_dir)


@pytest.fixture(scope="session")
def transcript(tau_bench_dir: Path) -> Callable[[str], list[dict[str, Any]]]:
    def read(name: str) -> list[dict[str, Any]]:
        path = tau_bench_dir / "transcripts" / f"{name}.jsonl.gz"
        if not path.exists():
            pytest.skip(f"{path.name} was not recorded in this tau-bench folder: the transcripts come with a checkout")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    return read
