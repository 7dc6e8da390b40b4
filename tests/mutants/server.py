"""Known mistakes in the embedded server."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "server-divides",
        "a service that divides by the number of positions",
        "tests/server/engine/test_losses.py::test_value_and_gradient",
        "server/engine/losses.py",
        "return policy_gradient.importance_sampling_loss(*_rows(logprobs, datum), validate=False)",
        "return policy_gradient.importance_sampling_loss(*_rows(logprobs, datum), validate=False) / len(logprobs)",
    ),
    Mutant(
        "export-without-a-prefix",
        "an exported adapter's tensors lack the prefix that PEFT looks for, so none is loaded (row 60 of design/092)",
        "tests/server/test_checkpoints_out.py::test_an_exported_adapter_gives_the_servers_logprobs",
        "server/sessions/peft.py",
        'tensors[f"base_model.model.{network.module_name(target)}',
        'tensors[f"{network.module_name(target)}',
    ),
    Mutant(
        "lora-scale-by-root-rank",
        "rank-stabilised scale alpha / sqrt(rank), PEFT's use_rslora, where alpha / rank is meant",
        "tests/server/engine/test_lora.py::test_the_update_is_alpha_over_rank_times_b_times_a",
        "server/model/lora.py",
        "return ALPHA / self.rank",
        "return ALPHA / self.rank**0.5",
    ),
    Mutant(
        "sampler-shares-the-weights-that-train",
        "a sampler without a copy of the weights: it moves while training goes on",
        "tests/server/engine/test_lora.py::test_a_samplers_weights_are_a_copy_with_and_without_kernels",
        "server/model/lora.py",
        "FrozenLinear(parameter.detach().clone())",
        "FrozenLinear(parameter.detach())",
    ),
    Mutant(
        "sampled-logprobs-of-the-tempered-distribution",
        "sampled logprobs at the sampling temperature, while scoring and training are at temperature 1",
        "tests/server/engine/test_sampling.py::test_sampled_logprobs_are_of_temperature_1_at_any_temperature",
        "server/engine/loop.py",
        "sampled.logprobs.append(float(logits_V[token].float() - normalizer))",
        "sampled.logprobs.append(float(torch.log_softmax(logits_V.float() / (params.temperature or 1), 0)[token]))",
    ),
)
