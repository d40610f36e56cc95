"""The page of an explanation in a browser: nothing fails, and it shows what the report says."""

import pytest

from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.page import render_page
from blockdraft.diagnose.explain.prompts import Question
from blockdraft.diagnose.explain.report import encode_question, explain_all
from tests.browser import browser as browser
from tests.browser import needs_browser
from tests.explain_fakes import report_of

pytestmark = [pytest.mark.slow, needs_browser]

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
QUESTIONS = [
    Question("1", "prose", "the abc of the abc"),
    Question("2", "nasty", "</script><b id='planted'>{[ 1 2"),
]
STALL = 1e-6
"""Every gap is over it, so there is something to see."""


@pytest.fixture(scope="module", params=["streamed", "not streamed"])
def report(llm, request):
    asked = [
        encode_question(llm.tokenizer, llm.engine.limits.check_prompt, question, PARAMS, raw=True)
        for question in QUESTIONS
    ]
    with_streams = request.param == "streamed"
    return report_of(explain_all(llm, asked, PARAMS, with_streams=with_streams), STALL)


@pytest.fixture
def page(browser, report, tmp_path):
    """The page of the report; whatever it complains of fails the test."""
    path = tmp_path / "page.html"
    path.write_text(render_page(report, "a pair"), encoding="utf-8")
    page, complaints = browser.new_page(), []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert complaints == []


def test_a_token_tells_its_round(page, report):
    rounds = report["prompts"][0]["rounds"]
    assert page.locator("#answer .token").count() == PARAMS.max_tokens
    kept = sum(one["num_kept"] for one in rounds)
    assert page.locator("#answer .token.drafted").count() == kept
    page.locator("#answer .token").nth(rounds[2]["start"]).hover()
    assert page.locator("#panel h2").inner_text() == "Round 2"
    assert (
        page.locator("#panel .chip.own").count()
        == len(rounds[2]["token_ids"]) - (rounds[2]["num_kept"])
    )


def test_the_slider_replays_the_answer(page, report):
    rounds = report["prompts"][0]["rounds"]
    page.locator("#slider").evaluate("it => { it.value = 3; it.dispatchEvent(new Event('input')) }")
    shown = rounds[3]["start"] + len(rounds[3]["token_ids"])
    assert page.locator("#answer .token:not(.to-come)").count() == shown
    assert page.locator("#at").inner_text() == f"3 of {len(rounds) - 1}"
    page.get_by_role("button", name="Back").click()
    assert page.locator("#panel h2").inner_text() == "Round 2"


def test_sums_groups_and_streams_are_shown(page, report):
    sums = page.locator("#sums")
    assert f"{report['sums']['num_rejected']} rejections" in sums.inner_text()
    examples = [example for group in report["groups"] for example in group["examples"]]
    assert sums.locator("li").count() == len(examples) > 0
    streams = report["prompts"][0]["streams"]
    both = [] if streams is None else [streams["drafted"], streams["plain"]]
    assert sums.locator(".lane").count() == len(both)
    assert sums.locator(".burst").count() == sum(len(one["bursts"]) for one in both)
    assert sums.locator(".stall").count() == sum(one["num_stalls"] for one in both)
    page.locator("#prompt").select_option("1")
    assert page.locator("#question").inner_text() == QUESTIONS[1].text
    assert page.locator("#planted").count() == 0


def test_tables_are_named_and_scroll_with_the_keyboard(page):
    boxes = page.locator("#sums .scroll").all()
    assert boxes
    assert all(box.get_attribute("tabindex") == "0" for box in boxes)
    names = [box.get_attribute("aria-label") for box in boxes]
    assert "This prompt, by kind of text" in names
    assert len(names) == len(set(names))
    assert all(page.locator("th[scope=col]").all_inner_texts())


def test_the_token_with_the_focus_says_what_it_is(page):
    page.locator("#answer .token").first.focus()
    page.keyboard.press("ArrowRight")
    named = page.locator("#answer .token[aria-label]")
    assert named.count() == 1
    assert named.get_attribute("role") == "group"
    assert named.get_attribute("aria-label").endswith(", round 1")


def test_no_mark_of_a_direction_turns_the_text(page):
    assert page.evaluate("visible('a\\u202eb')") == "a\\u202eb"
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.chip')).unicodeBidi") == "isolate"
    )


def test_one_thing_is_no_plural(page):
    assert page.evaluate("[0, 1, 2].map((n) => counted(n, 'round'))") == [
        "0 rounds",
        "1 round",
        "2 rounds",
    ]
