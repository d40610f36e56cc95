"""What cannot be a target is refused on one line, with the remedy, before its weights are read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from blockdraft import LLM
from blockdraft.bench.context.memory import kv_bytes_per_token
from blockdraft.bench.speed.stock import StockGenerator
from blockdraft.cache.pages import Pages
from blockdraft.core.errors import BlockdraftError, ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.fit import examine_fit
from blockdraft.models.supported import GENERATE
from blockdraft.models.target.loading import load_target_model, target_without_weights
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.paged_support import NotPaged
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.proof.agreement import compare_with_stock
from blockdraft.text.tokenizer import load_tokenizer
from tests.command_line import refusal
from tests.parity.test_architectures import IN_ONE_FORWARD, REFUSED, build
from tests.tiny import (
    TEXT_VOCAB_SIZE,
    edit_json,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
    tiny_tokenizer,
)

BERT = {
    "vocab_size": TEXT_VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def t5() -> tf.PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = tf.T5Config(vocab_size=TEXT_VOCAB_SIZE, decoder_start_token_id=0, **sizes)
    return tf.T5ForConditionalGeneration(config)


def bart() -> tf.PreTrainedModel:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    config = tf.BartConfig(vocab_size=TEXT_VOCAB_SIZE, d_model=32, **sides)
    return tf.BartForConditionalGeneration(config)


def encoder_and_decoder() -> tf.PreTrainedModel:
    decoder = tf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    return tf.EncoderDecoderModel(
        encoder=tf.BertModel(tf.BertConfig(**BERT)), decoder=tf.BertLMHeadModel(decoder)
    )


def bert() -> tf.PreTrainedModel:
    return tf.BertForMaskedLM(tf.BertConfig(**BERT))


def refused_kind(name: str) -> Any:
    def make() -> tf.PreTrainedModel:
        options = {**REFUSED[name][0], "vocab_size": TEXT_VOCAB_SIZE}
        return build(name, options, torch.float32)

    return make


def indexed() -> tf.PreTrainedModel:
    """Layers that keep an index beside keys and values; it cannot be cut back here."""
    options = {**IN_ONE_FORWARD["DeepseekV3"], "index_topk": 8, "index_n_heads": 2}
    return build("DeepseekV32", {**options, "vocab_size": TEXT_VOCAB_SIZE}, torch.float32)


BAD = {
    "t5": (t5, r"holds an encoder-decoder \(t5\), .*; use a decoder-only model"),
    "bart": (bart, r"holds an encoder-decoder \(bart\), .*; use a decoder-only model"),
    "both": (encoder_and_decoder, r"encoder-decoder \(encoder-decoder\), .*; use a decoder-only"),
    "bert": (bert, "hidden states cannot be read; use a model whose decoder has `layers`"),
    "bloom": (
        refused_kind("Bloom"),
        f"its attention cannot be replaced; use a model that supports .*, or {GENERATE}$",
    ),
    "minimax": (
        refused_kind("MiniMax"),
        f"how layer 1 updates its state is unknown; use a model .*, or {GENERATE}$",
    ),
    "indexed": (
        indexed,
        # Versions of transformers call them by different names.
        r"the state of its \w+_attention layers cannot be rolled back yet; use a model "
        f"with attention, .*, or {GENERATE}$",
    ),
    "zaya": (refused_kind("Zaya"), "does not run: .*; use another dtype or another model"),
    "doge": (refused_kind("Doge"), "does not run: .*; use another dtype or another model"),
}


@pytest.mark.parametrize("drafts", [True, False], ids=["drafted", "plain"])
@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_on_one_line(name: str, drafts: bool, tmp_path: Path) -> None:
    make, message = BAD[name]
    target = tmp_path / name
    make().save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    drafter = str(tiny_drafter_folder(tmp_path)) if drafts else None
    with pytest.raises(BlockdraftError, match=message) as caught:
        LLM(str(target), drafter, dtype="float32")
    assert "\n" not in str(caught.value)


CONFIG_CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODEL_CODE = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama that comes with its own code, under a name that transformers does not know."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks at the terminal"))
    folder = tiny_target_folder(tmp_path)
    (folder / "configuration_own.py").write_text(CONFIG_CODE, encoding="utf-8")
    (folder / "modeling_own.py").write_text(MODEL_CODE, encoding="utf-8")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw |= {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_code_of_a_model_is_run_only_if_it_is_trusted(own_code: Path, tmp_path: Path) -> None:
    message = "needs custom code, which does not run by default.*give --trust-remote-code if you"
    for load in (load_tokenizer, target_without_weights):
        with pytest.raises(ModelError, match=message):
            load(own_code)
    with pytest.raises(ModelError, match=message):
        load_target_model(own_code, torch.float32)
    drafter = tiny_drafter_folder(tmp_path)
    pair = ["--target", own_code, "--drafter", drafter]
    assert "--trust-remote-code" in refusal("generate", *pair, "hi")
    assert "--trust-remote-code" in refusal("models", "check", own_code, drafter)

    llm = LLM(str(own_code), str(drafter), dtype="float32", trust_remote_code=True)
    assert type(llm.engine.target.model).__name__ == "OwnForCausalLM"
    (tmp_path / "same").mkdir()
    same = tiny_target("llama", vocab_size=TEXT_VOCAB_SIZE)
    expected = same.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert list(llm.generate([5, 6, 7]).completions[0].token_ids[:8]) == expected[0, 3:].tolist()

    # So do those that load it once more, beside the first.
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    stock = StockGenerator(llm).run([5, 6, 7], asked)
    assert list(stock.token_ids) == expected[0, 3:].tolist()


def test_code_of_a_draft_model_is_run_only_if_it_is_trusted(own_code: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    target = tiny_target_folder(tmp_path / "other")
    with pytest.raises(ModelError, match="give --trust-remote-code if you"):
        LLM(target, own_code, dtype="float32")
    with pytest.raises(ModelError, match="give --trust-remote-code if you"):
        examine_fit(target, own_code, torch.float32)
    assert examine_fit(target, own_code, torch.float32, trust_remote_code=True).fits
    llm = LLM(target, own_code, dtype="float32", trust_remote_code=True, adaptive=False)
    answer = llm.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).completions[0]
    assert answer.acceptance.drafted_by["draft_model"]
    assert list(compare_with_stock(llm, [], lambda case: None)) == []
    assert kv_bytes_per_token(llm).target > 0


def test_a_drafter_in_the_place_of_its_target_is_refused(tmp_path: Path) -> None:
    target, drafter = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    said = refusal("models", "check", drafter, target)
    assert "holds a drafter (DFlashDraftModel), which cannot be a target" in said
    edit_json(target / "config.json", draft_vocab_size=32)
    with pytest.raises(ModelError, match=r"holds a drafter \(draft_vocab_size\)"):
        load_target_model(target, torch.float32)
    edit_json(target / "config.json", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(ModelError, match=r"holds a drafter \(LlamaForCausalLMEagle3\)"):
        load_tokenizer(target)
    edit_json(
        target / "config.json",
        architectures=["Gemma4AssistantForCausalLM"],
        draft_vocab_size=None,
    )
    with pytest.raises(ModelError, match=r"holds a drafter \(Gemma4AssistantForCausalLM\)"):
        load_target_model(target, torch.float32)
    edit_json(
        target / "config.json",
        architectures=["Qwen3DSparkModel"],
        draft_vocab_size=None,
        markov_rank=0,
    )
    with pytest.raises(ModelError, match=r"holds a drafter \(markov_rank\)"):
        load_target_model(target, torch.float32)


def test_a_model_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brandnew"}', encoding="utf-8")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not know the model_type 'brandnew' of .*; inst"):
        LLM(str(tmp_path), None)


@pytest.mark.parametrize("family", ["llama", "Gemma4"])
def test_tokens_that_see_later_ones_are_refused(family: str, tmp_path: Path) -> None:
    """transformers follows such a config; an engine with a cache cannot."""
    if family == "llama":
        model = tiny_target(is_causal=False)
    else:
        options = {**IN_ONE_FORWARD[family], "use_bidirectional_attention": "all"}
        model = build(family, options, torch.float32)
    with pytest.raises((ModelError, NotPaged), match=r"see later ones|looks ahead"):
        PagedTarget(model, Pages(9))
    with pytest.raises(ModelError, match=r"so tokens see later ones, .*; use a causal LM"):
        SequentialTarget(model)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_nested_too_deep_is_refused(name: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    (folder / name).write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ModelError, match=rf"cannot read .*{name}.*; copy the file again"):
        load_tokenizer(folder)


@pytest.mark.parametrize("path", [lambda model: PagedTarget(model, Pages(9)), SequentialTarget])
def test_keys_that_the_cut_of_a_text_decides_are_refused(path: Callable[..., object]) -> None:
    """Loops over the same layers (Dory) of which the earlier ones see keys of the last."""
    model = tiny_target()
    model.config.recurrent_kv_cache_mode = "last_loop"
    with pytest.raises(ModelError, match=rf"= 'last_loop' in its config, .*; {GENERATE}, or"):
        path(model)


@pytest.mark.parametrize("context", [-1, 0, 15])
def test_a_context_without_room_is_refused(context: int) -> None:
    message = f"max_position_embeddings is {context} .* 16 positions at least"
    with pytest.raises(ModelError, match=message):
        SequentialTarget(tiny_target(max_position_embeddings=context))


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_the_check_at_load_stays_within_a_small_context(kind: str) -> None:
    """Positions behind the context have no embedding, or change rotations of type dynamic."""
    options: dict[str, Any] = {"max_position_embeddings": 64}
    if kind == "Llama":
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model = tiny_target(rope_parameters=rope, **options)
    else:
        model = build(kind, options, torch.float32)
    with PagedTarget(model, Pages(9)).released_after() as target:
        target.check_row_invariance()


def change_weight(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_weights_of_another_size_are_named_with_both_sizes(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    change_weight(folder, lambda weight: weight[:90])
    message = r"up_proj.weight is \[90, 64\] in its weights and \[96, 64\] by its config.json"
    with pytest.raises(ModelError, match=message):
        load_target_model(folder, torch.float32)


def test_weights_that_are_no_numbers_are_told_from_rows_that_depend(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    change_weight(folder, lambda weight: weight * torch.nan)
    with pytest.raises(ModelError, match=r"logits are NaN, .*; download the model again"):
        LLM(str(folder), None, dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden size of the target's features is 64 in the drafter and 128"),
        ({"num_hidden_layers": 3}, "number of target layers is 4 in the drafter and 3"),
    ],
)
def test_a_drafter_of_another_target_is_refused_and_without_it_the_target_decodes(
    changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    target, drafter = tiny_target_folder(tmp_path, **changes), tiny_drafter_folder(tmp_path)
    with pytest.raises(ModelError, match=f"{message} in the target; use a drafter made") as caught:
        LLM(str(target), str(drafter), dtype="float32")
    assert str(caught.value).endswith("for this target, or none to decode plainly")
    assert "\n" not in str(caught.value)
    assert LLM(str(target), None, dtype="float32").generate([5, 6, 7]).completions[0].token_ids


def test_a_cache_that_cannot_be_cut_back_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    target = tmp_path / "indexed"
    indexed().save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        weights.unlink()
    message = refusal("models", "check", target, tiny_drafter_folder(tmp_path))
    assert "cannot be rolled back yet" in message
    assert message.rstrip().endswith(GENERATE)
