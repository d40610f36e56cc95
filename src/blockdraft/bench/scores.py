"""Task scores: whether the number that an answer gives is the right one. Loads no model library.

As GSM8K is scored: the number in the last box counts, or without a box the last number of the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from blockdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from blockdraft.bench.speed import Measurement
    from blockdraft.bench.workload import BenchPrompt

SCORE_DEFINITIONS = {
    "scores": "by set: num_scored, the prompts whose reference is a number; num_right, by way, the "
    "outputs whose number in the last \\boxed{}, or without one the last number of the text, is "
    "that; num_cut, plain outputs of them that max_tokens cut off, which seldom hold their answer",
}

_NUMBER = re.compile(r"(?:(?<![\w)])-)?\d[\d,]*(?:\.\d+)?")
_BOX = "\\boxed{"
_BEFORE_ANSWER = "####"
"""Of a reference of GSM8K."""


@dataclass(frozen=True, slots=True)
class Score:
    """Of one set; see SCORE_DEFINITIONS."""

    num_scored: int
    num_cut: int
    num_right: Mapping[str, int]


def right_number(reference: str | None) -> Decimal | None:
    """The number that is asked for; None if the reference is none."""
    if reference is None:
        return None
    answer = reference.rpartition(_BEFORE_ANSWER)[2].strip()
    return _value(answer) if _NUMBER.fullmatch(answer) else None


def given_number(text: str) -> Decimal | None:
    """The number that an answer gives; None if there is none, or something else in its box."""
    _, box, inside = text.rpartition(_BOX)
    found = _NUMBER.findall(_up_to_end(inside) if box else text)
    return _value(found[-1]) if found else None


def _up_to_end(inside: str) -> str:
    """What stands before the brace that closes the box; all if none does."""
    depth = 1
    for place, letter in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return inside[:place]
    return inside


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


def check_scored(prompts: Sequence["BenchPrompt"]) -> None:
    """Refuse to score what has no numbers.

    Raises:
        ConfigError: no prompt has one.
    """
    if all(_right_number_of(prompt) is None for prompt in prompts):
        raise ConfigError(
            "--score compares numbers, and no prompt has one as its reference; leave it out, or "
            "add --prompts gsm8k, or rows with reference"
        )


def _right_number_of(prompt: "BenchPrompt") -> Decimal | None:
    """Of a prompt; a conversation has a reference for each turn, which nobody scores here."""
    return None if prompt.later else right_number(prompt.reference)


def scores_of(
    measurements: Sequence["Measurement"], decode: Callable[[Sequence[int]], str], max_tokens: int
) -> dict[str, Score]:
    """Of every set that has numbers. `decode` gives the text of tokens."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        if _right_number_of(measurement.prompt) is not None:
            groups.setdefault(measurement.prompt.category, []).append(measurement)
    return {name: _score(group, decode, max_tokens) for name, group in groups.items()}


def _score(
    group: Sequence["Measurement"], decode: Callable[[Sequence[int]], str], max_tokens: int
) -> Score:
    num_right: dict[str, int] = {}
    for measurement in group:
        right = _right_number_of(measurement.prompt)
        for way, token_ids in measurement.outputs.items():
            num_right[way] = num_right.get(way, 0) + (given_number(decode(token_ids)) == right)
    num_cut = sum(len(measurement.plain.token_ids) == max_tokens for measurement in group)
    return Score(len(group), num_cut, num_right)


def score_lines(scores: Mapping[str, Score]) -> list[str]:
    """A line for each set."""
    lines = []
    for name, score in scores.items():
        ways = ", ".join(f"{way} {right}" for way, right in score.num_right.items())
        cut = f" ({score.num_cut} cut off by --max-tokens)" if score.num_cut else ""
        lines.append(f"{name}: right answers of {score.num_scored}{cut}: {ways}")
    return lines
