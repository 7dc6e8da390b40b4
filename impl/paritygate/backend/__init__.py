"""The Tinker client: one thin asynchronous layer over the pinned SDK; where to connect, and when to give up.

    async with connect(embedded_model="tiny") as backend:           # or TINKER_BASE_URL and TINKER_API_KEY
        trainer = await backend.training(backend.models[0], rank=32, seed=0)
        sampler = await trainer.snapshot("step-0")
        [sample] = await sampler.sample(tokens, max_tokens=64, temperature=1.0, seed=0)
        await trainer.forward_backward([policy_gradient_datum(tokens, mask, logprobs, advantages)])
        await trainer.optim_step(4e-5, beta1=0.9, beta2=0.95, eps=1e-8)

Log-probabilities are in nats. Everything that fails after its retries raises `BackendError` (exit 5), and `ServiceDown`
when the service itself is gone. The SDK is imported on first use, so importing this package stays cheap.
"""

from paritygate.backend.connection import Backend, connect
from paritygate.backend.data import (
    Datum,
    cross_entropy_datum,
    policy_gradient_datum,
    soft_cross_entropy_datum,
)
from paritygate.backend.guard import ServiceDown
from paritygate.backend.sampler import Sample, Sampler
from paritygate.backend.trainer import FwdBwd, Trainer
from paritygate.errors import BackendError

__all__ = [
    "Backend",
    "BackendError",
    "Datum",
    "FwdBwd",
    "Sample",
    "Sampler",
    "ServiceDown",
    "Trainer",
    "connect",
    "cross_entropy_datum",
    "policy_gradient_datum",
    "soft_cross_entropy_datum",
]
