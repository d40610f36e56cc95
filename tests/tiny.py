"""Tiny random models for tests: they load in milliseconds and answer with varied tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from blockdraft.models.draft.config import (
    DFlash2Config,
    DFlyConfig,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
)
from blockdraft.models.draft.dflash import DraftModel

VOCAB_SIZE = 97
HIDDEN_SIZE = 64
NUM_LAYERS = 4
LAYER_IDS = (0, 2, 3)
CONTEXT = 512
KINDS = ("llama", "qwen3", "gemma3")
MOE_KINDS = ("qwen3_moe", "gpt_oss")
ALL_KINDS = (*KINDS, "qwen2", *MOE_KINDS)

TINY_SIZES = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_OWN_SIZES = {
    "gemma3": {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "mistral": {"sliding_window": 24},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24},
}

TEXT_VOCAB_SIZE = 272
"""256 bytes, a few merges and the special tokens, rounded up."""

_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_MERGES = (("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("!", "!"))
SPECIAL_TOKENS = ("<|start|>", "<|end|>", "<|mask|>")


def tiny_target(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    **changes: object,
) -> PreTrainedModel:
    """A random target of 4 layers; some kinds have sliding-window layers (window 24).

    `changes` are values of its config.
    """
    sizes = {**_OWN_SIZES.get(kind, {}), **TINY_SIZES, "vocab_size": vocab_size, **changes}
    config = AutoConfig.for_model("gemma3_text" if kind == "gemma3" else kind, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        randomize(model)
    if kind in MOE_KINDS and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default one has no float64
    return model.to(dtype).eval()


def randomize(model: PreTrainedModel) -> None:
    """Weights large enough that attention matters: greedy outputs do not fall into short loops."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=2.0 * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))


DFLASH2 = DFlash2Config(conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=6)
"""What makes a tiny drafter one of DFlash 2."""

PATH_HEADS: Mapping[str, Mapping[str, Any]] = {
    "dspark": {"dspark": DSparkConfig(markov_rank=8), "drafts_from_anchor": True},
    "gated": {"dspark": DSparkConfig(markov_rank=8, markov_head_type="gated")},
    "rnn": {
        "dspark": DSparkConfig(markov_rank=8, markov_head_type="rnn"),
        "drafts_from_anchor": True,
    },
    "domino": {
        "domino": DominoConfig(emb_dim=8, gru_hidden_dim=12, pure_draft_prefix_len=1),
        "drafts_from_anchor": True,
    },
    "domino unshifted": {"domino": DominoConfig(emb_dim=8, gru_hidden_dim=12)},
    "dfly": {"dfly": DFlyConfig(hidden_correction_intermediate_size=24)},
}
"""What makes a tiny drafter one of DSpark, with each kind of Markov head, of Domino, or of DFly."""

LAYER_FUSIONS: Mapping[str, Mapping[str, Any]] = {
    "dflare": {"dflare": True},
    "dfly": PATH_HEADS["dfly"],
    "dfly without correction": {"dfly": DFlyConfig(hidden_correction_intermediate_size=0)},
}
"""What makes each layer of a tiny drafter read another fusion of the features."""


def tiny_draft_config(vocab_size: int = VOCAB_SIZE, **changes: object) -> DraftConfig:
    """A drafter of 2 layers for `tiny_target`."""
    values = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
        "num_target_layers": NUM_LAYERS,
        "target_hidden_size": HIDDEN_SIZE,
        "target_layer_ids": LAYER_IDS,
        "mask_token_id": vocab_size - 1,
        "block_size": 6,
        "layer_types": ("full_attention",) * 2,
    }
    return DraftConfig(**{**values, **changes})


def tiny_drafter(
    dtype: torch.dtype = torch.float32,
    *,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 1,
    **changes: object,
) -> DraftModel:
    """A random drafter: it guesses badly, which exactness does not mind."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DraftModel(tiny_draft_config(vocab_size, **changes))
        randomize_additions(model)
        return model.to(dtype).eval()


_LARGE = ("codebook", "markov_w", "prefix_gru.", "embed_proj.", "layer_fusion_weights")
_WEIGHTS = (
    *("candidate_selector.", "markov_head.", "_proj_target."),
    *(f"hidden_correction.{part}_proj." for part in ("gate", "up", "down")),
)


def randomize_additions(model: DraftModel) -> None:
    """Let matter what others than DFlash have; a fresh DFlash 2 changes nothing."""
    fusion = model.fc.weight if model.config.dflare else None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_conv." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            elif any(part in name for part in _LARGE) or parameter is fusion:
                parameter.normal_()
            elif any(part in name for part in _WEIGHTS):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text goes in, and characters may be split over tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=_TEMPLATE
    )


def spelled_bytes_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them (Llama 2): words, and tokens that spell bytes, newlines too."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["\u2581", "\u2581a", "a", "b", "\u2581the", "é", "ab", "\N{REPLACEMENT CHARACTER}"]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def tiny_target_folder(
    tmp_path: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """A folder with a random target and its tokenizer; `<|end|>` ends an answer."""
    folder = tmp_path / f"{kind}-target"
    model = tiny_target(kind, dtype, vocab_size=TEXT_VOCAB_SIZE, **changes)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def tiny_drafter_folder(
    tmp_path: Path, dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """A folder with a random drafter for `tiny_target_folder`."""
    folder = tmp_path / "drafter"
    folder.mkdir(exist_ok=True)
    tiny_drafter(dtype, vocab_size=TEXT_VOCAB_SIZE, **changes).save_pretrained(folder)
    return folder


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(values), encoding="utf-8")
