"""What a run says of other engines."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from blockdraft.bench.measures import Percentiles, Rate, Speedup, measures_of, rate_of, speedup_of
from blockdraft.bench.outside.engines import own_plain
from blockdraft.bench.outside.interface import Failure, OutsideOutput
from blockdraft.bench.outside.others import OtherEngine
from blockdraft.bench.tables import empty_table, speedup_cell

if TYPE_CHECKING:
    from blockdraft.bench.speed.bench import Measurement

OUTSIDE_DEFINITIONS = {
    "outside.rate": "tokens_per_second and decode_tokens_per_second over the prompts that it "
    "answered",
    "outside.over_plain": "its tokens_per_second divided by that of our plain decoding, for the "
    "prompts that it answered, with its interval",
    "outside.drafted_over": "our drafted tokens_per_second divided by its own, for the prompts "
    "that it answered, with its interval",
    "outside.num_equal": "outputs with exactly the tokens of our plain decoding; another engine "
    "sums in another order, so a near-tie may be decided differently",
    "outside.as_its_plain": "outputs with exactly the tokens of the same engine without drafting, "
    "and how many were compared; none if it does not draft, or did not run without drafting too",
    "outside.tokens_per_pass": "its output tokens divided by its target passes, prefill included; "
    "none if it does not report them",
    "outside.failures": "how many prompts it gave no output for, by reason; none of its figures "
    "includes them",
    "outside.reason": "why no more prompts were sent to it, if so",
}


@dataclass(frozen=True, slots=True)
class AsItsPlain:
    """See OUTSIDE_DEFINITIONS."""

    num_equal: int
    num_compared: int


@dataclass(frozen=True, slots=True)
class OutsideFigures:
    """One engine over all prompts; see OUTSIDE_DEFINITIONS. None where it answered nothing."""

    name: str
    versions: Mapping[str, str]
    reason: str | None
    num_prompts: int
    num_answered: int
    num_equal: int
    as_its_plain: AsItsPlain | None
    failures: Mapping[str, int]
    rate: Rate | None
    first_token_seconds: Percentiles | None
    over_plain: Speedup | None
    drafted_over: Speedup | None
    tokens_per_pass: float | None


def outside_figures(other: OtherEngine, measurements: Sequence["Measurement"]) -> OutsideFigures:
    """Of one engine, over at least one measurement."""
    answered: list[tuple[Measurement, OutsideOutput]] = []
    failures: Counter[str] = Counter()
    for measurement in measurements:
        found = measurement.outside[other.name]
        if isinstance(found, Failure):
            failures[found.reason] += 1
        else:
            answered.append((measurement, found))
    theirs = [output.timed for _, output in answered]
    plain = [measurement.plain for measurement, _ in answered]
    drafted = [measurement.drafted for measurement, _ in answered]
    conversations = [measurement.conversation for measurement, _ in answered]
    told = [output for _, output in answered if output.num_passes]
    passes = sum(output.num_passes or 0 for output in told)
    return OutsideFigures(
        name=other.name,
        versions=other.versions,
        reason=other.reason,
        num_prompts=len(measurements),
        num_answered=len(answered),
        num_equal=sum(a.token_ids == b.token_ids for a, b in zip(theirs, plain, strict=True)),
        as_its_plain=_as_its_plain(other.name, answered),
        failures=dict(failures),
        rate=rate_of(theirs) if theirs else None,
        first_token_seconds=measures_of(theirs).first_token_seconds if theirs else None,
        over_plain=speedup_of(theirs, plain, "plain", conversations) if theirs else None,
        drafted_over=speedup_of(drafted, theirs, other.name, conversations) if theirs else None,
        tokens_per_pass=sum(len(o.timed.token_ids) for o in told) / passes if told else None,
    )


def _as_its_plain(
    name: str, answered: Sequence[tuple["Measurement", OutsideOutput]]
) -> AsItsPlain | None:
    plain = own_plain(name)
    pairs = [(measurement.outside.get(plain or ""), output) for measurement, output in answered]
    same = [
        found.timed.token_ids == output.timed.token_ids
        for found, output in pairs
        if isinstance(found, OutsideOutput)
    ]
    return AsItsPlain(sum(same), len(same)) if same else None


def outside_outputs(measurement: "Measurement") -> dict[str, Any]:
    """The outputs of one prompt, or why there are none, for JSON."""
    return {
        name: asdict(found)
        if isinstance(found, Failure)
        else {
            "token_ids": found.timed.token_ids,
            "total_seconds": found.timed.total_seconds,
            "decode_seconds": found.timed.decode_seconds,
            "num_passes": found.num_passes,
            "first_difference": _first_difference(
                found.timed.token_ids, measurement.plain.token_ids
            ),
        }
        for name, found in measurement.outside.items()
    }


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place from which on two outputs differ, from 0; None if they are equal."""
    if one == other:
        return None
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


def outside_table(figures: Sequence[OutsideFigures]) -> Table:
    """A row for each engine; fits 80 columns."""
    view = empty_table(
        "other engines",
        *("", "tok/s", "over our\nplain", "our drafted\nover it"),
        *("tokens\na pass", "as our\nplain", "as its\nplain", "no\nanswer"),
    )
    for row in figures:
        num_failed, own = row.num_prompts - row.num_answered, row.as_its_plain
        view.add_row(
            row.name,
            "-" if row.rate is None else f"{row.rate.tokens_per_second:.1f}",
            speedup_cell(row.over_plain) or "-",
            speedup_cell(row.drafted_over) or "-",
            "-" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}",
            f"{row.num_equal}/{row.num_answered}",
            "-" if own is None else f"{own.num_equal}/{own.num_compared}",
            str(num_failed),
        )
    return view


def failure_lines(figures: Sequence[OutsideFigures]) -> list[str]:
    """Why prompts have no answer, a line for each reason."""
    return [
        f"{row.name}, {number} of {row.num_prompts} prompts: {reason}"
        for row in figures
        for reason, number in row.failures.items()
    ]
