"""Known mistakes in the protocol and its training step."""

from tests.mutants.mutant import Mutant

ONE_PATH = "tests/agent/test_one_path.py::test_sampling_scoring_and_evaluation_see_one_rendering"

WIRING = "tests/experiment/test_wiring.py"
REQUESTS = f"{WIRING}::test_every_request_is_the_one_that_the_protocol_implies"
TOUCHING = "tests/statistics/test_verdict.py::test_an_interval_that_touches_the_margin_lies_on_neither_side_of_it"

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
    Mutant(
        "a-group-shares-its-seed",
        "rollouts of a group share their seed: identical episodes",
        REQUESTS,
        "experiment/step/collector.py",
        "derive(seed, task, rollout), limits)",
        "derive(seed, task), limits)",
    ),
    Mutant(
        "every-step-draws-the-same",
        "every step draws the same numbers",
        REQUESTS,
        "experiment/step/collector.py",
        "derive(self.exp.arms[0].seed, purpose, step)",
        "derive(self.exp.arms[0].seed, purpose)",
    ),
    Mutant(
        "arms-evaluated-with-other-seeds",
        "evaluation seeds differ between arms: users and judges are unpaired",
        REQUESTS,
        "experiment/step/collector.py",
        '"evaluate", task_index, rollout, attempt)',
        '"evaluate", str(sampler.path), task_index, rollout, attempt)',
    ),
    Mutant(
        "one-simulator-for-all",
        "the simulated users of all episodes share one seed",
        REQUESTS,
        "experiment/step/collector.py",
        'self._simulator(split, task_index, derive(seed, "simulator")),',
        'self._simulator(split, task_index, derive(0, "simulator")),',
    ),
    Mutant(
        "evaluated-on-the-training-split",
        "the evaluation plays tasks of the training split",
        REQUESTS,
        "experiment/step/collector.py",
        "split = self.exp.protocol.evaluation.split",
        "split = self.exp.protocol.train.split",
    ),
    Mutant(
        "one-arm-evaluated-twice",
        "both arms are evaluated with the weights of the first",
        REQUESTS,
        "experiment/phases/train.py",
        "samplers[run.arm.name] = sampler.path",
        "samplers[run.arm.name] = next(iter(samplers.values()), sampler.path)",
    ),
    Mutant(
        "feedback-of-the-first",
        "the teacher reads the feedback of the group's first rollout, whoever is taught",
        REQUESTS,
        "experiment/step/collector.py",
        "feedback=judgement.rationale,",
        "feedback=(judgements[0] or judgement).rationale,",
    ),
    Mutant(
        "success-wording-not-passed-on",
        "the spec's success_wording never reaches the teacher",
        f"{WIRING}::test_the_wording_for_a_success_is_the_specs",
        "experiment/step/collector.py",
        "success_wording=advantage.success_wording,",
        "success_wording=False,",
    ),
    Mutant(
        "sibling-threshold-ignored",
        "the sibling's threshold of the spec ignored",
        f"{WIRING}::test_the_siblings_threshold_and_rule_are_the_specs",
        "experiment/step/collector.py",
        "advantage.sibling_threshold, advantage.sibling_rule",
        "0.8, advantage.sibling_rule",
    ),
    Mutant(
        "sibling-rule-ignored",
        "the sibling's rule of the spec ignored",
        f"{WIRING}::test_the_siblings_threshold_and_rule_are_the_specs",
        "experiment/step/collector.py",
        "advantage.sibling_threshold, advantage.sibling_rule",
        'advantage.sibling_threshold, "best"',
    ),
    Mutant(
        "nan-passes-a-gate",
        "NaN passes a gate that has no bound on that side",
        "tests/experiment/test_gates.py::test_a_gate",
        "experiment/step/gates.py",
        " and not math.isnan(measured)",
        "",
    ),
    Mutant(
        "touching-is-above",
        "an interval that touches the margin lies above it",
        TOUCHING,
        "statistics/verdict.py",
        "above=interval.low > criterion.margin",
        "above=interval.low >= criterion.margin",
    ),
    Mutant(
        "touching-is-below",
        "an interval that touches the margin lies below it",
        TOUCHING,
        "statistics/verdict.py",
        "below=interval.high < criterion.margin",
        "below=interval.high <= criterion.margin",
    ),
)
