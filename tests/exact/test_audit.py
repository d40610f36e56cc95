"""Audits of the default pair's answers: alterations are found, genuine answers never accused."""

import pytest

from blockdraft import LLM, Receipt
from tests.audits import ASKED, asked, assert_genuine, check_alterations
from tests.exact.prompts import read_prompts

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TRIALS = 200
NUM_QUESTIONS = 20


@pytest.fixture(scope="module")
def answers() -> tuple[LLM, list[Receipt]]:
    """At least NUM_TRIALS answers, drafted in batches, with every kind of parameters."""
    llm = LLM()
    texts = [row["text"] for row in read_prompts() if 0 < len(row["text"].strip()) < 400]
    texts = texts[:: len(texts) // NUM_QUESTIONS][:NUM_QUESTIONS]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    receipts: list[Receipt] = []
    for name in ASKED:
        wanted = [asked(name, seed, max_tokens=24) for seed in range(len(texts))]
        for generation in llm.chat(conversations, wanted):
            receipts += llm.receipts(generation)
    return llm, receipts


def test_genuine_answers_are_not_accused(answers: tuple[LLM, list[Receipt]]) -> None:
    assert len(answers[1]) >= NUM_TRIALS
    assert_genuine(*answers)


def test_every_alteration_is_found(answers: tuple[LLM, list[Receipt]]) -> None:
    check_alterations(*answers, num_trials=NUM_TRIALS, seed=7)
