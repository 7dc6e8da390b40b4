"""Known mistakes in the embedded server."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "server-divides",
        "a service that divides by the number of positions",
        "tests/server/test_losses.py::test_value_and_gradient",
        "server/engine/losses.py",
        'return -(torch.exp(logprobs - datum.of("logprobs")) * datum.of("advantages")).sum()',
        'return -(torch.exp(logprobs - datum.of("logprobs")) * datum.of("advantages")).mean()',
    ),
)
