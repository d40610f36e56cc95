"""Training of a Hydra head: what it pairs, that it learns, that it goes on, and what it refuses."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from transformers import PhiConfig, PhiForCausalLM

from blockdraft.core.errors import ConfigError, DiskError, ModelError
from blockdraft.core.progress import Progress
from blockdraft.data.dataset import read_examples, split_held_out
from blockdraft.data.holding_out import is_held_out
from blockdraft.data.store import Example
from blockdraft.models.draft.checkpoint import write_provenance
from blockdraft.models.draft.hydra_head import HEAD_NAME, HeadShape, HydraHead
from blockdraft.train.features import FrozenTarget
from blockdraft.train.hydra import places as places_module
from blockdraft.train.hydra import run as run_module
from blockdraft.train.hydra import start
from blockdraft.train.hydra.config import HeadConfig
from blockdraft.train.hydra.learning import HeadLearner
from blockdraft.train.hydra.places import Places
from blockdraft.train.hydra.run import train_head
from blockdraft.train.hydra.state import HEAD_STATE, how_to_go_on
from blockdraft.train.stopping import Stopped
from tests.command_line import refusal, run_json
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_IDS,
    TEXT_VOCAB_SIZE,
    TINY_SIZES,
    VOCAB_SIZE,
    edit_json,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)


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
    places = Places(target, texts, tmp_path, "target", 4096)
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


def new_head(texts: list[Example]) -> HydraHead:
    torch.manual_seed(0)
    shape = HeadShape(HIDDEN_SIZE, 32, LAYER_IDS[:2], 0.5)
    head = HydraHead(shape, torch.arange(0, VOCAB_SIZE, 2))
    with torch.no_grad():
        head.bias.fill_(-3.0)
    return head


def test_it_learns(target: FrozenTarget) -> None:
    places = Places(target, examples(30), None, "target", 4096)
    learner = HeadLearner(new_head(examples(30)), target, lr=1e-2)
    before = learner.divergences(places)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        for batch in places.batches(generator):
            learner.step(batch, step / 60)
    after = learner.divergences(places)
    assert all(own < other - 0.1 for own, other in zip(after, before, strict=True))


def test_what_was_read_stays(target: FrozenTarget, tmp_path: Path) -> None:
    texts = examples(30)
    Places(target, texts, tmp_path, "target", 4096)._states(range(10))  # it was interrupted then
    again = Places(target, texts, tmp_path, "target", 4096)
    with patch.object(target, "states", wraps=target.states) as states:
        list(again.read(Progress(run_module.logger)))
        list(again.read(Progress(run_module.logger)))
    assert sum(len(call.args[0]) for call in states.call_args_list) == 20


def test_every_text_comes_once(target: FrozenTarget, tmp_path: Path) -> None:
    texts = examples(23)
    places = Places(target, texts, tmp_path, "target", 48)
    with patch.object(places_module, "TEXTS_AT_ONCE", 7):
        batches = list(places.batches(torch.Generator()))
    assert {len(batch[1]) for batch in batches} == {1, 2, 3}
    tokens = torch.cat([batch[1].flatten()[batch[3]] for batch in batches]).tolist()
    assert sorted(tokens) == sorted(token for text in texts for token in text.token_ids[3:])


def test_divergences_are_a_mean_over_places_without_dropout(target: FrozenTarget) -> None:
    texts = examples(9)
    learner = HeadLearner(new_head(texts), target, lr=1e-2)
    parts = (texts, texts[:2], texts[2:])
    places = [Places(target, own, None, "target", 4096) for own in parts]
    whole, *found = (learner.divergences(own) for own in places)
    assert whole == learner.divergences(places[0])
    assert learner.head.training
    numbers = [sum(len(text.response_ids) + 1 for text in own) for own in parts[1:]]
    for ahead, expected in enumerate(whole):
        total = sum(n * own[ahead] for n, own in zip(numbers, found, strict=True))
        assert total / sum(numbers) == pytest.approx(expected, rel=1e-4)
        assert expected > 0


@pytest.fixture
def config(tmp_path: Path) -> HeadConfig:
    """A training of two steps a pass on answers of a tiny target."""
    answers = tmp_path / "answers.jsonl"
    with answers.open("w") as file:
        for text in examples(1500):
            row = {"id": text.id, "set": "s", "prompt_ids": text.prompt_ids}
            file.write(json.dumps(row | {"response_ids": text.response_ids}) + "\n")
    return HeadConfig(
        drafter=tiny_drafter_folder(tmp_path),
        answers=(answers,),
        target=str(tiny_target_folder(tmp_path)),
        minutes=0.001,
        num_tokens=30,
        device="cpu",
    )


def replaced(config: HeadConfig, **changes: Any) -> HeadConfig:
    return HeadConfig(**{**{name: getattr(config, name) for name in config.to_dict()}, **changes})


def stopped_after(number: int) -> Any:
    """Within it a signal comes in the step of that number."""
    step = HeadLearner.step

    def own(learner: HeadLearner, *args: Any) -> torch.Tensor:
        found = step(learner, *args)
        if learner.num_steps == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    return patch.object(HeadLearner, "step", own)


def test_a_head_is_written_with_where_it_comes_from(config: HeadConfig) -> None:
    result = train_head(config)
    assert len(result.before) == len(result.after) == 3
    assert result.num_held_out > 0
    head = HydraHead.load(config.drafter, HIDDEN_SIZE, TEXT_VOCAB_SIZE)
    assert head is not None
    # The second, the middle one and the last of the drafter's.
    assert head.shape.target_layer_ids == (LAYER_IDS[1], LAYER_IDS[2])
    assert head.shape.inner_size == 2 * HIDDEN_SIZE
    assert len(head.token_ids) == 30
    with safe_open(result.head, "pt") as file:
        facts = json.loads(file.metadata()["provenance"])
    assert facts["config"] == config.to_dict()
    assert facts["num_steps"] == result.num_steps
    assert facts["divergence"] == {"before": result.before, "after": result.after}
    assert not (config.drafter / HEAD_STATE).exists()


def test_long_answers_are_left_out_and_said_so(
    config: HeadConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "blockdraft")
    with patch.object(start, "MAX_TOKENS", 14):
        result = train_head(replaced(config, limit=1000))
    assert "answers left out, with more than 14 tokens including the prompt: 600" in caplog.text
    assert f"{900 - result.num_held_out} answers to train on" in caplog.text


def test_what_the_drafter_has_held_out_is_not_learned_from(config: HeadConfig) -> None:
    write_provenance(config.drafter, {"config": {"held_out_share": 0.5}})
    model = tiny_target(vocab_size=TEXT_VOCAB_SIZE)
    learned, held_out = start.read_texts(config, model)
    _, of_drafter = split_held_out(learned, 0.5)
    assert (len(learned) > 0, len(of_drafter)) == (True, 0)
    assert len(split_held_out(held_out, 0.5)[1]) == len(held_out) > 0


def test_what_the_drafter_held_out_under_another_name_is_not_learned_from(
    config: HeadConfig,
) -> None:
    """An answer that was too short for the drafter does not decide for those to its prompt."""
    write_provenance(config.drafter, {"config": {"held_out_share": 0.5}})
    learned_name = next(f"l{n}" for n in range(99) if not is_held_out(f"l{n}", 0.5))
    held_name = next(f"h{n}" for n in range(99) if is_held_out(f"h{n}", 0.5))
    own = [(learned_name, [5, 6]), (held_name, [5, 6, 7, 8, 9, 10, 11, 12, 13])]
    with config.answers[0].open("a") as file:
        for name, answer in own:
            row = {"id": name, "set": "s", "prompt_ids": [1, 2, 3, 4], "response_ids": answer}
            file.write(json.dumps(row) + "\n")
    trained = read_examples(config.answers, min_response_len=8, max_len=None)
    assert held_name in {text.id for text in split_held_out(trained, 0.5)[1]}
    learned, _ = start.read_texts(config, tiny_target(vocab_size=TEXT_VOCAB_SIZE))
    assert learned
    assert held_name not in {text.id for text in learned}


def test_one_answer_is_enough(config: HeadConfig, caplog: pytest.LogCaptureFixture) -> None:
    result = train_head(replaced(config, limit=1))
    assert result.num_steps >= 1
    assert (result.num_held_out, result.before, result.after) == (0, [], [])
    assert "nothing tells whether the head becomes better or worse" in caplog.text


def test_a_training_that_was_stopped_goes_on(config: HeadConfig, tmp_path: Path) -> None:
    config = replaced(config, minutes=60.0, states=tmp_path / "states")
    with stopped_after(3), pytest.raises(Stopped) as stop:
        train_head(config)
    assert stop.value.number == signal.SIGTERM
    assert not (config.drafter / HEAD_NAME).exists()
    state = torch.load(config.drafter / HEAD_STATE, weights_only=True)
    assert state["learner"]["num_steps"] == 3
    with pytest.raises(ConfigError, match=r"another lr \(now 1\.0, before 0\.002\); give the same"):
        train_head(replaced(config, lr=1.0))
    assert (config.drafter / HEAD_STATE).exists()
    for name, value in (("learner", {"num_steps": 3}), ("seconds", "few"), ("before", None)):
        torch.save(state | {name: value}, config.drafter / HEAD_STATE)
        with pytest.raises(ConfigError, match=rf"{HEAD_STATE} is damaged \(\w+\); delete it"):
            train_head(config)
    torch.save(state, config.drafter / HEAD_STATE)
    with stopped_after(5), pytest.raises(Stopped):
        train_head(config)
    assert torch.load(config.drafter / HEAD_STATE, weights_only=True)["seconds"] > state["seconds"]
    # Fewer minutes than have passed: the head is finished as it is.
    result = train_head(replaced(config, minutes=1e-6))
    assert result.num_steps == 5
    assert not (config.drafter / HEAD_STATE).exists()


def test_a_refused_training_deletes_no_states(config: HeadConfig, tmp_path: Path) -> None:
    config = replaced(config, minutes=60.0, states=tmp_path / "states")
    with stopped_after(1), pytest.raises(Stopped):
        train_head(config)
    before = (tmp_path / "states" / "filled.bin").read_bytes()
    with pytest.raises(ConfigError, match="from a training with other answers"):
        train_head(replaced(config, limit=100))
    assert (tmp_path / "states" / "filled.bin").read_bytes() == before


def test_a_state_that_is_loaded_is_the_one_that_was_saved(
    target: FrozenTarget, tmp_path: Path
) -> None:
    batch = next(Places(target, examples(9), None, "t", 4096).batches(torch.Generator()))
    one, other = (HeadLearner(new_head([]), target, lr=1e-2) for _ in range(2))
    for _ in range(3):
        one.step(batch, 0.1)
    path = tmp_path / "state"
    torch.save(one.state_dict(), path)
    other.load_state_dict(torch.load(path, weights_only=True))
    for learner in (one, other):
        torch.manual_seed(1)  # of the dropout
        learner.step(batch, 0.5)
    assert (one.num_steps, one.num_places) == (other.num_steps, other.num_places)
    assert one.num_steps == 4
    for own, same in zip(one.head.parameters(), other.head.parameters(), strict=True):
        assert torch.equal(own, same)


def test_a_disk_without_room_is_said_before_the_training(config: HeadConfig) -> None:
    usage = shutil.disk_usage("/")._replace(free=2**10)
    with (
        patch.object(shutil, "disk_usage", lambda path: usage),
        patch.object(run_module._HeadRun, "_learn") as learn,
        pytest.raises(DiskError, match=f"{HEAD_STATE} needs .* MiB free; make space"),
    ):
        train_head(config)
    assert not learn.called


def test_states_are_saved_on_the_way(config: HeadConfig) -> None:
    with (
        patch.object(run_module, "SAVE_MINUTES", 0.0),
        patch.object(run_module, "save_state", wraps=run_module.save_state) as save,
        stopped_after(4),
        pytest.raises(Stopped),
    ):
        train_head(replaced(config, minutes=60.0))
    assert [call.args[1]["learner"]["num_steps"] for call in save.call_args_list] == [1, 2, 3, 4]


def test_weights_that_are_no_numbers_replace_nothing(config: HeadConfig) -> None:
    with pytest.raises(ConfigError, match=r"lr is 1e\+38, .* no longer finite numbers; lower it"):
        train_head(replaced(config, lr=1e38, minutes=0.01))
    assert not (config.drafter / HEAD_STATE).exists()
    # One step leaves weights that are numbers, and what they guess is none.
    with pytest.raises(ConfigError, match=r"lr is 1e\+30, and after 1 step the"):
        train_head(replaced(config, lr=1e30, minutes=1e-9))
    assert not (config.drafter / HEAD_NAME).exists()


def test_a_head_that_became_worse_is_said_and_replaces_no_better_one(
    config: HeadConfig, caplog: pytest.LogCaptureFixture
) -> None:
    train_head(replaced(config, minutes=0.01))
    assert "worse" not in caplog.text
    good = (config.drafter / HEAD_NAME).read_bytes()
    silly = replaced(config, lr=100.0, minutes=0.01, from_head=True, num_tokens=None)
    result = train_head(silly)
    assert sum(result.after) > sum(result.before)
    assert "the drafter keeps its earlier head; lower lr (it is 100)" in caplog.text
    assert result.head.read_bytes() == good
    assert not (config.drafter / HEAD_STATE).exists()
    # Without one to keep there is still what was asked for.
    caplog.clear()
    train_head(replaced(config, lr=100.0, minutes=0.01))
    assert "the head predicts worse than before training: divergence" in caplog.text
    assert (config.drafter / HEAD_NAME).read_bytes() != good


@pytest.mark.parametrize("what", ["measured", "written"])
def test_what_was_learned_outlives_its_end(config: HeadConfig, what: str) -> None:
    where = (HeadLearner, "divergences") if what == "measured" else (HydraHead, "save")
    measure = HeadLearner.divergences

    def broken(head: HydraHead | HeadLearner, *args: Any) -> list[float]:
        if isinstance(head, HeadLearner) and head.num_steps == 0:
            return measure(head, *args)
        raise KeyboardInterrupt

    with patch.object(*where, broken), pytest.raises(KeyboardInterrupt):
        train_head(config)
    assert not (config.drafter / HEAD_NAME).exists()
    num_steps = torch.load(config.drafter / HEAD_STATE, weights_only=True)["learner"]["num_steps"]
    assert train_head(config).num_steps == num_steps > 0
    assert (config.drafter / HEAD_NAME).exists()
    assert not (config.drafter / HEAD_STATE).exists()


def test_a_signal_ends_the_reading_too(config: HeadConfig, tmp_path: Path) -> None:
    read = Places.read

    def own(places: Places, shown: Progress) -> Iterator[None]:
        for number, _ in enumerate(read(places, shown)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield

    config = replaced(config, states=tmp_path / "states", step_tokens=256, minutes=60.0)
    with patch.object(Places, "read", own), pytest.raises(Stopped):
        train_head(config)
    assert f"has read is kept in {config.states}" in how_to_go_on(config.drafter, config.states)
    filled = (tmp_path / "states" / "filled.bin").read_bytes()
    assert 0 < sum(filled) < len(filled)


def test_training_begins_with_the_drafter_s_head(config: HeadConfig) -> None:
    with pytest.raises(ConfigError, match=f"has no {HEAD_NAME} to start from"):
        train_head(replaced(config, num_tokens=None, from_head=True))
    train_head(config)
    before = HydraHead.load(config.drafter, HIDDEN_SIZE, TEXT_VOCAB_SIZE)
    assert before is not None
    # A learning rate that changes nothing.
    train_head(replaced(config, num_tokens=None, from_head=True, lr=1e-30))
    after = HydraHead.load(config.drafter, HIDDEN_SIZE, TEXT_VOCAB_SIZE)
    assert after is not None
    assert after.shape == before.shape
    assert torch.equal(after.token_ids, before.token_ids)
    assert torch.allclose(after.down.weight, before.down.weight, atol=1e-3)


def test_a_target_whose_head_has_a_bias_is_refused(config: HeadConfig, tmp_path: Path) -> None:
    sizes = TINY_SIZES | {"vocab_size": TEXT_VOCAB_SIZE, "num_key_value_heads": 4}
    PhiForCausalLM(PhiConfig(**sizes)).save_pretrained(tmp_path / "phi")
    with pytest.raises(
        ModelError, match="the head of PhiForCausalLM has a bias, which training of"
    ):
        train_head(replaced(config, target=str(tmp_path / "phi")))


def test_a_head_of_another_drafter_is_not_trained_on(config: HeadConfig) -> None:
    shape = HeadShape(HIDDEN_SIZE, 8, (1, LAYER_IDS[1]), 0.5)
    HydraHead(shape, torch.arange(4)).save(config.drafter)
    with pytest.raises(ModelError, match=r"reads layers \[1, 2\], and the drafter \[0, 2, 3\]"):
        train_head(replaced(config, num_tokens=None, from_head=True))


def test_what_cannot_be_trained_is_refused(config: HeadConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers is \[0, 2, 9\], .* \[0, 2, 3\], without \[9\]"):
        train_head(replaced(config, layers=(0, LAYER_IDS[1], 9)))
    with pytest.raises(ConfigError, match=r"minutes is 0\.0; it must be above 0"):
        replaced(config, minutes=0.0)
    with pytest.raises(ConfigError, match=r"layers is \[0, 0\]; it must be without repetitions"):
        replaced(config, layers=(0, 0))
    for folder in (config.drafter, config.drafter / ".." / "drafter", *config.answers):
        with pytest.raises(ConfigError, match=r"states is '.*; it must be a folder of its own"):
            replaced(config, states=folder)
    with pytest.raises(ConfigError, match="is not a folder; give another name"):
        train_head(replaced(config, states=config.drafter / "config.json" / "states"))
    for changes in ({}, {"num_tokens": None, "layers": (2, 3)}):
        with pytest.raises(
            ConfigError, match=r"is (30|\[2, 3\]), and with from_head the head keeps"
        ):
            replaced(config, from_head=True, **changes)
    with pytest.raises(ModelError, match="no-drafter"):
        train_head(replaced(config, drafter=tmp_path / "no-drafter"))
    edit_json(config.drafter / "config.json", hidden_size=HIDDEN_SIZE * 2)
    with pytest.raises(ModelError, match="drafter: "):
        train_head(config)
    assert not (config.drafter / HEAD_NAME).exists()


def test_answers_that_are_too_short_are_refused_without_a_limit_that_none_has_set(
    config: HeadConfig, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"id": "1", "set": "s", "prompt_ids": [1, 2], "response_ids": []}\n')
    with pytest.raises(ConfigError, match=r"\(shorter than 1 token 1\); generate more"):
        train_head(replaced(config, answers=(empty,)))


def test_the_command_trains_and_refuses_in_a_line(config: HeadConfig) -> None:
    told = [config.drafter, *config.answers, "--target", config.target, "--device", "cpu"]
    found = run_json("train-head", *told, "--minutes", 0.001, "--layer", LAYER_IDS[0])
    assert found["head"] == str(config.drafter / HEAD_NAME)
    assert found["steps"] >= 1
    head = HydraHead.load(config.drafter, HIDDEN_SIZE, TEXT_VOCAB_SIZE)
    assert head is not None
    assert head.shape.target_layer_ids == (LAYER_IDS[0],)
    assert "minutes is -1.0; it must be above 0" in refusal("train-head", *told, "--minutes", -1)
