"""The engine under asyncio: one thread steps, requests come in and chunks go out between steps."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from blockdraft.core.errors import EngineDead, EngineStopped, Overloaded
from blockdraft.core.failures import FailureLog
from blockdraft.core.grammar import Grammar
from blockdraft.engine.fair_queue import FairQueue
from blockdraft.engine.samples import Job, Samples
from blockdraft.engine.streams import Stream, Ticket
from blockdraft.measure.phases import PhaseTimer
from blockdraft.measure.step_report import Load, Pace, StepObserver, StepReport, page_use
from blockdraft.speculate.commit import StepOutput
from blockdraft.text.grammar import CompiledGrammar

_MAX_FAILURES = 3
"""A step that fails is tried again; after so many failures in a row each sample runs alone."""
_FAILED_ALONE = "the server failed on this request; the log says why"
_FIRST_SECONDS, _SECONDS_WEIGHT = 5.0, 0.1
"""The mean duration of a sample before one has ended, and the weight of each that ends, in the
moving mean."""
_LONGEST_RETRY = 60
"""Seconds: the most that a refused client is told to wait."""

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Serves streams from an engine that its own thread steps.

    Every sample waits in a fair queue until one of the engine's places is free, see FairQueue, so
    the engine itself never has more than it can run. Everything that touches the engine happens
    in the thread, between two steps.

    Args:
        samples: the engine with its tokenizer; not to be used by anybody else from `start` on.
        max_waiting: samples that may wait; more are refused.
        observer: is told of every step.
    """

    def __init__(
        self, samples: Samples, *, max_waiting: int, observer: StepObserver | None = None
    ) -> None:
        self.max_waiting = max_waiting
        self._samples = samples
        self._engine = samples.engine
        self._observer = observer
        self._timer = PhaseTimer(measures=False)
        self._engine.timer = self._timer
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._queue: FairQueue[Ticket] = FairQueue()
        self._cancelled: list[Ticket] = []
        self._is_stopping = False
        self._death: str | None = None
        self._kind_of_death: type[EngineDead] = EngineDead
        self.on_death: Callable[[str], None] | None = None
        """Called in the engine's thread if a failure ends it, after all streams were told why."""
        # Of the event loop.
        self._num_held = 0
        # Of the thread.
        self._running: dict[int, Ticket] = {}
        self._num_failures = 0
        self._step_failures = FailureLog("a step failed; retrying", logger)
        self._report_failures = FailureLog(
            "reporting a step failed; the step itself is kept", logger
        )
        self._mean_seconds = _FIRST_SECONDS
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step, for which it blocks.

        Open streams get EngineStopped.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def death(self) -> str | None:
        """Why nothing is answered any more; None while all is well."""
        return self._death

    @property
    def max_tokens(self) -> int:
        """See RequestLimits.max_tokens."""
        return self._engine.limits.max_tokens

    @property
    def max_running(self) -> int:
        """Samples that have a place at once."""
        return self._engine.scheduler.max_running

    @property
    def has_room(self) -> bool:
        """False if one more sample would be refused; to be called in the event loop."""
        try:
            self._check_room(1)
        except (EngineDead, Overloaded):
            return False
        return True

    def check_ids(self, param: str, token_ids: Sequence[int]) -> None:
        """See RequestLimits.check_ids."""
        self._engine.limits.check_ids(param, token_ids)

    def prediction_ids(self, prediction: str) -> tuple[int, ...]:
        """See Samples.prediction_ids; it takes as long as for a prompt, in any thread."""
        return self._samples.prediction_ids(prediction)

    def compile_grammar(self, grammar: Grammar) -> CompiledGrammar:
        """See Grammars.compile; a new one takes a while, and it may be called in any thread."""
        return self._samples.grammars.compile(grammar)

    def find_grammar(self, grammar: Grammar) -> CompiledGrammar | None:
        """See Grammars.find."""
        return self._samples.grammars.find(grammar)

    def load(self) -> Load:
        """How much there is to do; for any thread, which may see the middle of a step."""
        num_without_memory = len(self._engine.scheduler.waiting)
        with self._changed:
            return Load(
                num_running=max(0, len(self._running) - num_without_memory),
                num_waiting=len(self._queue) + num_without_memory,
                num_preparing=self._num_held,
                pages=page_use(self._engine.target.memory),
            )

    @contextmanager
    def hold(self, num: int) -> Iterator[None]:
        """Reserve room for so many samples while their request is prepared; then submit it at once.

        To be called in the event loop.

        Raises:
            Overloaded: there is no room, so the request need not be prepared.
            EngineDead: the engine has ended.
        """
        self._check_room(num)
        self._num_held += num
        try:
            yield
        finally:
            self._num_held -= num

    def submit(self, jobs: Sequence[Job], *, client: str = "") -> Stream:
        """Queue all samples of a request; to be called in the event loop that reads the stream.

        `client` is whose request it is, for fairness.

        Raises:
            RequestError: a prompt or a parameter is unusable, see Samples.check.
            Overloaded: too many samples wait.
            EngineDead: the engine has ended.
        """
        for job in jobs:
            self._samples.check(job.prompt_ids, job.params)
        num = sum(job.params.n for job in jobs)
        stream = Stream(client, asyncio.get_running_loop(), self._cancel, num)
        now = perf_counter()
        stream.tickets = [
            Ticket(stream, job, index, now) for job in jobs for index in range(job.params.n)
        ]
        with self._changed:
            self._check_room(num)
            for ticket in stream.tickets:
                self._queue.push(ticket)
            self._changed.notify()
        return stream

    def _check_room(self, num: int) -> None:
        """Refuse more samples than may wait, those counted whose requests are being prepared."""
        with self._changed:
            if self._death is not None:
                raise self._kind_of_death(self._death)
            num_free = self.max_running - len(self._running)
            num_before = len(self._queue) + self._num_held
            num_waiting = num_before + num - max(0, num_free)
        if num_waiting > self.max_waiting:
            raise Overloaded(
                f"{num_before} samples wait, {num} more were requested, and at most "
                f"{self.max_waiting} may wait; try again later",
                retry_after=self._retry_after(num_waiting),
            )

    def _retry_after(self, num_waiting: int) -> int:
        """Seconds in which about half of what waits will have been served."""
        rounds = num_waiting / self.max_running
        return max(1, min(_LONGEST_RETRY, round(rounds * self._mean_seconds / 2)))

    def _cancel(self, stream: Stream) -> None:
        with self._changed:
            for ticket in stream.tickets:
                if not self._queue.remove(ticket):
                    self._cancelled.append(ticket)
            self._changed.notify()

    def _run(self) -> None:
        # A thread starts with torch's own setting, and exactness was tested with ours.
        torch.set_num_threads(self._num_threads)
        try:
            while self._prepare():
                self._step()
            self._die("the server is shutting down; try again later", EngineStopped)
        except BaseException as error:
            logger.exception("the engine has ended")
            # Everybody is told, at /health without a key, and an error may name files.
            kind = type(error).__name__
            death = f"the engine has ended ({kind}), and the log says why; restart the server"
            self._die(death)
            if self.on_death is not None:
                self.on_death(death)

    def _prepare(self) -> bool:
        """Wait until there is work, and take in what came. False when the loop is to end."""
        with self._changed:
            while not (self._is_stopping or self._cancelled or self._queue or self._running):
                with self._timer.phase("wait"):
                    self._changed.wait()
            if self._is_stopping:
                return False
            cancelled, self._cancelled = self._cancelled, []
            for ticket in cancelled:
                self._drop(ticket)
            num_free = self.max_running - len(self._running)
            admitted = [self._queue.pop() for _ in range(min(num_free, len(self._queue)))]
        for ticket in admitted:
            self._admit(ticket)
        return True

    def _admit(self, ticket: Ticket) -> None:
        try:
            key = self._samples.add(ticket.job, ticket.sample_index, added_at=ticket.added_at)
        except Exception as error:  # it ends this request, and no other
            logger.exception("a sample could not be started")
            ticket.stream.deliver(error)
            with self._changed:
                self._queue.release(ticket)
            return
        ticket.key, ticket.started_at = key, perf_counter()
        self._running[key] = ticket

    def _drop(self, ticket: Ticket) -> None:
        """Forget a running ticket, unless it has ended meanwhile."""
        if ticket.key is not None and self._running.pop(ticket.key, None) is not None:
            self._forget(ticket.key)
            self._queue.release(ticket)

    def _step(self) -> None:
        if not self._running:
            return
        try:
            outputs = self._samples.step()
        # It may be temporary, such as a lack of memory. One that stays may be of one request.
        except Exception as error:
            self._num_failures += 1
            self._step_failures.note(error)
            if self._num_failures < _MAX_FAILURES:
                return
            outputs = self._step_one_by_one()
        self._num_failures = 0
        report = None
        with self._report_failures.caught():
            report = self._count(outputs)
        for key in self._samples.with_news:
            self._hand_out(key)
        if self._observer is not None and report is not None:
            with self._report_failures.caught():
                self._observer.on_step(report)

    def _step_one_by_one(self) -> list[StepOutput]:
        """Advance each sample alone; one whose own step fails ends with an error, and no other.

        Raises what the engine raises if it cannot even compute a token of its own.
        """
        self._samples.check_engine()
        outputs = []
        for key in self._running:
            try:
                outputs += self._samples.step(only=key)
            except Exception:
                logger.exception("a sample fails even alone; its request ends with an error")
                self._fail(key)
        return outputs

    def _fail(self, key: int) -> None:
        """End a sample with an error; if that fails, the others go on."""
        try:
            self._samples.fail(key, _FAILED_ALONE)
        except Exception:
            logger.exception("the memory of a failed sample could not be freed")

    def _hand_out(self, key: int) -> None:
        ticket = self._running[key]
        try:
            chunk = self._samples.take_chunk(key)
        except Exception as error:  # it ends this sample, and no other
            logger.exception("a sample could not be delivered")
            with self._changed:
                self._drop(ticket)
            ticket.stream.deliver(error)
            return
        if chunk.completion is not None:
            seconds = perf_counter() - ticket.started_at
            self._mean_seconds += _SECONDS_WEIGHT * (seconds - self._mean_seconds)
            with self._changed:
                del self._running[key]
                self._queue.release(ticket)
        ticket.stream.deliver(chunk)

    def _count(self, outputs: list[StepOutput]) -> StepReport:
        now = perf_counter()
        passes: Counter[tuple[int, int]] = Counter()
        gaps: list[float] = []
        num_prompt = num_reused = num_pass_tokens = num_stalls = 0
        has_prompt = False
        for output in outputs:
            ticket = self._running[output.key]
            has_prompt = has_prompt or ticket.pace is None or not output.token_ids
            if not output.token_ids:
                continue
            if ticket.pace is None:
                ticket.pace = Pace(now)
                num_prompt += len(ticket.job.prompt_ids)
                num_reused += self._engine.progress[output.key].sequence.num_reused
                continue
            gap, is_stall = ticket.pace.note(now)
            gaps.append(gap)
            num_stalls += is_stall
            if is_stall:
                self._samples.mark_stall(output.key)
            passes[output.num_drafted, output.num_accepted] += 1
            num_pass_tokens += len(output.token_ids)
        return StepReport(
            num_tokens=sum(len(output.token_ids) for output in outputs),
            num_prompt_tokens=num_prompt,
            num_reused_tokens=num_reused,
            num_pass_tokens=num_pass_tokens,
            num_stalls=num_stalls,
            num_preempted=self._engine.scheduler.num_preempted,
            has_prompt=has_prompt,
            phases=self._timer.take_totals(),
            passes=passes,
            gaps=tuple(gaps),
        )

    def _die(self, death: str, kind: type[EngineDead] = EngineDead) -> None:
        with self._changed:
            self._death, self._kind_of_death = death, kind
            tickets = [*self._queue.clear(), *self._running.values()]
        for stream in {ticket.stream for ticket in tickets}:
            stream.deliver(kind(death))
        for key in list(self._running):
            self._forget(key)
        self._running.clear()

    def _forget(self, key: int) -> None:
        """Drop a sample; if that fails, the others go on."""
        try:
            self._samples.drop(key)
        except Exception:
            logger.exception("a sample could not be dropped")
