"""The table of n-grams of a target's answers."""

import logging

import numpy as np

from blockdraft.data.store import TextStore
from blockdraft.speculate.drafters.ngram_table import NGramTable

logger = logging.getLogger(__name__)

MAX_COUNTED = 2**23
"""Tokens of answers that are counted; each takes some 270 bytes meanwhile."""


def count_ngrams(texts: TextStore) -> tuple[NGramTable, int]:
    """(the table, of how many of the answers): of all, or of some that are drawn from all.

    The first ones alone may be all of one kind, such as those of the first folder. The same answers
    are drawn each time.
    """
    num_tokens = int((texts.lengths - texts.prompt_lens).sum())
    if num_tokens > MAX_COUNTED:
        num = max(1, len(texts) * MAX_COUNTED // num_tokens)
        logger.info(
            "n-grams are counted in %d of %d answers, drawn at random: more would take too much "
            "memory",
            *(num, len(texts)),
        )
        drawn = np.random.default_rng(0).permutation(len(texts))[:num]
        texts = TextStore(texts.arrays, texts.chosen[np.sort(drawn)])
    answers = ((text.token_ids, len(text.prompt_ids)) for text in texts)
    return NGramTable.count(answers), len(texts)
