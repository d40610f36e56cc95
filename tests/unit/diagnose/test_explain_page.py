"""The page: whole in itself, and whatever a prompt or an answer holds stays text."""

import json
import re
from html.parser import HTMLParser

import pytest

from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.page import render_page
from blockdraft.diagnose.explain.prompts import Question
from blockdraft.diagnose.explain.report import encode_question, explain_all
from tests.explain_fakes import report_of

NASTY = [
    "</script><script>alert(1)</script>",
    "<!-- <script> </SCRIPT > ]]> __DATA__",
    '\u2028 \\u003c &lt; "quoted" \'`${x}`',
    "<img src=x onerror=alert(1)> é 你好 🙂",
]


class Elements(HTMLParser):
    """All elements with their attributes, and the texts of scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.scripts = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def report(llm):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2, ignore_eos=True)
    asked = [
        encode_question(
            llm.tokenizer,
            llm.engine.limits.check_prompt,
            Question(text[:30], None, text),
            params,
            raw=i % 2 == 0,
        )
        for i, text in enumerate(NASTY)
    ]
    return report_of(explain_all(llm, asked, params, with_streams=True))


def test_what_prompts_hold_stays_text(report):
    plain = Elements(render_page(make_harmless(report), "about"))
    nasty = Elements(render_page(report, "</script><b>about</b>"))
    assert nasty.tags == plain.tags
    assert "img" not in nasty.tags
    # The second piece of script text belongs to the program that the page brings along.
    assert nasty.scripts[1] == plain.scripts[1]
    data = json.loads(nasty.scripts[0])
    assert [one["prompt"] for one in data["prompts"]] == NASTY
    assert data["prompts"] == json.loads(json.dumps(report["prompts"]))
    assert data["about"] == "</script><b>about</b>"


def make_harmless(report):
    return {**report, "prompts": [{**one, "prompt": "x", "id": "x"} for one in report["prompts"]]}


def test_the_check_notices_a_page_that_does_not_escape(report, monkeypatch):
    monkeypatch.setattr("blockdraft.diagnose.explain.page._script_json", json.dumps)
    with pytest.raises(AssertionError):
        test_what_prompts_hold_stays_text(report)


def test_the_page_needs_nothing_from_anywhere(report):
    page = render_page(make_harmless(report), "about")
    elements = Elements(page)
    assert not {"src", "href", "data", "action"} & {name for name, _ in elements.attributes}
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page


def test_the_report_adds_up(report):
    assert (
        sum(one["sums"]["num_rejected"] for one in report["prompts"])
        == (report["sums"]["num_rejected"])
    )
    assert sum(group["num_prompts"] for group in report["groups"]) == len(NASTY)
    assert all(one["streams"]["identical"] for one in report["prompts"])
    behind = [group["behind"] for group in report["groups"]]
    assert behind == sorted(behind, reverse=True)
