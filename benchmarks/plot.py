"""Draws what `loss.py --sweep --json` and `fused.py --json` measured: over N and V, and over the protected share."""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

NAMES = {"plain autograd": "plain autograd", "ours, autograd": "ours, autograd", "ours, in place": "ours, in place"}


def over(axis: str, points: list[dict[str, Any]], time: Axes, memory: Axes) -> None:
    """Time and extra memory over the rows (N) or the vocabulary (V), on logarithmic axes: a slope of one is linear."""
    key = {"N": "rows", "V": "vocabulary"}[axis]
    chosen = [point for point in points if point["axis"] == axis]
    other = chosen[0]["vocabulary" if axis == "N" else "rows"]
    sizes = [point[key] for point in chosen]
    for name, label in NAMES.items():
        time.loglog(sizes, [1e3 * point["seconds"][name] for point in chosen], "o-", label=label)
        memory.loglog(sizes, [max(1, (point["extra"][name] or 0) / 2**20) for point in chosen], "o-", label=label)
    for plot, unit in ((time, "ms"), (memory, "MiB beside the logits (1 at the least)")):
        plot.set_xlabel(f"{axis} ({'V' if axis == 'N' else 'N'} = {other:,})")
        plot.set_ylabel(unit)
        plot.set_xticks(sizes, [f"{size:,}" for size in sizes])
        plot.minorticks_off()


def share(table: dict[str, Any], plot: Axes) -> None:
    """Time of the fused loss in GEMMs over the share of protected actions, beside the peers."""
    floor = table["floor_ms"] / 4
    ours = {line[""]: line["ms"] / floor for line in table["lines"]}
    points = [(int(n.split()[1].rstrip("%")), t) for n, t in ours.items() if n.endswith("% protected")]
    plot.plot(*zip(*points, strict=True), "o-", label="ours")
    plot.plot([0, 100], [4, 2], "k--", label="2 + 2 (1 - s) GEMMs")
    for name in ("Liger chunked forward KL", "TRL tiled forward KL"):
        if name in ours:
            plot.axhline(ours[name], linestyle=":", label=name, color="tab:red" if "TRL" in name else "tab:purple")
    plot.set_xlabel(f"% protected (N = {table['rows']}, V = {table['vocabulary']:,}, D = {table['width']})")
    plot.set_ylabel("GEMMs of the batch")
    plot.set_ylim(bottom=0)


def main() -> None:
    """Parse the command line, read the two records, write the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", required=True, help="JSON of loss.py --sweep")
    parser.add_argument("--fused", required=True, help="JSON of fused.py")
    parser.add_argument("--out", default=str(Path(__file__).resolve().parents[1] / "design" / "081-cost.png"))
    options = parser.parse_args()
    sweep, fused = (json.loads(Path(path).read_text()) for path in (options.sweep, options.fused))
    dtype, points = next(iter(sweep["sweep"].items()))
    figure, axes = plt.subplots(1, 5, figsize=(21, 4))
    over("N", points, axes[0], axes[2])
    over("V", points, axes[1], axes[3])
    share(fused["tables"][0], axes[4])
    for plot in (axes[0], axes[4]):
        plot.legend(fontsize=8)
    figure.suptitle(f"SPOD, forward and backward, {dtype.removeprefix('torch.')}, {sweep['machine']}")
    figure.tight_layout()
    figure.savefig(options.out, dpi=72)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
