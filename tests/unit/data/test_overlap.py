"""Which prompts overlap a benchmark: questions count, the instructions around them do not."""

import pytest

from blockdraft.data.boxed import BOXED_LINE
from blockdraft.data.overlap import TEMPLATE_PROMPTS, Overlap, without_overlap
from blockdraft.data.prompts import Prompt
from tests.rows import write_rows

LONG = "Alice has three apples and gives one of them to Bob, so how many are left for her now?"
ANSWER_LINE = "\nThink about it for as long as you need, then give nothing but the number."


def questions(number: int, kind: str) -> list[str]:
    """Texts that share no words in a row, of 16 words each, the last of which is the same."""
    return [" ".join(f"{kind}{n}w{i}" for i in range(15)) + " total" for n in range(number)]


def test_overlap_needs_thirteen_words_in_a_row():
    words = LONG.split()
    benchmark = Overlap([LONG])
    assert " ".join(["x", *words[:13], "y"]) in benchmark
    assert " ".join([*words[:12], "other", *words[13:]]) not in benchmark
    assert " ".join(words[:12]) not in benchmark


def test_a_line_that_many_prompts_share_is_no_overlap():
    benchmark = Overlap(text + ANSWER_LINE for text in questions(TEMPLATE_PROMPTS, "a"))
    # "total" and the line are thirteen words of every benchmark prompt.
    assert not any(text + ANSWER_LINE in benchmark for text in questions(5, "b"))
    for text in questions(TEMPLATE_PROMPTS, "a"):
        assert text + ANSWER_LINE in benchmark
        assert text in benchmark
        assert "Well: " + text + BOXED_LINE in benchmark


def test_the_line_that_is_added_to_prompts_is_no_overlap_of_a_few():
    benchmark = Overlap([LONG + BOXED_LINE])
    assert "Who goes there now?" + BOXED_LINE not in benchmark
    assert LONG in benchmark


def test_copies_of_one_benchmark_are_no_template():
    lines = ["", ANSWER_LINE, BOXED_LINE, " Answer briefly, please."]
    benchmark = Overlap(text + line for line in lines for text in questions(40, "a") for _ in "ab")
    assert all("So " + text in benchmark for text in questions(40, "a"))


@pytest.mark.parametrize("number", [1, 2, 50])
def test_a_prompt_word_for_word_in_a_benchmark_is_always_found(number):
    texts = [f"{LONG} {n}" for n in range(number)]
    benchmark = Overlap(texts)
    assert all(text.upper() in benchmark for text in texts)


def test_a_short_question_is_found_with_and_without_its_line():
    short = [f"Is {n} prime?" for n in range(TEMPLATE_PROMPTS)]
    benchmark = Overlap(text + ANSWER_LINE for text in short)
    assert "is 3 PRIME" in benchmark
    assert "Is 3 prime?" + BOXED_LINE in benchmark
    assert "Is 33 prime?" + ANSWER_LINE not in benchmark
    assert ANSWER_LINE not in benchmark


def test_a_question_of_one_word_fewer_than_an_overlap_is_found_without_its_line():
    question = " ".join(LONG.split()[:12])
    benchmark = Overlap([question + BOXED_LINE])
    assert question in benchmark
    assert question + " then" not in benchmark


def test_a_chat_that_overlaps_in_a_later_turn_is_left_out(tmp_path):
    path = write_rows(tmp_path / "benchmark.jsonl", [{"prompt": LONG}])
    chats = [
        Prompt(id="first", set="s", text=LONG, later=("Why?",)),
        Prompt(id="later", set="s", text="Good morning!", later=("Fine.", f"So: {LONG}")),
        Prompt(id="none", set="s", text="Good morning!", later=("Fine.",)),
    ]
    assert [prompt.id for prompt in without_overlap(chats, [path])] == ["none"]


def test_symbols_alone_overlap_nothing():
    assert "!!!" not in Overlap(["???"])
