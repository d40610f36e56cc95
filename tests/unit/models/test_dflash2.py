"""The parts of a DFlash 2 drafter: convolutions of a block, and the scores of its candidates."""

from dataclasses import replace

import pytest
import torch

from blockdraft.models.draft.candidate_selector import lattice_of
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.convolution import DynamicConvolution, convolve
from blockdraft.models.draft.dflash import DraftModel
from tests.parity import faults
from tests.tiny import (
    DFLASH2,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    tiny_draft_config,
    tiny_drafter,
)

CONFIG = replace(DFLASH2, conv_kernel_size=3)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_parameters_have_the_published_names_and_shapes():
    layers = {"num_hidden_layers": 5, "layer_types": ("full_attention",) * 5}
    model = DraftModel(tiny_draft_config(dflash2=CONFIG, **layers))
    plain = DraftModel(tiny_draft_config(**layers)).state_dict().keys()
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    expected = {
        "candidate_selector.predecessor_codebook": (VOCAB_SIZE, 8),
        "candidate_selector.successor_codebook": (VOCAB_SIZE, 8),
        "candidate_selector.hidden_projection.weight": (8, HIDDEN_SIZE),
    }
    for layer in range(5):
        for part in ("attention_conv", "mlp_conv"):
            expected[f"layers.{layer}.{part}.base_kernel"] = (2, 3, HIDDEN_SIZE)
            rows = 2 * 3 * HIDDEN_SIZE // 16
            expected[f"layers.{layer}.{part}.kernel_projection.weight"] = (rows, HIDDEN_SIZE)
    assert {name: shape for name, shape in shapes.items() if name not in plain} == expected
    assert len(shapes) == 81


def test_a_fresh_one_computes_what_dflash_does():
    """Both to the bit: hidden states, and the guesses behind them."""
    fresh = DraftModel(tiny_draft_config(dflash2=DFLASH2)).eval()
    plain = DraftModel(tiny_draft_config()).eval()
    plain.load_state_dict({name: fresh.state_dict()[name] for name in plain.state_dict()})
    hidden = [hidden_of(model) for model in (fresh, plain)]
    assert torch.equal(*hidden)
    logits, anchors = draw(2, 5, VOCAB_SIZE), torch.tensor([3, 4])
    guesses = [model.greedy_guesses(hidden[0][:, 1:], logits, anchors) for model in (fresh, plain)]
    assert torch.equal(*guesses)


def hidden_of(model: DraftModel, num_blocks: int = 1) -> torch.Tensor:
    """[2, blocks * 6, D] behind seven tokens; blocks see each other only by a fault."""
    features = draw(2, 7, model.fc.in_features)
    positions = torch.arange(7).expand(2, -1)
    context = ConcatContext(model.project_context(features, positions))
    slots = torch.arange(7, 13).repeat(num_blocks).expand(2, -1)
    block = torch.arange(slots.shape[1]) // 6
    sees = torch.cat((torch.ones(len(block), 7, dtype=bool), block[:, None] == block), dim=1)
    embeddings = draw(2, slots.shape[1], HIDDEN_SIZE)
    return model(embeddings, slots, context, {"full_attention": sees[None, None]}, 6)


@pytest.mark.parametrize("num_taps", [1, 2, 3, 9])
def test_a_convolution_is_its_definition(num_taps):
    x, taps = draw(2, 3, 6, 8), draw(2, 3, 6, num_taps, 8)
    expected = torch.zeros_like(x)
    for slot in range(6):
        for k in range(min(num_taps, slot + 1)):
            expected[:, :, slot] += taps[:, :, slot, k] * x[:, :, slot - k]
    torch.testing.assert_close(convolve(x, taps), expected)


def test_channels_of_a_group_share_what_depends_on_the_input():
    convolution = DynamicConvolution(32, CONFIG)
    torch.nn.init.normal_(convolution.kernel_projection.weight)
    x = draw(1, 6, 32)
    dynamic = convolution.kernel_projection(x).view(1, 6, 2, 3, 2)
    doubled = convolution.around(lambda inner: 2.0 * inner, x, 6)
    taps = convolution.base_kernel + dynamic.repeat_interleave(16, dim=-1)
    once = convolve(x, taps[:, :, 0])
    torch.testing.assert_close(doubled, convolve(2.0 * once, taps[:, :, 1]))


def check_blocks_are_alone() -> None:
    """Two blocks in one forward are what each is alone, and so are their gradients."""
    model = tiny_drafter(dflash2=DFLASH2)
    together = hidden_of(model, 2)
    features = draw(2, 7, model.fc.in_features)
    context = ConcatContext(model.project_context(features, torch.arange(7).expand(2, -1)))
    slots = torch.arange(7, 13).expand(2, -1)
    for part in (slice(0, 6), slice(6, 12)):
        embeddings = draw(2, 12, HIDDEN_SIZE)[:, part]
        alone = model(embeddings, slots, context, {"full_attention": None})
        torch.testing.assert_close(together[:, part], alone, rtol=0, atol=1e-5)


def test_blocks_of_a_forward_do_not_see_each_other():
    check_blocks_are_alone()


def test_the_check_finds_a_convolution_over_the_next_block():
    with faults.convolution_over_all_rows(), pytest.raises(AssertionError, match="not close"):
        check_blocks_are_alone()


@torch.no_grad()
def test_the_greedy_path_is_the_recurrence():
    model = tiny_drafter(dflash2=DFLASH2)
    selector = model.candidate_selector
    hidden, logits, anchors = draw(3, 5, HIDDEN_SIZE), draw(3, 5, VOCAB_SIZE), [7, 1, 90]
    path = model.greedy_guesses(hidden, logits, torch.tensor(anchors)).tolist()
    changed = 0
    for row, before in enumerate(anchors):
        for slot in range(5):
            candidates = logits[row, slot].topk(6).indices.tolist()
            weights = selector.predecessor_codebook[before] * selector.hidden_projection(
                hidden[row, slot]
            )
            scores = [
                float(logits[row, slot, one] + weights @ selector.successor_codebook[one])
                for one in candidates
            ]
            before = candidates[max(range(6), key=scores.__getitem__)]
            assert path[row][slot] == before
            changed += before != candidates[0]
    assert changed > 3


@torch.no_grad()
def test_candidates_of_a_draft_vocabulary():
    """Places among the tokens that have logits become token ids; there may be few."""
    selector = tiny_drafter(dflash2=DFLASH2).candidate_selector
    ids = torch.tensor([5, 9, 30, 41])
    lattice = lattice_of(
        selector, draw(1, 5, HIDDEN_SIZE), draw(1, 5, 4), torch.tensor([2]), vocabulary_ids=ids
    )
    assert lattice.token_ids.shape == (1, 5, 4)
    assert set(lattice.token_ids.flatten().tolist()) == set(ids.tolist())
    whole = torch.full((1, 5, VOCAB_SIZE), -torch.inf)
    whole[..., ids] = draw(1, 5, 4)
    other = lattice_of(selector, draw(1, 5, HIDDEN_SIZE), whole, torch.tensor([2]))
    assert torch.equal(other.token_ids[..., :4], lattice.token_ids)
    torch.testing.assert_close(other.scores[..., :4, :4], lattice.scores)


def test_saved_and_loaded_it_computes_the_same(tmp_path):
    model = tiny_drafter(dflash2=DFLASH2)
    model.save_pretrained(tmp_path)
    loaded = DraftModel.from_pretrained(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(hidden_of(loaded), hidden_of(model))
