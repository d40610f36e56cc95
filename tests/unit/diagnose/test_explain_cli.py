"""`blockdraft explain`, and `generate` with what was drafted: what is printed, what is refused."""

import gc
from dataclasses import replace

import pytest

from blockdraft.core.errors import FAILED, ConfigError
from blockdraft.core.jsonl import MOST_NAMED
from blockdraft.diagnose.explain import report as report_module
from blockdraft.diagnose.explain.prompts import read_questions
from blockdraft.diagnose.explain.round import CAUSES
from blockdraft.diagnose.explain.run import Explanation
from tests.command_line import refusal, run, run_json
from tests.explain_sums import check_sums
from tests.rows import write_rows

SHORT = ["--max-tokens", 16, "--ignore-eos"]


def test_a_prompt_that_is_certainly_too_long_is_refused_before_it_is_tokenized(pair, tmp_path):
    rows = {"id": "short", "prompt": "abc"}, {"id": "long", "prompt": "x" * 1_000_000}
    path = write_rows(tmp_path / "long.jsonl", rows)
    said = refusal("explain", *pair, "--prompts", path)
    assert "prompt long: " in said
    assert "characters, which are at least" in said


def test_one_prompt_is_explained(pair):
    result = run("explain", *pair, *SHORT, "the abc")
    assert result.exit_code == 0, result.output
    for part in (
        "drafted and accepted",
        "rounds",
        "[rejected]",
        "by kind of text",
        "by position in the block",
        "tau",
    ):
        assert part in result.stdout
    assert "\x1b" not in result.stdout  # no terminal, no colors
    report = run_json("explain", *pair, *SHORT, "the abc")
    (explained,) = report["prompts"]
    plain = run_json("generate", *pair, *SHORT, "--num-draft-tokens", "0", "the abc")
    assert explained["token_ids"] == plain["token_ids"]
    assert sum(report["sums"]["causes"].values()) == report["sums"]["num_rejected"] > 0
    assert list(report["sums"]["causes"]) == list(CAUSES)
    assert report["config"]["adaptive"] is False
    assert report["sampling"]["max_tokens"] == 16


def test_a_single_token_leaves_nothing_to_sum(pair):
    printed = run("explain", *pair, "--max-tokens", 1, "the abc").stdout
    assert "0 rounds: no token came after the prefill's" in printed
    assert "tau" not in printed
    assert "by kind of text" not in printed


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([], "whole blocks of the drafter's model alone; --adaptive shows what generate does"),
        (["--lookup"], "whole blocks of the drafter's model and lookup alone; --adaptive shows "),
        (["--draft-depth", 2], "as many tokens as the options allow of the drafter's model alone"),
        (["--adaptive"], "adaptive, as in generate; without --adaptive, whole"),
    ],
)
def test_the_mode_is_said_first(pair, options, mode):
    result = run("explain", *pair, *SHORT, *options, "the abc")
    assert result.stdout.startswith(f"mode: {mode}")


def test_the_help_says_when_lookup_drafts():
    shown = run("explain", "--help", env={"COLUMNS": "100"}, terminal_width=100).stdout
    assert "Also draft by prompt lookup. [default: (with --adaptive)]" in shown


def test_an_answer_that_failed_is_explained_and_fails(pair, monkeypatch):
    real = report_module.explain_all

    def failing(*args, **options):
        (one,) = real(*args, **options)
        completion = replace(one.explanation.completion, error="no choice at position 3")
        return [replace(one, explanation=replace(one.explanation, completion=completion))]

    monkeypatch.setattr(report_module, "explain_all", failing)
    result = run("explain", *pair, *SHORT, "the abc")
    assert result.exit_code == FAILED
    assert "by kind of text" in result.stdout
    assert result.stderr.splitlines()[-2:] == [
        "prompt 1: no choice at position 3",
        "blockdraft: 1 of 1 answers ended with an error",
    ]


def test_an_answer_by_a_grammar_is_explained(pair):
    asked = ["explain", *pair, "--max-tokens", 16, "--min-tokens", 4, "the abc"]
    report = run_json(*asked, "--regex", "(ab|cd){9}")
    assert set(report["prompts"][0]["text"]) <= set("abcd")
    grammar = report["sampling"]["grammar"]
    assert (grammar["kind"], grammar["source"]) == ("regex", "(ab|cd){9}")
    assert report["sampling"]["min_tokens"] == 4
    assert report["sums"]["causes"]["other"] == 0


def test_the_streaming_is_timed_on_demand(pair):
    options = ["--stream", "--temperature", "0.8", "--stall-ms", "1000"]
    report = run_json("explain", *pair, *SHORT, *options, "the abc")
    streams = report["prompts"][0]["streams"]
    assert streams["identical"]
    assert streams["drafted"]["num_stalls"] == 0
    result = run("explain", *pair, *SHORT, "--stream", "the abc")
    assert "longest run of rejected blocks" in result.stdout
    assert run_json("explain", *pair, *SHORT, "the abc")["prompts"][0]["streams"] is None


def test_many_prompts_are_grouped_and_shown_with_examples(pair, tmp_path):
    rows = [
        {"id": "a", "category": "math", "prompt": "the abc"},
        {"id": "b", "category": "math", "turns": ["abc the", "more"]},
        {"id": "c", "category": "code", "prompt": "x = 1"},
        {"prompt": "what kind is this?"},
    ]
    path, page = write_rows(tmp_path / "p.jsonl", rows), tmp_path / "page.html"
    result = run("explain", *pair, *SHORT, "--prompts", path, "--html", page)
    assert result.exit_code == 0, result.output
    for part in ("by kind of prompt", "math", "code", "mostly", "examples"):
        assert part in result.stdout
    assert "4/4" in result.stderr
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    report = run_json("explain", *pair, *SHORT, "--prompts", path)
    assert [one["id"] for one in report["prompts"]] == ["a", "b", "c", "4"]
    by_name = {group["category"]: group for group in report["groups"]}
    assert by_name["math"]["num_prompts"] == 2
    for group in report["groups"]:
        assert group["behind"] == pytest.approx(
            report["sums"]["acceptance_length"] - group["sums"]["acceptance_length"]
        )
        assert group["examples"]
        assert {example["cause"] for example in group["examples"]} <= set(CAUSES)


def test_rounds_are_not_kept_where_nothing_shows_them(pair, tmp_path, monkeypatch):
    rows = [{"id": str(number), "prompt": "the abc"} for number in range(5)]
    path, alive, real = write_rows(tmp_path / "p.jsonl", rows), [], report_module.explain_all

    def counted(*args, **options):
        for one in real(*args, **options):
            yield one
            alive.append(sum(type(thing) is Explanation for thing in gc.get_objects()))

    monkeypatch.setattr(report_module, "explain_all", counted)
    before = sum(type(thing) is Explanation for thing in gc.get_objects())
    assert run("explain", *pair, *SHORT, "--prompts", path).exit_code == 0
    assert len(alive) == 5
    assert max(alive) - before <= 1


@pytest.mark.parametrize(
    "sampling",
    [
        [],
        ["--temperature", "1", "--seed", "2"],
        ["--temperature", "1", "--seed", "2", "--repetition-penalty", "1.5"],
        ["--stop", "e", "--stop", "a"],
    ],
)
def test_causes_add_up_to_the_rejections_of_the_rounds(pair, tmp_path, sampling):
    texts = {
        "prose": "the abc of the abc",
        "code": "def f(x):\n    return x",
        "json": '{"a": [1, 2',
        "digits": "1 2 3 4 5",
        "names": "Ada and Lin",
    }
    rows = [
        {"category": category, "prompt": text + end}
        for category, text in texts.items()
        for end in ("", "!", "\n")
    ]
    path = write_rows(tmp_path / "p.jsonl", rows)
    report = run_json("explain", *pair, *SHORT, *sampling, "--prompts", path)
    assert len(report["groups"]) == len(texts)
    assert check_sums(report) > len(rows)


def test_a_rejection_that_is_not_counted_is_noticed(pair):
    report = run_json("explain", *pair, *SHORT, "the abc")
    check_sums(report)
    one = next(one for one in report["prompts"][0]["rounds"] if one["rejection"] is not None)
    one["rejection"]["cause"] = "vocabulary"
    with pytest.raises(AssertionError):
        check_sums(report)


def test_what_looks_like_markup_is_shown_as_it_is(pair, tmp_path):
    rows = [{"category": name, "prompt": "the abc"} for name in ("[bold]", "[/b]")]
    result = run("explain", *pair, *SHORT, "--prompts", write_rows(tmp_path / "p.jsonl", rows))
    assert result.exit_code == 0, result.output
    for name in ("[bold]", "[/b]"):
        assert f"\n{name} " in result.stdout


def test_bad_lines_are_all_named(pair, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n{oops\n[1]\n{"prompt": ""}\n{"id": 3}\n', encoding="utf-8")
    line = refusal("explain", *pair, "--prompts", path)
    for number in (2, 3, 4, 5):
        assert f"line {number}:" in line
    assert "line 1:" not in line
    # A file without any object gets another message.
    path.write_text("{}\n" + "{\n" * 99, encoding="utf-8")
    line = refusal("explain", *pair, "--prompts", path)
    assert f"line {MOST_NAMED}:" in line
    assert f"and {100 - MOST_NAMED} more" in line


def test_questions_are_read_with_names_and_categories(tmp_path):
    rows = [{"prompt": "a", "category": 7, "id": 8}, {"prompt": "b"}]
    path = write_rows(tmp_path / "p.jsonl", rows)
    first, second = read_questions(path)
    assert (first.id, first.category, first.text) == ("8", "7", "a")
    assert (second.id, second.category) == ("2", None)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no prompts"):
        read_questions(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "give either a prompt"),
        (["hi", "--prompts", "p.jsonl"], "give either a prompt"),
        (["--prompts", "no-such.jsonl"], "no-such.jsonl"),
        ([" "], "empty"),
        (["--drafter", "none", "hi"], "nothing is drafted"),
        (["--num-draft-tokens", "0", "hi"], "nothing is drafted"),
        (["--stall-ms", "0", "--stream", "hi"], "--stall-ms is 0"),
        (["--stall-ms", "9", "hi"], "--stream"),
        (["--stall-ms", "nan", "--stream", "hi"], "--stall-ms"),
        (["--html", "no/such/folder/x.html", "hi"], "cannot write"),
        (["--html", ".", "hi"], "cannot write"),
        (["--max-tokens", "4000", "hi"], "prompt 1: "),
        (["--n", "2", "hi"], "--n"),
    ],
)
def test_what_cannot_be_explained_is_refused(pair, options, reason):
    assert reason in refusal("explain", *pair, *options)


def test_a_target_whose_drafter_is_not_known_is_refused(pair):
    alone = [*pair[:2], "--dtype", "float32", "hi"]
    for command, reason in (
        (["explain"], "nothing is drafted"),
        (["generate", "--compare"], "--compare needs a drafter"),
    ):
        result = run(*command, *alone)
        assert (result.exit_code, result.stdout) == (2, "")
        # The log has said before that none is known.
        assert reason in result.stderr.splitlines()[-1]


def test_explain_marks_what_was_drafted(pair):
    # A bias that both models follow: every draft is kept, whatever the models know.
    options = [*pair, *SHORT, "--logit-bias", "77=100", "the abc"]
    result = run("explain", *options)
    assert result.exit_code == 0, result.output
    answer = result.stdout.splitlines()[1]
    plain = run_json("generate", *options)["text"]
    assert answer.replace("‹", "").replace("›", "") == plain
    assert answer.count("‹") == answer.count("›") > 0
    assert "drafted and accepted" in result.stdout


def test_smooth_release_changes_no_text(pair):
    for options in ([], ["--temperature", "0.9", "--seed", "4"]):
        asked = [*pair, "--max-tokens", 40, "--ignore-eos", *options, "the abc"]
        smooth, usual = run("generate", "--smooth", *asked), run("generate", *asked)
        assert smooth.exit_code == 0, smooth.output
        assert smooth.stdout == usual.stdout
        assert "40 tokens" in smooth.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--smooth", "--json"], "--smooth needs"),
        (["--smooth", "--n", "2"], "--smooth needs"),
    ],
)
def test_ways_to_print_that_do_not_go_together_are_refused(pair, options, reason):
    assert reason in refusal("generate", *pair, *options, "hi")
