"""The protocol as phases, each a function that reads the run's state and leaves a receipt."""

from paritygate.experiment.protocol import PHASES
from paritygate.experiment.runner import RunResult, run

__all__ = ["PHASES", "RunResult", "run"]
