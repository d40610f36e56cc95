"""Tokens per second: plain and drafted, and transformers' `generate` beside them."""

from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch

from blockdraft.bench.config import ConcurrencyConfig
from blockdraft.bench.decode import encode_prompts
from blockdraft.bench.load.concurrency import measure_concurrency, point_figures
from blockdraft.bench.workload import mixed_prompts
from blockdraft.core.errors import BlockdraftError
from blockdraft.hub.resolve import resolve_model
from blockdraft.llm import LLM
from blockdraft.models.target.loading import DTYPES, load_target_model
from gpucheck.notes import Notes, first_line
from gpucheck.pair import fast_way, loaded, prompts, ways_to_measure
from gpucheck.settings import Settings

LEAST_REQUESTS = 4
MOST_REQUESTS = 128


def run(settings: Settings, notes: Notes) -> None:
    """Every way at every point; a way that fails leaves the others."""
    encoded: list[list[int]] = []
    most = max(settings.concurrency)
    for name, way in ways_to_measure(settings, notes).items():
        try:
            with loaded(settings, way, max_concurrency=most) as llm:
                encoded = encoded or _encoded(llm, settings, most)
                for concurrency in settings.concurrency:
                    found = _point(llm, settings, concurrency)
                    notes.note("blockdraft", name, str(concurrency), value=found)
        except (BlockdraftError, RuntimeError) as error:
            notes.note("blockdraft", name, "error", value=first_line(error))
    if encoded:
        _transformers(settings, notes, encoded)


def _encoded(llm: LLM, settings: Settings, number: int) -> list[list[int]]:
    params = ConcurrencyConfig(max_tokens=settings.max_tokens).params
    return encode_prompts(llm, mixed_prompts(prompts(settings), number), params)


def _point(llm: LLM, settings: Settings, concurrency: int) -> list[dict[str, Any]]:
    """Plain, whole blocks, adaptive."""
    config = ConcurrencyConfig(
        concurrency=(concurrency,),
        num_requests=max(LEAST_REQUESTS, min(2 * concurrency, MOST_REQUESTS)),
        repeats=1,
        num_draft_tokens=llm.engine.drafter.max_nodes,
        max_tokens=settings.max_tokens,
    )
    figures = point_figures(measure_concurrency(llm, prompts(settings), config))
    return [
        {
            "way": point.way,
            "tokens_per_second": round(point.tokens_per_second.median, 1),
            "speedup": round(point.speedup_over_plain.median, 3),
            "tau": round(point.acceptance_length, 3),
            "num_identical": point.num_identical,
            "num_outputs": point.num_outputs,
            "passes_of_depth": dict(asdict(point)["num_passes_of_depth"]),
        }
        for point in figures
    ]


@torch.inference_mode()
def _transformers(settings: Settings, notes: Notes, encoded: list[list[int]]) -> None:
    """The same prompts in one padded batch, the same number of tokens for all."""
    model: Any = load_target_model(
        resolve_model(settings.target), DTYPES[fast_way(settings)[0]], settings.device
    )
    notes.note("transformers precision", value=fast_way(settings)[0])
    for concurrency in settings.concurrency:
        try:
            seconds = [_generate_seconds(model, settings, encoded[:concurrency]) for _ in range(2)]
        except RuntimeError as error:
            notes.note("transformers", str(concurrency), "error", value=first_line(error))
            continue
        rate = concurrency * settings.max_tokens / min(seconds)
        notes.note("transformers", str(concurrency), "tokens_per_second", value=round(rate, 1))


def _generate_seconds(model: Any, settings: Settings, batch: list[list[int]]) -> float:
    width = max(map(len, batch))
    rows = [[0] * (width - len(ids)) + ids for ids in batch]
    seen = [[0] * (width - len(ids)) + [1] * len(ids) for ids in batch]
    ids, mask = torch.tensor([rows, seen], device=settings.device)
    begin = perf_counter()
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=settings.max_tokens,
        min_new_tokens=settings.max_tokens,
        pad_token_id=0,
    )
    output[0, -1].item()
    return perf_counter() - begin
