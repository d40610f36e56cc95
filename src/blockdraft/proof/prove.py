"""The proof: every check, in order.

Plain decoding of each case comes first and is what all else is held against.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ConfigError
from blockdraft.llm import LLM
from blockdraft.proof.agreement import compare_with_stock, greedy_cases
from blockdraft.proof.cases import Case, plan_cases
from blockdraft.proof.config import ProofConfig
from blockdraft.proof.context import check_context, keeps_context
from blockdraft.proof.controls import CONTROLS, run_control, suitable_cases
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.proof.distribution import SAMPLINGS, check_planted, check_sampling
from blockdraft.proof.findings import Findings, WayCheck, lacks_of, total_acceptance
from blockdraft.proof.forced import judged_differences, measure_noise
from blockdraft.proof.ways import PLAIN, Way, run, ways_of

WORK_OF_DRAW = 0.05
"""Of an output of three tokens over a tiny vocabulary, in decoded tokens."""

OnProgress = Callable[[str, float], None]
"""Told what is being done, and the share of the whole that is done, from 0 to 1."""


class Proof:
    """One proof of a loaded pair; `findings` grow while it runs, and stand when it is interrupted.

    The LLM is left without reuse of prompts, and as the last way has set it; take a fresh one, as
    what it holds of earlier prompts is taken over. `on_stage` is called behind each kind of check.

    Raises:
        ConfigError: the pair has no drafter, or may decode no two requests together.
        RequestError: see `plan_cases`.
    """

    def __init__(
        self,
        llm: LLM,
        config: ProofConfig,
        corpus: Sequence[ProofPrompt],
        own: Sequence[ProofPrompt] = (),
        *,
        on_progress: OnProgress = lambda stage, share: None,
        on_stage: Callable[[Findings], object] = lambda findings: None,
    ) -> None:
        if llm.drafter_folder is None:
            raise ConfigError(
                "there is nothing to prove without a drafter; name one with --drafter"
            )
        if llm.config.max_concurrency < 2:
            raise ConfigError(
                "max_concurrency is 1, but a proof also decodes requests concurrently; give 2 or "
                "more"
            )
        self.llm = llm
        self.config = config
        self.findings = Findings(plan_cases(llm, corpus, own, config))
        self._on_progress, self._on_stage = on_progress, on_stage
        self._stage = ""
        self._started_at = perf_counter()
        self._done = 0.0
        self._cases = self.findings.chosen.cases
        self._ways = ways_of(llm)
        several = [case for case in self._cases if len(case.prompt_ids) > 1]
        num_contexts = config.num_context_cases if keeps_context(llm.engine) else 0
        self._context_cases = greedy_cases(several, config.max_tokens, num_contexts)
        self._greedy_cases = greedy_cases(self._cases, config.max_tokens, config.num_stock_prompts)
        self._total = self._all_work()

    def run(self) -> Findings:
        """Check everything; an exception, KeyboardInterrupt too, leaves what was found so far."""
        stages: tuple[tuple[str, Callable[[], None]], ...] = (
            (PLAIN.name, self._decode_plainly),
            *((way.name, lambda way=way: self._check_way(way)) for way in self._ways),
            ("draft context", self._check_contexts),
            ("planted faults", self._run_controls),
            ("distribution", self._check_distributions),
            ("transformers", self._ask_stock),
        )
        for self._stage, check in stages:
            self._advance(0.0)
            check()
            self._on_stage(self.findings)
        self.findings.is_whole = True
        self._done = self._total
        self._advance(0.0)
        return self.findings

    def _all_work(self) -> float:
        """In about decoded tokens."""
        whole = sum(case.work for case in self._cases)
        control = 4 * self.config.max_tokens * len(CONTROLS)
        draws = WORK_OF_DRAW * self.config.num_draws * (1 + len(SAMPLINGS))
        rest = [*self._context_cases, *self._greedy_cases, *self._greedy_cases]
        return (1 + len(self._ways)) * whole + sum(c.work for c in rest) + control + draws

    def _advance(self, work: float) -> None:
        self._done += work
        self.findings.seconds = perf_counter() - self._started_at
        self._on_progress(self._stage, min(1.0, self._done / self._total))

    def _finish(self, case: Case) -> None:
        self._advance(case.work)

    def _decode_plainly(self) -> None:
        self.findings.plain = run(self.llm, self._cases, PLAIN, self._finish)
        if not self.llm.config.exact:
            measured = [
                (case, self.findings.plain[case])
                for case in self._cases[: self.config.num_noise_cases]
            ]
            self.findings.noise = measure_noise(self.llm.engine, measured)

    def _check_way(self, way: Way) -> None:
        failures, memory = self.llm.engine.proposer.failures, self.llm.engine.target.memory
        scheduler = self.llm.engine.scheduler
        num_before, num_preempted = failures.num_failures, scheduler.num_preempted
        outputs = run(self.llm, self._cases, way, self._finish)
        lacks = lacks_of(
            way,
            outputs,
            failures.num_failures - num_before,
            num_preempted=scheduler.num_preempted - num_preempted,
            model_kind=self.llm.engine.drafter.kind,
            takes_over=isinstance(memory, Pages) and memory.borders is None,
        )
        differences = []
        for case, output in outputs.items():
            plain = self.findings.plain[case]
            differences += judged_differences(
                self.llm.engine, case, output, plain, self.findings.noise
            )
        num_tokens = sum(len(sample.token_ids) for output in outputs.values() for sample in output)
        acceptance = total_acceptance(outputs.values())
        self.findings.ways.append(
            WayCheck(way, len(outputs), num_tokens, tuple(differences), acceptance, lacks)
        )

    def _check_contexts(self) -> None:
        for case in self._context_cases:
            self.findings.contexts.append(check_context(self.llm.engine, case))
            self._finish(case)

    def _run_controls(self) -> None:
        for control in CONTROLS:
            cases = suitable_cases(self.llm, control, self._cases, self.config.num_control_cases)
            result = run_control(self.llm, control, cases, self.findings.noise)
            self.findings.controls.append(result)
            self._advance(4 * self.config.max_tokens)

    def _check_distributions(self) -> None:
        num_draws = self.config.num_draws
        for name in SAMPLINGS:
            self.findings.distributions.append(check_sampling(name, num_draws))
            self._advance(WORK_OF_DRAW * num_draws)
        self.findings.distributions.append(check_planted(num_draws))

    def _ask_stock(self) -> None:
        if not self._greedy_cases:
            return
        compared = compare_with_stock(self.llm, self._greedy_cases, self._finish)
        for agreement in compared:
            self.findings.agreements.append(agreement)
