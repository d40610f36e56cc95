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
from blockdraft.kernels.weights import GROUP
from blockdraft.measure.identity import hash_model
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.models.layers.quantized import QuantizedEmbedding, QuantizedLinear, dequantize
from blockdraft.models.target.gguf import in_groups
from blockdraft.models.target.loading import load_target_model
from blockdraft.text.tokenizer import load_tokenizer
from tests.parity.checks import check_drafted_equals_plain
from tests.parity.targets import WAYS, Way, make_target
from tests.tiny import tiny_target_folder, tiny_tokenizer
from tests.tiny_gguf import write_gguf
from tests.trees import TreeDrafter

KNOWN = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
IDS = torch.arange(2, 90)[None]


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


ROPES = {
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
    "llama3": {},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_are_scaled_as_the_file_says(kind: str, tmp_path: Path) -> None:
    """transformers' reader leaves it out, and would give the answers of another model."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    parameters["original_max_position_embeddings"] = 32
    if kind == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_gguf(tmp_path / "tiny.gguf")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    unscaled = stock(IDS).logits
    config = stock.config
    config.rope_parameters = parameters
    rotation = type(stock.model.rotary_emb)(config=config)
    more = {}
    if kind == "llama3":
        more["rope_freqs.weight"] = (stock.model.rotary_emb.inv_freq / rotation.inv_freq).numpy()
    stock.model.rotary_emb = rotation
    expected = stock(IDS).logits
    assert (unscaled - expected).abs().max() > 0.1 * expected.abs().max()

    write_gguf(tmp_path / "scaled.gguf", header=ROPES[kind], more=more)
    with make_target("paged", load(tmp_path / "scaled.gguf"), layer_ids=()).released_after() as own:
        own.check_row_invariance()
        found = own.logits_of_split(IDS[0].tolist(), (IDS.shape[1],))
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 2.0}, "attn_factor = 2.0"),
        ({"attention.sliding_window": 64}, "attention.sliding_window = 64"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"attention.key_length": 64}, "rope.dimension_count = 32 and heads of 64"),
        ({"attention.value_length": 16}, "attention.value_length = 16 and heads of 32"),
    ],
)
def test_a_header_that_is_not_followed_is_refused(
    header: dict[str, str | int | float], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", header=header)
    with pytest.raises(ModelError, match=f"{message}, which is not supported .* --quantize"):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_tensors_without_a_place_or_of_another_size_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", more={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(ModelError, match=r"holds blk.0.attn_q.bias, for which the model has no"):
        load(tmp_path / "tiny.gguf")
    wide = {"blk.0.ffn_up.weight": np.ones((128, 64), np.float32)}
    write_gguf(tmp_path / "wide.gguf", more=wide)
    with pytest.raises(ModelError, match=r"ffn_up.weight \[128, 64\] instead of \[96, 64\]"):
        load(tmp_path / "wide.gguf")


def test_heads_of_qwen3_have_the_size_that_the_file_says(tmp_path: Path) -> None:
    norms = {f"blk.0.attn_{n}_norm.weight": np.ones(32, np.float32) for n in ("q", "k")}
    header = {"attention.key_length": 32, "attention.value_length": 32}
    write_gguf(tmp_path / "tiny.gguf", architecture="qwen3", header=header, more=norms)
    model = load(tmp_path / "tiny.gguf")
    assert model.config.head_dim == 32
    assert model(IDS).logits.isfinite().all()


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


def test_every_token_that_the_file_calls_an_end_ends_an_answer(tmp_path: Path) -> None:
    """Llama 3's first tokenizers end a text with another token than its turns."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    assert load_tokenizer(resolve_model(str(path))).eos_ids == {2}
    write_gguf(path, more_fields={"tokenizer.ggml.eot_token_id": 0})
    os.utime(path, ns=(1, 1))
    assert load_tokenizer(resolve_model(str(path))).eos_ids == {0, 2}


def test_without_a_template_beside_it_has_that_of_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "known.gguf")
    known = AutoTokenizer.from_pretrained(resolve_model(str(tmp_path / "known.gguf")))
    known.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    write_gguf(tmp_path / "other.gguf", "llama-bpe")
    found = AutoTokenizer.from_pretrained(resolve_model(str(tmp_path / "other.gguf")))
    assert found.chat_template == known.chat_template


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"tokenizer.json beside tiny.gguf does not belong to the model"
    ):
        resolve_model(str(tmp_path / "tiny.gguf"))


def test_one_part_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-00001-of-00002.gguf"
    write_gguf(path, more_fields={"split.count": 2})
    with pytest.raises(ModelError, match=r"is one of 2 parts of a model.* --merge"):
        resolve_model(str(path))


def test_whole_weights_in_the_same_folder_come_first(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    write_gguf(folder / GGUF_NAME)
    assert gguf_file(folder) is None
    model = load_target_model(folder, torch.float32)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
