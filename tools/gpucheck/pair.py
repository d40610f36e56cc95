"""The pair under test: under which rule it loads, and short prompts that any pair can take."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blockdraft.bench.workload import BUNDLED, BenchPrompt, read_workload
from blockdraft.llm import LLM
from blockdraft.models.target.loading import DTYPES
from gpucheck.notes import Notes
from gpucheck.rules import OWN, candidate
from gpucheck.settings import Settings

Way = tuple[str, str | None]
"""A precision, and the name of a rule; None: not exact."""


@contextmanager
def loaded(settings: Settings, way: Way, **options: Any) -> Iterator[LLM]:
    """The pair, loaded in a way; its memory is given back."""
    dtype, rule = way
    with candidate(DTYPES[dtype], OWN if rule is None else rule):
        llm = LLM(
            settings.target,
            settings.drafter,
            dtype=dtype,
            device=settings.device,
            exact=rule is not None,
            memory=0.25 if settings.is_rehearsal else None,
            recheck=True,
            **options,
        )
        try:
            yield llm
        finally:
            del llm
            gc.collect()
            if settings.device == "cuda":
                torch.cuda.empty_cache()


def exact_way(notes: Notes) -> Way | None:
    """The way in which the pair was proven; None if there is none, or nobody has looked."""
    found = notes.earlier("proof").get("taken")
    return None if found is None or found[1] is None else (found[0], found[1])


def fast_way(settings: Settings) -> Way:
    """Without a promise."""
    return ("float32" if settings.is_rehearsal else "bfloat16"), None


def ways_to_measure(settings: Settings, notes: Notes) -> dict[str, Way]:
    """By name, the exact one first."""
    exact = exact_way(notes)
    found = {} if exact is None else {f"exact, {exact[0]}, rule: {exact[1]}": exact}
    fast = fast_way(settings)
    return found | {f"exact off, {fast[0]}": fast}


def prompts(settings: Settings) -> list[BenchPrompt]:
    """The bundled ones, or a few words."""
    if settings.is_rehearsal:
        return [BenchPrompt(f"word-{n}", "words", "the abc " * (n + 1)) for n in range(4)]
    return read_workload(BUNDLED)
