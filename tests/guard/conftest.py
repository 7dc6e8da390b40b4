"""Small trees: `bare` has no receipt, `tree` has a green one; each test gets a copy of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paritygate import bootstrap
from paritygate.receipts.environment import SETTINGS
from tests.guard.small_tree import Tree, build


@pytest.fixture(scope="module", autouse=True)
def no_libraries_of_this_session() -> Iterator[None]:
    """A run is judged by what its process opened; what other tests of this session opened is no part of these.

    Of the modules' scope, since modules' fixtures write receipts too.
    """
    opened = dict(bootstrap.LIBRARIES)
    bootstrap.LIBRARIES.clear()
    yield
    bootstrap.LIBRARIES.clear()
    bootstrap.LIBRARIES.update(opened)


@pytest.fixture(scope="module", autouse=True)
def no_settings_of_this_machine() -> Iterator[None]:
    """Trees are shown without what this environment chooses among machine code, and so are they judged here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SETTINGS:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def bare_template(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return build(tmp_path_factory.mktemp("bare") / "tree")


@pytest.fixture(scope="session")
def tree_template(bare_template: Tree, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = bare_template.copy(tmp_path_factory.mktemp("green") / "tree")
    output = tree.parity()
    assert "parity: green, 4 obligations" in output, output
    return tree


@pytest.fixture
def bare(bare_template: Tree, tmp_path: Path) -> Tree:
    return bare_template.copy(tmp_path / "bare")


@pytest.fixture
def tree(tree_template: Tree, tmp_path: Path) -> Tree:
    return tree_template.copy(tmp_path / "tree")
