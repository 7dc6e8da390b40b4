"""Mistakes of a service's answers on the wire; the rows in brackets are those of design/092."""

from tests.mutants.mutant import Mutant

TRAINERS = "server/sessions/trainers.py"
TRAINING = "server/wire/training.py"
LOSSES = "server/engine/losses.py"
SAMPLERS = "server/sessions/samplers.py"
REQUESTS = "server/http/requests.py"
APP = "server/http/app.py"
RETURNED = "self.outcome.logprobs.append(leaf.detach())"
REPEATED = """was used before for another request", 422)
            return promise
        if seq is not None and seq < model"""
FINITE = """    if bad.size:
        place = tuple(int(i) for i in bad[0])
        raise RequestError(f"{where}.{name}{list(place)} is"""


MUTANTS = (
    Mutant(
        "requests-are-repeated",
        "a request that is sent again is carried out again (row 20)",
        "wire/repeated_request",
        TRAINERS,
        REPEATED,
        REPEATED.replace("return promise\n", "return self._enqueue(model, None, raw, prepare())\n"),
    ),
    Mutant(
        "half-of-the-logprobs",
        "a sequence has logprobs for half of its targets (row 57)",
        "wire/outputs",
        "server/engine/training.py",
        RETURNED,
        "self.outcome.logprobs.append(leaf.detach()[: max(1, len(leaf) // 2)])",
    ),
    Mutant(
        "another-rank",
        "the adapter has rank 32 whatever was asked",
        "wire/models",
        TRAINING,
        'rank=config.integer("rank", 32, low=1, high=limits.lora_rank),',
        "rank=32,",
    ),
    Mutant(
        "first-model-whatever-was-asked",
        "an adapter is made of the first model that is served (row 48)",
        "wire/models",
        "server/sessions/service.py",
        """                "model_name": self.model_name,
""",
        """                "model_name": "paritygate/the-first",
""",
    ),
    Mutant(
        "no-loss-sum",
        "the metric is called loss:avg, or is missing (rows 41, 91)",
        "wire/loss_sum",
        TRAINING,
        'message.metrics["loss:sum"] = outcome.loss',
        'message.metrics["loss:avg"] = outcome.loss',
    ),
    Mutant(
        "unknown-loss-is-cross-entropy",
        "an unknown loss is accepted (row 47)",
        "wire/refuses_unknown_loss",
        LOSSES,
        "    if name not in LOSSES:\n",
        '    name = name if name in LOSSES else "importance_sampling"\n    if name not in LOSSES:\n',
    ),
    Mutant(
        "unknown-option-is-dropped",
        "an unknown loss_fn_config is accepted (rows 13, 47)",
        "wire/refuses_unknown_option",
        LOSSES,
        '    if unknown:\n        raise RequestError(f"loss {name}: unknown',
        '    if False:\n        raise RequestError(f"loss {name}: unknown',
    ),
    Mutant(
        "malformed-option-is-a-500",
        "a malformed loss_fn_config is an internal error, which clients repeat (row 10)",
        "wire/refuses_unknown_option",
        LOSSES,
        '    if unknown:\n        raise RequestError(f"loss {name}: unknown',
        '    if unknown:\n        raise RuntimeError(f"loss {name}: unknown',
    ),
    Mutant(
        "failed-requests-are-500",
        "what a request refuses is an internal error, which clients repeat (row 62)",
        "wire/refuses_unknown_loss",
        REQUESTS,
        "return problem(str(error), error.status)",
        "return problem(str(error), 500)",
    ),
    Mutant(
        "nan-is-taken",
        "a NaN advantage is accepted, and the weights are NaN after it (skyrl 0.4.0)",
        "wire/refuses_nan",
        TRAINING,
        FINITE,
        FINITE.replace("bad.size", "False"),
        (("server/engine/training.py", "if not bool(torch.isfinite(loss)):", "if False:"),),
    ),
    Mutant(
        "short-weights-are-filled-up",
        "weights of another length than the targets are filled up or cut",
        "wire/refuses_wrong_shapes",
        TRAINING,
        "    if value.shape != shape:\n",
        "    value = np.resize(value, shape)\n    if value.shape != shape:\n",
    ),
    Mutant(
        "tokens-wrap-around",
        "a token id outside of the vocabulary is taken modulo its size",
        "wire/refuses_token_out_of_range",
        TRAINING,
        'tokens = check_tokens(_model_input(message, where), shape, f"{where}.model_input")',
        'tokens = check_tokens(_model_input(message, where) % shape.vocabulary, shape, f"{where}.model_input")',
    ),
    Mutant(
        "long-sequences-are-cut",
        "a sequence beyond the context, here 256 tokens, is cut",
        "wire/refuses_too_long",
        TRAINING,
        'tokens = check_tokens(_model_input(message, where), shape, f"{where}.model_input")',
        'tokens = check_tokens(_model_input(message, where)[:256], shape, f"{where}.model_input")',
        (
            (APP, "service.engine.network.shape.context", "256"),
            (TRAINING, 'f"{where}.target_tokens", integers=True)', 'f"{where}.target_tokens", integers=True)[:256]'),
            (TRAINING, "    if value.shape != shape:\n", "    value = value[:256]\n    if value.shape != shape:\n"),
        ),
    ),
    Mutant(
        "any-model-is-the-first",
        "a base model that is not served is the first one (row 48)",
        "wire/refuses_unknown_model",
        SAMPLERS,
        "if not folder and self.model_name not in",
        "if False and self.model_name not in",
    ),
    Mutant(
        "unknown-paths-are-the-base-model",
        "a path that was never saved is the base model (row 48)",
        "wire/refuses_unknown_path",
        SAMPLERS,
        "snapshot = BASE if path is None else self._from_path(path)",
        "try:\n            snapshot = BASE if path is None else self._from_path(path)\n"
        "        except RequestError:\n            snapshot = BASE",
    ),
    Mutant(
        "no-sequence-ids",
        "the promise of a sample has no sample_sequence_ids, and the SDK fails at it (row 41)",
        "wire/verbs",
        SAMPLERS,
        'promise.answer["sample_sequence_ids"] = [f"{promise.id}:{index}" for index in range(number)]',
        "pass",
    ),
    Mutant(
        "json-where-protobuf-is-read",
        "forward_backward is answered in the form of older SDKs, which this one cannot read (row 35)",
        "wire/outputs",
        TRAINERS,
        "return Work(begin, lambda done: Payload(encode_forward_backward(done), PROTOBUF))",
        'return Work(begin, lambda done: json_payload({"loss_fn_outputs": [], "metrics": {"loss:sum": done.loss}}))',
    ),
)
