"""The page: whole, self-contained, the same bytes for the same files, and never wider than what it was given."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest

from paritygate import report
from paritygate.errors import BadInputError
from paritygate.report import summary
from paritygate.report.files import PhaseReceipt, RunFiles, read_run
from paritygate.report.tokens import transcripts
from paritygate.spec import load
from paritygate.spec.schema import spec_folder
from tests.report.fake_run import HOSTILE, WORDS, make

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Elements must close in order; every attribute and the visible text are kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self.words.append(" " if tag in ("td", "th") else "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make(tmp_path_factory.mktemp("runs") / "made-up")
    assert report.write_vocabulary(directory, lambda ids: "".join(WORDS[i] for i in ids)) == "vocabulary.json"
    return directory


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page(report.write(run_dir).read_text("utf-8"))


def test_nothing_is_fetched(page: Page, run_dir: Path):
    assert {"script", "link", "iframe", "img", "object", "embed"}.isdisjoint(page.tags)
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href", "action", "srcset"):
            assert value.startswith("#"), (name, value)
    text = (run_dir / "report.html").read_text("utf-8")
    assert not re.search(r"url\((?!#)|@import|@font-face", text)


def test_the_same_files_give_the_same_bytes(page: Page, run_dir: Path):
    first = (run_dir / "report.html").read_bytes()
    assert report.write(run_dir).read_bytes() == first
    with mpl.rc_context({"axes.facecolor": "red", "font.size": 20.0, "lines.linestyle": "--"}):  # another matplotlibrc
        assert report.write(run_dir).read_bytes() == first


def test_the_verdict_and_every_phase_are_said_in_words(page: Page, run_dir: Path):
    verdict = json.loads((run_dir / "verdict.json").read_bytes())
    assert verdict["why"].removeprefix("Inconclusive. ") in page.text
    above, below = page.text.index("How much it shows, what was replaced and who graded"), page.text.index("criterion")
    assert above < below  # the caveats are pointed at beside the verdict
    for row in verdict["criteria"]:
        assert f"[{row['low']:+.3f}, {row['high']:+.3f}]" in page.text
    for name in ("design_check", "activation_pilot", "train", "decide"):
        assert f"{name} decided this" in page.text
        assert f"{name} had that reason" in page.text
    assert "2.2 min" in page.text


def test_mixed_groups_deviations_and_honest_notes_are_there(page: Page):
    assert "grpo: 12 of 16 by composite, 4 of 16 by task reward" in page.text
    assert "train, resumed: went on <from> a save" in page.text
    assert "Doing nothing scores 1.0 on 0 tasks." in page.text
    assert "2 evaluated rewards rest on an expected number found inside a longer one" in page.text
    assert "sequence_limit 25%" in page.text
    assert "sdpo_token: of 60 teacher contexts 20 held a sibling, 8 were shortened, and 12 told" in page.text
    assert "The agent's prompt is compact" in page.text
    assert "secondary" in page.text
    assert "composite 40 0.125 –" in page.text


def test_gates_are_drawn_into_the_learning_curves(page: Page):
    for label in ("gate >= 0.05", "gate >= 0.01", "gate <= 3", "gate >= 0.25", "gate >= 0.95"):
        assert label in page.text
    assert page.tags.count("svg") == 3


def test_what_others_wrote_is_text(page: Page, run_dir: Path):
    raw = (run_dir / "report.html").read_text("utf-8")
    assert HOSTILE not in raw
    assert HOSTILE in page.text
    assert "<b>done" not in raw


def test_the_heat_map_has_every_token_after_the_prompt_once(page: Page, run_dir: Path):
    shown = 0
    for arm in ("grpo", "sdpo_token"):
        rows = [
            json.loads(line)
            for line in (run_dir / "trajectories" / f"train-{arm}-003.jsonl").read_text("utf-8").splitlines()
        ]
        ends = sorted(rows, key=lambda row: -row["judgement"]["composite"])
        for row in (ends[0], ends[-1]):
            text = "".join(WORDS[token] for token in row["tokens"][row["prompt_length"] :])
            assert " ".join(text.split()) in page.text
            assert f"Hello, task {row['task_index']} <here>." in page.text
            shown += sum(row["mask"])
    hints = [value for name, value in page.attributes if name == "title" and value.startswith("advantage")]
    assert len(hints) == shown
    assert sum("teacher -0.400" in hint for hint in hints) == shown // 2


def test_colours_follow_the_sign_and_size_of_the_advantage(run_dir: Path):
    for transcript in transcripts(read_run(run_dir)):
        strengths = {}
        for token in transcript.tokens:
            if token.colour:
                advantage = float(re.search(r"advantage ([+-][\d.]+)", token.hint)[1])
                red, alpha = token.colour.split(",")[0], float(token.colour.rstrip(")").split(",")[-1])
                assert (red == "rgba(11") == (advantage > 0)
                strengths[abs(advantage)] = alpha
        assert [strengths[key] for key in sorted(strengths)] == sorted(strengths.values())


def test_a_stopped_run_says_where_and_shows_what_there_is(tmp_path: Path):
    page = Page(report.write(make(tmp_path / "stopped", until="activation_pilot")).read_text("utf-8"))
    assert "Stopped by a gate of the protocol" in page.text
    assert "activation_pilot: activation_pilot decided this." in page.text
    assert "Fallback max_turns: a gate fails." in page.text
    assert "No training step was taken." in page.text
    assert "Nothing was evaluated." in page.text


def test_a_run_that_is_not_finished_says_so(tmp_path: Path):
    run = read_run(make(tmp_path / "half", until="train"))
    assert summary.outcome(run) == "unfinished"
    assert summary.headline(run) == "The last phase that is done is train; run.py --resume goes on from there."


def test_without_a_vocabulary_token_ids_stand_for_texts(tmp_path: Path):
    for transcript in transcripts(read_run(make(tmp_path / "run"))):
        assert all(re.fullmatch(r"(\[\d+\])+", token.text) for token in transcript.tokens)


def test_an_episode_that_left_its_group_is_not_shown(tmp_path: Path):
    directory = make(tmp_path / "run")
    path = directory / "trajectories" / "train-grpo-003.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for row in rows[2:]:
        row["judgement"] = row["judgement"] | {"composite": None} if row["rollout"] % 2 else None
    rows[0]["sampler_logprobs"][12] = "nan"  # how a value that is no number is written
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    shown = [transcript.title for transcript in transcripts(read_run(directory)) if "grpo" in transcript.title]
    assert shown == ["grpo, step 3, train task 0, rollout 1", "grpo, step 3, train task 0, rollout 0"]


def test_numbers_that_are_none_leave_a_dash(tmp_path: Path):
    directory = make(tmp_path / "run")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        row.update(composite_rubric_score=None, loss="nan", sdpo_mean_abs_token_adv="inf", abs_advantage_mean=None)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "–" in Page(report.write(directory).read_text("utf-8")).text


def test_several_rollouts_a_task_give_pass_hat_k(tmp_path: Path):
    directory = make(tmp_path / "run")
    spec = json.loads((directory / "spec.json").read_bytes())
    spec["eval"]["rollouts_per_task"] = 2
    (directory / "spec.json").write_text(json.dumps(spec))
    wins = [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    rows = [
        {"arm": "grpo", "task_index": task, "rollout": r, "composite": 0.5, "reward": pair[r]}
        for task, pair in enumerate(wins)
        for r in (0, 1)
    ]
    rows.append(rows[0] | {"task_index": 4})  # one of its two is missing: it has no pass^2
    (directory / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summary.pass_hat(read_run(directory)) == [{"arm": "grpo", "values": [0.5, 0.25]}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("metrics.jsonl", b"{\n", "a line is no longer JSON"), ("verdict.json", b"[]", "should hold one JSON object")],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, words: str):
    directory = make(tmp_path / "run")
    (directory / name).write_bytes(content)
    with pytest.raises(BadInputError, match=words) as caught:
        report.write(directory)
    assert name in str(caught.value)


def test_a_directory_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(BadInputError, match=r"no spec\.json"):
        report.write(tmp_path)


@pytest.mark.parametrize(
    ("environment", "graded"), [("own", "this project's own retail environment"), ("upstream", "upstream's tau_bench")]
)
def test_what_a_reader_of_the_experiment_as_asked_for_must_not_overlook(environment: str, graded: str):
    facts = {"environment": environment}
    begun = PhaseReceipt("spec_preflight", "done", "", "", facts, None)
    spec = dict(load(spec_folder() / "sdpo.json").frozen)
    run = RunFiles(Path(), spec, (begun,), (), (), (), None, None, None, None)
    notes = "\n".join(summary.honest_notes(run))
    assert "An extension of arXiv 2601.20802" in notes
    assert "no replication of it" in notes
    assert "Weak evidence: Qwen/Qwen3.5-4B is small" in notes
    assert "GPT-4o, is replaced by Qwen/Qwen3-8B" in notes
    assert f"rewards were graded by, {graded}" in notes
