"""Known mistakes in paritygate/losses/averaging.py."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "flat-mean",
        "a flat mean over tokens instead of three levels",
        "averaging/value",
        "losses/averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    Mutant(
        "flat-mean-in-spod",
        "a flat mean over tokens instead of three levels",
        "spod/loss",
        "losses/averaging.py",
        "return 1.0 / (tokens[action_index] * actions[episode_index[action_index]] * episodes).double()",
        "return torch.full((action_index.shape[0],), 1.0 / action_index.shape[0], dtype=torch.float64)",
    ),
    Mutant(
        "episodes-by-their-actions",
        "episodes with more actions weigh more",
        "averaging/gradient",
        "losses/averaging.py",
        "* actions[episode_index[action_index]] * episodes)",
        "* actions.sum())",
    ),
    Mutant(
        "result-in-half",
        "a loss returned in the half precision of its input",
        "averaging/value",
        "losses/averaging.py",
        ".to(result_dtype(values))",
        ".to(values.dtype)",
    ),
    Mutant(
        "actions-counted-in-tokens",
        "S counted in tokens: an episode's long actions weigh it down",
        "averaging/value",
        "losses/averaging.py",
        "lengths(episode_index, None)",
        "lengths(episode_index[action_index], None)",
    ),
    Mutant(
        "average-in-half",
        "products and sum in the half precision of the input",
        "averaging/value",
        "losses/averaging.py",
        "total(values.double() * weights)",
        "(values * weights.to(values.dtype)).sum()",
    ),
)

HARMLESS = (
    Mutant(
        "sums-in-another-order",
        "the same sum written the other way round",
        "averaging",
        "losses/averaging.py",
        "total(values.double() * weights)",
        "total(weights * values.double())",
    ),
)
