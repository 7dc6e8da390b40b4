"""What the fast engines take: dtypes, and plain tensors alone."""

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
