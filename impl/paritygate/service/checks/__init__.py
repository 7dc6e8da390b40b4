"""The checks, a module a group: each is a plain function of the lab that returns what it measured."""

from collections.abc import Callable

from paritygate.service.checks import gradient, optimiser, state, sums, value
from paritygate.service.lab import Lab
from paritygate.service.outcome import Measured

Check = Callable[[Lab], Measured]
CHECKS: dict[str, Check] = {
    **value.CHECKS,
    **gradient.CHECKS,
    **sums.CHECKS,
    **optimiser.CHECKS,
    **state.CHECKS,
}
