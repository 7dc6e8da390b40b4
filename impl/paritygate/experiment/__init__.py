"""The protocol as phases, each a function that reads the run's state and leaves a receipt."""

from paritygate.extras import require

require("experiment")

from paritygate.experiment.protocol import PHASES  # noqa: E402
from paritygate.experiment.runner import RunResult, run_experiment  # noqa: E402

__all__ = ["PHASES", "RunResult", "run_experiment"]
