"""Known mistakes in tau-bench retail."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "grading-writes",
        "grading mutates the database (tau-bench #92)",
        "tests/retail/test_episode.py::test_grading_does_not_write",
        "retail/episode.py",
        "        goal = self.source.goal(self.split, self.index)\n",
        "        goal = self.source.goal(self.split, self.index)\n"
        "        for action in self.task.actions:\n"
        "            call(self.db, action.name, action.arguments)\n",
    ),
    Mutant(
        "substrings-unseen",
        "an output found inside a longer number counts, and nothing says so (tau-bench #89)",
        "tests/retail/test_episode.py::test_outputs_are_substrings_without_commas",
        "retail/episode.py",
        r'return re.search(rf"(?<!\w)(?<!\d\.){re.escape(output)}(?!\w)(?!\.\d)", text) is not None',
        "return output in text",
    ),
    Mutant(
        "index-error",
        "an IndexError for a task that does not exist (tau-bench #36)",
        "tests/retail/test_episode.py::test_a_task_that_does_not_exist_is_a_sentence",
        "retail/source.py",
        "if not 0 <= index < len(tasks):",
        "if False:",
    ),
    Mutant(
        "gold-that-fails-unseen",
        "gold actions that fail are not noticed (tau-bench #3, #9, tau2 #499)",
        "tests/retail/test_facts.py::test_gold_actions_that_fail",
        "retail/source.py",
        'if text.startswith("Error: "))',
        'if text.startswith("Failure: "))',
    ),
    Mutant(
        "state-shared",
        "state shared between episodes",
        "tests/retail/test_database.py::test_two_episodes_never_see_each_other",
        "retail/database.py",
        "self.touched[place] = _copied(self.base.tables[table][key])",
        "self.touched[place] = self.base.tables[table][key]",
    ),
    Mutant(
        "gift-card-with-exactly-the-amount",
        "a gift card with exactly the amount is refused",
        "tests/retail/test_tools.py::test_a_gift_card_with_exactly_the_amount_pays_and_with_less_does_not",
        "retail/writing.py",
        'method["balance"] < amount',
        'method["balance"] <= amount',
    ),
    Mutant(
        "one-output-is-enough",
        "a reward for one expected output of several",
        "tests/retail/test_episode.py::test_every_expected_output_has_to_be_said",
        "retail/episode.py",
        "outputs_ok = all(outputs.values())",
        "outputs_ok = any(outputs.values()) or not outputs",
    ),
    Mutant(
        "outputs-in-their-case",
        "an expected output with capitals is never found",
        "tests/retail/test_episode.py::test_outputs_are_found_in_any_case",
        "retail/episode.py",
        "any(output.lower() in text",
        "any(output in text",
    ),
)
