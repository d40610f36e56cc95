"""Who runs in a step, with how many tokens. No torch."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from blockdraft.cache.memory import Memory
from blockdraft.core.sequence import Batch, Row, Sequence
from blockdraft.core.uninterrupted import uninterrupted

MIN_CHUNK = 32
"""The fewest prompt tokens of a row, however many prompts share a step."""


class Scheduler:
    """Continuous batching, first come, first served: each running sequence is in every step.

    There is one exception: a sequence whose first tokens another one is computing waits for them,
    and others may start meanwhile.

    Up to `max_running` sequences run. `prefill_chunk` bounds the prompt tokens of a step (but each
    prompt gets MIN_CHUNK), so that a long prompt holds up running sequences for no more than one
    chunk. When the memory is full, room for candidates is taken back. If that does not suffice, the
    sequence that came last is preempted: `release` forgets what was computed of it, it goes back to
    the head of the queue, and its tokens are computed again later. draft_context: whether the
    drafter keeps a context, which tokens that are reused must then have.
    """

    def __init__(
        self,
        memory: Memory,
        release: Callable[[Sequence], None],
        *,
        max_running: int,
        prefill_chunk: int,
        draft_context: bool,
    ) -> None:
        self.memory = memory
        self._release = release
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.draft_context = draft_context
        self.num_preempted = 0
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting[sequence.key] = sequence

    def remove(self, key: int) -> None:
        """Drop a sequence, waiting or running; unknown keys are fine, it may have finished."""
        self.waiting.pop(key, None)
        self.running = [s for s in self.running if s.key != key]

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or any(s.finish_reason is None for s in self.running))

    def schedule(self) -> Batch:
        """The rows of the next step, without candidates; the finished make room for the waiting."""
        self.running = [s for s in self.running if s.finish_reason is None]
        self._make_room()
        self._admit(list(islice(self.waiting.values(), self.max_running)), self.max_running)
        chunk = self._chunk()
        return [self._row(sequence, chunk) for sequence in self.running]

    def schedule_alone(self, key: int) -> Batch:
        """The row of one sequence in a step of its own; none if there is no room to advance it.

        It starts if it waits, even beyond `max_running`; no other is started or preempted.
        """
        self.running = [s for s in self.running if s.finish_reason is None]
        if key in self.waiting:
            self._admit([self.waiting[key]], len(self.running) + 1)
        chunk = self._chunk()
        return [self._row(s, chunk) for s in self.running if s.key == key and self._reserve(s)]

    def _make_room(self) -> None:
        """Reserve one more page for each sequence that needs it, the oldest first.

        While there is no free page, the youngest is preempted. The oldest always fits: alone it
        needs no more than was checked when it was added.
        """
        for sequence in list(self.running):
            while sequence in self.running and not self._reserve(sequence):
                self.preempt(self.running[-1])

    def _reserve(self, sequence: Sequence) -> bool:
        """Room for all tokens of a sequence, if need be that of candidates; False if there is none.

        A tree may have needed many pages, which stay with its sequence until others need them.
        """
        num_tokens = len(sequence.token_ids)
        if self.memory.reserve(sequence.key, num_tokens):
            return True
        for other in self.running:
            self.memory.trim(other.key, len(other.token_ids))
        return self.memory.reserve(sequence.key, num_tokens)

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to the head of the queue; it is computed again later."""
        with uninterrupted():
            self.num_preempted += 1
            self._release(sequence)
            sequence.num_cached = 0
            self.running = [s for s in self.running if s is not sequence]
            self.waiting[sequence.key] = sequence
            self.waiting.move_to_end(sequence.key, last=False)

    def _admit(self, sequences: list[Sequence], max_running: int) -> None:
        """Start waiting sequences while there is a place, and room for all their tokens.

        A sequence whose first tokens are being computed for another waits for them instead of
        computing them too, and those behind it may go first. A sequence without room holds up all
        behind it; else it might wait forever. Not all that wait are given: a request may have
        thousands of samples.
        """
        for sequence in sequences:
            if len(self.running) >= max_running:
                return
            # If the last step was interrupted here, the sequence is open already.
            self.memory.put_back(sequence.key)
            # Tokens that are taken over have no logits, which scoring needs.
            reusable = sequence.token_ids[:1] if sequence.is_scoring else sequence.token_ids
            num_reused = self.memory.open(
                sequence.key,
                reusable,
                with_context=self._with_context(sequence),
                longest=sequence.longest,
            )
            if self._saves_by_waiting(sequence, num_reused):
                self.memory.put_back(sequence.key)
                continue
            if not self._reserve(sequence):
                self.memory.put_back(sequence.key)
                return
            sequence.num_cached = num_reused
            if sequence.num_output == 0:  # after a preemption it takes over its own tokens
                sequence.num_reused = num_reused
            del self.waiting[sequence.key]
            self.running.append(sequence)

    def _with_context(self, sequence: Sequence) -> bool:
        return self.draft_context and sequence.may_draft

    def _saves_by_waiting(self, sequence: Sequence, num_reused: int) -> bool:
        """True if a sequence could soon take over more than `num_reused` tokens of a running one.

        Soon: of the tokens that the running one still has to compute, at least half are shared.
        So a short prompt does not wait for the end of a much longer one. Of a running one that has
        lost its draft context nothing is published.
        """
        for other in [] if sequence.is_scoring else self.running:
            if other.is_prefilling and not other.has_lost_context:
                num_shared = self.memory.num_shared(
                    sequence.key, sequence.token_ids, other.key, other.token_ids
                )
                gain = num_shared - num_reused
                if gain > 0 and 2 * gain >= len(other.token_ids) - other.num_cached:
                    return True
        return False

    def _chunk(self) -> int:
        """Prompt tokens of each row that is not complete yet."""
        num_prompts = sum(s.is_prefilling for s in self.running)
        return max(min(MIN_CHUNK, self.prefill_chunk), self.prefill_chunk // max(1, num_prompts))

    def _row(self, sequence: Sequence, chunk: int) -> Row:
        start = sequence.num_cached
        new_ids = sequence.token_ids[start : start + chunk]
        return Row(sequence, new_ids, 0, is_prompt=sequence.is_prefilling)
