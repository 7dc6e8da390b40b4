"""Figures as inline SVG: learning curves with their gates, and the intervals against their margins."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paritygate.report.files import Record, RunFiles
from paritygate.spec.protocol import DIMENSIONS

COLOURS = ("#0b6e99", "#c2560c", "#4a7c2c", "#7b4397", "#8a6d00", "#a02050")
GATE_COLOUR = "#b00020"
MUTED = "#6b7280"


@dataclass(frozen=True)
class Panel:
    """One small plot: which metric, its title, and fixed limits where the quantity has them."""

    metric: str
    title: str
    unit_interval: bool = False


TRAINING = (
    Panel("composite_rubric_score", "composite rubric score", unit_interval=True),
    Panel("tau_bench_task_reward", "task reward", unit_interval=True),
    Panel("grpo_frac_groups_nonzero_adv", "groups with mixed composites", unit_interval=True),
    Panel("sdpo_mean_abs_token_adv", "mean |teacher - student| (nats)"),
    Panel("sdpo_frac_tokens_abs_adv_gt_0.1", "tokens with |A| > 0.1 nats", unit_interval=True),
    Panel("judge_parse_success_rate", "judge answers parsed at once", unit_interval=True),
    Panel("abs_advantage_mean", "mean |advantage| trained on"),
    Panel("turns", "agent turns an episode"),
    Panel("sampler_recomputed_max_abs_diff", "max |recomputed - sampled| logprob"),
)
RUBRIC = tuple(Panel(name, f"{name.replace('_', ' ')} (1 is best)", unit_interval=True) for name in DIMENSIONS)


def learning_curves(run: RunFiles, panels: Sequence[Panel], name: str) -> str | None:
    """SVG of the panels that have data: pilot steps left of step 0, gates as dashed lines; None without data."""
    shown = [panel for panel in panels if any(any(_points(run, arm, panel.metric)) for arm in run.arms)]
    return _svg(name, lambda: _curves(run, shown)) if shown else None


def _curves(run: RunFiles, shown: Sequence[Panel]) -> Any:
    rows = math.ceil(len(shown) / 3)
    figure, axes = _subplots(rows, 3, (11.0, 2.5 * rows))
    flat = [axis for row in axes for axis in row]
    for axis in flat[len(shown) :]:
        axis.set_visible(False)
    for axis, panel in zip(flat, shown, strict=False):
        _draw_panel(axis, run, panel)
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", ncols=len(labels), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.28 / (2.5 * rows)))
    return figure


def _draw_panel(axis: Any, run: RunFiles, panel: Panel) -> None:
    for index, arm in enumerate(run.arms):
        style: dict[str, Any] = {"color": COLOURS[index % 6], "markersize": 3.5, "linewidth": 1.4}
        pilot, training = _points(run, arm, panel.metric)
        axis.plot([step for step, _ in training], [value for _, value in training], "o-", label=arm, **style)
        axis.plot([step for step, _ in pilot], [value for _, value in pilot], "o:", fillstyle="none", **style)
    if any(run.pilot(arm) for arm in run.arms):
        axis.axvline(-0.5, color=MUTED, linewidth=0.6)
        axis.text(
            -0.6, 1.01, "pilot", ha="right", va="bottom", fontsize=7, color=MUTED, transform=axis.get_xaxis_transform()
        )
    axis.xaxis.get_major_locator().set_params(integer=True)
    if panel.unit_interval:
        axis.set_ylim(-0.05, 1.05)
    for check in run.spec["activation_gate"]["checks"]:
        if check["metric"] == panel.metric:
            _draw_gate(axis, check)
    axis.set_title(panel.title, fontsize=9, loc="left", pad=10)


def _draw_gate(axis: Any, check: Record) -> None:
    bounds = [(check[bound], sign) for bound, sign in (("min", ">="), ("max", "<=")) if check.get(bound) is not None]
    for value, _ in bounds:
        axis.axhline(value, color=GATE_COLOUR, linestyle="--", linewidth=1)
    low, high = axis.get_ylim()
    for value, sign in bounds:
        side = "top" if value > low + 0.85 * (high - low) else "bottom"
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": side}
        axis.annotate(f"gate {sign} {value:g}", (1, value), fontsize=7, color=GATE_COLOUR, **place)


def _points(run: RunFiles, arm: str, metric: str) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, value) of the pilot (steps -2, -1) and of training (0, 1, ...), where the value is a number."""
    pilot, training = run.pilot(arm), run.training(arm)
    numbered = (
        [(index - len(pilot), row) for index, row in enumerate(pilot)],
        [(row["step"], row) for row in training],
    )
    first, second = (
        [(step, value) for step, row in rows if (value := _number(row.get(metric))) is not None] for rows in numbered
    )
    return first, second


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def intervals(verdict: Record) -> str | None:
    """SVG of every criterion's deciding interval, its secondary one, margin and zero; None without criteria."""
    return _svg("intervals", lambda: _intervals(verdict)) if verdict["criteria"] else None


def _intervals(verdict: Record) -> Any:
    criteria, dimensions = verdict["criteria"], verdict["dimensions"]
    rows = [(row, True) for row in criteria] + [(row, False) for row in dimensions]
    figure, axes = _subplots(1, 1, (11.0, 0.9 + 0.55 * len(rows)))
    axis = axes[0][0]
    for position, (row, decides) in enumerate(rows):
        y = -position
        if decides:
            axis.plot((row["low"], row["high"]), (y, y), color=COLOURS[0], linewidth=5, solid_capstyle="butt")
            axis.plot((row["margin"],) * 2, (y - 0.32, y + 0.32), color=GATE_COLOUR, linestyle="--", linewidth=1.4)
            axis.text(
                row["margin"], y + 0.34, f"margin {row['margin']:+.2f}", color=GATE_COLOUR, fontsize=7, ha="center"
            )
        axis.plot((row["betting_low"], row["betting_high"]), (y - 0.18,) * 2, color=MUTED, linewidth=1.6)
        axis.plot(row["mean"], y, "o", color="black", markersize=4)
    axis.axvline(0, color="black", linewidth=0.6)
    names = [f"{row['id']}: {row['metric']}" if decides else row["dimension"] for row, decides in rows]
    axis.set_yticks([-position for position in range(len(rows))], names, fontsize=9)
    axis.set_ylim(-len(rows) + 0.35, 0.65)
    axis.set_xlabel("treatment minus baseline", fontsize=9)
    figure.tight_layout()
    return figure


def _subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[list[Any]]]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no window system

    figure = Figure(figsize=size)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.tick_params(labelsize=8)
        axis.grid(visible=True, color="#e5e7eb", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return figure, [list(row) for row in axes]


def _svg(name: str, draw: Callable[[], Any]) -> str:
    """The figure that `draw` makes; the same bytes for the same data on every machine.

    No date, ids that depend on the figure's name only, and nothing of the user's matplotlibrc.
    """
    import matplotlib as mpl

    fixed: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}
    with mpl.rc_context({**mpl.rcParamsDefault, **fixed}):
        stream = io.StringIO()
        draw().savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]
