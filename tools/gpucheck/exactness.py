"""Under which rule the pair passes the check of a load, and whether it is proven then."""

from dataclasses import replace
from typing import Any

from blockdraft.core.errors import ModelError
from blockdraft.hub.model_config import load_config
from blockdraft.hub.resolve import resolve_model
from blockdraft.kernels.backends import card_kernels
from blockdraft.llm import LLM
from blockdraft.measure.graphs import describe_graphs
from blockdraft.models.supported import head_dims_of
from blockdraft.models.target.loading import DTYPES
from blockdraft.proof.certificate import describe_proof, make_certificate
from blockdraft.proof.config import QUICK, ProofConfig
from blockdraft.proof.corpus import BUNDLED, first_of_each_kind, read_prompts
from blockdraft.proof.findings import Findings
from blockdraft.proof.prove import Proof
from gpucheck.notes import Notes, first_line
from gpucheck.pair import Way, fast_way, loaded
from gpucheck.rules import TRITON, candidates_on
from gpucheck.settings import Settings

PASSES = "passes"
KEPT = (
    *("verdict", "partial", "failures", "seconds", "num_differences", "noise", "controls"),
    *("draft_context", "distribution", "transformers", "card", "graphs"),
)
"""Of a certificate; the rest tells about folders, or is long."""


def run(settings: Settings, notes: Notes) -> None:
    """Prove the first way that passes, or one without a promise.

    At once: the other precision is tried afterwards, with the time that is left.
    """
    taken: Way | None = None
    for dtype in ("float32",) if settings.is_rehearsal else ("bfloat16", "float32"):
        rule = _first_that_passes(settings, notes, dtype)
        if taken is None and rule is not None:
            taken = dtype, rule
            _prove(taken, settings, notes)
    if taken is None:
        _prove(fast_way(settings), settings, notes)


def _first_that_passes(settings: Settings, notes: Notes, dtype: str) -> str | None:
    """The rule; those behind it are not tried."""
    for rule in candidates_on(settings.device):
        try:
            with loaded(settings, (dtype, rule), adaptive=False):
                outcome = _without_kernels(settings, dtype) if rule == TRITON else ""
                outcome = outcome or PASSES
        except (ModelError, RuntimeError) as error:
            outcome = first_line(error)
        notes.note("load check", dtype, rule, value=outcome)
        if outcome == PASSES:
            return rule
    return None


def _without_kernels(settings: Settings, dtype: str) -> str:
    """Why a load that should have had the Triton kernels did without them; empty if it did not."""
    config = load_config(resolve_model(settings.target)).get_text_config()
    return card_kernels(DTYPES[dtype], settings.device, head_dims_of(config))[1]


def _prove(way: Way, settings: Settings, notes: Notes) -> None:
    # What is measured later needs it, also if this part does not end.
    notes.note("taken", value=way)
    with loaded(settings, way, adaptive=False) as llm:
        _prove_loaded(llm, settings, notes)


def _prove_loaded(llm: LLM, settings: Settings, notes: Notes) -> None:
    config = ProofConfig(**QUICK)
    corpus = first_of_each_kind(read_prompts(BUNDLED))
    if settings.is_rehearsal:
        config = replace(config, max_tokens=8, num_draws=1000, num_stock_prompts=2)
        corpus = corpus[:3]
    description = describe_proof(llm, config, [])

    def certify(findings: Findings) -> None:
        graphs = describe_graphs(llm.engine.target, llm.engine.drafter)
        certificate = make_certificate(description | {"graphs": graphs}, findings)
        notes.note("proof", value=_kept(certificate))

    proof = Proof(llm, config, corpus, on_stage=certify)
    proof.run()
    certify(proof.findings)


def _kept(certificate: dict[str, Any]) -> dict[str, Any]:
    checks = [
        {key: check[key] for key in ("name", "num_cases", "num_tokens", "num_failures")}
        | {"tau": check["acceptance_length"], "differences": check["differences"][:3]}
        for check in certificate["checks"]
    ]
    return {name: certificate[name] for name in KEPT} | {"checks": checks}
