"""One thread that owns the model: it mixes decoding, prefilling and training, one bounded piece at a time."""

import itertools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from paritygate.server.engine.cores import SharedCores
from paritygate.server.engine.jobs import JobBatch, Row, SampleJob, SampleResult, Task, snapshot_of
from paritygate.server.engine.sampling import Decoder, StopCheck, draw, top_logprobs
from paritygate.server.engine.scoring import score_prompt
from paritygate.server.errors import RequestError
from paritygate.server.limits import Limits
from paritygate.server.model.attention import Span, cached
from paritygate.server.model.cache import PrefixCache, Sequence
from paritygate.server.model.network import Network
from paritygate.server.model.products import serves, use_threads


class Engine:
    """Owns the network, the prefix cache and the thread; every public method may be called from any thread."""

    def __init__(
        self,
        network: Network,
        limits: Limits,
        decoder: Decoder | None,
        threads: int,
        cores: SharedCores | None = None,
    ) -> None:
        """`cores`, where the kernels keep bits at any number of threads, decides how many instead of `threads`."""
        self.network = network
        self.limits = limits
        self.decoder = decoder
        self.threads = threads
        self.cores = cores if serves(network.dtype) else None
        self.prefix = PrefixCache(limits.prefix_cache_bytes)
        self.steps = 0
        self._inbox: queue.SimpleQueue[SampleJob | Task | None] = queue.SimpleQueue()
        self._waiting: deque[SampleJob] = deque()
        self._prefilling: list[SampleJob] = []
        self._forking: deque[SampleJob] = deque()
        self._rows: list[Row] = []
        self._tasks: deque[Task] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="paritygate-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the piece in hand, fail what waits, and join the thread."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, job: SampleJob) -> None:
        self._inbox.put(job)

    def run(self, steps: Iterator[None], result: Callable[[], Any]) -> Future[Any]:
        """Queue a generator of bounded pieces of work; its future gets `result()` once it is exhausted."""
        task = Task(steps, result, Future())
        self._inbox.put(task)
        return task.future

    @property
    def waiting_jobs(self) -> int:
        """Sample requests that have not begun."""
        return len(self._waiting) + self._inbox.qsize()

    def load(self) -> dict[str, int]:
        """Counts and bytes for the health report."""
        return {
            "rows": len(self._rows),
            "waiting": len(self._waiting),
            "steps": self.steps,
            "prefix_cache_bytes": self.prefix.bytes,
            "prefix_hit_tokens": self.prefix.hits,
        }

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        use_threads(self.threads, self.network.dtype)
        while not self._stopping:
            idle = not (self._rows or self._waiting or self._prefilling or self._forking or self._tasks)
            if idle and self.cores is not None:
                self.cores.rest()
            self._receive(block=idle)
            if self._stopping:
                break
            if self.cores is not None:
                share = self.cores.share()
                # A product of a few rows is done before a second thread has begun, for which it would have to wait.
                wide = self._tasks or self._waiting or self._prefilling
                use_threads(share if wide else 1, self.network.dtype)
            self._advance_task()
            try:
                with torch.no_grad():
                    self._advance_samples()
            except Exception as error:  # one bad batch must not end the service: its own requests fail
                self._fail_samples(error)
        self._shut_down()

    def _receive(self, *, block: bool) -> None:
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if item is None:
                self._stopping = True
                return
            if isinstance(item, Task):
                self._tasks.append(item)
            else:
                self._waiting.append(item)

    def _advance_task(self) -> None:
        """Do one piece of the oldest task; a task whose future was cancelled is dropped between pieces."""
        if not self._tasks:
            return
        task = self._tasks[0]
        if not task.future.cancelled():
            try:
                next(task.steps)
                return
            except StopIteration:
                _resolve(task.future, task.result)
            except Exception as error:
                _resolve(task.future, _raising(error))
        self._tasks.popleft()

    def _advance_samples(self) -> None:
        self._drop_cancelled()
        self._fork_rows()
        self._take_waiting()
        batch = self._plan()
        if batch.spans:
            hidden = self._forward(batch)
            self.steps += 1
            done: list[tuple[Row, Tensor]] = []
            counts = [span.rows_read for span in batch.spans]
            for span, owner, rows in zip(batch.spans, batch.owners, hidden.split(counts), strict=True):
                end = span.start + span.count
                span.sequence.hidden[end - len(rows) : end] = rows
                span.sequence.has_hidden[end - len(rows) : end] = True
                span.sequence.done = end
                if isinstance(owner, Row):
                    done.append((owner, rows[-1]))
            self._choose(done)
        for job in [j for j in self._prefilling if j.prefilled]:
            self._prefilling.remove(job)
            self._finish_prefill(job)
        self._fork_rows()

    # ------------------------------------------------------------------ planning one pass

    def _take_waiting(self) -> None:
        """Admit waiting jobs in their order while the prefill budget and memory last."""
        while self._waiting:
            left = sum(len(j.prompt) - j.sequence.done for j in self._prefilling if j.sequence is not None)
            if left >= self.limits.prefill_tokens or not self._admit(self._waiting[0]):
                return
            self._prefilling.append(self._waiting.popleft())

    def _admit(self, job: SampleJob) -> bool:
        """Give a job its sequence, if memory allows and no job in hand is computing the prefix that it would share."""
        if not job.pages:
            job.pages = self.prefix.keys(job.snapshot.version, job.prompt)
        missing = next((page for page in job.pages if page not in self.prefix), None)
        if missing is not None and any(missing in other.pages for other in self._prefilling):
            return False
        sequence = Sequence(self.network.shape, job.prompt, job.capacity())
        sequence.read_from = job.reads_from()
        used = self._active_bytes()
        if used and used + sequence.reserved > self.limits.active_cache_bytes:
            return False
        job.cached_tokens = self.prefix.fill(sequence, job.snapshot.version)
        job.sequence = sequence
        return True

    def _active_bytes(self) -> int:
        jobs = [j.sequence for j in [*self._prefilling, *self._forking] if j.sequence is not None]
        return sum(s.reserved for s in [*jobs, *(row.sequence for row in self._rows)])

    def _plan(self) -> JobBatch:
        """Lay out one pass: a token for every row, then prompt pieces within the budget; grouped by weights version.

        Every version gets `min_rows` rows at least, so that its low-rank products keep their bits too.
        """
        pieces: list[tuple[Row | SampleJob, Sequence, int]] = [(row, row.sequence, 1) for row in self._rows]
        budget = self.limits.prefill_tokens
        for job in self._prefilling:
            assert job.sequence is not None
            count = min(budget, len(job.prompt) - job.sequence.done)
            budget -= count
            if count:
                pieces.append((job, job.sequence, count))
        batch, row = JobBatch(), 0
        pieces.sort(key=lambda piece: snapshot_of(piece[0]).version)
        for _, group in itertools.groupby(pieces, key=lambda piece: snapshot_of(piece[0]).version):
            start, owner = row, None
            for owner, sequence, count in group:
                batch.spans.append(Span(sequence, row, sequence.done, count))
                batch.owners.append(owner)
                row += count
            assert owner is not None
            row = max(row, start + self.network.min_rows)
            batch.ranges.append((start, row, snapshot_of(owner)))
        return batch

    def _forward(self, batch: JobBatch) -> Tensor:
        total = batch.ranges[-1][1]
        tokens = torch.zeros(total, dtype=torch.long)
        positions = torch.zeros(total, dtype=torch.long)
        for span in batch.spans:
            span.sequence.grow(span.start + span.count)
            ids = span.sequence.tokens[span.start : span.start + span.count]
            tokens[span.row : span.row + span.count] = torch.tensor(ids)
            positions[span.row : span.row + span.count] = torch.arange(span.start, span.start + span.count)
        with self.network.routed(batch.ranges, cached(batch.spans, total)):
            return self.network.forward(tokens, positions)

    # ------------------------------------------------------------------ after a pass

    def _finish_prefill(self, job: SampleJob) -> None:
        assert job.sequence is not None
        self.prefix.store(job.sequence, job.snapshot.version)
        if job.scoring is not None:
            try:
                job.scores = score_prompt(self.network, job.sequence, job.snapshot, job.scoring)
            except RequestError as error:
                _resolve(job.future, _raising(error))
                return
        self._forking.append(job)

    def _fork_rows(self) -> None:
        """Start samples of prefilled jobs while rows and memory allow; the first token needs no further pass."""
        fresh: list[tuple[Row, Tensor]] = []
        while self._forking and len(self._rows) + len(fresh) < self.limits.rows:
            job = self._forking[0]
            assert job.sequence is not None
            last = job.started + 1 == job.num_samples
            used = self._active_bytes() + sum(row.sequence.reserved for row, _ in fresh)
            if not last and (self._rows or fresh) and used + job.sequence.reserved > self.limits.active_cache_bytes:
                break
            sequence = job.sequence if last else job.sequence.fork()
            row = Row(job, job.started, sequence, StopCheck(job.params, self.decoder))
            fresh.append((row, sequence.hidden[len(job.prompt) - 1]))
            job.started += 1
            if last:
                job.sequence = None
                self._forking.popleft()
        self._rows.extend(row for row, _ in fresh)
        self._choose(fresh)

    def _choose(self, rows: list[tuple[Row, Tensor]]) -> None:
        """Draw the next token of each row from its last hidden state; rows that end leave."""
        by_version: dict[str, list[tuple[Row, Tensor]]] = {}
        for row, hidden in rows:
            by_version.setdefault(row.job.snapshot.version, []).append((row, hidden))
        for group in by_version.values():
            stacked = torch.stack([hidden for _, hidden in group])
            logits, normalizers = self.network.head(stacked, group[0][0].job.snapshot)
            for (row, _), logits_V, normalizer in zip(group, logits, normalizers, strict=True):
                self._append(row, logits_V, normalizer)

    def _append(self, row: Row, logits_V: Tensor, normalizer: Tensor) -> None:
        params, sampled = row.job.params, row.sampled
        position = len(sampled.tokens)
        if not math.isfinite(normalizer):
            if not row.job.cancelled:
                _resolve(
                    row.job.future,
                    _raising(RequestError(f"the model's logits are {float(normalizer)}: training diverged")),
                )
            row.job.cancel()
            return
        token = draw(logits_V, params, row.index, position)
        sampled.tokens.append(token)
        sampled.logprobs.append(float(logits_V[token].float() - normalizer))
        if row.job.top_k:
            sampled.top.append(top_logprobs(logits_V, normalizer, row.job.top_k))
        sampled.stopped = row.stop.ended_by(token)
        if sampled.stopped or len(sampled.tokens) >= params.max_tokens:
            self._finish_row(row)
        else:
            row.sequence.tokens.append(token)

    def _finish_row(self, row: Row) -> None:
        self._rows.remove(row)
        job = row.job
        if row.sequence.done > len(job.prompt):
            self.prefix.store(row.sequence, job.snapshot.version)
        job.finished[row.index] = row.sampled
        if len(job.finished) == job.num_samples:
            samples = [job.finished[index] for index in range(job.num_samples)]
            _resolve(job.future, lambda: SampleResult(samples, job.scores, job.cached_tokens))

    # ------------------------------------------------------------------ ends

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.cancelled)
        self._prefilling = [job for job in self._prefilling if not job.cancelled]
        self._forking = deque(job for job in self._forking if not job.cancelled)
        self._rows = [row for row in self._rows if not row.job.cancelled]

    def _fail_samples(self, error: Exception) -> None:
        """Fail everything in hand; where nothing was, what could not be begun."""
        jobs = [*self._prefilling, *self._forking, *(row.job for row in self._rows)]
        if not jobs and self._waiting:
            jobs = [self._waiting.popleft()]
        for job in jobs:
            _resolve(job.future, _raising(error))
        self._prefilling, self._rows = [], []
        self._forking.clear()

    def _shut_down(self) -> None:
        error = RequestError("the server is stopping", 503)
        self._fail_samples(error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Task):
                self._tasks.append(item)
            elif item is not None:
                self._waiting.append(item)
        for waiting in [*self._waiting, *self._tasks]:
            _resolve(waiting.future, _raising(error))
        self._waiting.clear()
        self._tasks.clear()
        self.prefix.clear()


def _resolve(future: Future[Any], result: Callable[[], Any]) -> None:
    """Give a future its result or its exception, unless it was cancelled meanwhile."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    try:
        value = result()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(value)


def _raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
