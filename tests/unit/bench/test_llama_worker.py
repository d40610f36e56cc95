"""What the worker of llama.cpp converts: the same weights, as another reader of GGUF sees them."""

import sys
from types import ModuleType, SimpleNamespace

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.bench.outside.engines import ENGINES, WORKERS
from tests.tiny import LAYER_IDS, tiny_drafter_folder, tiny_target_folder


@pytest.fixture
def worker(monkeypatch):
    """The script, without the engine itself, which lives in another environment."""
    monkeypatch.setitem(sys.modules, "xllamacpp", ModuleType("xllamacpp"))
    monkeypatch.syspath_prepend(str(WORKERS))
    monkeypatch.delitem(sys.modules, "run_llama", raising=False)
    import run_llama

    yield run_llama
    sys.modules.pop("run_llama", None)
    sys.modules.pop("talk", None)


def in_bfloat16(tmp_path, kind):
    folder, source = tmp_path / "bfloat16", tiny_target_folder(tmp_path, kind)
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def test_weights_are_converted_bit_for_bit(worker, tmp_path):
    folder = in_bfloat16(tmp_path, "llama")
    worker.convert(folder, folder / "target.gguf", [2])
    read = {"dtype": torch.bfloat16}
    one = AutoModelForCausalLM.from_pretrained(folder, **read).state_dict()
    other = AutoModelForCausalLM.from_pretrained(folder, gguf_file="target.gguf", **read)
    assert one.keys() <= other.state_dict().keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_a_planted_fault_shows(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "interleaved", lambda rows, num_heads: rows)
    with pytest.raises(AssertionError, match="q_proj"):
        test_weights_are_converted_bit_for_bit(worker, tmp_path)


def test_what_it_does_not_convert_is_refused(worker, tmp_path):
    with pytest.raises(ValueError, match="only targets of Llama's layout"):
        worker.convert(in_bfloat16(tmp_path, "qwen3"), tmp_path / "x.gguf", [])
    source = tiny_target_folder(tmp_path, "llama")
    with pytest.raises(ValueError, match="only BF16 is converted"):
        worker.convert(source, tmp_path / "x.gguf", [])


DRAFT_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "layers.1.self_attn.q_norm": "blk.1.attn_q_norm",
    "layers.1.self_attn.v_proj": "blk.1.attn_v",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
    "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
}


def test_a_drafter_is_converted_bit_for_bit(worker, tmp_path):
    """Its names are those of llama.cpp's src/models/dflash.cpp."""
    target, drafter = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path, torch.bfloat16)
    told = settings(target, drafter)
    params = SimpleNamespace(speculative=SimpleNamespace(draft=draft_params()), n_gpu_layers=0)
    worker.add_drafter(params, told, tmp_path / "drafter.gguf")
    draft = params.speculative.draft
    assert (draft.mparams.path, draft.n_max) == (str(tmp_path / "drafter.gguf"), 5)
    assert (draft.cpuparams.n_threads, draft.cpuparams_batch.n_threads) == (2, 2)
    file = gguf.GGUFReader(draft.mparams.path)
    value = {name: field.contents() for name, field in file.fields.items()}
    assert value["general.architecture"] == "dflash"
    # llama.cpp reads what goes into a layer, and the drafter what comes out of the one before.
    assert value["dflash.target_layers"] == [number + 1 for number in LAYER_IDS]
    assert (value["dflash.block_size"], value["dflash.attention.causal"]) == (6, False)
    assert value["tokenizer.ggml.mask_token_id"] == value["dflash.vocab_size"] - 1
    weights = load_file(drafter / "model.safetensors")
    found = {tensor.name: tensor for tensor in file.tensors}
    assert len(found) == len(weights)
    for ours, theirs in DRAFT_NAMES.items():
        expected, own = weights[f"{ours}.weight"], found[f"{theirs}.weight"]
        bits = torch.from_numpy(own.data.copy())
        same = bits if expected.ndim == 1 else bits.view(torch.bfloat16)
        assert torch.equal(same, expected.to(same.dtype)), ours


def settings(target, drafter):
    named = {"target": str(target), "drafter": str(drafter), "eos_ids": [2]}
    return {**named, "num_draft_tokens": 5, "threads": 2}


def draft_params():
    names = "mparams", "cpuparams", "cpuparams_batch"
    return SimpleNamespace(**{name: SimpleNamespace() for name in names})


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"final_logit_softcapping": 30.0},
        {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 8},
        {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_a_drafter_that_it_does_not_convert_is_refused(worker, tmp_path, changes):
    folder = tiny_drafter_folder(tmp_path, torch.bfloat16, **changes)
    with pytest.raises(ValueError, match="only DFlash drafters with full attention"):
        worker.convert_drafter(folder, tmp_path, tmp_path / "x.gguf", [])


def test_all_ways_share_an_environment():
    ways = [ENGINES[name] for name in ("llama.cpp", "llama.cpp-ngram", "llama.cpp-dflash")]
    assert {way.environment for way in ways} == {"llama.cpp"}
    assert [way.method for way in ways] == ["plain", "ngram", "dflash"]
    assert [way.needs_drafter for way in ways] == [False, False, True]
