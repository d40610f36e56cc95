"""Operations and bytes by formula, against those that torch counts and tensors have."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.cache.pages import Pages
from blockdraft.core.recorder import Work
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.measure.ledger import line_rates, make_ledger
from blockdraft.measure.phases import PhaseTimer
from blockdraft.models.arithmetic import Rates, target_rates
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.layers.quantized import quantize_model
from blockdraft.models.supported import head_dims_of
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.draft_model import DraftModelDrafter
from tests import eagle
from tests.parity.targets import make_eagle
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_FUSIONS,
    LAYER_IDS,
    MOE_KINDS,
    NUM_LAYERS,
    VOCAB_SIZE,
    tiny_drafter,
    tiny_target,
)
from tools import families

NUM_ROWS = 4
NUM_CACHED = 60
"""With as many rows behind it, a page is full: no keys only fill up."""
HEAD_DIM = 16


def tiny_engine(kind="llama", **drafter_changes):
    """In float64, whose linear layers torch counts, and without rows that only fill up."""
    model = tiny_target(kind, torch.float64)
    drafter_model = tiny_drafter(torch.float64, **drafter_changes)
    pages = Pages(8)
    target = PagedTarget(model, pages, layer_ids=LAYER_IDS, exact=False)
    contexts = PagedContexts(drafter_model.config, pages, drafter_model.fc.weight)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    drafter = DFlashDrafter(drafter_model, embedding.weight, head.weight, contexts)
    engine = Engine(target, drafter)
    engine.timer = PhaseTimer()
    engine.use_fixed_drafting(NUM_ROWS - 1)
    return engine


def counted_step(engine):
    """One step: what torch counts, and the ledger.

    But for rotations: some versions of transformers multiply them as matrices, of one inner
    dimension.
    """
    engine.timer.take_totals()
    # The fused kernels of attention are unknown to the counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        engine.step()
    ledger = make_ledger(engine.timer.take_totals(), engine)
    counts = counter.get_flop_counts()
    rotations = sum(
        sum(own.values()) for name, own in counts.items() if name.endswith(".rotary_emb")
    )
    counted = counter.get_total_flops() - rotations
    return counted, {line.name: line for line in ledger.lines}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", *MOE_KINDS])
def test_flops_are_those_that_torch_counts(kind):
    engine = tiny_engine(kind)
    engine.add(range(1, 1 + 64), SamplingParams(max_tokens=20, ignore_eos=True))
    counted, lines = counted_step(engine)
    assert counted == lines["prefill"].flops
    assert lines["prefill"].work == Work(64, 1, 64 * 64, 64, 1, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_flops_of_a_drafted_step_are_those_that_torch_counts(kind):
    engine = tiny_engine(kind)
    engine.add(range(1, 1 + NUM_CACHED), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    counted, lines = counted_step(engine)
    assert counted == pytest.approx(sum(line.flops for line in lines.values()), rel=1e-12)
    for name in ("draft_prefill", "draft", "draft_head", "bonus"):
        assert lines[name].flops > 0
    rows = [lines[name].work.rows for name in ("accepted", "bonus", "wasted")]
    assert sum(rows) == NUM_ROWS
    assert lines["draft"].work == Work(NUM_ROWS, 0, NUM_ROWS * 64, NUM_CACHED, 1, 1)
    assert lines["draft_head"].work.head_rows == NUM_ROWS - 1
    assert lines["draft_prefill"].work.rows == NUM_CACHED


@pytest.mark.parametrize("name", ["dflare", "dfly without correction"])
def test_flops_of_fusions_by_layer_are_those_that_torch_counts(name):
    engine = tiny_engine(**LAYER_FUSIONS[name])
    engine.add(range(1, 1 + NUM_CACHED), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    counted, lines = counted_step(engine)
    assert counted == pytest.approx(sum(line.flops for line in lines.values()), rel=1e-12)


def test_flops_of_other_drafters_are_those_that_torch_counts():
    """EAGLE-3: but for the fusion of the feature before the anchor."""
    draft = eagle.make_model()
    draft.to(torch.float64)  # as the target
    with_features, without, own = (
        PagedTarget(tiny_target("llama", torch.float64), Pages(8), layer_ids=ids, exact=False)
        for ids in (LAYER_IDS, (), ())
    )
    fusion = 2 * draft.fc.weight.numel()
    for engine, left_out, tolerance in (
        (Engine(with_features, make_eagle(with_features, draft)), fusion, 1e-12),
        # Three keys fill the page of the draft model up.
        (Engine(without, DraftModelDrafter(own, VOCAB_SIZE)), 0, 0.01),
    ):
        engine.timer = PhaseTimer()
        engine.use_fixed_drafting(NUM_ROWS - 1)
        engine.add(range(1, 1 + NUM_CACHED), SamplingParams(max_tokens=20, ignore_eos=True))
        engine.step()
        counted, lines = counted_step(engine)
        flops = sum(line.flops for line in lines.values())
        assert lines["draft"].flops > 0
        assert lines["draft"].num_bytes > 0
        assert counted == pytest.approx(flops + left_out, rel=tolerance)
        assert make_ledger(engine.timer.take_totals(), engine).memory.weights > 0


def test_the_next_step_projects_what_was_generated():
    engine = tiny_engine()
    engine.add(range(1, 1 + NUM_CACHED), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    (output,) = engine.step()
    _, lines = counted_step(engine)
    assert "draft_prefill" not in lines or not lines["draft_prefill"].work.rows
    assert lines["inject"].work.rows == len(output.token_ids)


def test_bytes_of_a_forward_are_those_of_its_tensors():
    model = tiny_target("llama", torch.float64)
    rates = target_rates(model)
    layers = sum(p.nbytes for p in model.model.layers.parameters())
    head = model.lm_head.weight.nbytes
    assert rates.num_bytes(Work(forwards=2)) == 2 * (layers + head)
    kv = NUM_LAYERS * 2 * 2 * HEAD_DIM * 8  # keys and values of two heads, in float64
    assert rates.num_bytes(Work(rows=3, keys=10)) == 13 * kv
    assert rates.num_bytes(Work(head_rows=2)) == 2 * VOCAB_SIZE * 8


def test_a_forward_reads_no_more_experts_than_its_rows_reach():
    model = tiny_target("qwen3_moe", torch.float32)
    experts = target_rates(model).experts
    assert (experts.num_experts, experts.num_used) == (8, 2)
    rates = Rates(experts=experts)
    assert rates.num_bytes(Work(rows=1, forwards=1)) == 2 * experts.num_bytes
    assert rates.num_bytes(Work(rows=100, forwards=1)) == 8 * experts.num_bytes
    # Half of a forward of two rows: half of the four experts that these reach.
    assert rates.num_bytes(Work(rows=1, forwards=0.5)) == 2 * experts.num_bytes


def test_layers_may_have_heads_of_different_sizes() -> None:
    """Of Gemma 4 every second layer here, in four heads, two of them for keys and values."""
    model = families.make("Gemma4")
    rates = target_rates(model)
    assert rates.pair_flops == 4 * 4 * 2 * (16 + 32)
    assert rates.key_bytes == rates.row_bytes == 2 * 4 * 2 * 2 * (16 + 32)
    assert head_dims_of(model.config) == [16, 32]


def test_experts_that_run_are_counted_by_their_other_names() -> None:
    experts = target_rates(families.make("AriaText")).experts
    assert experts is not None
    assert (experts.num_experts, experts.num_used) == (8, 2)


def test_all_experts_count_where_no_known_name_says_how_many_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockdraft.models.arithmetic._NUM_USED", ("another_name",))
    experts = target_rates(families.make("AriaText")).experts
    assert experts is not None
    assert experts.num_used == experts.num_experts == 8


def test_quantized_experts_count_as_experts_with_what_is_read():
    sizes = {"moe_intermediate_size": 64}
    plain = target_rates(tiny_target("qwen3_moe", **sizes))
    model = tiny_target("qwen3_moe", **sizes)
    quantize_model(model, "int4")
    found = target_rates(model)
    assert found.row_flops == plain.row_flops
    assert found.experts.num_experts == plain.experts.num_experts
    assert 0.15 * plain.experts.num_bytes < found.experts.num_bytes < 0.17 * plain.experts.num_bytes


def test_convolutions_are_no_experts():
    found = target_rates(families.make("Lfm2"))
    assert found.experts is None
    assert found.forward_bytes > 0


def test_drafting_has_rates_of_its_own_and_a_fake_has_none():
    engine = tiny_engine()
    rates = line_rates(engine)
    weight = engine.drafter.model.fc.weight
    assert rates["capture"].row_bytes == 2 * weight.shape[1] * weight.itemsize
    assert rates["draft_head"].head_row_flops == 2 * HIDDEN_SIZE * VOCAB_SIZE
    assert rates["inject"].row_flops == 2 * (weight.numel() + 2 * 2 * 32 * HIDDEN_SIZE)
    assert "controller" not in rates
