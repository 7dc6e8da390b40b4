"""A report as a table for a terminal and as one page that opens offline."""

import html
import json
from collections import Counter
from typing import Any

from paritygate.harness.conformance.known import place_of

TITLES = {
    "plain": "Plain inputs",
    "stress": "Stress",
    "promises": "Promises of paritygate's own losses, apart from the arithmetic",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #dfe4ea; vertical-align: top; }
.agrees { color: #1a7f37; } .departs, .scaled { color: #b42318; } .known { color: #8a6100; }
pre { background: #f5f7fa; padding: .7rem; overflow-x: auto; font-size: 13px; } code { font-size: 13px; }
"""


def shown(report: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """The rows that say something: what the module has not is left out."""
    return [row for row in report[kind] if row["outcome"] != "unsupported"]


def verdict(row: dict[str, Any]) -> str:
    """A row's outcome for a person."""
    text = str(row["outcome"])
    if row["factor"] is not None:
        text += f" by {row['factor']:.6g}"
    if row.get("departs_in"):
        text += f" ({', '.join(f'{quantity}: {how}' for quantity, how in row['departs_in'].items())})"
    if row.get("as_plain"):
        text += ", as on plain inputs"
    return text + (f"; known: {row['known']}" if "known" in row else "")


def summary(report: dict[str, Any]) -> str:
    """Counts of the plain rows and of the stresses that depart."""
    plain = Counter(row["outcome"] for row in report["plain"])
    counts = [
        f"{plain[name]} {text}" for name, text in (("agrees", "agree"), ("scaled", "are scaled"), ("departs", "depart"))
    ]
    red = len({row["stress"] for row in report["stress"] if row["outcome"] == "departs"})
    kinds = len({row["stress"] for row in shown(report, "stress")})
    return f"plain: {', '.join(counts)} ({plain['unsupported']} unsupported); stress: {red} of {kinds} kinds depart"


def versions(report: dict[str, Any]) -> str:
    """What was held: versions, and the first digits of each digest."""
    parts = [f"{name} {version} ({short(report['digests'].get(name))})" for name, version in report["versions"].items()]
    return f"{report['module']} ({short(report['digests'].get(report['module']))}): {', '.join(parts)}"


def short(digest: str | None) -> str:
    """The first digits."""
    return f"sha256 {digest[:12]}" if digest else "no digest"


def numbers(row: dict[str, Any]) -> list[str]:
    """The smallest input and both numbers, a line each."""
    small = row["smallest"]
    given = ", ".join(f"{name} {json.dumps(value)}" for name, value in small["input"].items())
    return [f"input: {given}", *(f"{who}: {both(small[who])}" for who in ("theirs", "defined"))]


def both(outputs: dict[str, Any]) -> str:
    """Value and gradient in one line."""
    return ", ".join(f"{name} {value if name == 'refused' else json.dumps(value)}" for name, value in outputs.items())


def table(report: dict[str, Any], unused: list[dict[str, str]]) -> str:
    """For a terminal: one row a line, under each that departs its smallest input."""
    lines = [versions(report)]
    for kind, title in TITLES.items():
        rows = shown(report, kind)
        lines += ["", title] if rows else []
        for row in rows:
            place = [] if kind == "plain" else [place_of(row)]
            names = [*place, row["loss"], row["option"], row["dtype"]]
            lines.append(f"  {' · '.join(names)}: {verdict(row)}")
            if row["smallest"] and kind != "promises" and not row.get("as_plain"):
                lines += [f"      {line}" for line in numbers(row)]
    lines += ["", summary(report)]
    lines += [f"known departure that does not depart: {json.dumps(entry)}" for entry in unused]
    return "\n".join(lines)


def page(report: dict[str, Any]) -> str:
    """One HTML page without anything from elsewhere."""
    escape = html.escape
    title = f"{report['module']} against the definitions"
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(summary(report))}</p>", "<table>"]
    body += ["<tr><th>what</th><th>version</th><th>sha256</th></tr>"]
    for name in report["digests"]:
        cells = [name, report["versions"].get(name, "the adapter"), report["digests"][name] or ""]
        body.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    body.append("</table>")
    for kind, heading in TITLES.items():
        rows = shown(report, kind)
        if not rows:
            continue
        body += [f"<h2>{escape(heading)}</h2>", "<table>"]
        for row in rows:
            cells = [*([] if kind == "plain" else [place_of(row)]), row["loss"], row["option"], row["dtype"]]
            colour = "known" if "known" in row else row["outcome"]
            body.append(
                f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}"
                f'<td class="{colour}">{escape(verdict(row))}{details(row)}</td></tr>'
            )
        body.append("</table>")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def details(row: dict[str, Any]) -> str:
    """The smallest input with both numbers, and the program that shows it."""
    if not row["smallest"] or row.get("as_plain"):
        return ""
    lines = "<br>".join(f"<code>{html.escape(line)}</code>" for line in numbers(row))
    return f"<br>{lines}<details><summary>program</summary><pre>{html.escape(row['snippet'])}</pre></details>"
