"""The losslessness checks: each raises AssertionError where drafted output is not the target's.

Tests run them on the system as it is; test_lossless_faults.py runs them on planted faults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from blockdraft.core.request import FinishReason, SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.engine.stats import AcceptanceStats
from blockdraft.models.target import Target
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.verify import TokenLogprobs


@dataclass(frozen=True)
class Generated:
    """Everything of one sequence that drafting must not change, and its acceptance counts."""

    token_ids: list[int]
    finish_reason: FinishReason | None
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
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return Generated(token_ids, progress.sequence.finish_reason, logprobs, progress.acceptance)


def generate_plain(
    target: Target, prompt_ids: Sequence[int], params: SamplingParams, **options: Any
) -> Generated:
    """One sequence alone in an engine without a drafter."""
    return generate(target, NoDrafter(), prompt_ids, params, **options)


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


def _difference(drafted: Generated, plain: Generated) -> str:
    for name in ("token_ids", "logprobs"):
        pairs = enumerate(zip(getattr(drafted, name), getattr(plain, name), strict=False))
        for index, (found, expected) in pairs:
            if found != expected:
                return f"drafted differs from plain in {name}[{index}]: {found}, not {expected}"
    return f"drafted differs from plain: {drafted.finish_reason}, not {plain.finish_reason}"


def check_draft_context(engine: Engine, key: int) -> None:
    """The draft context holds exactly the tokens before the anchor.

    Its keys and values equal those of a fresh projection of the features of a plain forward. Run
    after a step, in float64: to 1e-9.
    """
    drafter, target = engine.drafter, engine.target
    assert isinstance(drafter, DFlashDrafter)
    sequence = engine.progress[key].sequence
    if sequence.finish_reason is not None:
        assert key not in drafter._contexts
        return
    context = drafter._contexts[key]
    assert context.num_context == sequence.num_cached, "the context ends elsewhere"
    captured: list[torch.Tensor] = []
    hooks = [
        target.layers[index].register_forward_hook(
            lambda module, args, output: captured.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for index in drafter.layer_ids
    ]
    with torch.inference_mode():
        target.model(torch.tensor([sequence.token_ids[: sequence.num_cached]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        features = torch.cat(captured, dim=-1)
        positions = torch.arange(features.shape[1])[None]
        for layer, expected in enumerate(drafter.model.project_context(features, positions)):
            empty = expected[0][:, :, :0]
            found = context.extend(layer, empty, empty)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def check_distribution(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square of outcome counts against exact probabilities: p above 1e-3.

    Impossible outcomes must not occur; those expected less than five times share one bin.
    """
    counts, probabilities = counts.double().flatten(), probabilities.double().flatten()
    assert counts[probabilities == 0.0].sum() == 0, "an impossible outcome"
    expected = counts.sum() * probabilities
    common = expected >= 5.0
    found, wanted = counts[common], expected[common]
    rare = expected[~common].sum()
    if rare >= 5.0:
        found = torch.cat([found, counts[~common].sum()[None]])
        wanted = torch.cat([wanted, rare[None]])
    statistic = ((found - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((wanted.shape[0] - 1) / 2.0, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(freedom, statistic / 2.0))
    assert p_value > 1e-3, f"another distribution: p = {p_value}"


def check_samples_differ(target: Target, prompt_ids: Sequence[int], params: SamplingParams) -> None:
    """The n samples of one seed are different texts."""
    samples = [
        tuple(generate_plain(target, prompt_ids, params, sample_index=index).token_ids)
        for index in range(params.n)
    ]
    assert len(set(samples)) == params.n, "samples are equal"
