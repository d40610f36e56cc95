"""Answers that are audited, as they are and altered, and what the audit must say of each."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from blockdraft import LLM, Completion, Receipt, SamplingParams
from blockdraft.engine.audit import Finding, decode_again

Draw = random.Random

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.3,
        "repetition_penalty": 1.7,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
    },
    "samples": {"temperature": 1.0, "n": 3},
    "bias": {"logit_bias": {5: 3.0, 77: -2.0}, "temperature": 0.9},
    "minimum": {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": tuple(range(0, 200, 3))},
    "stop tokens": {
        "temperature": 1.0,
        "ignore_eos": False,
        "stop_token_ids": tuple(range(0, 200, 5)),
    },
    "stop strings": {"temperature": 1.0, "stop": ("e", "a", "zz")},
}
"""Changes of parameters under which answers are given."""


def asked(name: str, seed: int, **changes: Any) -> SamplingParams:
    usual = {"ignore_eos": True, "seed": seed, **changes}
    return SamplingParams(**{**usual, **ASKED[name]})


def assert_genuine(llm: LLM, receipts: Sequence[Receipt]) -> None:
    """No answer is accused, neither as it is nor read back from its JSON."""
    assert receipts
    for receipt in receipts:
        for given in (receipt, receipt.to_json()):
            audit = llm.verify(given)
            assert audit.verdict == "genuine", f"accused: {receipt}, {audit}"
            assert not audit.changes
            assert audit.num_tokens == len(receipt.token_ids)


def _other_token(llm: LLM, draw: Draw, receipt: Receipt) -> dict[str, Any]:
    ids = list(receipt.token_ids)
    place = draw.randrange(len(ids))
    ids[place] = (ids[place] + draw.randrange(1, llm.engine.target.vocab_size)) % (
        llm.engine.target.vocab_size
    )
    return {"token_ids": tuple(ids)}


def _one_less(llm: LLM, draw: Draw, receipt: Receipt) -> dict[str, Any]:
    place = draw.randrange(len(receipt.token_ids))
    return {"token_ids": receipt.token_ids[:place] + receipt.token_ids[place + 1 :]}


def _one_more(llm: LLM, draw: Draw, receipt: Receipt) -> dict[str, Any]:
    place = draw.randrange(len(receipt.token_ids) + 1)
    more = draw.randrange(llm.engine.target.vocab_size)
    return {"token_ids": (*receipt.token_ids[:place], more, *receipt.token_ids[place:])}


def _cut(llm: LLM, draw: Draw, receipt: Receipt) -> dict[str, Any]:
    return {"token_ids": receipt.token_ids[: draw.randrange(len(receipt.token_ids))]}


def _param(**choices: Sequence[Any]) -> Callable[[LLM, Draw, Receipt], dict[str, Any]]:
    def alter(llm: LLM, draw: Draw, receipt: Receipt) -> dict[str, Any]:
        (name,) = choices
        others = [one for one in choices[name] if one != getattr(receipt.params, name)]
        return {"params": replace(receipt.params, **{name: draw.choice(others)})}

    return alter


ALTERATIONS: dict[str, Callable[[LLM, Draw, Receipt], dict[str, Any]]] = {
    "another token": _other_token,
    "a token less": _one_less,
    "a token more": _one_more,
    "the rest cut off": _cut,
    "seed": lambda llm, draw, receipt: {"seed": receipt.seed + draw.randrange(1, 2**32)},
    "sample": lambda llm, draw, receipt: {"index": receipt.index + draw.randrange(1, 9)},
    "temperature": _param(temperature=(0.0, 0.5, 0.9, 1.0, 1.3)),
    "top_k": _param(top_k=(0, 1, 2, 5, 20)),
    "top_p": _param(top_p=(0.05, 0.3, 0.7, 0.95, 1.0)),
    "min_p": _param(min_p=(0.0, 0.05, 0.3, 0.9)),
    "repetition_penalty": _param(repetition_penalty=(0.7, 1.0, 1.5)),
    "presence_penalty": _param(presence_penalty=(-1.0, 0.0, 1.0)),
    "frequency_penalty": _param(frequency_penalty=(-1.0, 0.0, 1.0)),
    "logit_bias": _param(logit_bias=({}, {5: 9.0}, {60: 5.0, 61: -5.0})),
    "min_tokens": _param(min_tokens=(0, 2, 10)),
    "max_tokens": _param(max_tokens=(11, 13)),
    "stop": _param(stop=((), ("a",), ("o", "t"))),
    "stop_token_ids": _param(stop_token_ids=((), tuple(range(0, 250, 2)))),
    "prompt": lambda llm, draw, receipt: {
        "prompt_token_ids": (*receipt.prompt_token_ids[:-1], draw.randrange(200))
    },
}


def is_answer(completion: Completion, receipt: Receipt) -> bool:
    """Whether plain decoding of what the receipt asks for has given what it says."""
    found = (completion.token_ids, completion.finish_reason, completion.text)
    return found == (receipt.token_ids, receipt.finish_reason, receipt.text)


def check_alterations(llm: LLM, receipts: Sequence[Receipt], num_trials: int, seed: int) -> None:
    """Alter answers in turn until so many alterations have changed what would be chosen.

    Each of these must be found, and at the first token that differs; what changes no token must
    not be accused. Every kind must have been among them.
    """
    draw, num_found, num_same = Draw(seed), 0, 0
    names = set()
    while num_found < num_trials:
        assert num_same < 20 * num_trials, "hardly an alteration changes anything"
        name = list(ALTERATIONS)[(num_found + num_same) % len(ALTERATIONS)]
        receipt = draw.choice(receipts)
        altered = replace(receipt, **ALTERATIONS[name](llm, draw, receipt))
        audit = llm.verify(altered)
        plain = decode_again(llm.samples, altered, is_drafted=False)  # the oracle
        if is_answer(plain, altered):
            assert audit.verdict == "genuine", f"accused, {name}: {altered}, {audit}"
            num_same += 1
            continue
        assert audit.verdict == "altered", f"missed, {name}: {altered}, {audit}"
        assert audit.finding is not None
        _check_place(plain.token_ids, altered, audit.finding)
        names.add(name)
        num_found += 1
    if num_trials >= 10 * len(ALTERATIONS):
        assert names == set(ALTERATIONS), f"too few trials of {set(ALTERATIONS) - names}"


def _check_place(own: Sequence[int], altered: Receipt, finding: Finding) -> None:
    """The finding names the first token that plain decoding has otherwise, and its own there."""
    pairs = zip(own, altered.token_ids, strict=False)
    shared = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if shared is None:
        assert finding.what != "token", f"missed its place: {finding}"
        return
    expected = ("token", shared, altered.token_ids[shared], own[shared])
    found = (finding.what, finding.position, finding.found, finding.expected)
    assert found == expected, f"missed its place: {finding}"
    assert finding.margin is not None
    assert finding.margin > 0
