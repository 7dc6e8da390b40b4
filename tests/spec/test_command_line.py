"""python impl/run.py: what a person gets for bad input, in which order, and the plan."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paritygate.spec.schema import spec_folder

SPECS = spec_folder()
ROOT = SPECS.parent
AS_ASKED = Path(__file__).with_name("sdpo_as_asked.json")


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "impl" / "run.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def edited(tmp_path: Path, name: str, **changes: object) -> Path:
    spec = json.loads((SPECS / name).read_text("utf-8")) | changes
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(spec), "utf-8")
    return path


def test_help_is_quick_and_loads_nothing_heavy():
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert run("--help").returncode == 0
        times.append(time.perf_counter() - start)
    floors = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import argparse, json, pathlib, typing"], check=True)
        floors.append(time.perf_counter() - start)
    assert statistics.median(times) < max(0.3, 4 * statistics.median(floors))
    loaded = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "impl" / "run.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert not re.search(r"\| +(torch|numpy|jsonschema|tinker|rich|transformers)\b", loaded)


ONE_SENTENCE = r"run\.py: [^\n]+\n\Z"


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert re.fullmatch(ONE_SENTENCE, done.stderr), done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


def test_a_spec_that_is_not_there(tmp_path: Path):
    refused(run("--spec", tmp_path / "none.json"), 2, "none.json", "no such file")


def test_a_spec_that_is_no_json(tmp_path: Path):
    (tmp_path / "torn.json").write_text('{"steps": 20')
    refused(run("--spec", tmp_path / "torn.json"), 2, "torn.json", "line 1")


def test_an_unknown_key(tmp_path: Path):
    refused(run("--spec", edited(tmp_path, "sdpo.json", step=20)), 2, "/step", "did you mean 'steps'")


def test_a_wrong_type(tmp_path: Path):
    refused(run("--spec", edited(tmp_path, "sdpo.json", steps="20")), 2, "/steps", "expected integer")


def test_a_contradiction_is_input_too_even_for_a_check(tmp_path: Path):
    refused(run("--check", "--spec", edited(tmp_path, "sdpo.json", batch_size=15)), 2, "/batch_size", "= 16, not 15")


def test_several_findings_come_one_a_line(tmp_path: Path):
    done = run("--spec", edited(tmp_path, "sdpo.json", batch_size=15, steps=19))
    assert done.returncode == 2
    assert [line.split(":")[0].strip() for line in done.stderr.splitlines()[1:]] == [
        "/dataset/n_examples",
        "/batch_size",
    ]


def test_the_experiment_as_asked_for_is_refused_as_unresolved(tmp_path: Path):
    done = run("--spec", AS_ASKED, "--output", tmp_path / "run")
    refused(done, 3, "unresolved", "/dataset/name")
    assert not (tmp_path / "run").exists()


def test_bad_input_comes_before_the_receipt(tmp_path: Path):
    """Whatever receipts there are, these are exit 2, and nothing is touched."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("x")
    spec = SPECS / "sdpo.json"
    refused(run("--spec", spec, "--output", tmp_path / "full"), 2, "exists", "--resume")
    refused(run("--spec", spec, "--output", tmp_path / "file" / "below"), 2, "no folder that can be written to")
    refused(run("--spec", spec, "--resume", "--output", tmp_path / "full"), 2, "no run to resume")
    refused(run("--spec", spec, "--until", "lunch"), 2, "--until lunch", "spec_preflight")
    refused(run("--spec", spec, "--seeds", "1,2"), 2, "--seeds")
    refused(run("--spec", spec, "--device", "banana"), 2, "--device banana")
    refused(run("--spec", spec, "--tau-bench", tmp_path / "none"), 2, "none", "tau-bench")
    refused(run("--spec", SPECS / "spod.json", "--until", "train"), 2, "--until")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "kept"]


def test_cuda_that_is_not_there(tmp_path: Path):
    for name in ("sdpo.json", "spod.json"):
        done = run("--spec", SPECS / name, "--device", "cuda", "--output", tmp_path / "o.json", CUDA_VISIBLE_DEVICES="")
        refused(done, 2, "--device cuda", "CUDA")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence():
    """run.call fails as a write to a full disk does."""
    code = (
        "import sys, errno; sys.path.insert(0, sys.argv[1]); import run\n"
        "def full(root, options): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "run.call = full; raise SystemExit(run.main(['--spec', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ROOT / "impl")], capture_output=True, text=True, check=False)
    refused(done, 2, "No space left on device")


def test_an_argument_that_there_is_not():
    done = run("--spec", "x", "--bogus")
    assert done.returncode == 2
    assert "unrecognized arguments: --bogus" in done.stderr


PLAN = (
    "half-width of 0.382",
    "0.05: 30,023 tasks; 0.10: 2,451 tasks; 0.15: 834 tasks",
    "INFEASIBLE at 60",
    "5 of the 60 evaluated tasks (8.3%): 10, 12, 25, 50, 57, and on 7 of the 115 test tasks (6.1%)",
    "23 users; pairs with the same gold: 24/57, 36/37, 41/42 (elsewhere in the split: ",
    "93/95",
    "The gold of every train task is writes only",
    "60 of 90 test write-orders and 43 of 53 test users",
    "24, 27, 431 trained on",
    "rendered for qwen3.5, takes 4,",
    "20 x sdpo_token: forward_backward and optim_step (Qwen/Qwen3.5-4B)",
    "320 x sdpo_token: teacher scorings",
    "(openai/gpt-oss-120b)",
    "(Qwen/Qwen3-8B)",
    "http://127.0.0.1:9 (TINKER_BASE_URL; not asked for this plan)",
    "parity is shown again in a clean worktree",
    "gate: judge_parse_success_rate >= 0.95",
)


def test_the_plan_of_the_experiment_needs_no_service_and_no_receipt(tau_bench_dir: Path):
    done = run(
        "--check", "--spec", SPECS / "sdpo.json", "--tau-bench", tau_bench_dir, TINKER_BASE_URL="http://127.0.0.1:9"
    )
    assert done.returncode == 0, done.stderr
    for words in PLAN:
        assert words in done.stdout, words


def test_the_plan_of_an_unresolved_spec_says_so_and_refuses_nothing(tau_bench_dir: Path):
    done = run("--check", "--spec", AS_ASKED, "--tau-bench", tau_bench_dir)
    assert done.returncode == 0
    assert "UNRESOLVED" in done.stdout


def test_the_plan_without_data_says_what_is_missing(tmp_path: Path):
    done = run("--check", "--spec", SPECS / "sdpo.json", "--tau-bench", tmp_path / "none")
    assert done.returncode == 0
    assert "not looked at" in done.stdout
    assert "INFEASIBLE at 60" in done.stdout


def test_the_plan_as_data(tmp_path: Path):
    done = run("--check", "--json", "--spec", SPECS / "sdpo-local.json", "--tau-bench", tmp_path / "none")
    plan = json.loads(done.stdout)
    assert plan["design_check"]["primary"]["n_required"] == {"0.05": 30023, "0.1": 2451, "0.15": 834}
    assert plan["frozen_spec"]["protocol"]["rollout"]["tasks_per_step"] == 4
    assert plan["unresolved"] == []


def test_it_works_from_any_directory_and_through_a_link(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(ROOT / "impl" / "run.py")
    done = subprocess.run(
        [sys.executable, str(link), "--check", "--spec", str(SPECS / "spod.json")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
