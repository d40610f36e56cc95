"""What the worker of llama.cpp converts: the same weights, as another reader of GGUF sees them."""

import sys
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.bench.outside.engines import ENGINES, WORKERS
from tests.tiny import tiny_target_folder


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


def test_both_ways_share_an_environment():
    ways = [ENGINES["llama.cpp"], ENGINES["llama.cpp-ngram"]]
    assert {way.environment for way in ways} == {"llama.cpp"}
    assert {way.method for way in ways} == {"plain", "ngram"}
