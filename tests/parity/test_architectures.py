"""More architectures: each gives what transformers alone gives, or is refused.

Some run all sequences in one forward, some one after another; none is silently wrong.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.attention.plan import PoolNumbers
from blockdraft.models.layers.recurrent import cache_argument
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged, layer_shapes
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.test_lossless_trees import check_trees
from tests.tiny import TINY_SIZES, VOCAB_SIZE, randomize, tiny_target

WINDOW = 24
_SLIDING = {"sliding_window": WINDOW}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED_KV = {
    **_SLIDING,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_STRETCHED = {
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10_000.0,
        "alpha": 1000.0,
        "factor": 1.0,
    }
}
"""Called dynamic in published configs, and the same for texts of any length."""

IN_ONE_FORWARD: Mapping[str, Mapping[str, Any]] = {
    "AXK1": {**_EXPERTS, **_LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "Afmoe": {**_EXPERTS, **_SLIDING, "num_experts": 16, "num_dense_layers": 1},
    "Apertus": {},
    "Arcee": {},
    "AriaText": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},
    "Beam": {**_EXPERTS, **_SLIDING, "num_experts": 8, "n_group": 2, "topk_group": 1},
    "BioGpt": {},
    "BitNet": {},
    "CTRL": {"n_embd": 64, "n_head": 4, "n_layer": 4, "dff": 96},
    "CodeGen": {"n_embd": 64, "n_head": 4, "n_layer": 4, "rotary_dim": 8, "n_ctx": 512},
    "Gemma2": {**_SLIDING, "query_pre_attn_scalar": 16},
    "Gemma4": {**_SHARED_KV, "global_head_dim": 32},
    "Gemma4Unified": {**_SHARED_KV, "global_head_dim": 32},
    "Cohere": {},
    "Cohere2": _SLIDING,
    "Cohere2Moe": {**_EXPERTS, **_SLIDING, "num_experts": 8},
    "CohereCompass": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    },
    "Cwm": {**_SLIDING, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    # Latent attention: values are smaller than keys.
    "DeepseekV2": {**_EXPERTS, **_LATENT, "head_dim": 8},
    "DeepseekV3": {**_EXPERTS, **_LATENT, "head_dim": 8, "n_group": 2, "topk_group": 1},
    # Each layer attends twice, to the same keys and two halves of the values.
    "DiffLlama": {},
    "Dots1": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "Emu3": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "Ernie4_5": {},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_intermediate_size": 48, "moe_k": 2},
    "Exaone4": {**_SLIDING, "sliding_window_pattern": 2},
    "ExaoneMoe": {**_EXPERTS, **_SLIDING, "num_experts": 8, "n_group": 1, "topk_group": 1},
    "FlexOlmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "Flint": {**_EXPERTS, **_SLIDING, "num_experts": 8},
    "GPT2": {},
    "GPTBigCode": {},
    "GPTNeoX": {},
    "Gemma": {},
    "Gemma3n": {
        **_SHARED_KV,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "Glm": {},
    "Glm4": {},
    "Glm4MoeLite": {**_EXPERTS, **_LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "Glm4Moe": {
        **_EXPERTS,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "Granite": {},
    "GraniteSWA": _SLIDING,
    "GraniteMoe": {"num_local_experts": 4},
    "GraniteMoeSWA": {**_SLIDING, "num_local_experts": 4},
    "GraniteMoeShared": {"num_local_experts": 4, "shared_intermediate_size": 48},
    "HYV3": {**_EXPERTS, "num_experts": 8},
    "Helium": {},
    "HunYuanDenseV1": _STRETCHED,
    "HunYuanMoEV1": {
        **_STRETCHED,
        "num_experts": 8,
        "moe_topk": 2,
        "moe_intermediate_size": 48,
    },
    "HyperCLOVAX": {},
    "Jais2": {},
    # Its attention has a gate of one value a head.
    "Laguna": {**_EXPERTS, **_SLIDING, "num_experts": 16},
    "Mellum": {**_EXPERTS, **_SLIDING, "num_experts": 8},
    # Sinks in some layers, and values that are scaled and smaller than keys.
    "MiMoV2Flash": {
        **_EXPERTS,
        **_SLIDING,
        "n_routed_experts": 8,
        "v_head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "MiniCPM3": {**_LATENT, "head_dim": 8},
    "MiniMaxM2": {**_EXPERTS, "num_local_experts": 16},
    "Ministral3": {},
    "Ministral": _SLIDING,
    "Mistral": _SLIDING,
    "Mixtral": {"num_local_experts": 8},
    "NanoChat": {},
    "Nemotron": {},
    "OPT": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "Olmo2": {},
    "Olmo": {},
    "Olmo3": _SLIDING,
    "Olmoe": {"num_experts": 16, "num_experts_per_tok": 2},
    "Persimmon": {},
    "Phi": {},
    "Phi3": _SLIDING,
    "Phimoe": {"num_local_experts": 4},
    "Qwen2Moe": {
        **_EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
    "SmolLM3": {},
    "SeedOss": {},
    "SolarOpen": {**_EXPERTS, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    "StableLm": {},
    "Starcoder2": _SLIDING,
    "VaultGemma": _SLIDING,
    "Youtu": {**_LATENT, "head_dim": 8},
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_IN_TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
RECURRENT: Mapping[str, Mapping[str, Any]] = {
    "BailingHybrid": {
        **_EXPERTS,
        **_LATENT,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 8,
        "num_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_heads": 16,
        "linear_head_dim": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "Bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "FalconH1": {**_MAMBA2, "mamba_d_ssm": 128},
    "FalconMamba": {"state_size": 8},
    "GraniteMoeHybrid": {
        **_MAMBA2,
        **_IN_TURNS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "KimiLinear": {
        **_EXPERTS,
        "num_key_value_heads": 4,
        "linear_attn_config": {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4},
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "LaraMini": {
        **_EXPERTS,
        **_DELTA_NET,
        **_SLIDING,
        "num_experts": 8,
        "layer_types": [
            *("linear_attention", "sliding_attention"),
            *("linear_attention", "full_attention"),
        ],
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2Moe": {
        **_EXPERTS,
        "num_experts": 16,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "Lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "NemotronH": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "OlmoHybrid": {**_DELTA_NET, **_IN_TURNS},
    "Qwen3Next": {
        **_EXPERTS,
        **_DELTA_NET,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
    "Qwen3_5": _DELTA_NET,
    "Qwen3_5Moe": {
        **_EXPERTS,
        **_DELTA_NET,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
    "Zamba": {"n_mamba_heads": 2, "mamba_d_state": 8, "use_mamba_kernels": False},
    "Zamba2": {
        **_MAMBA2,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
}
"""Layers with a state: recurrent ones, or convolutions."""
STATES_ALONE = ("FalconMamba", "Mamba", "Mamba2")
"""No attention at all, so nothing lies in pages."""
ONE_AFTER_ANOTHER: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "Llama4": (
        {
            "attention_chunk_size": WINDOW,
            "intermediate_size_mlp": 96,
            "num_local_experts": 16,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "does not tell its attention which window",
    ),
    # Its images, which are left out, have layers of their own.
    "Mllama": (
        {"cross_attention_layers": [1, 3], "bos_token_id": 1, "pad_token_id": 0},
        "layer 1 has no attention with keys and values of its own",
    ),
    # The decoder of an encoder-decoder alone: it counts positions by its cache.
    "Pegasus": (
        {
            "decoder_layers": 4,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "forced_eos_token_id": None,  # transformers' generate would end with it
        },
        "takes no position_ids",
    ),
    "Zamba": (RECURRENT["Zamba"], "without a cache fails"),
    "Zamba2": (RECURRENT["Zamba2"], "share an attention"),
    **{name: (RECURRENT[name], "keep a state and no keys") for name in STATES_ALONE},
}
_INDEXED = {**_EXPERTS, **_LATENT, "head_dim": 8, "n_group": 1, "topk_group": 1}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "Bloom": ({}, "its attention cannot be replaced"),
    "GPTNeo": ({"num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]}, "replaced"),
    # An indexer picks the keys that each token attends.
    "DeepseekV32": (_INDEXED, "indexed_attention layers cannot be rolled back"),
    "GlmMoeDsa": (_INDEXED, "indexed_attention layers cannot be rolled back"),
    "DeepseekV4": ({}, "compressed_attention layers cannot be rolled back"),
    # Its states are kept in a cache of its own.
    "MiniMax": ({"num_local_experts": 4}, "how layer 1 updates its state is unknown"),
    "RecurrentGemma": ({}, "how layer 0 updates its state is unknown"),
    # Its convolutions are within its attention.
    "Zaya": ({}, "return more than their output"),
    # Its layers compute a mask of their own, which no attention of ours would follow.
    "Doge": ({}, "does not run"),
    # Its states are kept in a cache of its own, which its layers expect.
    "xLSTM": ({"num_heads": 4}, "does not run"),
}


OTHER_STEPS = ("NemotronHForCausalLM", "Zamba2ForCausalLM")
"""In transformers a scan over many tokens and single steps differ here by more than roundings."""


def _named(*names: str) -> Any:
    return next(getattr(transformers, name) for name in names if hasattr(transformers, name))


def classes_of(name: str) -> tuple[Any, Any]:
    """Of a config and of a causal LM."""
    return (
        _named(f"{name}TextConfig", f"{name}Config"),
        _named(f"{name}ForCausalLM", f"{name}LMHeadModel"),
    )


def build(
    name: str, options: Mapping[str, Any], dtype: torch.dtype = torch.float64
) -> PreTrainedModel:
    config_type, model_type = classes_of(name)
    config = config_type(**{**TINY_SIZES, "vocab_size": VOCAB_SIZE, **options})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_type(config)
        randomize(model)
    model = model.to(dtype).eval()
    model.set_experts_implementation("eager")  # the default one has no float64
    return model


def requests() -> list[Request]:
    """Longer than a window and than a page, with one beginning that two of them share."""
    draw = random.Random(0)
    prompts = [tuple(draw.randrange(VOCAB_SIZE) for _ in range(n)) for n in (70, 3, 130, 33)]
    prompts.append(prompts[2][:64] + prompts[3])
    params = SamplingParams(max_tokens=12, logprobs=0)
    return [Request(prompt, params, arrival=3 * i) for i, prompt in enumerate(prompts)]


def stock_logprobs(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[tokens, V] behind each token of the output, by transformers alone in one forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def stock_steps(model: PreTrainedModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The same, token by token with transformers' own cache."""
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad():
        for token_id in prompt + output:
            ids, given = torch.tensor([[token_id]]), {cache_argument(model): cache}
            logits.append(model(input_ids=ids, use_cache=True, **given).logits[0])
    return torch.cat(logits)[len(prompt) - 1 : -1].log_softmax(-1)


def check_equals_stock(
    model: PreTrainedModel, target: PagedTarget | SequentialTarget, tolerance: float = 5e-5
) -> None:
    with target.released_after():
        batched = run_batched(target, NoDrafter(), requests(), prefill_chunk=50)
    for request, answer in zip(requests(), batched.answers, strict=True):
        by_steps = type(model).__name__ in OTHER_STEPS
        stock = stock_steps if by_steps else stock_logprobs
        expected = stock(model, list(request.prompt), answer.token_ids).double()
        assert expected.argmax(-1).tolist() == answer.token_ids
        found = torch.tensor([entry.logprob for entry in answer.logprobs], dtype=torch.float64)
        # Ours are computed in float32, and the weights of attention in some of theirs.
        torch.testing.assert_close(found, expected.max(-1).values, rtol=0, atol=tolerance)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", IN_ONE_FORWARD)
def test_all_sequences_in_one_forward(name: str) -> None:
    model = build(name, IN_ONE_FORWARD[name])
    check_equals_stock(model, PagedTarget(model, Pages(40)))


HYBRIDS = tuple(name for name in RECURRENT if name not in ONE_AFTER_ANOTHER)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_in_one_forward(name: str) -> None:
    """transformers computes states in float32, and those of many tokens in another order."""
    model = build(name, RECURRENT[name])
    check_equals_stock(model, PagedTarget(model, Pages(40)), 1e-4)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", IN_ONE_FORWARD)
def test_both_paths_have_the_same_bits(name: str) -> None:
    """In float32, where kernels run what fits them."""
    model = build(name, IN_ONE_FORWARD[name], torch.float32)
    answers = []
    for make in (lambda: PagedTarget(model, Pages(40)), lambda: SequentialTarget(model)):
        target: PagedTarget | SequentialTarget = make()
        with target.released_after():
            target.check_row_invariance()
            answers.append(run_batched(target, NoDrafter(), requests(), prefill_chunk=50).answers)
    for ours, expected in zip(*answers, strict=True):
        assert ours.token_ids == expected.token_ids
        assert [e.logprob for e in ours.logprobs] == [e.logprob for e in expected.logprobs]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ONE_AFTER_ANOTHER)
def test_one_sequence_after_another(name: str) -> None:
    options, reason = ONE_AFTER_ANOTHER[name]
    model = build(name, options)
    with pytest.raises(NotPaged, match=reason):
        PagedTarget(model, Pages(40))
    # transformers computes states in float32, and those of many tokens in another order.
    check_equals_stock(model, SequentialTarget(model), 1e-4 if name in RECURRENT else 5e-5)


@pytest.mark.parametrize("hands_on", [True, False])
def test_positions_may_reach_the_decoder_unnamed(
    hands_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of a model's own often takes any argument: handed on, or left out without a word."""
    model = tiny_target()
    own, shapes = model.forward, layer_shapes(model)

    def forward(input_ids: Tensor, **given: Any) -> Any:
        if not hands_on:
            del given["position_ids"]
        return own(input_ids=input_ids, **given)

    monkeypatch.setattr(model, "forward", forward)
    if hands_on:
        assert layer_shapes(model) == shapes
    else:
        with pytest.raises(NotPaged, match="takes no position_ids"):
            layer_shapes(model)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_of_no_token_is_refused(window: int) -> None:
    with pytest.raises(ModelError, match=f"window of {window} tokens .* null for no window"):
        PagedTarget(tiny_target("mistral", sliding_window=window), Pages(9))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_by_the_length_of_the_text_are_not_shared(kind: str) -> None:
    """In one forward a long neighbor would turn the positions of a short sequence otherwise.

    transformers' own form is chosen by request, see test_request_rotation; this is another one.
    """
    model = tiny_target()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(NotPaged, match=f"rope_type '{kind}'"):
        PagedTarget(model, Pages(9), exact=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, dtype: torch.dtype) -> None:
    options, reason = REFUSED[name]
    model = build(name, options, dtype)
    with (
        pytest.raises((NotPaged, ModelError)),
        PagedTarget(model, Pages(9)).released_after() as paged,
    ):
        paged.check_row_invariance()
    with (
        pytest.raises(ModelError, match=reason),
        SequentialTarget(model).released_after() as target,
    ):
        target.check_row_invariance()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "DiffLlama"])
def test_unusual_attention_drafts_what_it_decodes(name: str) -> None:
    """In trees, then chains half of which is right, in memory so short that requests make room."""
    model = build(name, IN_ONE_FORWARD[name], torch.float32)
    wanted = [replace(r, params=SamplingParams(max_tokens=40, logprobs=0)) for r in requests()]
    target = PagedTarget(model, Pages(8))
    with target.released_after():
        check_trees(target, SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=0))
        alone = run_alone(target, wanted)
        drafter = NoisyOracleDrafter(8, VOCAB_SIZE, chance=0.5)
        known = [answer.token_ids for answer in alone]
        batched = run_batched(target, drafter, wanted, known=known, prefill_chunk=50)
    assert batched.answers == alone
    assert len(set(alone[2].token_ids)) >= 8
    assert sum(answer.acceptance.num_accepted for answer in batched.answers) > 20


def test_wrong_values_of_latent_attention_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: zeros in front of them instead of behind."""

    def fault(heads: torch.Tensor, size: int) -> torch.Tensor:
        return torch.nn.functional.pad(heads, (size - heads.shape[-1], 0))

    model = build("DeepseekV3", IN_ONE_FORWARD["DeepseekV3"])
    monkeypatch.setattr("blockdraft.models.attention.plan.filled", fault)
    with pytest.raises(AssertionError):
        check_equals_stock(model, PagedTarget(model, Pages(40)))


def test_pools_that_layers_share_by_mistake_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what a layer attends again is written over what it attended first."""
    model = build("DiffLlama", IN_ONE_FORWARD["DiffLlama"])
    target = PagedTarget(model, Pages(40))
    assert len(target.kv.pools) == 2 * len(target.layers)
    monkeypatch.setattr(PoolNumbers, "next", lambda self, layer: layer)
    with pytest.raises(AssertionError):
        check_equals_stock(model, target)
