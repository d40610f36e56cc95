"""Task scores: whether the number or the program that an answer gives is right.

As GSM8K is scored: the number in the last box counts, or without a box the last number of the text.
As HumanEval and MBPP are: the program must pass the tests of its prompt. Loads no model library.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from blockdraft.bench.scores.programs import program_of
from blockdraft.bench.scores.sandbox import SECONDS, check_sandbox, passes
from blockdraft.core.errors import ConfigError
from blockdraft.core.grouping import grouped

if TYPE_CHECKING:
    from blockdraft.bench.speed.bench import Measurement
    from blockdraft.bench.workload import BenchPrompt

SCORE_DEFINITIONS = {
    "scores": "by set: num_scored, the prompts that have tests or whose reference is a number; "
    "num_right, by configuration, the outputs whose program passes the tests, without network and "
    f"within {SECONDS} seconds of processor time, or whose number in the last \\boxed{{}}, or "
    "otherwise the last number of the text, is the reference; num_cut, plain outputs of these "
    "prompts that max_tokens cut off, which seldom contain their answer",
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
    """Refuse to score what has neither numbers nor tests.

    Raises:
        ConfigError: no prompt has one, nor tests, or programs cannot be kept apart here.
    """
    if not any(map(_is_scored, prompts)):
        raise ConfigError(
            "--score compares numbers and runs tests, and no prompt has a test or a number as its "
            "reference; leave it out, or add --prompts gsm8k, or rows with reference or test"
        )
    if any(prompt.test is not None and not prompt.later for prompt in prompts):
        check_sandbox()


def _is_scored(prompt: "BenchPrompt") -> bool:
    """A conversation would need a reference for each turn, which nobody scores here."""
    has_number = right_number(prompt.reference) is not None
    return not prompt.later and (prompt.test is not None or has_number)


def is_right(prompt: "BenchPrompt", answer: str) -> bool:
    """Whether an answer to a prompt that is scored is right; runs its program, if it has tests."""
    if prompt.test is None:
        return given_number(answer) == right_number(prompt.reference)
    program = program_of(prompt.text, answer, prompt.test, prompt.entry_point)
    return program is not None and passes(program)


def scores_of(
    measurements: Sequence["Measurement"], decode: Callable[[Sequence[int]], str], max_tokens: int
) -> dict[str, Score]:
    """Of every set that has numbers or tests. `decode` gives the text of tokens."""
    scored = [measurement for measurement in measurements if _is_scored(measurement.prompt)]
    groups = grouped(scored, lambda measurement: measurement.prompt.category)
    return {name: _score(group, decode, max_tokens) for name, group in groups.items()}


def _score(
    group: Sequence["Measurement"], decode: Callable[[Sequence[int]], str], max_tokens: int
) -> Score:
    num_right: dict[str, int] = {}
    for measurement in group:
        for way, token_ids in measurement.outputs.items():
            right = is_right(measurement.prompt, decode(token_ids))
            num_right[way] = num_right.get(way, 0) + right
    num_cut = sum(len(measurement.plain.token_ids) == max_tokens for measurement in group)
    return Score(len(group), num_cut, num_right)


def score_lines(scores: Mapping[str, Score]) -> list[str]:
    """A line for each set."""
    lines = []
    for name, score in scores.items():
        ways = ", ".join(f"{way} {right}" for way, right in score.num_right.items())
        cut = f" ({score.num_cut} cut off by --max-tokens)" if score.num_cut else ""
        lines.append(f"{name}: correct answers of {score.num_scored}{cut}: {ways}")
    return lines
