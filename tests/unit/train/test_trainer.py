"""Whole runs on a tiny target (reference cases 29 and 30)."""

import dataclasses
import gc
import itertools
import json
import logging
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from blockdraft.core.errors import ConfigError, DiskError, ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.data.holding_out import is_held_out
from blockdraft.data.prompts import Prompt, prompt_ids
from blockdraft.data.shards import write_manifest
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.vocabulary import write_draft_vocabulary
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.train import features, prepare, run_state, training_run, true_tau
from blockdraft.train.estimate import estimate_run
from blockdraft.train.features import FrozenTarget
from blockdraft.train.optimizer import DraftOptimizer, lr_share
from blockdraft.train.run_state import RunClock
from blockdraft.train.trainer import train
from blockdraft.train.true_tau import RealDecoding, TrueTau, prompts_to_decode, serving
from tests.parity.checks import generate_plain
from tests.rows import write_rows
from tests.tiny import (
    CONTEXT,
    LAYER_IDS,
    TEXT_VOCAB_SIZE,
    tiny_drafter,
    tiny_drafter_folder,
    tiny_target,
    tiny_target_folder,
)
from tests.train_runs import logged

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_leaves_a_drafter_with_its_history(config, caplog):
    caplog.set_level(logging.INFO)
    result = train(config)
    assert result.num_steps == 10
    model = DraftModel.from_pretrained(result.drafter)
    assert model.config.block_size == 4
    assert model.config.num_hidden_layers == 2
    history = json.loads((result.drafter / "provenance.json").read_text())
    assert history["config"]["lr"] == config.lr
    assert history["data"]["train"] + history["data"]["held_out"] == 24
    assert history["result"]["held_out"]["tau"] == result.best["held_out"]["tau"]
    rows = logged(config.out)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["nll"] < rows[0]["nll"]
    # Ten steps of four answers of 30 tokens to prompts of 6 to 10.
    assert 36 * 40 <= result.evaluations[-1]["tokens"] <= 40 * 40
    assert "held out: tau" in caplog.text
    page = (config.out / "index.html").read_text(encoding="utf-8")
    assert "<polyline" in page
    assert "://" not in page


def test_held_out_answers_change_nothing_that_is_trained(config):
    """Neither the weights nor the tokens that the drafter may guess, nor the n-grams beside it."""
    config = dataclasses.replace(config, max_steps=3, mask_token_id=260, draft_vocabulary=60)
    rows = [json.loads(line) for line in config.data[0].read_text().splitlines()]
    held_out = {row["id"] for row in rows if is_held_out(row["id"], config.held_out_share)}
    assert 0 < len(held_out) < len(rows)
    for row in rows:
        if row["id"] in held_out:
            row["response_ids"] = list(range(255, 225, -1))
    others = dataclasses.replace(
        config,
        data=(write_rows(config.out.parent / "others.jsonl", rows),),
        out=config.out.parent / "others",
    )
    for one in (config, others):
        train(one)
    names = "last/model.safetensors", "last/draft_vocabulary.json", "drafter/ngrams.safetensors"
    for name in names:
        assert (config.out / name).read_bytes() == (others.out / name).read_bytes(), name


def test_the_best_drafter_by_true_tau_is_kept(config, monkeypatch):
    taus = iter([1.0, 3.0, 2.0])

    def measure(self, drafter, tick):
        return TrueTau(tau={"all": next(taus)}, speedup={"all": 1.0})

    monkeypatch.setattr(RealDecoding, "measure", measure)
    result = train(dataclasses.replace(config, eval_steps=4, max_steps=8))
    assert [row["step"] for row in result.evaluations] == [0, 4, 8]
    assert result.best["step"] == 4
    best, last = (
        json.loads((config.out / name / "provenance.json").read_text())["result"]["step"]
        for name in ("drafter", "last")
    )
    assert (best, last) == (4, 8)


@pytest.mark.slow
def test_real_decoding_is_measured_by_set(config, tmp_path, monkeypatch):
    drafters = []
    decode = RealDecoding._decode

    def recorded(self, engine, prompt_ids, tick):
        drafters.append(type(engine.drafter))
        return decode(self, engine, prompt_ids, tick)

    monkeypatch.setattr(RealDecoding, "_decode", recorded)
    result = train(dataclasses.replace(config, max_steps=1, tau_limit=1, tau_max_tokens=6))
    assert set(result.best["true_tau"]) >= {"set0", "set1", "all"}
    assert result.best["speedup"]["all"] > 0
    # Two prompts, drafted and plain in turns, at two evaluations.
    assert drafters == [DFlashDrafter, NoDrafter] * 4
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "abc"}\n' * 3, encoding="utf-8")
    other = dataclasses.replace(
        config, out=tmp_path / "b", max_steps=1, tau_prompts=(path,), tau_limit=2, tau_max_tokens=6
    )
    assert set(train(other).best["true_tau"]) >= {"mine", "all"}


@pytest.mark.slow
def test_the_speed_up_is_the_median_of_the_prompts(config, tmp_path, monkeypatch):
    """One prompt that another process slowed down says nothing."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "abc"}\n' * 3, encoding="utf-8")
    config = dataclasses.replace(
        config, max_steps=1, tau_prompts=(path,), tau_limit=3, tau_max_tokens=6
    )
    # Drafted, then plain.
    seconds = itertools.cycle([1.0, 1.5, 1.0, 90.0, 2.0, 4.0])
    monkeypatch.setattr(true_tau, "_decode_seconds", lambda progress: next(seconds))
    for row in train(config).evaluations:
        assert row["speedup"]["mine"] == row["speedup"]["all"] == 2.0


@pytest.mark.parametrize(
    ("told", "ending"), [(["on"], ""), (["off", "off"], "!"), (["on", "off"], ""), ([], "")]
)
def test_prompts_are_asked_with_thinking_as_the_answers_were(config, tmp_path, told, ending):
    with (config.target / "chat_template.jinja").open("a", encoding="utf-8") as template:
        template.write("{% if not enable_thinking | default(true) %}!{% endif %}")
    folders = []
    for number, thinking in enumerate(told):
        folders.append(tmp_path / f"answers-{number}")
        folders[-1].mkdir()
        hashes = {name: {"sha256": "0"} for name in ("target", "template")}
        write_manifest(folders[-1], hashes | {"runs": [{"config": {"thinking": thinking}}]})
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": "abc"}])
    config = dataclasses.replace(
        config, data=(*config.data, *folders), tau_prompts=(path,), tau_limit=1, tau_max_tokens=6
    )
    ((_, asked),) = prompts_to_decode(config, tiny_target(), [])
    text = AutoTokenizer.from_pretrained(config.target).decode(asked)
    assert text.endswith("<|start|>assistant\n" + ending)


def test_prompts_that_leave_no_room_are_not_decoded(config):
    _, held_out = prepare.read_data(config)
    lengths = {len(example.prompt_ids) for example in held_out}
    assert lengths > {6, 7}
    config = dataclasses.replace(config, tau_limit=9, tau_max_tokens=CONTEXT - 7)
    # A text of somebody else may have no prompt, from which nothing can be decoded.
    empty = dataclasses.replace(held_out[0], prompt_ids=())
    decoded = prompts_to_decode(config, tiny_target(), [empty, *held_out])
    assert {len(prompt_ids) for _, prompt_ids in decoded} == {6, 7}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw"},
        {"accumulate": 2},
        {"pack_len": 1024},
        {"ema_decay": 0.0},
        {"init": "target"},
        {"num_frequent": 0, "position_weights": "decay", "distill_share": 1.0},
    ],
    ids=str,
)
def test_every_way_of_training_learns_and_resumes(config, changes):
    config = dataclasses.replace(config, **changes)
    train(config)
    losses = [row["nll"] + row["distill"] for row in logged(config.out)]
    assert sum(losses[-3:]) < sum(losses[:3])
    result = train(dataclasses.replace(config, max_steps=11))
    assert result.num_steps == 11


def test_only_the_drafter_changes(config, monkeypatch):
    targets = []
    load = prepare.load_target_model

    def remember(*args, **options):
        targets.append(load(*args, **options))
        return targets[-1]

    monkeypatch.setattr(prepare, "load_target_model", remember)
    start = tiny_drafter_folder(config.out.parent, target_layer_ids=LAYER_IDS)
    result = train(dataclasses.replace(config, init_from=start, held_out_share=0.2))
    fresh = load(config.target, torch.float32, "cpu").state_dict()
    for name, value in targets[0].state_dict().items():
        assert torch.equal(value, fresh[name])
    assert all(p.grad is None and not p.requires_grad for p in targets[0].parameters())
    before, after = (
        DraftModel.from_pretrained(folder).state_dict() for folder in (start, result.drafter)
    )
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_a_failing_run_leaves_no_folder(config):
    with pytest.raises(ConfigError, match="no folder or file of answers"):
        train(dataclasses.replace(config, data=(config.out.parent / "none.jsonl",)))
    with pytest.raises(ConfigError, match="device 'foo'"):
        train(dataclasses.replace(config, device="foo"))
    assert not config.out.exists()
    config.out.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a folder"):
        train(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mask_token_id": 77}, "mask_token_id 77 occurs"),
        ({"min_response_len": 40}, "shorter than 40 tokens 24"),
        ({"max_len": 10}, "without room in max_len 10"),
        ({"block_size": 40}, "the longest answer has 30 tokens, fewer than a block of 40"),
        ({"held_out_share": 1e-9}, "24 answers to 24 prompts give 24 to train on and 0"),
        ({"init": "target", "num_layers": 9}, "the target has 4 layers and the drafter 9"),
        ({"init_from": "self", "init": "target"}, "exclude each other"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_is_refused_before_it_begins(config, changes, reason):
    if "init_from" in changes:
        changes = changes | {"init_from": config.target}
    with pytest.raises((ConfigError, ModelError)) as error:
        train(dataclasses.replace(config, **changes))
    assert reason in str(error.value)
    assert not config.out.exists()


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("num_layers", 2, 3), ("num_features", 3, 1), ("mask_token_id", 4, 5)],
)
def test_a_drafter_to_continue_from_keeps_its_shape(config, name, own, other):
    start = tiny_drafter_folder(config.out.parent, target_layer_ids=LAYER_IDS, mask_token_id=4)
    config = dataclasses.replace(
        config, init_from=start, num_layers=None, num_features=None, max_steps=1
    )
    with pytest.raises(ConfigError, match=f"{name} is {other}, and .*init_from.* has {own}"):
        train(dataclasses.replace(config, **{name: other}))
    train(dataclasses.replace(config, **{name: own}))


def test_a_drafter_to_continue_from_takes_the_vocabulary_of_the_settings(config):
    start = tiny_drafter_folder(config.out.parent, target_layer_ids=LAYER_IDS)
    write_draft_vocabulary(start, [1, 2, 3])
    config = dataclasses.replace(config, init_from=start, max_steps=1)
    for size, expected in ((0, None), (5, 5)):
        out = config.out.parent / str(size)
        train(dataclasses.replace(config, out=out, draft_vocabulary=size))
        found = DraftModel.from_pretrained(out / "last").draft_vocabulary
        assert (None if found is None else len(found)) == expected


def test_a_disk_that_is_too_small_is_said_at_once(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(DiskError, match=r"needs .* MiB and its disk has 0\.0 MiB free"):
        train(config)


def test_a_run_that_goes_on_has_a_part_of_its_disk_already(config, monkeypatch):
    """It began with room for all, so what is left is enough for the rest."""
    train(config)
    free = 0
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        with pytest.raises(DiskError, match="its disk has"):
            train(dataclasses.replace(config, out=config.out.parent / "new"))
        free = (config.out / training_run.STATE).stat().st_size * 2
        with pytest.raises(DiskError, match="its disk has"):
            train(dataclasses.replace(config, out=config.out.parent / "new"))
        assert train(dataclasses.replace(config, max_steps=11)).num_steps == 11


def test_a_run_whose_loss_is_no_number_ends(config):
    with pytest.raises(ConfigError, match=r"loss of step \d+ is not finite; give a lower lr \(now"):
        train(dataclasses.replace(config, lr=1e30))
    rows = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    assert all(row["nll"] == row["nll"] for row in rows if "nll" in row)


def test_a_lack_of_memory_names_what_takes_it(config):
    greedy = dataclasses.replace(config, pack_len=10**15)
    for start in (train, estimate_run):
        with pytest.raises(ConfigError, match=r"memory ran out \(.*; lower anchors_per_forward, "):
            start(greedy)


def test_an_out_folder_that_holds_something_else_is_refused(config):
    config.out.mkdir()
    (config.out / "drafter").write_text("a file")
    with pytest.raises(ConfigError, match=r"drafter is not a folder; give another name"):
        train(config)
    (config.out / "drafter").unlink()
    log = config.out / "log.jsonl"
    log.write_text('{"message": "of another program"}\n')
    with pytest.raises(
        ConfigError, match=r"log\.jsonl, line 1: it does not belong to a step of a run; give"
    ):
        train(config)
    assert log.read_text() == '{"message": "of another program"}\n'


def test_a_target_without_a_list_of_layers_is_refused(config, monkeypatch):
    load = prepare.load_target_model

    def hidden(*args, **options):
        model = load(*args, **options)
        model.get_decoder = lambda: torch.nn.Linear(1, 1)
        return model

    monkeypatch.setattr(prepare, "load_target_model", hidden)
    with pytest.raises(ModelError, match="keeps no list of decoder layers"):
        train(config)


def test_distillation_from_changed_logits_is_refused(config):
    target = tiny_target_folder(config.out.parent, "gemma3", final_logit_softcapping=30.0)
    soft = dataclasses.replace(config, target=target)
    with pytest.raises(ModelError, match=r"final_logit_softcapping 30\.0.*distill_share=0"):
        train(soft)
    train(dataclasses.replace(soft, distill_share=0.0, max_steps=1))


def test_bfloat16_run(config):
    result = train(dataclasses.replace(config, dtype="bfloat16", max_steps=3))
    assert DraftModel.from_pretrained(result.drafter).fc.weight.dtype == torch.bfloat16


def write_own_answers(path: Path, folder: Path, prompts: list[Prompt], num_tokens: int) -> Path:
    """The target's greedy answers, so that decoding walks over the very texts of the training."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    params, eos_ids = SamplingParams(max_tokens=num_tokens), frozenset([tokenizer.eos_token_id])
    rows = []
    with SequentialTarget(tiny_target(vocab_size=TEXT_VOCAB_SIZE)).released_after() as target:
        for prompt in prompts:
            token_ids = prompt_ids(tokenizer, prompt)
            answer = generate_plain(target, token_ids, params, eos_ids=eos_ids)
            rows.append(
                {"id": prompt.id, "set": prompt.set, "finish": answer.finish_reason}
                | {"prompt_ids": token_ids, "response_ids": answer.token_ids}
            )
    return write_rows(path, rows)


@pytest.mark.slow
def test_overfits_eight_sequences_and_serves_as_it_was_trained(config):
    """It can learn: nearly whole blocks of texts that it has seen are right, also when decoding."""
    num_tokens = 1 + 7 * config.block_size  # the prompt's pass gives one, then come whole blocks
    texts = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    prompts = [Prompt(id=text, set="s", text=text) for text in texts]
    data = write_own_answers(config.out.parent / "own.jsonl", config.target, prompts, num_tokens)
    config = dataclasses.replace(
        config,
        data=(data,),
        mask_token_id=TEXT_VOCAB_SIZE - 1,
        max_steps=300,
        batch_sequences=8,
        num_anchors=12,
        anchors_per_forward=12,
        lr=1e-2,
        tau_limit=8,
        tau_max_tokens=num_tokens,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "split_held_out", lambda examples, share: (examples, examples))
        result = train(config)
    tau = result.best["held_out"]["tau"]
    assert tau > 0.9 * config.block_size
    assert result.best["true_tau"]["all"] == pytest.approx(tau, rel=0.05)


def test_learning_rate_rises_then_falls(config):
    config = dataclasses.replace(config, warmup_steps=4, min_lr_share=0.1)
    assert lr_share(0.0, 0, config) == pytest.approx(0.2)
    assert lr_share(0.0, 4, config) == 1.0
    assert lr_share(0.5, 50, config) == pytest.approx(0.55)
    assert lr_share(1.0, 99, config) == pytest.approx(0.1)


def test_averages_lag_behind_and_do_not_touch_the_masters(config):
    model = tiny_drafter(vocab_size=TEXT_VOCAB_SIZE)
    optimizer = DraftOptimizer(model, dataclasses.replace(config, ema_decay=0.9))
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.collect()
        optimizer.step(0.5)
    newest = model.norm.weight.detach().clone()
    optimizer.use_averages()
    average = model.norm.weight.detach().clone()
    optimizer.use_masters()
    assert torch.equal(model.norm.weight, newest)
    assert (newest < average).all()
    assert (average < 1).all()


def test_a_stopped_process_costs_little_of_the_budget(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])
    clock = RunClock()
    now[0] += 10
    assert clock.tick() == 10
    now[0] += 5000
    assert clock.tick() == 10 + run_state.MAX_COUNTED_SECONDS


def test_a_long_evaluation_counts_in_full(config, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])

    def slow_measure(self, drafter, tick):
        for _ in range(10):
            now[0] += 100
            tick()
        return TrueTau(tau={}, speedup={})

    monkeypatch.setattr(RealDecoding, "measure", slow_measure)
    train(dataclasses.replace(config, max_steps=1))
    state = torch.load(config.out / "state.pt", weights_only=True)
    assert state["seconds"] == 2000  # of the evaluations before the first step and after the last


def test_a_step_of_a_slow_target_counts_in_full(config, monkeypatch):
    """As those of a large one on a CPU: each of its forwards takes less than what is counted."""
    now = [0.0]
    monkeypatch.setattr(run_state, "monotonic", lambda: now[0])
    monkeypatch.setattr(features, "CPU_TOKENS", 1)
    computed = FrozenTarget._states

    def slow(self, token_ids, lengths):
        now[0] += 100
        return computed(self, token_ids, lengths)

    def seconds_until(max_steps):
        train(dataclasses.replace(config, max_steps=max_steps))
        return torch.load(config.out / "state.pt", weights_only=True)["seconds"]

    monkeypatch.setattr(FrozenTarget, "_states", slow)
    before = seconds_until(1)
    # The held-out answers are read again, and then the texts of a step, each by itself.
    held_out = sum(is_held_out(f"p{n}", config.held_out_share) for n in range(24))
    assert seconds_until(2) - before == 100 * (held_out + config.batch_sequences)


def test_real_decoding_leaves_the_target_as_it_was(tmp_path):
    model = tiny_target()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    tiny_drafter().save_pretrained(tmp_path)
    with serving(model, tmp_path):
        pass
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_an_evaluation_leaves_no_engine_behind(monkeypatch):
    """On a card its keys and values would lie beside those of the next one."""
    kept: list[weakref.ref[Engine]] = []
    decode = RealDecoding._decode

    def noted(real, engine, *args):
        kept.append(weakref.ref(engine))
        return decode(real, engine, *args)

    monkeypatch.setattr(RealDecoding, "_decode", noted)
    real = RealDecoding(tiny_target(), frozenset(), [("words", [1, 2, 3])], 4, "")
    gc.collect()
    gc.disable()
    try:
        assert real.measure(tiny_drafter(), lambda: None).tau
        assert [engine() for engine in kept] == [None, None]
    finally:
        gc.enable()
