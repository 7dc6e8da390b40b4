"""Stands in for the proof of the service in tests of the protocol: everything that was asked for holds, at once.

The proof itself is tested in tests/service, and the phase with a real one in test_service_proof.py and test_foreign.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from paritygate.experiment.plan.service_obligations import proof_settings, stands_on
from paritygate.service.connection import Usage
from paritygate.service.lab import Noise, Settings
from paritygate.service.obligations import Obligations
from paritygate.service.report import Report
from paritygate.service.runner import Result

USED = {"prefill": 9000, "sampled": 2500, "trained": 3100}
"""Tokens that the stand-in says it has used; about those of a real proof."""


def prove_at(
    url: str, api_key: str | None, model: str, obligations: Obligations, *, settings: Settings, save: Any, **more: Any
) -> Report:
    """A finished report without a call."""
    return proving({})(url, api_key, model, obligations, settings=settings, save=save, **more)


def proving(others: Mapping[str, Result]) -> Callable[..., Report]:
    """A `prove_at` that finds `others`, by name, and that all else holds."""

    def prove(
        url: str,
        _: str | None,
        model: str,
        obligations: Obligations,
        *,
        settings: Settings,
        save: Any,
        usage: Usage,
        **__: Any,
    ) -> Report:
        for kind, tokens in USED.items():
            usage.count(kind, tokens)
        held = {e.name: Result(e.name, "holds", 0.0, e.bound, because="stand-in") for e in obligations.entries}
        report = _empty(url, model, obligations, asdict(settings))
        report.complete = True
        report.results = list((held | dict(others)).values())
        save(report)
        return report

    return prove


def report_of(url: str, model: str, exp: Any) -> Report:
    """The report of an experiment's proof that has not shown anything yet."""
    return _empty(url, model, stands_on(exp), proof_settings(exp))


def _empty(url: str, model: str, obligations: Obligations, settings: dict[str, Any]) -> Report:
    time = "2026-12-01T00:00:00+00:00"
    return Report(url, model, [model], "stand-in", obligations.sha256, settings, asdict(Noise()), time=time)
