"""Every kind of drafter is trained by the same trainer: it learns, resumes, and is served.

Three answers learned by heart show that training and decoding mean the same tokens: a drafter that
was trained one token off knows them as well, and is of no use in decoding.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.data.dataset import Batch, collate, collate_rows, count_answer_tokens
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.target.loading import load_target_model, target_without_weights
from blockdraft.train import loss as loss_module
from blockdraft.train.blocks import Anchors, Blocks, sample_anchors
from blockdraft.train.check import check_run
from blockdraft.train.evaluate import HeldOut
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.base import TeacherForced, TrainedDrafter
from blockdraft.train.kinds.block import BlockDrafter
from blockdraft.train.kinds.table import drafter_shape, load_trained
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.prepare import read_data
from blockdraft.train.step import Part, accumulate_gradients
from blockdraft.train.trainer import train
from blockdraft.train.true_tau import serving
from blockdraft.train.untrained import write_untrained
from tests.eagle import Reference
from tests.rows import write_rows
from tests.tiny import edit_json, tiny_target_folder, tiny_tokenizer
from tests.train_runs import broken_off, logged, small_config

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "diffusion": {"architecture": "diffusion", "num_features": None},
    "diffusion-3": {
        "architecture": "diffusion",
        "num_features": None,
        "num_denoising_steps": 3,
    },
    "eagle3": {"architecture": "eagle3", "num_layers": None},
    "draft_model": {"architecture": "draft_model", "num_features": None},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def write_easy(path: Path) -> Path:
    """Answers that count up, so that a few steps show whether anything is learned."""
    rows = (
        {
            "id": f"p{number}",
            "set": "s",
            "finish": "stop",
            "prompt_ids": [number + 60, 7, number + 90],
            "response_ids": [(number + place) % 40 + 1 for place in range(24)],
        }
        for number in range(24)
    )
    return write_rows(path, rows)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.one_in(6)
@each_kind
def test_a_run_learns_and_resumes_to_the_same_bits(tmp_path: Path, kind: str) -> None:
    easy = write_easy(tmp_path / "easy.jsonl")
    settings = {"save_steps": 3, "max_steps": 30, "distill_share": 0.0, "num_frequent": 0}
    if kind == "draft_model":  # D-PACE learns sure tokens first, and this one is sure of none yet
        settings |= {"position_weights": "uniform", "lr": 1e-2}
    config = small_config(tmp_path, data=(easy,), **settings, **KINDS[kind])
    result = train(config)
    steps = logged(config.out)
    assert steps[-1]["nll"] < steps[0]["nll"]
    assert result.evaluations[-1]["held_out"]["loss"] < result.evaluations[0]["held_out"]["loss"]
    again = dataclasses.replace(config, out=tmp_path / "again")
    with broken_off(5):
        train(again)
    train(again)
    expected, found = weights_of(config.out / "last"), weights_of(again.out / "last")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert [row["nll"] for row in logged(again.out)] == [row["nll"] for row in steps]
    # A finished drafter may be trained on.
    more = dataclasses.replace(
        config, out=tmp_path / "more", init_from=config.out / "last", max_steps=1, save_steps=None
    )
    changes = {"num_layers": None, "num_features": None, "num_denoising_steps": None}
    train(dataclasses.replace(more, **changes))
    assert logged(more.out)[0]["nll"] < steps[0]["nll"]


def greedy_answers(target: PreTrainedModel, num: int, length: int) -> Iterator[dict[str, Any]]:
    for number in range(num):
        prompt = [7 + number, 40 + 3 * number, 99, 5 * number + 1, 60, 11 + number]
        ids = torch.tensor([prompt])
        found = target.generate(ids, do_sample=False, max_new_tokens=length, eos_token_id=None)
        yield {
            "id": f"p{number}",
            "set": "s",
            "finish": "length",
            "prompt_ids": prompt,
            "response_ids": found[0, len(prompt) :].tolist(),
        }


LENGTH = 24


class ByHeart:
    """A drafter that has learned three greedy answers, and its taus on them."""

    def __init__(self, folder: Path, kind: str, **changes: Any) -> None:
        config = small_config(folder)
        self.target = load_target_model(config.target, torch.float32, "cpu")
        rows = list(greedy_answers(self.target, 8, LENGTH))
        settings: dict[str, Any] = {
            "data": (write_rows(folder / "mine.jsonl", rows),),
            "held_out_share": 0.25,
            "max_steps": 150,
            "num_anchors": 20,
            "num_frequent": 0,
            "lr": 5e-3,
            "anchors_per_forward": 20,
            "eval_sequences": 1,
            "position_weights": "uniform",
            "distill_share": 0.0,
        }
        self.config = small_config(folder, **settings | KINDS[kind] | changes)
        train(self.config)
        self.examples, _ = read_data(self.config)
        assert len(self.examples) >= 3
        loaded = load_target_model(config.target, torch.float32, "cpu")
        start = dataclasses.replace(
            self.config,
            init_from=self.config.out / "last",
            num_layers=None,
            num_features=None,
            device="cpu",
        )
        self.drafter = load_trained(start, loaded, self.examples)

    def offline_tau(self) -> float:
        target = FrozenTarget(
            load_target_model(self.config.target, torch.float32, "cpu"),
            self.drafter.feature_layers,
        )
        return HeldOut(target, self.examples, 9).evaluate(self.drafter).tau

    def true_tau(self) -> float:
        acceptance = AcceptanceStats()
        with serving(self.target, self.config.out / "last") as engine:
            for example in self.examples:
                key = engine.add(example.prompt_ids, SamplingParams(max_tokens=LENGTH))
                while engine.has_work:
                    engine.step()
                record = engine.take(key)
                assert tuple(record.sequence.output_ids) == example.response_ids
                acceptance.add(record.acceptance)
        return acceptance.acceptance_length


@each_kind
def test_the_head_in_chunks_gives_every_weight_the_same_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings: dict[str, Any] = {"num_frequent": 0, "device": "cpu"}
    config = small_config(tmp_path, **settings | KINDS[kind])
    target = load_target_model(config.target, torch.float32, "cpu")
    examples, _ = read_data(config)
    drafter = load_trained(config, target, examples)
    frozen = FrozenTarget(target, drafter.feature_layers)
    batch = collate(examples[:4])
    generator = torch.Generator().manual_seed(0)
    anchors = drafter.draw(sample_anchors(batch, 6, generator), generator)
    states = frozen.states(batch.token_ids)
    vocabulary = PartialVocabulary(frozen.lm_head_weight, Counter(), 0, 0).draw(
        batch.token_ids, generator
    )
    found: list[dict[str, torch.Tensor | None]] = []
    for limit in (2**25, 2000):
        monkeypatch.setattr(loss_module, "CHUNK_LOGITS", limit)
        drafter.model.zero_grad()
        part, num_groups = Part([], batch, anchors, vocabulary), anchors.num_groups(4)
        accumulate_gradients(drafter, frozen, part, states, config, 0.01, num_groups)
        trained = ((n, p) for n, p in drafter.model.named_parameters() if p.requires_grad)
        found.append({name: p.grad for name, p in trained})
    whole, chunked = found
    for name, gradient in whole.items():
        assert gradient is not None, name
        torch.testing.assert_close(chunked[name], gradient, atol=1e-6, rtol=1e-3, msg=name)


@pytest.mark.slow
@each_kind
def test_what_is_known_by_heart_is_accepted(tmp_path: Path, kind: str) -> None:
    known = ByHeart(tmp_path, kind)
    assert logged(known.config.out)[-1]["nll"] < 0.5
    assert known.offline_tau() > 3.5
    assert known.true_tau() > 3.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["diffusion", "eagle3", "draft_model"])
def test_what_was_learned_one_token_off_is_not(tmp_path: Path, kind: str) -> None:
    """A planted fault: every slot learns the token behind its own."""

    def off_by_one(blocks: Callable[..., Blocks]) -> Callable[..., Blocks]:
        def shifted(self: Any, batch: Batch, anchors: Anchors) -> Blocks:
            found = blocks(self, batch, anchors)
            labels, keep = (torch.roll(t, -1, dims=-1) for t in (found.labels, found.keep))
            keep[..., -1] = False
            return dataclasses.replace(found, labels=labels, keep=keep)

        return shifted

    with pytest.MonkeyPatch.context() as patch:
        for owner in (BlockDrafter, TeacherForced):
            patch.setattr(owner, "blocks", off_by_one(owner.blocks))
        known = ByHeart(tmp_path, kind)
    assert logged(known.config.out)[-1]["nll"] < 1.0
    assert known.offline_tau() < 1.7
    assert known.true_tau() < 1.7


def test_a_draft_model_is_trained_without_dropout(tmp_path: Path) -> None:
    """Nothing random but what a state has, or a run that goes on would be another one."""
    tiny_target_folder(tmp_path, attention_dropout=0.5)
    config = small_config(tmp_path, save_steps=3, max_steps=6, **KINDS["draft_model"])
    train(config)
    again = dataclasses.replace(config, out=tmp_path / "again")
    with broken_off(4):
        train(again)
    train(again)
    assert [row["nll"] for row in logged(again.out)] == [row["nll"] for row in logged(config.out)]


def test_a_draft_model_is_an_ordinary_folder(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, init="target", max_steps=1, device="cpu", **KINDS["draft_model"]
    )
    out = train(config).drafter
    model = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    target = load_target_model(config.target, torch.float32, "cpu")
    assert type(model) is type(target)
    assert model.config.num_hidden_layers == 2
    for own, theirs in (
        (model.get_input_embeddings(), target.get_input_embeddings()),
        (model.get_output_embeddings(), target.get_output_embeddings()),
    ):
        assert torch.equal(own.weight, theirs.weight)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == (
        AutoTokenizer.from_pretrained(config.target).get_vocab()
    )
    # It begins from the target's first and last layer.
    start = load_trained(config, target, read_data(config)[0]).model.state_dict()
    for mine, theirs in ((0, 0), (1, 3)):
        for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight"):
            own = start[f"model.layers.{mine}.{name}"]
            assert torch.equal(own, target.state_dict()[f"model.layers.{theirs}.{name}"])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_draft_model_in_bfloat16_is_the_one_that_will_draft(tmp_path: Path, kind: str) -> None:
    """Rotations stay in float32: cast with the weights, far positions would be other ones."""
    settings = {"target": tiny_target_folder(tmp_path, kind), "dtype": "bfloat16"}
    config = small_config(tmp_path, **settings, device="cpu", **KINDS["draft_model"])
    target = load_target_model(config.target, torch.bfloat16, "cpu")
    drafter = load_trained(config, target, read_data(config)[0])
    drafter.save_pretrained(tmp_path / "saved")
    served = load_target_model(tmp_path / "saved", torch.bfloat16, "cpu")
    served.set_attn_implementation("sdpa")
    expected = dict(served.named_buffers())
    for name, own in drafter.model.named_buffers():
        assert own.dtype == expected[name].dtype, name
        assert torch.equal(own, expected[name]), name
    ids = torch.arange(1, 251)[None]
    with torch.no_grad():
        assert torch.equal(drafter.model(ids).logits, served(ids).logits)


def test_a_draft_model_has_a_gradient_whatever_attention_a_config_names(tmp_path: Path) -> None:
    """flex_attention has none on a CPU, and masks of its own."""
    config = small_config(tmp_path, max_steps=1, device="cpu", **KINDS["draft_model"])
    edit_json(config.target / "config.json", attn_implementation="flex_attention")
    train(config)
    assert len(logged(config.out)) == 1


def test_a_draft_model_begins_from_a_target_whose_last_norm_has_another_name(
    tmp_path: Path,
) -> None:
    """LFM2 calls it embedding_norm."""
    kinds = ["full_attention", "conv", "conv", "full_attention"]
    sizes = {"layer_types": kinds, "block_auto_adjust_ff_dim": False}
    folder = tiny_target_folder(tmp_path, "lfm2", **sizes)
    config = small_config(
        tmp_path, target=folder, init="target", device="cpu", **KINDS["draft_model"]
    )
    target = load_target_model(folder, torch.float32, "cpu")
    start = load_trained(config, target, read_data(config)[0]).model.state_dict()
    theirs = target.state_dict()
    name = "model.embedding_norm.weight"
    assert torch.equal(start[name], theirs[name])
    last = "model.layers.{}.self_attn.q_proj.weight".format
    assert torch.equal(start[last(1)], theirs[last(3)])


def test_a_draft_model_that_could_not_be_served_is_refused_before_it_is_trained(
    tmp_path: Path,
) -> None:
    sizes = {"layer_types": ["conv"] * 3 + ["full_attention"], "block_auto_adjust_ff_dim": False}
    folder = tiny_target_folder(tmp_path, "lfm2", **sizes)
    config = small_config(tmp_path, target=folder, **KINDS["draft_model"])
    for init_from in (None, folder):
        changes = {
            "init_from": init_from,
            "num_layers": config.num_layers if init_from is None else None,
        }
        changed = dataclasses.replace(config, **changes)
        with pytest.raises(ModelError, match=r"recurrent layers \(Lfm2.*such as dflash"):
            drafter_shape(changed, target_without_weights(folder), read_data(config)[0])


@pytest.mark.parametrize(
    ("kind", "sizes", "init", "problem"),
    [
        (
            "gemma4_text",
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 272,
            },
            "random",
            "the last 2 layers of Gemma4ForCausalLM use the keys and values of earlier",
        ),
        ("gpt2", {}, "random", "GPT2LMHeadModel cannot draft when it is served; train another"),
        (
            "glm4_moe",
            {
                "first_k_dense_replace": 3,
                "n_group": 1,
                "topk_group": 1,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
            },
            "target",
            "layer 1 of the draft model would be a copy of layer 3 of the target.*use init=random",
        ),
    ],
)
def test_a_target_whose_class_makes_no_draft_model_is_refused(
    tmp_path: Path, kind: str, sizes: dict[str, Any], init: str, problem: str
) -> None:
    folder = tiny_target_folder(tmp_path, kind, **sizes)
    config = small_config(tmp_path, target=folder, init=init, **KINDS["draft_model"])
    with pytest.raises(ModelError, match=problem):
        drafter_shape(config, target_without_weights(folder), read_data(config)[0])


def test_a_draft_model_whose_layers_do_not_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes do not tell of it: it is tried, before anything is trained."""
    config = small_config(tmp_path, device="cpu", **KINDS["draft_model"])
    target = load_target_model(config.target, torch.float32, "cpu")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise KeyError("sliding_attention")

    monkeypatch.setattr(type(target.model), "forward", fails)
    problem = "2 of the 4 layers of LlamaForCausalLM does not run .*sliding_attention.*; train"
    with pytest.raises(ModelError, match=problem):
        load_trained(config, target, read_data(config)[0])


def test_a_tokenizer_that_changes_when_it_is_saved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path, **KINDS["draft_model"])
    target, examples = target_without_weights(config.target), read_data(config)[0]
    kind = type(tiny_tokenizer())
    save = kind.save_pretrained

    def changes(tokenizer: Any, folder: Path) -> None:
        save(tokenizer, folder)
        path = Path(folder) / "tokenizer.json"
        path.write_text(path.read_text().replace('"Ā"', '"ht"'))

    def fails(*args: Any) -> None:
        raise NotImplementedError("has no file")

    for saves, problem in ((changes, " is .*ht"), (fails, "has no file")):
        monkeypatch.setattr(kind, "save_pretrained", saves)
        with pytest.raises(ModelError, match=f"cannot be saved beside a draft model .*{problem}"):
            drafter_shape(config, target, examples)


def test_a_draft_model_of_matrices_alone_is_trained(tmp_path: Path) -> None:
    """The norms of OLMo have no weights, and an optimizer for them would be refused."""
    folder = tiny_target_folder(tmp_path, "olmo")
    config = small_config(tmp_path, target=folder, max_steps=2, **KINDS["draft_model"])
    train(config)
    train(dataclasses.replace(config, max_steps=3))
    assert len(logged(config.out)) == 3


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_an_untrained_drafter_has_the_ends_of_the_target(tmp_path: Path, kind: str) -> None:
    config = small_config(tmp_path, device="cpu", **KINDS[kind])
    found = weights_of(write_untrained(config))
    target = load_target_model(config.target, torch.float32, "cpu")
    counts = count_answer_tokens(read_data(config)[0])
    rows = slice(None) if kind == "draft_model" else torch.tensor(sorted(counts))
    assert torch.equal(found["lm_head.weight"], target.get_output_embeddings().weight[rows])


def test_a_target_without_a_tokenizer_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (config.target / name).unlink()
    with pytest.raises(ModelError, match=r"cannot load a tokenizer from .* has no tokenizer.json"):
        check_run(config)


def test_texts_of_a_packed_row_do_not_see_each_other(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    examples = list(read_data(config)[0])[:3]
    target = load_target_model(config.target, torch.float32, "cpu")
    for kind in ("diffusion", "eagle3", "draft_model"):
        drafter = load_trained(small_config(tmp_path, **KINDS[kind], device="cpu"), target, [])
        frozen = FrozenTarget(target, drafter.feature_layers)
        states = [frozen.states(torch.tensor([example.token_ids])) for example in examples]
        packed = collate_rows([examples], "cpu", 128)
        padding = torch.zeros(1, 128 - sum(map(len, examples)), states[0].shape[2])
        features, _ = frozen.split(torch.cat((*states, padding), dim=1))
        found = states_at(drafter, frozen, features, packed, [10, len(examples[0]) + 12])
        for number, place in ((0, 10), (1, 12)):
            alone = collate([examples[number]])
            own, _ = frozen.split(states[number])
            expected = states_at(drafter, frozen, own, alone, [place])
            torch.testing.assert_close(found[:, number : number + 1], expected, msg=kind)


@pytest.mark.parametrize(
    "norms", [{"norm_before_fc": True, "norm_output": True}, {"fc_norm": True}]
)
def test_training_goes_on_from_an_eagle3_drafter_with_norms(
    tmp_path: Path, norms: dict[str, Any]
) -> None:
    config = small_config(tmp_path, device="cpu", **KINDS["eagle3"])
    target = load_target_model(config.target, torch.float32, "cpu")
    plain = load_trained(config, target, []).model
    assert isinstance(plain, Eagle3Model)
    start = Eagle3Model(dataclasses.replace(plain.config, **norms))
    start.lm_head = plain.lm_head
    start.save_pretrained(tmp_path / "start")
    config = dataclasses.replace(config, init_from=tmp_path / "start", num_features=None)

    # The steps of training are those of decoding.
    example = next(iter(read_data(config)[0]))
    drafter = load_trained(config, target, [])
    assert isinstance(drafter.model, Eagle3Model)
    frozen = FrozenTarget(target, drafter.feature_layers)
    features, _ = frozen.split(frozen.states(torch.tensor([example.token_ids])))
    place = len(example.token_ids) - 6
    states = states_at(drafter, frozen, features, collate([example]), [place])
    found = drafter.model.lm_head(states)[0, 0]
    reference = Reference(drafter.model, frozen.embed_weight)
    path = example.token_ids[place + 1 : place + found.shape[0]]
    expected = reference.path_logits(example.token_ids[: place + 1], features[0, :place], path)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    train(dataclasses.replace(config, max_steps=2))
    before, after = (weights_of(folder) for folder in (tmp_path / "start", config.out / "last"))
    raw = json.loads((config.out / "last" / "config.json").read_text(encoding="utf-8"))
    assert {name: raw[name] for name in norms} == norms
    assert before.keys() == after.keys() - {"d2t", "t2d"}
    trained = [name for name in before if name.startswith(("input_norm", "fc_norm"))]
    assert trained
    assert not any(torch.equal(before[name], after[name]) for name in trained)


@torch.no_grad()
def states_at(
    drafter: TrainedDrafter,
    target: FrozenTarget,
    features: torch.Tensor,
    batch: Batch,
    places: list[int],
) -> torch.Tensor:
    """Hidden states [1, g, s, D] behind these places of one row."""
    positions = torch.tensor([places])
    anchors = Anchors(positions, torch.ones_like(positions, dtype=torch.bool))
    context = drafter.context(features, batch, target.embed_weight)
    return drafter.slots(context, drafter.blocks(batch, anchors), anchors, target.embed_weight)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        ("eagle3", {"num_layers": 2}, "num_layers is 2, and an EAGLE-3 drafter has one"),
        ("eagle3", {"init": "target"}, "use init=random"),
        ("eagle3", {"mask_token_id": 5}, "mask_token_id is 5, and a drafter of architecture"),
        ("draft_model", {"num_features": 3}, "num_features is 3, and a drafter of architecture"),
        ("draft_model", {"num_layers": 9}, "the target has 4 layers and the draft model 9"),
        ("diffusion", {"num_features": 3}, "reads none"),
        ("dflash", {"num_denoising_steps": 2}, "num_denoising_steps is 2"),
    ],
)
def test_settings_of_another_kind_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], problem: str
) -> None:
    config = small_config(tmp_path, **{**KINDS[kind], **changes})
    target = load_target_model(config.target, torch.float32, "cpu")
    with pytest.raises((ConfigError, ModelError), match=problem):
        drafter_shape(config, target, read_data(config)[0])


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("dflash", ["eagle3", "draft_model", "diffusion"]),
        ("eagle3", ["dflash", "draft_model"]),
        ("draft_model", ["dflash", "eagle3"]),
    ],
)
def test_a_drafter_does_not_go_on_as_one_of_another_kind(
    tmp_path: Path, kind: str, others: list[str]
) -> None:
    config = small_config(tmp_path, device="cpu", **KINDS[kind])
    target, start = load_target_model(config.target, torch.float32, "cpu"), tmp_path / "start"
    examples = read_data(config)[0]
    load_trained(config, target, examples).save_pretrained(start)
    for other in others:
        changed = small_config(
            tmp_path, init_from=start, architecture=other, num_layers=None, num_features=None
        )
        reason = f"architecture is {other}, and the drafter of init_from, .*, has {kind}; leave one"
        with pytest.raises(ConfigError, match=reason):
            drafter_shape(changed, target, examples)
