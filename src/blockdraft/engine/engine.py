"""The loop. Knows token ids only."""

import itertools
import secrets
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from time import perf_counter

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.engine.scheduler import Scheduler
from blockdraft.engine.stats import AcceptanceStats
from blockdraft.models.target import Target
from blockdraft.speculate.commit import StepOutput, commit
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.verify import verify

_DEFAULTS = LLMConfig()


_KEYS = itertools.count()
"""Keys are unique in the process, so that engines can share a target or a drafter."""


@dataclass(slots=True)
class Progress:
    """What the engine knows of one sequence beside its tokens. Times are perf_counter seconds."""

    sequence: Sequence
    added_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)


class Engine:
    """Advances sequences step by step; a sequence is addressed by the key that `add` returns."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        max_running: int = _DEFAULTS.max_running,
        prefill_chunk: int = _DEFAULTS.prefill_chunk,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.scheduler = Scheduler(
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            max_draft_tokens=drafter.max_draft_tokens,
        )
        self.progress: dict[int, Progress] = {}

    def add(
        self,
        prompt_ids: Ids[int],
        params: SamplingParams,
        *,
        eos_ids: frozenset[int] = frozenset(),
        sample_index: int = 0,
        seed: int | None = None,
        scan_stop: Callable[[int], bool] | None = None,
    ) -> int:
        """Queue one sample of a request and return its key.

        Without a seed, here or in `params`, 64 bits are drawn from the system.

        Raises:
            RequestError: an empty prompt, or a token id outside the vocabulary.
            ContextTooLong: prompt and max_tokens do not fit the target's context.
        """
        self.check_prompt(prompt_ids, params)
        if seed is None:
            seed = secrets.randbits(64) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids)
        sequence = Sequence(
            key=next(_KEYS),
            params=params,
            seed=seed,
            sample_index=sample_index,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | eos_ids,
            token_ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            scan_stop=scan_stop,
        )
        self.progress[sequence.key] = Progress(sequence, perf_counter())
        self.scheduler.add(sequence)
        return sequence.key

    def check_prompt(self, prompt_ids: Ids[int], params: SamplingParams) -> None:
        """Raise what `add` would raise."""
        if not prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        named = [*prompt_ids, *params.stop_token_ids, *params.logit_bias]
        wrong = [i for i in named if not 0 <= i < self.target.vocab_size]
        if wrong:
            raise RequestError(
                f"token id {wrong[0]} is outside the vocabulary; give ids from 0 to "
                f"{self.target.vocab_size - 1}"
            )
        if len(prompt_ids) + params.max_tokens > self.target.max_context:
            raise ContextTooLong(
                f"prompt of {len(prompt_ids)} tokens and max_tokens {params.max_tokens} exceed "
                f"the context of {self.target.max_context} tokens; shorten one of them"
            )

    @property
    def has_work(self) -> bool:
        """True while a sequence is unfinished."""
        return self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """Advance every scheduled sequence: by at least one token, or by a chunk of its prompt.

        If the drafter or the target fails, out of memory or interrupted, no sequence has moved,
        and the step may be tried again.
        """
        batch = self.scheduler.schedule()
        try:
            block = self.drafter.draft(batch)
            output = self.target.forward(batch, block)
            verdicts = verify(block, output.logits, batch)
        except BaseException:
            for row in batch:
                self.target.truncate(row.sequence.key, row.sequence.num_cached)
            raise
        was_prefilling = [row.sequence.is_prefilling for row in batch]
        outputs = commit(batch, block, verdicts, output.features, self.target, self.drafter)
        self._record(outputs, was_prefilling)
        return outputs

    def _record(self, outputs: list[StepOutput], was_prefilling: list[bool]) -> None:
        now = perf_counter()
        for output, prefilled in zip(outputs, was_prefilling, strict=True):
            progress = self.progress[output.key]
            if not prefilled:
                progress.acceptance.record(
                    len(output.token_ids), output.num_drafted, output.num_accepted
                )
            elif output.token_ids:
                progress.first_token_at = now
            if output.finish_reason is not None:
                progress.finished_at = now

    def take(self, key: int) -> Progress:
        """Hand over a sequence's progress and forget the sequence, ended or not."""
        progress = self.progress.pop(key)
        self.scheduler.remove(key)
        self.target.close(key)
        self.drafter.close(key)
        return progress
