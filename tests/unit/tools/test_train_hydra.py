"""The tool that trains Hydra heads: what it pairs, that it learns, and that it goes on."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from blockdraft.core.errors import ConfigError
from blockdraft.data.store import Example
from blockdraft.models.hydra_head import HydraHead
from blockdraft.train.features import FrozenTarget
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_IDS,
    VOCAB_SIZE,
    edit_json,
    tiny_drafter_folder,
    tiny_target,
)
from tools import train_hydra


@pytest.fixture
def target() -> FrozenTarget:
    return FrozenTarget(tiny_target(), LAYER_IDS[:2])


def examples(number: int) -> list[Example]:
    draw = torch.Generator().manual_seed(0)
    found = []
    for index in range(number):
        ids = torch.randint(0, VOCAB_SIZE, (12 + index % 5,), generator=draw).tolist()
        found.append(
            Example(id=str(index), set="s", prompt_ids=tuple(ids[:4]), response_ids=tuple(ids[4:]))
        )
    return found


def test_a_place_is_a_token_the_features_before_it_and_the_state_behind_it(
    target: FrozenTarget, tmp_path: Path
) -> None:
    (example,) = examples(1)
    places = train_hydra.Places(target, [example], tmp_path, "target")
    ((features, tokens, final),) = places.batches(torch.Generator())
    assert sorted(tokens.tolist()) == sorted(example.token_ids[3:])
    states = target.states(torch.tensor([example.token_ids]))[0]
    for own, token, last in zip(features, tokens.tolist(), final, strict=True):
        place = next(
            place
            for place in range(3, len(example.token_ids))
            if torch.equal(states[place, -HIDDEN_SIZE:], last)
        )
        assert example.token_ids[place] == token
        assert torch.equal(states[place - 1, :-HIDDEN_SIZE], own)


def test_it_learns_and_goes_on(target: FrozenTarget, tmp_path: Path) -> None:
    texts = examples(30)
    places = train_hydra.Places(target, texts, tmp_path, "target")
    places._states(range(10))  # it was interrupted then
    again = train_hydra.Places(target, texts, tmp_path, "target")
    with patch.object(target, "states", wraps=target.states) as states:
        again.read()
        again.read()
    assert sum(len(call.args[0]) for call in states.call_args_list) == 20
    head = train_hydra.new_head(target, texts, 40, 32)
    counts = head.bias.detach().exp()
    with patch.object(train_hydra, "BATCH", 64):
        losses = train_hydra.train(head, again, target, minutes=0.05, lr=1e-2)
    assert losses[-1] < losses[0] - 0.1
    head.save(tmp_path)
    found = HydraHead.load(tmp_path, HIDDEN_SIZE, VOCAB_SIZE)
    assert found is not None
    assert found.shape.target_layer_ids == LAYER_IDS[:2]
    assert len(found.token_ids) == 40
    assert float(counts.sum()) == pytest.approx(found.shape.covered, rel=1e-3)


def test_every_place_comes_once(target: FrozenTarget, tmp_path: Path) -> None:
    texts = examples(23)
    places = train_hydra.Places(target, texts, tmp_path, "target")
    with patch.multiple(train_hydra, TEXTS_AT_ONCE=7, TEXTS_OF_A_BATCH=3, BATCH=11):
        batches = list(places.batches(torch.Generator()))
    assert {len(own) for batch in batches for own in batch} <= set(range(1, 12))
    tokens = torch.cat([batch[1] for batch in batches]).tolist()
    assert sorted(tokens) == sorted(token for text in texts for token in text.token_ids[3:])


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    folder = tiny_drafter_folder(tmp_path)
    assert train_hydra._two_layers(folder) == [LAYER_IDS[1], LAYER_IDS[2]]
    edit_json(folder / "config.json", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(ConfigError, match="is no DFlash drafter; give --layers"):
        train_hydra._two_layers(folder)
