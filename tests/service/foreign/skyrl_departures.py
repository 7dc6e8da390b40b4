"""What skyrl 0.4.0 (JAX backend) does that is not as defined, each shown by a few lines of the Tinker SDK and NumPy.

`TINKER_API_KEY=tml-... python skyrl_departures.py URL MODEL [NAME ...]`, with tinker 0.25.0. Written by hand, apart
from the checks of paritygate.service; each function prints both numbers. The places in the package are in design/091.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from tinker import types

URL, MODEL = sys.argv[1].rstrip("/"), sys.argv[2]
service = tinker.ServiceClient(base_url=URL, api_key=os.environ["TINKER_API_KEY"])
TOKENS = [int(t) for t in np.random.default_rng(0).integers(5, 250, 17)]
ONES = np.ones(16)
WARM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
PLAIN = {"learning_rate": 0.1, "beta1": 0.0, "beta2": 0.0, "eps": 1.0}  # proportional to a gradient far below 1
SECONDS = 120  # a new shape is compiled first


def datum(**inputs: Any) -> types.Datum:
    """Sixteen tokens, each with the next one as its target."""
    values: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    values["target_tokens"] = np.asarray(TOKENS[1:], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=values)


def train(client: Any, data: list[types.Datum], adam: dict[str, float]) -> None:
    """One step on cross_entropy."""
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(**adam)).result()


def adapter(**options: Any) -> Any:
    """A LoRA training client after two steps, so that both of its matrices have gradients."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=7, **options)
    for _ in range(2):
        train(client, [datum(weights=ONES)], WARM)
    return client


def logprobs(client: Any) -> Any:
    """Those of the sixteen targets."""
    answer = client.forward([datum(weights=ONES)], "cross_entropy").result()
    return answer.loss_fn_outputs[0]["logprobs"].to_numpy()


def moved(data: list[types.Datum], adam: dict[str, float]) -> float:
    """How far one step from one and the same adapter moves the logprobs: Euclidean norm, nats."""
    client = adapter()
    start = logprobs(client)
    train(client, data, adam)
    return float(np.linalg.norm(logprobs(client) - start))


def answered(call: Callable[[], Any]) -> str:
    """What a call comes to in SECONDS."""
    try:
        future = call()
        value = future.result(timeout=SECONDS) if hasattr(future, "result") else future
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return f"answered: {str(value)[:160]}"


# ---------------------------------------------------------------------- losses


def size_of_weights_cancels() -> None:
    """With eps = 1, far above the gradient, a step is proportional to the gradient: 4 times the weights, 4 steps."""
    steps = [moved([datum(weights=scale * ONES)], PLAIN) for scale in (0.125, 0.5, 2.0)]
    print("weights that sum to 2, 8, 32: the logprobs move by", *steps)


def batch_is_a_mean() -> None:
    """The same datum four times has four times its gradient."""
    steps = [moved([datum(weights=ONES)] * count, PLAIN) for count in (1, 2, 4)]
    print("one datum 1, 2, 4 times in a batch: the logprobs move by", *steps)


def negative_weights_are_divided_by_1e_9() -> None:
    """+w and then -w leave no gradient."""
    client = adapter()
    start = logprobs(client)
    for sign in (1, -1):
        client.forward_backward([datum(weights=sign * ONES)], "cross_entropy").result()
    client.optim_step(types.AdamParams(**PLAIN)).result()
    print("after +w and -w a step moves a logprob by", np.abs(logprobs(client) - start).max(), "nats; right is 0")


def there_is_no_loss_sum() -> None:
    client = adapter()
    for verb in ("forward", "forward_backward"):
        answer = getattr(client, verb)([datum(weights=ONES)], "cross_entropy").result()
        print(f"{verb}: metrics {answer.metrics}; -sum(weights * logprobs) is {-logprobs(client).sum()}")


def several_targets() -> None:
    """48 targets are more than the padded length of 32, 24 are not."""
    client = adapter()
    for count in (16, 8):
        targets = np.stack([np.roll(TOKENS[1 : count + 1], k) for k in range(3)], axis=1).astype(np.int64)
        inputs: dict[str, Any] = {"target_tokens": targets, "weights": np.ones((count, 3), np.float32)}
        data = [types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:count]), loss_fn_inputs=inputs)]
        for verb in ("forward", "forward_backward"):
            try:
                output = getattr(client, verb)(data, "cross_entropy").result(timeout=SECONDS).loss_fn_outputs[0]
                print(
                    f"{verb}: {output['logprobs'].to_numpy().size} logprobs for {count} positions with 3 targets each"
                )
            except Exception as error:
                print(f"{verb}: {type(error).__name__}: {str(error)[:160]}")


def bad_data_is_accepted() -> None:
    nan = np.where(np.arange(16) == 3, np.nan, 1.0)
    far = types.Datum(
        model_input=types.ModelInput.from_ints([*TOKENS[:-2], 50_000_000]),
        loss_fn_inputs={"target_tokens": np.asarray(TOKENS[1:], np.int64), "weights": np.ones(16, np.float32)},
    )
    for what, data, loss in (
        ("token 50000000 of 480", far, "cross_entropy"),
        ("5 weights for 16 targets", datum(weights=np.ones(5)), "cross_entropy"),
        ("a NaN advantage", datum(logprobs=-ONES, advantages=nan), "importance_sampling"),
    ):
        client = adapter()
        print(f"{what}:", answered(lambda client=client, data=data, loss=loss: client.forward_backward([data], loss)))
        print("    a step is", answered(lambda client=client: client.optim_step(types.AdamParams(**WARM))))
        print("    after it the logprobs begin with", logprobs(client)[:3])


# ---------------------------------------------------------------------- optimiser, states


def clipping_does_nothing() -> None:
    clipped = {**WARM, "grad_clip_norm": 1e-9, "eps": 1e-3}
    free = {**clipped, "grad_clip_norm": 0.0}
    steps = [moved([datum(weights=ONES)], adam) for adam in (free, clipped)]
    print("grad_clip_norm 0 and 1e-9, eps 1e-3: the logprobs move by", *steps)


def flags_do_nothing() -> None:
    ends = [logprobs(adapter(**flag)) for flag in ({}, {"train_attn": False}, {"train_mlp": False})]
    print("without attention, without MLP: logprobs differ by", *(np.abs(end - ends[0]).max() for end in ends[1:]))


def sampling_moves_the_trainer() -> None:
    """Sampler weights are saved, training goes on, the saved ones are scored with: training stays where it was."""
    client = adapter()
    sampler = client.save_weights_and_get_sampling_client()
    train(client, [datum(weights=ONES)], WARM)
    before = logprobs(client)
    sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    print("sampling moves the training model's logprobs by", np.abs(logprobs(client) - before).max(), "nats")


def prompt_logprobs_are_one_short() -> None:
    sampler = adapter().save_weights_and_get_sampling_client()
    values = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    print(len(values), "logprobs for", len(TOKENS), "tokens; the first is", values[0], "and should be None")


def waiting_gradient_outlives_its_model() -> None:
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    client = adapter()
    client.forward_backward([datum(weights=ONES)], "cross_entropy").result()

    async def unload() -> Any:
        with client.holder.aclient(ClientConnectionPoolType.TRAIN) as inner:
            return await inner.models.unload(request=types.UnloadModelRequest(model_id=client.model_id))

    client.holder.run_coroutine_threadsafe(unload()).result()
    fresh = service.create_lora_training_client(MODEL, rank=8, seed=8)
    start = logprobs(fresh)
    train(fresh, [datum(weights=0.0 * ONES)], WARM)
    print("a new model's first step, on zero weights, moves a logprob by", np.abs(logprobs(fresh) - start).max())


def any_base_model_is_served() -> None:
    client = service.create_lora_training_client("no-such-owner/no-such-model", rank=8)
    print("no-such-owner/no-such-model trains:", logprobs(client)[:3])


CASES = (
    size_of_weights_cancels,
    batch_is_a_mean,
    negative_weights_are_divided_by_1e_9,
    there_is_no_loss_sum,
    several_targets,
    clipping_does_nothing,
    flags_do_nothing,
    sampling_moves_the_trainer,
    prompt_logprobs_are_one_short,
    any_base_model_is_served,
    waiting_gradient_outlives_its_model,
    bad_data_is_accepted,
)

if __name__ == "__main__":
    for case in CASES:
        if case.__name__ in (sys.argv[3:] or [case.__name__]):
            print(f"\n{case.__name__}", flush=True)
            case()
    sys.stdout.flush()
    os._exit(0)  # calls that were given up leave threads of the SDK behind
