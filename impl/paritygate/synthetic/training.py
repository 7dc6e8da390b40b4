"""One seed of the component: roll out, score, gate, update; the success bit reaches the loss and nothing else."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paritygate.errors import GateStopped
from paritygate.losses.spod import SpodLoss, success_preserving_loss
from paritygate.spec.synthetic import Synthetic
from paritygate.synthetic.environment import Environment, Rules
from paritygate.synthetic.model import CausalGru, sample_action


@dataclass(frozen=True)
class Episode:
    """The public tokens of an episode (observation, action, observation, ...), where its actions lie, and its bit."""

    history: tuple[int, ...]
    starts: tuple[int, ...]  # position in `history` of each action's first token
    action_length: int  # tokens of an action, END included
    success: bool

    def action(self, state: int) -> tuple[int, ...]:
        """The tokens of one action."""
        return self.history[self.starts[state] : self.starts[state] + self.action_length]


@dataclass(frozen=True)
class TrainingBatch:
    """What one update was made from: logits (N, V) of student and teacher at the action tokens, and the loss."""

    episodes: tuple[Episode, ...]
    student_logits: Tensor
    teacher_logits: Tensor
    packed: "Packed"
    loss: SpodLoss


@dataclass(frozen=True)
class Packed:
    """`actions` (N,), `action_index` (N,), `episode_index` (A,), `success` (E,), as the loss takes them."""

    actions: Tensor
    action_index: Tensor
    episode_index: Tensor
    success: Tensor


@dataclass(frozen=True)
class Update:
    """What is reported of an update; losses in nats. None of it is a success rate."""

    update: int
    loss: float
    gradient_norm: float
    actions: int
    successful_episodes: int
    protected: int
    protected_below_floor: int
    gates_changed_by_update: int


@dataclass(frozen=True)
class SeedResult:
    """The updates of one seed and their batches, the first of which the audit shows."""

    seed: int
    updates: tuple[Update, ...]
    batches: tuple[TrainingBatch, ...]


def stream(spec: Synthetic, role: str, *numbers: int) -> int:
    """A seed of its own for everything that is drawn, so that no two draws of a component are related."""
    text = "/".join([spec.recipe, role, *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class World:
    """The student, the teacher and the environment of one seed."""

    def __init__(self, spec: Synthetic, seed: int, device: str) -> None:
        self.spec, self.seed, self.device = spec, seed, device
        sizes = {"vocabulary": spec.model.vocabulary, "hidden": spec.model.hidden}
        self.student = CausalGru(**sizes, seed=stream(spec, "student", seed)).to(device)
        self.teacher = CausalGru(**sizes, seed=stream(spec, "teacher", seed)).to(device).requires_grad_(False)
        self.rules = Rules.drawn(stream(spec, "rules", seed))

    def environment(self, update: int, episode: int) -> Environment:
        """The environment of one episode."""
        states = self.spec.states_per_episode
        return Environment(
            self.rules,
            least=states.least,
            most=states.most,
            action_tokens=self.spec.action_tokens,
            seed=stream(self.spec, "environment", self.seed, update, episode),
        )

    def roll_out(self, update: int) -> tuple[Episode, ...]:
        """The episodes of one update, by the present student."""
        return tuple(
            play(
                self.student,
                self.environment(update, episode),
                self.spec.action_tokens,
                stream(self.spec, "actions", self.seed, update, episode),
            )
            for episode in range(self.spec.episodes_per_update)
        )

    def score(self, episodes: Sequence[Episode]) -> TrainingBatch:
        """Logits, gates and loss of both models' present scores; the teacher and the history carry no gradient."""
        packed = pack(episodes, self.device)
        student_logits = torch.cat([action_logits(self.student, episode) for episode in episodes])
        with torch.no_grad():
            teacher_logits = torch.cat([action_logits(self.teacher, episode) for episode in episodes])
        loss = success_preserving_loss(
            student_logits,
            teacher_logits,
            packed.actions,
            packed.action_index,
            packed.episode_index,
            packed.success,
            tau0=self.spec.loss.tau0,
            floor_weight=self.spec.loss.floor_weight,
        )
        return TrainingBatch(tuple(episodes), student_logits, teacher_logits, packed, loss)


def play(actor: CausalGru, environment: Environment, length: int, seed: int) -> Episode:
    """One episode; the actor is handed the public history only, and the bit is asked for after its last action."""
    generator = torch.Generator().manual_seed(seed)
    history, starts = [environment.observation], []
    observation: int | None = environment.observation
    while observation is not None:
        action = sample_action(actor, history, length, generator)
        starts.append(len(history))
        history += action
        observation = environment.act(action)
        history += [] if observation is None else [observation]
    return Episode(tuple(history), tuple(starts), length + 1, environment.success())


def pack(episodes: Sequence[Episode], device: str) -> Packed:
    """The episodes' actions one after another, each with its end token."""
    owners = [place for place, episode in enumerate(episodes) for _ in episode.starts]
    tokens = [episode.action(state) for episode in episodes for state in range(len(episode.starts))]
    return Packed(
        actions=torch.tensor([token for action in tokens for token in action], device=device),
        action_index=torch.tensor([place for place, action in enumerate(tokens) for _ in action], device=device),
        episode_index=torch.tensor(owners, device=device),
        success=torch.tensor([episode.success for episode in episodes], device=device),
    )


def action_logits(model: CausalGru, episode: Episode) -> Tensor:
    """Raw logits (n of the episode, V) at every action token, from the history before it."""
    rows = [start + offset - 1 for start in episode.starts for offset in range(episode.action_length)]
    return model(episode.history)[torch.tensor(rows, device=model.head.weight.device)]


def train_seed(spec: Synthetic, seed: int, device: str, say: Callable[[str], None] = lambda line: None) -> SeedResult:
    """All updates of one seed; GateStopped before a step whose loss or gradient is not finite."""
    world = World(spec, seed, device)
    adam = spec.optimizer
    optimizer = torch.optim.Adam(
        world.student.parameters(), lr=adam.learning_rate, betas=(adam.beta1, adam.beta2), eps=adam.eps
    )
    updates: list[Update] = []
    batches: list[TrainingBatch] = []
    for number in range(1, spec.updates + 1):
        batch = world.score(world.roll_out(number))
        optimizer.zero_grad(set_to_none=True)
        batch.loss.loss.backward()
        norm = gradient_norm(world.student)
        refuse_infinite(seed, number, batch, norm)
        optimizer.step()
        with torch.no_grad():
            after = world.score(batch.episodes).loss
        updates.append(summary(number, batch, norm, after, math.log(spec.loss.tau0)))
        batches.append(batch)
        say(f"seed {seed}, update {number}: loss {updates[-1].loss:.4f} nats, {updates[-1].protected} protected")
    return SeedResult(seed, tuple(updates), tuple(batches))


def gradient_norm(model: torch.nn.Module) -> float:
    """The 2-norm over all parameters, in float64."""
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def refuse_infinite(seed: int, number: int, batch: TrainingBatch, norm: float) -> None:
    """GateStopped naming the first action whose contribution is not finite, or the gradient."""
    contributions = batch.loss.kl + batch.loss.floor
    if not bool(torch.isfinite(contributions).all()):
        place = int((~torch.isfinite(contributions)).nonzero()[0])
        episode, value = int(batch.packed.episode_index[place]), float(contributions[place])
        raise GateStopped(
            f"seed {seed}, update {number}: action {place} (episode {episode}) contributes {value} to the loss; "
            "stopped before the step."
        )
    if not math.isfinite(norm):
        raise GateStopped(f"seed {seed}, update {number}: the gradient norm is {norm}; stopped before the step.")


def summary(number: int, batch: TrainingBatch, norm: float, after: SpodLoss, log_tau0: float) -> Update:
    """The reported numbers of one update."""
    gate = batch.loss.gate
    return Update(
        update=number,
        loss=float(batch.loss.loss.detach()),
        gradient_norm=norm,
        actions=len(gate),
        successful_episodes=int(batch.packed.success.sum()),
        protected=int(gate.sum()),
        protected_below_floor=int((gate & (batch.loss.student_logprob < log_tau0)).sum()),
        gates_changed_by_update=int((gate != after.gate).sum()),
    )
