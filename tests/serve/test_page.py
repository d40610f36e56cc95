"""The web page in a browser without a screen: prompts, tokens as they arrive, both modes."""

import json
import re

import pytest

from tests.browser import browser as browser
from tests.browser import needs_browser, sync_api
from tests.serve.pair import default_llm
from tests.serving import MODEL, running_server

PATIENCE = 120_000.0
"""Milliseconds."""
KEY = "a-key-of-this-test"
DEPTH = 4
"""Drafted every round: by adaptive drafting a loaded machine may not draft at all."""
WATCH = """() => {
    window.numCharactersSeen = [];
    new MutationObserver(() => {
        const text = document.querySelector(".answer[aria-busy=true] .text");
        if (text) window.numCharactersSeen.push(text.innerText.length);
    }).observe(document.getElementById("turns"), { childList: true, subtree: true });
}"""
"""Notes what can be read after each change of an answer, which may take a second in all."""
expect = sync_api.expect
expect.set_options(timeout=PATIENCE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    needs_browser,
]


@pytest.fixture(scope="module")
def url():
    llm = default_llm()
    llm.use_fixed_drafting(DEPTH)
    with running_server(llm, api_keys=(KEY,), max_waiting=256) as server:
        yield server.url
    llm.use_adaptive_drafting()


@pytest.fixture
def page(browser, url):
    """The page with its key; whatever it complains of fails the test."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    expect(page.locator("#model")).to_contain_text("enter it under Settings")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("Max tokens").fill("60")
    expect(page.locator("#model")).to_have_text(MODEL)
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    # An answer of status 400 or 401 is no fault of the page.
    assert [text for text in complaints if "Failed to load resource" not in text] == []


def ask(page, prompt):
    page.get_by_placeholder("Ask something").fill(prompt)
    page.keyboard.press("Enter")


def wait_for_end(page):
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".answer[aria-busy=true]")).to_have_count(0)


def figure(page, name):
    return float(page.locator(f"#{name}").inner_text().rstrip("×"))


def test_tokens_arrive_and_rounds_tell_what_was_drafted(page):
    page.evaluate(WATCH)
    ask(page, "Count from 1 to 30.")
    wait_for_end(page)
    lengths = page.evaluate("window.numCharactersSeen")
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 5
    assert page.locator("article .token.drafted").count() > 5
    num_tokens = int(re.match(r"\d+", page.locator(".sums").inner_text())[0])
    assert page.locator("article .token").count() <= num_tokens <= 60
    assert figure(page, "tau") > 1
    page.locator(".round").nth(1).hover()
    assert page.locator(".detail").inner_text().startswith("Round 1 of ")
    assert page.locator(".asked").get_attribute("dir") == "auto"
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".detail").inner_text().startswith("Prefill")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert page.locator("#by-position tbody tr").count() > 0
    assert page.locator("#by-kind tbody tr").count() > 0
    assert page.locator("#status").inner_text().startswith("Answered: ")
    expect(page.locator("#server-tau")).not_to_have_text("–")
    assert figure(page, "server-tau") > 1


def test_what_a_round_was_is_told_in_sight_however_long_the_text_is(page):
    answer_with(page, lambda is_drafted: "A\n" * 200)
    ask(page, "B")
    wait_for_end(page)
    page.locator(".text").focus()
    page.keyboard.press("Home")
    page.evaluate("scrollTo(0, 0)")
    assert page.locator(".detail").inner_text().startswith("Prefill")
    detail, form = page.locator(".detail").bounding_box(), page.locator("#ask").bounding_box()
    assert 0 < detail["y"] <= detail["y"] + detail["height"] <= form["y"] + 1


def test_a_phone_need_not_scroll_sideways(page):
    page.set_viewport_size({"width": 390, "height": 844})
    answer_with(page, lambda is_drafted: "A" * 500)
    page.get_by_text("Side by side").click()
    ask(page, "B" * 500)
    wait_for_end(page)
    page.locator("aside summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_both_ways_side_by_side_give_the_same_text(page):
    page.get_by_text("Plain", exact=True).click()
    ask(page, "Name three colors.")
    wait_for_end(page)
    assert page.locator(".token.drafted").count() == 1  # that of the legend
    page.get_by_text("Side by side").click()
    ask(page, "Write a Python function that reverses a string.")
    expect(page.locator(".verdict.same")).to_have_text("✓ Both texts are the same.")
    drafted, plain = page.locator(".answers.two .text").all()
    assert drafted.inner_text() == plain.inner_text() != ""
    assert drafted.locator(".drafted").count() > 0
    assert plain.locator(".drafted").count() == 0
    assert page.locator(".asked").count() == 2


def answer_with(page, text_of, content=None):
    """Let the page get one round of `text_of(is_drafted)` in place of a model's answer.

    `content` is for a text that begins with thinking, which is not in it.
    """

    def fulfill(route):
        text = text_of(json.loads(route.request.post_data).get("num_draft_tokens") != 0)
        one = {"tokens": [text], "num_drafted": 0, "num_accepted": 0, "follows_stall": True}
        delta = {"content": text if content is None else content}
        choice = {"index": 0, "delta": delta, "rounds": [one]}
        event = {"choices": [choice], "metrics": {"tokens_per_second": 10.0}}
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)


def test_text_is_never_markup(page):
    text = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>"
    answer_with(page, lambda is_drafted: text)
    ask(page, text)
    wait_for_end(page)
    assert page.locator(".text").inner_text() == page.locator(".asked").inner_text() == text
    assert page.locator("#turns img, #turns script").count() == 0
    assert page.title() == "blockdraft"
    assert page.locator(".round.stalled").count() == 1


def test_texts_that_differ_are_told_apart(page):
    answer_with(page, lambda is_drafted: "abc" if is_drafted else "abd")
    page.get_by_text("Side by side").click()
    ask(page, "Hello")
    verdict = page.locator(".verdict.different")
    expect(verdict).to_have_text("✗ The texts differ from character 3 on.")


def test_thinking_is_compared_too(page):
    answer_with(page, lambda is_drafted: f"<think>{is_drafted}</think>", content="")
    page.get_by_text("Side by side").click()
    ask(page, "Hello")
    expect(page.locator(".verdict.different")).to_be_visible()


def test_only_speeds_of_the_same_prompt_are_compared(page):
    answer_with(page, str)
    for mode, prompt in [("Drafted", "A"), ("Plain", "B")]:
        page.get_by_text(mode, exact=True).click()
        ask(page, prompt)
        wait_for_end(page)
    expect(page.locator("#speedup")).to_have_text("–")
    expect(page.locator("#speed-note")).to_contain_text("send the same prompt")
    ask(page, "A")
    expect(page.locator("#speedup")).to_have_text("1.00×")


def test_a_server_that_was_started_again_has_its_new_name(page):
    page.route("**/metrics", lambda route: route.abort())
    expect(page.locator("#model")).to_have_text("the server does not answer")
    expect(page.locator("#load")).to_have_text("–")
    name = 'of "another" model'
    labels = f'{{model_name="{name}"}}'.replace('"another"', r"\"another\"")
    page.unroute("**/metrics")
    page.route(
        "**/metrics", lambda route: route.fulfill(body=f"vllm:num_requests_running{labels} 2.0\n")
    )
    expect(page.locator("#model")).to_have_text(name)
    expect(page.locator("#load")).to_have_text("2, 0")


def test_an_answer_can_be_stopped_and_the_next_one_asked_for(page):
    page.get_by_label("Max tokens").fill("2000")
    ask(page, "Tell me a very long story about a lighthouse.")
    expect(page.locator(".round").nth(1)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".fault")).to_have_text("Stopped.")
    wait_for_end(page)
    page.get_by_label("Max tokens").fill("1")
    ask(page, "And now?")
    wait_for_end(page)
    expect(page.locator(".sums").nth(1)).to_contain_text("1 token, then cut off")
    assert page.locator(".fault").count() == 1
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


def test_what_the_server_refuses_is_told(page):
    page.get_by_label("Max tokens").fill("999999")
    ask(page, "Hello")
    expect(page.locator(".fault")).to_contain_text("999999")
