"""The ledger: where the time of a run went, what was computed in it, and what drafting cost.

Times are measured (measure/phases.py), operations and bytes follow from counted rows and the shapes
of the models (models/arithmetic.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from blockdraft.core.recorder import Line, Phase, Work
from blockdraft.measure.phases import LINES, SPLITS, PhaseTimer, PhaseTotals
from blockdraft.models.arithmetic import (
    Rates,
    context_bytes,
    copied_bytes,
    draft_rates,
    feature_bytes,
    head_rates,
    packed_bytes,
    projection_rates,
    target_rates,
    weight_bytes,
)
from blockdraft.models.target.interface import Target
from blockdraft.models.target.transformers import TransformersTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.draft_model import DraftModelDrafter
from blockdraft.speculate.drafters.eagle3 import Eagle3Drafter


class Measurable(Protocol):
    """What is asked of an engine that is measured."""

    timer: PhaseTimer

    @property
    def target(self) -> Target:
        """Runs the rows that are accounted for."""
        ...

    @property
    def drafter(self) -> Drafter:
        """Made the proposals."""
        ...


LEDGER_DEFINITIONS = {
    "lines": "nanoseconds by one clock, which add up to wall_nanoseconds exactly. A GPU is "
    "synchronized at the end of every phase, so a line includes the wait for the work that it "
    "launched",
    "prefill, accepted, bonus, siblings, wasted": "the target's forward pass, split after each "
    "step equally over its rows, so an attribution: rows of prompts, rows after which a draft "
    "token was accepted, one for each pass (all of plain decoding), rejected candidates beside a "
    "first child, and all others whose choice was discarded",
    "draft_prefill, inject": "fusing features and projecting them to keys and values of the draft "
    "layers, split likewise: of prompts, of generated tokens",
    "capture": "storing features until they are projected, and concatenating them if needed",
    "stream": "detokenization and streaming; everything between the steps of a measured run",
    "remainder": "the part of steps that no other line covers",
    "rows": "tokens or slots through the layers; head_rows: through the head or read as logits",
    "flops": "additions and multiplications of linear layers, attention and head, without padding; "
    "as if the last layer computed all rows of a prompt, which CPU kernels may skip",
    "bytes": "weights once per forward pass, keys and values of contexts, what is stored, and "
    "logits; lines that share a forward pass share its weights by their rows",
    "rows_per_token": "target rows of decoding per output token; 1 in plain decoding",
    "wasted_share": "of the target rows of decoding",
    "acceptance_length": "tau: tokens per target pass after prefill, bonus included",
    "break_even_tau": "the tau at which drafted decoding would take as long per token as plain "
    "decoding did: time per pass over time per plain token, all without prefill, draft_prefill and "
    "waiting",
    "sources": "draft tokens verified and accepted, by source",
    "margin": "acceptance_length divided by break_even_tau, minus 1: what drafting gains in "
    "decoding",
    "overall_margin": "plain divided by drafted time per token, minus 1, prefill included",
    "memory": "bytes that only drafting needs; the last two are peaks",
}


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One line; `flops` and `num_bytes` are 0 where nothing is multiplied or copied in bulk.

    waited_nanoseconds: for the device; split like the line's own time.
    """

    name: Line
    nanoseconds: int
    work: Work
    flops: float
    num_bytes: float
    waited_nanoseconds: int = 0


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Bytes that are there for drafting only: at once, and the most at any time."""

    weights: int = 0
    weight_copies: int = 0
    context: int = 0
    waiting_features: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.weight_copies + self.context + self.waiting_features


@dataclass(frozen=True, slots=True)
class SourceUse:
    """Candidates of one source; its name joins those that proposed the same ones."""

    name: str
    num_verified: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class Margin:
    """Drafted against plain decoding of the same requests; see LEDGER_DEFINITIONS."""

    break_even_tau: float
    margin: float
    overall_margin: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of a run; see LEDGER_DEFINITIONS. A line that was never met is absent."""

    lines: tuple[LedgerLine, ...]
    num_steps: int
    memory: DraftMemory
    sources: tuple[SourceUse, ...] = ()

    @property
    def wall_nanoseconds(self) -> int:
        """The sum of the lines."""
        return sum(line.nanoseconds for line in self.lines)

    @property
    def num_tokens(self) -> int:
        """Output tokens, those that prompts give included."""
        return self._work("commit").rows

    @property
    def num_passes(self) -> int:
        """Target passes over an anchor."""
        return self._work("bonus").sequences

    @property
    def num_decoded(self) -> int:
        """Tokens that the passes gave."""
        return self._work("accepted").rows + self._work("bonus").rows

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass; 0 without any."""
        return self.num_decoded / self.num_passes if self.num_passes else 0.0

    @property
    def rows_per_token(self) -> float:
        """Target rows per decoded token; 0 without any."""
        num_rows = self.num_decoded + self._num_wasted
        return num_rows / self.num_decoded if self.num_decoded else 0.0

    @property
    def wasted_share(self) -> float:
        """Part of the decoding rows that gave no token."""
        num_wasted = self._num_wasted
        return num_wasted / (self.num_decoded + num_wasted) if num_wasted else 0.0

    @property
    def _num_wasted(self) -> int:
        """Target rows of decoding that gave no token."""
        return self._work("siblings").rows + self._work("wasted").rows

    @property
    def remainder_share(self) -> float:
        """Part of the wall time that no line claims."""
        wall = self.wall_nanoseconds
        return self._nanoseconds("remainder") / wall if wall else 0.0

    @property
    def decoding_nanoseconds(self) -> int:
        """Without the prompts' passes through both models, and without waiting."""
        others: tuple[Line, ...] = ("prefill", "draft_prefill", "wait")
        return self.wall_nanoseconds - sum(self._nanoseconds(line) for line in others)

    def margin_over(self, plain: "Ledger") -> Margin | None:
        """What drafting gained against the ledger of plain decoding; None if either is empty."""
        if not (self.num_passes and plain.num_decoded):
            return None
        per_pass = self.decoding_nanoseconds / self.num_passes
        per_plain_token = plain.decoding_nanoseconds / plain.num_decoded
        break_even = per_pass / per_plain_token
        return Margin(
            break_even_tau=break_even,
            margin=self.acceptance_length / break_even - 1,
            overall_margin=_per_token(plain) / _per_token(self) - 1,
        )

    def to_dict(self, plain: "Ledger | None" = None) -> dict[str, Any]:
        """Plain values for JSON; with `plain` also the margin over it, or None."""
        described: dict[str, Any] = {
            "wall_nanoseconds": self.wall_nanoseconds,
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "acceptance_length": self.acceptance_length,
            "rows_per_token": self.rows_per_token,
            "wasted_share": self.wasted_share,
            "remainder_share": self.remainder_share,
            "sources": {
                use.name: {"num_verified": use.num_verified, "num_kept": use.num_kept}
                for use in self.sources
            },
            "lines": {line.name: _describe(line) for line in self.lines},
            "memory": asdict(self.memory) | {"total": self.memory.total},
        }
        if plain is not None:
            margin = self.margin_over(plain)
            described["over_plain"] = None if margin is None else asdict(margin)
        return described

    def _work(self, name: Line) -> Work:
        return next((line.work for line in self.lines if line.name == name), Work())

    def _nanoseconds(self, name: Line) -> int:
        return next((line.nanoseconds for line in self.lines if line.name == name), 0)


def make_ledger(totals: PhaseTotals, engine: Measurable) -> Ledger:
    """The account of what a PhaseTimer has noted of this engine.

    Operations and bytes are known of transformers targets and of trained drafters and draft models,
    0 of any other.
    """
    rates = line_rates(engine)
    times = totals.line_nanoseconds
    lines = []
    for name in LINES:
        if name not in times and name not in totals.work:
            continue
        work, rate = totals.work.get(name, Work()), rates.get(name, Rates())
        passed = times.get(name, 0)
        waited = _waited(totals, name, passed)
        lines.append(LedgerLine(name, passed, work, rate.flops(work), rate.num_bytes(work), waited))
    sources = tuple(
        SourceUse(name, num, totals.kept[name]) for name, num in sorted(totals.verified.items())
    )
    return Ledger(tuple(lines), totals.num_steps, _memory(totals, engine), sources)


def line_rates(engine: Measurable) -> dict[Line, Rates]:
    """What a unit of work costs, for the lines that have such a cost."""
    rates: dict[Line, Rates] = {}
    if isinstance(engine.target, TransformersTarget):
        of_target = target_rates(engine.target.model)
        rates = dict.fromkeys(SPLITS["forward"], of_target)
        rates["choose"] = Rates(head_row_bytes=of_target.head_row_bytes)
    drafter = engine.drafter
    if isinstance(drafter, DFlashDrafter | Eagle3Drafter):
        model, head = drafter.model, _draft_head(drafter)
        rates |= dict.fromkeys(SPLITS["project"], projection_rates(model))
        rates["draft"], rates["draft_head"] = draft_rates(model), head
        rates["guess"] = Rates(head_row_bytes=head.head_row_bytes)
        # A copy is read and written.
        rates["capture"] = Rates(row_bytes=2 * feature_bytes(model))
    if isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, TransformersTarget):
        of_model = target_rates(drafter.model.model)
        rates |= dict.fromkeys(("draft_prefill", "draft"), of_model)
    return rates


def _draft_head(drafter: DFlashDrafter | Eagle3Drafter) -> Rates:
    size, itemsize = drafter.model.config.hidden_size, drafter.model.fc.weight.itemsize
    return head_rates(drafter.num_guessable, size, itemsize)


def _waited(totals: PhaseTotals, name: Line, nanoseconds: int) -> int:
    """A line's part of the time that its phase waited for the device."""
    whole: Mapping[Line, Phase] = {line: phase for phase in SPLITS for line in SPLITS[phase]}
    phase: Any = whole.get(name, name)
    return totals.waited[phase] * nanoseconds // max(1, totals.nanoseconds[phase])


def _memory(totals: PhaseTotals, engine: Measurable) -> DraftMemory:
    drafter = engine.drafter
    if isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, TransformersTarget):
        return DraftMemory(weights=weight_bytes(drafter.model.model))
    if not isinstance(drafter, DFlashDrafter | Eagle3Drafter):
        return DraftMemory()
    model = drafter.model
    if isinstance(drafter, Eagle3Drafter):
        copies = packed_bytes(drafter.model)
    else:
        all_guessable = drafter.vocabulary_ids is None
        copies = copied_bytes(drafter.model, drafter.num_guessable, all_guessable=all_guessable)
    return DraftMemory(
        weights=weight_bytes(model),
        weight_copies=copies,
        context=totals.most_context * context_bytes(model),
        waiting_features=totals.most_waiting * feature_bytes(model),
    )


def _per_token(ledger: Ledger) -> float:
    return ledger.wall_nanoseconds / ledger.num_tokens


def _describe(line: LedgerLine) -> dict[str, Any]:
    return {
        "nanoseconds": line.nanoseconds,
        "waited_nanoseconds": line.waited_nanoseconds,
        "rows": line.work.rows,
        "head_rows": line.work.head_rows,
        "sequences": line.work.sequences,
        "flops": line.flops,
        "bytes": line.num_bytes,
    }
