"""Beside the proof: how far stock transformers agrees. Its kernels round otherwise.

Equality with `model.generate` is no part of the promise (docs/proof.md).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence as Tokens
from blockdraft.llm import LLM
from blockdraft.models.target.stock import StockModel
from blockdraft.proof.cases import Case
from blockdraft.proof.forced import forced_logits
from blockdraft.proof.ways import PLAIN, run
from blockdraft.speculate.sampler.margin import margin_of


@dataclass(frozen=True, slots=True)
class Agreement:
    """One prompt, decoded greedily by both.

    first_difference: the first output token that differs, None if none does. margin: by how much
    our token led theirs there, in our logits.
    """

    prompt_id: str
    num_tokens: int
    first_difference: int | None = None
    margin: float | None = None


def greedy_cases(cases: Sequence[Case], max_tokens: int, most: int) -> list[Case]:
    """The first cases' prompts, each once, to be decoded greedily."""
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    by_prompt = {case.prompt.id: case for case in reversed(cases)}
    firsts = list(reversed(by_prompt.values()))[:most]
    return [Case(case.prompt, case.prompt_ids, "greedy", params, case.stop_ids) for case in firsts]


def compare_with_stock(
    llm: LLM, cases: Sequence[Case], done: Callable[[Case], None]
) -> Iterator[Agreement]:
    """Decode greedy cases with our plain decoding and with transformers, loaded beside it."""
    config = llm.config
    stock = StockModel(
        *(llm.folder, llm.dtype, llm.device, llm.tokenizer.eos_ids),
        *(config.quantize, config.device_map),
        trust_remote_code=config.trust_remote_code,
    )
    for case in cases:
        ours = run(llm, [case], PLAIN)[case][0].token_ids
        theirs = stock.generate(case.prompt_ids, case.params)
        yield _agreement(llm, case, ours, theirs)
        done(case)


def _agreement(llm: LLM, case: Case, ours: tuple[int, ...], theirs: tuple[int, ...]) -> Agreement:
    pairs = list(zip(ours, theirs, strict=False))
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        return Agreement(case.prompt.id, len(pairs))
    *_, logits = forced_logits(llm.engine, case.prompt_ids, ours[: first + 1], 1)
    prompt = [*case.prompt_ids, *ours[:first]]
    sequence = Tokens(0, case.params, 0, 0, frozenset(), prompt, len(prompt))
    return Agreement(case.prompt.id, len(pairs), first, margin_of(logits, sequence, theirs[first]))
