"""Drafters that run no model, predictions for them, and what must be true of them."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from blockdraft.engine.engine import Engine
from blockdraft.speculate.drafters.lookup import LookupDrafter
from blockdraft.speculate.drafters.ngram import NGramDrafter
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.drafters.prediction import PredictionDrafter

VOCAB_SIZE = 97
"""For noise; the targets of tests have others, which changes only what is guessed."""


@cache
def small_table() -> NGramTable:
    """Of random texts of twelve tokens, so that many contexts are known and few guesses right."""
    draw = random.Random(7)
    texts = [([draw.randrange(12) for _ in range(60)], 4) for _ in range(40)]
    return NGramTable.count(texts)


def free_drafters() -> list[Any]:
    return [
        PredictionDrafter(),
        LookupDrafter(shared_tokens=200),
        NGramDrafter(small_table(), VOCAB_SIZE),
    ]


def changed(token_ids: Sequence[int], draw: random.Random) -> tuple[int, ...]:
    """A prediction of some output: most of it, with changes, gaps and something put in."""
    found: list[int] = []
    for token_id in token_ids:
        kind = draw.random()
        if kind < 0.85:
            found.append(token_id)
        elif kind < 0.95:
            found += [draw.randrange(12) for _ in range(draw.randint(1, 3))]
    return tuple(found)


def check_read(engine: Engine) -> None:
    """Lookup has read the committed tokens of each sequence, and nothing else."""
    for drafter in engine.proposer.free:
        if isinstance(drafter, LookupDrafter):
            for sequence, searched in drafter._searched.items():
                prompt, output = (text.automaton.token_ids for text in searched.own)
                found = [*prompt, *output]
                assert found == sequence.token_ids[: len(found)], "other tokens were read"
        if isinstance(drafter, PredictionDrafter):
            for prediction in drafter._predictions.values():
                follower = prediction.follower
                assert 0 <= follower.place <= len(follower.token_ids), "beyond the prediction"
