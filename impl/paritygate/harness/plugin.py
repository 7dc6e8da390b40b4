"""The pytest plugin of a repository with [tool.paritygate]: options, fixtures, and the parity session."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.assertion import rewrite
from hypothesis.configuration import set_hypothesis_home_dir

from paritygate.errors import BadInputError, Refused
from paritygate.harness import ledger
from paritygate.harness.implementation import Implementation, LossMissingError, losses_under_test
from paritygate.harness.session import Session
from paritygate.receipts.environment import require_device
from paritygate.spec.losses import device_class, load_losses
from paritygate.spec.project import project_at

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: two threads that wait for each other are slower than one


def read_no_cached_tests(folders: Sequence[Path]) -> None:
    """Keep pytest from reading and writing its cache of rewritten test files below `folders`."""
    cache_dir = rewrite.get_cache_dir
    rewrite.get_cache_dir = lambda path: (
        Path(os.devnull) if any(path.is_relative_to(folder) for folder in folders) else cache_dir(path)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device, --losses, --obligations, --implementation."""
    group = parser.getgroup("parity")
    group.addoption("--device", default="cpu", metavar="D", help="torch device of the obligations: cpu, cuda, cuda:1")
    group.addoption(
        "--losses", metavar="NAMES", help="show these losses alone, separated by commas: a receipt for them"
    )
    group.addoption(
        "--obligations",
        metavar="NAMES",
        help="hold these obligations alone, separated by commas; comparisons for others are left out: no receipt",
    )
    group.addoption(
        "--implementation",
        metavar="MODULE",
        help="hold MODULE (submodules and names of the configured implementation) to the obligations: no receipt",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Open the ledger of the session."""
    config.addinivalue_line("markers", "obligation(*names): this test shows these obligations of the spec")
    config.addinivalue_line("markers", "gpu: needs a CUDA device; with --device cuda every obligation test has it too")
    device = str(config.getoption("--device"))
    try:
        require_device(device)
    except BadInputError as error:
        raise pytest.UsageError(str(error)) from error
    if device_class(device) == "cpu" and str(config.getoption("markexpr")).strip() == "gpu":
        raise pytest.UsageError("-m gpu runs on a CUDA device: add --device cuda.")
    seed = hypothesis_profile(config)
    try:
        project = project_at(config.rootpath)
        ledger.LEDGER = ledger.Ledger(load_losses(project.root), device)
        config.pluginmanager.register(Session(config, project, ledger.LEDGER, seed), "parity-session")
    except Refused as refusal:
        raise pytest.UsageError(str(refusal)) from refusal


def hypothesis_profile(config: pytest.Config) -> str | None:
    """Load the profile of every session, derandomised unless --hypothesis-seed is given, and return that seed."""
    seed = config.getoption("--hypothesis-seed", default=None)
    set_hypothesis_home_dir(config.rootpath / ".hypothesis")
    hypothesis.settings.register_profile(
        "parity",
        derandomize=seed is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a busy machine is no finding
    )
    hypothesis.settings.load_profile("parity")
    return None if seed is None else str(seed)


@pytest.fixture(scope="session")
def losses(pytestconfig: pytest.Config) -> Any:
    """The losses under test, a submodule a loss: the configured implementation, or the module of --implementation."""
    assert ledger.LEDGER is not None
    declared = ledger.LEDGER.spec["losses"]
    package = pytestconfig.getoption("--implementation")
    if package:
        functions = {name for loss in declared.values() for name in loss["functions"]}
        return Implementation.of(package, frozenset(declared.keys() | functions))
    chosen = pytestconfig.getoption("--losses")
    try:
        return losses_under_test(project_at(pytestconfig.rootpath).package, chosen.split(",") if chosen else declared)
    except LossMissingError as error:
        sentence = str(error)
    pytest.fail(sentence, pytrace=False)  # no traceback: every test asks for the losses


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """The torch device string of --device."""
    return str(pytestconfig.getoption("--device"))
