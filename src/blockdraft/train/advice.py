"""Warnings: a run is too small to learn anything, or its best drafter makes decoding slower."""

from collections.abc import Mapping
from typing import Any

LEAST_STEPS = 100
LEAST_ANSWERS = 200
LEAST_HELD_OUT = 8
"""Under these a drafter of random weights has learned next to nothing, or nobody can tell."""


def few_texts(num_train: int, num_held_out: int) -> tuple[str, ...]:
    """A warning for each of the numbers that is too low to learn from, or to judge by."""
    warnings = []
    if num_train < LEAST_ANSWERS:
        warnings.append(
            f"{num_train} answers are too few to train on: give at least "
            f"{LEAST_ANSWERS}, preferably thousands (blockdraft data)"
        )
    if num_held_out < LEAST_HELD_OUT:
        warnings.append(
            f"{num_held_out} held-out answers are too few to evaluate on: give more answers, or "
            f"raise held_out_share until at least {LEAST_HELD_OUT} are held out"
        )
    return tuple(warnings)


def few_steps(num_steps: int | None) -> tuple[str, ...]:
    """A warning if a run of so many steps learns nothing; None is not known."""
    if num_steps is None or num_steps >= LEAST_STEPS:
        return ()
    return (
        f"too few steps to learn anything ({num_steps}): raise max_minutes or max_steps, or "
        f"lower batch_sequences or num_anchors, until there are at least {LEAST_STEPS}",
    )


def below_plain(best: Mapping[str, Any]) -> str | None:
    """What to say of a run whose best drafter makes decoding slower; None if it does not.

    best: the row of its evaluation.
    """
    speedup = best["speedup"].get("all")
    if speedup is None or speedup >= 1:
        return None
    return (
        f"this drafter does not save time yet: with whole blocks, decoding runs at {speedup:.2f} "
        "of the speed of plain decoding; train it longer or on more answers, or with shorter "
        "blocks (block_size); in use its n-grams draft too, and on CPUs a small head drafts at "
        "lower cost (blockdraft train-head)"
    )
