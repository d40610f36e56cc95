"""Audits of the default pair's answers: alterations are found, genuine answers never accused."""

import pytest

from blockdraft import LLM, Receipt
from tests.audits import ASKED, asked, assert_genuine, check_alterations

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = [
    "Name three primary colors.",
    "Write a Python function that adds two numbers.",
    "Tell me about the sea.",
]


@pytest.fixture(scope="module")
def answers() -> tuple[LLM, list[Receipt]]:
    llm = LLM()
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    receipts: list[Receipt] = []
    for name in ASKED:
        wanted = [asked(name, seed, max_tokens=24) for seed in range(len(QUESTIONS))]
        for generation in llm.chat(conversations, wanted):
            receipts += llm.receipts(generation)
    return llm, receipts


def test_genuine_answers_are_not_accused(answers: tuple[LLM, list[Receipt]]) -> None:
    assert_genuine(*answers)


def test_every_alteration_is_found(answers: tuple[LLM, list[Receipt]]) -> None:
    check_alterations(*answers, num_trials=200, seed=7)
