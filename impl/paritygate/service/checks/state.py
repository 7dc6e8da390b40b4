"""state: what is saved comes back, whole and frozen, under the name that it was saved with."""

from collections.abc import Callable, Sequence

import numpy as np

from paritygate.service.client import Array, Datum, Session, Trainer
from paritygate.service.connection import Broken, NoAnswer, Refusal
from paritygate.service.lab import Lab, Moved
from paritygate.service.outcome import Measured, Undecided, worst

MEMORY = {"beta1": 0.9, "beta2": 0.95}
MULTIPLE = 2**16 * 5**4 * 21  # of most numbers that a seed may be taken modulo of, and below 2^31
FLAGS = ("train_attn", "train_mlp", "train_unembed")


def _data(lab: Lab, salt: int = 7) -> list[Datum]:
    return lab.weighted(lab.data(2, 16, salt=salt))


def _with_memory(lab: Lab) -> dict[str, float]:
    return {**lab.adam, **MEMORY}


def _trained(lab: Lab, session: Session) -> Trainer:
    """The warmed state and one step whose moments are remembered."""
    trainer = session.restore(lab.warmed())
    trainer.forward_backward(_data(lab))
    trainer.step(**_with_memory(lab))
    return trainer


def _next_step(lab: Lab, trainer: Trainer, salt: int = 50, **adam: float) -> Moved:
    trainer.forward_backward(_data(lab, salt=salt))
    trainer.step(**{**_with_memory(lab), **adam})
    return lab.change(trainer)


def optimizer_restored(lab: Lab) -> Measured:
    """The step after a restore with the optimizer is that of the run that was not interrupted; cold moments differ."""
    with lab.session() as session:
        trainer = _trained(lab, session)
        trainer.save(next(lab.names))  # an older state of the run, whose moments are others
        _next_step(lab, trainer)
        path = trainer.save(next(lab.names))
        want = _next_step(lab, trainer, 51)
        restored = [session.restore(path, optimizer=True) for _ in range(2)]  # the second waits while the first steps
        try:
            got = [_next_step(lab, one, 51) for one in restored]
        except Refusal as error:
            return Measured(np.inf, f"after a restore with the optimizer the next step fails: {error}")
        cold = _next_step(lab, session.restore(path), 51)
        what, contrast = "with the optimizer the next step", "that after a restore of the weights alone"
        each = [
            lab.held_to(one, want, cold, f"after {which} restore {what}", "the uninterrupted run's", contrast)
            for one, which in zip(got, ("a", "a second"), strict=True)
        ]
    return worst(each)


def weights_only_is_cold(lab: Lab) -> Measured:
    """A restore of the weights has no moments: its first step does not depend on the betas."""
    with lab.session() as session:
        path = _trained(lab, session).save(next(lab.names))
        got = _next_step(lab, session.restore(path))
        want = _next_step(lab, session.restore(path), beta1=0.0, beta2=0.0)
        warm = _next_step(lab, session.restore(path, optimizer=True))
        what, contrast = "after a restore of the weights alone the first step", "that after one with the optimizer"
        return lab.held_to(got, want, warm, what, "a memoryless one", contrast)


def load_state(lab: Lab) -> Measured:
    """As a client's first request load_state is the restore of the weights, with the optimizer the one with it."""
    with lab.session() as session:
        path = _trained(lab, session).save(next(lab.names))
        loaded, restored = list[Moved](), list[Moved]()
        for optimizer in (False, True):
            trainer = session.create(lab.settings.rank, seed=14)
            try:
                trainer.load(path, optimizer=optimizer)
            except AttributeError:
                raise Undecided("this SDK has no load_state") from None
            loaded.append(_next_step(lab, trainer))
            restored.append(_next_step(lab, session.restore(path, optimizer=optimizer)))
        verbs, restores = ("load_state", "load_state_with_optimizer"), ("a restore", "one with the optimizer")
        each = [
            lab.held_to(
                loaded[i],
                restored[i],
                restored[1 - i],
                f"after {verbs[i]} the next step",
                f"that after {restores[i]}",
                f"that after {restores[1 - i]}",
            )
            for i in (0, 1)
        ]
    return worst(each)


def saved_exactly(lab: Lab) -> Measured:
    """Saving and restoring moves no logprob: a checkpoint has the bits of the weights, those of every layer.

    The adapter is a fresh one: of a restored one a layer that does not come back is not there before either. It has no
    seed of ours: one that the service draws may be larger than what it reads back.
    """
    with lab.session() as session:
        trainer = _flagged(lab, session, None)
        live = lab.change(trainer)
        path = trainer.save(next(lab.names))
        try:
            restored = lab.change(session.restore(path))
        except Refusal as error:
            return Measured(np.inf, f"the state of an adapter that was made without a seed is not restored: {error}")
        gap = float(np.abs(live.change - restored.change).max())
        lab.connection.journal.add(f"print('largest difference:', np.abs({live.name} - {restored.name}).max())")
    because = f"saving and restoring moves a logprob by {gap:.3g} nats"
    return Measured(gap, because, live.rms, 10 * lab.noise.logprob)


def _scored(lab: Lab, logprobs: object) -> Array:
    """The probes' first sequence by a sampler, positions 1 and on."""
    datum = lab.probes()[0]
    return logprobs((*datum.tokens, int(datum.targets[-1])))[-len(datum.tokens) :]  # type: ignore[operator]


def snapshot_frozen(lab: Lab) -> Measured:
    """Sampler weights stay as they were saved while training goes on, and sampling from them trains nothing."""
    with lab.session() as session:
        trainer = _trained(lab, session)
        samplers = [lab.sampler_of(session, trainer), trainer.snapshot()]
        before = [_scored(lab, sampler.logprobs) for sampler in samplers]
        stepped = _next_step(lab, trainer)
        after = [_scored(lab, sampler.logprobs) for sampler in samplers]
        pulled = float(np.abs(lab.change(trainer).change - stepped.change).max())
        if pulled > max(0.001, 10 * lab.noise.logprob):
            return Measured(pulled, f"scores of older sampler weights move the training model by {pulled:.3g} nats")
        new = [_scored(lab, sampler.logprobs) for sampler in (trainer.snapshot(), lab.sampler_of(session, trainer))]
        trained = lab.probe(trainer).change[: len(new[0])]  # the same sequence by the training model
    old, new_is = (farthest(some, others) for some, others in ((after, before), (new, [trained, trained])))
    seen = float(np.abs(trained - before[0]).max())
    because = (
        f"training moves older samplers by {old:.3g} nats, and leaves new ones {new_is:.3g} from the trainer; old and "
        f"new weights are {seen:.3g} apart"
    )
    return Measured(max(old, new_is), because, seen, 10 * max(lab.noise.logprob, lab.noise.sampler))


def farthest(some: Sequence[Array], others: Sequence[Array]) -> float:
    """The largest difference of any two arrays in one place."""
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


def names_apart(lab: Lab) -> Measured:
    """Two names hold two states, and sampler weights with a state's name do not replace it."""
    with lab.session() as session:
        trainer = _trained(lab, session)
        first, name = lab.change(trainer), next(lab.names)
        path = trainer.save(name)
        second = _next_step(lab, trainer)
        try:
            trainer.save_for_sampler(name)
        except Refusal:
            trainer.save_for_sampler(next(lab.names))
        other = trainer.save(next(lab.names))
        restored = [lab.change(session.restore(saved)) for saved in (path, other)]
        saved, names = (first, second), ("the first state", "the second")
        each = [
            lab.held_to(restored[i], saved[i], saved[1 - i], f"{names[i]}, restored,", "what was saved", names[1 - i])
            for i in (0, 1)
        ]
        limit, lab.connection.limit = lab.connection.limit, lab.connection.patience
        try:
            again = lab.change(session.restore(trainer.save(name)))
            what = "the second state, saved under the first one's name and restored,"
            each.append(lab.held_to(again, second, first, what, "what was saved", names[0]))
        except (Refusal, Broken, NoAnswer):  # of a name that is taken; HTTP 409 is repeated by the SDK for ever
            pass
        finally:
            lab.connection.limit = limit
    return worst(each)


def _flagged(lab: Lab, session: Session, seed: int | None = 13, **flags: bool) -> Trainer:
    """A fresh adapter after two steps: the first moves B alone."""
    trainer = session.create(lab.settings.rank, seed, **flags)
    for _ in range(2):
        trainer.forward_backward(_data(lab))
        trainer.step(**lab.adam)
    return trainer


def flags(lab: Lab) -> Measured:
    """Each of train_attn, train_mlp and train_unembed changes what is trained."""
    with lab.session() as session:
        whole = lab.change(_flagged(lab, session))
        gaps = dict[str, float]()
        for flag in FLAGS:
            without = lab.change(_flagged(lab, session, **{flag: False}))
            gaps[flag] = lab.distance(without, whole, f"{flag}=False changes two steps by")
    least = 4 * max(0.005, lab.step_noise(whole))
    none = [flag for flag, gap in gaps.items() if not gap > least]
    each = ", ".join(f"{flag}=False by {gap:.3g}" for flag, gap in gaps.items())
    because = f"two steps change with {each} (relative; above {least:.3g} is an effect)"
    return Measured(float(len(none)), f"{because}; without effect: {', '.join(none)}" if none else because)


def flags_restored(lab: Lab) -> Measured:
    """The flags and the rank of an adapter come back with its state, whichever flag is off."""
    each: list[Measured] = []
    with lab.session() as session:
        whole = _next_step(lab, _flagged(lab, session), beta1=0.0, beta2=0.0)
    for flag in FLAGS:
        with lab.session() as session:
            trainer = _flagged(lab, session, **{flag: False})
            rank = trainer.info().lora_rank
            try:
                back = session.restore(trainer.save(next(lab.names)))
            except Refusal as error:
                return Measured(1.0, f"a state with {flag}=False cannot be restored: {error}")
            rank_back = back.info().lora_rank
            if rank is not None and rank_back is not None and rank != rank_back:
                return Measured(1.0, f"an adapter of rank {rank} was restored with rank {rank_back}")
            want, got = _next_step(lab, trainer, beta1=0.0, beta2=0.0), _next_step(lab, back, beta1=0.0, beta2=0.0)
            what = f"with {flag}=False the step after a restore"
            each.append(lab.held_to(got, want, whole, what, "that without one", "that with all flags on"))
    return worst(each)


def rank(lab: Lab) -> Measured:
    """An adapter has the rank that was asked for, no less and no more: the change of logits that it can make has it.

    With train_unembed alone the hidden states stay, and the change of N x K logprobs, up to a constant a position, is a
    matrix of the adapter's rank; where it is more, something else is trained. Rounding adds small singular values; only
    a gap in them says where the rank ends.
    """
    asked = lab.settings.rank
    ids = np.arange(lab.settings.low, min(lab.settings.high, lab.settings.low + asked + 8))
    if len(ids) <= asked:
        raise Undecided(f"{len(ids)} ids are too few to see rank {asked}")
    count = asked // 20 + 2
    data = [lab.datum(24, 37_000 + index) for index in range(count)]
    wide = [Datum(d.tokens, np.tile(ids, (24, 1)), {"weights": np.zeros((24, len(ids)))}) for d in data]
    with lab.session() as session:
        trainer = session.create(asked, seed=13, train_attn=False, train_mlp=False)
        before = np.concatenate(trainer.forward(wide).logprobs)
        trainer.forward_backward(lab.weighted(data))
        trainer.step(**lab.adam)
        change = np.concatenate(trainer.forward(wide).logprobs) - before
    sizes = np.linalg.svd(change - change.mean(1, keepdims=True), compute_uv=False)
    floor = (1e-6 + 3 * lab.noise.logprob) * (np.sqrt(change.shape[0]) + np.sqrt(change.shape[1]))
    if not sizes[0] > 1000 * floor:
        raise Undecided(f"the change of {change.size} logprobs is too small to see its rank: {sizes[0]:.3g}")
    seen = int((sizes[:asked] > 10 * floor).sum())
    # What is rounded to few digits repeats itself to the bit, and is a matrix of full rank all the same.
    rounding = 3 * lab.noise.step * float(np.sqrt(np.mean(change**2))) * floor / (1e-6 + 3 * lab.noise.logprob)
    further = int((sizes[asked:] > 10 * (floor + rounding)).sum())
    because = f"the change of logprobs by train_unembed alone has rank {seen + further}"
    because = f"{because}; rank {asked} was asked for, and the next singular value is {sizes[asked] / sizes[0]:.2g}"
    if seen < asked and not sizes[seen - 1] > 30 * sizes[seen]:
        raise Undecided(f"{because}, and its singular values fade: {sizes[seen - 1]:.2g}, {sizes[seen]:.2g}")
    return Measured(float(asked - seen + further), because)


def seed(lab: Lab) -> Measured:
    """The seed decides the adapter's start: equal seeds step equally, and another seed does not."""
    with lab.session() as session:

        def step(number: int) -> Moved:
            trainer = session.create(lab.settings.rank, seed=number)
            trainer.forward_backward(_data(lab))
            trainer.step(**lab.adam)
            return lab.change(trainer)

        first, again = step(7), step(7)
        others = {number: lab.distance(step(number), first) for number in (99, 7 + MULTIPLE)}
        zero = lab.distance(step(0), step(0))  # which some take for none
        gap, seen = max(lab.distance(again, first), zero), min(others.values())
    if not seen > 4 * max(0.0002, lab.step_noise(first)):
        other = min(others, key=others.__getitem__)
        return Measured(1.0, f"seeds 7 and {other} give the same first step ({seen:.3g} apart, relative): no effect")
    because = f"one seed twice: first steps {gap:.3g} (relative) apart (seed 0: {zero:.3g}); two seeds: {seen:.3g}"
    return Measured(gap, because, seen, lab.step_noise(first))


def pending_gradient(lab: Lab) -> Measured:
    """Saving, a state or for sampling, and forward do not touch a gradient that waits.

    Whether the saved state has it is said.
    """
    between: dict[str, Callable[[Trainer], object]] = {
        "save_state": lambda t: t.save(next(lab.names)),
        "save_weights_for_sampler": lambda t: t.snapshot(),
        "forward": lambda t: t.forward(_data(lab, salt=50)),
    }
    with lab.session() as session:
        want = lab.arm(session, lambda t: t.forward_backward(_data(lab)))
        gaps, path = dict[str, float](), ""
        for verb, call in between.items():
            trainer = session.restore(lab.warmed())
            trainer.forward_backward(_data(lab))
            made = call(trainer)
            path = made if isinstance(made, str) else path
            trainer.step(**lab.adam)
            gaps[verb] = lab.distance(lab.change(trainer), want, f"after {verb} the step differs by")
        carried = "is not known: the restored state refused a step on zero weights"
        try:
            back = session.restore(path, optimizer=True)
            back.forward_backward(lab.weighted(lab.data(1, 4, salt=14), 0.0))
            back.step(**lab.adam)
            carried = "carries it" if lab.change(back).rms > want.rms / 4 else "does not carry it"
        except Refusal:
            pass
    each = ", ".join(f"{verb} by {gap:.3g}" for verb, gap in gaps.items())
    because = f"the pending gradient's step is changed (relative) by {each}; the saved state {carried}"
    return Measured(max(gaps.values()), because, 1.0, lab.step_noise(want))


def load_in_a_run(lab: Lab) -> Measured:
    """load_state after a first gradient is refused, or is a restore: exact weights, and a cold optimizer."""
    with lab.session() as session:
        trainer = _trained(lab, session)
        moved = lab.change(trainer)
        try:
            trainer.load(lab.warmed())
        except AttributeError:
            raise Undecided("this SDK has no load_state") from None
        except Refusal as refusal:  # as the official service does: then nothing may have moved
            kept = lab.change(trainer)
            gap = float(np.abs(kept.change - moved.change).max())
            because = f"load_state is refused ({refusal}); the weights are {gap:.3g} nats from where they were"
            return Measured(gap, because, moved.rms, 10 * lab.noise.logprob)
        back = lab.change(trainer)
        got, want = _next_step(lab, trainer), _next_step(lab, session.restore(lab.warmed()))
        step = lab.distance(got, want)
    gap = float(np.abs(back.change).max())
    because = f"load_state is accepted; it sets the weights {gap:.3g} nats off, and the next step {step:.3g} (relative)"
    if step > max(0.005, lab.step_noise(want)):
        return Measured(step, because, None, lab.step_noise(want))
    return Measured(gap, because, moved.rms, 10 * lab.noise.logprob)


CHECKS = {
    "state/optimizer_restored": optimizer_restored,
    "state/weights_only_is_cold": weights_only_is_cold,
    "state/load_state": load_state,
    "state/saved_exactly": saved_exactly,
    "state/snapshot_frozen": snapshot_frozen,
    "state/names_apart": names_apart,
    "state/flags": flags,
    "state/flags_restored": flags_restored,
    "state/rank": rank,
    "state/seed": seed,
    "state/pending_gradient": pending_gradient,
    "state/load_in_a_run": load_in_a_run,
}
