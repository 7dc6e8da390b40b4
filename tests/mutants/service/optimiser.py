"""Mistakes in the optimiser of a service; the rows in brackets are those of design/092."""

from tests.mutants.mutant import Mutant

TRAINING = "server/engine/training.py"
WIRE = "server/wire/training.py"
FACTOR = "factor = clip / norm if 0 < clip < norm else 1.0"
CLIP = "clip = params.grad_clip_norm"
NORM = "norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])))\n"
DECAY = "parameter.mul_(1 - params.learning_rate * params.weight_decay)"
MOVE = "parameter.addcdiv_(m / first, (v / second).sqrt_().add_(params.eps), value=-params.learning_rate)"
CORRECTIONS = "first, second = 1 - params.beta1**adapter.steps, 1 - params.beta2**adapter.steps"

MUTANTS = (
    Mutant(
        "beta1-hard-coded",
        "beta1 is 0.9 whatever was sent (rows 51, 80, 93)",
        "optimiser/betas",
        WIRE,
        'beta1=adam.number("beta1", 0.9, low=0, high=1 - 1e-9),',
        "beta1=0.9,",
    ),
    Mutant(
        "beta2-hard-coded",
        "beta2 is 0.999 whatever was sent (rows 51, 80, 93)",
        "optimiser/betas",
        WIRE,
        'beta2=adam.number("beta2", 0.95, low=0, high=1 - 1e-9),',
        "beta2=0.999,",
    ),
    Mutant(
        "second-moment-uncorrected",
        "the second moment has no bias correction",
        "optimiser/betas",
        TRAINING,
        CORRECTIONS,
        "first, second = 1 - params.beta1**adapter.steps, 1.0",
    ),
    Mutant(
        "first-moment-uncorrected",
        "the first moment has no bias correction",
        "optimiser/betas",
        TRAINING,
        CORRECTIONS,
        "first, second = 1.0, 1 - params.beta2**adapter.steps",
    ),
    Mutant(
        "second-moment-never-falls",
        "AMSGrad: the largest second moment so far is used",
        "optimiser/betas",
        TRAINING,
        "v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)",
        "v.copy_(torch.maximum(v, params.beta2 * v + (1 - params.beta2) * grad * grad))",
    ),
    Mutant(
        "hidden-warm-up",
        "the learning rate grows over the first ten steps",
        "optimiser/betas",
        TRAINING,
        "value=-params.learning_rate)",
        "value=-params.learning_rate * min(1.0, adapter.steps / 10))",
    ),
    Mutant(
        "eps-hard-coded",
        "eps is 1e-8 whatever was sent (rows 51, 80, 93)",
        "optimiser/eps",
        WIRE,
        'eps=adam.number("eps", 1e-12, low=0, high=huge),',
        "eps=1e-8,",
    ),
    Mutant(
        "eps-before-the-correction",
        "eps is added to the root of the uncorrected second moment",
        "optimiser/eps",
        TRAINING,
        MOVE,
        "parameter.addcdiv_(m / first, v.sqrt().add_(params.eps).div_(second**0.5), value=-params.learning_rate)",
    ),
    Mutant(
        "eps-inside-the-root",
        "eps is added to the second moment, under the root",
        "optimiser/eps",
        TRAINING,
        MOVE,
        "parameter.addcdiv_(m / first, (v / second).add_(params.eps).sqrt_(), value=-params.learning_rate)",
    ),
    Mutant(
        "learning-rate-hard-coded",
        "the learning rate is the service's own (row 51)",
        "optimiser/learning_rate",
        TRAINING,
        "value=-params.learning_rate)",
        "value=-0.01)",
    ),
    Mutant(
        "decay-dropped",
        "weight_decay is an unknown field, and ignored (rows 30, 93)",
        "optimiser/decay",
        TRAINING,
        DECAY,
        "pass",
    ),
    Mutant(
        "decay-without-the-learning-rate",
        "weights are multiplied by 1 - weight_decay",
        "optimiser/decay",
        TRAINING,
        DECAY,
        "parameter.mul_(1 - params.weight_decay)",
    ),
    Mutant(
        "decay-in-the-gradient",
        "L2 regularisation: the decay is part of the gradient",
        "optimiser/decay_twice",
        TRAINING,
        "grad = grads[name] * factor",
        "grad = grads[name] * factor + params.weight_decay * parameter",
        ((TRAINING, DECAY, "pass"),),
    ),
    Mutant(
        "decay-of-a-alone",
        "lora_A decays and lora_B does not",
        "optimiser/decay_all",
        TRAINING,
        DECAY,
        'parameter.mul_(1 - params.learning_rate * params.weight_decay * name.endswith("lora_A"))',
    ),
    Mutant(
        "clip-always-one",
        "gradients are clipped at a norm of 1, asked for or not (rows 45, 89)",
        "optimiser/clip_off",
        TRAINING,
        CLIP,
        "clip = params.grad_clip_norm or 1.0",
    ),
    Mutant(
        "clip-dropped",
        "grad_clip_norm is an unknown field, and ignored (rows 39, 80)",
        "optimiser/clip",
        TRAINING,
        CLIP,
        "clip = 0.0",
    ),
    Mutant(
        "clip-per-parameter",
        "each parameter's gradient is clipped by its own norm",
        "optimiser/clip",
        TRAINING,
        "grad = grads[name] * factor",
        "each = float(torch.linalg.vector_norm(grads[name]))\n"
        "            grad = grads[name] * (clip / each if 0 < clip < each else 1.0)",
    ),
    Mutant(
        "clip-by-value",
        "each entry of the gradient is clipped",
        "optimiser/clip",
        TRAINING,
        "grad = grads[name] * factor",
        "grad = grads[name].clamp(-clip, clip) if clip > 0 else grads[name]",
    ),
    Mutant(
        "norm-of-a-part",
        "the norm is that of lora_A alone (row 92)",
        "gradient/absolute",
        TRAINING,
        NORM,
        "norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for n, g in grads.items() "
        'if n.endswith("lora_A")])))\n',
    ),
    Mutant(
        "norm-of-the-sum-of-norms",
        "the norm is the sum of the parameters' norms (row 92)",
        "gradient/absolute",
        TRAINING,
        NORM,
        "norm = float(sum(torch.linalg.vector_norm(g) for g in grads.values()))\n",
    ),
    Mutant(
        "gradient-kept",
        "a step does not use the gradient up",
        "optimiser/consumed_once",
        TRAINING,
        MOVE + "\n            parameter.grad = None",
        MOVE,
    ),
    Mutant(
        "empty-step-moves",
        "a step before any gradient moves the weights",
        "optimiser/zero_step",
        TRAINING,
        DECAY,
        DECAY + "\n            parameter.add_(0.003 if norm == 0 and adapter.steps == 1 else 0.0)",
    ),
)
