"""The synthetic SPOD component: a GRU student, a frozen random teacher, an environment with one bit at the end."""

from paritygate.synthetic.component import Outcome, plan, run

__all__ = ["Outcome", "plan", "run"]
