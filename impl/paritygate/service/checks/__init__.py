"""The checks, a module a group, two for sampling and optimiser: each is a plain function of the lab, and measures."""

from collections.abc import Callable

from paritygate.service.checks import draws, eps, gradient, isolation, optimiser, sampling, state, sums, value, wire
from paritygate.service.lab import Lab
from paritygate.service.outcome import Measured

Check = Callable[[Lab], Measured]
CHECKS: dict[str, Check] = {
    **value.CHECKS,
    **gradient.CHECKS,
    **sums.CHECKS,
    **optimiser.CHECKS,
    **eps.CHECKS,
    **state.CHECKS,
    **sampling.CHECKS,
    **draws.CHECKS,
    **isolation.CHECKS,
    **wire.CHECKS,
}
