"""Ledgers of tiny pairs, and the arithmetic of what drafting cost."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from blockdraft import LLM
from blockdraft.core.recorder import Work
from blockdraft.engine import engine as engine_module
from blockdraft.engine.engine import Engine
from blockdraft.measure.ledger import DraftMemory, Ledger, LedgerLine, make_ledger
from blockdraft.measure.phases import PhaseTimer, PhaseTotals
from blockdraft.models.layers.packed import can_pack
from blockdraft.speculate.drafters.none import NoDrafter
from tests.fakes import OracleDrafter, TableTarget
from tests.small_llm import params

PROMPTS = [[5, 6, 7, 8, 9] * 3, [11, 12, 13]]
NUM_PROMPT = sum(map(len, PROMPTS))


def account(llm, prompts=PROMPTS, **changes):
    """The ledger of these requests, its lines by name, and the generations."""
    with llm.measured() as meter:
        generations = llm.generate([list(ids) for ids in prompts], params(**changes))
        ledger = meter.take()
    return ledger, {line.name: line for line in ledger.lines}, generations


def test_a_ledger_accounts_for_every_row_and_token(llm):
    ledger, lines, generations = account(llm)
    outputs = [generation.completions[0] for generation in generations]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    passes = sum(output.acceptance.num_passes for output in outputs)
    drafted = sum(output.acceptance.drafted.total() for output in outputs)
    assert ledger.num_tokens == num_tokens
    assert ledger.num_passes == passes
    assert ledger.num_decoded == num_tokens - len(outputs)  # the prompts gave the first ones
    assert lines["prefill"].work.rows == NUM_PROMPT
    assert sum(lines[name].work.rows for name in ("accepted", "bonus", "wasted")) == (
        passes + drafted
    )
    assert ledger.acceptance_length == pytest.approx(ledger.num_decoded / passes)
    assert sum(use.num_verified for use in ledger.sources) == sum(
        output.acceptance.num_drafted for output in outputs
    )
    assert [use.name for use in ledger.sources] == ["dflash"]
    assert ledger.rows_per_token == pytest.approx((passes + drafted) / ledger.num_decoded)
    assert lines["draft_prefill"].work.rows == NUM_PROMPT
    assert lines["draft"].work.sequences == sum(bool(n) for n in _depths(outputs))
    assert not llm.engine.timer.measures


def _depths(outputs):
    return [
        depth
        for output in outputs
        for depth, count in output.acceptance.num_passes_of_depth.items()
        for _ in range(count)
    ]


def test_lines_sum_to_the_time_between_two_takings(llm, monkeypatch):
    now = Counter()

    def clock():
        now["ns"] += 1  # each reading is a nanosecond later, so the wall time is their number
        return now["ns"]

    monkeypatch.setattr(
        PhaseTimer.__init__,
        "__kwdefaults__",
        {"measures": True, "clock": clock, "synchronize": None},
    )
    with llm.measured() as meter:
        meter.take()
        begin = now["ns"]
        llm.generate(PROMPTS[0], params())
        ledger = meter.take()
        assert ledger.wall_nanoseconds == now["ns"] - begin > 0


def test_plain_decoding_has_no_lines_of_drafting(llm):
    ledger, lines, _ = account(llm, num_draft_tokens=0)
    for name in ("draft_prefill", "draft", "draft_head", "guess", "accepted", "wasted"):
        assert name not in lines or lines[name].work == Work()
    assert ledger.rows_per_token == ledger.acceptance_length == 1.0
    assert ledger.wasted_share == 0.0
    assert ledger.memory.context == ledger.memory.waiting_features == 0


def test_the_ledger_changes_no_token(llm):
    _, _, generations = account(llm, temperature=0.8, seed=3)
    unmeasured = llm.generate([list(ids) for ids in PROMPTS], params(temperature=0.8, seed=3))
    tokens = [[g.completions[0].token_ids for g in gs] for gs in (generations, unmeasured)]
    assert tokens[0] == tokens[1]


def test_memory_is_that_of_the_tensors(llm):
    ledger, _, _ = account(llm)
    drafter, memory = llm.engine.drafter, ledger.memory
    model = drafter.model
    assert memory.weights == sum(p.nbytes for p in model.parameters())
    packed = [m for m in model.modules() if isinstance(m, nn.Linear) and can_pack(m.weight)]
    projection = sum(
        weight.nbytes
        for layer in model.layers
        for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight)
    )
    head = llm.engine.target.model.get_output_embeddings().weight
    head_bytes = head.nbytes if can_pack(head) else 0
    assert memory.weight_copies == sum(m.weight.nbytes for m in packed) + projection + head_bytes
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    most = memory.context / per_token
    assert NUM_PROMPT <= most <= NUM_PROMPT + 2 * params().max_tokens
    assert memory.waiting_features >= max(map(len, PROMPTS)) * model.fc.weight.shape[1] * 4
    assert memory.total == sum(
        (memory.weights, memory.weight_copies, memory.context, memory.waiting_features)
    )


class Listening(PhaseTimer):
    """Measures nothing, and notes what it is told: all of it has to be counted first."""

    def __init__(self):
        super().__init__(measures=False)
        self.told = []

    def add(self, line, work):
        self.told.append(line)

    def hold(self, *, context, waiting):
        self.told.append("hold")


def test_without_measurement_nothing_is_counted(llm, monkeypatch):
    timer, usual = Listening(), llm.engine.timer
    for name in ("rows_work", "record_step"):
        monkeypatch.setattr(engine_module, name, lambda *args, name=name: timer.told.append(name))
    llm.engine.timer = timer
    try:
        generation = llm.generate(PROMPTS[0], params())
    finally:
        llm.engine.timer = usual
    assert len(generation.completions[0].token_ids) == params().max_tokens
    assert timer.told == []


def test_the_parts_of_an_engine_get_its_timer(llm):
    engine, usual = llm.engine, llm.engine.timer
    assert not usual.measures
    assert engine.target.recorder is engine.drafter.recorder is usual
    with llm.measured():
        assert engine.timer.measures
        assert engine.target.recorder is engine.drafter.recorder is engine.timer
    assert engine.target.recorder is engine.drafter.recorder is engine.timer is usual


def test_a_measurement_that_fails_leaves_the_timer_as_it_was(llm):
    usual = llm.engine.timer
    with pytest.raises(RuntimeError), llm.measured():
        raise RuntimeError
    assert llm.engine.timer is usual


def test_parts_that_tell_nothing_are_measured_from_outside():
    target = TableTarget.random()
    engine = Engine(target, OracleDrafter(3))
    engine.timer = PhaseTimer()
    engine.use_fixed_drafting(3)
    key = engine.add([1, 2, 3], params(max_tokens=9))
    engine.drafter.known[key] = [0] * 9
    while engine.has_work:
        engine.step()
    ledger = make_ledger(engine.timer.take_totals(), engine)
    assert ledger.num_tokens == 9
    assert sum(line.flops + line.num_bytes for line in ledger.lines) == 0
    assert ledger.memory == DraftMemory()
    assert not hasattr(target, "recorder")


MILLISECOND = 1_000_000


def ledger(passes, kept, num_wasted, *, prefill=0, **milliseconds):
    """A ledger of `passes` that kept so many tokens and wasted so many rows, and of one prompt."""
    work = {
        "accepted": Work(rows=kept - passes),
        "bonus": Work(rows=passes, sequences=passes),
        "wasted": Work(rows=num_wasted),
        "commit": Work(rows=kept + 1),
    }
    times = {"prefill": prefill, **dict.fromkeys(work, 0), **milliseconds}
    lines = [
        LedgerLine(name, ms * MILLISECOND, work.get(name, Work()), 0.0, 0.0)
        for name, ms in times.items()
    ]
    return Ledger(tuple(lines), passes + 1, DraftMemory())


PLAIN = ledger(29, 29, 0, prefill=11, bonus=290)
DRAFTED = ledger(
    10, 29, 31, prefill=11, draft_prefill=4, draft=20, bonus=50, accepted=60, wasted=20
)


def test_the_break_even_tau_is_the_time_of_a_pass_in_plain_tokens():
    margin = DRAFTED.margin_over(PLAIN)
    assert margin.break_even_tau == pytest.approx((150 / 10) / (290 / 29))
    assert margin.margin == pytest.approx(2.9 / 1.5 - 1)
    assert margin.overall_margin == pytest.approx(301 / 165 - 1)


def test_at_the_break_even_tau_both_take_as_long():
    even = ledger(20, 29, 100, prefill=11, bonus=290)
    margin = even.margin_over(PLAIN)
    assert even.acceptance_length == pytest.approx(margin.break_even_tau)
    assert margin.margin == pytest.approx(0)
    assert margin.overall_margin == pytest.approx(0)


def test_derived_figures():
    assert DRAFTED.rows_per_token == pytest.approx(60 / 29)
    assert DRAFTED.wasted_share == pytest.approx(31 / 60)
    assert DRAFTED.wall_nanoseconds == 165 * MILLISECOND
    assert DRAFTED.decoding_nanoseconds == 150 * MILLISECOND


def test_a_ledger_of_nothing_divides_by_nothing():
    empty = make_ledger(PhaseTotals(), Engine(TableTarget.random(), NoDrafter()))
    assert empty.lines == ()
    assert empty.acceptance_length == empty.rows_per_token == empty.wasted_share == 0
    assert empty.remainder_share == 0
    assert DRAFTED.margin_over(empty) is empty.margin_over(PLAIN) is None
    assert empty.to_dict(PLAIN)["over_plain"] is None


def test_a_ledger_is_plain_values():
    described = DRAFTED.to_dict(PLAIN)
    assert json.loads(json.dumps(described)) == described
    assert (
        sum(line["nanoseconds"] for line in described["lines"].values())
        == (described["wall_nanoseconds"])
    )
    assert described["over_plain"]["break_even_tau"] == pytest.approx(1.5)
    assert "over_plain" not in DRAFTED.to_dict()


def test_waiting_for_a_device_is_split_like_the_line():
    totals = PhaseTotals(
        nanoseconds=Counter(forward=100, choose=50),
        split_nanoseconds=Counter(accepted=30, bonus=10, wasted=60),
        waited=Counter(forward=50, choose=20),
    )
    engine = Engine(TableTarget.random(), NoDrafter())
    lines = {line.name: line.waited_nanoseconds for line in make_ledger(totals, engine).lines}
    assert lines == {"accepted": 15, "bonus": 5, "wasted": 30, "choose": 20}


def test_a_drafter_with_a_vocabulary_of_its_own_copies_its_rows_of_the_head(folders):
    llm = LLM(str(folders[0]), str(folders[1]), dtype="float32", adaptive=False)
    drafter = llm.engine.drafter
    drafter.vocabulary_ids = torch.arange(10)
    totals = replace(PhaseTotals())
    rows = make_ledger(totals, llm.engine).memory.weight_copies
    drafter.vocabulary_ids = None
    whole = make_ledger(totals, llm.engine).memory.weight_copies
    per_row = drafter.embed_weight.shape[1] * 4
    assert whole - rows == (drafter.embed_weight.shape[0] - 10) * per_row
