"""Known mistakes outside of the losses (agent, service, training loop, environment), each with the test it dies by.

`python tests/mutants/elsewhere.py [NAME ...]`. The tests first pass on a copy of the tree as it is; then each mistake
is made in the copy, its test run in a pytest of its own, and the edit taken back. Exit code 1 where a mistake lives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mistake(NamedTuple):
    """A mistake, the file under impl/paritygate and the text there (once) that it replaces, and the test that dies."""

    name: str
    mistake: str
    file: str
    old: str
    new: str
    test: str


TOKENS = "tests/agent/test_tokens.py::test_the_parts_of_a_trajectory_are_the_tokens_that_the_model_saw"
ALIGNED = "tests/agent/test_teacher.py::test_every_combination_is_aligned_token_by_token"
WIRE = "tests/agent/test_wire.py::test_the_policy_is_sampled_from_its_whole_distribution"
SHIFT = "tests/backend/test_data.py::test_a_policy_gradient_datum_sends_each_number_with_its_own_token"
ONE_PATH = "tests/agent/test_one_path.py::test_sampling_scoring_and_evaluation_see_one_rendering"

MISTAKES = (
    Mistake(
        "retokenised",
        "retokenised text instead of the sampled tokens (verl #3960, TRL #5144)",
        "agent/rollout.py",
        "record.sampled(sample.tokens[:end], sample.logprobs[:end])",
        "codec = renderer._tokenizer\n"
        "    again = codec.encode(codec.decode(list(sample.tokens[:end])))\n"
        "    record.sampled(again, (list(sample.logprobs[:end]) + [0.0] * len(again))[: len(again)])",
        TOKENS,
    ),
    Mistake(
        "observations-trained-on",
        "tool observations trained on",
        "agent/rollout.py",
        "self.mask.extend([0] * len(tokens))",
        "self.mask.extend([int(bool(self.spans))] * len(tokens))",
        TOKENS,
    ),
    Mistake(
        "first-call-only",
        "only the first of several tool calls used",
        "agent/rollout.py",
        "enumerate(turn.calls)",
        "enumerate(turn.calls[:1])",
        "tests/agent/test_rollout.py::test_several_calls_of_one_turn_run_in_order_and_text_before_them_is_kept",
    ),
    Mistake(
        "malformed-call-raises",
        "malformed tool JSON kills the rollout",
        "agent/turns.py",
        'return Call(name, parsed.raw, f"Error: the tool call was not run, since {reason}.")',
        "raise ValueError(reason)",
        "tests/agent/test_rollout.py::test_a_malformed_call_gets_an_error_for_a_result_and_the_others_run",
    ),
    Mistake(
        "thinking-leaks",
        "thinking leaks to the user (strands-env #168)",
        "agent/turns.py",
        "visible(parsed.content)",
        "parsed.content",
        "tests/agent/test_rollout.py::test_thinking_never_reaches_the_user_and_its_calls_do_not_run",
    ),
    Mistake(
        "stop-in-reasoning",
        "a stop marker honoured inside reasoning",
        "agent/user.py",
        "if STOP not in said:",
        "if STOP not in text:",
        "tests/agent/test_users.py::test_what_a_reply_says_and_whether_it_stops",
    ),
    Mistake(
        "top-p",
        "sampled with top-p while the trainer recomputes over the whole vocabulary (TRL #6789)",
        "backend/sampler.py",
        "top_p: float = 1.0,",
        "top_p: float = 0.95,",
        WIRE,
    ),
    Mistake(
        "teacher-cut-from-the-left",
        "the teacher's prompt truncated from the left, losing the system prompt",
        "agent/teacher.py",
        "    tokens = whole if kept is block else render(kept)",
        "    kept, tokens = block, whole[-room:]",
        ALIGNED,
    ),
    Mistake(
        "teacher-off-by-one",
        "teacher log-probabilities off by one (AReaL #1729)",
        "agent/teacher.py",
        "[scored[t + shift] if mask",
        "[scored[t + shift - 1] if mask",
        ALIGNED,
    ),
    Mistake(
        "own-solution",
        "the sibling is the trajectory itself",
        "agent/teacher.py",
        "    if own == other:",
        "    if False:",
        "tests/agent/test_teacher.py::test_the_trajectory_is_never_its_own_solution_nor_another_tasks",
    ),
    Mistake(
        "another-renderer-in-evaluation",
        "another renderer at evaluation than in training (cookbook #382)",
        "experiment/collect.py",
        "            self.renderer,\n            sampler,\n",
        '            self.renderer if temperature else renderer.load("qwen3", self.renderer._tokenizer),\n'
        "            sampler,\n",
        ONE_PATH,
    ),
    Mistake(
        "another-context-for-the-teacher",
        "another rendering for the teacher than for the student (cookbook #796)",
        "experiment/collect.py",
        "context = teacher_context(\n            self.renderer,\n            self.context,",
        "context = teacher_context(\n            self.renderer,\n"
        "            prompt.full(self.source.wiki, self.source.tools),",
        ONE_PATH,
    ),
    Mistake(
        "groups-of-different-problems",
        "a group of rollouts that are different problems (cookbook #771)",
        "agent/step.py",
        "trajectory = await play(task, rollout)",
        "trajectory = await play(tasks[rollout % len(tasks)], rollout)",
        "tests/agent/test_step.py::test_the_order_of_completion_never_shows",
    ),
    Mistake(
        "mean-over-the-step",
        "the mean of the whole step's rewards instead of the group's",
        "experiment/batch.py",
        "    for group in groups:\n        scores",
        "    for group in [Group(-1, tuple(flat(groups)))]:\n        scores",
        "tests/agent/test_one_path.py::test_rewards_are_centred_within_each_group",
    ),
    Mistake(
        "last-batch-again",
        "a resumed run takes the last optimiser step twice (cookbook #935)",
        "experiment/lane.py",
        "        return cls(state, lane, trainer, initial, steps)",
        "        return cls(state, lane, trainer, initial, steps[:-1])",
        "tests/experiment/test_resume.py::test_no_optimiser_step_is_applied_twice",
    ),
    Mistake(
        "none-is-zero",
        "the leading None of a service's log-probabilities read as 0.0",
        "experiment/advantages.py",
        'float("nan") if value is None else value',
        "0.0 if value is None else value",
        "tests/agent/test_one_path.py::test_a_token_without_a_logprob_is_refused_and_not_read_as_certain",
    ),
    Mistake(
        "shifted-by-one",
        "rollout log-probabilities shifted against their tokens (TRL #6191)",
        "backend/data.py",
        "_finite(name, t, values[t]) if mask[t]",
        "_finite(name, t, values[t - 1] if mask[t - 1] else 0.0) if mask[t]",
        SHIFT,
    ),
    Mistake(
        "advantages-off-the-mask",
        "masked advantages leak onto the wire, which has no mask (miles #1383)",
        "backend/data.py",
        "_finite(name, t, values[t]) if mask[t] else 0.0",
        "_finite(name, t, values[t]) if mask[t] else float(values[t] or 0.0)",
        SHIFT,
    ),
    Mistake(
        "difference-not-measured",
        "sampled and recomputed log-probabilities differ and nobody looks (cookbook #396)",
        "experiment/metrics.py",
        "abs(row[t - 1] - _number(rollout.trajectory.sampler_logprobs[t]))",
        "abs(row[t - 1] - row[t - 1])",
        "tests/agent/test_one_path.py::test_sampled_against_recomputed_logprobs_is_a_metric",
    ),
    Mistake(
        "server-divides",
        "a service that divides by the number of positions",
        "server/engine/losses.py",
        'return -(torch.exp(logprobs - datum.of("logprobs")) * datum.of("advantages")).sum()',
        'return -(torch.exp(logprobs - datum.of("logprobs")) * datum.of("advantages")).mean()',
        "tests/server/test_losses.py::test_value_and_gradient",
    ),
    Mistake(
        "end-token-left-out",
        "the end token left out of an action",
        "synthetic/model.py",
        "return [*action, END]",
        "return action",
        "tests/synthetic/test_training.py::test_an_action_is_scored_with_its_end_token_by_raw_probabilities",
    ),
    Mistake(
        "grading-writes",
        "grading mutates the database (tau-bench #92)",
        "retail/episode.py",
        "        goal = self.source.goal(self.split, self.index)\n",
        "        goal = self.source.goal(self.split, self.index)\n"
        "        for action in self.task.actions:\n"
        "            call(self.db, action.name, action.arguments)\n",
        "tests/retail/test_episode.py::test_grading_does_not_write",
    ),
    Mistake(
        "substrings-unseen",
        "an output found inside a longer number counts, and nothing says so (tau-bench #89)",
        "retail/episode.py",
        r'return re.search(rf"(?<!\w)(?<!\d\.){re.escape(output)}(?!\w)(?!\.\d)", text) is not None',
        "return output in text",
        "tests/retail/test_episode.py::test_outputs_are_substrings_without_commas",
    ),
    Mistake(
        "index-error",
        "an IndexError for a task that does not exist (tau-bench #36)",
        "retail/source.py",
        "if not 0 <= index < len(tasks):",
        "if False:",
        "tests/retail/test_episode.py::test_a_task_that_does_not_exist_is_a_sentence",
    ),
    Mistake(
        "gold-that-fails-unseen",
        "gold actions that fail are not noticed (tau-bench #3, #9, tau2 #499)",
        "retail/source.py",
        'if text.startswith("Error: "))',
        'if text.startswith("Failure: "))',
        "tests/retail/test_facts.py::test_gold_actions_that_fail",
    ),
    Mistake(
        "state-shared",
        "state shared between episodes",
        "retail/database.py",
        "self.touched[place] = _copied(self.base.tables[table][key])",
        "self.touched[place] = self.base.tables[table][key]",
        "tests/retail/test_database.py::test_two_episodes_never_see_each_other",
    ),
)


def passes(tree: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests pass in `tree`, and pytest's last lines; RuntimeError where pytest ran none of them."""
    found = os.environ.get("PARITYGATE_TAU_BENCH") or str(ROOT.parent / "shared" / "tau_bench_retail")
    environment = os.environ | {"PARITYGATE_TAU_BENCH": found, "CI": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {run.returncode}: {run.stdout[-800:]}{run.stderr[-800:]}")
    error = [line for line in run.stdout.splitlines() if line.startswith("E ")]
    return run.returncode == 0, (error or [""])[0][1:].strip()[:160]


def main(names: Sequence[str]) -> int:
    """Baseline, then every mistake; 1 where one lives or shows nothing, 2 for an unknown name."""
    if unknown := set(names) - {mistake.name for mistake in MISTAKES}:
        print(f"there is no {', '.join(sorted(unknown))}")
        return 2
    chosen = [mistake for mistake in MISTAKES if not names or mistake.name in names]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("impl", "reference", "tests", "spec", "benchmarks"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        green, words = passes(tree, sorted({mistake.test for mistake in chosen}))
        if not green:
            print(f"no kill would mean anything: {words}")
            return 1
        alive = 0
        for mistake in chosen:
            path = tree / "impl/paritygate" / mistake.file
            source = path.read_text()
            path.write_text(source.replace(mistake.old, mistake.new))
            green, words = passes(tree, [mistake.test])
            path.write_text(source)
            alive += green
            print(f"{'LIVES' if green else 'killed'} {mistake.name:<32} {words}", flush=True)
    print(f"{alive} of {len(chosen)} live")
    return 1 if alive else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mistakes; all by default")
    sys.exit(main(parser.parse_args().names))
