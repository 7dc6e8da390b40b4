"""One HTML page from a run directory: everything in the file, nothing fetched."""

import json
from pathlib import Path
from typing import Any

from paritygate.receipts import write_atomic
from paritygate.report import figures, summary
from paritygate.report.files import RunFiles, read_run
from paritygate.report.tokens import transcripts

TEMPLATE = Path(__file__).with_name("page.html.j2")
PAGE = "report.html"


def write(run_dir: Path | str) -> Path:
    """Write report.html into the run directory, from its files alone; the same files give the same bytes.

    Raises BadInputError when the directory holds no run or a file of it is damaged.
    """
    run = read_run(run_dir)
    path = run.directory / PAGE
    write_atomic(path, render(run).encode("utf-8"))
    return path


def render(run: RunFiles) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "pretty": pretty, "duration": duration}
    svg = {
        "curves": figures.learning_curves(run, figures.TRAINING, "curves"),
        "dimensions": figures.learning_curves(run, figures.RUBRIC, "dimensions"),
        "intervals": figures.intervals(run.verdict) if run.verdict is not None else None,
    }
    # Our own figures: matplotlib escapes the labels that it is given.
    trusted = {name: Markup(text) if text is not None else None for name, text in svg.items()}
    treatment, baseline = summary.comparison(run)
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        run=run,
        spec=run.spec,
        outcome=summary.outcome(run),
        outcome_sentence=summary.OUTCOMES[summary.outcome(run)],
        headline=summary.headline(run),
        treatment=treatment,
        baseline=baseline,
        svg=trusted,
        mixed=summary.mixed_groups(run),
        gates=summary.gate_rows(run),
        steps=summary.step_rows(run),
        items=summary.paired_items(run),
        pass_hat=summary.pass_hat(run),
        dimension_answer=summary.dimension_answer(run),
        notes=summary.honest_notes(run),
        transcripts=transcripts(run),
    )


def number(value: Any, digits: int = 3, sign: bool = False) -> str:
    """A number for a table; a dash where there is none."""
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def pretty(value: Any) -> str:
    """JSON for a person."""
    return json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True)


def duration(seconds: float | None) -> str:
    """Seconds or minutes; a dash where nothing was measured."""
    if seconds is None:
        return "–"
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
