"""A spec file -> frozen dataclasses, or every reason why not."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from paritygate.spec import strict
from paritygate.spec.error import Finding, SpecError
from paritygate.spec.experiment import ArmKind, Experiment
from paritygate.spec.findings import arm_findings, cross_findings, unresolved
from paritygate.spec.schema import violations, with_defaults
from paritygate.spec.synthetic import Synthetic

T = TypeVar("T")
MOST_BYTES = 4 * 2**20


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
        named = "entry_point" if arm["loss"] is not None else arm["name"]
        arm.setdefault("kind", named if named in get_args(ArmKind) else None)
    comparison = document["protocol"]["comparison"]
    comparison["baseline"] = comparison["baseline"] or document["arms"][0]["name"]
    comparison["treatment"] = comparison["treatment"] or document["arms"][1]["name"]
    exp = build(Experiment, document, path=path, frozen=document, unresolved=())
    findings = cross_findings(exp)
    if findings:
        raise SpecError(path, findings)
    return dataclasses.replace(exp, unresolved=unresolved(exp))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; SpecError (exit 2) says what is wrong with the file and where."""
    try:
        with open(strict.open_plain(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise SpecError(path, [Finding("", "there is no such file")]) from None
    except (OSError, ValueError) as error:
        raise SpecError(path, [Finding("", f"cannot be read ({_reason(error)})")]) from None
    if len(data) > MOST_BYTES:
        raise SpecError(path, [Finding("", f"larger than {MOST_BYTES >> 20} MiB, which no spec is")])
    try:
        document = strict.parse_json(data)
    except ValueError as error:
        raise SpecError(path, [Finding("", str(error))]) from None
    if not isinstance(document, dict):
        raise SpecError(path, [Finding("", "a spec is one JSON object")])
    return cast("dict[str, Any]", document)


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def build(cls: type[T], data: Mapping[str, Any], **extra: object) -> T:
    """`cls` from the keys of `data` that it has fields for; a key that is absent becomes None."""
    hints = typing.get_type_hints(cls)
    values: dict[str, object] = {
        field.name: _convert(hints[field.name], data.get(field.name))
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in extra
    }
    return cls(**values, **extra)


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _convert(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple:
        return tuple(_convert(arguments[0], item) for item in value)
    if origin is Mapping:
        return types.MappingProxyType({key: _convert(arguments[1], item) for key, item in value.items()})
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value)
    return float(value) if kind is float else value
