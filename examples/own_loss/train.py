"""A training script: it starts only where gspo was shown for exactly this code, these versions and this machine."""

from paritygate.receipts import require_parity

receipt = require_parity(losses=["gspo"], device="cpu")

import torch  # noqa: E402
from my_losses import gspo  # noqa: E402

logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
gspo.loss(logprobs, logprobs, torch.tensor([1.0]), torch.ones(1, 2)).backward()
print("one step with", receipt.path.name, logprobs.grad.tolist())
