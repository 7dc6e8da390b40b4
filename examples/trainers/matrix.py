"""Hold each adapter here to the definitions, in an environment of the projects, and write design/022.

`python examples/trainers/matrix.py` builds build/trainers on first use (3 GB, CPU builds of torch 2.13.0), leaves a
report of each adapter there (JSON, HTML), and the dated matrix in design/022-other-trainers.md. The official SDPO
code is on no index: SDPO_OFFICIAL names a checkout of it, whose row then is in the matrix too.
"""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "trainers"
PAGE = ROOT / "design" / "022-other-trainers.md"
TORCH = ["torch==2.13.0", "numpy"]
SHARED = [
    "accelerate aiohttp anyio blobfile chz cloudpathlib cloudpickle codetiming datasets dill filelock hoptorch httpx",
    "hydra-core hypothesis jaxtyping jsonschema loguru mpmath omegaconf packaging pandas peft pillow psutil pyarrow",
    "pydantic pylatexenc pytest pyvers ray rfc8785 rich safetensors sentencepiece tensorboard tensordict>=0.14.3,<0.15",
    "termcolor tiktoken tinker==0.38.0 torchdata tqdm transformers>=5.5.3,<5.11,!=5.6.0 triton typer xxhash zstandard",
]
PROJECTS = [
    "liger-kernel==0.8.5",
    "sdpo-rl==0.0.3",
    "skyrl==0.4.0",
    "skyrl-gym==0.4.0",
    "tinker-cookbook==0.6.1",
    "tml-renderers==0.2.1",
    "torchao==0.14.1",
    "torchrl==0.14.1",
    "torchtune==0.6.1",
    "kagglehub",
    "trl==1.16.0",
    "verl==0.9.1",
]
ADAPTERS = [
    "trl_sdpo",
    "trl_gkd",
    "cookbook",
    "liger",
    "verl_losses",
    "skyrl_losses",
    "torchtune_kd",
    "torchrl_k3",
    "sdpo_rl_losses",
    "sdpo_official",
]
OLDER = ["transformers<5", "huggingface_hub<1", "tokenizers<0.23"]  # what the official SDPO code imports
HEAD = """# 022 Other trainers against the definitions

Written by `make trainers` on {date}. Each adapter of `examples/trainers` is held to the float64 definitions by
`python -m paritygate.harness`: plain inputs at 1e-8 (float64) and 1e-5 (float32), value and gradient. The projects
are good ones: what departs is mostly an edge that their trainers do not meet. A smallest input is the first one of
its stress; the report of the adapter has the others, and a program for each.

"""


def environment() -> str:
    """The interpreter of the environment, made on first use: torch first, the projects without what they ask for."""
    folder = Path(os.environ.get("TRAINERS_ENV", BUILD / "env"))
    python = str(folder / "bin" / "python")
    if not (folder / ".installed").exists() and "TRAINERS_ENV" not in os.environ:
        print(f"installing {', '.join(PROJECTS)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *TORCH], check=True)
        subprocess.run([*pip, *TORCH, *" ".join(SHARED).split()], check=True)
        subprocess.run([*pip, "--no-deps", "--ignore-requires-python", *PROJECTS], check=True)
        (folder / ".installed").touch()
    return python


def official(python: str) -> list[str]:
    """The folders that the official code is imported from: a checkout, and the transformers of its time."""
    if "SDPO_OFFICIAL" not in os.environ:
        return []
    folder = BUILD / "sdpo_official"
    if not folder.exists():
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *OLDER], check=True)
    return [os.environ["SDPO_OFFICIAL"], str(folder)]


def judged(python: str, adapter: str) -> tuple[dict[str, Any] | None, str]:
    """The report of an adapter, or None and the sentence why there is none."""
    path = BUILD / f"{adapter}.json"
    path.unlink(missing_ok=True)
    command = [python, "-m", "paritygate.harness", adapter, "--json", str(path)]
    folders = official(python) if adapter == "sdpo_official" else []
    keys = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "impl"), *folders]),
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    done = subprocess.run(
        [*command, "--known", "known_departures.json"],
        cwd=HERE,
        env={**os.environ, **keys},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(path.read_text()) if path.exists() else None
    words = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("paritygate.harness: ")
    print(f"{adapter}: exit {done.returncode}{f'; {words}' if words else ''}", flush=True)
    return report, words


def plain_cell(report: dict[str, Any]) -> str:
    """How many of the plain rows that the adapter has agree."""
    rows = [row for row in report["plain"] if row["outcome"] != "unsupported"]
    agree = sum(row["outcome"] == "agrees" for row in rows)
    return f"{agree} of {len(rows)} agree"


def numbers(row: dict[str, Any]) -> str:
    """The smallest input of a row and both values, short."""
    small = row["smallest"]
    quantity = "value" if "value" in row["departs_in"] or "answer" in row["departs_in"] else "gradient"
    arrays = [
        short(value)
        for name, value in small["input"].items()
        if isinstance(value, list) and (name != "mask" or "0" in json.dumps(value))
    ]
    theirs, defined = (short(side.get(quantity, side.get("refused"))) for side in (small["theirs"], small["defined"]))
    return f"{'; '.join(arrays)} · {quantity} {theirs}, defined {defined}"


def short(value: Any) -> str:
    """Nested numbers at five digits, whole ones with all of theirs where those matter."""
    if isinstance(value, str) and ":" in value:
        return f"refused ({value.partition(':')[0]})"
    if isinstance(value, list):
        while len(value) == 1 and isinstance(value[0], list):
            (value,) = value
        return f"[{', '.join(map(short, value))}]"
    if isinstance(value, float) and value.is_integer() and 1e5 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Write the page; 0 also where projects depart: that is what it is for."""
    python = environment()
    BUILD.mkdir(parents=True, exist_ok=True)
    text = HEAD.format(date=datetime.date.today().isoformat())
    table = ["| adapter | held | plain | stresses that depart |", "| --- | --- | --- | --- |"]
    parts: list[str] = []
    for adapter in ADAPTERS:
        report, sentence = judged(python, adapter)
        if report is None:
            parts += [f"`{adapter}` was not held here: {sentence.partition('. Install: ')[0]}.", ""]
            continue
        ours = ("numpy", "torch", "typing_extensions")
        held = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name not in ours)
        red = [row for row in report["stress"] if row["outcome"] == "departs" and not row.get("as_plain")]
        kinds = list(dict.fromkeys(row["stress"] for row in red))
        table.append(f"| `{adapter}` | {held} | {plain_cell(report)} | {len(kinds)} |")
        departing = [row for row in report["plain"] if row["outcome"] in ("departs", "scaled")]
        parts += [f"## {adapter}", ""] if departing or red else []
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in [*departing, *red]:
            rows.setdefault((row.get("stress", "plain"), row["loss"]), []).append(row)
        for (place, loss), alike in rows.items():
            row = alike[0]
            option = ", ".join(dict.fromkeys(other["option"].partition(",")[0] for other in alike))
            accepted = " (known)" if "known" in row else ""
            parts += [
                f"- **{place}**{accepted}: {loss.partition('.')[2]} {option}, {row['dtype']}.",
                f"  {numbers(row)}",
            ]
        parts += [""] if departing or red else []
    PAGE.write_text(text + "\n".join([*table, "", *parts]).rstrip() + "\n")
    print(f"wrote {PAGE.relative_to(ROOT)}; reports in {BUILD.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
