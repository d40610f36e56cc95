import gzip
import json

import pytest

from blockdraft.bench.config import WARM_UP_TOKENS, ContextConfig
from blockdraft.bench.context.bench import (
    CONTEXT_DEFINITIONS,
    ContextFigures,
    ContextJournal,
    context_figures,
    measure_context,
)
from blockdraft.bench.context.memory import KVBytes, kv_bytes_per_token
from blockdraft.bench.context.prose import Prose, python_help, read_prose
from blockdraft.bench.context.report import CONTEXT_LEGEND, clipped_lines, context_table
from blockdraft.bench.measures import Rate, Spread
from blockdraft.core.errors import INTERRUPTED, MISTAKE, ConfigError
from tests.bench_fakes import FakeLLM, run_bench
from tests.command_line import shown
from tests.small_llm import load_llm
from tests.tiny import HIDDEN_SIZE, NUM_LAYERS

LINES = Prose("lines", "".join(f"{index:09}\n" for index in range(200)))
SMALL = ContextConfig(lengths=(20, 600), passages=3, max_tokens=41)


@pytest.fixture
def llm(monkeypatch, folders):
    return FakeLLM(folder=folders[0], drafter_folder=folders[1]).patch_clock(monkeypatch)


def test_every_python_has_a_long_text():
    prose = python_help()
    assert len(prose.text) > 300_000
    assert "expression" in prose.text
    assert prose.describe()["num_characters"] == len(prose.text)


def test_texts_and_rows_are_joined_in_order(tmp_path):
    plain, rows = tmp_path / "a.txt", tmp_path / "b.jsonl.gz"
    plain.write_text("one", encoding="utf-8")
    with gzip.open(rows, "wt", encoding="utf-8") as file:
        file.write('{"prompt": "two"}\n{"turns": ["three", "four"]}\n')
    prose = read_prose([plain, rows])
    assert prose.text == "one\n\ntwo\n\nthree"
    assert prose.source == f"{plain}, {rows}"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.txt", b" \n", "holds no text"),
        ("empty.jsonl", b"", "holds no text"),
        ("latin.txt", b"\xe9t\xe9", "give a text file in UTF-8"),
        ("absent.txt", None, "cannot read"),
    ],
)
def test_a_file_without_text_is_refused(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_prose([tmp_path / name])


def test_passages_begin_at_lines_spread_over_the_text_and_are_cut(llm):
    measure_context(llm, LINES, SMALL)
    prompts = ["".join(map(chr, prompt)) for _, _, (prompt,), n in llm.calls if n == 41]
    short = [f"{i:09}\n{i + 1:09}\n" for i in (0, 66, 133)]
    assert sorted(prompts[:6]) == sorted(2 * short)
    # 600 tokens and 41 of output do not fit a context of 512.
    assert {len(prompt) for prompt in prompts[6:]} == {471}
    assert [prompt[:20] for prompt in prompts[6:]] == prompts[:6]


def test_the_ways_take_turns_after_a_warm_up_at_each_length(llm):
    measure_context(llm, LINES, SMALL)
    a_length = [(0, WARM_UP_TOKENS), ("adaptive", WARM_UP_TOKENS)]
    first = [(depth, 41) for depth in (0, "adaptive", "adaptive", 0, 0, "adaptive")]
    # Also where the passages of a length are odd, each is first equally often.
    second = [(depth, 41) for depth in ("adaptive", 0, 0, "adaptive", "adaptive", 0)]
    found = [(depth, num) for depth, _, _, num in llm.calls]
    assert found == [*a_length, *first, *a_length, *second]
    assert {at_once for _, at_once, _, _ in llm.calls} == {1}


def test_figures_of_a_length(llm):
    rows = context_figures(llm, measure_context(llm, LINES, SMALL))
    assert [(row.requested_len, row.prompt_len) for row in rows] == [(20, 20), (600, 471)]
    row = rows[0]
    assert row.plain == Rate(pytest.approx(41 / 4.5), pytest.approx(10))
    assert row.drafted.decode_tokens_per_second == pytest.approx(25)
    assert row.decode_speedup == Spread(*[pytest.approx(2.5)] * 3)
    assert row.total_speedup == pytest.approx(4.5 / 2.1)
    assert row.drafted_first_token_seconds == pytest.approx(0.5)
    assert (row.acceptance_length, row.mean_depth, row.mean_drafted) == (2.0, 3.0, 3.0)
    assert (row.num_identical, row.num_passages) == (3, 3)
    per_token = kv_bytes_per_token(llm)
    assert row.kv_bytes == KVBytes(per_token.target * 60, per_token.draft * 60)
    assert clipped_lines(rows) == [
        "600 tokens do not fit the context with the output; the prompt has 471"
    ]


def test_a_fixed_depth_takes_the_place_of_the_adaptive_one(llm):
    config = ContextConfig(lengths=(20,), passages=1, num_draft_tokens=15, max_tokens=5)
    measure_context(llm, LINES, config)
    assert {call[0] for call in llm.calls} == {0, 15}


def test_keys_and_values_are_counted_from_the_configs(llm):
    # 2 key-value heads of 16, a key and a value, 2 bytes each; the drafter has 2 layers.
    assert HIDDEN_SIZE == 4 * 16
    of_layer = 2 * 2 * 16 * 2
    assert kv_bytes_per_token(llm) == KVBytes(NUM_LAYERS * of_layer, 2 * of_layer)
    alone = FakeLLM(folder=llm.folder, drafter_folder=None)
    assert kv_bytes_per_token(alone).draft == 0


@pytest.mark.parametrize(("dtype", "of_head"), [("auto", 16 * 4), ("int8", 16 + 4)])
def test_keys_and_values_are_counted_as_they_are_held(folders, dtype, of_head):
    """In float32; numbers in int8 have a scale for each head."""
    loaded = load_llm(folders, kv_cache_dtype=dtype)
    assert kv_bytes_per_token(loaded).target == NUM_LAYERS * 2 * 2 * of_head


def test_a_text_that_is_too_short_is_refused_before_anything_is_measured(llm):
    with pytest.raises(ConfigError, match=r"too short for 3 passages of 471 tokens.* has 20"):
        measure_context(llm, Prose("lines", LINES.text[:60]), SMALL)
    assert llm.calls == []


def test_an_output_without_room_for_a_prompt_is_refused(llm):
    with pytest.raises(ConfigError, match="max_tokens 512 leaves no room"):
        measure_context(llm, LINES, ContextConfig(max_tokens=512))


def test_a_drafter_is_needed():
    with pytest.raises(ConfigError, match="no drafter"):
        measure_context(FakeLLM(drafter_folder=None), LINES, SMALL)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lengths": (512, 0)}, "lengths is 0"),
        ({"passages": 0}, "passages is 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"max_tokens": 1}, "max_tokens is 1; give 2 or more"),
    ],
)
def test_bad_options_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        ContextConfig(**options)


def test_every_definition_is_a_figure():
    rates = {"tokens_per_second", "decode_tokens_per_second"}
    seconds = {"first_token_seconds"}
    assert set(CONTEXT_DEFINITIONS) - rates - seconds <= set(ContextFigures.__dataclass_fields__)


def test_the_table_fits_80_columns():
    row = ContextFigures(
        *(131072, 131000, 3, Rate(1234.5, 1234.5), Rate(12345.6, 12345.6)),
        *(Spread(12.3, 0.5, 12.4), 1.23, Spread(1.23, 0.98, 12.4), 123.4, 123.4),
        *(12.34, 0.5, 12.3, {15: 9}, 15.0),
        *(KVBytes(12_345_000_000, 1_234_000_000), 3),
    )
    text = shown(context_table("title", [row]))
    assert len(text.splitlines()) == 7
    assert "12345+1234" in text
    assert max(map(len, CONTEXT_LEGEND.splitlines())) <= 80


def test_the_command_writes_a_whole_report(monkeypatch, llm, tmp_path):
    output = tmp_path / "report.json"
    arguments = ["--lengths", "20,600", "--passages", 2, "--max-tokens", 11, "--output", output]
    result = run_bench(monkeypatch, llm, "context", *arguments)
    assert result.exit_code == 0, result.output
    assert "the prompt has 501" in result.stdout
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"command", "git_commit", "versions", "machine", "threads", "definitions"} <= set(report)
    assert report["text"]["source"] == "pydoc_data.topics"
    assert len(report["text"]["sha256"]) == 64
    assert [row["prompt_len"] for row in report["figures"]] == [20, 501]
    assert len(report["passages"]) == 4
    assert report["passages"][0]["drafted"]["acceptance_length"] == 2.0


def test_an_ended_command_goes_on(monkeypatch, llm, tmp_path):
    text, output, real = tmp_path / "text.txt", tmp_path / "report.json", llm.generate
    text.write_text(LINES.text, encoding="utf-8")
    arguments = ["--text", text, "--lengths", "20,30", "--passages", 2, "--max-tokens", 11]
    arguments += ["--output", output]
    assert run_bench(monkeypatch, llm, "context", *arguments).exit_code == 0
    whole = json.loads(output.read_text(encoding="utf-8"))
    output.unlink()
    llm.calls.clear()

    def broken(*args):
        if len(llm.calls) == 2 + 2 + 1:  # a warm-up, a passage, and half of the next
            raise KeyboardInterrupt
        return real(*args)

    llm.generate = broken
    broken_off = run_bench(monkeypatch, llm, "context", *arguments)
    assert broken_off.exit_code == INTERRUPTED
    assert "holds what was measured; the same command resumes it" in broken_off.stderr
    llm.generate = real
    text.write_text(LINES.text[:-1], encoding="utf-8")
    refused = run_bench(monkeypatch, llm, "context", *arguments)
    assert refused.exit_code == MISTAKE
    assert "from a run with different prompts and cannot be resumed" in refused.stderr
    text.write_text(LINES.text, encoding="utf-8")
    llm.calls.clear()
    assert run_bench(monkeypatch, llm, "context", *arguments).exit_code == 0
    assert len(llm.calls) == (2 + 2) + (2 + 4)
    again = json.loads(output.read_text(encoding="utf-8"))
    tokens = [
        [(one["requested_len"], one["drafted"]["token_ids"]) for one in result["passages"]]
        for result in (whole, again)
    ]
    assert tokens[0] == tokens[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "text.txt"]


def test_a_passage_that_is_cut_to_another_length_is_measured_again(llm, tmp_path):
    """How much fits depends on the memory that is free."""
    config = ContextConfig(lengths=(20, 600), passages=1, max_tokens=5)
    measure_context(llm, LINES, config, journal=ContextJournal(tmp_path / "j"))
    llm.calls.clear()
    llm.engine.target.max_context = 400
    found = measure_context(llm, LINES, config, journal=ContextJournal(tmp_path / "j"))
    assert [one.prompt_len for one in found] == [20, 395]
    assert {len(prompt) for _, _, (prompt,), _ in llm.calls} == {395}


@pytest.mark.parametrize(("exact", "status"), [("on", 1), ("off", 0)])
def test_an_output_that_differs_fails_where_exactness_is_promised(
    monkeypatch, llm, tmp_path, exact, status
):
    text = tmp_path / "text.txt"
    text.write_text(LINES.text, encoding="utf-8")
    llm.broken = ("adaptive",)
    arguments = ["--text", text, "--lengths", 20, "--max-tokens", 5, "--exact", exact, "--json"]
    result = run_bench(monkeypatch, llm, "context", *arguments)
    assert result.exit_code == status
    report = json.loads(result.stdout)
    assert report["text"]["source"] == str(text)
    assert report["figures"][0]["num_identical"] == 0
