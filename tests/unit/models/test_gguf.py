"""GGUF files as targets: their very numbers, in the order of transformers, and what is refused."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft import LLM, ModelError, SamplingParams
from blockdraft.core.config import LLMConfig
from blockdraft.engine.start_key import start_key
from blockdraft.hub.folder import GGUF_NAME, gguf_file
from blockdraft.hub.resolve import resolve_model
from blockdraft.kernels.interface import GROUP
from blockdraft.measure.identity import hash_model
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.models.layers.quantized import QuantizedEmbedding, QuantizedLinear, dequantize
from blockdraft.models.target.gguf import in_groups
from blockdraft.models.target.loading import load_target_model
from tests.parity.checks import check_drafted_equals_plain
from tests.parity.targets import WAYS, Way, make_target
from tests.parity.test_lossless_trees import TreeDrafter
from tests.tiny import tiny_target_folder
from tests.tiny_gguf import write_gguf

KNOWN = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels stay where they were compiled."""
    root = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockdraft.hub.prepare.cache_dir", lambda: root)
        yield


def load(path: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return load_target_model(resolve_model(str(path)), dtype)


@pytest.mark.parametrize("kind", KNOWN, ids=str)
def test_numbers_are_those_of_the_file(kind: Kind) -> None:
    values = np.random.default_rng(0).standard_normal((9, 3 * GROUP), dtype=np.float32)
    data = gguf.quants.quantize(values, kind)
    found = in_groups(data, kind, torch.float32)
    assert found is not None
    assert found.num_bits == (8 if kind == Kind.Q8_0 else 4)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    torch.testing.assert_close(found.dequantized(), expected, atol=1e-6, rtol=1e-6)


def test_other_kinds_have_no_groups() -> None:
    values = np.zeros((2, GROUP), np.float32)
    assert in_groups(gguf.quants.quantize(values, Kind.Q5_0), Kind.Q5_0, torch.float32) is None


def test_a_model_has_the_weights_that_transformers_reads(tmp_path: Path, caplog) -> None:
    """Those of the heads are in another order in the file. Nothing else is in memory."""
    kinds = {"token_embd.weight": Kind.Q8_0, "blk.0.ffn_up.weight": Kind.Q4_0}
    write_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        model = load(tmp_path / "tiny.gguf")
    assert "read as they are: 1 of Q8_0, 6 of Q4_1, 1 of Q4_0" in caplog.text
    assert "dequantized" not in caplog.text
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert {type(linear) for linear in linears} == {QuantizedLinear}
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    assert linears[-1].quantized is embedding.quantized  # the head
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters() if p.ndim == 2)
    ids = torch.arange(40)[None]
    found = model(ids).logits
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    dequantize(model)
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-6, rtol=1e-6)
    expected = stock(ids).logits
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


def test_what_no_kernel_reads_is_dequantized_and_told(tmp_path: Path, caplog) -> None:
    kinds = {"blk.0.attn_v.weight": Kind.Q5_0, "token_embd.weight": Kind.Q5_1}
    write_gguf(tmp_path / "tiny.gguf", kinds=kinds)
    model = load(tmp_path / "tiny.gguf")
    told = "no kernel reads these types, so their tensors are dequantized to float32"
    assert f"{told}: 1 of Q5_1, 1 of Q5_0" in caplog.text
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    dequantize(model)
    for name, weight in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, atol=1e-6, rtol=1e-6)
    # Queries, keys and values of two kinds are no single product, and run all the same.
    with make_target(
        "paged", load(tmp_path / "tiny.gguf"), layer_ids=()
    ).released_after() as target:
        target.check_row_invariance()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_drafted_equals_plain(way: Way, temperature: float, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kinds={"token_embd.weight": Kind.Q8_0})
    params = SamplingParams(max_tokens=32, logprobs=3, temperature=temperature, seed=3)
    with make_target(way, load(tmp_path / "tiny.gguf"), layer_ids=()).released_after() as target:
        target.check_row_invariance()
        check_drafted_equals_plain(target, TreeDrafter(), [3, 1, 4, 1, 5] * 8, params)


def test_a_file_is_a_target_by_its_path(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    llm = LLM(str(tmp_path / "tiny.gguf"), None, dtype="float32")
    answer = llm.generate("2020", SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(answer.completions[0].token_ids) == 5
    with pytest.raises(ModelError, match="is quantized already; leave out --quantize"):
        LLM(str(tmp_path / "tiny.gguf"), None, dtype="float32", quantize="int4")


def test_another_file_is_another_target(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    folder = resolve_model(str(path))
    assert resolve_model(str(path)) == folder
    assert (folder / GGUF_NAME).resolve() == path

    def known_by(folder: Path) -> tuple[object, ...]:
        config = LLMConfig(target=str(path))
        key = start_key(config, folder, None, torch.float32, "cpu")
        return str(key["target"]), hash_model(folder), weights_sha256(folder)

    before = known_by(folder)
    write_gguf(path, kinds={"blk.0.attn_v.weight": Kind.Q8_0})
    os.utime(path, ns=(1, 1))
    other = resolve_model(str(path))
    assert other != folder
    assert all(one != two for one, two in zip(before, known_by(other), strict=True))


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", architecture="bloom")
    with pytest.raises(ModelError, match=r"architecture 'bloom'.*folder with --quantize"):
        resolve_model(str(tmp_path / "odd.gguf"))
    write_gguf(tmp_path / "less.gguf", without="blk.0.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lacks model.layers.0.mlp.up_proj.weight and 0 more"):
        load(tmp_path / "less.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"could not convert broken.gguf"):
        resolve_model(str(tmp_path / "broken.gguf"))


def test_a_tokenizer_beside_the_file_comes_first(tmp_path: Path) -> None:
    write_gguf(tmp_path / "known.gguf")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(str(tmp_path / "known.gguf")))
    write_gguf(tmp_path / "other.gguf", "llama-bpe")
    with pytest.raises(ModelError, match=r"put its tokenizer.json.* beside the file"):
        resolve_model(str(tmp_path / "other.gguf"))
    tokenizer.save_pretrained(tmp_path)
    folder = resolve_model(str(tmp_path / "other.gguf"))
    assert (
        AutoTokenizer.from_pretrained(folder)("2020")["input_ids"] == tokenizer("2020")["input_ids"]
    )


def test_whole_weights_in_the_same_folder_come_first(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    write_gguf(folder / GGUF_NAME)
    assert gguf_file(folder) is None
    model = load_target_model(folder, torch.float32)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
