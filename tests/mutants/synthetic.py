"""Known mistakes in the synthetic component."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "end-token-left-out-of-an-action",
        "the end token left out of an action",
        "tests/synthetic/test_training.py::test_an_action_is_scored_with_its_end_token_by_raw_probabilities",
        "synthetic/model.py",
        "return [*action, END]",
        "return action",
    ),
)
