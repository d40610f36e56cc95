"""Who runs in a step, and how many tokens each may draft. No torch."""

from collections import deque

from blockdraft.core.sequence import Batch, Row, Sequence


class Scheduler:
    """First come, first served: up to `max_running` sequences, each in every step.

    `prefill_chunk` bounds the prompt tokens of a row, so that running sequences are not held up by
    a long prompt for more than one chunk.
    """

    def __init__(self, *, max_running: int, prefill_chunk: int, max_draft_tokens: int) -> None:
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self.max_draft_tokens = max_draft_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, key: int) -> None:
        """Drop a sequence, waiting or running; unknown keys are fine, it may have finished."""
        self.waiting = deque(s for s in self.waiting if s.key != key)
        self.running = [s for s in self.running if s.key != key]

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs."""
        return bool(self.waiting or any(s.finish_reason is None for s in self.running))

    def schedule(self) -> Batch:
        """The rows of the next step; finished sequences make room for waiting ones."""
        self.running = [s for s in self.running if s.finish_reason is None]
        while self.waiting and len(self.running) < self.max_running:
            self.running.append(self.waiting.popleft())
        return [self._row(sequence) for sequence in self.running]

    def _row(self, sequence: Sequence) -> Row:
        start = sequence.num_cached
        new_ids = sequence.token_ids[start : start + self.prefill_chunk]
        return Row(sequence, new_ids, self._num_draft_tokens(sequence))

    def _num_draft_tokens(self, sequence: Sequence) -> int:
        if sequence.is_prefilling:
            return 0
        limits = [self.max_draft_tokens]
        if sequence.params.max_draft_tokens is not None:
            limits.append(sequence.params.max_draft_tokens)
        # The bonus takes the last place, so no draft can be kept there.
        limits.append(sequence.params.max_tokens - sequence.num_output - 1)
        return min(limits)
