"""What a parity session need not wait for: the compilers, which run beside the first tests, and the collector."""

import contextlib
import gc
import importlib
import os
import threading
from collections.abc import Callable

import pytest

from paritygate.harness.session import obligations_of
from paritygate.losses.engines import cpp
from paritygate.server.model import products

BUILDS: list[threading.Thread] = []


def needs_kernels(item: pytest.Item) -> bool:
    """Whether a test may ask for a compiled library; what holds the reference to 60 digits asks for none."""
    names = {name.partition("/")[0] for name in obligations_of(item)}
    return "losses" in item.fixturenames and not names.isdisjoint({"sdpo", "spod"})


def needs_server(item: pytest.Item) -> bool:
    """Whether a test asks for the embedded server's network."""
    return any(name.endswith("/service_gradient") for name in obligations_of(item))


def is_of_a_run(item: pytest.Item) -> bool:
    """Whether every run stands on the test's loss: its embedded server opens a library, and the receipt has to name it.

    A receipt for grpo and policy_gradient alone is enough for an experiment whose arms need no other loss.
    """
    return any(name.startswith("policy_gradient/") for name in obligations_of(item))


def build_behind(build: Callable[[], object]) -> None:
    """Start a build in a thread of its own; it and its compilers take what the tests leave of the cores."""

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread, on Linux; its processes inherit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        build()

    BUILDS.append(threading.Thread(target=run))
    BUILDS[-1].start()


def pytest_configure(config: pytest.Config) -> None:
    """Start the builds that a whole session needs while its tests are collected; collect no garbage of imports."""
    gc.disable()
    if not (config.getoption("--implementation") or config.getoption("--losses") or config.getoption("collectonly")):
        start_builds()


def start_builds() -> None:
    """A thread a library, once."""
    for build in () if BUILDS else (cpp.unavailable, products.available):
        build_behind(build)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs no compiled library goes first: it runs beside the compilers."""
    items.sort(key=needs_kernels)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the builds where they are needed; keep the garbage collector from what is imported."""
    ours = not session.config.getoption("--implementation") and not session.config.getoption("collectonly")
    if ours and any(needs_kernels(item) or is_of_a_run(item) for item in session.items):
        start_builds()
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Wait for the libraries: asked for again meanwhile, they would be built twice."""
    if needs_kernels(item):
        if any(build.is_alive() for build in BUILDS) and any(needs_server(other) for other in item.session.items):
            importlib.import_module("transformers.modeling_utils")  # two to four seconds that pass here in any case
        for build in BUILDS:
            build.join()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """The libraries are there before the receipt is written."""
    for build in BUILDS:
        build.join()
