"""Every published configuration of a drafter loads beside its kind of target, and drafts."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.engine.load import make_drafter, make_target
from blockdraft.models.draft.config import DraftConfig, DSparkConfig
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.loading import check_pair
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.kinds import load_checkpoint
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.train.kinds.table import load_trained
from blockdraft.train.prepare import load_drafter
from tests.batched import Request, run_batched
from tests.parity.test_architectures import build, classes_of
from tests.published import (
    HIDDEN,
    KNOWN_TOKENS,
    MASK,
    PUBLISHED,
    Published,
    shallow,
    write_published,
)
from tests.stock_products import KEEP_ROWS
from tests.tiny import (
    LAYER_FUSIONS,
    TINY_SIZES,
    VOCAB_SIZE,
    tiny_draft_config,
    tiny_drafter,
    tiny_target,
)
from tests.train_runs import small_config

SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 8}


def target_of(case: Published) -> PreTrainedModel:
    return build(case.target, {**SIZES, **case.target_options}, torch.float32)


def load(folder: Path, model: PreTrainedModel) -> Any:
    checkpoint = load_checkpoint(folder, model, torch.float32, "cpu")
    target = make_target(LLMConfig(max_concurrency=2), model, checkpoint, keep_weights=True)
    return target, make_drafter(target, checkpoint)


def requests(max_tokens: int = 5) -> list[Request]:
    draw = random.Random(0)
    prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(9))
    params = SamplingParams(max_tokens=max_tokens, logprobs=0)
    return [
        Request(prompt, params),
        Request(prompt[:5], replace(params, temperature=0.8, seed=3), arrival=1),
    ]


def meta_target_of(case: Published) -> PreTrainedModel:
    """Of the published number of layers, without weights."""
    config_type, model_type = classes_of(case.target)
    config = config_type(**{**TINY_SIZES, **SIZES, "vocab_size": VOCAB_SIZE, **case.target_options})
    with torch.device("meta"):
        model: PreTrainedModel = model_type(config)
    return model


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_config_fits_its_target(name: str) -> None:
    case = PUBLISHED[name]
    config = DraftConfig.from_dict(case.config)
    assert config.target_layer_ids == case.layer_ids
    check_pair(meta_target_of(case), config, has_own_ends="embed_tokens" in case.own)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PUBLISHED)
def test_it_loads_and_drafted_output_is_the_plain_one(name: str, tmp_path: Path) -> None:
    case = shallow(PUBLISHED[name])
    tensors = write_published(tmp_path / "drafter", case)
    target, drafter = load(tmp_path / "drafter", target_of(case))
    assert drafter.feature_layers == case.layer_ids
    state = drafter.model.state_dict()
    assert all(
        torch.equal(value, tensors.get(name, tensors.get(f"{name}.weight")))
        for name, value in state.items()
        if "codebook" not in name and "markov_w2" not in name
    )
    with target.released_after():
        # Its experts are not of transformers' interface.
        if case.target == "LongcatFlash" and not KEEP_ROWS:
            with pytest.raises(ModelError, match=r"logits change .*; use --exact off"):
                target.check_row_invariance()
            return
        drafted = run_batched(target, drafter, requests()).answers
        plain = run_batched(target, NoDrafter(), requests()).answers
    assert drafted == plain
    assert sum(answer.acceptance.num_drafted for answer in drafted) > 0


def guesses_of(folder: Path, case: Published) -> tuple[DFlashDrafter, Any, list[list[int]]]:
    """The drafter, its target's model, and all that it proposed for one answer."""
    model = target_of(case)
    target, drafter = load(folder, model)
    proposed: list[list[int]] = []
    propose = drafter.propose

    def noted(rows: Any) -> Any:
        found = propose(rows)
        proposed.extend(list(proposal.tree.tokens) for proposal in found)
        return found

    drafter.propose = noted
    with target.released_after():
        run_batched(target, drafter, requests()[:1])
    return drafter, model, proposed


def test_a_vocabulary_of_its_own_is_guessed_from_by_its_own_head(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["speculators, vocabulary of its own"])
    tensors = write_published(tmp_path, case)
    drafter, _, proposed = guesses_of(tmp_path, case)
    assert drafter.vocabulary_ids is not None
    assert drafter.vocabulary_ids.tolist() == list(KNOWN_TOKENS)
    assert proposed
    assert {token for guess in proposed for token in guess} <= set(KNOWN_TOKENS)
    hidden = torch.randn(3, HIDDEN)
    expected = hidden @ tensors["lm_head.weight"].T
    torch.testing.assert_close(drafter._logits(hidden), expected, rtol=0, atol=1e-4)


def test_without_offsets_the_marks_name_the_tokens(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["speculators, vocabulary of its own"])
    for absent in ("d2t", "t2d"):
        tensors = write_published(tmp_path, case)
        del tensors[absent]
        save_file(tensors, tmp_path / "model.safetensors")
        assert DraftModel.from_pretrained(tmp_path).draft_vocabulary == list(KNOWN_TOKENS)


def test_codebooks_of_a_part_of_the_vocabulary_are_spread_over_all(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["speculators, DFlash 2"])
    tensors = write_published(tmp_path, case)
    selector = DraftModel.from_pretrained(tmp_path).candidate_selector
    assert selector is not None
    before = tensors["candidate_selector.predecessor_codebook.weight"]
    after = tensors["candidate_selector.successor_codebook.weight"]
    for place, token_id in enumerate(KNOWN_TOKENS):
        assert torch.equal(selector.successor_codebook[token_id], after[place])
        assert torch.equal(selector.predecessor_codebook[token_id], before[place])
        # In training an unknown token counts as the nearest known one before it.
        assert torch.equal(selector.predecessor_codebook[token_id + 1], before[place])
    assert not selector.successor_codebook[KNOWN_TOKENS[0] + 1].any()


def test_what_a_token_adds_behind_others_is_spread_over_all(tmp_path: Path) -> None:
    """The token before may be any, what a drafter guesses only one of its own vocabulary."""
    case = shallow(PUBLISHED["speculators, DSpark"])
    tensors, model = write_published(tmp_path, case), target_of(case)
    head = DraftModel.from_pretrained(tmp_path).markov_head
    assert head is not None
    assert torch.equal(head.markov_w1.weight, tensors["markov_head.markov_w1.weight"])
    own = tensors["markov_head.markov_w2.weight"]
    assert torch.equal(head.markov_w2.weight[torch.tensor(KNOWN_TOKENS)], own)
    assert not head.markov_w2.weight[KNOWN_TOKENS[0] + 1].any()
    _, drafter = load(tmp_path, model)
    latent = torch.randn(2, own.shape[1])
    torch.testing.assert_close(drafter._weigh(latent), latent @ own.T, rtol=0, atol=1e-4)


def test_the_number_of_drafted_tokens_says_whether_the_anchors_slot_drafts() -> None:
    """Where the key that says so is absent."""
    found = {}
    for number in (7, 8, None):
        config = dict(PUBLISHED["speculators, DSpark with masked slots"].config)
        methods = [] if number is None else [{"speculative_tokens": number}]
        config["speculators_config"] = {"proposal_methods": methods}
        found[number] = DraftConfig.from_dict(config).num_drafted
    assert found == {7: 7, 8: 8, None: 7}
    config["speculators_config"] = "broken"
    del config["markov_rank"], config["markov_head_type"]
    read = DraftConfig.from_dict(config)
    assert (read.num_drafted, read.dspark) == (7, DSparkConfig(markov_rank=256))


def test_a_learned_mask_embedding_takes_the_place_of_the_targets(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["Alpamayo"])
    vector = write_published(tmp_path, case)["mask_embedding"]
    model, embedding = DraftModel.from_pretrained(tmp_path), torch.randn(VOCAB_SIZE, HIDDEN)
    rows = model.embed(torch.tensor([[5, MASK, MASK]]), embedding)
    assert torch.equal(rows[0], torch.stack((embedding[5], vector, vector)))
    for content in (vector, vector[None], {"mask_embedding": vector}):
        torch.save(content, tmp_path / "mask_embedding.pt")
        found = DraftModel.from_pretrained(tmp_path).mask_embedding
        assert found is not None
        assert torch.equal(found, vector)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(HIDDEN + 1), f"holds no vector of {HIDDEN} numbers"),
        ({"mask_token_id": 7, "embedding": torch.zeros(HIDDEN)}, "of mask token 7"),
        ({"a": torch.zeros(HIDDEN), "b": torch.zeros(HIDDEN)}, "holds no vector"),
    ],
)
def test_a_foreign_mask_embedding_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    write_published(tmp_path, shallow(PUBLISHED["Alpamayo"]))
    torch.save(content, tmp_path / "mask_embedding.pt")
    with pytest.raises(ModelError, match=message):
        DraftModel.from_pretrained(tmp_path)


def test_copies_of_the_targets_ends_are_not_kept(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["speculators, whole vocabulary"])
    tensors, model = write_published(tmp_path, case), target_of(case)
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    _, drafter = load(tmp_path, model)
    assert drafter.model.own_embedding is None
    assert torch.equal(drafter.model.own_head, tensors["lm_head.weight"])


@pytest.mark.parametrize("name", ["GLM-5.3", "speculators, vocabulary of its own"])
def test_what_is_its_own_is_saved_and_read_again(name: str, tmp_path: Path) -> None:
    case = shallow(PUBLISHED[name])
    write_published(tmp_path / "found", case)
    model = DraftModel.from_pretrained(tmp_path / "found")
    model.save_pretrained(tmp_path / "saved")
    again = DraftModel.from_pretrained(tmp_path / "saved")
    assert (again.config, again.draft_vocabulary) == (model.config, model.draft_vocabulary)
    for part in ("own_embedding", "own_head", "mask_embedding"):
        one, other = getattr(model, part), getattr(again, part)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", torch.zeros(len(KNOWN_TOKENS), dtype=torch.long), "name different tokens"),
        ("lm_head.weight", torch.zeros(7, HIDDEN), r"lm_head.weight \[7, 40\] instead of \[47, 40"),
        ("embed_tokens.weight", torch.zeros(7, HIDDEN), r"embed_tokens.weight \[7, 40\] instead"),
    ],
)
def test_ends_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, value: torch.Tensor, message: str
) -> None:
    tensors = write_published(tmp_path, shallow(PUBLISHED["speculators, vocabulary of its own"]))
    save_file(tensors | {name: value}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        DraftModel.from_pretrained(tmp_path)


def test_a_draft_vocabulary_out_of_order_is_refused(tmp_path: Path) -> None:
    tensors = write_published(tmp_path, shallow(PUBLISHED["speculators, vocabulary of its own"]))
    del tensors["t2d"]
    tensors["d2t"] = tensors["d2t"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="not an ascending list of tokens from 0 to 96"):
        DraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "= 'eagle3', which is not supported yet"),
        ({"transformer_layer_config": None}, "transformer_layer_config = None"),
        ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids is None"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "0 is the target's embedding"),
        ({"sample_from_anchor": True}, "shift_label = False; both say whether the anchor"),
        ({"projector_type": "domino"}, "no emb_dim"),
    ],
)
def test_other_speculators_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    config = {**PUBLISHED["speculators, nothing of its own"].config, **changes}
    with pytest.raises(ModelError, match=message):
        DraftConfig.from_dict(config)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("SpecForge DSpark", "is of the kind dspark: .* training is not supported; start from"),
        ("Qwen3-8B-Domino-b16", "is of the kind domino: .* training is not supported; start"),
    ],
)
@pytest.mark.parametrize("architecture", [None, "dflash"])
def test_training_does_not_start_from_other_methods(
    name: str, what: str, architecture: str | None, tmp_path: Path
) -> None:
    case = shallow(PUBLISHED[name])
    write_published(tmp_path / "drafter", case)
    options = {"init_from": tmp_path / "drafter", "device": "cpu", "architecture": architecture}
    with pytest.raises(ModelError, match=what):
        load_trained(small_config(tmp_path, **options), target_of(case), [])


@pytest.mark.parametrize("kind", ["dfly", "dflare"])
def test_training_does_not_start_from_fusions_by_layer(kind: str, tmp_path: Path) -> None:
    tiny_drafter(**LAYER_FUSIONS[kind]).save_pretrained(tmp_path / "drafter")
    run = small_config(tmp_path, init_from=tmp_path / "drafter", device="cpu")
    with pytest.raises(ModelError, match=f"is of the kind {kind}: drafting with it works, but"):
        load_trained(run, tiny_target(), [])


def test_training_does_not_start_where_the_anchors_slot_drafts(tmp_path: Path) -> None:
    config = replace(tiny_draft_config(), drafts_from_anchor=True)
    DraftModel(config).save_pretrained(tmp_path / "drafter")
    run = small_config(tmp_path, init_from=tmp_path / "drafter", device="cpu")
    with pytest.raises(
        ModelError, match="drafts from its anchor's slot too: drafting with it works"
    ):
        load_trained(run, tiny_target(), [])


def test_training_does_not_start_from_ends_of_its_own(tmp_path: Path) -> None:
    case = shallow(PUBLISHED["GLM-5.3"])
    write_published(tmp_path / "drafter", case)
    config = small_config(tmp_path, init_from=tmp_path / "drafter", device="cpu")
    with pytest.raises(ModelError, match="has an embedding and a head and a mask embedding of"):
        load_drafter(config, target_of(case), [])
