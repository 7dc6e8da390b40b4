"""The checks, a module a group, two for sampling: each is a plain function of the lab that returns what it measured."""

from collections.abc import Callable

from paritygate.service.checks import draws, gradient, isolation, optimiser, sampling, state, sums, value, wire
from paritygate.service.lab import Lab
from paritygate.service.outcome import Measured

Check = Callable[[Lab], Measured]
CHECKS: dict[str, Check] = {
    **value.CHECKS,
    **gradient.CHECKS,
    **sums.CHECKS,
    **optimiser.CHECKS,
    **state.CHECKS,
    **sampling.CHECKS,
    **draws.CHECKS,
    **isolation.CHECKS,
    **wire.CHECKS,
}
