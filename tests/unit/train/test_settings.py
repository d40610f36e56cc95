"""Settings of runs and answers do what they say: each is seen in what a run makes of it."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon
from transformers import AutoTokenizer

from blockdraft.bench.workload import BUNDLED
from blockdraft.core.jsonl import read_jsonl
from blockdraft.data.shards import read_manifest
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.target.loading import load_target_model
from blockdraft.train.optimizer import DraftOptimizer, Float32Muon
from blockdraft.train.prepare import read_data
from blockdraft.train.trainer import train
from blockdraft.train.untrained import write_untrained
from tests.command_line import run, run_json
from tests.rows import write_rows
from tests.tiny import TEXT_VOCAB_SIZE, tiny_drafter, tiny_target_folder
from tests.train_runs import settings_of


def after_one_step(config, scale: float = 1.0) -> tuple[DraftOptimizer, list[Tensor]]:
    """The optimizer after a step with random gradients, and what changed in each matrix."""
    model = tiny_drafter(vocab_size=TEXT_VOCAB_SIZE)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    before = [p.detach().clone() for p in matrices]
    optimizer = DraftOptimizer(model, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator).sign()
    optimizer.collect()
    optimizer.step(0.0)
    return optimizer, [p.detach() - old for p, old in zip(matrices, before, strict=True)]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_the_first_update_of_each_optimizer(config, optimizer, warmup_steps):
    """AdamW's first step changes every weight by the rate; Muon's is orthogonal, and as large."""
    config = dataclasses.replace(config, optimizer=optimizer, lr=0.01, warmup_steps=warmup_steps)
    rate = config.lr / (warmup_steps + 1)
    changes = after_one_step(config)[1]
    if optimizer == "adamw":
        assert all(c.abs().allclose(torch.tensor(rate), rtol=0.02) for c in changes)
        return
    for change in changes:
        # The published match of the step's size to AdamW's aims at a fifth of the rate.
        assert change.square().mean().sqrt() == pytest.approx(0.2 * rate, rel=0.3)
        # AdamW's would be apart by 2.3 and more.
        low, high = torch.linalg.svdvals(change).quantile(torch.tensor([0.1, 0.9]))
        assert high < 1.9 * low


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_is_that_of_the_matrices(config, optimizer):
    config = dataclasses.replace(config, optimizer=optimizer, lr=0.01, warmup_steps=0)
    plain, decayed = (
        after_one_step(dataclasses.replace(config, weight_decay=decay))[0].state_dict()["masters"]
        for decay in (0.0, 0.5)
    )
    for parameter, one, other in zip(
        tiny_drafter(vocab_size=TEXT_VOCAB_SIZE).parameters(), plain, decayed, strict=True
    ):
        shrunk = 0.01 * 0.5 * parameter.detach() if parameter.ndim == 2 else 0.0 * other
        torch.testing.assert_close(one - other, shrunk, atol=1e-7, rtol=1e-3)


def test_large_gradients_are_clipped(config):
    config = dataclasses.replace(config, optimizer="adamw", grad_clip=0.5)
    parts = after_one_step(config, 1e3)[0].state_dict()["optimizers"]
    # A tenth of the gradient is in the first moment of the first step.
    moments = [state["exp_avg"] for part in parts for state in part["state"].values()]
    norm = torch.stack([moment.norm() for moment in moments]).norm()
    assert norm == pytest.approx(0.1 * config.grad_clip, rel=1e-3)


def test_a_drafter_guesses_the_most_frequent_tokens(config):
    config = dataclasses.replace(config, max_steps=1, draft_vocabulary=40)
    chosen = DraftModel.from_pretrained(train(config).drafter).draft_vocabulary
    examples, _ = read_data(config)
    counts = Counter(token for example in examples for token in example.response_ids)
    assert len(set(chosen)) == len(chosen) == 40
    least = min(counts[token] for token in chosen)
    assert all(counts[token] <= least for token in counts.keys() - set(chosen))
    whole = dataclasses.replace(config, draft_vocabulary=0)
    assert DraftModel.from_pretrained(write_untrained(whole)).draft_vocabulary is None


def test_a_drafter_begins_from_the_target(config):
    config = dataclasses.replace(config, init="target")
    drafter = DraftModel.from_pretrained(write_untrained(config)).state_dict()
    target = load_target_model(config.target, torch.float32).state_dict()
    for mine, theirs in ((0, 2), (1, 3)):
        name = "layers.{}.mlp.up_proj.weight"
        assert torch.equal(drafter[name.format(mine)], target["model." + name.format(theirs)])


def test_the_averages_are_what_is_saved(config):
    config = dataclasses.replace(config, max_steps=4, ema_decay=0.98)
    train(config)
    saved = DraftModel.from_pretrained(config.out / "last").parameters()
    state = torch.load(config.out / "state.pt", weights_only=True)["optimizer"]
    assert all(map(torch.equal, saved, state["averages"]))
    assert not any(map(torch.equal, state["masters"], state["averages"]))


def answer(tmp_path, prompts, *options):
    """`blockdraft data` on rows; returns the folder of answers."""
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    write_rows(path, prompts)
    arguments = ["data", "--target", tmp_path / "llama-target", "--output", output]
    arguments += ["--prompts", path, "--max-tokens", 4, "--max-prompt-tokens", 400, *options]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return output


@pytest.mark.parametrize("drops", [False, True])
def test_answers_without_an_end_are_dropped_if_asked(tmp_path, drops):
    tiny_target_folder(tmp_path)
    rows = [{"prompt": f"say {n}"} for n in range(40)]
    # The tiny target seldom ends an answer.
    options = ["--max-tokens", 40, *["--drop-truncated"] * drops]
    counts = read_manifest(answer(tmp_path, rows, *options))["counts"]
    finishes = Counter(row["finish"] for _, row in read_jsonl(tmp_path / "out" / "answers.jsonl"))
    assert finishes["stop"] > 0
    assert finishes["length"] > 0
    assert counts.get("truncated", 0) == (finishes["length"] if drops else 0)


@pytest.mark.parametrize(("thinking", "ending"), [("on", ""), ("off", "!")])
def test_answers_are_asked_for_with_thinking_or_without(tmp_path, thinking, ending):
    target = tiny_target_folder(tmp_path)
    with (target / "chat_template.jinja").open("a", encoding="utf-8") as template:
        template.write("{% if not enable_thinking | default(true) %}!{% endif %}")
    output = answer(tmp_path, [{"prompt": "hi"}], "--thinking", thinking)
    ((_, row),) = read_jsonl(output / "answers.jsonl")
    asked = AutoTokenizer.from_pretrained(target).decode(row["prompt_ids"])
    assert asked.endswith("<|start|>assistant\n" + ending)


def benchmark_prompt():
    return max((row["turns"][0] for _, row in read_jsonl(BUNDLED)), key=len)


def test_no_answers_to_prompts_of_the_bundled_benchmark(tmp_path):
    tiny_target_folder(tmp_path)
    output = answer(tmp_path, [{"prompt": benchmark_prompt()}, {"prompt": "my own"}])
    assert [row["id"] for _, row in read_jsonl(output / "answers.jsonl")] == ["prompts-1"]


def test_a_run_asks_no_prompts_of_the_bundled_benchmark(config, tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": benchmark_prompt()}, *({"prompt": f"say {n}"} for n in range(4))]
    write_rows(path, rows)
    config = dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1)
    told = run_json("train", *settings_of(config), f"answers.prompts={path}", "--plan")
    assert told["plan"]["answers"]["expected"] == 4


def test_both_forms_of_muon_give_the_same_updates_but_for_rounding():
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in ((24, 16), (16, 40))]
    forms = []
    for form in (Muon, Float32Muon):
        matrices = [nn.Parameter(matrix.clone()) for matrix in drawn]
        optimizer = form(matrices, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for step in range(3):
            for matrix in matrices:
                matrix.grad = torch.sin(matrix.detach() * (step + 1))
            optimizer.step()
        forms.append((matrices, optimizer.state_dict()))
    (theirs, their_state), (ours, our_state) = forms
    for before, one, other in zip(drawn, theirs, ours, strict=True):
        moved = (one - before).abs().mean()
        assert (one - other).abs().mean() < 0.02 * moved  # bfloat16 has 8 bits
    assert our_state.keys() == their_state.keys()
    Muon(ours, lr=0.1).load_state_dict(our_state)
