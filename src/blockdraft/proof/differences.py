"""Where an output differs from the one that it must equal."""

from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.proof.cases import Case
from blockdraft.proof.ways import Output, Sample

DifferenceVerdict = Literal["difference", "near-tie", "violation", "error"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a sample.

    what: the field that differs, at `index` where it is a row of things. `verdict` is "difference"
    in exact mode, where none is allowed; otherwise see `proof.forced`, which also gives `margin`,
    in logits. A request that ended with an error is one too.
    """

    case_id: str
    sample: int
    what: str
    index: int | None
    found: Any
    expected: Any
    verdict: DifferenceVerdict = "difference"
    margin: float | None = None

    @property
    def is_failure(self) -> bool:
        """False for a near-tie."""
        return self.verdict != "near-tie"


def first_differences(
    case: Case, found: Output, expected: Output, *, bits: bool
) -> list[Difference]:
    """The first difference of each sample of a case, of those that differ.

    `bits`: log-probabilities count too, to the last bit.
    """
    differences = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = one.error if other.error is None else other.error
        if error is not None:
            differences.append(Difference(case.id, number, "error", None, error, None, "error"))
        elif place := _first_place(one, other, bits):
            differences.append(Difference(case.id, number, *place))
    return differences


def _first_place(found: Sample, expected: Sample, bits: bool) -> tuple[Any, ...] | None:
    """(what, index, found, expected) of the first field that differs."""
    scores = ("logprobs", "prompt_logprobs") if bits else ()
    for what in ("token_ids", *scores):
        one, other = getattr(found, what), getattr(expected, what)
        if one != other:
            index = next(
                (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
                min(len(one), len(other)),
            )
            return what, index, _at(one, index), _at(other, index)
    for what in ("text", "finish_reason"):
        one, other = getattr(found, what), getattr(expected, what)
        if one != other:
            return what, None, one, other
    return None


def _at(row: tuple[Any, ...], index: int) -> Any:
    """What stands there, None behind the end; plain for JSON."""
    if index >= len(row):
        return None
    entry = row[index]
    return entry if isinstance(entry, int) else entry.logprob
