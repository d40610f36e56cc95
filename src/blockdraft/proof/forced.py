"""Teacher forcing: what the target says of given tokens, run in forwards of a given length.

With `--exact off` outputs may differ because rows are rounded differently in other company. A first
difference proves nothing then, and neither does a small one: behind it the texts part. So the
drafted tokens are put to the target one by one, and each must be its choice up to the noise that
shapes alone make on this pair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from blockdraft.core.plan import ForwardPlan
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Tokens
from blockdraft.engine.engine import Engine
from blockdraft.proof.cases import Case
from blockdraft.proof.differences import Difference, DifferenceVerdict, first_differences
from blockdraft.proof.lone import lone_sequence
from blockdraft.proof.ways import Output, Sample
from blockdraft.speculate.sampler.margin import margin_of

NUM_LEADING = 16
"""Tokens whose margins to each other are looked at: those that could be chosen."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the margin between two leading tokens moves when only the shape of forwards changes.

    In logits: the largest and the mean over `num_positions` positions, run in forwards of `shapes`
    rows.
    """

    largest: float
    mean: float
    num_positions: int
    shapes: tuple[int, ...]


def forced_logits(
    engine: Engine, prompt_ids: Sequence[int], output_ids: Sequence[int], length: int
) -> Iterator[Tensor]:
    """The logits [V] that choose each output token, after the prompt and the tokens before it.

    The prompt goes in at once, then `length` tokens a forward. Nothing may be running.

    Raises:
        ConfigError: the K/V memory is too small.
    """
    target = engine.target
    with lone_sequence(engine, prompt_ids, len(output_ids)) as sequence:
        yield from target.forward(_plan(sequence, list(prompt_ids))).logits
        sequence.num_cached = len(prompt_ids)
        # The last token of all is chosen, never run.
        num_run = len(output_ids) - 1
        for first in range(0, num_run, length):
            own = list(output_ids[first : min(first + length, num_run)])
            sequence.token_ids = [*prompt_ids, *output_ids[: first + 1]]
            yield from target.forward(_plan(sequence, own[:1], own[1:])).logits
            sequence.num_cached += len(own)


def _plan(sequence: Tokens, new_ids: list[int], draft: Sequence[int] = ()) -> ForwardPlan:
    return ForwardPlan.of_chains([Row(sequence, new_ids, len(draft))], [draft])


def measure_noise(engine: Engine, cases: Sequence[tuple[Case, Output]]) -> Noise:
    """Run the first sample of each case in different shapes, and compare the margins."""
    shapes = (1, 1 + engine.drafter.max_nodes, 16)
    moved = []
    for case, output in cases:
        runs = [
            forced_logits(engine, case.prompt_ids, output[0].token_ids, length) for length in shapes
        ]
        for alone, *others in zip(*runs, strict=True):
            leading = alone.float().topk(min(NUM_LEADING, alone.shape[0])).indices
            moves = [(other.float() - alone.float())[leading] for other in others]
            moved.append(max(float(move.max() - move.min()) for move in moves))
    mean = sum(moved) / len(moved) if moved else 0.0
    return Noise(max(moved, default=0.0), mean, len(moved), shapes)


def judged_differences(
    engine: Engine, case: Case, found: Output, plain: Output, noise: Noise | None
) -> list[Difference]:
    """The first difference of each sample; without noise, in exact mode, none is allowed."""
    differences = first_differences(case, found, plain, bits=noise is None)
    if noise is None:
        return differences
    return [classify(engine, case, one, found, noise) for one in differences]


def classify(
    engine: Engine, case: Case, difference: Difference, drafted: Output, noise: Noise
) -> Difference:
    """Say of a first difference whether the drafted tokens, all of them, are the target's choices.

    A near-tie if each needs no more help than the noise to be chosen, otherwise a violation. Noise
    explains no text or end that is another after the same tokens, and no end that these tokens do
    not give.
    """
    if difference.verdict == "error":
        return difference
    if difference.what != "token_ids" or None in (difference.found, difference.expected):
        return replace(difference, verdict="violation")
    sample = drafted[difference.sample]
    margin = max_margin(engine, case, difference.sample, sample.token_ids)
    is_tied = margin <= noise.largest and _ends_rightly(case, difference.sample, sample)
    verdict: DifferenceVerdict = "near-tie" if is_tied else "violation"
    return replace(difference, verdict=verdict, margin=margin)


def max_margin(engine: Engine, case: Case, sample_index: int, output_ids: Sequence[int]) -> float:
    """The largest margin, in logits, by which a token of an output is not the target's choice."""
    sequence = _sequence(case, sample_index)
    largest = 0.0
    rows = forced_logits(engine, case.prompt_ids, output_ids, 1)
    for logits, token_id in zip(rows, output_ids, strict=True):
        largest = max(largest, margin_of(logits, sequence, token_id))
        sequence.append(token_id)
    return largest


def _ends_rightly(case: Case, sample_index: int, sample: Sample) -> bool:
    """True if the output ends where its tokens end it. Stop strings may end it anywhere."""
    sequence = _sequence(case, sample_index)
    for token_id in sample.token_ids:
        if sequence.finish_reason is not None:
            return False
        sequence.append(token_id)
    by_text = sample.finish_reason == "stop" and bool(case.params.stop)
    return by_text or sample.finish_reason == sequence.finish_reason


def _sequence(case: Case, sample_index: int) -> Tokens:
    """A sample of a case before its first token."""
    assert case.params.seed is not None
    prompt = list(case.prompt_ids)
    return Tokens(
        *(0, case.params, case.params.seed, sample_index, case.stop_ids, prompt, len(prompt)),
        constraint=case.constrain(),
    )
