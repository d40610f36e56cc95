"""Published drafters in small: the fields and tensor names of their files, sizes scaled down.

Ids of layers and the number of the target's layers are the published ones; mask tokens that lie
behind the tokenizer's own are the last token here. Weights are random.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import VOCAB_SIZE

MASK = VOCAB_SIZE - 1
HIDDEN = 40
"""Not the product of heads and their size, as in most of these drafters."""

KNOWN_TOKENS = tuple(range(3, VOCAB_SIZE, 2))
"""Of a drafter with a vocabulary of its own."""

_QWEN3 = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}


def _config(
    num_layers: int, target_layers: int, ids: list[int], mask: int = MASK, **changes: Any
) -> dict[str, Any]:
    return {
        **_QWEN3,
        "num_hidden_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "num_target_layers": target_layers,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": ids},
        **changes,
    }


def _sliding(num_sliding: int, num_full: int, window: int = 12) -> dict[str, Any]:
    return {
        "layer_types": ["sliding_attention"] * num_sliding + ["full_attention"] * num_full,
        "sliding_window": window,
        "use_sliding_window": True,
    }


def _dflash2(ids: list[int], block_size: int, **nested: Any) -> dict[str, Any]:
    drafter = {
        "block_size": block_size,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": 8,
        "selector_top_k": 6,
        "target_layer_ids": ids,
        **nested,
    }
    found = {**_QWEN3, **_sliding(5, 0), "is_causal": False, "dflash_config": drafter}
    return found | {"architectures": ["DFlash2DraftModel"]}


_DSPARK = {
    "markov_rank": 8,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_DSPARK_OF_SPECULATORS = {
    **_DSPARK,
    "speculators_model_type": "dspark",
    "architectures": ["DSparkSpeculator"],
    "sample_from_anchor": True,
}

_SPECULATORS_LAYERS = {
    "head_dim": 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "vocab_size": VOCAB_SIZE,
}
"""Without what equals the defaults of transformers: rms_norm_eps, layer_types and others."""


def _speculators(layers: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 8,
        "draft_vocab_size": VOCAB_SIZE,
        "dtype": "float32",
        "mask_token_id": MASK,
        "projector_type": "dflash",
        "sample_from_anchor": False,
        "shift_label": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**_SPECULATORS_LAYERS, **layers},
        "transformers_version": "5.8.1",
        **changes,
    }


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
}


@dataclass(frozen=True)
class Published:
    """A drafter's config.json and the class of its target: what is special in each.

    own: tensors that the checkpoint has beside its layers. layer_ids: that it reads, 0-based.
    """

    config: Mapping[str, Any]
    target: str
    target_options: Mapping[str, Any]
    layer_ids: tuple[int, ...]
    own: tuple[str, ...] = field(default=())


def _published(
    config: Mapping[str, Any], target: str, target_layers: int, *own: str, **options: Any
) -> Published:
    ids = config.get("dflash_config", config).get("target_layer_ids")
    found = ids or [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    return Published(
        config, target, {"num_hidden_layers": target_layers, **options}, tuple(found), own
    )


def shallow(case: Published) -> Published:
    """The same with a target of few layers, whose forwards are quick."""
    num_layers = len(case.layer_ids) + 2
    ids = tuple(range(1, 1 + len(case.layer_ids)))
    options = {**case.target_options, "num_hidden_layers": num_layers}
    if "layer_types" in options:
        kinds = options["layer_types"]
        options["layer_types"] = [*kinds[: num_layers - 1], "full_attention"]
    if "num_layers" in options:
        options |= {"num_layers": num_layers, "num_hidden_layers": 2 * num_layers}
    if "first_k_dense_replace" in options:
        options["first_k_dense_replace"] = num_layers - 1
    config = dict(case.config)
    if "target_num_hidden_layers" in config:
        config |= {"target_num_hidden_layers": num_layers, "target_layer_ids": list(ids)}
        return replace(case, config=config, target_options=options, layer_ids=ids)
    if "num_target_layers" in config:
        config["num_target_layers"] = num_layers
    if "dflash_config" in config:
        config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": list(ids)}
    else:
        config["aux_hidden_state_layer_ids"] = [i + 1 for i in ids]
    return replace(case, config=config, target_options=options, layer_ids=ids)


def _angelspec(architecture: str, ids: list[int], **changes: Any) -> dict[str, Any]:
    """As AngelSpec exports it, and with the size of a block, which it leaves out."""
    left_out = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
    config = {name: value for name, value in _QWEN3.items() if name not in left_out}
    return {
        **config,
        "architectures": [architecture],
        "auto_map": None,
        "block_size": 8,
        "draft_vocab_size": VOCAB_SIZE,
        "mask_token_id": MASK,
        "num_target_layers": len(ids),
        "target_hidden_size": HIDDEN,
        "target_layer_ids": ids,
        "target_num_hidden_layers": 36,
        "torch_dtype": "float32",
        "_angelspec_version": "unknown",
        **changes,
    }


_36 = [1, 9, 17, 25, 33]
_64 = [1, 16, 31, 46, 61]
_DFLASH2_OF_SPECULATORS = {
    "speculators_model_type": "dflash2",
    "architectures": ["DFlash2Speculator"],
    "conv_kernel_size": 2,
    "conv_group_size": 8,
    "selector_rank": 8,
    "selector_top_k": 6,
    "sliding_window_non_causal": True,
}

PUBLISHED: Mapping[str, Published] = {
    "Qwen3-4B-DFlash-b16": _published(_config(5, 36, _36), "Qwen3", 36),
    "Qwen3-32B community": _published(
        _config(10, 64, [1, 8, 14, 21, 28, 34, 41, 48, 54, 61]), "Qwen3", 64
    ),
    "Qwen3-Coder-30B-A3B-DFlash": _published(
        _config(8, 48, [1, 12, 23, 34, 45]), "Qwen3Moe", 48, **_EXPERTS, num_experts=4
    ),
    "LLaMA3.1-8B-Instruct-DFlash-UltraChat": _published(
        _config(5, 32, [1, 8, 15, 22, 29], block_size=10, rope_theta=500000.0), "Llama", 32
    ),
    "gpt-oss-20b-DFlash": _published(
        _config(
            *(8, 24, [1, 6, 11, 16, 21]),
            block_size=8,
            rope_theta=None,
            rope_parameters={**_YARN, "rope_theta": 150000.0, "truncate": False},
        ),
        *("GptOss", 24),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
    ),
    "Kimi-K2.5-DFlash": _published(
        _config(
            *(6, 61, [1, 12, 24, 35, 47, 58]),
            block_size=8,
            mask_token_id=MASK,
            rms_norm_eps=1e-5,
            rope_theta=50000.0,
            rope_scaling={**_YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        *("DeepseekV3", 61),
        **_LATENT,
        **_EXPERTS,
        head_dim=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=60,
    ),
    "gemma-4-31B-it-DFlash": _published(
        _config(
            *(5, 60, [1, 12, 23, 35, 46, 57], 4),
            **_sliding(4, 1),
            final_logit_softcapping=30.0,
            input_embedding_scale=HIDDEN**0.5,
            tie_word_embeddings=True,
        ),
        *("Gemma4", 60),
        sliding_window=12,
        global_head_dim=16,
        layer_types=[*["sliding_attention"] * 5, "full_attention"] * 10,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    ),
    "Qwen3.5-4B-DFlash": _published(
        _config(5, 32, [1, 8, 15, 22, 29], rope_theta=10000000), "Qwen3_5", 32, **_DELTA_NET
    ),
    "Qwen3.5-35B-A3B-DFlash": _published(
        _config(8, 40, [1, 10, 19, 28, 37], num_key_value_heads=4, rope_theta=10000000),
        *("Qwen3_5Moe", 40),
        **_DELTA_NET,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
    ),
    "Qwen3.5-27B-DFlash": _published(
        _config(6, 64, _64, **_sliding(5, 1), rope_theta=10000000), "Qwen3_5", 64, **_DELTA_NET
    ),
    "Qwen3.8-27B-DFlash2": _published(
        _dflash2([5, 19, 33, 47, 61], 8)
        | {"num_target_layers": 64, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
        *("Qwen3_5", 64),
        **_DELTA_NET,
    ),
    "Muse-Glimmer DFlash2": _published(
        _dflash2([1, 13, 25, 37, 49], 16, output_multiplier=0.196, final_logit_softcapping=20.0)
        | {"rope_theta": 5e5},
        *("Llama", 52),
    ),
    "LFM2.5-1.2B": _published(
        _config(8, 16, [1, 4, 7, 10, 13], 16, tie_word_embeddings=True, rms_norm_eps=1e-5),
        *("Lfm2", 16),
        layer_types=["conv", "full_attention"] * 8,
    ),
    # Its mask token ends answers. Its layers attend twice each.
    "LongCat-Flash": _published(
        _config(5, 28, [1, 7, 13, 19, 25], 2),
        *("LongcatFlash", 56),
        **_LATENT,
        num_layers=28,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        moe_topk=2,
        zero_expert_num=2,
        head_dim=8,
    ),
    "Qwen2.5-0.5B": _published(_config(5, 24, [1, 6, 11, 16, 21]), "Qwen2", 24),
    "Qwen3.5-0.8B": _published(
        _config(5, 24, [3, 7, 11, 15, 19], hidden_size=HIDDEN), "Qwen3_5", 24, **_DELTA_NET
    ),
    # Keys at the top level, a learned mask embedding, and positions of three kinds for the target.
    "Alpamayo": _published(
        _QWEN3
        | {
            "num_hidden_layers": 2,
            "block_size": 8,
            "num_target_layers": 36,
            "mask_token_id": MASK,
            "target_layer_ids": [24, 30, 31, 32, 34],
            "rope_scaling": {"type": "mrope", "mrope_section": [24, 20, 20]},
            "dflash_config": {"target_layer_ids": [24, 30, 31, 32, 34]},
        },
        *("Qwen3", 36, "mask_embedding"),
    ),
    "GLM-5.3": _published(
        _config(5, 36, _36, target_hidden_size=HIDDEN, hidden_size=48),
        *("Qwen3", 36, "embed_tokens", "lm_head", "mask_embedding"),
    ),
    "speculators, vocabulary of its own": _published(
        _speculators({}, draft_vocab_size=len(KNOWN_TOKENS)),
        *("Qwen3", 36, "embed_tokens", "lm_head", "t2d", "d2t"),
    ),
    "speculators, whole vocabulary": _published(
        _speculators({}), "Qwen3", 36, "embed_tokens", "lm_head", "t2d", "d2t"
    ),
    "speculators, nothing of its own": _published(_speculators({}), "Qwen3", 36),
    "speculators, sliding, of a Llama": _published(
        _speculators(
            {
                "model_type": "llama",
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            sliding_window_non_causal=True,
        ),
        *("Llama", 36),
    ),
    # As DeepSpec saves them: keys at the top level, an embedding and a head of its own.
    "dspark_qwen3_8b_block7": _published(
        _config(5, 36, _36)
        | _DSPARK
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            "mask_token_id": MASK,
            "num_anchors": 512,
            "target_layer_ids": _36,
        },
        *("Qwen3", 36, "embed_tokens", "lm_head"),
    ),
    # The same library's DFlash: the anchor's slot drafts there too.
    "dflash_qwen3_4b_block7": _published(
        _config(5, 36, _36)
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512}
        | {"markov_rank": 0, "enable_confidence_head": False},
        *("Qwen3", 36, "embed_tokens", "lm_head"),
    ),
    "SpecForge DSpark": _published(
        _config(5, 36, _36)
        | {
            "architectures": ["DSparkDraftModel"],
            "block_size": 7,
            "dflash_config": {
                **_DSPARK,
                "attention_mode": "gqa",
                "confidence_head_alpha": 1.0,
                "mask_token_id": MASK,
                "projector_type": "dspark",
                "target_layer_ids": _36,
            },
        },
        *("Qwen3", 36),
    ),
    "Qwen3-8B-Domino-b16": _published(
        _config(5, 36, _36)
        | {
            "architectures": ["DFlashDraftModel"],
            "emb_dim": 6,
            "dflash_config": {
                "emb_dim": 6,
                "gru_hidden_dim": 10,
                "mask_token_id": MASK,
                "projector_type": "domino",
                "pure_draft_prefix_len": 1,
                "shift_label": True,
                "target_layer_ids": _36,
            },
        },
        *("Qwen3", 36),
    ),
    "Qwen3-8B-DFly-B8": _published(
        _angelspec(
            *("Qwen3DFlyModel", _36),
            enable_hidden_correction=True,
            hidden_correction_intermediate_size=None,
        ),
        *("Qwen3", 36, "embed_tokens"),
    ),
    "Qwen3-8B-DFly-B8, first version": _published(
        _angelspec(
            *("DSparkDraftModel", _36),
            model_type="dspark",
            model_arch="dfly",
            markov_rank=0,
            enable_confidence_head=False,
            confidence_head_with_markov=False,
            enable_hidden_correction=True,
            hidden_correction_intermediate_size=None,
        ),
        *("Qwen3", 36, "embed_tokens"),
    ),
    "AngelSpec DFlare": _published(
        _angelspec(
            *("DFlashDraftModel", [1, 5, 9, 13, 17, 21, 25, 29, 33]),
            model_type="dflash",
            model_arch="dflare",
            num_hidden_layers=7,
        ),
        *("Qwen3", 36, "embed_tokens"),
    ),
    "AngelSpec DFlash": _published(
        _angelspec("DFlashDraftModel", _36, model_type="dflash"), *("Qwen3", 36, "embed_tokens")
    ),
    "AngelSpec DSpark": _published(
        _angelspec("DSparkDraftModel", _36, model_type="dspark", **_DSPARK),
        *("Qwen3", 36, "embed_tokens"),
    ),
    "speculators, DSpark": _published(
        _speculators({}, **_DSPARK_OF_SPECULATORS, draft_vocab_size=len(KNOWN_TOKENS)),
        *("Qwen3", 36, "embed_tokens", "lm_head", "t2d", "d2t"),
    ),
    # Older than the key `sample_from_anchor`.
    "speculators, DSpark with masked slots": _published(
        {
            name: value
            for name, value in _speculators({}, **_DSPARK_OF_SPECULATORS).items()
            if name != "sample_from_anchor"
        },
        *("Qwen3", 36),
    ),
    "speculators, DFlash 2": _published(
        _speculators(
            {
                "use_sliding_window": True,
                "sliding_window": 12,
                "layer_types": ["sliding_attention"] * 2,
            },
            **_DFLASH2_OF_SPECULATORS,
            draft_vocab_size=len(KNOWN_TOKENS),
        ),
        *("Qwen3", 36, "lm_head", "t2d", "d2t"),
    ),
}


_ANGELSPEC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


def write_published(folder: Path, case: Published) -> dict[str, Tensor]:
    """Write config.json and random weights, by names and shapes that stand here; return them.

    AngelSpec's have other names in the file.
    """
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config), encoding="utf-8")
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in _shapes(case).items()}
    num_known = case.config.get("draft_vocab_size", VOCAB_SIZE)
    known = torch.tensor(KNOWN_TOKENS) if num_known < VOCAB_SIZE else torch.arange(VOCAB_SIZE)
    if "d2t" in case.own:
        tensors["d2t"] = known - torch.arange(num_known)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        tensors["t2d"][known] = True
    theirs = {_ANGELSPEC_NAMES.get(name, name): value for name, value in tensors.items()}
    written = theirs if "_angelspec_version" in case.config else tensors
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    if case.config.get("model_arch") == "dflare":
        tensors["fc.weight"] = tensors.pop("layer_fusion_weights")
    if "mask_embedding" in case.own:
        vector = torch.randn(case.config["hidden_size"])
        torch.save({"mask_token_id": MASK, "embedding": vector}, folder / "mask_embedding.pt")
        tensors["mask_embedding"] = vector
    return tensors


def _shapes(case: Published) -> dict[str, tuple[int, ...]]:
    config = {**case.config, **case.config.get("transformer_layer_config", {})}
    drafter = {**config, **config.get("dflash_config", {})}
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(case.layer_ids) * HIDDEN),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    is_2 = "selector_rank" in drafter
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "mlp.gate_proj.weight": (config["intermediate_size"], hidden),
            "mlp.up_proj.weight": (config["intermediate_size"], hidden),
            "mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        }
        for part in ("attention_conv", "mlp_conv") if is_2 else ():
            taps, groups = drafter["conv_kernel_size"], hidden // drafter["conv_group_size"]
            layer[f"{part}.base_kernel"] = (2, taps, hidden)
            layer[f"{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    num_known = config.get("draft_vocab_size", VOCAB_SIZE)
    if is_2:
        suffix = ".weight" if "speculators_model_type" in config else ""
        for book in ("predecessor_codebook", "successor_codebook"):
            found[f"candidate_selector.{book}{suffix}"] = (num_known, drafter["selector_rank"])
        found["candidate_selector.hidden_projection.weight"] = (drafter["selector_rank"], hidden)
    rank = drafter.get("markov_rank", 0)
    if rank:
        found["markov_head.markov_w1.weight"] = (VOCAB_SIZE, rank)
        found["markov_head.markov_w2.weight"] = (num_known, rank)
    if drafter.get("enable_confidence_head"):
        found["confidence_head.proj.weight"] = (1, hidden + rank)
        found["confidence_head.proj.bias"] = (1,)
    if drafter.get("projector_type") == "domino":
        size, inner = drafter["gru_hidden_dim"], drafter["emb_dim"]
        found["prefix_gru.weight_ih_l0"] = (3 * size, hidden)
        found["prefix_gru.weight_hh_l0"] = (3 * size, size)
        found["embed_proj.0.weight"] = (inner, hidden + size)
        found["embed_proj.2.weight"] = (VOCAB_SIZE, inner)
    if "embed_tokens" in case.own:
        found["embed_tokens.weight"] = (VOCAB_SIZE, hidden)
    if "lm_head" in case.own:
        found["lm_head.weight"] = (num_known, hidden)
    if "_angelspec_version" in config:
        _fuse_by_layer(config, found)
    return found


def _fuse_by_layer(config: Mapping[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """What DFly and DFlare drafters have instead of a DFlash drafter's tensors, or beside them."""
    is_dfly, hidden = "enable_hidden_correction" in config, config["hidden_size"]
    if is_dfly or config.get("model_arch") == "dflare":
        fusion = config["num_hidden_layers"], config["num_target_layers"]
        shapes["layer_fusion_weights"] = fusion
    if is_dfly:
        for part in ("gate", "up"):
            shapes[f"hidden_correction.{part}_proj.weight"] = (hidden, 2 * hidden)
        shapes["hidden_correction.down_proj.weight"] = (hidden, hidden)
        for part in ("hidden", "embed"):
            shapes[f"hidden_correction.{part}_norm.weight"] = (hidden,)
    elif "layer_fusion_weights" in shapes:
        del shapes["fc.weight"]
        for name in [name for name in shapes if "k_proj" in name or "v_proj" in name]:
            shapes[name.replace("_proj.", "_proj_target.")] = shapes[name]
