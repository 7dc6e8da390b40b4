"""What a parity session need not wait for: the compilers, which run beside the first tests, and the collector."""

import gc
import threading

import pytest

from paritygate.harness.session import obligations_of
from paritygate.losses.engines import cpp
from paritygate.server.model import products

BUILDS: list[threading.Thread] = []


def needs_kernels(item: pytest.Item) -> bool:
    """Whether a test may ask for a compiled library."""
    return not {"sdpo", "spod"}.isdisjoint(name.partition("/")[0] for name in obligations_of(item))


def is_of_a_run(item: pytest.Item) -> bool:
    """Whether every run stands on the test's loss: its embedded server opens a library, and the receipt has to name it.

    A receipt for grpo and policy_gradient alone is enough for an experiment whose arms need no other loss.
    """
    return any(name.startswith("policy_gradient/") for name in obligations_of(item))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds where they are needed, a thread a library; keep the garbage collector from what is imported."""
    ours = not session.config.getoption("--implementation") and not session.config.getoption("collectonly")
    if ours and any(needs_kernels(item) or is_of_a_run(item) for item in session.items):
        BUILDS.extend(threading.Thread(target=build) for build in (cpp.unavailable, products.available))
    for build in BUILDS:
        build.start()
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait for the libraries: asked for again meanwhile, they would be built twice."""
    if needs_kernels(item):
        for build in BUILDS:
            build.join()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """The libraries are there before the receipt is written."""
    for build in BUILDS:
        build.join()
