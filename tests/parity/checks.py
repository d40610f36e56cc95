"""The losslessness checks: each raises AssertionError where drafted output is not the target's.

Tests run them on the system as it is; test_lossless_faults.py runs them on planted faults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError
from blockdraft.core.request import FinishReason, SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.draft.context import (
    ContextKV,
    ContextSpan,
    DraftContexts,
    LayerKV,
    SeparateContexts,
)
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.waiting_features import Waiting
from blockdraft.models.target.interface import Target
from blockdraft.proof.distribution import LEAST_P, p_value
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.verify import TokenLogprobs
from tests.fakes import OracleDrafter


@dataclass(frozen=True)
class Generated:
    """Everything of one sequence that drafting must not change, and its acceptance counts."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    error: str | None
    logprobs: list[TokenLogprobs]
    acceptance: AcceptanceStats = field(compare=False)


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    known: list[int] | None = None,
    make_scan: Callable[[], Callable[[int], bool]] | None = None,
    engine_options: dict[str, Any] | None = None,
    after_step: Callable[[Engine, int], None] | None = None,
    **add_options: Any,
) -> Generated:
    """One sequence alone in an engine. `known` is told to a drafter that knows the output."""
    engine = Engine(target, drafter, **(engine_options or {}))
    scan_stop = make_scan() if make_scan is not None else None
    key = engine.add(prompt_ids, params, scan_stop=scan_stop, **add_options)
    if known is not None and hasattr(drafter, "known"):
        drafter.known[key] = known
    outputs: list[StepOutput] = []
    try:
        while engine.has_work:
            outputs += engine.step()
            if after_step is not None:
                after_step(engine, key)
    finally:
        progress = engine.take(key)
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    assert token_ids == progress.sequence.output_ids
    assert progress.acceptance.num_tokens == max(0, len(token_ids) - 1)
    assert engine.proposer.failures.num_failures == 0, "the drafter failed"
    logprobs = [entry for output in outputs for entry in output.logprobs]
    sequence = progress.sequence
    return Generated(
        token_ids, sequence.finish_reason, sequence.error, logprobs, progress.acceptance
    )


def run(engine: Engine) -> dict[int, list[StepOutput]]:
    """Step to the end; the outputs by key."""
    outputs: dict[int, list[StepOutput]] = {key: [] for key in engine.progress}
    while engine.has_work:
        for output in engine.step():
            outputs[output.key].append(output)
    return outputs


def joined(outputs: list[StepOutput]) -> list[int]:
    """The tokens of a sequence, from its outputs."""
    return [token_id for output in outputs for token_id in output.token_ids]


def generate_plain(
    target: Target, prompt_ids: Sequence[int], params: SamplingParams, **options: Any
) -> Generated:
    """One sequence alone in an engine without a drafter."""
    return generate(target, NoDrafter(), prompt_ids, params, **options)


def check_together_equals_alone(
    target: Target,
    drafter: Drafter,
    oracle: Target,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    after_step: Callable[[Engine, int], None] | None = None,
    **engine_options: Any,
) -> list[list[int]]:
    """Sequences that share an engine have the tokens that the oracle gives each one alone."""
    expected = [generate_plain(oracle, prompt, params).token_ids for prompt in prompts]
    engine = Engine(target, drafter, **engine_options)
    keys = [engine.add(prompt, params) for prompt in prompts]
    found: dict[int, list[int]] = {key: [] for key in keys}
    try:
        while engine.has_work:
            for output in engine.step():
                found[output.key] += output.token_ids
            for key in keys if after_step is not None else ():
                after_step(engine, key)
    finally:
        for key in keys:
            engine.take(key)
    assert engine.proposer.failures.num_failures == 0, "the drafter failed"
    for index, tokens in enumerate(expected):
        assert found[keys[index]] == tokens, f"sequence {index} together differs from alone"
    return expected


def stock_greedy(model: PreTrainedModel, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy output of transformers' own `generate`."""
    ids = torch.tensor([list(prompt_ids)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return output[0, len(prompt_ids) :].tolist()


def check_drafted_equals_plain(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    **options: Any,
) -> Generated:
    """Tokens, finish reason and log-probabilities are the same with the drafter and without."""
    plain = generate_plain(target, prompt_ids, params, **options)
    drafted = generate(target, drafter, prompt_ids, params, known=plain.token_ids, **options)
    assert drafted == plain, _difference(drafted, plain)
    return drafted


def check_fault_is_found(target: Any, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """By the test at load, and by the comparison of drafted with plain output."""
    with pytest.raises(ModelError, match="logits change with the number of rows"):
        target.check_row_invariance()
    with pytest.raises(AssertionError, match="drafted differs from plain"):
        check_drafted_equals_plain(target, OracleDrafter(7), prompt_ids, params)


def _difference(drafted: Generated, plain: Generated) -> str:
    for name in ("token_ids", "logprobs"):
        pairs = enumerate(zip(getattr(drafted, name), getattr(plain, name), strict=False))
        for index, (found, expected) in pairs:
            if found != expected:
                return f"drafted differs from plain in {name}[{index}]: {found}, not {expected}"
    ends = [f"{one.finish_reason} ({one.error})" for one in (drafted, plain)]
    return f"drafted differs from plain: {ends[0]}, not {ends[1]}"


def check_draft_context(engine: Engine, key: int) -> None:
    """The draft context, written or waiting, holds exactly the tokens before the anchor.

    Its keys and values equal those of a fresh projection of the features of a plain forward. Run
    after a step, in float64: to 1e-9. Changes nothing: what waits goes on waiting.
    """
    drafter, sequence = engine.drafter, engine.progress[key].sequence
    assert isinstance(drafter, DFlashDrafter)
    if key not in drafter._known:
        # It has ended, or has yet to run: for the first time, or again.
        assert sequence.finish_reason is not None or sequence.num_cached == 0
        return
    assert sequence.finish_reason is None
    known = drafter._known[key]
    assert known.end == sequence.num_cached, "the context ends elsewhere"
    with torch.inference_mode():
        features = plain_features(engine.target, sequence.token_ids[: known.end], drafter)
        positions = torch.arange(known.end)[None]
        expected = drafter.model.project_context(features, positions)
        waits = drafter.contexts.needed(ContextSpan(key, 0, known.end))
        assert all(waiting.start >= known.num_written for waiting in waits)
        for waiting in waits:
            behind = slice(waiting.start, waiting.end)
            own = torch.cat(waiting.parts)[None]
            assert own.shape[1] == waiting.end - waiting.start
            found = drafter.model.project_context(own, positions[:, behind])
            _check_close(found, expected, behind)
        num_written = _num_written(drafter.contexts, key, known.num_written)
        if num_written:
            view = drafter.contexts.view([key], [num_written])
            assert view.num_context == num_written
            found = [_held(view, layer, k[:, :, :0]) for layer, (k, _) in enumerate(expected)]
            _check_close(found, expected, slice(0, num_written))
        if isinstance(drafter.contexts, PagedContexts):
            _check_written_early(drafter.contexts, key, known.end, waits, expected)


def _num_written(contexts: DraftContexts, key: int, num_certain: int) -> int:
    """More than is certain, behind a write that failed after it had written."""
    if not isinstance(contexts, SeparateContexts):
        return num_certain
    num_held = len(contexts._contexts[key]) if key in contexts._contexts else 0
    assert num_held >= num_certain
    return num_held


def _check_written_early(
    contexts: PagedContexts, key: int, end: int, waits: list[Waiting], expected: list[LayerKV]
) -> None:
    """What does not wait is written, in pages that others drafted from or that were needed."""
    waiting = {p for piece in waits for p in range(piece.start, piece.end)}
    written = [p for p in range(end) if p not in waiting]
    slots = torch.tensor(
        [contexts.pages.slots(key, p, p + 1)[0] for p in written], dtype=torch.long
    )
    for layer, (k, v) in enumerate(expected):
        keys, values = contexts.kv.pools[layer].flatten(2, 3)[:, :, slots]
        torch.testing.assert_close(keys, k[0][:, written], rtol=0.0, atol=1e-9)
        torch.testing.assert_close(values, v[0][:, written], rtol=0.0, atol=1e-9)


def plain_features(target: Any, token_ids: list[int], drafter: DFlashDrafter) -> torch.Tensor:
    """[1, tokens, num_features * hidden] of one forward with transformers' own attention."""
    captured: list[torch.Tensor] = []
    hooks = [
        target.layers[index].register_forward_hook(
            lambda module, args, output: captured.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for index in drafter.feature_layers
    ]
    attention = target.model.config._attn_implementation
    target.model.set_attn_implementation("sdpa")
    try:
        target.model(torch.tensor([token_ids]), use_cache=False)
    finally:
        target.model.set_attn_implementation(attention)
        for hook in hooks:
            hook.remove()
    return torch.cat(captured, dim=-1)


def _held(view: ContextKV, layer: int, empty: torch.Tensor) -> LayerKV:
    """Keys and values of the context alone; the next layer's take their memory."""
    k, v = view.extend(layer, empty, empty)
    return k.clone(), v.clone()


def _check_close(found: Sequence[LayerKV], expected: Sequence[LayerKV], part: slice) -> None:
    """Of every layer, found keys and values equal the expected ones of a part of the tokens."""
    for pairs in zip(found, expected, strict=True):
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b[:, :, part], rtol=0, atol=1e-9)


def check_distribution(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Outcome counts have a p-value above 1e-3, and no impossible outcome occurs."""
    assert (found := p_value(counts, probabilities)) > LEAST_P, f"another distribution: p = {found}"


def check_samples_differ(target: Target, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """The n samples of one seed are different texts."""
    samples = [
        tuple(generate_plain(target, prompt_ids, params, sample_index=index).token_ids)
        for index in range(params.n)
    ]
    assert len(set(samples)) == params.n, "samples are equal"
