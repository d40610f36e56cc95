"""The command line on tiny models: what it prints, and how it refuses."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
import types
from types import SimpleNamespace

import pytest
import typer
from safetensors.torch import load_file, save_file

from blockdraft.cli.chat import _after
from blockdraft.cli.command import name_options
from blockdraft.cli.main import app
from blockdraft.core.errors import DISK_FAILED, MISTAKE, NO
from blockdraft.hub.catalog import CATALOG
from blockdraft.text.tokenizer import Tokenizer
from tests.command_line import refusal, run, run_json
from tests.tiny import edit_json, tiny_drafter_folder, tiny_target_folder, tiny_tokenizer


@pytest.mark.parametrize("command", ["generate", "explain"])
def test_standard_input_that_is_no_text_is_refused(command):
    assert "bytes that are not UTF-8" in refusal(command, "-", input=b"caf\xe9")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "--bogus", "hi"], "no such option: --bogus"),
        (["generate", "--max-token", "3", "hi"], "--max-tokens"),
        (["generate", "--max-tokens", "many", "hi"], "'many'"),
        (["generate", "--exact", "maybe", "hi"], "'maybe' is not one of 'on', 'off'"),
        (["generate"], "; see `blockdraft generate --help`"),
        (["generate", "what", "is"], "(is); put a prompt of several words in quotes; see"),
        (["bench", "speed"], "missing option '--prompts'; see `blockdraft bench speed --help`"),
        (["generat", "hi"], "no such command 'generat'"),
        (["--bogus"], "no such option: --bogus"),
        (["train"], "missing argument"),
        (["train", "a.toml", "b.toml"], "'b.toml' is a second file"),
    ],
)
def test_a_wrong_command_line_is_refused_on_one_line(arguments, reason):
    result = run(*arguments)
    assert result.exit_code == MISTAKE
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("blockdraft: ")
    assert reason in line


def test_a_drafter_to_start_from_may_be_a_name(pair):
    settings = [f"target={pair[1]}", "data=a.jsonl", "out=o"]
    assert "did you mean" in refusal("train", *settings, "init_from=smollm2-135m-dflas")


def test_without_a_command_the_help_is_shown():
    assert "generate" in run().output
    assert "speed" in run("bench").output


def test_a_biased_token_is_chosen(pair):
    options = ["--max-tokens", 3, "--ignore-eos", "--logit-bias", "77=100", "abc"]
    assert run_json("generate", *pair, *options)["token_ids"] == [77] * 3


def test_chat_for_programs_prints_one_object_a_turn(pair):
    lines = f"the abc\n/reset\n{'x' * 600}\nabc\n"
    result = run("chat", *pair, "--json", "--max-tokens", 6, input=lines)
    assert result.exit_code == 0, result.output
    first, refused, last = map(json.loads, result.stdout.splitlines())
    assert len(first["token_ids"]) <= 6
    assert "512" in refused["error"]
    assert last["finish_reason"] in ("stop", "length")


def test_generate_prints_text_and_a_summary(pair):
    result = run("generate", *pair, "--max-tokens", 12, "--ignore-eos", "the abc")
    assert result.exit_code == 0
    assert "12 tokens" in result.stderr
    assert re.search(r"depth \d\.\d", result.stderr)
    assert "target passes" in result.stderr
    expected = run_json("generate", *pair, "--max-tokens", 12, "--ignore-eos", "the abc")
    assert result.stdout.rstrip("\n") == expected["text"].rstrip("\n")


def test_a_single_token_has_no_speed_and_no_tau(pair):
    result = run("generate", *pair, "--max-tokens", 1, "the abc")
    assert result.stderr.splitlines()[-1] == "[1 token, 1 target pass]"


def test_the_prompt_may_come_from_standard_input(pair):
    options = ("generate", *pair, "--max-tokens", 8)
    piped = run_json(*options, "-", input="the abc")
    assert piped["token_ids"] == run_json(*options, "the abc")["token_ids"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_closed_standard_input_is_refused(pair, command, monkeypatch):
    """As a shell closes it with <&-."""
    monkeypatch.setattr("blockdraft.cli.stdin.sys", types.SimpleNamespace(stdin=None))
    found = run(command, *pair, *(["-"] if command == "generate" else []))
    assert (found.exit_code, found.stdout) == (MISTAKE, "")
    assert "blockdraft: standard input is closed" in found.stderr


@pytest.mark.parametrize(
    "options",
    [["generate", "--json", "--receipt"], ["generate", "--receipt"], ["explain", "--html"]],
)
def test_a_file_that_cannot_be_written_costs_no_answer(pair, tmp_path, monkeypatch, options):
    def fill_the_disk(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("blockdraft.cli.output.write_whole", fill_the_disk)
    file = tmp_path / "file"
    found = run(*options, file, *pair, "--max-tokens", 4, "abc")
    assert found.exit_code == DISK_FAILED
    assert f"cannot write {file}: No space left on device; free space there" in found.stderr
    if "--json" in options:
        assert len(json.loads(found.stdout)["token_ids"]) == 4
    assert found.stdout.strip()


def test_json_has_every_sample_with_its_logprobs(pair):
    wanted = ["--n", 2, "--temperature", 1, "--seed", 4, "--logprobs", 1, "--max-tokens", 8]
    result = run_json("generate", *pair, *wanted, "abc")
    assert [sample["index"] for sample in result["completions"]] == [0, 1]
    first = result["completions"][0]
    assert first["token_ids"] == result["token_ids"]
    assert result["seed"] == 4
    assert len(first["logprobs"]) == len(first["token_ids"])
    assert result["config"]["exact"] is True


def test_compare_times_both_ways_and_plain_equals_no_drafter(pair):
    options = ["--max-tokens", 16, "--ignore-eos", "the abc"]
    found = run_json("generate", "--compare", *pair, *options)
    result = found["compare"]
    assert result["identical"] is True
    assert found["token_ids"] == result["drafted"]["token_ids"] == result["plain"]["token_ids"]
    assert result["speedup"] == pytest.approx(
        result["drafted"]["tokens_per_second"] / result["plain"]["tokens_per_second"]
    )
    assert result["total_speedup"] == pytest.approx(
        result["plain"]["total_seconds"] / result["drafted"]["total_seconds"]
    )
    assert result["acceptance_length"] >= 1
    plain = run_json("generate", *pair, "--drafter", "none", *options)
    assert plain["token_ids"] == result["plain"]["token_ids"]


def test_compare_goes_with_every_way_to_answer(pair):
    asked = [*pair, "--max-tokens", 8, "--ignore-eos", "--temperature", 1, "the abc"]
    found = run_json("generate", "--compare", "--ledger", "--n", 2, *asked)
    # Without a seed of the user's, what is measured is still what was answered.
    assert found["compare"]["drafted"]["token_ids"] == found["token_ids"]
    assert found["compare"]["drafted"]["seed"] == found["seed"]
    assert len(found["completions"]) == 2
    assert set(found["ledger"]["accounts"]) == {"drafted", "plain"}
    people = run("generate", "--compare", "--ledger", "--smooth", *asked)
    assert people.exit_code == 0, people.output
    assert re.search(
        r"speed-up \d+\.\d\d times plain after the first token, \d+\.\d\d times with prefill",
        people.stderr,
    )
    assert "identical" in people.stderr
    assert "break-even tau" in people.stderr
    assert people.stdout.strip()


def test_at_most_so_many_candidates_are_verified(pair):
    asked = [*pair, "--max-tokens", 16, "--ignore-eos", "the abc"]
    depths = [
        run_json("generate", "--num-draft-tokens", most, *asked)["mean_depth"] for most in (0, 2)
    ]
    assert depths[0] == 0
    assert depths[1] <= 2


@pytest.mark.parametrize("depth", [1, 2])
def test_no_path_is_longer_than_asked(pair, depth, monkeypatch):
    from blockdraft.engine.engine import Engine

    # Whether drafts of a random model pay is for the machine to say; here they are made.
    monkeypatch.setattr(Engine, "use_adaptive_drafting", Engine.use_fixed_drafting)
    asked = [*pair, "--max-tokens", 16, "--ignore-eos", "the abc"]
    found = run_json("generate", "--draft-depth", depth, *asked)
    assert max(map(int, found["num_passes_of_depth"])) == depth
    free = run_json("generate", *asked)
    assert max(map(int, free["num_passes_of_depth"])) > 2
    assert found["token_ids"] == free["token_ids"]


def test_an_expected_answer_is_drafted_from(pair, tmp_path):
    asked = [*pair, "--max-tokens", 16, "--ignore-eos", "the abc"]
    plain = run_json("generate", "--num-draft-tokens", 0, *asked)
    expected = tmp_path / "expected.txt"
    expected.write_text(plain["text"], encoding="utf-8")
    for prediction in (plain["text"], f"@{expected}"):
        found = run_json("generate", "--prediction", prediction, *asked)
        assert found["token_ids"] == plain["token_ids"]
    missing = refusal("generate", "--prediction", f"@{tmp_path}/none.txt", *asked)
    assert "cannot read --prediction" in missing


@pytest.mark.parametrize("measure", ["--compare", "--ledger"])
def test_a_measured_difference_is_the_answer_no(pair, measure, monkeypatch):
    from blockdraft.bench import compare
    from blockdraft.bench.ledger import accounts as ledger

    monkeypatch.setattr(compare.Comparison, "identical", False)
    monkeypatch.setattr(ledger, "_tokens", lambda generation: object())
    asked = [*pair, "--max-tokens", 4, "the abc"]
    assert run("generate", measure, *asked).exit_code == NO
    assert run("generate", measure, "--exact", "off", *asked).exit_code == 0


def test_exact_off_decodes_too_and_is_stamped(pair):
    result = run_json("generate", *pair, "--exact", "off", "--max-tokens", 8, "the abc")
    assert result["config"]["exact"] is False
    assert len(result["token_ids"]) == 8


def test_chat_remembers_and_forgets(pair, monkeypatch):
    lines = "the abc\n/reset\n/what\n\nabc\n/quit\nnever\n"
    encoded, real = [], Tokenizer.encode_chat

    def encode_chat(self, messages, *args, **kwargs):
        encoded.append([message["content"] for message in messages])
        return real(self, messages, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "encode_chat", encode_chat)
    result = run("chat", *pair, "--max-tokens", 6, input=lines)
    assert result.exit_code == 0, result.output
    assert encoded == [["Hi"], ["the abc"], ["abc"]], "a turn is encoded once"
    assert result.stderr.count("target passes") == 2
    assert "unknown command /what" in result.stderr


@pytest.mark.parametrize(
    ("ending", "text", "said"),
    [("{# </think> #}", "<think>hm</think> so.", "so."), ("", "<think>hm</think> so.", None)],
)
def test_chat_goes_on_without_the_thinking_of_an_answer(ending, text, said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += ending
    llm = SimpleNamespace(tokenizer=Tokenizer(tokenizer, ()))
    completion = SimpleNamespace(error=None, token_ids=tokenizer.encode(text), text=text)
    asked = [{"role": "user", "content": "why?"}]
    answer = {"role": "assistant", "content": text if said is None else said}
    asked_ids = llm.tokenizer.encode_chat(asked)
    assert _after(llm, [], asked, asked_ids, completion) == [*asked, answer]


def test_arrow_keys_move_in_the_line_of_a_chat():
    pytest.importorskip("readline")
    code = (
        "from blockdraft.cli.chat import _edit_lines, _read_line\n"
        "_edit_lines()\nprint(f'read {_read_line(chr(62))!r}')"
    )
    own, terminal = pty.openpty()
    ends = {"stdin": terminal, "stdout": terminal, "env": os.environ | {"TERM": "xterm"}}
    with subprocess.Popen([sys.executable, "-c", code], **ends), os.fdopen(own, "rb") as shown:
        os.close(terminal)
        while shown.read(1) != b">":
            pass
        os.write(own, b"thre\x1b[De\n")
        lines = [shown.readline(), shown.readline()]
    assert lines[1] == b"read 'three'\r\n"


def test_chat_survives_a_conversation_that_has_become_too_long(pair):
    result = run("chat", *pair, "--max-tokens", 6, input=f"{'x' * 600}\nabc\n")
    assert result.exit_code == 0, result.output
    assert "/reset starts again" in result.stderr
    assert result.stderr.count("target passes") == 1


BAD_VALUES = [
    ("--max-tokens", "0"),
    ("--temperature", "nan"),
    ("--temperature", "-1"),
    ("--temperature", "inf"),
    ("--top-p", "1.5"),
    ("--top-p", "0"),
    ("--top-k", "-2"),
    ("--min-p", "2"),
    ("--n", "0"),
    ("--seed", "-1"),
    ("--stop", ""),
    ("--logprobs", "99"),
    ("--min-tokens", "9999"),
    ("--num-draft-tokens", "off"),
    ("--num-draft-tokens", "-1"),
    ("--threads", "0"),
    ("--repetition-penalty", "0"),
    ("--logit-bias", "5"),
    ("--logit-bias", "a=1"),
    ("--logit-bias", "5=101"),
]


def test_a_refusal_names_options_and_not_the_fields_that_they_set():
    hidden = ["--target", "nowhere", "hi"]
    for option, value, reason in [
        ("--threads", 0, "--threads is 0; give a whole number"),
        ("--threads", 9999, "--threads is 9999, and "),
        ("--memory", -1, "--memory is -1.0; give a number of GiB"),
        ("--max-tokens", 0, "--max-tokens is 0; "),
    ]:
        assert refusal("generate", option, value, *hidden).startswith(f"blockdraft: {reason}")
    both = refusal("generate", "--device", "cpu", "--device-map", "auto", *hidden)
    assert "--device is 'cpu', and --device-map chooses devices too" in both


def test_what_only_looks_like_a_field_is_left_as_it_is():
    command = typer.main.get_command(app).commands["generate"]
    message = "cannot read /x/max_tokens.json, 'num_threads': the target is no target"
    assert name_options(message, command.params) == message


@pytest.mark.parametrize(("option", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_before_anything_is_loaded(option, value):
    line = refusal("generate", option, value, "--target", "nowhere", "hi")
    assert "nowhere" not in line


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--target", "smollm2-135n"], "did you mean 'smollm2-135m'"),
        (["--dtype", "int3"], "dtype 'int3' is unknown"),
        (["--device", "warp"], "device 'warp'"),
        (["--device", "meta"], "device 'meta'"),
        (["--stop-token-id", "99999"], "outside the vocabulary"),
        (["--max-tokens", "4000"], "exceed"),
        (["--raw", "--system", "be kind"], "--system"),
        (["--logprobs", "3"], "--logprobs is shown only with --json; add --json"),
        (["--compare", "--drafter", "none"], "--compare needs a drafter"),
        (["--compare", "--num-draft-tokens", "0"], "--compare needs a drafter"),
    ],
)
def test_what_cannot_be_done_is_refused(pair, options, reason):
    assert reason in refusal("generate", *pair, *options, "hi")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(pair, prompt):
    assert "empty" in refusal("generate", *pair, prompt)
    assert "empty" in refusal("generate", *pair, "-", input=prompt)


def test_a_prompt_over_the_context_is_refused(pair):
    assert "512" in refusal("generate", *pair, "x" * 700)


def test_damaged_models_and_wrong_pairs_are_refused(pair, tmp_path):
    target = tiny_target_folder(tmp_path)
    odd = tiny_drafter_folder(tmp_path, hidden_size=32, target_hidden_size=32)
    assert "does not fit" in refusal("generate", *pair, "--drafter", odd, "hi")
    found = run("models", "check", target, odd)
    assert (found.exit_code, found.stderr) == (NO, "")
    assert found.stdout.count("does not fit") == 1
    assert "only loading shows" not in found.stdout  # nobody will load it
    found = json.loads(run("models", "check", target, odd, "--json").stdout)
    assert (found["fits"], "does not fit" in found["reason"]) == (False, True)
    (odd / "model.safetensors").write_bytes(b"nonsense")
    refusal("generate", *pair, "--drafter", odd, "hi")
    weights = load_file(target / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    assert "lack" in refusal("generate", *pair, "--target", target, "hi")
    (target / "model.safetensors").write_bytes(b"nonsense")
    refusal("generate", *pair, "--target", target, "hi")
    edit_json(target / "config.json", num_hidden_layers=-1)
    refusal("generate", *pair, "--target", target, "hi")
    (target / "config.json").write_text("{", encoding="utf-8")
    line = refusal("generate", *pair, "--target", target, "hi")
    assert "config.json" in line
    assert "tokenizer" not in line
    (target / "config.json").unlink()
    assert "config.json" in refusal("generate", *pair, "--target", target, "hi")


def test_models_lists_finds_and_checks(pair):
    names = [entry["name"] for entry in run_json("models", "list")]
    assert "smollm2-135m" in names
    assert run_json("models") == run_json("models", "list")
    assert "give it at the end" in refusal("models", "--json", "list")
    target, drafter = pair[1], pair[3]
    assert run("models", "path", target).stdout.strip() == target
    found = run_json("models", "check", target, drafter)
    assert (found["fits"], found["block_size"]) == (True, 6)


@pytest.mark.parametrize("columns", [None, 60, 120, 200])
def test_no_name_of_a_model_is_cut(monkeypatch, columns):
    if columns is not None:
        monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
        monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("models").stdout
    assert "…" not in shown
    targets = [entry for entry in CATALOG.values() if entry.role == "target"]
    for entry in targets:
        (line,) = (one for one in shown.splitlines() if re.match(rf"(│ )?{entry.name} ", one))
        assert entry.drafter in line
        assert columns is not None or line.endswith(entry.about)


def program(*arguments):
    command = [sys.executable, "-m", "blockdraft.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))


def test_the_program_exits_with_2_and_no_traceback():
    for arguments in (["generate", "--bogus", "hi"], ["generate", "--target", "nope", "hi"]):
        run_ = program(*arguments)
        assert run_.returncode == MISTAKE
        assert "Traceback" not in run_.stderr


@pytest.mark.parametrize("options", [[], ["--raw"]])
def test_a_prompt_of_many_letters_is_refused_before_it_is_tokenized(pair, options):
    line = refusal("generate", *pair, *options, "-", input="abc " * 100_000)
    assert re.search(r"the text has 4000\d\d characters, which are at least \d+ tokens", line)


def test_help_loads_no_model_library():
    code = (
        "import sys; from blockdraft.cli.main import app; from typer.testing import CliRunner\n"
        "for c in ([], ['generate'], ['chat'], ['prove'], ['explain'], ['bench', 'speed']):\n"
        "    assert CliRunner().invoke(app, [*c, '--help']).exit_code == 0\n"
        "print(*sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_an_answer_keeps_to_a_grammar(pair, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text('{"enum": [{"a": 1}, [true]]}', encoding="utf-8")
    lark.write_text('start: "yes" | "no" | "é"', encoding="utf-8")
    for option, accepted in [
        (["--json-schema", schema], r'\{\s*"a"\s*:\s*1\s*\}|\[\s*true\s*\]'),
        (["--regex", "[0-9]{3}"], "[0-9]{3}"),
        (["--choice", "red", "--choice", "blue"], "red|blue"),
        (["--grammar", lark], "yes|no|é"),
    ]:
        found = run_json("generate", *pair, *option, "--seed", "1", "--temperature", "1", "hi")
        assert re.fullmatch(accepted, found["text"]), found["text"]
        assert found["finish_reason"] == "stop"


def test_a_grammar_that_cannot_be_used_is_refused(pair, tmp_path):
    schema = tmp_path / "schema.json"
    for text, reason in [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ('{"type": "foo"}', "foo"),
    ]:
        schema.write_text(text, encoding="utf-8")
        assert reason in refusal("generate", *pair, "--json-schema", schema, "hi")
    missing = tmp_path / "missing.json"
    for arguments, reason in [
        (["--json-schema", missing], "cannot read --json-schema"),
        (["--grammar", tmp_path], "cannot read --grammar"),
        (["--regex", "("], "unclosed group"),
        (["--regex", ""], "regex is empty"),
        (["--regex", "a", "--choice", "a"], "--regex and --choice each give a grammar"),
        (["--regex", "a", "--ignore-eos"], "leave out --ignore-eos"),
    ]:
        assert reason in refusal("generate", *pair, *arguments, "hi")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["generate", "hi", "--max-tokens", "9999"], "the context of 512"),
        (["chat", "--system", "x" * 600], "the context of 512"),
        (["chat", "--regex", "("], "regex"),
        (["explain", "hi", "--max-tokens", "9999"], "prompt 1: "),
        (["explain", "hi", "--regex", "("], "regex"),
        (["prove", "--quick", "--prompts", "FILE"], "prompt long: "),
        (["bench", "speed", "--prompts", "FILE"], "prompt long of "),
        (["bench", "concurrency", "--prompts", "FILE"], "prompt long of "),
        (["bench", "never-slower", "--prompts", "FILE"], "prompt long of "),
        (["bench", "context", "--text", "SHORT"], "is too short for 3 passages of 384 tokens"),
        (["bench", "context", "--max-tokens", "512"], "in the context of 512 tokens"),
        (["bench", "context", "--text", "/absent.txt"], "cannot read /absent.txt"),
        (["bench", "context", "--output", "/absent/report.json"], "its folder does not exist"),
        (
            ["bench", "context", "--output", "/proc/report.json"],
            "no file can be created in its folder",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_before_weights_are_read(
    pair, tmp_path, monkeypatch, command, reason
):
    def read(*_):
        raise AssertionError("weights were read")

    monkeypatch.setattr("blockdraft.engine.load.load_target_model", read)
    file = tmp_path / "prompts.jsonl"
    row = {"id": "long", "category": "text", "prompt": "x" * 600}
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    short = tmp_path / "short.txt"
    short.write_text("the abc", encoding="utf-8")
    files = {"FILE": str(file), "SHORT": str(short)}
    assert reason in refusal(*(files.get(word, word) for word in command), *pair)
