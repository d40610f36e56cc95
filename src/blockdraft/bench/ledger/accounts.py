"""Accounts of drafted and plain decoding, side by side."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.bench.config import warm_up_of
from blockdraft.core.request import SamplingParams
from blockdraft.engine.completion import Generation
from blockdraft.llm import LLM
from blockdraft.measure.ledger import LEDGER_DEFINITIONS, Ledger, Margin
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.phases import PhaseTotals


@dataclass(frozen=True, slots=True)
class Account:
    """The ledger of one configuration; `plain` is that of plain decoding of the same requests."""

    title: str
    ledger: Ledger
    plain: Ledger | None = None

    @property
    def margin(self) -> Margin | None:
        """What drafting gained; None without plain decoding to compare with."""
        return None if self.plain is None else self.ledger.margin_over(self.plain)


def describe_accounts(accounts: Sequence[Account]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "definitions": LEDGER_DEFINITIONS,
        "accounts": {a.title: a.ledger.to_dict(a.plain) for a in accounts},
    }


@dataclass(frozen=True, slots=True)
class AccountedRun:
    """A request that was decoded with accounts of it: drafted, if it drafts, and plain.

    `identical`: both gave the same tokens.
    """

    accounts: list[Account]
    identical: bool


def decode_accounted(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> AccountedRun:
    """Decode a request, and plainly once more if it drafts; both are warmed up before.

    From now on no prompt is reused: the second pass would find what the first has computed.
    """
    compute_every_prompt(llm.engine)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    asked = replace(params, seed=seed)
    drafts = llm.drafter_folder is not None or llm.config.lookup or bool(params.prediction)
    drafts = drafts and params.max_draft_tokens != 0
    ways = [asked, replace(asked, num_draft_tokens=0)] if drafts else [asked]
    for way in ways:
        llm.generate(prompt_ids, warm_up_of(way))
    generations, ledgers = [], []
    with llm.measured() as meter:
        for way in ways:
            meter.take_totals()
            generations.append(llm.generate(prompt_ids, way))
            ledgers.append(meter.take())
    plain = Account("plain", ledgers[-1])
    drafted = [Account("drafted", ledgers[0], ledgers[-1])] if drafts else []
    return AccountedRun(
        accounts=[*drafted, plain],
        identical=_tokens(generations[0]) == _tokens(generations[-1]),
    )


def merge_totals(parts: Iterable[PhaseTotals]) -> PhaseTotals:
    """The totals of several runs as one."""
    merged = PhaseTotals()
    for part in parts:
        merged.merge(part)
    return merged


def _tokens(generation: Generation) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in generation.completions]
