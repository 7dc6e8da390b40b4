"""The checks, a module a group: each is a plain function of the lab that returns what it measured."""

from collections.abc import Callable

from paritygate.service.checks import gradient, isolation, optimiser, sampling, state, sums, value, wire
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
    **isolation.CHECKS,
    **wire.CHECKS,
}
