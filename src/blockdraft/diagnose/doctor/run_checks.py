"""What shows only when the pair runs: the reuse of prompts, and what drafting gains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.doctor.check import Check
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.engine.bundled_prompts import MAX_TOKENS, decode_alone
from blockdraft.engine.engine import Engine
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.measuring import reusing
from blockdraft.proof.cases import Case
from blockdraft.proof.context import ContextCheck, check_context, keeps_context
from blockdraft.proof.corpus import ProofPrompt

REUSED_PAGES = 2
TOLERANCE = 0.15
"""How far tau of a category may stay behind what is expected: five answers of 64 tokens, other
roundings than where it was measured, and so other words."""
USELESS_TAU = 1.1
"""Less than a tenth of a token a pass is what chance gives."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """The same prompt, computed and then taken from memory; and the draft context behind it.

    context: None for a drafter that has none.
    """

    num_reused: int
    fresh: AcceptanceStats
    reused: AcceptanceStats
    context: ContextCheck | None


def measure_reuse(
    engine: Engine, token_ids: Sequence[int], eos_ids: frozenset[int]
) -> Reuse | None:
    """Decode a prompt twice, the second time from memory; nothing may be running.

    None for a target that reuses nothing, or where the tokens or the context are too few.
    """
    memory = engine.target.memory
    num_tokens = REUSED_PAGES * PAGE_SIZE + 2
    room = engine.limits.max_tokens - num_tokens
    if not isinstance(memory, Pages) or len(token_ids) < num_tokens or room < 1:
        return None
    prompt_ids = tuple(token_ids[:num_tokens])
    params = SamplingParams(max_tokens=min(MAX_TOKENS, room), ignore_eos=True)
    engine.use_fixed_drafting()
    with reusing(engine, True):
        fresh = decode_alone(engine, prompt_ids, params, eos_ids)
        again = decode_alone(engine, prompt_ids, params, eos_ids)
        context = None
        if keeps_context(engine):
            prompt = ProofPrompt("reuse", "reuse", "")
            context = check_context(engine, Case(prompt, prompt_ids, "greedy", params))
    return Reuse(again.sequence.num_reused, fresh.acceptance, again.acceptance, context)


def reuse_check(engine: Engine, reuse: Reuse | None) -> Check:
    """Features that are missing behind a prompt from memory: the output is right, tau is not."""
    name = "prefix reuse"
    if not isinstance(engine.target.memory, Pages):
        return Check(name, "ok", "this target cannot reuse prompts")
    if reuse is None:
        return Check(name, "unknown", "the context is too short to test it")
    if not reuse.num_reused:
        return Check(name, "unknown", "the second request took nothing from the cache")
    fresh, again = reuse.fresh.acceptance_length, reuse.reused.acceptance_length
    found = f"tau {again:.2f} with {reuse.num_reused} tokens from the cache, {fresh:.2f} without"
    if reuse.context is not None:
        found += f"; draft context off by {reuse.context.deviation:.1%}"
    is_right = reuse.context is None or reuse.context.is_right
    if not is_right or again < (1 - TOLERANCE) * fresh:
        remedy = (
            "features were lost: please report this; until it is fixed, send prompts that differ"
        )
        return Check(name, "out", found, remedy)
    return Check(name, "ok", found)


def tau_checks(pair: Pair, measured: Mapping[str, AcceptanceStats]) -> list[Check]:
    """A line for each category of the bundled prompts."""
    expected = pair.fact("expected", "tau")
    known = expected if isinstance(expected, Mapping) else {}
    return [_tau_check(name, stats, known.get(name)) for name, stats in measured.items()]


def _tau_check(category: str, stats: AcceptanceStats, expected: object) -> Check:
    name, tau = f"tau, {category}", stats.acceptance_length
    if not stats.num_passes:
        found = "not measured: the target ended every answer after its first token"
        return Check(name, "unknown", found)
    if not isinstance(expected, int | float) or expected <= 0:
        if tau < USELESS_TAU:
            remedy = "the lines above say why, or the drafter is not one for this target"
            return Check(name, "out", f"{tau:.2f}: almost nothing is accepted", remedy)
        return Check(name, "unknown", f"{tau:.2f}; the drafter does not say what to expect")
    change = round(tau / expected - 1, 2) + 0.0  # no "-0%"
    found = f"{tau:.2f}, expected {expected:.2f} ({change:+.0%})"
    if tau < (1 - TOLERANCE) * expected:
        remedy = "fix the failed checks; if there are none, download target and drafter again"
        return Check(name, "out", found, remedy)
    if tau < USELESS_TAU:
        remedy = "the drafter is hardly trained: train it longer, or take another one"
        return Check(name, "out", f"{found}: almost nothing is accepted", remedy)
    return Check(name, "ok", found)
