"""The tool that trains Hydra heads: what it pairs, that it learns, and that it goes on."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from blockdraft.data.store import Example
from blockdraft.models.hydra_head import HydraHead
from blockdraft.train.features import FrozenTarget
from tests.tiny import HIDDEN_SIZE, LAYER_IDS, VOCAB_SIZE, tiny_target
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
    paths = train_hydra.write_states(target, [example], tmp_path)
    (batch,) = train_hydra.places(paths, HIDDEN_SIZE, torch.Generator())
    features, tokens, final = batch
    assert sorted(tokens.tolist()) == sorted(example.token_ids[3:])
    states = target.states(torch.tensor([example.token_ids]))[0].bfloat16()
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
    with patch.object(train_hydra, "PART", 10):
        paths = train_hydra.write_states(target, texts[:20], tmp_path)
        with patch.object(target, "states", wraps=target.states) as states:
            assert train_hydra.write_states(target, texts, tmp_path)[:2] == paths
        assert states.call_count == 10
    head = train_hydra.new_head(target, texts, 40, 32)
    counts = head.bias.exp()
    with patch.object(train_hydra, "BATCH", 64):
        losses = train_hydra.train(head, paths, target, minutes=0.05, lr=1e-2)
    assert losses[-1] < losses[0] - 0.1
    head.save(tmp_path)
    found = HydraHead.load(tmp_path, HIDDEN_SIZE, VOCAB_SIZE)
    assert found is not None
    assert found.shape.target_layer_ids == LAYER_IDS[:2]
    assert len(found.token_ids) == 40
    assert counts.max() > counts.min() > 0
