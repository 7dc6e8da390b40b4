"""What every session here starts from: no steering from outside, and the harness as [tool.paritygate] configures it."""

import os
import signal
import sys
from pathlib import Path

import pytest

# No test, and no process that one starts, inherits what points elsewhere: in a hook or `git rebase --exec` GIT_DIR is
# the caller's repository, TINKER_* name a service that costs money, PYTEST_ADDOPTS steers sessions inside sessions.
SERVICE_KEY = os.environ.get("TINKER_API_KEY")  # for `pytest tests/service --service URL` alone
ELSEWHERE = ("GIT_", "TINKER_", "PYTEST_ADDOPTS", "PYTEST_PLUGINS")
for elsewhere in [name for name in os.environ if name.startswith(ELSEWHERE)]:
    del os.environ[elsewhere]
os.environ["TINKER_TELEMETRY"] = "0"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` in a script: processes here would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
PREFIX, sys.pycache_prefix = sys.pycache_prefix, os.devnull  # no cached bytecode of what is imported next can exist
sys.modules.pop("paritygate_pytest", None)  # an installed one may have found this session: this checkout's is judged
import paritygate_pytest  # noqa: E402

sys.pycache_prefix = PREFIX


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The harness, where plugins are not loaded by themselves or the checkout is not installed.

    Not for the proof of a service, which needs the SDK, NumPy and pytest alone.
    """
    config = pluginmanager.get_plugin("pytestconfig")
    if not any(str(argument).startswith("--service") for argument in config.invocation_params.args):
        paritygate_pytest.pytest_addoption(parser, pluginmanager)


def pytest_configure(config: pytest.Config) -> None:
    config.option.service_key = SERVICE_KEY
    config.addinivalue_line("markers", "upstream: compares with another project, where that is installed")


@pytest.fixture(scope="session")
def tau_bench_dir() -> Path:
    """The folder of tau-bench retail that PARITYGATE_TAU_BENCH names; skips without it, fails under CI."""
    folder = os.environ.get("PARITYGATE_TAU_BENCH", "")
    if folder and (Path(folder) / "tools_info.json").is_file():
        return Path(folder)
    message = f"PARITYGATE_TAU_BENCH ({folder or 'not set'}) names no tau-bench retail folder: make data fetches one"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
