"""The spec of the component, whole and at a size for many repeats."""

import dataclasses
from pathlib import Path

import pytest

from paritygate.spec import Synthetic, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def spec() -> Synthetic:
    loaded = load(ROOT / "spec" / "spod.json")
    assert isinstance(loaded, Synthetic)
    return loaded


@pytest.fixture(scope="session")
def small(spec: Synthetic) -> Synthetic:
    return dataclasses.replace(spec, seeds=(42,), episodes_per_update=4)
