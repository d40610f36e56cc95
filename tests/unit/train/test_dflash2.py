"""Training of DFlash 2: loss of the selector, what learns from it, runs, going on from DFlash."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.data.dataset import collate
from blockdraft.data.store import Example
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train import step as step_module
from blockdraft.train.blocks import Anchors, make_blocks
from blockdraft.train.drafter import copy_target_layers
from blockdraft.train.estimate import estimate_run
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.block import draft_hidden
from blockdraft.train.loss import Candidates, PartialVocabulary, selector_loss, slot_weights
from blockdraft.train.optimizer import DraftOptimizer
from blockdraft.train.prepare import load_drafter
from blockdraft.train.step import group_loss
from blockdraft.train.trainer import train
from blockdraft.train.untrained import write_untrained
from tests.tiny import DFLASH2, LAYER_IDS, tiny_drafter, tiny_drafter_folder, tiny_target
from tests.train_runs import broken_off, logged, small_config

SHAPE = {
    "architecture": "dflash2",
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 6,
}


pytestmark = pytest.mark.usefixtures("one_thread")


class Case:
    """Blocks of two texts, and the loss of a random drafter on them."""

    def __init__(self, tmp_path, share=0.4):
        self.config = small_config(tmp_path, distill_share=share)
        self.model = tiny_drafter(dflash2=DFLASH2, block_size=4)
        self.target = FrozenTarget(tiny_target(), LAYER_IDS)
        generator = torch.Generator().manual_seed(7)
        examples = [
            Example(
                id=str(number),
                set="s",
                prompt_ids=tuple(torch.randint(90, (4,), generator=generator).tolist()),
                response_ids=tuple(torch.randint(90, (12,), generator=generator).tolist()),
            )
            for number in range(2)
        ]
        self.batch = collate(examples)
        self.features, self.final = self.target.split(self.target.states(self.batch.token_ids))
        positions = torch.tensor([[5, 9], [4, 13]])  # the last block is cut off by the end
        self.anchors = Anchors(positions, torch.ones_like(positions, dtype=torch.bool))
        self.blocks = make_blocks(self.batch, self.anchors, 4, 96)
        head = self.target.lm_head_weight
        self.vocabulary = PartialVocabulary(head, Counter(range(40)), 40, 10).draw(
            self.blocks.labels, torch.Generator().manual_seed(1)
        )

    def loss(self):
        context = self.model.project_context(self.features, self.batch.positions)
        self.hidden = draft_hidden(
            self.model, self.target.embed_weight, self.blocks, self.anchors, context
        )
        return group_loss(
            self.model, self.hidden[:, :, 1:], self.final, self.blocks, self.anchors,
            self.vocabulary, self.config,
        )  # fmt: skip

    def selector_by_definition(self):
        """(the weighted sum, the mean cross entropy on labels), in loops."""
        selector, model = self.model.candidate_selector, self.model
        share = self.config.distill_share
        base = group_loss_without_selector(self)
        keep = self.blocks.keep.flatten(0, 1)
        weights = slot_weights(base.nll, keep, self.config)
        total, nll = 0.0, torch.zeros_like(base.nll)
        for block in range(4):
            row, at = block // 2, int(self.anchors.positions.flatten()[block])
            for slot in range(3):
                if not keep[block, slot]:
                    continue
                state = self.hidden[row, block % 2, slot + 1].detach()
                logits = model.logits(state, self.vocabulary.head)
                label = int(self.batch.token_ids[row, at + slot + 1])
                before = int(self.batch.token_ids[row, at + slot])
                places = logits.topk(6).indices.tolist()
                place = int(self.vocabulary.slot_of[label])
                if place not in places:
                    places[-1] = place
                ids = self.vocabulary.token_ids[places]
                weighed = selector.predecessor_codebook[before] * selector.hidden_projection(state)
                log_p = (logits[places] + selector.successor_codebook[ids] @ weighed).log_softmax(0)
                wanted = (self.vocabulary.head @ self.final[row, at + slot])[places].softmax(0)
                nll[block, slot] = -log_p[places.index(place)]
                loss = (1 - share) * nll[block, slot] - share * (wanted * log_p).sum()
                total = total + weights[block, slot] * loss
        return total, nll


def group_loss_without_selector(case):
    selector, case.model.candidate_selector = case.model.candidate_selector, None
    try:
        return group_loss(
            case.model, case.hidden[:, :, 1:], case.final, case.blocks, case.anchors,
            case.vocabulary, case.config,
        )  # fmt: skip
    finally:
        case.model.candidate_selector = selector


def check_loss(case):
    result = case.loss()
    base = group_loss_without_selector(case)
    expected, nll = case.selector_by_definition()
    keep = case.blocks.keep.flatten(0, 1)
    torch.testing.assert_close(result.selector * keep, nll.detach())
    weight = case.config.selector_weight
    torch.testing.assert_close(result.loss, base.loss + weight * expected)
    selector = list(case.model.candidate_selector.parameters())
    grads = torch.autograd.grad(result.loss, selector, retain_graph=True)
    for found, wanted in zip(grads, torch.autograd.grad(expected, selector), strict=True):
        torch.testing.assert_close(found, weight * wanted)
        assert found.abs().max() > 0
    others = [p for name, p in case.model.named_parameters() if "selector" not in name]
    grads = torch.autograd.grad(result.loss, others, retain_graph=True, allow_unused=True)
    alone = torch.autograd.grad(base.loss, others, allow_unused=True)
    for found, wanted in zip(grads, alone, strict=True):
        assert torch.equal(found, wanted), "the layers learn from the selector's loss"


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("chunk", [None, 300])
def test_the_selectors_loss_is_its_definition(tmp_path, monkeypatch, share, chunk):
    """Teacher forced, among what serving would offer and the label; nothing else learns from it."""
    if chunk is not None:  # the head a few blocks at a time
        monkeypatch.setattr("blockdraft.train.loss.CHUNK_LOGITS", chunk)
    case = Case(tmp_path, share)
    case.config = dataclasses.replace(case.config, selector_weight=0.7)
    check_loss(case)


def test_the_check_finds_a_selector_that_reads_the_wrong_token_before(tmp_path, monkeypatch):
    """One slot further: what it is to predict would tell it."""
    case = Case(tmp_path)
    real = case.model.candidate_selector.forward

    def forward(hidden, predecessors, candidates):
        return real(hidden, predecessors.roll(-1, dims=1), candidates)

    monkeypatch.setattr(case.model.candidate_selector, "forward", forward)
    with pytest.raises(AssertionError):
        check_loss(case)


def test_a_label_that_is_no_candidate_replaces_the_last():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]])
    for label, expected in ((1, [0, 1]), (3, [0, 3]), (-1, [0, 1])):
        found = step_module.candidates_of(logits, None, torch.tensor([[label]]), 2)
        assert found.places.tolist() == [[expected]]
        assert found.logits[0, 0].tolist() == [3.0 - place for place in expected]


def test_an_added_score_on_the_label_lowers_the_loss(tmp_path):
    candidates = Candidates(torch.tensor([[[4, 7]]]), torch.zeros(1, 1, 2), None)
    config, ones = small_config(tmp_path), torch.ones(1, 1)
    losses = [
        selector_loss(torch.tensor([[[0.0, by]]]), candidates, torch.tensor([[7]]), ones, config)[0]
        for by in (-1.0, 0.0, 1.0)
    ]
    assert losses[0] > losses[1] > losses[2]


def test_codebooks_are_updated_row_by_row(tmp_path):
    """Muon would turn every row with every other one."""
    model = tiny_drafter(dflash2=DFLASH2)
    optimizer = DraftOptimizer(model, small_config(tmp_path))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    codebook = model.candidate_selector.successor_codebook
    codebook.grad = torch.zeros_like(codebook)
    codebook.grad[5] = 1.0
    projection = model.layers[0].mlp_conv.kernel_projection.weight
    projection.grad = torch.randn_like(projection)
    optimizer.collect()
    optimizer.step(0.0)
    changed = (codebook != before["candidate_selector.successor_codebook"]).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [5]
    # A single value may be turned by less than it is rounded by.
    moved = projection != before["layers.0.mlp_conv.kernel_projection.weight"]
    assert moved.any(dim=1).all()


def test_a_run_a_resumed_run_and_the_export(tmp_path):
    config = small_config(
        tmp_path, **SHAPE, max_steps=6, save_steps=3, tau_limit=1, tau_max_tokens=4
    )
    result = train(config)
    rows = logged(config.out)
    assert all(row["selector"] > 0.0 for row in rows)
    assert result.best["true_tau"]
    parts = dataclasses.replace(config, out=tmp_path / "parts", tau_limit=0)
    with broken_off(4):
        train(parts)
    train(parts)
    for a, b in zip(rows, logged(parts.out), strict=True):
        assert (a["step"], a["nll"], a["selector"]) == (b["step"], b["nll"], b["selector"])
    one, two = (load_file(run.out / "last" / "model.safetensors") for run in (config, parts))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight"):
        assert f"candidate_selector.{name}" in one
    raw = json.loads((result.drafter / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["dflash_config"]["selector_top_k"] == 6
    last = DraftModel.from_pretrained(config.out / "last")
    assert last.layers[0].attention_conv.base_kernel[:, 1].abs().max() > 0
    assert last.candidate_selector.successor_codebook.abs().max() > 0
    again = tmp_path / "again"
    last.save_pretrained(again)
    assert all(torch.equal(value, one[name])
               for name, value in load_file(again / "model.safetensors").items())  # fmt: skip


def test_a_plan_and_an_untrained_drafter(tmp_path):
    config = small_config(tmp_path, **SHAPE)
    plan, plain = estimate_run(config), estimate_run(small_config(tmp_path))
    added = 2 * plan.drafter.facts["vocab_size"] * 8 + 8 * 64 + 4 * (2 * 2 * 64 + 2 * 2 * 4 * 64)
    assert plan.num_parameters - plain.num_parameters == added
    assert plan.step_seconds > 0
    assert (
        DraftModel.from_pretrained(write_untrained(config)).config.to_dict() == plan.drafter.facts
    )


def test_it_may_begin_from_the_targets_layers():
    model = tiny_drafter(dflash2=DFLASH2)
    convolution = model.layers[0].mlp_conv.base_kernel.clone()
    copy_target_layers(model, tiny_target("llama"))
    assert torch.equal(model.layers[0].mlp_conv.base_kernel, convolution)


def test_a_dflash_drafter_goes_on_as_dflash2(tmp_path):
    folder = tiny_drafter_folder(tmp_path, block_size=4)
    shape = {name: value for name, value in SHAPE.items() if name != "architecture"}
    config = small_config(
        tmp_path, init_from=folder, num_layers=None, num_features=None,
        architecture="dflash2", device="cpu", **shape,
    )  # fmt: skip
    model = load_drafter(config, tiny_target(vocab_size=272), [])
    before = DraftModel.from_pretrained(folder)
    assert model.config.dflash2 == DFLASH2
    assert all(torch.equal(model.state_dict()[n], v) for n, v in before.state_dict().items())
    hidden, logits = torch.randn(2, 3, 64), torch.randn(2, 3, 272)
    anchors = torch.tensor([1, 2])
    guesses = [one.greedy_guesses(hidden, logits, anchors) for one in (model, before)]
    assert torch.equal(*guesses)


@pytest.mark.parametrize(
    ("changes", "is_second", "message"),
    [
        ({"conv_group_size": 8}, False, "conv_group_size is 8, and a dflash drafter has none"),
        ({"architecture": "dflash", "selector_rank": 8}, False, "selector_rank is 8, and a dflash"),
        ({"architecture": "dflash"}, True, "architecture is dflash, and the drafter of init_from"),
        ({"selector_top_k": 9}, True, "selector_top_k is 9, and the drafter of init_from, .*has 6"),
        ({"architecture": "dflash2", "conv_group_size": 24}, None, "conv_group_size 24 does not"),
    ],
)
def test_settings_that_contradict_the_drafter_are_refused(tmp_path, changes, is_second, message):
    if is_second is not None:
        dflash2 = {"dflash2": DFLASH2} if is_second else {}
        changes |= {"init_from": tiny_drafter_folder(tmp_path, block_size=4, **dflash2)}
        changes |= {"num_layers": None, "num_features": None}
    config = small_config(tmp_path, **changes)
    with pytest.raises((ConfigError, ModelError), match=message):
        estimate_run(config)


def test_the_settings_of_a_dflash2_drafter_may_stay_unset(tmp_path):
    folder = tiny_drafter_folder(tmp_path, block_size=4, dflash2=DFLASH2)
    config = small_config(tmp_path, init_from=folder, num_layers=None, num_features=None)
    assert DraftConfig.from_dict(estimate_run(config).drafter.facts).dflash2 == DFLASH2


@pytest.mark.parametrize("name", ["conv_kernel_size", "selector_rank"])
def test_sizes_below_one_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        small_config(tmp_path, **(SHAPE | {name: 0}))
