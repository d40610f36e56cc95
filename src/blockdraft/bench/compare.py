"""One prompt, decoded plainly and with drafts, timed side by side."""

import secrets
from dataclasses import dataclass, replace

from blockdraft.bench.config import warm_up_of
from blockdraft.bench.measures import Speedup, speedup_of
from blockdraft.bench.timed_output import timed_output
from blockdraft.core.request import SamplingParams
from blockdraft.engine.completion import Completion
from blockdraft.llm import LLM


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same request, both ways."""

    plain: Completion
    drafted: Completion

    @property
    def identical(self) -> bool:
        """True if both gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids

    @property
    def speedup(self) -> Speedup | None:
        """From the first token on; None if there are no more."""
        return self._speedup(decode_only=True)

    @property
    def total_speedup(self) -> Speedup | None:
        """From the request on, prefill included, as `bench speed` has it."""
        return self._speedup(decode_only=False)

    def _speedup(self, *, decode_only: bool) -> Speedup | None:
        samples = [timed_output(self.drafted)], [timed_output(self.plain)]
        return speedup_of(*samples, "plain", decode_only=decode_only)


def compare(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> Comparison:
    """Warm up both ways, then time both. `params` ask for one sample and for drafting."""
    seed = secrets.randbits(64) if params.seed is None else params.seed
    drafted = replace(params, seed=seed)
    plain = replace(drafted, num_draft_tokens=0)
    for way in (plain, drafted):
        llm.generate(prompt_ids, warm_up_of(way))
    return Comparison(
        plain=llm.generate(prompt_ids, plain).completions[0],
        drafted=llm.generate(prompt_ids, drafted).completions[0],
    )
