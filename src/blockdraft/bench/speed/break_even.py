"""What a drafted step costs beside a plain one: the tau from which on drafting pays.

Verdicts are replaced, so that a given share of the drafts is kept whatever the target says. What is
decoded so is nobody's answer: it is timed and thrown away, and nothing is said of its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from blockdraft.bench.config import BreakEvenConfig, warm_up_of
from blockdraft.bench.decode import check_drafts, encode_prompts, in_turn
from blockdraft.bench.measures import MEASURES, band_words, bootstrap_band
from blockdraft.bench.result import describe_result
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.proof.faults import verifying_by
from blockdraft.speculate.verify import Verdict, verify

NOTE = (
    "Verdicts were replaced: this share of the draft tokens was accepted, whatever the target "
    "chose. The outputs are not the target's and are not shown; only the times are meaningful."
)
DEFINITIONS = {
    "step_ratio": "seconds of a drafted step divided by seconds of a plain one, prefill excluded: "
    "drafting saves time if tau is above it",
    "acceptance_length": "the forced tau: tokens committed per step",
    "speedup": "plain seconds per token divided by forced ones, prefill excluded: tau / step_ratio",
    "kept_share": "accepted tokens divided by draft tokens, of the longest path of each step",
    "speedup_band": f"of speedup: {MEASURES['band']}",
}


@dataclass(frozen=True, slots=True)
class DecodeTotals:
    """Times and counts of outputs, without the prompts' steps; tokens are forgotten."""

    decode_seconds: float
    num_tokens: int
    num_steps: int
    num_drafted: int
    num_kept: int

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        return self.decode_seconds / self.num_steps


@dataclass(frozen=True, slots=True)
class ForcedMeasurement:
    """One prompt, decoded plainly and with forced acceptance."""

    prompt: BenchPrompt
    plain: DecodeTotals
    forced: DecodeTotals


@dataclass(frozen=True, slots=True)
class BreakEven:
    """See DEFINITIONS."""

    num_prompts: int
    plain_step_seconds: float
    drafted_step_seconds: float
    step_ratio: float
    acceptance_length: float
    speedup: float
    kept_share: float
    speedup_band: tuple[float, float] | None


class ForcedVerdicts:
    """In place of `verify`: keeps a share of the drafts, as evenly as whole tokens allow."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.num_drafted = 0
        self.num_kept = 0

    def __call__(self, plan: ForwardPlan, logits: Tensor) -> list[Verdict]:
        """What the target decided is found out, which takes its time, and replaced."""
        verdicts = verify(plan, logits)
        return [self._force(*pair) for pair in zip(plan, verdicts, strict=True)]

    def _force(self, planned: PlannedRow, verdict: Verdict) -> Verdict:
        path = planned.tree.through([])
        if verdict.error is not None or not path:
            return verdict
        self.num_drafted += len(path)
        num_due = int(self._share * self.num_drafted + 0.5) - self.num_kept
        nodes = path[: max(0, num_due)]
        self.num_kept += len(nodes)
        tokens = [planned.tree.tokens[node] for node in nodes]
        return Verdict([*tokens, verdict.token_ids[0]], nodes)


def measure_break_even(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    config: BreakEvenConfig,
    on_progress: Callable[[ForcedMeasurement], None] = lambda measurement: None,
) -> list[ForcedMeasurement]:
    """Decode every prompt both ways in turns, after a warm-up; the LLM drafts as it is set.

    Raises:
        ConfigError: there is no drafter.
        RequestError: a prompt cannot be decoded; known before anything is measured.
    """
    check_drafts(llm)
    compute_every_prompt(llm.engine)
    encoded = encode_prompts(llm, prompts, config.params)
    ways = {"plain": replace(config.params, num_draft_tokens=0), "forced": config.params}
    measurements = []
    with verifying_by(ForcedVerdicts(config.force_acceptance)):
        for params in ways.values():
            _decode(llm, encoded[0], warm_up_of(params))
        for index, (prompt, prompt_ids) in enumerate(zip(prompts, encoded, strict=True)):
            done = {
                way: _decode(llm, prompt_ids, params)
                for way, params in in_turn(list(ways.items()), index)
            }
            measurements.append(ForcedMeasurement(prompt, done["plain"], done["forced"]))
            on_progress(measurements[-1])
    return measurements


def _decode(llm: LLM, prompt_ids: list[int], params: SamplingParams) -> DecodeTotals:
    completion = llm.generate(prompt_ids, params).completions[0]
    acceptance = completion.acceptance
    return DecodeTotals(
        decode_seconds=completion.timings.decode,
        num_tokens=acceptance.num_tokens,
        num_steps=acceptance.num_passes,
        num_drafted=acceptance.drafted.total(),
        num_kept=acceptance.accepted.total(),
    )


def break_even_of(measurements: Sequence[ForcedMeasurement]) -> BreakEven:
    """Over at least one measurement."""
    plain, forced = (_total([getattr(m, way) for m in measurements]) for way in ("plain", "forced"))
    ratio = forced.step_seconds / plain.step_seconds
    each = [
        (m.forced.num_tokens, m.forced.decode_seconds, m.plain.num_tokens, m.plain.decode_seconds)
        for m in measurements
    ]
    tau = forced.num_tokens / forced.num_steps
    return BreakEven(
        num_prompts=len(measurements),
        plain_step_seconds=plain.step_seconds,
        drafted_step_seconds=forced.step_seconds,
        step_ratio=ratio,
        acceptance_length=tau,
        speedup=tau / ratio,
        kept_share=forced.num_kept / forced.num_drafted if forced.num_drafted else 0.0,
        speedup_band=bootstrap_band(np.array(each)) if len(each) > 1 else None,
    )


def break_even_lines(measurements: Sequence[ForcedMeasurement]) -> list[str]:
    """What was found, for people."""
    found = break_even_of(measurements)
    spread = band_words(*(found.speedup_band or (None, None)))
    return [
        f"a drafted step takes {1e3 * found.drafted_step_seconds:.3g} ms, a plain one "
        f"{1e3 * found.plain_step_seconds:.3g} ms: break-even tau {found.step_ratio:.2f}",
        f"forced: {found.kept_share:.1%} of the draft tokens accepted, tau "
        f"{found.acceptance_length:.2f}, {found.speedup:.2f} times as fast as plain decoding "
        f"({spread})",
        NOTE,
    ]


def _total(each: Sequence[DecodeTotals]) -> DecodeTotals:
    return DecodeTotals(*map(sum, zip(*map(astuple, each), strict=True)))


def json_report(
    llm: LLM, config: BreakEvenConfig, measurements: Sequence[ForcedMeasurement]
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result; no tokens."""
    return {
        **describe_result("break-even", llm, DEFINITIONS),
        "forced_acceptance": config.force_acceptance,
        "note": NOTE,
        "config_of_requests": asdict(config),
        "break_even": asdict(break_even_of(measurements)),
        "prompts": [
            {
                "id": one.prompt.id,
                "category": one.prompt.category,
                "plain": asdict(one.plain),
                "forced": asdict(one.forced),
            }
            for one in measurements
        ],
    }
