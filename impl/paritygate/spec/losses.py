"""What spec/losses.json asks for, and what is still missing from a set of results."""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError, Refused
from paritygate.spec.project import project_at
from paritygate.spec.schema import check_schema
from paritygate.spec.strict import parse_json, read_plain


def load_losses(root: Path) -> dict[str, Any]:
    """What the project at `root` declares; `tolerances` of an obligation are rows {"dtype", "device", "regime", ...}.

    Where it names a class, its `because` is the class's.
    Raises Refused when the file is missing, not JSON or of another form, names a class of tolerances that it has not,
    or declares two tolerances for one dtype, device and regime.
    """
    path = root / project_at(root).spec
    try:
        spec = parse_json(read_plain(path))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Refused(f"{path} cannot be read ({why}): it says what has to be shown.") from error
    check_schema(spec, "losses", path)
    return _expanded(spec, path)


def _expanded(spec: dict[str, Any], path: Path) -> dict[str, Any]:
    """`spec` without its classes of tolerances: each obligation has the rows of the class that it names."""
    entries = spec.pop("tolerances", {})
    classes = {name: _rows(entry["rows"]) for name, entry in entries.items()}
    for name, obligation in ((n, o) for loss in spec["losses"].values() for n, o in loss["obligations"].items()):
        declared = obligation["tolerances"]
        if isinstance(declared, str):
            if declared not in classes:
                raise Refused(f"{path}: {name} names the tolerances {declared!r}; there are {', '.join(classes)}.")
            obligation["because"] = entries[declared]["because"]
            obligation["tolerances"] = declared = [dict(row) for row in classes[declared]]
        cells = [(row["dtype"], row["device"], row["regime"]) for row in declared]
        if twice := next((cell for cell in cells if cells.count(cell) > 1), None):
            raise Refused(f"{path}: {name} declares two tolerances for {' / '.join(twice)} (dtype / device / regime).")
    return spec


def _rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each dtype and regime that each of the `rows` of a class stands for."""
    result: list[dict[str, Any]] = []
    for row in rows:
        limits = {key: value for key, value in row.items() if key not in ("dtypes", "device", "regimes")}
        for regime, dtype in itertools.product(row["regimes"], row["dtypes"]):
            result.append({"dtype": dtype, "device": row.get("device", "any"), "regime": regime, **limits})
    return result


def unwritten(spec: Mapping[str, Any], losses: Iterable[str]) -> list[str]:
    """One sentence for each text of `losses` that begins with TODO, as drafts do: nothing is shown by it."""
    texts: dict[str, str] = {}
    for loss in losses:
        entry = spec["losses"][loss]
        texts |= {f"{key} of {loss}": entry[key] for key in ("title", "source")}
        for name, obligation in entry["obligations"].items():
            texts[f"claim of {name}"] = obligation["claim"]
            texts[f"because of the tolerances of {name}"] = obligation.get("because", "")
    return [f"the {what} in the spec is still a TODO" for what, text in texts.items() if text.startswith("TODO")]


DEVICE = re.compile(r"(cpu|cuda)(?::(0|[1-9][0-9]{0,3}))?")


def device_class(device: str) -> str:
    """`cpu` or `cuda`, of a torch device string such as `cuda:0`; raises BadInputError for any other text."""
    return _device(device)[1]


def device_index(device: str) -> int:
    """Which of the devices of its class, 0 where the string does not say; raises BadInputError as `device_class`."""
    return int(_device(device)[2] or 0)


def _device(device: str) -> re.Match[str]:
    named = DEVICE.fullmatch(device)
    if named is None:
        raise BadInputError(f"--device {device}: cpu or cuda is expected (cuda:1 is the second).")
    return named


def required(spec: Mapping[str, Any], device: str, losses: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """Obligations that count on `device`: those of `losses` (all when None) with a tolerance for it or for any device.

    Maps the name to {"min_comparisons", "rows": [(dtype, regime), ...]}. Raises Refused for a loss not in the spec.
    """
    entries: Mapping[str, Any] = spec["losses"]
    names = list(entries) if losses is None else list(dict.fromkeys(losses))
    if unknown := [name for name in names if name not in entries]:
        raise Refused(f"spec/losses.json knows no loss {unknown[0]!r}: it has {', '.join(sorted(entries))}.")
    result: dict[str, dict[str, Any]] = {}
    for loss in names:
        for name, obligation in entries[loss]["obligations"].items():
            rows = [row for row in obligation["tolerances"] if row["device"] in (device_class(device), "any")]
            if rows:
                cells = sorted({(str(row["dtype"]), str(row["regime"])) for row in rows})
                result[name] = {"min_comparisons": obligation["min_comparisons"], "rows": cells}
    return result


def shortfalls(wanted: Mapping[str, Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each obligation of `wanted` that `results` (from the ledger or a receipt) does not meet.

    One for a loss with more than three of which none was compared.
    """
    missing: list[str] = []
    for loss, obligations in itertools.groupby(sorted(wanted), key=lambda name: name.partition("/")[0]):
        names = list(obligations)
        if len(names) > 3 and not any(results.get(name, {}).get("comparisons") for name in names):
            missing.append(f"{loss} has no comparison for any of its {len(names)} obligations")
            continue
        missing.extend(words for name in names for words in _shortfalls_of(name, wanted[name], results.get(name)))
    return missing


def _shortfalls_of(name: str, obligation: Mapping[str, Any], result: Mapping[str, Any] | None) -> list[str]:
    least, made = obligation["min_comparisons"], 0 if result is None else result["comparisons"]
    if result is None or made < least:
        return [f"{name} has {made} of the {least} comparisons that count"]
    missing: list[str] = []
    if result["worst_margin"] > 1.0:
        missing.append(f"{name} is outside its tolerance (worst margin {result['worst_margin']:.3g})")
    met = {(cell["dtype"], cell["regime"]) for cell in result["cells"]}
    missing.extend(
        f"{name} was never compared in {dtype}, regime {regime}, for which it declares a tolerance"
        for dtype, regime in obligation["rows"]
        if (dtype, regime) not in met
    )
    return missing
