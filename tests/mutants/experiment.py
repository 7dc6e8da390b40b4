"""Known mistakes in the protocol and its training step."""

from tests.mutants.mutant import Mutant

ONE_PATH = "tests/agent/test_one_path.py::test_sampling_scoring_and_evaluation_see_one_rendering"

MUTANTS = (
    Mutant(
        "another-renderer-in-evaluation",
        "another renderer at evaluation than in training (cookbook #382)",
        ONE_PATH,
        "experiment/step/collector.py",
        "            self.renderer,\n            sampler,\n",
        '            self.renderer if temperature else renderer.load("qwen3", self.renderer._tokenizer),\n'
        "            sampler,\n",
    ),
    Mutant(
        "another-context-for-the-teacher",
        "another rendering for the teacher than for the student (cookbook #796)",
        ONE_PATH,
        "experiment/step/collector.py",
        "context = teacher_context(\n            self.renderer,\n            self.context,",
        "context = teacher_context(\n            self.renderer,\n"
        "            prompt.full(self.source.wiki, self.source.tools),",
    ),
    Mutant(
        "mean-over-the-step",
        "the mean of the whole step's rewards instead of the group's",
        "tests/agent/test_one_path.py::test_rewards_are_centred_within_each_group",
        "experiment/step/batch.py",
        "    for group in groups:\n        try:",
        "    for group in [Group(-1, tuple(flat(groups)))]:\n        try:",
    ),
    Mutant(
        "last-batch-again",
        "a resumed run takes the last optimiser step twice (cookbook #935)",
        "tests/experiment/test_resume.py::test_no_optimiser_step_is_applied_twice",
        "experiment/step/arm_run.py",
        "        return run\n",
        "        run.steps = run.steps[:-1]\n        return run\n",
    ),
    Mutant(
        "none-is-zero-in-a-batch",
        "the leading None of a service's log-probabilities read as 0.0",
        "tests/agent/test_one_path.py::test_a_token_without_a_logprob_is_refused_and_not_read_as_certain",
        "experiment/step/advantages.py",
        'float("nan") if value is None else value',
        "0.0 if value is None else value",
    ),
    Mutant(
        "difference-not-measured",
        "sampled and recomputed log-probabilities differ and nobody looks (cookbook #396)",
        "tests/agent/test_one_path.py::test_sampled_against_recomputed_logprobs_is_a_metric",
        "experiment/step/metrics.py",
        "abs(row[t - 1] - _number(rollout.trajectory.sampler_logprobs[t]))",
        "abs(row[t - 1] - row[t - 1])",
    ),
)
