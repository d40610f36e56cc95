"""Explaining one prompt or many, and the report of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.core.conversations import as_messages, as_text
from blockdraft.core.errors import RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.groups import Explained, Summary, group_prompts, main_kind
from blockdraft.diagnose.explain.prompts import Question
from blockdraft.diagnose.explain.run import check_explains, explain
from blockdraft.diagnose.explain.stream import stream_both
from blockdraft.diagnose.explain.sums import sum_all
from blockdraft.llm import LLM
from blockdraft.measure.measuring import compute_every_prompt
from blockdraft.text.outline import Check
from blockdraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as token ids. `before` is the text that its answer goes on from, if it does."""

    question: Question
    prompt_ids: list[int]
    before: str = ""


def encode_question(
    tokenizer: Tokenizer,
    check: Check,
    question: Question,
    params: SamplingParams,
    *,
    raw: bool,
    most: int | None = None,
) -> Asked:
    """As a user's turn; as it is with `raw`, or where the target has no chat template.

    most: tokens. A text that must have more is refused before it is taken apart.

    Raises:
        RequestError: it cannot be answered with these parameters; names the prompt.
    """
    is_raw = raw or not tokenizer.has_chat_template
    text = as_text([question.text], question.system)
    try:
        if is_raw:
            ids = tokenizer.encode(text, most=most)
        else:
            turns = as_messages([question.text], question.system)
            ids = tokenizer.encode_chat(turns, most=most)
        check(ids, params)
    except RequestError as error:
        raise RequestError(f"prompt {question.id}: {error}") from error
    return Asked(question, ids, text if is_raw else "")


def explain_all(
    llm: LLM,
    asked: Sequence[Asked],
    params: SamplingParams,
    *,
    with_streams: bool,
) -> Iterator[Explained]:
    """Explain prompts one after another, each with the seed of `params`; one sample each.

    With streams each prompt is answered three times: recorded, and timed with drafts and without.
    No prompt is reused any more afterwards.

    Raises:
        ConfigError: there is no drafter.
    """
    check_explains(llm)
    compute_every_prompt(llm.engine)
    for one in asked:
        yield _explain_one(llm, one, params, with_streams)


def _explain_one(llm: LLM, asked: Asked, params: SamplingParams, with_streams: bool) -> Explained:
    question = asked.question
    (explanation,) = explain(
        llm, asked.prompt_ids, params, prompt=question.text, before=asked.before
    )
    seeded = replace(params, seed=explanation.completion.seed)
    return Explained(
        id=question.id,
        category=question.category or main_kind(explanation),
        explanation=explanation,
        streams=stream_both(llm, asked.prompt_ids, seeded) if with_streams else None,
    )


def make_report(
    described: Sequence[Mapping[str, Any]], summaries: Sequence[Summary]
) -> dict[str, Any]:
    """Plain values for JSON: prompts as `Explained.to_dict` describes them, sums, categories."""
    return {
        "prompts": described,
        "sums": sum_all(one.sums for one in summaries).to_dict(),
        "groups": [group.to_dict() for group in group_prompts(summaries)],
    }
