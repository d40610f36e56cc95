"""The state of one sample of one request, and the rows of a step. No tensors here."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from blockdraft.core.request import FinishReason, SamplingParams
from blockdraft.core.thinking import ThinkingLimit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Constraint(Protocol):
    """What a grammar allows in one sequence: a function of the tokens given, and no more."""

    def allowed(self, output_ids: list[int], ahead: list[int]) -> "NDArray[np.bool_] | None":
        """The tokens [V] that may follow the output and `ahead`; at least one.

        None if what follows there is not kept anyway.

        Raises:
            RequestError: nothing can follow.
        """
        ...

    def num_allowed(self, output_ids: list[int], ahead: list[int]) -> int:
        """How many of the tokens `ahead` may follow the output, one behind the other."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """The tokens of one sample, and the few counters that describe it.

    Invariants: `0 <= num_cached < len(token_ids)`; once it is all in, after every commit
    `num_cached == len(token_ids) - 1`: the last token, the anchor, is not in the caches yet. A
    sequence that was preempted begins again at `num_cached == 0`, its output is then part of what
    goes in like a prompt.

    `scan_stop` is told every committed token and says whether it completes a stop string.
    `constraint` is there if the parameters hold a grammar, `thinking` if they hold a budget of it.
    `num_reused` tokens of the prompt were taken over from earlier sequences, and `num_scored` have
    got their log-probability, if that was asked for. `prediction_ids` are what the request expects
    of its output. `lost_drafters` are the kinds that have failed to take what was committed, and
    may not draft for it any more; `has_lost_context`: the one that reads features is among them.
    `is_open_to_drafter`: the drafters have been told that it runs.
    """

    key: int
    params: SamplingParams
    seed: int
    sample_index: int
    stop_ids: frozenset[int]
    token_ids: list[int]
    num_prompt: int
    prediction_ids: tuple[int, ...] = ()
    scan_stop: Callable[[int], bool] | None = None
    constraint: Constraint | None = None
    thinking: ThinkingLimit | None = None
    num_cached: int = 0
    num_reused: int = 0
    num_scored: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    has_lost_context: bool = False
    lost_drafters: set[str] = field(default_factory=set)
    is_open_to_drafter: bool = False
    output_counts: Counter[int] = field(default_factory=Counter)
    _prompt_ids: frozenset[int] | None = field(default=None, init=False, repr=False)
    _output_ids: list[int] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check()

    @property
    def prompt_ids(self) -> frozenset[int]:
        """The different tokens of the prompt, always the same set.

        It takes several times the memory of the prompt, and only penalties ask: it is made then.
        """
        if self._prompt_ids is None:
            self._prompt_ids = frozenset(self.token_ids[: self.num_prompt])
        return self._prompt_ids

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def longest(self) -> int:
        """The most tokens that it may ever have."""
        return self.num_prompt + self.params.max_tokens

    @property
    def output_ids(self) -> list[int]:
        """The tokens generated so far, a stop token included; nobody changes this list.

        A grammar asks at every place of a step, and to copy a long output takes a while.
        """
        if len(self._output_ids) != self.num_output:
            self._output_ids = self.token_ids[self.num_prompt :]
        return self._output_ids

    @property
    def is_prefilling(self) -> bool:
        """True until the pass that caches every token but the one it chooses."""
        return self.num_output == 0 or self.num_cached < len(self.token_ids) - 1

    @property
    def is_scoring(self) -> bool:
        """True while log-probabilities of prompt tokens are missing; the first one has none."""
        return self.params.prompt_logprobs and self.num_scored < self.num_prompt - 1

    @property
    def may_draft(self) -> bool:
        """False where no model drafts: no features, no draft context."""
        return self.params.max_draft_tokens != 0 and not self.has_lost_context

    def allows(self, kind: str) -> bool:
        """True if a drafter of this kind may propose for it."""
        params = self.params
        is_chosen = params.drafters is None or kind in params.drafters
        return params.max_draft_tokens != 0 and is_chosen and kind not in self.lost_drafters

    def append(self, token_id: int) -> None:
        """Append one committed token and decide whether the sequence ends with it."""
        self.token_ids.append(token_id)
        self.output_counts[token_id] += 1
        stopped = token_id in self.stop_ids
        if self.scan_stop is not None:
            # Always told, a stop token too: the scanner also writes the text.
            stopped = self.scan_stop(token_id) or stopped
        if stopped:
            self.finish_reason = "stop"
        elif self.num_output >= self.params.max_tokens:
            self.finish_reason = "length"

    def fail(self, error: str) -> None:
        """End the sequence with an error."""
        self.finish_reason, self.error = "error", error

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 < self.num_prompt <= len(self.token_ids)
        assert 0 <= self.num_cached < len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step.

    `new_ids` are committed tokens that the caches lack: a chunk of the prompt, or the anchor alone.
    `num_draft_tokens` is the most candidates that may be verified behind them, and `max_depth`, if
    it is less, the longest path of them. A drafter that runs a model may propose no more than
    `num_model_tokens`, on paths of `max_model_depth`; a proposal of others may be longer.
    A row that does not reach the sequence's end gets no choice, and drafts nothing; nor does any
    other row of a prompt, or of what a preempted sequence computes again.
    """

    sequence: Sequence
    new_ids: list[int]
    num_draft_tokens: int
    is_prompt: bool = False
    max_depth: int = sys.maxsize
    num_model_tokens: int = sys.maxsize
    max_model_depth: int = sys.maxsize

    @property
    def num_slots(self) -> int:
        """Positions that candidates may stand at."""
        return min(self.max_depth, self.num_draft_tokens)

    @property
    def is_complete(self) -> bool:
        """True if the row reaches the sequence's end, so that a token is chosen."""
        return self.sequence.num_cached + len(self.new_ids) == len(self.sequence.token_ids)

    def limited(self, num_model_tokens: int, max_model_depth: int = sys.maxsize) -> "Row":
        """The same with so many candidates of a model at most, on paths of at most so many."""
        if not self.num_draft_tokens:
            return self
        max_model_depth = min(max_model_depth, self.max_model_depth)
        if (num_model_tokens, max_model_depth) == (self.num_model_tokens, self.max_model_depth):
            return self
        return self._with(self.num_draft_tokens, self.max_depth, num_model_tokens, max_model_depth)

    def for_model(self) -> "Row":
        """As a drafter that runs a model sees it."""
        return self._with(
            min(self.num_draft_tokens, self.num_model_tokens),
            min(self.max_depth, self.max_model_depth),
            self.num_model_tokens,
            self.max_model_depth,
        )

    def within(self, num_draft_tokens: int) -> "Row":
        """The same with room for no more than so many candidates."""
        if num_draft_tokens >= self.num_draft_tokens:
            return self
        return self._with(
            num_draft_tokens, self.max_depth, self.num_model_tokens, self.max_model_depth
        )

    def _with(
        self, num_draft_tokens: int, max_depth: int, num_model_tokens: int, max_model_depth: int
    ) -> "Row":
        # Several times a step for each row: `dataclasses.replace` takes four times as long.
        return Row(
            self.sequence,
            self.new_ids,
            num_draft_tokens,
            self.is_prompt,
            max_depth,
            num_model_tokens,
            max_model_depth,
        )


Batch = list[Row]
