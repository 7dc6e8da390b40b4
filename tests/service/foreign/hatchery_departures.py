"""What hatchery-core 0.3.0 does that is not as defined, each shown by a few lines of the Tinker SDK and NumPy alone.

`TINKER_API_KEY=tml-... python hatchery_departures.py URL MODEL [NAME ...]`, with tinker 0.24.1. Written by hand, apart
from the checks of paritygate.service; each function prints both numbers. The places in the package are in design/091.
"""

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tinker
from tinker import types

URL, MODEL, KEY = sys.argv[1].rstrip("/"), sys.argv[2], os.environ["TINKER_API_KEY"]
service = tinker.ServiceClient(base_url=URL, api_key=KEY)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(5, 250, 17)]
SECONDS = 20


def datum(**inputs: Any) -> types.Datum:
    """Sixteen tokens, each with the next one as its target."""
    values: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    values["target_tokens"] = np.asarray(TOKENS[1:], np.int64)
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=values)


def wide() -> types.Datum:
    """The same with three targets a position."""
    targets = np.stack([np.roll(TOKENS[1:], k) for k in range(3)], axis=1).astype(np.int64)
    inputs: dict[str, Any] = {"target_tokens": targets, "weights": np.ones((16, 3), np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


ONES = np.ones(16)


def adapter() -> Any:
    """A LoRA training client after two steps, so that both of its matrices have gradients."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=7)
    for _ in range(2):
        train(client, ONES, learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    return client


def train(client: Any, weights: Any, **adam: float) -> None:
    """One step on cross_entropy with these weights."""
    client.forward_backward([datum(weights=weights)], "cross_entropy").result()
    client.optim_step(types.AdamParams(**adam)).result()


def logprobs(client: Any) -> Any:
    """Those of the sixteen targets."""
    answer = client.forward([datum(weights=ONES)], "cross_entropy").result()
    return answer.loss_fn_outputs[0]["logprobs"].to_numpy()


def saved(client: Any, name: str) -> str:
    return str(client.save_state(f"{name}-{os.getpid()}").result().path)


def restored(path: str, *, optimizer: bool = False) -> Any:
    verb = "create_training_client_from_state" + ("_with_optimizer" if optimizer else "")
    return getattr(service, verb)(path)


def answered(call: Callable[[], Any]) -> str:
    """What a call comes to in SECONDS; the SDK itself repeats HTTP 5xx for ever."""
    try:
        future = call()
        value = future.result(timeout=SECONDS) if hasattr(future, "result") else future
    except TimeoutError:
        getattr(future, "future", lambda: future)().cancel()
        return f"no answer within {SECONDS} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:160]}"
    return f"answered: {str(value)[:160]}"


# ---------------------------------------------------------------------- losses


def loss_is_a_mean() -> None:
    """With eps = 1, far above the gradient, a step is proportional to the gradient: 4 times the weights, 4 steps."""
    path = saved(adapter(), "mean")
    start = logprobs(restored(path))
    moved: list[float] = []
    for scale in (0.125, 0.5, 2.0):  # the sixteen weights sum to 2, 8 and 32
        client = restored(path)
        train(client, scale * ONES, learning_rate=0.1, beta1=0.0, beta2=0.0, eps=1.0)
        moved.append(float(np.linalg.norm(logprobs(client) - start)))
    print("weights that sum to 2, 8, 32: the logprobs move by", *moved)


def policy_loss_is_a_mean() -> None:
    """At the sampler's logprobs, importance_sampling's gradient is cross_entropy's with the advantages as weights."""
    path = saved(adapter(), "policy")
    start = logprobs(restored(path))
    moved: list[float] = []
    for loss in ("importance_sampling", "cross_entropy"):
        client = restored(path)
        inputs = {"logprobs": start, "advantages": ONES / 32} if loss[0] == "i" else {"weights": ONES / 32}
        client.forward_backward([datum(**inputs)], loss).result()
        client.optim_step(types.AdamParams(learning_rate=0.1, beta1=0.0, beta2=0.0, eps=1.0)).result()
        moved.append(float(np.linalg.norm(logprobs(client) - start)))
    print("importance_sampling moves the logprobs by", moved[0], "cross_entropy with the same weights by", moved[1])


def forward_has_no_loss() -> None:
    client = adapter()
    weights = 0.2 * ONES
    right = -float(weights @ logprobs(client))
    for verb in ("forward", "forward_backward"):
        answer = getattr(client, verb)([datum(weights=weights)], "cross_entropy").result()
        print(f"{verb}: loss:sum is {answer.metrics['loss:sum']}, -sum(weights * logprobs) is {right}")


def gspo_has_a_ratio_a_token() -> None:
    client = adapter()
    now = logprobs(client)
    ratios = np.where(np.arange(16) % 2, 1.1, 1 / 1.1)  # their geometric mean is 1: the sequence's ratio
    inputs = {"logprobs": now - np.log(ratios), "advantages": np.where(np.arange(16) % 2, 1.0, 0.5)}
    options = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    answer = client.forward_backward([datum(**inputs)], "gspo", options).result()
    print("gspo: loss:sum is", answer.metrics["loss:sum"], "-sum(sequence ratio * A) is", -inputs["advantages"].sum())


def several_targets() -> None:
    client = adapter()
    print("forward:", answered(lambda: client.forward([wide()], "cross_entropy")))
    client = adapter()  # the first waits behind the call that the SDK repeats
    output = client.forward_backward([wide()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    print("forward_backward:", output.to_numpy(), "for 16 positions with 3 targets each")


def dro_never_answers() -> None:
    client = adapter()
    data = [datum(logprobs=logprobs(client), advantages=ONES)]
    print("dro:", answered(lambda: client.forward_backward(data, "dro", {"beta": 0.1})))


def unknown_option_is_accepted() -> None:
    client = adapter()
    data = [datum(logprobs=logprobs(client), advantages=ONES)]
    print("no_such_option:", answered(lambda: client.forward_backward(data, "ppo", {"no_such_option": 0.2})))


# ---------------------------------------------------------------------- service


def models_have_no_name() -> None:
    listed = service.get_server_capabilities().supported_models
    print("of", len(listed), "models", sum(model.model_name is not None for model in listed), "have a model_name")


def unknown_model_is_queued() -> None:
    """The SDK waits in this call: here a thread of its own does."""
    made = ThreadPoolExecutor(1).submit(service.create_lora_training_client, "no-such-owner/no-such-model")
    print("training:", answered(lambda: made))


def sampling_clients() -> None:
    print("of the base model:", answered(lambda: service.create_sampling_client(base_model=MODEL)))
    path = adapter().save_weights_for_sampler(f"sampler-{os.getpid()}").result().path
    print("of", path.split("/", 3)[3], answered(lambda: service.create_sampling_client(model_path=path)))


def list_checkpoints_cannot_be_read() -> None:
    client = adapter()
    saved(client, "listed")
    rest = service.create_rest_client()
    print("list_checkpoints:", answered(lambda: rest.list_checkpoints(client.model_id)))


def repeated_request_is_done_twice() -> None:
    """The same forward_backward with one seq_id, byte for byte, as a client sends it that lost the answer."""

    def post(route: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-API-Key": KEY}
        with urllib.request.urlopen(urllib.request.Request(f"{URL}/api/v1/{route}", data, headers)) as answer:
            return json.loads(answer.read())

    client = service.create_lora_training_client(MODEL, rank=8)
    for count, seq_id in enumerate((101, 101, 102), 1):
        inputs = {"target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [16]}}
        chunk = {"type": "encoded_text", "tokens": TOKENS[:-1]}
        one = {"loss_fn_inputs": inputs, "model_input": {"chunks": [chunk]}}
        batch = {"data": [one], "loss_fn": "cross_entropy"}
        body = {"model_id": client.model_id, "seq_id": seq_id, "forward_backward_input": batch}
        result = post("retrieve_future", {"request_id": post("forward_backward", body)["request_id"]})
        print(f"request {count}, seq_id {seq_id}: accum_steps {result['metrics']['accum_steps:mean']:g}")
    print("two different requests were sent, and three gradients are accumulated")


# ---------------------------------------------------------------------- states


def seed_is_not_used() -> None:
    moved: list[Any] = []
    for _ in range(2):
        client = service.create_lora_training_client(MODEL, rank=8, seed=7)
        train(client, ONES, learning_rate=0.01, beta1=0.0, beta2=0.0, eps=1e-8)
        moved.append(logprobs(client))
    print("seed 7 twice, one step: logprobs differ by up to", np.abs(moved[0] - moved[1]).max())


def saved_state_is_rounded() -> None:
    client = adapter()
    print("a restore moves a logprob by", np.abs(logprobs(restored(saved(client, "exact"))) - logprobs(client)).max())


def second_save_is_the_first() -> None:
    client = adapter()
    first = logprobs(client)
    saved(client, "first")
    train(client, ONES, learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    back = logprobs(restored(saved(client, "second")))
    print("the second save is", np.abs(back - logprobs(client)).max(), "nats from the weights that were saved and")
    print(np.abs(back - first).max(), "from those of the first save")


def load_state_keeps_the_moments() -> None:
    client = adapter()
    path = saved(client, "load")
    train(client, -ONES, learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    client.load_state(path).result()
    fresh = restored(path)
    before = np.abs(logprobs(client) - logprobs(fresh)).max()
    for one in (client, fresh):
        train(one, ONES, learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    print("after load_state and a restore logprobs differ by", before, "after the next step by", end=" ")
    print(np.abs(logprobs(client) - logprobs(fresh)).max())


def snapshot_moves() -> None:
    client = adapter()
    sampler = client.save_weights_and_get_sampling_client()
    before = np.array(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:])
    train(client, ONES, learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8)
    after = np.array(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()[1:])
    print("a snapshot's logprobs move by", np.abs(after - before).max(), "when training goes on")


# ---------------------------------------------------------------------- sampling


def sample(count: int, **params: Any) -> Any:
    sampler = adapter().save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TOKENS[:6])
    return lambda: sampler.sample(prompt, count, types.SamplingParams(**params)).result().sequences


def top_k_is_fifty() -> None:
    draw = sample(64, max_tokens=1, stop=[])
    tokens = {one.tokens[0] for _ in range(16) for one in draw() if one.tokens}
    print("without top_k 1,024 draws are of", len(tokens), "tokens of a vocabulary of 480")


def one_sample_is_greedy() -> None:
    draw = sample(1, max_tokens=8, temperature=1.0, stop=[])
    print("8 requests of 1 sample at temperature 1:", len({tuple(draw()[0].tokens) for _ in range(8)}), "different")
    draw = sample(2, max_tokens=8, temperature=1.0, stop=[])
    print("8 requests of 2 samples:", len({tuple(draw()[0].tokens) for _ in range(8)}), "different first ones")


def several_greedy_samples_fail() -> None:
    draw = sample(2, max_tokens=8, temperature=0.0, stop=[])
    try:
        print("2 samples at temperature 0:", [list(one.tokens) for one in draw()])
    except tinker.TinkerError as error:
        print("2 samples at temperature 0:", str(error).splitlines()[0])


def sampled_logprobs_are_of_the_filtered() -> None:
    client = adapter()
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(TOKENS[:6])
    one = sampler.sample(prompt, 2, types.SamplingParams(max_tokens=8, seed=1, stop=[])).result().sequences[0]
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS[:6] + list(one.tokens))).result()
    print("sampled logprobs", np.round(one.logprobs, 3), "the same scored", np.round(scored[6:], 3))


def stop_ids_are_ignored() -> None:
    tokens = [t for one in sample(8, max_tokens=24, stop=[])() for t in one.tokens]
    likeliest = max(set(tokens), key=tokens.count)
    after = [one for one in sample(16, max_tokens=40, stop=[likeliest])() if likeliest in one.tokens[:-1]]
    print(f"with stop=[{likeliest}]", len(after), "of 16 samples go on after it")


def empty_stop_still_stops() -> None:
    draw = sample(64, max_tokens=64, stop=[])
    ended = [one for _ in range(2) for one in draw() if len(one.tokens) < 64]
    print(
        "with stop=[]",
        len(ended),
        "of 128 samples end before 64 tokens; their last ones:",
        [o.tokens[-1] for o in ended],
    )


CASES = (
    loss_is_a_mean,
    policy_loss_is_a_mean,
    forward_has_no_loss,
    gspo_has_a_ratio_a_token,
    several_targets,
    dro_never_answers,
    unknown_option_is_accepted,
    models_have_no_name,
    unknown_model_is_queued,
    sampling_clients,
    list_checkpoints_cannot_be_read,
    repeated_request_is_done_twice,
    seed_is_not_used,
    saved_state_is_rounded,
    second_save_is_the_first,
    load_state_keeps_the_moments,
    snapshot_moves,
    top_k_is_fifty,
    one_sample_is_greedy,
    several_greedy_samples_fail,
    sampled_logprobs_are_of_the_filtered,
    stop_ids_are_ignored,
    empty_stop_still_stops,
)

if __name__ == "__main__":
    for case in CASES:
        if case.__name__ in (sys.argv[3:] or [case.__name__]):
            print(f"\n{case.__name__}", flush=True)
            case()
    sys.stdout.flush()
    os._exit(0)  # calls that were given up leave threads of the SDK behind
