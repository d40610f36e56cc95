"""Ledgers as tables, JSON and pictures, and the options that ask for them."""

import dataclasses
import json
import re

import pytest

from blockdraft.bench.ledger.accounts import Account, decode_accounted, describe_accounts
from blockdraft.bench.ledger.page import _round_step, render_page
from blockdraft.bench.ledger.tables import LINE_LABELS, figure_lines, ledger_table
from blockdraft.core.recorder import Work
from blockdraft.measure.ledger import DraftMemory, Ledger, LedgerLine, SourceUse
from blockdraft.measure.phases import LINES
from tests.command_line import refusal, run, run_json, shown
from tests.small_llm import params

MILLISECOND = 1_000_000


def line(name, milliseconds, rows=0, flops=0.0):
    work = Work(rows=rows, sequences=5 if name == "bonus" else 0)
    return LedgerLine(name, milliseconds * MILLISECOND, work, flops, 2 * flops)


PLAIN = Ledger(
    (line("bonus", 90, 9), line("commit", 0, 10), line("prefill", 10, 3)), 10, DraftMemory()
)
DRAFTED = Ledger(
    (
        line("draft", 10, 30, 3e9),
        line("prefill", 10, 3),
        line("accepted", 16, 4, 1e9),
        line("bonus", 20, 5, 2e9),
        line("wasted", 4, 1),
        line("commit", 0, 10),
    ),
    6,
    DraftMemory(2**20, 2**21, 0, 2**19),
)
ACCOUNTS = [Account("drafted", DRAFTED, PLAIN), Account("plain <b>", PLAIN)]


SHOWN = ("draft forward", "verify: accepted", "verify: bonus", "verify: wasted", "sum")


def test_every_line_has_a_label():
    assert list(LINE_LABELS) == list(LINES)


def test_the_table_has_a_row_for_each_line_and_their_sum():
    text = shown(ledger_table(ACCOUNTS[0]))
    rows = {label: text.split(label, 1)[1].splitlines()[0].split() for label in SHOWN}
    assert rows["verify: accepted"][:4] == ["16.0", "26.7", "%", "1.600"]
    assert rows["verify: bonus"][-1] == "9.000"  # plain
    assert rows["sum"][:4] == ["60.0", "100.0", "%", "6.000"]
    assert rows["sum"][-1] == "10.000"
    assert "plain:" not in shown(ledger_table(ACCOUNTS[1]))


def test_several_sources_are_told_apart():
    sources = (SourceUse("dflash", 1200, 300), SourceUse("lookup", 20, 15))
    told = figure_lines(Account("drafted", dataclasses.replace(DRAFTED, sources=sources)))
    assert "candidates of dflash 1,200, 25% accepted, lookup 20, 75% accepted" in told
    alone = figure_lines(Account("drafted", dataclasses.replace(DRAFTED, sources=sources[:1])))
    assert not any(line.startswith("candidates of") for line in alone)


def test_figures_are_told_in_words():
    rows, margin, memory = figure_lines(ACCOUNTS[0])
    assert rows == "target rows per token 1.11, 10% wasted, tau 1.80"
    assert margin == ("break-even tau 1.00: drafting gains +80% in decoding, +67% with prefill")
    assert memory == (
        "3.5 MiB for drafting: weights 1.0, packed copies 2.0, draft K/V 0.0, waiting features 0.5"
    )
    assert len(figure_lines(ACCOUNTS[1])) == 1
    prompts_only = Ledger((line("prefill", 10, 3), line("commit", 0, 1)), 1, DraftMemory())
    assert figure_lines(Account("plain", prompts_only)) == [
        "nothing was decoded after prefill: there is no tau"
    ]


def test_the_picture_has_a_bar_for_each_line_on_one_scale():
    page = render_page(ACCOUNTS, "a & b")
    assert "a &amp; b" in page
    assert "plain &lt;b&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"(src|href)=|https?:", page)
    bars = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="\d+" width="([\d.]+)"', page)
    assert [kind for kind, _, _ in bars] == [
        *("drafter", "target", "target", "target", "wasted", "host"),
        *("target", "target", "host"),
    ]
    left, room = 170, 900 - 170 - 190
    widths = [float(width) for _, _, width in bars]
    assert widths[-1] == pytest.approx(room, abs=0.2)  # the longest ledger fills the picture
    assert sum(widths[:5]) == pytest.approx(widths[5], abs=0.5) == pytest.approx(0.6 * room, abs=1)
    begins = [float(x) for _, x, _ in bars[:5]]
    assert begins[0] == left
    ends = [begin + width for begin, width in zip(begins, widths, strict=False)]
    assert begins[1:] == pytest.approx(ends[:-1], abs=0.2)  # each begins where one has ended


def test_the_picture_tells_its_figures_to_those_who_cannot_see_it():
    page = render_page(ACCOUNTS, "")
    assert page.count("<main>") == page.count("</main>") == 1
    regions = re.findall(
        r'<div class="scroll" tabindex="0" role="region" aria-label="(.*?)">', page
    )
    assert regions == ["Chart of drafted", "Chart of plain &lt;b&gt;"]
    drafted, _ = re.findall(r'role="img"\s+aria-label="(.*?)"', page)
    for part in ("draft forward 1.000 ms, 16.7%", "sum 6.000 ms, over 10 tokens"):
        assert part in drafted


def test_rows_beside_the_path_count_as_thrown_away():
    lines = (line("accepted", 5, 2), line("siblings", 3, 2), line("bonus", 2, 1))
    page = render_page([Account("drafted", Ledger(lines, 3, DraftMemory()))], "")
    assert re.findall(r'<rect class="(\w+)" x', page) == ["target", "wasted", "target", "host"]


def test_a_picture_of_nothing_is_a_page_too():
    assert "<svg" in render_page([Account("plain", Ledger((), 0, DraftMemory()))], "")


@pytest.mark.parametrize("scale", [0.03, 0.99, 1.0, 7.0, 9.99, 64.0, 1234.5])
def test_the_scale_has_a_few_round_steps(scale):
    step = _round_step(scale)
    assert 2 <= scale / step <= 6
    assert f"{step:.0e}"[0] in "125"


def test_a_request_is_accounted_for_both_ways(llm):
    accounted = decode_accounted(llm, [5, 6, 7], params(temperature=0.7))
    drafted, plain = accounted.accounts
    assert accounted.identical
    assert (drafted.title, plain.title) == ("drafted", "plain")
    assert drafted.plain is plain.ledger
    assert drafted.ledger.num_tokens == plain.ledger.num_tokens == params().max_tokens
    assert plain.ledger.rows_per_token == 1.0
    described = describe_accounts(accounted.accounts)
    assert set(described["accounts"]) == {"drafted", "plain"}
    assert described["accounts"]["drafted"]["over_plain"]["break_even_tau"] > 0


def test_generate_accounts_in_json_and_draws(pair, tmp_path):
    page = tmp_path / "waterfall.html"
    result = run_json(
        *("generate", "hello", "--max-tokens", 12, "--ignore-eos", "--ledger"),
        *("--waterfall", page),
        *pair,
    )
    assert len(result["token_ids"]) == 12
    accounts = result["ledger"]["accounts"]
    for one in accounts.values():
        lines = one["lines"].values()
        assert sum(row["nanoseconds"] for row in lines) == one["wall_nanoseconds"]
        assert one["num_tokens"] == 12
    assert result["ledger"]["identical"]
    assert page.read_text(encoding="utf-8").count("<svg") == 2 + 1  # the hatching is one too


def test_generate_shows_a_table_beside_the_answer(pair):
    result = run("generate", "hello", "--max-tokens", 8, "--ledger", *pair)
    assert result.exit_code == 0, result.output
    assert "verify: bonus" in result.stderr
    assert "break-even tau" in result.stderr
    assert "verify" not in result.stdout
    told = result.stderr.index("decoded again: time and tau may differ from")
    assert result.stderr.index("tau ") < told < result.stderr.index("verify: bonus")


def test_plain_decoding_has_a_ledger_without_a_comparison(pair):
    result = run_json(
        *("generate", "hello", "--max-tokens", 8, "--ledger", "--num-draft-tokens", 0),
        *pair,
    )
    assert set(result["ledger"]["accounts"]) == {"plain"}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--waterfall", "x.html"], "add --ledger"),
        (["--ledger", "--waterfall", "no/such/folder/x.html"], "cannot write"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, reason):
    assert reason in refusal("generate", "hello", *arguments)


def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "hello there", "category": "a"}, {"prompt": "abc abc", "category": "b"}]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_bench_speed_accounts_for_all_prompts_together(pair, tmp_path):
    report = run_json(
        *("bench", "speed", "--prompts", prompts_file(tmp_path), "--max-tokens", 8),
        *("--no-transformers", "--ledger"),
        *pair,
    )
    (one,) = report["runs"]
    accounts = one["ledger"]["accounts"]
    num_tokens = sum(len(prompt["drafted"]["token_ids"]) for prompt in one["prompts"])
    assert accounts["drafted"]["num_tokens"] == accounts["plain"]["num_tokens"] == num_tokens
    assert accounts["plain"]["rows_per_token"] == 1.0
    without = run_json(
        *("bench", "speed", "--prompts", prompts_file(tmp_path), "--max-tokens", 8),
        "--no-transformers",
        *pair,
    )
    assert "ledger" not in without["runs"][0]


def test_bench_concurrency_accounts_for_each_way_at_each_point(pair, tmp_path):
    page = tmp_path / "waterfall.html"
    result = run(
        *("bench", "concurrency", "--concurrency", "1,2", "--repeats", 2, "--max-tokens", 8),
        *(
            "--prompts",
            prompts_file(tmp_path),
            "--num-draft-tokens",
            3,
            "--ledger",
            "--waterfall",
            page,
        ),
        *("--output", tmp_path / "report.json"),
        *pair,
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.count("break-even tau") == 4  # fixed and adaptive
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    accounts = report["ledger"]["accounts"]
    ways = ("plain", "fixed 3", "adaptive")
    assert list(accounts) == [f"concurrency {point}, {way}" for point in (1, 2) for way in ways]
    for one in accounts.values():
        assert one["wall_nanoseconds"] > 0
    # Two repeats of eight requests.
    tokens = [
        sum(len(request["token_ids"]) for request in row["requests"])
        for row in report["runs"]
        if (row["concurrency"], row["way"]["name"]) == (2, "plain")
    ]
    assert tokens[0] == tokens[1] > 0
    assert accounts["concurrency 2, plain"]["num_tokens"] == sum(tokens)
    assert page.read_text(encoding="utf-8").count("<svg") == 6 + 1
