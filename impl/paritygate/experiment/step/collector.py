"""The rollouts of an experiment: policy's renderer, user simulator, judge and environment, put together by the spec."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paritygate.agent import prompt, renderer
from paritygate.agent.episode import Limits, first_prompt, run_episode
from paritygate.agent.gold import gold_trajectory
from paritygate.agent.judge import Judge, Judged, ModelJudge, RuleJudge
from paritygate.agent.rollouts import Group, Rollout, TeacherScores, collect_step
from paritygate.agent.seeds import derive
from paritygate.agent.teacher import teacher_context, teacher_logprobs
from paritygate.agent.trajectory import Trajectory
from paritygate.agent.user import ModelUser, ScriptedUser, User, opening
from paritygate.backend import Backend, Sampler
from paritygate.experiment.run.account.meter import metered
from paritygate.experiment.run.environment import fresh_episode
from paritygate.experiment.run.options import Settings
from paritygate.experiment.run.state import State
from paritygate.losses.sdpo import select_sibling
from paritygate.retail import Source

EVALUATED_AT_ONCE = 16  # episodes of an arm under way at a time, as in a training step


@dataclasses.dataclass(frozen=True)
class Partner:
    """A frozen served model that plays the user or the judge, with the renderer that it needs.

    context_length: its context in tokens, None where the service does not report it.
    """

    sampler: Sampler
    renderer: Any
    context_length: int | None


class Collector:
    """Runs, judges and scores episodes; made once a phase by `of`. Every seed depends on its purpose alone."""

    def __init__(
        self,
        state: State,
        settings: Settings,
        source: Source,
        policy_renderer: Any,
        user: Partner | None,
        judge: Partner | None,
        context_length: int | None,
        policy_tokenizer: Any = None,
    ) -> None:
        self.state = state
        self.exp = state.exp
        self.settings = settings
        self.source = source
        self.renderer = policy_renderer
        self.context = prompt.context(self.exp.protocol.context.kind, source.wiki, source.tools)
        # The service's context, where it reports one, bounds everything; the spec's max_seq_len what is trained on.
        # A scoring samples one token as well, so the longest sequence that can be scored is one shorter.
        longest = self.exp.max_seq_len if context_length is None else context_length
        self.longest_evaluated = longest
        self.longest_scored = longest if context_length is None else longest - 1
        self.longest_trained = min(self.exp.max_seq_len, self.longest_scored)
        self.policy_tokenizer = policy_tokenizer
        self._user = user
        self._judge = judge

    @classmethod
    async def of(cls, state: State, settings: Settings, session: Backend | None = None) -> "Collector":
        """What `state`'s spec asks for under `settings`; served user simulators and judges are connected.

        session: of the service, where it is not to be the phase's.
        """
        exp = state.exp
        backend = session or await state.backend()
        policy = await (state.policy() if session is None else session.sampling(base_model=exp.base_model))
        policy_renderer = renderer.load(exp.protocol.renderer, policy.tokenizer, model=exp.base_model)
        partners: dict[str, Partner | None] = {}
        for role in ("user", "judge"):
            name = state.model_name(role)
            if name is None:
                partners[role] = None
                continue
            sampler = metered(await backend.sampling(base_model=name), state.account.usage, role)
            effort = exp.protocol.judge.reasoning_effort if role == "judge" else None
            thinking = effort is not None
            made = renderer.load("auto", sampler.tokenizer, model=name, thinking=thinking, effort=effort)
            partners[role] = Partner(sampler, made, backend.context_lengths.get(name))
        context_length = backend.context_lengths.get(exp.base_model)
        user, judge = partners["user"], partners["judge"]
        tokenizer = policy.tokenizer
        return cls(state, settings, state.source, policy_renderer, user, judge, context_length, tokenizer)

    def tokenizers(self) -> dict[str, Any]:
        """The tokenizer of every model that this experiment samples from, by its name."""
        names = {"user": self.exp.protocol.user.model, "judge": self.exp.protocol.judge.model}
        partners = {"user": self._user, "judge": self._judge}
        served = {str(names[role]): p.sampler.tokenizer for role, p in partners.items() if p is not None}
        return {self.exp.base_model: self.policy_tokenizer, **served}

    def train_tasks(self) -> tuple[int, ...]:
        """The training tasks in their order, the same for every arm."""
        selection = self.exp.protocol.train
        return selection.indices(len(self.source.tasks(selection.split)))

    def evaluation_tasks(self) -> tuple[int, ...]:
        """The held-out tasks in their order."""
        selection = self.exp.protocol.evaluation
        return selection.indices(len(self.source.tasks(selection.split)))

    def limits(self, temperature: float, max_seq_len: int) -> Limits:
        """What bounds an episode of at most `max_seq_len` tokens under these settings."""
        rollout = self.exp.protocol.rollout
        return Limits(self.settings.max_turns, rollout.max_tokens_per_turn, max_seq_len, temperature)

    async def groups(
        self,
        purpose: str,
        step: int,
        tasks: Sequence[int],
        sampler: Sampler,
        teacher: Sampler | None,
        rollouts: int | None = None,
    ) -> list[Group]:
        """All episodes of a step at once, judged, and taught where `teacher` is given, sorted by (task, rollout).

        Seeds depend on purpose, step, task and rollout, not on the arm: arms with the same weights sample the same.
        """
        split = self.exp.protocol.train.split
        seed = derive(self.exp.arms[0].seed, purpose, step)

        async def play(task: int, rollout: int) -> Trajectory:
            limits = self.limits(self.exp.protocol.rollout.temperature, self.longest_trained)
            return await self.episode(sampler, split, task, rollout, derive(seed, task, rollout), limits)

        async def teach(index: int, group: Sequence[Rollout]) -> TeacherScores:
            assert teacher is not None
            scores = await self.teach(teacher, index, group)
            if self.exp.protocol.advantage.student == "sampled":
                return scores
            return dataclasses.replace(scores, student=await self.score_again(sampler, group[index].trajectory))

        count = rollouts or self.exp.protocol.rollout.rollouts_per_task
        return await collect_step(tasks, count, play, self.judge, teach if teacher is not None else None)

    async def episode(
        self, sampler: Sampler, split: str, task_index: int, rollout: int, seed: int, limits: Limits
    ) -> Trajectory:
        """One episode on a database of its own."""
        return await run_episode(
            fresh_episode(self.state.options, self.source, split, task_index),
            self.renderer,
            sampler,
            self._simulator(split, task_index, derive(seed, "simulator")),
            context=self.context,
            limits=limits,
            seed=seed,
            rollout=rollout,
        )

    async def evaluation_episode(self, sampler: Sampler, task_index: int, rollout: int, attempt: int) -> Rollout:
        """One episode on a held-out task, judged; another attempt has other seeds for user and judge.

        Greedy where a task has one, else at the temperature of training. The context that the service reports bounds
        it, not what training may cost (`max_seq_len`).
        """
        split = self.exp.protocol.evaluation.split
        seed = derive(self.exp.arms[0].seed, "evaluate", task_index, rollout, attempt)
        temperature = 0.0 if self.exp.eval.rollouts_per_task == 1 else self.exp.protocol.rollout.temperature
        limits = self.limits(temperature, self.longest_evaluated)
        trajectory = await self.episode(sampler, split, task_index, rollout, seed, limits)
        return Rollout(trajectory, await self.judge(trajectory))

    async def judge(self, trajectory: Trajectory) -> Judged:
        """The judgement of one trajectory by the spec's judge; an episode that may not be trained on is not judged."""
        if not trajectory.trains:
            return Judged(None, 0, first_try_parsed=False)
        task = self.source.task(trajectory.split, trajectory.task_index)
        return await self.make_judge().judge(trajectory, task)

    def make_judge(self) -> Judge:
        """The spec's judge."""
        if self._judge is None:
            return RuleJudge()
        spec = self.exp.protocol.judge
        return ModelJudge(
            self._judge.sampler,
            self._judge.renderer,
            prompt=spec.prompt,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            retry_max_tokens=spec.retry_max_tokens,
            context_length=self._judge.context_length,
            seed=self.exp.arms[0].seed,
            tries=spec.tries,
            policy=self.source.wiki,
        )

    async def teach(self, teacher: Sampler, index: int, group: Sequence[Rollout]) -> TeacherScores:
        """Score rollout `index` of its group under its feedback-conditioned context; nothing without a judgement."""
        trajectory, judgement = group[index].trajectory, group[index].judged.judgement
        if judgement is None:
            return TeacherScores((None,) * len(trajectory.tokens), False, None, 0, 0)
        advantage = self.exp.protocol.advantage
        judgements = [rollout.judged.judgement for rollout in group]
        composites = [None if judged is None else judged.composite for judged in judgements]
        sibling = select_sibling(composites, index, advantage.sibling_threshold, advantage.sibling_rule)
        context = teacher_context(
            self.renderer,
            self.context,
            trajectory,
            feedback=judgement.rationale,
            sibling=None if sibling is None else group[sibling].trajectory,
            limit=self.longest_scored,
            success_wording=advantage.success_wording,
        )
        logprobs = await teacher_logprobs(teacher, context, trajectory)
        return TeacherScores(
            logprobs=tuple(logprobs),
            has_feedback=context.has_feedback,
            sibling=sibling if context.has_sibling else None,
            shortened_tokens=context.shortened_tokens,
            context_tokens=len(context.tokens),
            context=context.tokens,
        )

    async def score_again(self, sampler: Sampler, trajectory: Trajectory) -> tuple[float | None, ...]:
        """The student's own logprobs of a trajectory, by the path that scores the teacher: an empty block."""
        limit = self.longest_scored
        context = teacher_context(self.renderer, self.context, trajectory, feedback=None, sibling=None, limit=limit)
        return tuple(await teacher_logprobs(sampler, context, trajectory))

    def gold(self, split: str, task_index: int, *, confirm: bool = False) -> Trajectory:
        """The task's gold episode, rendered as a rollout would see it."""
        return gold_trajectory(self.source, split, task_index, self.renderer, self.context, confirm=confirm)

    def opening_tokens(self, task_index: int) -> list[int]:
        """The tokens before the first turn of a training task, with the scripted opening."""
        task = self.source.task(self.exp.protocol.train.split, task_index)
        return first_prompt(self.renderer, self.context, opening(task))

    def _simulator(self, split: str, task_index: int, seed: int) -> User:
        task = self.source.task(split, task_index)
        if self._user is None:
            return ScriptedUser(task)
        spec = self.exp.protocol.user
        return ModelUser(
            task,
            self._user.sampler,
            self._user.renderer,
            prompt=spec.prompt,
            temperature=spec.temperature,
            max_tokens=spec.max_tokens,
            seed=seed,
        )
