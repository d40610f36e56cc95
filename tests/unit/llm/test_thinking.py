"""A budget of thinking: kept to the token, the same with and without drafts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken

from blockdraft import LLM, RequestError, SamplingParams
from blockdraft.core.thinking import THINK, ThinkingLimit, ThinkingMarks
from blockdraft.engine.trained_thinking import warn_of_other_thinking
from blockdraft.speculate.sampler import logits
from blockdraft.text.tokenizer import load_tokenizer
from tests.small_llm import assert_nothing_left, load_llm
from tests.tiny import tiny_drafter_folder, tiny_target_folder, tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    "<|start|>{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}"
)
ASKED = [{"role": "user", "content": "the abc"}]


@pytest.fixture(scope="module", params=["one token", "several tokens", "Magistral"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Of a model whose marks are tokens of their own, or are spelled."""
    folder = tmp_path_factory.mktemp("thinking")
    target = tiny_target_folder(folder)
    tokenizer = tiny_tokenizer()
    tags = THINK if request.param != "Magistral" else ("[THINK]", "[/THINK]")
    if request.param != "several tokens":
        tokenizer.add_tokens([AddedToken(mark, special=False) for mark in tags])
    tokenizer.chat_template = TEMPLATE.replace(THINK[0], tags[0]).replace(THINK[1], tags[1])
    tokenizer.save_pretrained(target)
    return load_llm((target, tiny_drafter_folder(folder)), lookup=True)


def params(**changes: object) -> SamplingParams:
    usual = SamplingParams(max_tokens=40, ignore_eos=True, thinking_token_budget=9)
    return replace(usual, **changes)


def end_of(llm: LLM) -> tuple[int, ...]:
    assert llm.tokenizer.thinking_marks is not None
    return llm.tokenizer.thinking_marks.end


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "at once": {"thinking_token_budget": 0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "forbidden": {"logit_bias": dict.fromkeys(range(250, 272), -100.0)},
    "samples": {"n": 2, "temperature": 1.0, "seed": 6, "logprobs": 2},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_equals_plain_and_the_mark_comes_in_time(llm: LLM, name: str) -> None:
    wanted = params(**SETTINGS[name])
    plain = llm.chat(ASKED, replace(wanted, num_draft_tokens=0)).completions
    # What is predicted is accepted, so that blocks reach over the end of the budget.
    predicting = replace(wanted, prediction=plain[0].token_ids)
    end, budget = end_of(llm), wanted.thinking_token_budget
    assert budget is not None
    for way in (wanted, predicting):
        drafted = llm.chat(ASKED, way).completions
        for one, other in zip(drafted, plain, strict=True):
            assert (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
            assert one.token_ids[budget : budget + len(end)] == end
    assert drafted[0].acceptance.num_accepted > 10
    assert llm.engine.proposer.failures.num_failures == 0
    free = llm.chat(ASKED, replace(wanted, thinking_token_budget=None)).completions[0].token_ids
    assert free[:budget] == plain[0].token_ids[:budget]
    assert free != plain[0].token_ids
    assert_nothing_left(llm)


def test_a_limit_that_looks_at_committed_tokens_only_is_noticed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: drafts within a block do not count."""
    plain = llm.chat(ASKED, params(num_draft_tokens=0)).completions[0].token_ids
    found = logits._with_end_of_thinking

    def blind(allowed, sequence, place, vocab_size):
        return found(allowed, sequence, logits.Place(sequence, 0, ()), vocab_size)

    monkeypatch.setattr(logits, "_with_end_of_thinking", blind)
    drafted = llm.chat(ASKED, params(prediction=plain)).completions[0].token_ids
    assert drafted != plain


def test_no_section_no_limit(llm: LLM) -> None:
    """A raw prompt begins none, and neither does the answer."""
    free = llm.generate("the abc", params(thinking_token_budget=None)).completions[0]
    assert llm.generate("the abc", params()).completions[0].token_ids == free.token_ids


def test_without_marks_a_budget_is_refused(folders: tuple[Path, Path]) -> None:
    plain = load_llm(folders)
    with pytest.raises(RequestError, match="thinking_token_budget is 9, but the target's chat"):
        plain.chat(ASKED, params())
    with pytest.raises(RequestError, match="thinking_token_budget is -1; give a number of at"):
        params(thinking_token_budget=-1)


@pytest.mark.parametrize(
    ("trained", "default", "told"),
    [
        ("off", True, "trained with thinking off, and the chat template has it on by default"),
        ("on", False, "trained with thinking on, and the chat template has it off by default"),
        ("on", True, None),
        ("template", True, None),
        ("mixed", True, None),
        (None, True, None),
    ],
)
def test_a_drafter_that_was_trained_otherwise_is_told_of_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    trained: str | None,
    default: bool,
    told: str | None,
) -> None:
    tokenizer = tiny_tokenizer()
    usual = "is not defined or" if default else "is defined and"
    tokenizer.chat_template = TEMPLATE.replace("is not defined or", usual)
    tokenizer.save_pretrained(tmp_path)
    facts = {} if trained is None else {"target": {"thinking": trained}}
    (tmp_path / "provenance.json").write_text(json.dumps(facts), encoding="utf-8")
    warn_of_other_thinking(None, tmp_path, load_tokenizer(tmp_path))
    assert [told in record.getMessage() for record in caplog.records] == [True] * bool(told)


def test_a_published_drafter_says_what_others_lost(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_other_thinking("z-lab/Qwen3-4B-DFlash-b16", tmp_path, llm.tokenizer)
    assert "less than half as many accepted draft tokens" in caplog.text


MARKS = ThinkingMarks(start=(1, 2), end=(7, 8, 9))


@pytest.mark.parametrize(
    ("begun", "tokens", "expected"),
    [
        (True, [], None),
        (True, [4, 4], None),
        (True, [4, 4, 4], 7),
        (True, [4, 4, 4, 7], 8),
        (True, [4, 4, 4, 7, 8], 9),
        (True, [4, 4, 4, 7, 8, 9], None),
        (True, [4, 4, 7], 8),  # the model has begun the mark itself
        (True, [4, 7, 8], 9),
        (True, [4, 7, 8, 9], None),
        (True, [7, 8, 9], None),  # and here ended it
        (True, [4, 4, 4, 5], None),  # a path that will not be kept
        (False, [4, 4, 4], None),
        (False, [1, 2, 4, 4, 4], 7),
        (False, [0, 1, 2, 4, 4, 4], 7),
        (False, [0, 0, 0, 1, 2, 4, 4, 4], None),
        (False, [1, 2, 4, 4, 4, 7, 8, 9, 4, 4], None),
    ],
)
def test_what_must_follow(begun: bool, tokens: list[int], expected: int | None) -> None:
    limit = ThinkingLimit(MARKS, 3, begun)
    assert limit.forced(tokens) == expected
    assert expected is None or limit.may_force(len(tokens))


@pytest.mark.parametrize("num_before", range(3))
def test_a_long_answer_is_not_read_where_nothing_can_be_forced(num_before: int) -> None:
    limit, begin = ThinkingLimit(MARKS, 3, begun=False), [0] * num_before + [1, 2, 4, 4, 4]
    forcing = [n for n in range(99) if limit.forced((begin + [7, 8, 9] * 99)[:n]) is not None]
    assert len(forcing) == len(MARKS.end)
    assert all(map(limit.may_force, forcing))
    assert not any(map(limit.may_force, [*range(3), *range(10, 99)]))


@pytest.mark.parametrize("name", SETTINGS)
def test_an_audit_knows_the_budget(llm: LLM, name: str) -> None:
    generation = llm.chat(ASKED, params(**SETTINGS[name]))
    for receipt in llm.receipts(generation):
        assert llm.verify(receipt).verdict == "genuine"
        without = replace(receipt.params, thinking_token_budget=None)
        audit = llm.verify(replace(receipt, params=without))
        assert audit.verdict == "altered"
