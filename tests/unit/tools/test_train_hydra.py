"""The tool that trains Hydra heads: what it pairs, that it learns, and that it goes on."""

import json
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from blockdraft.core.errors import ConfigError
from blockdraft.data.store import Example
from blockdraft.models.draft.hydra_head import HeadShape, HydraHead
from blockdraft.train.features import FrozenTarget
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_IDS,
    VOCAB_SIZE,
    edit_json,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
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


def test_a_place_is_a_token_the_features_before_it_and_the_state_there(
    target: FrozenTarget, tmp_path: Path
) -> None:
    texts = examples(2)
    places = train_hydra.Places(target, texts, tmp_path, "target")
    ((features, tokens, final, learns),) = places.batches(torch.Generator())
    for example in texts:
        num = len(example.token_ids) - 1
        row = next(
            row for row in range(2) if tokens[row, :num].tolist() == list(example.token_ids[1:])
        )
        states = target.states(torch.tensor([example.token_ids]))[0]
        assert features[row, :num].allclose(states[:-1, :-HIDDEN_SIZE], atol=1e-5)
        assert final[row, :num].allclose(states[1:, -HIDDEN_SIZE:], atol=1e-5)
        # From the prompt's last token on, behind which the first choice stands.
        first = len(example.prompt_ids) - 2
        at = row * tokens.shape[1]
        own = [place - at for place in learns.tolist() if 0 <= place - at < tokens.shape[1]]
        assert own == list(range(first, num))


def test_a_head_looks_back_at_its_window_only_and_further_ahead_knows_less() -> None:
    torch.manual_seed(0)
    shape = HeadShape(24, 32, (0, 1), 0.9, num_heads=4, num_keys=2, head_dim=8, window=5)
    head = HydraHead(shape, torch.arange(8))
    features, embeddings = torch.randn(1, 12, 48), torch.randn(1, 12, 24)
    before = head(features, embeddings, 3)

    def changed(place: int, *, of_features: bool) -> list[list[int]]:
        """The places that change at each depth with what is read at one."""
        own = features.clone(), embeddings.clone()
        own[0 if of_features else 1][0, place] += 1.0
        after = head(*own, 3)
        return [
            (one - other).abs().amax(-1)[0].gt(1e-6).nonzero()[:, 0].tolist()
            for one, other in zip(before, after, strict=True)
        ]

    assert changed(4, of_features=True) == [[4, 5, 6, 7, 8], [5, 6, 7, 8, 9], [6, 7, 8, 9, 10]]
    assert [own[0] for own in changed(4, of_features=False)] == [4, 4, 4]


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
    losses = train_hydra.train(head, again, target, minutes=0.1, lr=1e-2)
    assert losses[-1] < losses[0] - 0.1
    head.save(tmp_path)
    found = HydraHead.load(tmp_path, HIDDEN_SIZE, VOCAB_SIZE)
    assert found is not None
    assert found.shape.target_layer_ids == LAYER_IDS[:2]
    assert len(found.token_ids) == 40
    assert float(counts.sum()) == pytest.approx(found.shape.covered, rel=1e-3)


def test_every_text_comes_once(target: FrozenTarget, tmp_path: Path) -> None:
    texts = examples(23)
    places = train_hydra.Places(target, texts, tmp_path, "target", step_tokens=48)
    with patch.multiple(train_hydra, TEXTS_AT_ONCE=7):
        batches = list(places.batches(torch.Generator()))
    assert {len(batch[1]) for batch in batches} == {1, 2, 3}
    tokens = torch.cat([batch[1].flatten()[batch[3]] for batch in batches]).tolist()
    assert sorted(tokens) == sorted(token for text in texts for token in text.token_ids[3:])


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    folder = tiny_drafter_folder(tmp_path)
    assert train_hydra._some_layers(folder) == [LAYER_IDS[1], LAYER_IDS[2]]
    edit_json(folder / "config.json", architectures=["LlamaForCausalLMEagle3"])
    with pytest.raises(ConfigError, match="is no DFlash drafter; give --layers"):
        train_hydra._some_layers(folder)


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ("train_hydra", ["DRAFTER", "ANSWERS", "--layers", "1", "--minutes", "60"]),
        ("count_ngrams", ["DRAFTER", "ANSWERS"]),
        ("sample_answers", ["ANSWERS", "--output", "ANSWERS"]),
    ],
)
def test_what_is_refused_is_a_line_before_the_work_begins(
    tmp_path: Path, tool: str, told: list[str]
) -> None:
    """A head was trained for an hour, and then had no folder to go to."""
    answers = tmp_path / "answers.jsonl"
    answers.write_text("kept")
    names = {"DRAFTER": str(tmp_path / "no-drafter"), "ANSWERS": str(answers)}
    path = Path(train_hydra.__file__).with_name(f"{tool}.py")
    with (
        patch.object(sys, "argv", [path.name, *(names.get(word, word) for word in told)]),
        pytest.raises(SystemExit, match=rf"^{tool}.py: .*; "),
    ):
        runpy.run_path(str(path), run_name="__main__")
    assert answers.read_text() == "kept"


def test_training_goes_on_from_the_drafter_s_head(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no hydra_head.safetensors to go on from"):
        train_hydra._known_head(tmp_path, target.embed_weight)
    train_hydra.new_head(target, examples(5), 40, 32).save(tmp_path)
    known = train_hydra._known_head(tmp_path, target.embed_weight)
    assert known.training
    assert known.shape.target_layer_ids == LAYER_IDS[:2]
    assert all(own.requires_grad for own in known.parameters())


def test_divergences_are_a_mean_over_places_without_dropout(target: FrozenTarget) -> None:
    texts = examples(9)
    head = train_hydra.new_head(target, texts, 40, 32)
    with torch.no_grad():
        head.last_norm.fill_(1.0)  # so that features matter
    parts = (texts, texts[:2], texts[2:])
    places = [train_hydra.Places(target, own, None, "target") for own in parts]
    whole, *found = (train_hydra.divergences(head, own, target) for own in places)
    assert whole == train_hydra.divergences(head, places[0], target)
    assert head.training
    numbers = [sum(len(text.response_ids) + 1 for text in own) for own in parts[1:]]
    for ahead, expected in enumerate(whole):
        total = sum(n * own[ahead] for n, own in zip(numbers, found, strict=True))
        assert total / sum(numbers) == pytest.approx(expected, rel=1e-4)
        assert expected > 0


@pytest.mark.parametrize("number", [1, 1500])
def test_the_tool_trains_without_a_folder_of_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    folders = tiny_target_folder(tmp_path), tiny_drafter_folder(tmp_path)
    answers = tmp_path / "answers.jsonl"
    with answers.open("w") as file:
        for text in examples(number):
            row = {"id": text.id, "set": "s", "prompt_ids": text.prompt_ids}
            file.write(json.dumps(row | {"response_ids": text.response_ids}) + "\n")
    told = [str(folders[1]), str(answers), "--target", str(folders[0]), "--minutes", "0.001"]
    with patch.object(sys, "argv", ["train_hydra.py", *told, "--num-tokens", "30"]):
        train_hydra.main()
    assert HydraHead.load(folders[1], HIDDEN_SIZE, VOCAB_SIZE) is not None
    is_held_out = "held-out answers" in capsys.readouterr().out
    assert is_held_out == (number > 1)
