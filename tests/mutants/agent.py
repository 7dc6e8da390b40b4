"""Known mistakes in an episode: rollout, teacher, user, step."""

from tests.mutants.mutant import Mutant

TOKENS = "tests/agent/test_tokens.py::test_the_parts_of_a_trajectory_are_the_tokens_that_the_model_saw"
ALIGNED = "tests/agent/test_teacher.py::test_every_combination_is_aligned_token_by_token"

MUTANTS = (
    Mutant(
        "retokenised",
        "retokenised text instead of the sampled tokens (verl #3960, TRL #5144)",
        TOKENS,
        "agent/episode.py",
        "record.sampled(sample.tokens[:end], sample.logprobs[:end])",
        "codec = renderer._tokenizer\n"
        "    again = codec.encode(codec.decode(list(sample.tokens[:end])))\n"
        "    record.sampled(again, (list(sample.logprobs[:end]) + [0.0] * len(again))[: len(again)])",
    ),
    Mutant(
        "observations-trained-on",
        "tool observations trained on",
        TOKENS,
        "agent/episode.py",
        "self.mask.extend([0] * len(tokens))",
        "self.mask.extend([int(bool(self.spans))] * len(tokens))",
    ),
    Mutant(
        "first-call-only",
        "only the first of several tool calls used",
        "tests/agent/test_rollout.py::test_several_calls_of_one_turn_run_in_order_and_text_before_them_is_kept",
        "agent/episode.py",
        "enumerate(turn.calls)",
        "enumerate(turn.calls[:1])",
    ),
    Mutant(
        "malformed-call-raises",
        "malformed tool JSON kills the rollout",
        "tests/agent/test_rollout.py::test_a_malformed_call_gets_an_error_for_a_result_and_the_others_run",
        "agent/turns.py",
        'return Call(name, parsed.raw, f"{MALFORMED} was not run, since {reason}.")',
        "raise ValueError(reason)",
    ),
    Mutant(
        "thinking-leaks",
        "thinking leaks to the user (strands-env #168)",
        "tests/agent/test_rollout.py::test_thinking_never_reaches_the_user_and_its_calls_do_not_run",
        "agent/turns.py",
        "visible(completion.content)",
        "completion.content",
    ),
    Mutant(
        "stop-in-reasoning",
        "a stop marker honoured inside reasoning",
        "tests/agent/test_users.py::test_what_a_reply_says_and_whether_it_stops",
        "agent/user.py",
        "if STOP not in reply:",
        "if STOP not in text:",
    ),
    Mutant(
        "teacher-cut-from-the-left",
        "the teacher's prompt truncated from the left, losing the system prompt",
        ALIGNED,
        "agent/teacher.py",
        "    tokens = whole if kept is block else render(kept)",
        "    kept, tokens = block, whole[-room:]",
    ),
    Mutant(
        "teacher-span-off-by-one",
        "teacher log-probabilities off by one (AReaL #1729)",
        ALIGNED,
        "agent/teacher.py",
        "[scored[t + shift] if mask",
        "[scored[t + shift - 1] if mask",
    ),
    Mutant(
        "own-solution",
        "the sibling is the trajectory itself",
        "tests/agent/test_teacher.py::test_the_trajectory_is_never_its_own_solution_nor_another_tasks",
        "agent/teacher.py",
        "    if this == other:",
        "    if False:",
    ),
    Mutant(
        "groups-of-different-problems",
        "a group of rollouts that are different problems (cookbook #771)",
        "tests/agent/test_step.py::test_the_order_of_completion_never_shows",
        "agent/rollouts.py",
        "trajectory = await play(task, index)",
        "trajectory = await play(tasks[index % len(tasks)], index)",
    ),
    Mutant(
        "a-word-more-is-cut",
        "of a sibling that does not fit a word more is left out than has to be",
        "tests/agent/test_teacher.py::test_no_word_more_is_cut_than_has_to_be",
        "agent/teacher.py",
        "dropped = _first(1, len(starts),",
        "dropped = 1 + _first(1, len(starts),",
    ),
)
