"""Known mistakes in the client of a service."""

from tests.mutants.mutant import Mutant

WIRE = "tests/agent/test_wire.py::test_the_policy_is_sampled_from_its_whole_distribution"
SHIFT = "tests/backend/test_data.py::test_a_policy_gradient_datum_sends_each_number_with_its_own_token"

MUTANTS = (
    Mutant(
        "top-p",
        "sampled with top-p while the trainer recomputes over the whole vocabulary (TRL #6789)",
        WIRE,
        "backend/sampler.py",
        "top_p: float = 1.0,",
        "top_p: float = 0.95,",
    ),
    Mutant(
        "shifted-by-one",
        "rollout log-probabilities shifted against their tokens (TRL #6191)",
        SHIFT,
        "backend/data.py",
        "_finite(name, t, values[t]) if mask[t]",
        "_finite(name, t, values[t - 1] if mask[t - 1] else 0.0) if mask[t]",
    ),
    Mutant(
        "advantages-off-the-mask",
        "masked advantages leak onto the wire, which has no mask (miles #1383)",
        SHIFT,
        "backend/data.py",
        "_finite(name, t, values[t]) if mask[t] else 0.0",
        "_finite(name, t, values[t]) if mask[t] else float(values[t] or 0.0)",
    ),
)
