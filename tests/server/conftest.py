"""One tiny server for all server tests, and clients of the real SDK for it."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"  # before the SDK is imported: it would post to the server otherwise

import httpx
import pytest

from paritygate import server
from paritygate.server.limits import Limits


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
def running() -> Iterator[server.Running]:
    """A server of the tiny model in this process."""
    running = server.start("tiny", limits=Limits(adapters=32))  # a module is one session
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(running: server.Running) -> Any:
    """The real SDK's ServiceClient, connected."""
    import tinker

    client = tinker.ServiceClient(base_url=running.base_url, api_key=running.api_key)
    yield client
    client.close("success").result()


@pytest.fixture
def http(running: server.Running) -> Iterator[httpx.Client]:
    """A bare HTTP client with the key."""
    with httpx.Client(
        base_url=f"{running.base_url}/api/v1/", headers={"X-API-Key": running.api_key}, timeout=30, trust_env=False
    ) as http:
        yield http


@pytest.fixture(scope="session")
def network() -> Any:
    """The tiny network without a server around it."""
    from paritygate.server.model import sources
    from paritygate.server.model.network import Network

    return Network(sources.resolve("tiny").folder)
