"""The published way to call a drafter: on a transformers model of one's own."""

import pytest
import torch

from blockdraft import DraftModel, ModelError, RequestError
from tests.tiny import tiny_draft_config, tiny_target


def _pair(dtype=torch.float64):
    target = tiny_target(dtype=dtype)
    torch.manual_seed(3)
    return target, DraftModel(tiny_draft_config()).to(dtype)


def test_spec_generate_equals_transformers():
    target, drafter = _pair()
    input_ids = torch.arange(5, 25)[None]
    expected = target.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=40, do_sample=False
    )
    for block_size in (None, 1, 3):
        output = drafter.spec_generate(
            target=target,
            input_ids=input_ids,
            max_new_tokens=40,
            temperature=0.0,
            stop_token_ids=[],
            block_size=block_size,
        )
        assert torch.equal(output, expected)
    stop = int(expected[0, 30])
    cut = drafter.spec_generate(target, input_ids, 40, stop_token_ids=[stop])
    end = expected[0, 20:].tolist().index(stop)
    assert torch.equal(cut, expected[:, : 20 + end + 1])


@pytest.mark.parametrize("fails", [False, True])
def test_spec_generate_leaves_the_target_as_it_was(fails, monkeypatch):
    target, drafter = _pair()
    attention = target.config._attn_implementation
    input_ids = torch.arange(5, 25)[None]
    before = target(input_ids).logits
    if fails:
        monkeypatch.setattr(drafter, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.spec_generate(target, input_ids, 8)
    else:
        drafter.spec_generate(target, input_ids, 8)
    assert target.config._attn_implementation == attention
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())
    assert torch.equal(target(input_ids).logits, before)


@pytest.mark.parametrize("fails", [False, True])
def test_spec_generate_runs_a_model_in_training_as_if_it_were_not(fails, monkeypatch):
    """Dropout would change the output, and gradient checkpointing would drop the cache."""
    target, drafter = _pair()
    input_ids = torch.arange(5, 25)[None]
    expected = drafter.spec_generate(target, input_ids, 24)
    target.train()
    for layer in target.model.layers:
        layer.self_attn.attention_dropout = 0.5
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    target.model.layers[1].eval()
    before = [module.training for module in target.modules()]
    if fails:
        monkeypatch.setattr(target.model.layers[3].mlp, "forward", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.spec_generate(target, input_ids, 8)
    else:
        assert torch.equal(drafter.spec_generate(target, input_ids, 24), expected)
    assert [module.training for module in target.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


def test_spec_generate_refuses_what_it_cannot_do():
    target, drafter = _pair()
    ids = torch.arange(5, 25)[None]
    for bad in (
        {"block_size": 7},
        {"block_size": 0},
        {"temperature": float("nan")},
        {"stop_token_ids": 0},
    ):
        with pytest.raises(RequestError):
            drafter.spec_generate(target, ids, 8, **bad)
    with pytest.raises(RequestError, match="one sequence"):
        drafter.spec_generate(target, ids.expand(2, -1), 8)
    with pytest.raises(ModelError, match="make them equal"):
        drafter.float().spec_generate(target, ids, 8)
