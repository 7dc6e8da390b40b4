"""`pytest tests/service --service URL [--service-model NAME]` proves that service; without URL the embedded one."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paritygate.address import checked_url
from paritygate.errors import ParityGateError
from paritygate.service.connection import Connection
from paritygate.service.lab import Lab, Settings
from paritygate.service.proof import only_model
from paritygate.service.runner import first_contact, prepare

if TYPE_CHECKING:
    from paritygate import server


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("service")
    group.addoption("--service", metavar="URL", help="the Tinker-compatible service to prove; its key: TINKER_API_KEY")
    group.addoption("--service-model", metavar="NAME", help="its base model; default: the only one")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A named service is proved, and nothing else is tested."""
    others = collection_path.suffix == ".py" and collection_path.name != "test_proof.py"
    return True if config.getoption("--service", default=None) and others else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The SDK never closes the connection that it fetches its configuration with: that warning is not ours."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="module", autouse=True)
def sdk_garbage() -> Iterator[None]:
    """Collect what the SDK leaves while its warning is silenced, not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def running() -> "Iterator[server.Running]":
    """A server of the tiny model in this process, with room for half of the adapters that it has by default.

    A check that holds more is refused here: two clients that prove one service at once would meet the limit.
    """
    from paritygate import server
    from paritygate.server.limits import Limits

    running = server.start("tiny", limits=Limits(adapters=Limits().adapters // 2))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def foreign(request: pytest.FixtureRequest) -> bool:
    """Whether a service is named, which may be undecided and refuse; the embedded one must hold."""
    return bool(request.config.getoption("--service", default=None))


@contextmanager
def as_the_command() -> Iterator[None]:
    """What ends the command ends the session: with its sentence and its exit code."""
    try:
        yield
    except ParityGateError as error:
        pytest.exit(str(error), error.exit_code)


@pytest.fixture(scope="session")
def ending(foreign: bool) -> Callable[[], AbstractContextManager[None]]:
    """Around what asks a service; the embedded one's errors are failures."""
    return as_the_command if foreign else nullcontext


@pytest.fixture(scope="session")
def lab(
    request: pytest.FixtureRequest, foreign: bool, ending: Callable[[], AbstractContextManager[None]]
) -> Iterator[Lab]:
    """The lab at the named service, else at the embedded server, warmed, calibrated and with its noise measured."""
    if foreign:
        with as_the_command():
            url = checked_url(request.config.getoption("--service"), "--service")
        connection = Connection(url, request.config.getoption("service_key") or "tml-none", "")
        lab = Lab(connection)
        with as_the_command():
            connection.probe(10.0)
            models = first_contact(lab)
            connection.model = request.config.getoption("--service-model") or only_model(models, url)
    else:
        running = request.getfixturevalue("running")
        connection = Connection(running.base_url, running.api_key, running.model_name)
        lab = Lab(connection, replace(Settings(), draws=1024))
    with ending():
        prepare(lab)
    yield lab
    lab.close()
