"""The loop that advances sequences step by step. It knows token ids, and no text."""

import itertools
import logging
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Ids
from time import perf_counter

from blockdraft.allocation.allocator import Allocator
from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.cost_measurement import measure_costs
from blockdraft.allocation.costs import StepCosts
from blockdraft.allocation.policy import DEFAULT_NUM_DRAFT_TOKENS, VerifyAll
from blockdraft.core.config import LLMConfig, check_num_draft_tokens
from blockdraft.core.errors import ConfigError, RequestError
from blockdraft.core.failures import FailureLog
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.recorder import Recorded
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Batch, Constraint, Sequence
from blockdraft.core.thinking import ThinkingLimit
from blockdraft.engine.candidate_limits import CandidateLimits, least
from blockdraft.engine.limits import RequestLimits
from blockdraft.engine.observer import Observer
from blockdraft.engine.record import SampleRecord
from blockdraft.engine.scheduler import Scheduler
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.phases import PhaseTimer
from blockdraft.measure.step_work import record_step, rows_work
from blockdraft.models.target.interface import Target
from blockdraft.speculate.commit import StepOutput, commit
from blockdraft.speculate.drafters.base import Drafter, FreeDrafter
from blockdraft.speculate.proposer import Proposer
from blockdraft.speculate.verify import verify

_DEFAULTS = LLMConfig()

logger = logging.getLogger(__name__)

_KEYS = itertools.count()
"""Keys are unique in the process, so that engines can share a target or a drafter."""


class Engine:
    """Advances sequences step by step; a sequence is addressed by the key that `add` returns.

    `free_drafters` run no model, and propose beside `drafter`. All candidates that are allowed are
    verified, until it is told otherwise. `limits` say what a request may ask for. `timer` measures
    where the time of a step goes, and what is computed in it; it and `observer` may be set between
    steps.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        free_drafters: Ids[FreeDrafter] = (),
        max_running: int = _DEFAULTS.max_concurrency,
        prefill_chunk: int = _DEFAULTS.prefill_chunk,
    ) -> None:
        self.target = target
        self.proposer = Proposer(drafter, target.vocab_size, free_drafters)
        self.limits = RequestLimits(target, self.proposer)
        self.timer = PhaseTimer(measures=False)
        self.observer: Observer | None = None
        self.failures = FailureLog("recording a step failed; its tokens are kept", logger)
        self.allocator = Allocator(VerifyAll(), takes_trees=target.takes_trees)
        self.scheduler = Scheduler(
            target.memory,
            self._forget,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            draft_context=bool(drafter.feature_layers),
        )
        self.candidates = CandidateLimits(
            target.memory,
            model_depth=drafter.max_nodes,
            model_kind=drafter.kind,
            free_depth=self.proposer.free_depth,
        )
        self.progress: dict[int, SampleRecord] = {}
        self._costs: StepCosts | None = None
        self._unreported: list[StepOutput] = []

    @property
    def drafter(self) -> Drafter:
        """The drafter that may run a model; the others are those of the proposer."""
        return self.proposer.drafter

    @property
    def max_draft_depth(self) -> int:
        """Tokens of the longest path that any drafter proposes, unless limited."""
        return max(drafter.max_nodes for drafter in self.proposer.drafters)

    @property
    def timer(self) -> PhaseTimer:
        """Times the phases of every step; whoever measures sets one that also counts work."""
        return self._timer

    @timer.setter
    def timer(self, timer: PhaseTimer) -> None:
        self._timer = timer
        for part in (self.target, self.drafter):
            if isinstance(part, Recorded):
                part.recorder = timer

    def use_adaptive_drafting(
        self, num_draft_tokens: int | None = None, draft_depth: int | None = None
    ) -> None:
        """Verify as many candidates as pay on this machine from now on, none included.

        The first time it measures what a step costs, which takes a moment; nothing may be running.

        Args:
            num_draft_tokens: the most candidates of a sequence in a step. Unless given, a model
                proposes DEFAULT_NUM_DRAFT_TOKENS, or a whole chain if that has more.
            draft_depth: the longest path of them; unless given, each drafter's own.

        Raises:
            ConfigError: a limit is out of its range.
        """
        depth = self._limit_depth(num_draft_tokens, draft_depth)
        if self._costs is None:
            self._costs = measure_costs(self.target, self.drafter)
        most = num_draft_tokens
        num_nodes = max(depth, DEFAULT_NUM_DRAFT_TOKENS) if most is None else most
        # Where the policy asks for shorter paths, branches take the place of the rest.
        self._set_trees(num_nodes)
        self.allocator.policy = BestRate(
            self._costs, num_nodes, depth, self.drafter.lag, model_kind=self.drafter.kind
        )

    def use_fixed_drafting(
        self, num_draft_tokens: int | None = None, draft_depth: int | None = None
    ) -> None:
        """Verify all candidates from now on that the limits and a request allow.

        More candidates than the drafter's path is long are a tree, others are a chain.

        Args:
            num_draft_tokens: the most candidates of a sequence in a step, 0 for plain decoding;
                unless given, a whole chain of each drafter.
            draft_depth: the longest path of them; unless given, each drafter's own.

        Raises:
            ConfigError: a limit is out of its range.
        """
        depth = self._limit_depth(num_draft_tokens, draft_depth)
        most = num_draft_tokens or 0
        self._set_trees(most if most > depth else 0)
        self.allocator.policy = VerifyAll()

    def _limit_depth(self, num_draft_tokens: int | None, draft_depth: int | None) -> int:
        """Set the limits of all drafters; returns how deep the one that runs a model may go."""
        check_num_draft_tokens(num_draft_tokens)
        if draft_depth is not None and draft_depth < 1:
            raise ConfigError(f"draft_depth is {draft_depth}; give 1 or more")
        depth = least(self.drafter.max_nodes, num_draft_tokens, draft_depth)
        self.candidates.num_draft_tokens = num_draft_tokens
        self.candidates.draft_depth = draft_depth
        self.candidates.model_depth = depth
        return depth

    def _set_trees(self, num_nodes: int) -> None:
        """Let drafters propose trees of so many nodes at most; 0 for chains."""
        self.candidates.num_tree_nodes = num_nodes
        self.proposer.joins_trees = num_nodes > 0 and self.target.takes_trees

    def add(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        eos_ids: frozenset[int] = frozenset(),
        sample_index: int = 0,
        seed: int | None = None,
        prediction_ids: Ids[int] = (),
        scan_stop: Callable[[int], bool] | None = None,
        constraint: Constraint | None = None,
        thinking: ThinkingLimit | None = None,
        added_at: float | None = None,
    ) -> int:
        """Queue one sample of a request and return its key.

        Without a seed, here or in `params`, 64 bits are drawn from the system. `added_at` is when
        the request came (perf_counter seconds), now unless given. `eos_ids` outside the vocabulary
        cannot be chosen, and are left out. `prediction_ids` are those of `params`, whose text only
        a tokenizer can read.

        Raises:
            RequestError: an empty prompt, a token id outside the vocabulary, or a grammar or a
                budget of thinking in `params` without what was made of it.
            ContextTooLong: prompt and max_tokens do not fit the target's context.
        """
        self.limits.check_prompt(prompt_ids, params)
        if seed is None:
            seed = secrets.randbits(64) if params.seed is None else params.seed
        sequence = self.sequence(
            prompt_ids,
            params,
            seed,
            eos_ids=eos_ids,
            sample_index=sample_index,
            prediction_ids=prediction_ids,
            scan_stop=None if scan_stop is None else self._timed(scan_stop),
            constraint=constraint,
            thinking=thinking,
        )
        self.progress[sequence.key] = SampleRecord(
            sequence, perf_counter() if added_at is None else added_at
        )
        self.scheduler.add(sequence)
        return sequence.key

    def sequence(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        seed: int,
        *,
        eos_ids: frozenset[int] = frozenset(),
        sample_index: int = 0,
        prediction_ids: Ids[int] = (),
        scan_stop: Callable[[int], bool] | None = None,
        constraint: Constraint | None = None,
        thinking: ThinkingLimit | None = None,
    ) -> Sequence:
        """A new sequence of this engine that is not queued. See `add`.

        Raises:
            RequestError: a grammar or a budget of thinking in `params` without what was made of it.
        """
        if (params.grammar is None) != (constraint is None):
            raise RequestError("a grammar needs its constraint, and vice versa; use LLM")
        if params.thinking_token_budget != (None if thinking is None else thinking.budget):
            raise RequestError("thinking_token_budget needs the thinking tags; use LLM")
        return Sequence(
            key=next(_KEYS),
            params=params,
            seed=seed,
            sample_index=sample_index,
            stop_ids=params.ending_ids(frozenset(filter(self.limits.is_token, eos_ids))),
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            prediction_ids=tuple(prediction_ids),
            scan_stop=scan_stop,
            constraint=constraint,
            thinking=thinking,
        )

    def _timed(self, scan_stop: Callable[[int], bool]) -> Callable[[int], bool]:
        """`scan_stop` in a phase of its own: it writes text, which is no part of the commit."""

        def scan(token_id: int) -> bool:
            with self._timer.phase("stream"):
                return scan_stop(token_id)

        return scan

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished, or its end has not been reported."""
        return bool(self._unreported) or self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Advance every scheduled sequence: by at least one token, or by a chunk of its prompt.

        What goes wrong for one row ends its request with an error, and a drafter that fails only
        costs its proposals. Where memory does not suffice for the step, it is made again without
        candidates, and if that does not fit either, the request with the largest share of it ends
        with an error. If anything else fails, or is interrupted, the step may be tried again; what
        it has committed is returned then.
        """
        self.advance()
        return self.report()

    def advance(self, only: int | None = None) -> None:
        """Do the work of a step; `report` hands over what it gave, also where this is interrupted.

        Does nothing while the last step is not reported. only: the key of the one sequence that is
        advanced, without candidates, so that as little as possible can fail.
        """
        if self._unreported:
            return
        with self.timer.step():
            with self.timer.phase("schedule"):
                batch = (
                    self.scheduler.schedule()
                    if only is None
                    else self.scheduler.schedule_alone(only)
                )
                if not batch:
                    return
                asked = self.allocator.ask(batch)
                if asked.anybody and only is None:
                    batch = self.candidates.apply(batch)
            self.proposer.open(batch)
            free = [NOTHING] * len(batch)
            if asked.free:
                with self.timer.phase("free"):
                    free = self.proposer.propose_free(batch)
            with self.timer.phase("controller"):
                batch = self.allocator.limit(batch, free)
            self._note_start(batch)
            if not self._fits(batch, free):
                # There may be enough without candidates.
                drafts = any(row.num_draft_tokens for row in batch)
                batch = [row.within(0) for row in batch]
                if not (drafts and self._fits(batch, [NOTHING] * len(batch))):
                    self._fail_largest(batch)

    def check(self) -> None:
        """Compute one token of a request of our own; raises what a step that fails raises.

        Where there is no room for it, nothing is computed.
        """
        params = SamplingParams(max_tokens=1, num_draft_tokens=0)
        key = self.add([0], params, seed=0)
        try:
            self.advance(only=key)
        finally:
            self.take(key)

    def _fits(self, batch: Batch, free: Ids[Proposal]) -> bool:
        """Advance the rows; False if memory does not suffice, and then no row has changed.

        If some rows were committed before memory ran out, they stay so, and the result is True: a
        later step advances the others.
        """
        try:
            self._advance(batch, free)
        except BaseException as error:
            for row in batch:
                self.target.truncate(row.sequence.key, row.sequence.num_cached)
            if not is_out_of_memory(error):
                raise
            return bool(self._unreported)
        return True

    def _note_start(self, batch: Batch) -> None:
        now = perf_counter()
        for row in batch:
            record = self.progress[row.sequence.key]
            if record.started_at is None:
                record.started_at = now

    def _advance(self, batch: Batch, free: Ids[Proposal]) -> None:
        timer = self.timer
        with timer.phase("draft"):
            proposals = self.proposer.propose(batch, free)
        with timer.phase("controller"):
            plan = self.allocator.plan(batch, proposals)
        planned_work = rows_work(plan) if timer.measures else []
        with timer.phase("forward"):
            output = self.target.forward(plan)
        with timer.phase("choose"):
            verdicts = verify(plan, output.logits)
        self._observe(lambda observer: observer.verified(plan, output.logits, verdicts))
        with timer.phase("commit"):
            # One by one: if the commit is interrupted, what it has written must not be lost.
            for committed in commit(plan, verdicts, output, self.target, self.proposer):
                self._unreported.append(committed)
        with timer.phase("controller"):
            kept_nodes = [result.verdict.nodes for result in self._unreported]
            self.allocator.record(plan, kept_nodes, timer.step_seconds)
        if timer.measures:
            with self.failures.caught():
                record_step(timer, planned_work, self._unreported, output.num_forwards)

    def _observe(self, tell: Callable[[Observer], None]) -> None:
        """Tell the observer, whose failures are counted and cost no request anything."""
        if self.observer is not None:
            with self.failures.caught():
                tell(self.observer)

    def _count(self, acceptance: AcceptanceStats, output: StepOutput) -> None:
        try:
            acceptance.record(output.num_kept, output.proposal, output.kept_nodes)
        except Exception as error:
            self.failures.note(error)

    def _fail_largest(self, batch: Batch) -> None:
        """End the request with the most tokens in the step, so that the others have room."""
        row = max(batch, key=lambda row: len(row.new_ids))
        sequence, num_tokens = row.sequence, len(row.new_ids)
        sequence.fail(
            f"not enough memory for a forward pass of {num_tokens} tokens; lower max_concurrency "
            "(on the command line --max-concurrency) or, in Python, prefill_chunk"
        )
        self._forget(sequence)
        self._unreported.append(StepOutput(sequence.key, finish_reason=sequence.finish_reason))

    def report(self) -> list[StepOutput]:
        """What `advance` gave, once."""
        outputs, now = self._unreported, perf_counter()
        for output in outputs:
            record = self.progress[output.key]
            if output.finish_reason is not None:
                record.finished_at = now
            if not output.token_ids or record.counted is output:
                continue
            record.counted = output  # first: an interrupt may cost a count, none is made twice
            if record.first_token_at is None:
                record.first_token_at = now
            else:
                self._count(record.acceptance, output)
                record.largest_gap = max(record.largest_gap, now - record.last_token_at)
            record.last_token_at = now
        if outputs:
            self._observe(lambda observer: observer.reported(outputs))
        self._unreported = []  # not before: if this is interrupted, they are reported again
        return outputs

    def fail(self, key: int, error: str) -> None:
        """End a sequence with an error that others have found, even if it has just ended."""
        record = self.progress[key]
        record.sequence.fail(error)
        if record.finished_at is None:
            record.finished_at = perf_counter()
        self._unreported = [output for output in self._unreported if output.key != key]
        self.scheduler.remove(key)
        self._forget(record.sequence)

    def take(self, key: int) -> SampleRecord:
        """Hand over the record of a sample, ended or not, and forget it."""
        record = self.progress.pop(key)
        self._unreported = [output for output in self._unreported if output.key != key]
        self.scheduler.remove(key)
        self.allocator.close(key)
        self._forget(record.sequence)
        return record

    def _forget(self, sequence: Sequence) -> None:
        """Give back what was computed of a sequence."""
        self.target.close(sequence.key)
        self.proposer.close(sequence)
