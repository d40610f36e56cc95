"""The published way to call a drafter: on a transformers model of one's own."""

from contextlib import contextmanager

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    SiglipVisionConfig,
)

from blockdraft import DraftModel, ModelError, RequestError
from tests.tiny import (
    PATH_HEADS,
    TINY_SIZES,
    VOCAB_SIZE,
    randomize_additions,
    tiny_draft_config,
    tiny_target,
)


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


@pytest.mark.parametrize("name", PATH_HEADS)
def test_spec_generate_with_a_path_head(name):
    target, drafter = (
        tiny_target(dtype=torch.float64),
        DraftModel(tiny_draft_config(**PATH_HEADS[name])),
    )
    randomize_additions(drafter)
    drafter.double()
    input_ids = torch.arange(5, 25)[None]
    plain = drafter.spec_generate(target, input_ids, 12, block_size=1)
    for block_size in (None, 2, 6):
        drafted = drafter.spec_generate(target, input_ids, 12, block_size=block_size)
        assert torch.equal(drafted, plain)


@pytest.mark.parametrize("fails", ["nothing", "drafter", "target"])
def test_spec_generate_leaves_the_target_as_it_was(fails, monkeypatch):
    target, drafter = _pair()
    attention = target.config._attn_implementation
    input_ids = torch.arange(5, 25)[None]
    before = target(input_ids).logits
    plain = drafter.spec_generate(target, input_ids, 8, block_size=1)
    if fails == "target":
        with monkeypatch.context() as patch:
            patch.setattr(target.model, "forward", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                drafter.spec_generate(target, input_ids, 8)
    else:
        if fails == "drafter":  # whose proposals are dropped
            monkeypatch.setattr(drafter, "forward", lambda *args: 1 / 0)
        assert torch.equal(drafter.spec_generate(target, input_ids, 8), plain)
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


def _for_text_and_images():
    """A target whose two parts attend in different ways."""
    text = Gemma3TextConfig(**TINY_SIZES, vocab_size=VOCAB_SIZE, sliding_window=24)
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    target = Gemma3ForConditionalGeneration(config).double().eval()
    target.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    return target


def test_each_part_of_a_target_keeps_its_own_attention():
    target, (_, drafter) = _for_text_and_images(), _pair()
    configs = [target.config, target.config.text_config, target.config.vision_config]
    before = [config._attn_implementation for config in configs]
    assert before[1:] == ["eager", "sdpa"]
    input_ids = torch.arange(5, 25)[None]
    drafted = drafter.spec_generate(target, input_ids, 8)
    assert torch.equal(drafter.spec_generate(target, input_ids, 8, block_size=1), drafted)
    assert [config._attn_implementation for config in configs] == before


@pytest.mark.parametrize(
    "setting", [{"output_hidden_states": True, "use_cache": False}, {"return_dict": False}], ids=str
)
def test_what_a_target_is_set_to_put_out_does_not_matter_and_stays(setting):
    """Hooks for hidden states would stay for good."""
    target, drafter = _pair()
    input_ids = torch.arange(5, 25)[None]
    expected = drafter.spec_generate(target, input_ids, 24)
    for name, value in setting.items():
        setattr(target.config, name, value)
    assert torch.equal(drafter.spec_generate(target, input_ids, 24), expected)
    assert {name: getattr(target.config, name) for name in setting} == setting
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


@contextmanager
def _default_type(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: _default_type(torch.float64),
    ],
    ids=["autocast", "default device", "default type"],
)
def test_what_is_set_around_the_call_does_not_matter(around):
    target, drafter = _pair(torch.float32)
    input_ids = torch.arange(5, 25)[None]
    expected = drafter.spec_generate(target, input_ids, 24)
    with around():
        assert torch.equal(drafter.spec_generate(target, input_ids, 24), expected)


def test_spec_generate_refuses_what_it_cannot_do():
    target, drafter = _pair()
    ids = torch.arange(5, 25)[None]
    for bad in (
        {"block_size": 7},
        {"block_size": 0},
        {"block_size": "3"},
        {"block_size": True},
        {"temperature": float("nan")},
        {"stop_token_ids": 0},
    ):
        with pytest.raises(RequestError, match=f"^{next(iter(bad))} is"):
            drafter.spec_generate(target, ids, 8, **bad)
    with pytest.raises(RequestError, match=r"^max_new_tokens is 2\.5; "):
        drafter.spec_generate(target, ids, 2.5)
    for wrong in (
        ids.expand(2, -1),
        ids[0],
        ids.tolist(),
        ids.float(),
        ids > 7,
        ids.to(torch.uint8),
    ):
        with pytest.raises(RequestError, match=r"^input_ids .*; give one sequence"):
            drafter.spec_generate(target, wrong, 8)
    with pytest.raises(ModelError, match="the target is 'gpt2'; give a loaded model"):
        drafter.spec_generate("gpt2", ids, 8)
    with pytest.raises(ModelError, match="make them equal"):
        drafter.float().spec_generate(target, ids, 8)
