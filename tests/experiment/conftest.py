"""Runs of the protocol in this process, on the scripted service or on the tiny model, with the guard stood in for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paritygate import experiment
from paritygate.agent import renderer
from paritygate.backend.contact import Contact
from paritygate.backend.vocabulary import offline
from paritygate.experiment import audit
from paritygate.server import Running, start
from paritygate.spec import Experiment, load
from tests.experiment import stub_guard
from tests.experiment.tiny_spec import ROOT, write_spec
from tests.scripted_service import JUDGE, POLICY, ScriptedService

Run = Callable[..., Any]


@pytest.fixture
def guard_passes(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The guard answers with a stand-in receipt; it has tests of its own."""
    stub_guard.install(tmp_path_factory.mktemp("receipts"), monkeypatch)


@pytest.fixture
def run_spec(guard_passes: None, tmp_path: Path, tau_bench_dir: Path) -> Run:
    """run_spec(spec, service=None, **options): the experiment in tmp_path/run, on the embedded server or a stand-in."""

    def run(spec: dict[str, Any] | Experiment, **options: Any) -> Any:
        exp = spec if isinstance(spec, Experiment) else load(write_spec(tmp_path, spec))
        arguments = {"output": tmp_path / "run", "tau_bench": tau_bench_dir, "quiet": True} | options
        return experiment.run_experiment(exp, root=ROOT, **arguments)

    return run


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[ScriptedService], ScriptedService]:
    """scripted(service): every connection leads to it. Harmony has no vocabulary here, so Qwen writes for it."""
    from tests.experiment import model_gradients  # noqa: F401 - keeps the real `connect`

    real = renderer.load

    def load_renderer(name: str, tokenizer: Any, *, model: str | None = None, **options: Any) -> Any:
        if model == JUDGE:
            return real("qwen3.5", offline(POLICY), **options)
        return real(name, tokenizer, model=model, **options)

    async def met(needs: Any, url: str) -> Contact:
        return Contact(url, (), {}, {need.model: None for need in needs})

    def use(service: ScriptedService) -> ScriptedService:
        monkeypatch.setattr("paritygate.backend.connect", service.connect)
        monkeypatch.setenv("TINKER_BASE_URL", service.endpoint)
        monkeypatch.setattr("paritygate.backend.contact.first_contact", met)
        monkeypatch.setattr(renderer, "load", load_renderer)
        return service

    return use


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out a slow part that has tests of its own: the page."""
    monkeypatch.setattr("paritygate.report.write", lambda directory: (directory / "report.html").write_text("page"))


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """audited(run): the run held against itself; its digests, and its page where that is left out, are tested alone."""
    monkeypatch.setattr(audit, "replay", lambda *_: ["the verdict"])
    monkeypatch.setattr(audit, "check_page", lambda *_: "no page")
    return lambda run: audit.audit(run, ROOT)


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Running]:
    """The embedded server with the tiny model in this process."""
    server = start("tiny")
    yield server
    server.stop()


@pytest.fixture
def at_tiny(monkeypatch: pytest.MonkeyPatch, tiny_server: Running) -> Callable[[str], None]:
    """at_tiny(url): runs go to the tiny server at `url`, its own address or a proxy's."""

    def use(url: str) -> None:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", tiny_server.api_key)

    return use
