"""The requests that a plan is for. Loads no model library."""

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from blockdraft.bench.plan.simulation import NUM_REQUESTS, Arrival, poisson_arrivals
from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import bad_row, read_each


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests per second, mean lengths in tokens, and the requests as they are played.

    is_drawn: they are drawn, so there are as many as are wanted; others are a record.
    """

    requests_per_second: float
    output_len: float
    prompt_len: float | None
    arrivals: tuple[Arrival, ...]
    source: str
    is_drawn: bool


def steady_traffic(rate: float, output_len: float, prompt_len: float | None) -> Traffic:
    """Independent requests.

    Raises:
        ConfigError: a number is out of its range.
    """
    for name, value in (("requests_per_second", rate), ("prompt_tokens", prompt_len)):
        if value is not None and not (value > 0 and isfinite(value)):
            raise ConfigError(f"{name} is {value:g}; give a number above 0")
    if not (output_len >= 1 and isfinite(output_len)):
        raise ConfigError(f"output_tokens is {output_len:g}; give a number of at least 1")
    arrivals = tuple(poisson_arrivals(rate, output_len, NUM_REQUESTS))
    source = "independent, exponential lengths"
    return Traffic(rate, output_len, prompt_len, arrivals, source, is_drawn=True)


def read_traffic(path: Path, prompt_len: float | None) -> Traffic:
    """From JSONL: rows with `at`, in seconds, and `output_tokens`.

    Raises:
        ConfigError: the file cannot be read, a row lacks one, or it holds no second of traffic.
    """

    def read_row(row: dict[str, Any], number: int) -> Arrival:
        at: Any = row.get("at")
        tokens = row.get("output_tokens")
        if not _is_number(at) or at < 0:
            raise bad_row(path, number, f"at is {at!r}", "give seconds from 0, such as 12.5")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            remedy = "give a whole number of at least 1"
            raise bad_row(path, number, f"output_tokens is {tokens!r}", remedy)
        return Arrival(float(at), tokens)

    arrivals = sorted(read_each(path, read_row), key=lambda arrival: arrival.at)
    if not arrivals:
        remedy = 'give JSONL rows such as {"at": 12.5, "output_tokens": 80}'
        raise ConfigError(f"{path} holds no requests; {remedy}")
    span = arrivals[-1].at - arrivals[0].at
    if span <= 0:
        raise ConfigError(f"{path} has all its requests at one moment; give a longer record")
    rate = (len(arrivals) - 1) / span
    mean = fmean(arrival.output_len for arrival in arrivals)
    return Traffic(rate, mean, prompt_len, tuple(arrivals), str(path), is_drawn=False)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
