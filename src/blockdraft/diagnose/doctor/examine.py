"""The examination: read, load, measure; what cannot be looked at is said to be unknown."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

from blockdraft.core.errors import BlockdraftError
from blockdraft.core.machine import busy_cores
from blockdraft.diagnose.doctor import machine_checks, shape_checks, target_checks
from blockdraft.diagnose.doctor.beside_checks import beside_checks
from blockdraft.diagnose.doctor.check import Check, verdict
from blockdraft.diagnose.doctor.offline import Offline, measure_offline
from blockdraft.diagnose.doctor.pair import Pair
from blockdraft.diagnose.doctor.run_checks import measure_reuse, reuse_check, tau_checks
from blockdraft.engine.bundled_prompts import (
    BundledAnswer,
    acceptance_by_category,
    answer_bundled,
    encode_bundled,
    read_bundled,
)
from blockdraft.llm import LLM
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.graphs import describe_graphs
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.measure.provenance import describe_environment

OnStage = Callable[[str, float], None]
"""Is told what begins, and what share of the examination is done."""


@dataclass
class _Measured:
    """What was found in the running pair; `failure` says why nothing was."""

    failure: str | None = None
    skipped: str | None = None
    offline: Offline | None = None
    reuse: Check | None = None
    acceptance: Mapping[str, AcceptanceStats] = field(default_factory=dict)
    graphs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Examination:
    """All lines, in the order in which a reader wants them."""

    pair: Pair
    checks: list[Check]
    acceptance: Mapping[str, AcceptanceStats]
    seconds: float

    @property
    def in_order(self) -> bool:
        """True if no line is out."""
        return all(check.mark != "out" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        pair = self.pair
        return {
            "kind": "blockdraft-doctor",
            "in_order": self.in_order,
            "verdict": verdict(self.checks),
            "checks": [asdict(check) for check in self.checks],
            "acceptance": {name: stats.to_dict() for name, stats in self.acceptance.items()},
            "seconds": self.seconds,
            "thinking": pair.thinking,
            "target_folder": str(pair.target_folder),
            "drafter_folder": str(pair.drafter_folder),
            "config": asdict(pair.config)
            | {"dtype": str(pair.dtype).removeprefix("torch."), "device": pair.device},
            **describe_environment(),
        }


def examine(pair: Pair, on_stage: OnStage, *, quick: bool = False) -> Examination:
    """Look a pair over; with `quick` nothing is loaded and nothing decoded."""
    begun, config = perf_counter(), pair.config
    on_stage("looking around", 0.0)
    # Before anything of ours computes.
    busy = busy_cores()
    memory = machine_checks.memory_check(pair)
    on_stage("comparing hashes", 0.02)
    target = [
        target_checks.weights_check(pair),
        target_checks.template_check(pair),
        target_checks.thinking_check(pair),
        target_checks.precision_check(pair),
    ]
    measured = _measure(pair, memory, on_stage, quick=quick)
    shape = _shape_lines(pair, measured.offline)
    machine = [
        machine_checks.threads_check(config),
        memory,
        machine_checks.busy_check(config, busy),
        machine_checks.kernels_check(pair),
        *machine_checks.graphs_check(measured.graphs),
    ]
    fit = shape_checks.fit_check(pair, measured.failure, shape)
    checks = [fit, *target, *shape, *_run_lines(pair, measured), *beside_checks(pair), *machine]
    return Examination(pair, checks, measured.acceptance, perf_counter() - begun)


def _shape_lines(pair: Pair, measured: Offline | None) -> list[Check]:
    """Of a block-diffusion drafter; what others compute stands in their files alone."""
    if not pair.fills_blocks:
        return []
    return [
        shape_checks.rope_check(pair, measured),
        shape_checks.window_check(pair),
        shape_checks.mask_check(pair),
        shape_checks.layers_check(pair, measured),
        shape_checks.vocabulary_check(pair, measured),
    ]


def _run_lines(pair: Pair, measured: _Measured) -> list[Check]:
    if measured.reuse is not None:
        return [measured.reuse, *tau_checks(pair, measured.acceptance)]
    reason = f"not measured: {measured.skipped}"
    return [Check("prefix reuse", "unknown", reason), Check("tau", "unknown", reason)]


def _measure(pair: Pair, memory: Check, on_stage: OnStage, *, quick: bool) -> _Measured:
    """Load and run the pair, if it can be; a failure is a finding, not an end."""
    if quick:
        return _Measured(skipped="--quick")
    if pair.refusal is not None:
        return _Measured(skipped="the pair cannot be loaded")
    if memory.mark == "out":
        return _Measured(skipped="there is not enough memory")
    try:
        return _run(pair, on_stage)
    except BlockdraftError as error:
        return _Measured(failure=str(error), skipped="the pair does not run")


def _run(pair: Pair, on_stage: OnStage) -> _Measured:
    on_stage("loading", 0.06)
    config = replace(
        pair.config,
        drafter=str(pair.drafter_folder),
        adaptive=False,
        lookup=False,
        ngrams=False,
        recheck=True,
    )
    llm = LLM.of(config)
    compute_every_prompt(llm.engine)
    on_stage("decoding 20 prompts", 0.2)
    encoded = encode_bundled(llm.tokenizer, read_bundled(), pair.thinking)
    answers: list[BundledAnswer] = []
    for index, one in enumerate(encoded):
        answers += answer_bundled(llm.engine, [one], llm.tokenizer.eos_ids)
        on_stage("decoding 20 prompts", 0.2 + 0.5 * (index + 1) / len(encoded))
    on_stage("reusing a prompt", 0.7)
    long_ids = [token for _, ids in encoded for token in ids]
    reuse = measure_reuse(llm.engine, long_ids, llm.tokenizer.eos_ids)
    offline = None
    if pair.fills_blocks:
        on_stage("trying other configs", 0.73)
        rope = shape_checks.target_rope(pair)
        measured = measure_offline(llm.engine, answers, rope, pair.num_tokens)
        # A target that ends its answers at once leaves nothing to guess.
        offline = measured if measured.num_texts else None
    return _Measured(
        offline=offline,
        reuse=reuse_check(llm.engine, reuse),
        acceptance=acceptance_by_category(answers),
        graphs=describe_graphs(llm.engine.target, llm.engine.drafter),
    )
