"""The target of any transformers model: what it refuses, what it leaves alone, and exact off."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models import supported
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.train.features import FrozenTarget
from tests.fakes import RandomDrafter
from tests.parity.checks import generate, generate_plain, stock_greedy
from tests.parity.test_architectures import IN_ONE_FORWARD, build
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_target

PROMPT = list(range(5, 45))
LENGTH_DEPENDENT = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_exact_off_is_what_transformers_computes(kind: str, drafts: bool) -> None:
    """Though the cache hands out its padding, and keys of rejected drafts behind it."""
    model = tiny_target(kind, torch.float64)
    expected = stock_greedy(model, PROMPT, 60)
    params = SamplingParams(max_tokens=60)
    with SequentialTarget(model, exact=False).released_after() as target:
        drafter = RandomDrafter(5, VOCAB_SIZE)
        found = (
            generate(target, drafter, PROMPT, params)
            if drafts
            else generate_plain(target, PROMPT, params)
        )
    assert found.token_ids == expected
    assert len(set(expected)) >= 8


@pytest.mark.parametrize("rope_type", LENGTH_DEPENDENT)
def test_rope_that_depends_on_the_length_is_refused_unless_exact_is_off(rope_type: str) -> None:
    """Where the model's rotation is not of transformers' own form."""
    model = tiny_target()
    model.config.rope_parameters = dict(LENGTH_DEPENDENT[rope_type])
    with pytest.raises(ModelError, match=f"'{rope_type}'.*--exact off"):
        SequentialTarget(model)
    SequentialTarget(model, exact=False).release()


def test_rope_is_looked_at_in_every_layer_type() -> None:
    model = tiny_target("gemma3")
    SequentialTarget(model).release()
    model.config.rope_parameters["full_attention"] = LENGTH_DEPENDENT["longrope"]
    with pytest.raises(ModelError, match="'longrope'"):
        SequentialTarget(model)


def test_rope_is_found_under_its_old_names() -> None:
    config: Any = SimpleNamespace(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "dynamic" in supported.rope_types(config)


def state_of(model: torch.nn.Module) -> Any:
    return (
        model.config._attn_implementation,
        [module.training for module in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def test_a_refused_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target()
    model.train()
    before = state_of(model)
    with pytest.raises(ModelError, match="target layer ids"):
        SequentialTarget(model, layer_ids=(99,))
    with monkeypatch.context() as patch:
        patch.setattr(model, "get_output_embeddings", lambda: None)
        with pytest.raises(ModelError, match="no output head"):
            SequentialTarget(model, layer_ids=LAYER_IDS)
    assert state_of(model) == before


def test_a_failure_half_way_releases_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_target()
    model.train()
    before = state_of(model)

    def fail(hook: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.get_output_embeddings(), "register_forward_pre_hook", fail)
        with pytest.raises(KeyboardInterrupt):
            SequentialTarget(model, layer_ids=LAYER_IDS)
    assert state_of(model) == before


def test_a_model_whose_attention_cannot_be_replaced_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_target()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ModelError, match="attention cannot be replaced"):
        SequentialTarget(model)


def plan_of(params: SamplingParams) -> ForwardPlan:
    sequence = Sequence(
        key=0,
        params=params,
        seed=0,
        sample_index=0,
        stop_ids=frozenset(),
        token_ids=list(PROMPT),
        num_prompt=len(PROMPT),
    )
    return ForwardPlan([PlannedRow(Row(sequence, list(PROMPT), 0))])


def test_rows_that_never_draft_pay_for_no_features() -> None:
    with SequentialTarget(tiny_target(), layer_ids=LAYER_IDS).released_after() as target:
        (plain,) = target.forward(plan_of(SamplingParams(num_draft_tokens=0))).features
        assert plain is None
        assert not target._captured
        target.close(0)
        features = target.forward(plan_of(SamplingParams())).features_of(0)
        assert features is not None
        assert features.shape == (len(PROMPT), 64 * len(LAYER_IDS))


def test_features_are_of_all_rows_where_layers_compute_wanted_ones_only() -> None:
    """Gemma 4's layers that share keys leave out rows whose logits nobody wants."""
    model = build("Gemma4", IN_ONE_FORWARD["Gemma4"])
    with torch.no_grad():
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[index + 1][0] for index in (1, 2)], dim=-1)
    with SequentialTarget(model, layer_ids=(1, 2)).released_after() as target:
        features = target.forward(plan_of(SamplingParams())).features_of(0)
    torch.testing.assert_close(features, expected)


def test_features_of_several_streams_are_refused() -> None:
    """Gemma 3n's layers hand on streams of which none is the hidden state."""
    model = build("Gemma3n", IN_ONE_FORWARD["Gemma3n"])
    with SequentialTarget(model).released_after() as target:
        target.check_row_invariance()
    with (
        SequentialTarget(model, layer_ids=(1,)).released_after() as target,
        pytest.raises(ModelError, match="without features"),
    ):
        target.check_row_invariance()
    with pytest.raises(ModelError, match="without features"):
        FrozenTarget(model, (1,)).states(torch.tensor([PROMPT]))
