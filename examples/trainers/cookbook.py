"""tinker-cookbook: reverse KL over the teacher's top k, group advantages.

Install: pip install tinker==0.38.0 torch blobfile chz cloudpickle datasets termcolor, then
pip install --no-deps tinker-cookbook==0.6.1
"""

from types import SimpleNamespace

import tinker
import torch
from tinker_cookbook.distillation.sdft import reverse_kl_custom_loss
from tinker_cookbook.rl.data_processing import compute_advantages

from paritygate.harness import Unsupported


def logit_loss(
    student_logits, teacher_logits, mask, *, divergence, aggregation, top_k=None, tail=False, top_k_of="student"
):
    """Renormalised over the teacher's k largest; a token that is not read has weights of 0. A sum."""
    if divergence != "reverse_kl" or aggregation != "token_sum" or tail or (top_k and top_k_of != "teacher"):
        raise Unsupported("reverse KL, renormalised over the teacher's top k, summed")
    k = top_k or student_logits.shape[-1]
    data, logprobs = [], []
    rows = (torch.where(mask[..., None] == 1, logits, 0.0) for logits in (student_logits, teacher_logits))
    for student, teacher, row_mask in zip(*rows, mask, strict=True):
        largest = teacher.log_softmax(-1).topk(k)
        weights = (largest.values.softmax(-1) * row_mask[:, None]).float()
        inputs = {"target_tokens": largest.indices, "weights": weights}
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints([0] * len(row_mask)),
                loss_fn_inputs={name: tinker.TensorData.from_torch(value) for name, value in inputs.items()},
            )
        )
        logprobs.append(student.log_softmax(-1).gather(-1, largest.indices))
    return reverse_kl_custom_loss(data, logprobs)[0]


def group_mean_advantage(rewards):
    """Rewards centred within one group."""
    return compute_advantages([SimpleNamespace(get_total_rewards=rewards.tolist)])[0]


sdpo = SimpleNamespace(logit_loss=logit_loss)
grpo = SimpleNamespace(group_mean_advantage=group_mean_advantage)
