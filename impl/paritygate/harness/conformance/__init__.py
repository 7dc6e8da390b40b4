"""Another trainer's losses against the definitions: plain inputs, stresses, promises, and the smallest input of each.

`python -m paritygate.harness MODULE` imports an adapter (`examples/trainers/` has ten), which offers functions under
the names that `paritygate.losses` has, as far as it has them: `sdpo.logit_loss`, `policy_gradient.ppo_loss`, ...
"""

from paritygate.harness.conformance.actions import FUNCTIONS as OF_ACTIONS
from paritygate.harness.conformance.functions import Function
from paritygate.harness.conformance.logits import LOGIT_LOSS
from paritygate.harness.conformance.logprobs import FUNCTIONS as OF_LOGPROBS

FUNCTIONS: tuple[Function, ...] = (LOGIT_LOSS, *OF_LOGPROBS, *OF_ACTIONS)
"""What an adapter can offer."""
