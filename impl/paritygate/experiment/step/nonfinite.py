"""A loss that is NaN or infinite stops a run before the optimiser step, with the trajectory and token named."""

import math
import re

from paritygate.backend import Datum, FwdBwd
from paritygate.errors import GateStopped
from paritygate.experiment.step.batch import StepBatch

FLOAT32_MAX = 3.4028235e38  # the service sums in float32
REFUSED = re.compile(r"loss of datum (\d+) is -?(?:nan|inf)", re.IGNORECASE)  # how the embedded server refuses


def named_datum(error: Exception) -> int | None:
    """The index of the datum whose loss a service's error calls NaN or infinite; None for any other error."""
    match = REFUSED.search(str(error))
    return None if match is None else int(match.group(1))


def refuse_nonfinite(where: str, batch: StepBatch, output: FwdBwd) -> None:
    """Raise GateStopped, naming trajectory, position and token, unless the loss and every term of it is finite."""
    for datum, label, row in zip(batch.datums, batch.labels, output.logprobs, strict=False):
        for t, logprob in enumerate(row):
            term = loss_term(datum, t, logprob)
            if not abs(term) <= FLOAT32_MAX:
                raise GateStopped(
                    f"{where} the loss term is {term:g} (logprob {logprob:g}) in the trajectory of {label} at position "
                    f"{t + 1}, token {datum.tokens[t + 1]}."
                )
    if not math.isfinite(output.loss):
        raise GateStopped(
            f"{where} the loss of {', '.join(batch.labels)} is {output.loss}, though its terms are finite."
        )


def loss_term(datum: Datum, t: int, logprob: float) -> float:
    """What target `t` adds to the loss (0 without a weight, whatever stands there); its logprob for cross-entropy."""
    if "advantages" in datum.inputs:
        advantage, sampled = datum.inputs["advantages"][t], datum.inputs["logprobs"][t]
        assert not isinstance(advantage, list)
        assert not isinstance(sampled, list)
        if advantage == 0:
            return 0.0
        return -math.exp(min(logprob - sampled, 700.0)) * advantage
    weights = datum.inputs["weights"][t]
    weighted = any(weights) if isinstance(weights, list) else bool(weights)
    return logprob if weighted else 0.0
