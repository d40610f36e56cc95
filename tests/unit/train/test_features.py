"""The target's features on disk: what is kept is what would be computed."""

import os
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from blockdraft.data.dataset import collate, collate_rows
from blockdraft.data.store import Example
from blockdraft.models.layers.request_rotation import RequestRotation
from blockdraft.train.evaluate import HeldOut
from blockdraft.train.features import FeatureCache, FrozenTarget, use_plain_attention
from blockdraft.train.kinds.draft_model import SmallModel
from tests.tiny import LAYER_IDS, tiny_target


def states_examples() -> list[Example]:
    return [
        Example(id=str(n), set="s", prompt_ids=(1, 2, 3 + n), response_ids=tuple(range(9, 15 + n)))
        for n in range(4)
    ]


def test_cached_states_equal_computed_ones(tmp_path):
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    cache = FeatureCache(target, examples, tmp_path / "cache", "tiny")
    cache.get([[2]], collate([examples[2]]))
    rows = [[1], [2], [3]]
    batch = collate([examples[i] for (i,) in rows])
    computed = FeatureCache(target, examples, None, "tiny").get(rows, batch)
    for _ in range(2):
        cached = cache.get(rows, batch)
        for number, (index,) in enumerate(rows):
            length = len(examples[index])
            torch.testing.assert_close(
                cached[number, :length], computed[number, :length], atol=1e-3, rtol=1e-3
            )


def test_a_cache_of_other_examples_is_not_read(tmp_path, monkeypatch):
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    batch = collate(examples[:2])
    FeatureCache(target, examples, tmp_path, "tiny").get([[0], [1]], batch)

    calls = []
    states = target.states
    monkeypatch.setattr(target, "states", lambda ids, *n: calls.append(len(ids)) or states(ids, *n))
    FeatureCache(target, examples, tmp_path, "tiny").get([[0], [1]], batch)
    assert calls == []
    FeatureCache(target, examples[1:], tmp_path, "tiny").get([[0], [1]], collate(examples[1:3]))
    assert calls == [2]


def test_a_cache_of_another_target_is_not_read(tmp_path, monkeypatch):
    """The target in a folder may be replaced: its weights are what counts."""
    examples = states_examples()
    batch = collate(examples[:2])
    for key in ("one", "two"):
        target, calls = FrozenTarget(tiny_target(), LAYER_IDS), []
        states = target.states
        monkeypatch.setattr(
            target, "states", lambda *ids, s=states, c=calls: c.append(1) or s(*ids)
        )
        FeatureCache(target, examples, tmp_path, key).get([[0], [1]], batch)
        assert calls == [1]


@pytest.mark.parametrize("key", ["[]", "{}", "", '{"num_examples": "x"}', '{"num_examples": []}'])
def test_a_cache_whose_key_is_damaged_is_made_anew(tmp_path, key):
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    FeatureCache(target, examples, tmp_path, "tiny").get([[0]], collate(examples[:1]))
    (tmp_path / "key.json").write_text(key)
    assert FeatureCache(target, examples, tmp_path, "tiny").missing() == [0, 1, 2, 3]


def test_a_cache_grows_with_the_examples(tmp_path, monkeypatch):
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    first = FeatureCache(target, examples[:2], tmp_path, "tiny").get(
        [[0], [1]], collate(examples[:2])
    )
    calls = []
    states = target.states
    monkeypatch.setattr(target, "states", lambda ids, *n: calls.append(len(ids)) or states(ids, *n))
    grown = FeatureCache(target, examples, tmp_path, "tiny")
    assert grown.missing() == [2, 3]
    again = grown.get([[0], [1]], collate(examples[:2]))
    assert torch.equal(first, again)
    assert calls == []
    more = grown.get([[3]], collate(examples[3:]))
    torch.testing.assert_close(more, target.states(collate(examples[3:]).token_ids))


def test_a_cache_takes_its_disk_at_once(tmp_path):
    """What is mapped cannot be told later that there is no room."""
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    FeatureCache(target, examples, tmp_path, "tiny")
    num_tokens = sum(map(len, examples))
    taken = (tmp_path / "states.bin").stat().st_blocks * 512
    assert taken >= num_tokens * (len(LAYER_IDS) + 1) * target.hidden_size * 4


@pytest.mark.parametrize("left", [None, 1000])
def test_a_cache_whose_big_file_was_deleted_is_made_anew(tmp_path, left):
    """Mapped, a missing file would read as zeros, of which the drafter would learn."""
    target, examples = FrozenTarget(tiny_target(), LAYER_IDS), states_examples()
    batch = collate(examples[:2])
    before = FeatureCache(target, examples, tmp_path, "tiny").get([[0], [1]], batch)
    states = tmp_path / "states.bin"
    if left is None:
        states.unlink()
    else:
        os.truncate(states, left)
    again = FeatureCache(target, examples, tmp_path, "tiny")
    assert again.missing() == [0, 1, 2, 3]
    assert torch.equal(again.get([[0], [1]], batch), before)


def test_a_cache_of_another_precision_is_not_read(tmp_path):
    examples = states_examples()
    batch = collate(examples[:1])
    for dtype in (torch.bfloat16, torch.float32):
        target = FrozenTarget(tiny_target(dtype=dtype), LAYER_IDS)
        cached = FeatureCache(target, examples, tmp_path, "tiny").get([[0]], batch)
        torch.testing.assert_close(cached, target.states(batch.token_ids))


def test_a_target_without_fused_attention_is_read_on_a_gpu_too():
    """gpt-oss: its sinks are in no kernel of torch, and transformers refuses to try."""
    model = tiny_target("gpt_oss")
    use_plain_attention(model, "sdpa")
    assert model.config._attn_implementation == "eager"
    model = tiny_target()
    model.set_attn_implementation("flex_attention")
    use_plain_attention(model, "sdpa")
    assert model.config._attn_implementation == "sdpa"


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
    "original_max_position_embeddings": 16,
}


def longrope_target(kind="llama"):
    own = {"original_max_position_embeddings": 16} if kind == "phi3" else {}
    return tiny_target(kind, rope_parameters=deepcopy(LONGROPE), **own)  # a config adds to it


def texts_around_the_original_context():
    return [
        Example(id=str(n), set="s", prompt_ids=(1, 2), response_ids=tuple(range(5, 5 + size)))
        for n, size in enumerate((6, 14, 15, 30))
    ]


def alone(model, example):
    """As transformers rotates a text of this length."""
    ids = torch.tensor([example.token_ids])
    return model.model(input_ids=ids, use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize(
    "rows", [[[0], [1], [2], [3]], [[0, 3], [1, 2]], [[0], [1]], [[3]]], ids=str
)
def test_texts_of_a_batch_are_rotated_each_by_its_own_length(kind, rows):
    """longrope has factors for long texts, by which decoding never turns a short one."""
    model, examples = (
        longrope_target(kind),
        texts_around_the_original_context(),
    )
    expected = [alone(model, example) for example in examples]
    target = FrozenTarget(model, LAYER_IDS)
    batch = collate_rows([[examples[i] for i in row] for row in rows], width=48)
    found = FeatureCache(target, examples, None, "tiny").get(rows, batch)
    for number, row in enumerate(rows):
        start = 0
        for index in row:
            end = start + len(examples[index])
            _, final = target.split(found[number, start:end])
            torch.testing.assert_close(final, expected[index], atol=1e-4, rtol=1e-4)
            start = end
    # Real decoding of the same model sets its rotation itself.
    assert model.model.rotary_emb.rope_type == "longrope"


def test_held_out_texts_are_rotated_each_by_its_own_length(monkeypatch):
    model, examples = longrope_target(), texts_around_the_original_context()
    expected = [alone(model, example) for example in examples]
    target = FrozenTarget(model, ())
    found = []
    states = target.states
    monkeypatch.setattr(target, "states", lambda *args: found.append(states(*args)) or found[-1])
    HeldOut(target, examples, 9)
    for own, row, example in zip(expected, found[0], examples, strict=True):
        torch.testing.assert_close(row[: len(example)], own, atol=1e-4, rtol=1e-4)


def test_a_draft_model_rotates_each_text_by_its_own_length():
    model, examples = longrope_target(), texts_around_the_original_context()
    expected = [alone(model, example) for example in examples]
    drafter = SmallModel(model, Path(), 4)
    batch = collate_rows([[examples[0], examples[3]], [examples[1], examples[2]]])
    (found,) = drafter.context(torch.empty(0), batch, torch.empty(0))
    for row, indices in enumerate(((0, 3), (1, 2))):
        start = 0
        for index in indices:
            end = start + len(examples[index])
            torch.testing.assert_close(found[row, start:end], expected[index], atol=1e-4, rtol=1e-4)
            start = end


def test_a_cache_of_texts_that_were_rotated_alike_is_not_read(tmp_path, monkeypatch):
    examples = texts_around_the_original_context()
    model = longrope_target()
    with monkeypatch.context() as patch:
        patch.setattr(RequestRotation, "__init__", lambda self, _: setattr(self, "long_from", None))
        before = FeatureCache(FrozenTarget(model, LAYER_IDS), examples, tmp_path, "tiny")
        before.get([[0]], collate(examples[:1]))
    assert FeatureCache(FrozenTarget(model, LAYER_IDS), examples, tmp_path, "tiny").missing() == [
        *range(4)
    ]
