"""What `blockdraft train` cannot do is said in one line, before anything long begins."""

import json

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from blockdraft.cli.main import app
from tests.tiny import LAYER_IDS, TEXT_VOCAB_SIZE, tiny_drafter_folder, tiny_target_folder
from tests.train_runs import small_config, write_answers


def refused(config, *changes):
    """The one line that a run with other settings is refused with."""
    values = config.to_dict().items()
    settings = [f"{name}={'none' if v is None else json.dumps(v)}" for name, v in values]
    result = CliRunner().invoke(app, ["train", *settings, *changes])
    assert result.exit_code == 2, result.output
    assert not config.out.exists()
    return result.stderr.splitlines()[-1]


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(4)), encoding="utf-8"
    )
    return path


def unreadable_target(folder, kind):
    """A target without a list of layers, or with layers that keep a state of their own."""
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


@pytest.mark.parametrize("stage", ["--plan", "--dry-run", "run"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("gpt2", "hidden states cannot be read; use a model whose"), ("mamba", "cannot be rolled")],
)
def test_a_target_whose_states_cannot_be_read(config, tmp_path, kind, reason, stage):
    target = unreadable_target(tmp_path, kind)
    options = [] if stage == "run" else [stage]
    assert reason in refused(config, f"target={target}", *options)


def test_nothing_is_answered_for_a_target_that_cannot_be_trained_for(config, tmp_path, prompts):
    soft = tiny_target_folder(tmp_path, "gemma3", final_logit_softcapping=30.0)
    said = refused(config, f"target={soft}", "data=[]", f"answers.prompts={prompts}")
    assert "final_logit_softcapping" in said
    assert "set distill_share=0" in said


@pytest.mark.parametrize("stage", ["--plan", "run"])
def test_a_template_without_a_generation_prompt(config, tmp_path, prompts, stage):
    template = config.target / "chat_template.jinja"
    bare = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    template.write_text(bare, encoding="utf-8")
    options = [] if stage == "run" else [stage]
    said = refused(config, "data=[]", f"answers.prompts={prompts}", *options)
    assert "no generation prompt" in said


@pytest.mark.parametrize("stage", ["--plan", "--dry-run", "run"])
def test_data_that_teaches_nothing(config, tmp_path, prompts, stage):
    options = [] if stage == "run" else [stage]
    short = write_answers(tmp_path / "short.jsonl", 24, length=10)
    said = refused(config, f"data={short}", "block_size=16", *options)
    assert "the longest answer has 10 tokens, fewer than a block of 16" in said
    said = refused(config, f"data={prompts}", *options)
    assert "line 1: it is a prompt without an answer; let the target answer it" in said
    said = refused(config, "mask_token_id=77", *options)
    assert "mask_token_id 77 occurs" in said
    said = refused(config, "mask_token_id=100000", *options)
    assert "mask_token_id 100000 is outside the vocabulary" in said


def test_a_drafter_whose_mask_token_is_a_word_is_warned_of(config, tmp_path):
    start = tiny_drafter_folder(tmp_path, target_layer_ids=LAYER_IDS, mask_token_id=77)
    values = config.to_dict().items()
    settings = [f"{name}={'none' if v is None else json.dumps(v)}" for name, v in values]
    result = CliRunner().invoke(app, ["train", *settings, f"init_from={start}", "--plan"])
    assert result.exit_code == 0, result.output
    assert "the drafter's mask token 77 occurs" in result.stderr
