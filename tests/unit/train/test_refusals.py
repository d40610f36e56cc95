"""What `blockdraft train` cannot do is said in one line, before anything long begins."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM

from tests.command_line import refusal, run
from tests.rows import write_prompts
from tests.tiny import (
    LAYER_IDS,
    TEXT_VOCAB_SIZE,
    tiny_drafter_folder,
    tiny_target_folder,
    tiny_tokenizer,
)
from tests.train_runs import settings_of, write_answers


def refused(config, *changes, status=2):
    """The one line that a run with other settings is refused with."""
    result = run("train", *settings_of(config), *changes)
    assert result.exit_code == status, result.output
    assert not config.out.exists()
    return result.stderr.splitlines()[-1]


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", 4)


def shapeless_target(folder, kind):
    """A target that is no model of attention and a gated MLP."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder(folder), local_files_only=True)
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=TEXT_VOCAB_SIZE,
                n_embd=16,
                n_layer=2,
                n_head=2,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    else:
        model = MambaForCausalLM(
            MambaConfig(vocab_size=TEXT_VOCAB_SIZE, hidden_size=16, num_hidden_layers=2)
        )
    target = folder / kind
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


@pytest.mark.parametrize("stage", ["--plan", "--init-only", "run"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("gpt2", "has no single intermediate_size; choose another target"),
        ("mamba", "takes its shape from"),
    ],
)
def test_a_target_that_gives_a_drafter_no_shape(config, tmp_path, kind, reason, stage):
    target = shapeless_target(tmp_path, kind)
    options = [] if stage == "run" else [stage]
    assert reason in refused(config, f"target={target}", *options)


def test_nothing_is_answered_for_a_target_that_cannot_be_trained_for(config, tmp_path, prompts):
    soft = tiny_target_folder(tmp_path, "gemma3", final_logit_softcapping=30.0)
    said = refused(config, f"target={soft}", "data=[]", f"answers.prompts={prompts}")
    assert "final_logit_softcapping" in said
    assert "set distill_share=0" in said


STAGES = pytest.mark.parametrize("stage", [["--plan"], ["--init-only"], []], ids=str)
MASK, END = TEXT_VOCAB_SIZE - 1, tiny_tokenizer().eos_token_id


@STAGES
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["answers.max_tokens=7"], "answers.max_tokens is 7, and answers under min_response_len 8"),
        (
            ["answers.max_tokens=9", "block_size=10"],
            "answers.max_tokens is 9, fewer than a block of 10",
        ),
        (["held_out_share=0"], "held_out_share is 0; it must be above 0"),
        (["held_out_share=0.001"], "of 4 prompts none is expected to be held out"),
        (["held_out_share=0.999"], "4 prompts would all be held out"),
        (["init=target", "num_layers=5"], "the target has 4 layers and the drafter 5"),
        ([f"mask_token_id={END}"], f"mask_token_id {END} occurs 1 times"),
        ([f"mask_token_id={TEXT_VOCAB_SIZE}"], "is outside the vocabulary"),
        (["tau_limit=1", "tau_prompts=none.jsonl"], "cannot read none.jsonl"),
        (["tau_limit=1", "tau_prompts=/dev/null"], "hold no prompt"),
        (["tau_limit=1", "tau_max_tokens=512"], "exceeds the target's context of 512"),
    ],
    ids=str,
)
def test_nothing_is_answered_for_a_run_that_cannot_be(config, prompts, changes, reason, stage):
    given = ["data=[]", f"answers.prompts={prompts}", f"mask_token_id={MASK}", "held_out_share=0.4"]
    assert reason in refused(config, *given, *changes, *stage)


@STAGES
@pytest.mark.parametrize("answers", [[], ["answers.num_self_written=400"]], ids=str)
def test_what_the_machine_lacks_is_said_first(config, monkeypatch, answers, stage):
    given = [f"mask_token_id={MASK}", *answers, *stage]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "blockdraft.train.event_log", None)
        assert "needs the package tensorboard" in refused(config, "tensorboard=true", *given)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "its disk has 0.0 MiB free" in refused(config, *given, status=4)


@STAGES
def test_prompts_of_real_decoding_that_cannot_be_asked(config, tmp_path, prompts, stage):
    given = ["tau_limit=1", f"tau_prompts={prompts}", *stage]
    # Those held out have 6 to 10 tokens.
    assert "after a prompt of 6" in refused(config, "tau_limit=1", "tau_max_tokens=507", *stage)
    said = refused(config, "tau_max_tokens=500", *given)
    assert "tau_max_tokens is 500, which after a prompt of" in said
    (config.target / "chat_template.jinja").unlink()
    assert "has no chat template; use" in refused(config, *given)


@STAGES
def test_answers_of_a_larger_vocabulary(config, tmp_path, stage):
    path = tmp_path / "foreign.jsonl"
    row = {"id": "far", "set": "s", "prompt_ids": [1], "response_ids": [*range(2, 12), 9999]}
    rows = config.data[0].read_text(encoding="utf-8") + json.dumps(row) + "\n"
    path.write_text(rows, encoding="utf-8")
    said = refused(config, f"data={path}", *stage)
    assert "the answer of id 'far' in set 's' holds token 9999" in said
    assert f"vocabulary has {TEXT_VOCAB_SIZE}" in said


@STAGES
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{% for message in %}", "fails on messages of user: "),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate str"),
    ],
)
def test_a_chat_template_that_fails(config, prompts, template, reason, stage):
    (config.target / "chat_template.jinja").write_text(template, encoding="utf-8")
    said = refused(config, "data=[]", f"answers.prompts={prompts}", *stage)
    assert "chat template fails" in said
    assert reason in said
    assert reason in refused(config, "tau_limit=1", f"tau_prompts={prompts}", *stage)


def test_a_chat_template_that_fails_for_answers(config, tmp_path, prompts):
    (config.target / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    output = tmp_path / "answers"
    said = refusal("data", "--target", config.target, "--output", output, "--prompts", prompts)
    assert "chat template fails on messages of user" in said
    assert not output.exists()


@STAGES
def test_more_threads_than_cores(config, stage):
    assert "threads is 999, and " in refused(config, "threads=999", *stage)


def test_a_plan_and_an_untrained_drafter_at_once(config):
    assert "exclude each other" in refused(config, "--plan", "--init-only")


@pytest.mark.parametrize("stage", ["--plan", "run"])
def test_a_template_without_a_generation_prompt(config, tmp_path, prompts, stage):
    template = config.target / "chat_template.jinja"
    bare = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    template.write_text(bare, encoding="utf-8")
    options = [] if stage == "run" else [stage]
    said = refused(config, "data=[]", f"answers.prompts={prompts}", *options)
    assert "no generation prompt" in said


@pytest.mark.parametrize("stage", ["--plan", "--init-only", "run"])
def test_data_that_teaches_nothing(config, tmp_path, prompts, stage):
    options = [] if stage == "run" else [stage]
    short = write_answers(tmp_path / "short.jsonl", 24, length=10)
    said = refused(config, f"data={short}", "block_size=16", *options)
    assert "the longest answer has 10 tokens, fewer than a block of 16" in said
    said = refused(config, f"data={prompts}", *options)
    assert "line 1: it is a prompt without an answer; let the target answer it" in said
    said = refused(config, "mask_token_id=77", *options)
    assert "mask_token_id 77 occurs" in said
    said = refused(config, "mask_token_id=77", f"answers.prompts={prompts}", "data=[]", *options)
    assert "mask_token_id 77 is '" in said
    assert "which may occur in answers that are not written yet; leave it unset" in said
    said = refused(config, "mask_token_id=100000", *options)
    assert "mask_token_id 100000 is outside the vocabulary" in said


def test_a_language_model_to_start_from_is_said_to_become_a_draft_model(config):
    """Who gives the target, to begin from its layers, should know before it has run for hours."""
    settings = settings_of(replace(config, num_layers=None, num_features=None))
    start = f"init_from={config.target}"
    result = run("train", *settings, start, "--plan")
    assert result.exit_code == 0, result.output
    assert f"{config.target} is a language model, so it is trained as one" in result.stderr
    assert "each draft token runs all of its 4 layers" in result.stderr
    asked = ["architecture=draft_model", start, "--plan"]
    assert "trained as one" not in run("train", *settings, *asked).stderr


def test_a_drafter_whose_mask_token_is_a_word_is_warned_of(config, tmp_path):
    start = tiny_drafter_folder(tmp_path, target_layer_ids=LAYER_IDS, mask_token_id=77)
    result = run("train", *settings_of(config), f"init_from={start}", "--plan")
    assert result.exit_code == 0, result.output
    assert "the drafter's mask token 77 occurs" in result.stderr
