"""A drafter that guesses from a part of the vocabulary."""

from pathlib import Path

import pytest
import torch

from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.vocabulary import (
    FILE_NAME,
    read_draft_vocabulary,
    write_draft_vocabulary,
)
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.slots import chosen_slots
from tests.parity.checks import check_drafted_equals_plain
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target


def make_drafter(target: SequentialTarget, ids: list[int] | None) -> DFlashDrafter:
    embedding = target.model.get_input_embeddings().weight
    head = target.model.get_output_embeddings().weight
    model = tiny_drafter(torch.float64, block_size=8)
    model.draft_vocabulary = ids
    return DFlashDrafter(model, embedding, head)


def test_logits_are_those_of_the_whole_head_inside_and_minus_infinity_outside() -> None:
    target = SequentialTarget(tiny_target("llama", torch.float64), layer_ids=LAYER_IDS)
    hidden = torch.randn(2, 7, 64, dtype=torch.float64)
    ids = list(range(3, VOCAB_SIZE, 5))
    whole, part = (
        drafter.guessable.over_whole_vocabulary(drafter._logits(hidden))
        for drafter in (make_drafter(target, None), make_drafter(target, ids))
    )

    outside = [i for i in range(VOCAB_SIZE) if i not in ids]
    assert torch.allclose(part[..., ids], whole[..., ids])
    assert (part[..., outside] == -torch.inf).all()
    assert part.shape == whole.shape == (2, 7, VOCAB_SIZE)


def test_greedy_guesses_are_the_best_of_the_part() -> None:
    """Found without the whole vocabulary, and equal to what the choice rule finds in it."""
    target = SequentialTarget(tiny_target("llama", torch.float64), layer_ids=LAYER_IDS)
    ids = list(range(3, VOCAB_SIZE, 5))
    drafter = make_drafter(target, ids)
    hidden = torch.randn(1, 7, 64, dtype=torch.float64)
    logits = drafter._logits(hidden)
    expected = drafter.guessable.over_whole_vocabulary(logits)[0].argmax(-1).tolist()
    greedy = Sequence(0, SamplingParams(), 0, 0, frozenset(), [1], 1)
    slots = chosen_slots(logits[0], greedy, drafter.guessable)
    assert [slot.token_ids[0] for slot in slots] == expected
    assert set(expected) <= set(ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_the_same(temperature: float) -> None:
    """Although almost no token of the target can be guessed."""
    target = SequentialTarget(tiny_target("llama", torch.float64), layer_ids=LAYER_IDS)
    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=3, repetition_penalty=1.2, top_p=0.9
    )
    check_drafted_equals_plain(target, make_drafter(target, [1, 5, 9]), [1, 2, 3], params)


def test_round_trip_sorts_and_removes_repeats(tmp_path: Path) -> None:
    write_draft_vocabulary(tmp_path, [5, 1, 5, 3])

    assert read_draft_vocabulary(tmp_path, 6) == [1, 3, 5]
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_it_is_saved_with_the_drafter_and_goes_when_it_has_none(tmp_path: Path) -> None:
    model = tiny_drafter(torch.float64, block_size=8)
    model.draft_vocabulary = [4, 2]
    model.save_pretrained(tmp_path)
    loaded = DraftModel.from_pretrained(tmp_path)
    assert loaded.draft_vocabulary == [2, 4]

    loaded.draft_vocabulary = None
    loaded.save_pretrained(tmp_path)
    assert DraftModel.from_pretrained(tmp_path).draft_vocabulary is None


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 9]", "token 9"), ("{", "cannot read"), ("[]", "not a list"), ('["a"]', "not a list")],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)

    with pytest.raises(ModelError, match=message):
        read_draft_vocabulary(tmp_path, 6)
