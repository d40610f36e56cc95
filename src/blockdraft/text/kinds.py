"""What kind of text a token sequence is."""

from collections.abc import Sequence

NGRAM = 8
LOOP_SHARE = 0.7


def distinct_ngram_share(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """Distinct n-grams over all n-grams; 1.0 for a sequence too short to hold two."""
    total = len(token_ids) - n + 1
    if total < 2:
        return 1.0
    return len({tuple(token_ids[i : i + n]) for i in range(total)}) / total


def loops(token_ids: Sequence[int]) -> bool:
    """True if the text repeats itself: under 70 % of its 8-grams are distinct.

    Repetition is easy to draft, so figures are reported with and without such outputs.
    """
    return distinct_ngram_share(token_ids) < LOOP_SHARE
