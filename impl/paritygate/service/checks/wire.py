"""wire: every verb answers or refuses, requests are not carried out twice, and what is wrong is refused for good."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paritygate.service.client import Array, Datum, Session, Trainer
from paritygate.service.connection import Broken, NoAnswer, Refusal, Sent, recorded
from paritygate.service.lab import Lab
from paritygate.service.outcome import Measured, Undecided

MEMORY = {"beta1": 0.9, "beta2": 0.95}  # a step that is repeated moves by its momentum


def models(lab: Lab) -> Measured:
    """What the service and a training client report."""
    model, rank = lab.connection.model, lab.settings.rank
    listed = list(lab.long.models())
    with lab.session() as session:
        info = session.create(rank, seed=1).info()
    name = info.model_data.model_name or ""
    same = same_model(model, name, listed)
    wrong = (model not in listed) + (same is False) + (info.lora_rank not in (None, rank))
    because = f"listed: {listed}; a client for {model} with rank {rank} reports {name!r} with rank {info.lora_rank}"
    if same is None and not wrong:
        raise Undecided(f"{because}; whether both names are one model's, names do not tell")
    return Measured(float(wrong), because)


def same_model(asked: str, reported: str, listed: Sequence[str] = ()) -> bool | None:
    """Whether a client that was made for the model `asked` and reports `reported` is of it; None: names cannot tell.

    The SDK (0.38.0) calls what a client reports its base model and loads its tokenizer, of `owner/model/variant` and
    `name:suffix` that of the model; services call a model by a folder, too, or by a name of their own. Another model is
    one that the service lists beside, or one with another name where both names are an owner's.
    """
    if asked == reported:
        return True
    (name, parts), (other, other_parts) = _model_of(asked), _model_of(reported)
    if name in other_parts or other in parts:
        return None
    both = all("/" in one and not one.startswith(("/", "~", ".")) for one in (asked, reported))
    return False if reported in listed or both or not reported else None


def _model_of(name: str) -> tuple[str, list[str]]:
    """The model in a name, as qwen3-8b in Qwen/Qwen3-8B/fast, and the parts that the name or folder has."""
    whole = name.partition(":")[0].rstrip("/").lower()
    parts = [part for part in whole.replace("--", "/").split("/") if part]
    return (parts[1] if len(parts) == 3 and not whole.startswith("/") else parts[-1]) if parts else "", parts


def verbs(lab: Lab) -> Measured:
    """Each verb of the SDK, once."""
    data = lab.weighted(lab.data(1, 8, salt=80))
    failed: list[str] = []
    refused: list[str] = []
    with lab.session() as session:
        trainer = session.create(lab.settings.rank, seed=11) if lab.unusable else session.restore(lab.warmed())
        adam = {"learning_rate": 1e-3} if lab.unusable else lab.adam
        paths: dict[str, str] = {}

        def saved(verb: str, save: Callable[[str], str]) -> Callable[[], object]:
            return lambda: paths.update({verb: save(next(lab.names))})

        calls: dict[str, Callable[[], object]] = {
            "get_info": trainer.info,
            "forward": lambda: trainer.forward(data),
            "forward_backward": lambda: trainer.forward_backward(data),
            "optim_step": lambda: trainer.step(**adam),
            "save_state": saved("state", trainer.save),
            "save_weights_for_sampler": saved("sampler", trainer.save_for_sampler),
            "save_weights_and_get_sampling_client": trainer.snapshot,
            "create_training_client_from_state": lambda: session.restore(paths["state"]),
            "create_training_client_from_state_with_optimizer": lambda: session.restore(paths["state"], optimizer=True),
            "create_sampling_client (path)": lambda: session.sampler(paths["sampler"]),
            "create_sampling_client (base model)": session.sampler,
            "sample": lambda: trainer.snapshot().sample(lab.tokens(4, 81), 1, max_tokens=2, temperature=1.0),
            "compute_logprobs": lambda: trainer.snapshot().logprobs(lab.tokens(4, 81)),
            "list_checkpoints": lambda: session.checkpoints(trainer),
        }
        for verb, call in calls.items():
            try:
                call()
            except (Broken, NoAnswer) as error:
                failed.append(f"{verb} ({error})")
            except Refusal as error:
                (failed if error.by_sdk else refused).append(f"{verb} ({error})")
            except KeyError:
                failed.append(f"{verb} (nothing was saved)")
    because = f"{len(calls)} verbs: {len(failed)} fail {failed}; {len(refused)} are refused {refused}"
    return Measured(float(len(failed)), because)


def loss_sum(lab: Lab) -> Measured:
    """The metric that the SDK needs for a custom loss, from both verbs."""
    data = lab.weighted(lab.data(1, 8, salt=80))
    outs = {"forward": lab.held().forward(data), "forward_backward": lab.held().forward_backward(data)}
    missing = [verb for verb, out in outs.items() if out.loss is None]
    because = f"metrics: { ({verb: sorted(out.metrics) for verb, out in outs.items()}) }; without loss:sum: {missing}"
    return Measured(float(len(missing)), because)


def outputs(lab: Lab) -> Measured:
    """The SDK reads a logprob for each target of each datum, from both verbs, of a fresh adapter."""
    data = lab.weighted([lab.datum(length, 84_000 + length) for length in ((2, 3) if lab.small else (1, 9, 5))], 1.0)
    wrong: list[str] = []
    with lab.session() as session:
        trainer = session.create(lab.settings.rank, seed=11)
        for verb, call in {"forward": trainer.forward, "forward_backward": trainer.forward_backward}.items():
            try:
                call(data)
            except Refusal as error:
                if not error.by_sdk:
                    raise
                wrong.append(f"{verb} ({error})")
            except Broken as error:
                wrong.append(f"{verb} ({error})")
    return Measured(float(len(wrong)), f"of 2 verbs {len(wrong)} are answered with something else: {wrong}")


def repeated_request(lab: Lab) -> Measured:
    """forward_backward and optim_step sent again, byte for byte, as a client does that lost the answer."""
    data, adam = lab.weighted(lab.data(2, 16, salt=7)), {**lab.adam, **MEMORY}
    journal = lab.connection.journal
    with lab.session() as session:
        trainer = session.restore(lab.warmed())
        with recorded("forward_backward", "optim_step") as sent:
            trainer.forward_backward(data)
            passes = len(sent)
            _send_again(lab, sent[:passes])
            trainer.step(**adam)
            _send_again(lab, sent[passes:])
        if passes == 0 or len(sent) == passes:
            raise Undecided("the SDK's requests could not be recorded, so none was sent again")
        journal.add("# each of the two requests above was sent again with the same seq_id before the next call")
        got = lab.change(trainer)
        want = lab.arm(session, lambda t: t.forward_backward(data), **MEMORY)

        def twice(trainer: Trainer) -> None:
            trainer.forward_backward(data)
            trainer.step(**adam)

        wrong = lab.arm(session, twice, **MEMORY)
        what = "the step with both requests sent twice"
        return lab.held_to(got, want, wrong, what, "that with each sent once", "two gradients and two steps")


def _send_again(lab: Lab, requests: Sequence[Sent]) -> None:
    import httpx

    def send() -> list[int]:
        statuses: list[int] = []
        with httpx.Client(trust_env=False, timeout=lab.connection.limit) as client:
            for one in requests:
                kept = {k: v for k, v in one.headers.items() if k.lower() not in ("host", "content-length")}
                statuses.append(client.post(one.url, headers=kept, content=one.body).status_code)
        return statuses

    statuses = lab.connection.call("a repeated request", send)
    if {401, 403, 404} & set(statuses):
        raise Undecided(f"requests that were sent again did not come through: HTTP status {statuses}")


# ---------------------------------------------------------------------- refusals


Bad = Callable[[Lab, Trainer, float], object]


def all_refused(lab: Lab, cases: Mapping[str, Bad]) -> Measured:
    """Each of `cases` is refused as by `refused`; the first that is not, else the last."""
    measured = Measured(0.0, "")
    for what, bad in cases.items():
        measured = refused(lab, what, bad)
        if measured.figure > max(1e-4, measured.noise):
            break
    return measured


def refused(lab: Lab, what: str, bad: Bad, *, harmless: bool = False) -> Measured:
    """`what` is refused at once and for good, and the client goes on from the state that it was in.

    harmless: it may also be accepted, as long as the state stays.
    """
    limit = lab.connection.patience
    with lab.session() as session:
        trainer = session.restore(lab.warmed())
        try:
            bad(lab, trainer, limit)
            how = "is accepted"
        except Refusal as error:
            if error.by_sdk and not harmless:
                raise Undecided(f"the SDK itself refuses {what}: {error}") from None
            how = f"is refused: {error}"
        except NoAnswer as error:
            return Measured(np.inf, f"{what} hangs: {error}; good requests took {lab.connection.slowest:.2g} s at most")
        except Broken as error:
            if not error.final:
                return Measured(np.inf, f"{what} is answered with an internal error, which clients repeat: {error}")
            how = f"fails for good: {error}"
        if how == "is accepted" and not harmless:
            return Measured(np.inf, f"{what} is accepted")
        try:
            trainer.forward_backward(lab.weighted(lab.data(1, 4, salt=14), 0.0))
            trainer.step(**lab.adam)
            still = lab.change(trainer)
        except (Refusal, Broken, NoAnswer) as error:
            return Measured(np.inf, f"{what} {how}; after it the client cannot go on: {error}")
    figure = float(np.abs(still.change).max())
    return Measured(figure, f"{what} {how}; after it the state is {figure:.3g} nats off", None, 10 * lab.noise.logprob)


def _policy(lab: Lab) -> Datum:
    ones = np.ones(8)
    return lab.datum(8, 82).with_inputs(logprobs=-ones, advantages=lab.weight * ones)


def _unknown_loss(lab: Lab, trainer: Trainer, limit: float) -> object:
    return trainer.forward_backward([_policy(lab)], "no_such_loss", limit=limit)


def _unknown_option(lab: Lab, trainer: Trainer, limit: float) -> object:
    return trainer.forward_backward([_policy(lab)], "ppo", {"no_such_option": 0.2}, limit=limit)


def _changed(name: str, change: Callable[[Array], Array]) -> Bad:
    """A datum whose loss input `name` is changed: of cross_entropy or, for another than weights, a policy loss."""

    def send(lab: Lab, trainer: Trainer, limit: float) -> object:
        loss = "cross_entropy" if name == "weights" else "importance_sampling"
        datum = lab.weighted([lab.datum(8, 82)])[0] if name == "weights" else _policy(lab)
        inputs = {**datum.inputs, name: change(datum.inputs[name].copy())}
        return trainer.forward_backward([Datum(datum.tokens, datum.targets, inputs)], loss, limit=limit)

    return send


def _nan(values: Array) -> Array:
    values[3] = np.nan
    return values


def _token_out_of_range(lab: Lab, trainer: Trainer, limit: float) -> object:
    datum = lab.weighted([lab.datum(8, 82)])[0]
    return trainer.forward_backward([replace(datum, tokens=(*datum.tokens[:-1], 50_000_000))], limit=limit)


def _target_out_of_range(lab: Lab, trainer: Trainer, limit: float) -> object:
    datum = lab.weighted([lab.datum(8, 82)])[0]
    targets = np.append(datum.targets[:-1], 50_000_000)
    return trainer.forward_backward([replace(datum, targets=targets)], limit=limit)


def _empty(lab: Lab, trainer: Trainer, limit: float) -> object:
    del lab
    return trainer.forward_backward([], limit=limit)


def _too_long(lab: Lab, trainer: Trainer, limit: float) -> object:
    context = lab.long.models().get(lab.connection.model)
    if not context:
        raise Undecided("the service does not report the model's context length")
    if context > 200_000:
        raise Undecided(f"a context of {context} tokens is too long to be exceeded here")
    return trainer.forward_backward(lab.weighted([lab.datum(context + 1, 83)]), limit=limit)


def unknown_model(lab: Lab) -> Measured:
    """A base model that nobody serves, for training and for sampling."""
    other = replace(lab.connection, model="no-such-owner/no-such-model")
    return _all_refused(
        lab, {"a training client": lambda s: s.create(lab.settings.rank), "a sampler": lambda s: s.sampler()}, other
    )


def unknown_path(lab: Lab) -> Measured:
    """Paths that were never saved."""
    path = "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/never-saved"
    sampler = path.replace("/weights/", "/sampler_weights/")
    return _all_refused(
        lab, {"a state": lambda s: s.restore(path), "sampler weights": lambda s: _used(lab, s, sampler)}
    )


def _used(lab: Lab, session: Session, path: str) -> object:
    """Some services read a path at its first use."""
    return session.sampler(path).sample(lab.tokens(4, 81), 1, max_tokens=1, temperature=1.0)


def _all_refused(lab: Lab, calls: dict[str, Callable[[Session], object]], connection: Any = None) -> Measured:
    wrong: list[str] = []
    with Session(connection or lab.connection) as session:
        for what, call in calls.items():
            try:
                call(session)
                wrong.append(f"{what} is made")
            except Refusal as error:
                if error.by_sdk:
                    raise Undecided(f"the SDK itself fails: {error}") from None
            except Broken as error:
                if not error.final:
                    wrong.append(f"{what} is answered with an internal error ({error})")
            except NoAnswer as error:
                wrong.append(f"{what} hangs ({error})")
    return Measured(float(len(wrong)), f"of {len(calls)} requests {len(wrong)} are not refused: {wrong}")


CHECKS = {
    "wire/models": models,
    "wire/verbs": verbs,
    "wire/outputs": outputs,
    "wire/loss_sum": loss_sum,
    "wire/repeated_request": repeated_request,
    "wire/refuses_unknown_loss": partial(refused, what="an unknown loss", bad=_unknown_loss),
    "wire/refuses_unknown_option": partial(refused, what="an unknown loss_fn_config", bad=_unknown_option),
    "wire/refuses_nan": partial(
        all_refused,
        cases={
            "a NaN advantage": _changed("advantages", _nan),
            "a NaN sampler logprob": _changed("logprobs", _nan),
            "a NaN weight": _changed("weights", _nan),
        },
    ),
    "wire/refuses_token_out_of_range": partial(
        all_refused, cases={"token 50000000": _token_out_of_range, "target 50000000": _target_out_of_range}
    ),
    "wire/refuses_wrong_shapes": partial(
        all_refused,
        cases={
            "5 weights for 8 targets": _changed("weights", lambda values: values[:5]),
            "5 advantages for 8 targets": _changed("advantages", lambda values: values[:5]),
            "5 sampler logprobs for 8 targets": _changed("logprobs", lambda values: values[:5]),
        },
    ),
    "wire/refuses_empty_data": partial(refused, what="a request without datums", bad=_empty, harmless=True),
    "wire/refuses_too_long": partial(refused, what="a sequence beyond the context", bad=_too_long),
    "wire/refuses_unknown_model": unknown_model,
    "wire/refuses_unknown_path": unknown_path,
}
