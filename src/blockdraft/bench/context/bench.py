"""Long prompts of real text, continued plainly and with drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from blockdraft.bench.config import ContextConfig
from blockdraft.bench.context.memory import KVBytes, kv_bytes_per_token
from blockdraft.bench.context.prose import Prose
from blockdraft.bench.decode import (
    ADAPTIVE,
    PLAIN,
    Decoder,
    check_drafts,
    fixed,
    in_turn,
)
from blockdraft.bench.journal import Journal
from blockdraft.bench.measures import (
    Rate,
    Spread,
    defined,
    rate_of,
    ratios,
    total_acceptance,
)
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.core.errors import ConfigError
from blockdraft.core.grouping import grouped
from blockdraft.llm import LLM
from blockdraft.text.outline import Outline
from blockdraft.text.tokenizer import Tokenizer

CONTEXT_DEFINITIONS = {
    "requested_len": "requested prompt tokens",
    "prompt_len": "prompt tokens: fewer than requested if max_tokens would not fit",
    **defined("tokens_per_second", "decode_tokens_per_second"),
    "decode_speedup": "drafted decode_tokens_per_second divided by plain, for the same passage: "
    "median, lowest, highest over the passages",
    "total_speedup": "drafted tokens_per_second divided by plain, all passages together",
    "first_token_seconds": "TTFT: from the request to its first token, median over the passages",
    "total_speedup_spread": "the same, passage by passage: median, lowest, highest",
    **defined("acceptance_length", "mean_depth", "num_passes_of_depth", "mean_drafted"),
    "kv_bytes": "KV cache of prompt and output: layers x key-value heads x head size x 2 x bytes "
    "per number x tokens, with the scales of int8, without the unused part of pages",
    "num_identical": "passages whose drafted tokens equal the plain ones",
}


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """One length over all passages; see CONTEXT_DEFINITIONS."""

    requested_len: int
    prompt_len: int
    num_passages: int
    plain: Rate
    drafted: Rate
    decode_speedup: Spread
    total_speedup: float
    total_speedup_spread: Spread
    plain_first_token_seconds: float
    drafted_first_token_seconds: float
    acceptance_length: float
    acceptance_rate: float
    mean_depth: float
    num_passes_of_depth: dict[int, int]
    mean_drafted: float
    kv_bytes: KVBytes
    num_identical: int


@dataclass(frozen=True, slots=True)
class ContextMeasurement:
    """One passage, by its number from 0, at one length, decoded both ways."""

    requested_len: int
    prompt_len: int
    passage: int
    plain: TimedOutput
    drafted: TimedOutput

    @property
    def identical(self) -> bool:
        """True if drafted and plain decoding gave the same tokens."""
        return self.plain.token_ids == self.drafted.token_ids


class ContextJournal(Journal[ContextMeasurement]):
    """By the tokens asked for, those of the prompt, which depend on the memory, and passage."""

    kinds = (ContextMeasurement,)


def measure_context(
    llm: LLM,
    prose: Prose,
    config: ContextConfig,
    on_progress: Callable[[ContextMeasurement], None] = lambda measurement: None,
    journal: ContextJournal | None = None,
) -> list[ContextMeasurement]:
    """Measure every length, both sides in turns, after a warm-up of both at each length.

    What the journal holds is not measured again.

    Raises:
        ConfigError: there is no drafter, the text is too short, or max_tokens leaves no room for a
            prompt; known before anything is measured.
    """
    check_drafts(llm)
    journal = ContextJournal() if journal is None else journal
    target, decoder = llm.engine.target, Decoder(llm)
    lengths = fitting_lengths(config, min(target.max_context, target.memory.num_tokens))
    passages = cut_passages(llm.tokenizer, prose, config.passages, max(lengths.values()))
    most = config.num_draft_tokens
    ways = [PLAIN, ADAPTIVE if most is None else fixed(most)]
    measurements: list[ContextMeasurement] = []
    for wanted, length in lengths.items():
        places = [(wanted, length, number) for number in range(len(passages))]
        for way in ways if any(place not in journal.done for place in places) else ():
            decoder.warm_up([passages[0][:length]], config.params, way)
        for place, passage in zip(places, passages, strict=True):
            measured = journal.done.get(place)
            if measured is None:
                samples = {
                    way: decoder.run([passage[:length]], config.params, way).samples[0]
                    for way in in_turn(ways, turn=len(measurements))
                }
                measured = ContextMeasurement(*place, *(samples[way] for way in ways))
                journal.add(place, measured)
            measurements.append(measured)
            on_progress(measured)
    return measurements


def check_text(outline: Outline, prose: Prose, config: ContextConfig) -> None:
    """Refuse what `measure_context` would refuse, as far as it is known before weights are read.

    Raises:
        ConfigError: the text is too short, or max_tokens leaves no room for a prompt.
    """
    longest = max(config.lengths)
    if outline.max_context is not None:
        longest = max(fitting_lengths(config, outline.max_context).values())
    cut_passages(outline.tokenizer, prose, config.passages, longest)


def fitting_lengths(config: ContextConfig, room: int) -> dict[int, int]:
    """Of each length that was asked for, the tokens of the prompt that fit with the output.

    Raises:
        ConfigError: max_tokens leaves no room for a prompt.
    """
    most = room - config.max_tokens
    if most < 1:
        raise ConfigError(
            f"max_tokens {config.max_tokens} leaves no room for a prompt in the context of "
            f"{room} tokens; give fewer"
        )
    return {wanted: min(wanted, most) for wanted in config.lengths}


def cut_passages(tokenizer: Tokenizer, prose: Prose, count: int, length: int) -> list[list[int]]:
    """Pieces of `length` tokens, begun at lines that are evenly spread over the text.

    Raises:
        ConfigError: the text is too short.
    """
    # The backend has no opinion on how long a text may be; the tokenizer would warn.
    backend = tokenizer.backend
    starts = [_line_start(prose.text, i * len(prose.text) // count) for i in range(count)]
    passages = [backend.encode(prose.text[start:]).ids for start in starts]
    if (shortest := min(map(len, passages))) < length:
        raise ConfigError(
            f"the text of {prose.source} is too short for {count} passages of {length} tokens: "
            f"the last one has {shortest}; give a longer --text, or fewer --passages"
        )
    return [ids[:length] for ids in passages]


def _line_start(text: str, position: int) -> int:
    """The start of the line that holds a position."""
    return text.rfind("\n", 0, position) + 1


def context_figures(llm: LLM, measurements: Sequence[ContextMeasurement]) -> list[ContextFigures]:
    """Figures of each length, in the order of measurement."""
    groups = grouped(measurements, lambda measurement: measurement.requested_len)
    per_token = kv_bytes_per_token(llm)
    return [_figures(group, per_token) for group in groups.values()]


def _figures(group: Sequence[ContextMeasurement], per_token: KVBytes) -> ContextFigures:
    acceptance = total_acceptance([m.drafted for m in group])
    plain, drafted = rate_of([m.plain for m in group]), rate_of([m.drafted for m in group])
    # The last token is never cached.
    num_cached = group[0].prompt_len + max(len(m.plain.token_ids) for m in group) - 1
    return ContextFigures(
        requested_len=group[0].requested_len,
        prompt_len=group[0].prompt_len,
        num_passages=len(group),
        plain=plain,
        drafted=drafted,
        decode_speedup=ratios(
            [m.drafted.decode_tokens_per_second for m in group],
            [m.plain.decode_tokens_per_second for m in group],
        ),
        total_speedup=drafted.tokens_per_second / plain.tokens_per_second,
        total_speedup_spread=ratios(
            [m.drafted.tokens_per_second for m in group],
            [m.plain.tokens_per_second for m in group],
        ),
        plain_first_token_seconds=median(m.plain.first_token_seconds for m in group),
        drafted_first_token_seconds=median(m.drafted.first_token_seconds for m in group),
        acceptance_length=acceptance.acceptance_length,
        acceptance_rate=acceptance.acceptance_rate,
        mean_depth=acceptance.mean_depth,
        num_passes_of_depth=acceptance.num_passes_of_depth,
        mean_drafted=acceptance.mean_drafted,
        kv_bytes=KVBytes(per_token.target * num_cached, per_token.draft * num_cached),
        num_identical=sum(m.identical for m in group),
    )
