"""A spec file -> frozen dataclasses, or every reason why not."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

from paritygate.spec.build import build
from paritygate.spec.error import Finding, SpecError
from paritygate.spec.experiment import ArmKind, Experiment
from paritygate.spec.findings import arm_findings, cross_findings, unresolved
from paritygate.spec.reading import read_json
from paritygate.spec.schema import violations, with_defaults
from paritygate.spec.synthetic import Synthetic


def load(path: str | Path) -> Experiment | Synthetic:
    """The frozen spec in a file: a synthetic component where it names a `recipe`, else an experiment.

    Raises SpecError (exit 2) with a JSON pointer for every finding.
    """
    path = Path(path)
    document = read_json(path)
    name = "synthetic" if "recipe" in document else "experiment"
    findings = violations(name, document)
    if findings:
        raise SpecError(path, findings)
    document = with_defaults(name, document)
    return _synthetic(path, document) if name == "synthetic" else _experiment(path, document)


def _synthetic(path: Path, document: dict[str, Any]) -> Synthetic:
    states = document["states_per_episode"]
    if states["least"] > states["most"]:
        text = f"{states['least']} is more than the {states['most']} of /states_per_episode/most"
        raise SpecError(path, [Finding("/states_per_episode/least", text)])
    return build(Synthetic, document, path=path, frozen=document, unresolved=())


def _experiment(path: Path, document: dict[str, Any]) -> Experiment:
    findings = list(arm_findings(document))
    if findings:
        raise SpecError(path, findings)
    for arm in document["arms"]:
        arm.setdefault("kind", arm["name"] if arm["name"] in get_args(ArmKind) else None)
    comparison = document["protocol"]["comparison"]
    comparison["baseline"] = comparison["baseline"] or document["arms"][0]["name"]
    comparison["treatment"] = comparison["treatment"] or document["arms"][1]["name"]
    exp = build(Experiment, document, path=path, frozen=document, unresolved=())
    findings = cross_findings(exp)
    if findings:
        raise SpecError(path, findings)
    return dataclasses.replace(exp, unresolved=unresolved(exp))
