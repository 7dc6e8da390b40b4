"""The proof as a table for a terminal, as JSON, and as one HTML page that can be attached to an issue."""

import html
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paritygate.errors import BadInputError, printable
from paritygate.service.obligations import Obligations
from paritygate.service.runner import Result, outcomes
from paritygate.spec.strict import parse_json, read_plain

FORMAT = "paritygate service proof 1"
MEANING = {
    "holds": "as defined, within the bound",
    "departs": "not as defined: twice, by more than the bound",
    "undecided": "cannot be told: the noise or a departure below it is too large, or the service lacks what is needed",
    "refused": "the service says that it does not serve this",
}
ORDER = ("departs", "undecided", "refused", "holds")  # of the page: what is wrong comes first


@dataclass
class Report:
    """What a run knows; `complete` is False while obligations are open."""

    endpoint: str
    model: str
    models: list[str]
    sdk: str
    spec_sha256: str
    settings: dict[str, Any]
    noise: dict[str, float] = field(default_factory=dict[str, float])
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    time: str = ""
    complete: bool = False
    results: list[Result] = field(default_factory=list[Result])

    def difference(self, other: "Report") -> str:
        """In what two runs differ, so that results of one are none of the other; empty where they can be kept."""
        for what in ("endpoint", "model", "sdk", "spec_sha256", "settings"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                return f"its {what} is {mine}, now it is {theirs}"
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "endpoint": self.endpoint,
            "model": self.model,
            "models": self.models,
            "sdk": self.sdk,
            "spec_sha256": self.spec_sha256,
            "settings": self.settings,
            "noise": self.noise,
            "calls": self.calls,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "time": self.time,
            "complete": self.complete,
            "obligations": [result.to_json() for result in self.results],
        }


def write(path: Path, text: str) -> None:
    """Write so that `path` is whole or as it was before; BadInputError where that cannot be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # a name may be no Unicode text
        os.replace(temporary, path)
    except OSError as error:
        error.filename = str(path)
        raise BadInputError(f"{path} cannot be written ({error.strerror}).") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """BadInputError unless a file can be written at `path`: found out before a service is asked for anything."""
    if path.is_dir():
        raise BadInputError(f"{path} is a folder; name a file for the results.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise BadInputError(f"{path} cannot be written ({error.strerror}).") from error


def write_json(path: Path, report: Report) -> None:
    """The report as JSON to `path`, whole or not at all; BadInputError where it cannot be written."""
    write(path, json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")


def read(path: Path) -> Report | None:
    """The report of an earlier run in `path`; None where there is none. BadInputError for another kind of file."""
    try:
        value = parse_json(read_plain(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"{path} is there and cannot be read as a service proof ({error}); name another file."
        ) from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BadInputError(f"{path} is there and is no service proof of ours; name another file.")
    try:
        results = [Result(**entry) for entry in value["obligations"]]
        names = [field.name for field in fields(Report) if field.name != "results"]
        return Report(**{name: value[name] for name in names}, results=results)
    except (KeyError, TypeError) as error:
        raise BadInputError(
            f"{path} is there and is no whole service proof ({error!r}); name another file, or delete it."
        ) from None


def table(results: Sequence[Result]) -> str:
    """One line an obligation: name, outcome, figure and bound, and why where it does not hold."""
    width = max((len(result.name) for result in results), default=0)
    lines: list[str] = []
    for result in results:
        figure = "" if result.figure is None else f"{result.figure:.2g}"
        bound = "" if result.bound is None else f"{result.bound:.2g}"
        lines.append(f"{result.name:{width}}  {result.outcome:9}  {figure:>8} / {bound:<8}".rstrip(" /"))
        if result.outcome != "holds":
            lines.append(f"    {result.because}")
    counts = ", ".join(f"{count} {name}" for name, count in outcomes(results).items())
    return "\n".join([*lines, "", counts])


def summary(report: Report) -> str:
    """One sentence for the end of a run."""
    counts = outcomes(report.results)
    model = printable(report.model)
    departed = [result.name for result in report.results if result.outcome == "departs"]
    head = f"{report.endpoint} ({model}, SDK {report.sdk}): "
    if departed:
        return head + f"{len(departed)} of {len(report.results)} obligations depart: {', '.join(departed)}."
    return (
        head + f"nothing departs; {counts['holds']} hold, {counts['undecided']} undecided, {counts['refused']} refused."
    )


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd;vertical-align:top}
.holds{color:#176b2c}.departs{color:#b00020;font-weight:600}.undecided{color:#8a5a00}.refused{color:#555}
pre{background:#f6f6f4;padding:.8rem;overflow-x:auto;font-size:12px;line-height:1.35}
td.n{font-variant-numeric:tabular-nums;white-space:nowrap}small{color:#555}
"""


def page(report: Report, obligations: Obligations) -> str:
    """The whole proof as one HTML file without scripts or links to elsewhere."""
    claims = {entry.name: entry for entry in obligations.entries}
    escape = html.escape
    noise = ", ".join(f"{name} {value:.2g}" for name, value in report.noise.items())
    counts = outcomes(report.results)
    rows: list[str] = []
    for result in sorted(report.results, key=lambda result: ORDER.index(result.outcome)):
        entry = claims.get(result.name)
        claim = "" if entry is None else f"<br><small>{escape(entry.claim)}</small>"
        figure = "" if result.figure is None else f"{result.figure:.2g}"
        bound = "" if result.bound is None else f"{result.bound:.2g}"
        contrast = "" if result.contrast is None else f"{result.contrast:.2g}"
        if contrast and entry is not None and entry.contrast:
            contrast += f"<br><small>{escape(entry.contrast)}</small>"
        rows.append(
            f"<tr><td><code>{escape(result.name)}</code>{claim}</td>"
            f'<td class="{result.outcome}">{result.outcome}</td><td class=n>{figure}</td><td class=n>{bound}</td>'
            f"<td>{contrast}</td><td>{escape(result.because)}{_program(result)}</td></tr>"
        )
    meaning = "".join(
        f'<li><span class="{name}">{name}</span> ({counts[name]}): {text}</li>' for name, text in MEANING.items()
    )
    unfinished = "" if report.complete else "<p><b>This run did not finish.</b></p>"
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>Service proof: {escape(report.endpoint)}</title>
<style>{_STYLE}</style><h1>Service proof</h1><p>{escape(summary(report))}</p>{unfinished}
<p><small>{escape(report.time)} · model {escape(report.model)} · tinker {escape(report.sdk)} · {report.calls} calls,
{report.tokens} tokens, {report.seconds:.0f} s · noise measured: {escape(noise)} · obligations
{report.spec_sha256[:12]}</small></p><ul>{meaning}</ul>
<p>A figure is how far the service is from the float64 definition, in the unit of its obligation; it is held to the
bound. The contrast is how far something wrong on purpose is: it shows that the check can see, and where the figure is
about as large, the service probably makes that very mistake. A departure was seen twice: the figure is of the first
time, the program shows the second, with the smallest input that still departs.</p>
<table><tr><th>obligation<th>outcome<th>figure<th>bound<th>contrast<th>what was seen</tr>
{"".join(rows)}</table></html>
"""


def _program(result: Result) -> str:
    if result.program is None:
        return ""
    return f"<details><summary>a program that shows it</summary><pre>{html.escape(result.program)}</pre></details>"
