"""The apparatus of the checks: token material, a warmed state, a calibrated step, and arms that start from one state.

An arm is: restore the warmed state, send gradients, take one step, and read how far the logprobs of the probe sequences
moved. Equal gradients move them equally, whatever the model; see design/090.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paritygate.service.client import Array, Datum, Pass, Sampler, Session, Trainer
from paritygate.service.connection import Broken, Connection, NoAnswer, Refusal
from paritygate.service.oracles import LOSSES, Oracle
from paritygate.service.outcome import Measured, Undecided

TARGET = (
    1.5  # nats: the root mean square that the calibrated step moves the probes by; equal steps are equal at any size
)
PERTURBATION = 1e-5  # relative, of a learning rate: harmless, but every rounding after it falls otherwise
WEIGHT = 0.01  # the loss weights of arms: gradients far below 1, so that a hidden clipping norm of 1 is not met
EPS = 1e-3  # of the calibrated step where the service allows the choice
# exp(logprobs - sampler logprobs): on both sides of .6, .8, 1.2, 1.4 and 4, and 0.04 nats away from them.
RATIOS = (0.5, 1.7, 0.7, 1.3, 0.9, 6.0, 1.0, 1.1, 0.57, 1.46, 0.63, 1.33, 0.76, 1.26, 0.84, 1.14, 3.6, 4.6)
FAR = 30.0  # a ratio that importance_sampling keeps, too
MEAN_RATIOS = (0.5, 1.7, 0.76, 1.26, 0.84, 1.14)  # of sequences, on both sides of .8 and 1.2


@dataclass(frozen=True)
class Settings:
    """What the proof asks for: LoRA rank, token ids in [low, high) that the model has, seed of all material.

    draws: single tokens drawn for a distribution. beta1, beta2: of the Adam steps whose moments are checked.
    """

    rank: int = 8
    low: int = 5
    high: int = 250
    seed: int = 0
    draws: int = 2048
    beta1: float = 0.5
    beta2: float = 0.6


@dataclass(frozen=True)
class Noise:
    """Measured first. logprob: standard deviation in nats of a repeated forward. step: the largest relative distance of
    equal arms. sampler: as logprob, for compute_logprobs."""

    logprob: float = 0.0
    step: float = 0.0
    sampler: float = 0.0


@dataclass(frozen=True)
class Moved:
    """Change of the probes' logprobs (P,) in nats, and the variable that holds them in the program of the check."""

    change: Array
    name: str

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(self.change**2)))


@dataclass
class Lab:
    """Everything that checks share, made once a run.

    small: use little material, for the smallest case of a departure. weight: the size of the loss weights of arms.
    mixed: only a tiny eps is taken, so every arm adds a second, fixed gradient. unusable: why there is no warmed state,
    and so nothing to start arms from.
    """

    connection: Connection
    settings: Settings = field(default_factory=Settings)
    small: bool = False
    noise: Noise = field(default_factory=Noise)
    mixed: bool = False
    weight: float = WEIGHT
    unusable: str = ""

    def __post_init__(self) -> None:
        self.names = unique_names("paritygate")
        self._long: Session | None = None
        self._paths = True  # whether sampler weights can be named; wire/verbs reports it where not

    # ------------------------------------------------------------------ material

    def tokens(self, length: int, salt: int) -> tuple[int, ...]:
        """`length` ids, the same for the same salt."""
        s = self.settings
        rng = np.random.default_rng([s.seed, salt])
        return tuple(int(t) for t in rng.integers(s.low, s.high, length))

    def datum(self, length: int, salt: int) -> Datum:
        """A sequence with `length` targets, without loss inputs."""
        tokens = self.tokens(length + 1, salt)
        return Datum(tokens[:-1], np.array(tokens[1:], np.int64))

    def data(self, count: int, length: int, salt: int = 0, least: int = 1) -> list[Datum]:
        """`count` sequences with `length` targets; `least` short ones where a small case is looked for."""
        count, length = (least, min(length, 4)) if self.small else (count, length)
        return [self.datum(length, 1000 * (salt + 1) + index) for index in range(count)]

    def weighted(self, data: Sequence[Datum], scale: float | None = None) -> list[Datum]:
        """cross_entropy data with positive, uneven weights around `scale` (default `weight`)."""
        scale = self.weight if scale is None else scale
        return [d.with_inputs(weights=f32(scale * (0.5 + (np.arange(len(d.tokens)) % 3) / 2))) for d in data]

    def probes(self) -> list[Datum]:
        """The sequences whose logprobs show what a step did."""
        return [self.datum(24, salt).with_inputs(weights=np.ones(24)) for salt in (1, 2, 3)]

    # ------------------------------------------------------------------ sessions and states

    @contextmanager
    def session(self) -> Generator[Session]:
        """A session for the arms of one check, freed at its end."""
        with Session(self.connection) as session:
            yield session

    @property
    def long(self) -> Session:
        """The session of what lives through the whole run."""
        if self._long is None:
            self._long = Session(self.connection)
        return self._long

    def close(self) -> None:
        """Delete what was saved, as far as the service lets, and end the long session."""
        if self._long is not None:
            self._long.delete_saved()
            self._long.close()
            self._long = None

    def cached(self, key: str, make: Callable[[], Any]) -> Any:
        """`make()` once a run; its calls are part of the program of every check that uses it."""
        return self.connection.journal.cached(key, make)

    def warmed(self) -> str:
        """The path of a state after two Adam steps: B is not 0, so A has gradients too."""
        self._check_usable()
        return self.cached("warmed", self._warm)

    def _check_usable(self) -> None:
        if self.unusable:
            raise Undecided(f"there is no state to start from: {self.unusable}")

    def _warm(self) -> str:
        data = self.weighted([self.datum(24, 1), self.datum(24, 2), self.datum(24, 4)], 1.0)
        rate, moved = 1e-3, 0.0
        with self.session() as session:
            trainer = session.create(self.settings.rank, seed=11)
            for attempt in range(4):
                if attempt:
                    self.connection.journal.lines.clear()  # a program needs the attempt that moved enough
                    trainer = session.create(self.settings.rank, seed=11)
                before = trainer.forward(self.probes()).flat
                for _ in range(2):
                    trainer.forward_backward(data)
                    trainer.step(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8)
                moved = float(np.sqrt(np.mean((trainer.forward(self.probes()).flat - before) ** 2)))
                if moved > 0.5:
                    break
                rate = min(rate * min(10.0, 1.0 / max(moved, 0.03)), 1.0)
            if not moved > 0:
                raise Undecided("two Adam steps on cross_entropy moved no logprob: nothing here can be told apart")
            return trainer.save(next(self.names))

    def sampler_of(self, session: Session, trainer: Trainer) -> Sampler:
        """A sampler of the trainer's weights: of a saved path, or without a name where the service fails at paths."""
        if self._paths:
            lines = self.connection.journal.lines
            mark = len(lines)
            path = trainer.save_for_sampler(next(self.names))
            try:
                return session.sampler(path)
            except (Broken, NoAnswer):
                self._paths = False
                del lines[mark:]
        return trainer.snapshot()

    def held(self) -> Trainer:
        """A trainer at the warmed state that no check may step."""
        return self.cached("held", lambda: self.long.restore(self.warmed()))

    def renew(self) -> None:
        """Forget the clients that checks share, which may wait behind a call that has no answer."""
        for key in ("held", "trained"):
            self.connection.journal.drop(key)

    def start(self) -> Moved:
        """The probes' logprobs at the warmed state."""
        return self.cached("start", lambda: self.probe(self.held()))

    def logprobs(self, data: Sequence[Datum]) -> list[Array]:
        """The logprobs of `data` at the warmed state."""
        weighted = [d.with_inputs(weights=np.ones(d.targets.shape)) for d in data]
        return self.held().forward(weighted).logprobs

    def probe(self, trainer: Trainer) -> Moved:
        """The probes' logprobs now (in `change`)."""
        values = trainer.forward(self.probes()).flat
        journal = self.connection.journal
        name = journal.name("p")
        journal.add(f"{name} = logprobs({journal.lines[-1].split(' = ', 1)[0]})")
        return Moved(values, name)

    # ------------------------------------------------------------------ arms

    @property
    def adam(self) -> dict[str, float]:
        """The calibrated step: memoryless, so that nothing but the gradient matters."""
        self._check_usable()
        return self.connection.journal.cached("calibration", self._calibrate, record=False)

    def arm(self, session: Session, gradients: Callable[[Trainer], object], **adam: float) -> Moved:
        """Restore, send gradients, step, probe: the change against the warmed state."""
        settings = {**self.adam, **adam}
        trainer = session.restore(self.warmed())
        if self.mixed:
            trainer.forward_backward(self.weighted([self.datum(24, 5)], 0.3 * self.weight))
        gradients(trainer)
        trainer.step(**settings)
        return self.change(trainer)

    def change(self, trainer: Trainer) -> Moved:
        """How far the probes are from the warmed state."""
        start = self.start()
        now = self.probe(trainer)
        return Moved(now.change - start.change, now.name)

    def cross_entropy_arm(
        self, session: Session, data: Sequence[Datum], weights: Sequence[Array], **adam: float
    ) -> Moved:
        """The arm that takes cross_entropy with `weights`, one array a datum."""
        weighted = [d.with_inputs(weights=f32(w)) for d, w in zip(data, weights, strict=True)]
        return self.arm(session, lambda t: t.forward_backward(weighted), **adam)

    def distance(self, one: Moved, other: Moved, what: str = "") -> float:
        """|one - other| / |other|, also printed, as `what`, by the program of the check."""
        start = self.start()
        size = float(np.linalg.norm(other.change))
        if not size > 0:
            raise Undecided("the step that is right did not move a single logprob")
        what = what or f"{one.name} and {other.name} differ by"
        self.connection.journal.add(
            f"print({what!r}, np.linalg.norm({one.name} - {other.name}) "
            f"/ np.linalg.norm({other.name} - {start.name}), '(relative)')"
        )
        return difference(one, other)

    def held_to(
        self,
        got: Moved,
        want: Moved,
        wrong: Moved,
        what: str,
        right: str,
        contrast: str,
        weights_noise: float = 0.0,
    ) -> Measured:
        """The step `got`, called `what`, against `want`, the `right` one, and against `wrong`, the `contrast`.

        Where the service makes the contrast's mistake it is nothing from it. weights_noise: as of `step_noise`.
        """
        gap = self.distance(got, want, f"{what}, from {right}:")
        seen = self.distance(wrong, want, f"the contrast, {contrast}, from {right}:")
        near = difference(got, wrong)
        because = f"{what} is {gap:.3g} (relative) from {right}, and {near:.3g} from {contrast}"
        return Measured(gap, because, seen, self.step_noise(want, weights_noise))

    def step_noise(self, other: Moved, weights_noise: float = 0.0) -> float:
        """The bound that noise asks for when two arms of the size of `other` are compared.

        weights_noise: relative error of oracle weights that were computed from noisy logprobs.
        """
        relative = TARGET / max(other.rms, 1e-30)
        steps = self.noise.step * max(1.0, relative) * (self.noise.step > 20 * PERTURBATION)
        return 3 * max(steps, 1.5 * self.noise.logprob / max(other.rms, 1e-30)) + 4 * weights_noise

    def _calibrate(self) -> dict[str, float]:
        """Find a learning rate that moves the probes by TARGET, and an eps at which the gradient's size matters."""
        base = {"learning_rate": 1e-3, "beta1": 0.0, "beta2": 0.0, "eps": 1e-12}
        moved = 0.0
        with self.session() as session:
            for _ in range(5):
                moved = self._size(session, 1.0, base)
                if 0.7 * TARGET < moved < 1.4 * TARGET:
                    break
                base["learning_rate"] = min(base["learning_rate"] * min(10.0, TARGET / max(moved, 1e-6)), 5.0)
            if not moved > 0:
                raise Undecided("one step on cross_entropy from the restored state moved no logprob")
        eps = share = 1.0
        for _ in range(2):
            with self.session() as session:
                eps_and_share = self._calibrate_eps(session, base, moved)
                if eps_and_share is None:
                    self.mixed = True
                    return base
                eps, share = eps_and_share
                # A smaller gradient with an eps as much smaller is the same step, and leaves room for larger ones.
                smaller = min(1.0, EPS / eps)
                again = self._size(session, smaller, {**base, "eps": smaller * eps}) / moved
            if abs(again / share - 1) < 0.1:
                self.weight, eps = self.weight * smaller, smaller * eps
                break
            self.weight *= 0.01  # a service may clip, asked for or not: look where gradients are far below 1
        return {**base, "eps": eps, "learning_rate": min(base["learning_rate"] / share, 9.0)}

    def _calibrate_eps(self, session: Session, base: Mapping[str, float], moved: float) -> tuple[float, float] | None:
        """(eps, the share of the step that is left with it); None where only a tiny eps is taken."""
        low, high = -9.0, 0.0
        for _ in range(6):
            middle = (low + high) / 2
            try:
                share = self._size(session, 1.0, {**base, "eps": 10**middle}) / moved
            except Refusal:  # a bound on eps
                high = middle
                continue
            if 0.15 < share < 0.5:
                return 10**middle, share
            low, high = (middle, high) if share >= 0.5 else (low, middle)
        return None

    def _size(self, session: Session, scale: float, adam: Mapping[str, float]) -> float:
        """The root mean square by which a step on `scale` times the weights moves the probes, in nats."""
        start = self.held().forward(self.probes()).flat
        trainer = session.restore(self.warmed())
        trainer.forward_backward(self.weighted(self.data(2, 16, salt=7), scale * self.weight))
        trainer.step(**adam)
        return float(np.sqrt(np.mean((trainer.forward(self.probes()).flat - start) ** 2)))

    # ------------------------------------------------------------------ losses at the warmed state

    def policy_data(self, loss: str, scale: float) -> "tuple[list[Datum], dict[str, float]]":
        """Data of `loss` with ratios on both sides of every clip and advantages of both signs, and explicit options."""
        data = self.data(2, 16, salt=20)
        if loss == "gspo":
            data = self.data(len(MEAN_RATIOS), 8, salt=21)
        ready: list[Datum] = []
        for index, (datum, logprobs) in enumerate(zip(data, self.logprobs(data), strict=True)):
            n = len(datum.tokens)
            place = np.arange(n)
            ratios = np.array(RATIOS)[(place + 4 * index) % len(RATIOS)]
            if loss == "importance_sampling" and index == 0:
                ratios[0] = FAR
            signs = np.where((place // len(RATIOS) + place + index) % 2 == 0, 1.0, -1.0)
            inputs = {"advantages": f32(scale * signs * (0.6 + 0.1 * (place % 5)))}
            if loss == "gspo":
                mask = place % 4 != 3
                spread = 0.2 * np.where(place % 2, 1.0, -1.0)
                ratios = MEAN_RATIOS[index % len(MEAN_RATIOS)] * np.exp(spread - spread[mask].mean())
                inputs["sequence_ratio_mask"] = mask.astype(float)
            inputs["logprobs"] = f32(logprobs - np.log(ratios))
            ready.append(datum.with_inputs(**inputs))
        config = {
            "ppo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4},
            "cispo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.4},
            "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            "dro": {"beta": 0.5 * scale},
        }.get(loss, {})
        return ready, config

    def oracles(
        self, loss: str, data: Sequence[Datum], logprobs: Sequence[Array], config: Mapping[str, float]
    ) -> list[Oracle]:
        """The oracle of each datum at the given logprobs."""
        return [LOSSES[loss](p, d.inputs, config) for d, p in zip(data, logprobs, strict=True)]


def measure_noise(lab: Lab) -> Noise:
    """The same call three times, the same step five times: what is equal by right, and how equal it is.

    Three of the steps have learning rates that differ by 1e-5: a service that computes in bfloat16 repeats itself to
    the bit, and yet a harmless change moves its logprobs by its rounding.
    """
    data = lab.weighted(lab.data(2, 16, salt=7))
    held = lab.held()
    repeats = np.stack([held.forward(lab.probes()).flat for _ in range(3)])
    noise = Noise(logprob=float(np.sqrt(np.mean(np.var(repeats, axis=0, ddof=1)))))
    lab.noise = noise
    rate = lab.adam["learning_rate"]
    rates = [rate, rate, rate * (1 + PERTURBATION), rate * (1 - PERTURBATION), rate * (1 + 2 * PERTURBATION)]
    with lab.session() as session:
        moves = [lab.arm(session, lambda t: t.forward_backward(data), learning_rate=r).change for r in rates]
    pairs = itertools.combinations(range(len(moves)), 2)
    step = max(float(np.linalg.norm(moves[i] - moves[j]) / np.linalg.norm(moves[j])) for i, j in pairs)
    return replace(noise, step=step)


def sampler_noise(lab: Lab, logprobs: Callable[[], Array]) -> float:
    """Standard deviation of a repeated compute_logprobs."""
    repeats = np.stack([logprobs() for _ in range(3)])
    return float(np.sqrt(np.nanmean(np.nanvar(repeats, axis=0, ddof=1))))


def difference(one: Moved, other: Moved) -> float:
    """|one - other| / |other|; infinite where the other did not move and the first did."""
    gap, size = float(np.linalg.norm(one.change - other.change)), float(np.linalg.norm(other.change))
    return gap / size if size > 0 else (math.inf if gap > 0 else 0.0)


def f32(values: Any) -> Array:
    """Rounded to float32, as the wire will, in float64."""
    return np.asarray(np.asarray(values, np.float32), np.float64)


def scale_of(one: Array, other: Array) -> tuple[float, float]:
    """(cosine, least-squares factor) of `one` against `other`."""
    dot, size = float(one @ other), float(other @ other)
    norms = float(np.linalg.norm(one)) * math.sqrt(size)
    return (dot / norms if norms > 0 else 0.0), (dot / size if size > 0 else math.nan)


__all__ = ["Broken", "Lab", "Moved", "Noise", "Pass", "Settings", "f32", "measure_noise", "scale_of"]


def unique_names(prefix: str) -> Iterator[str]:
    """Names for saved states that no earlier run used."""
    stamp = f"{prefix}-{int(time.time() * 1000):x}"
    return (f"{stamp}-{index}" for index in itertools.count(1))
