"""Exceptions wherever one row is handled alone: that request ends with an error, and no other."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.costs import StepCosts
from blockdraft.core.grammar import Grammar
from blockdraft.core.plan import Proposal
from blockdraft.speculate import verify
from blockdraft.speculate.sampler import choose
from tests.small_llm import assert_nothing_left, params

PROMPTS = ("abc", "the fox", "!!", "a" * 70, "the the")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"temperature": 1.0, "seed": 1, "top_k": 5, "logprobs": 1},
    {"stop": ("zzzz",), "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 2, "min_tokens": 3, "logprobs": 0, "prompt_logprobs": True},
    {"grammar": Grammar.regex("[a-f ]{3,30}"), "ignore_eos": False},
)
VICTIMS_OWN = ("mask", "noise", "logprobs", "scan", "close", "read", "keep", "publish")
"""What fails for one request only, and ends it if it is asked for."""
HARMLESS = (
    *("open", "propose", "committed", "close_drafter", "long_draft", "wild_draft"),
    *("limit", "choose", "record", "calibration", "close_policy", "acceptance", "observer"),
)
"""What may fail for all requests, and ends none."""


class Boom(Exception):
    pass


class Planted:
    """Fails by chance when it is called, before or after the real call."""

    def __init__(self, draw: random.Random, chance: float, concerns: Callable[..., bool]) -> None:
        self.draw, self.chance, self.concerns = draw, chance, concerns
        self.num_failed = 0

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            fails = self.concerns(*args) and self.draw.random() < self.chance
            self.num_failed += fails
            is_late = fails and self.draw.random() < 0.5
            if fails and not is_late:
                raise Boom
            result = real(*args, **options)
            if is_late:
                raise Boom
            return result

        return call


class Onlooker:
    def verified(self, *args: Any) -> None:
        """Sees it."""

    def reported(self, *args: Any) -> None:
        """Sees it."""


def started(llm: Any) -> list[Any]:
    """Streams of all requests, the first chunk of each read, and the chunks so far."""
    streams = [
        llm.generate(prompt, params(**settings), stream=True)
        for prompt, settings in zip(PROMPTS, SETTINGS, strict=True)
    ]
    return [(stream, [next(stream)]) for stream in streams]


def plain(llm: Any) -> list[Any]:
    return [
        llm.generate(prompt, replace(params(**settings), num_draft_tokens=0)).completions[0]
        for prompt, settings in zip(PROMPTS, SETTINGS, strict=True)
    ]


def plant_in_row(llm: Any, place: str, victim: int, planted: Planted, stack: ExitStack) -> None:
    key = list(llm.engine.progress)[victim]
    sequence, text = llm.engine.progress[key].sequence, llm.engine.progress[key].text.detokenizer
    engine = llm.engine

    def put(owner: Any, name: str) -> None:
        stack.enter_context(patch.object(owner, name, planted.around(getattr(owner, name))))

    if place == "scan":
        sequence.scan_stop = planted.around(sequence.scan_stop)
    elif place == "mask":
        if sequence.constraint is not None:
            put(sequence.constraint, "allowed")
    elif place in ("close", "read"):
        put(text, place)
    elif place == "noise":
        planted.concerns = lambda scores, at: at.sequence is sequence
        put(choose, "without_noise")
    elif place == "logprobs":
        # Rows of a step are verified in order; which one it is does not matter to the others.
        planted.concerns = lambda logits, token_id, num_top: num_top == sequence.params.logprobs
        if sequence.params.logprobs == 0:
            put(verify, "token_logprobs")
    elif place == "keep":
        planted.concerns = lambda planned, _: planned.row.sequence.key == key
        put(engine.target, "keep")
    elif place == "publish":
        planted.concerns = lambda at, *_: at == key
        put(engine.target.memory, "publish")


def plant_anywhere(llm: Any, place: str, planted: Planted, stack: ExitStack) -> None:
    engine = llm.engine

    def put(owner: Any, name: str) -> None:
        stack.enter_context(patch.object(owner, name, planted.around(getattr(owner, name))))

    if place in ("long_draft", "wild_draft"):
        real = engine.drafter.propose
        damaged = longer if place == "long_draft" else partial(wild, engine.target.vocab_size)

        def propose(rows: Any) -> Any:
            proposals = real(rows)
            planted.num_failed += bool(proposals)
            return [damaged(own) if own else own for own in proposals]

        stack.enter_context(patch.object(engine.drafter, "propose", propose))
    elif place in ("open", "propose", "committed"):
        put(engine.drafter, place)
    elif place == "close_drafter":
        planted.chance = 0.0  # late only: what is not closed at all is left behind, of course
        real_close = engine.drafter.close

        def close(key: int) -> None:
            planted.num_failed += 1
            real_close(key)
            raise Boom

        stack.enter_context(patch.object(engine.drafter, "close", close))
    elif place in ("limit", "choose", "record"):
        put(engine.allocator.policy, place)
    elif place == "calibration":
        stack.enter_context(patch.object(engine.allocator, "policy", calibrated(engine)))
        put(engine.allocator.policy.calibration, "probabilities")
    elif place == "close_policy":
        put(engine.allocator.policy, "close")
    elif place == "acceptance":
        for progress in engine.progress.values():
            progress.acceptance = FailingStats(planted)
    else:
        onlooker = Onlooker()
        put(onlooker, "verified")
        put(onlooker, "reported")
        stack.enter_context(patch.object(engine, "observer", onlooker))


def calibrated(engine: Any) -> BestRate:
    """A policy that drafts all the time, on a machine that computes candidates for nothing."""
    free = StepCosts([(1, 1.0)], [(1, 1.0)], [(1, 1e-6)])
    policy = BestRate(
        free,
        engine.drafter.max_nodes,
        engine.drafter.max_nodes,
        model_kind=engine.drafter.kind,
    )
    policy.account.allows = lambda loss: True  # type: ignore[method-assign]
    return policy


def longer(proposal: Proposal) -> Proposal:
    return Proposal.chain([*proposal.tree.tokens, 0], "longer")


def wild(token_id: int, proposal: Proposal) -> Proposal:
    return Proposal.chain([*proposal.tree.tokens[:-1], token_id], "wild")


class FailingStats:
    def __init__(self, planted: Planted) -> None:
        self.record = planted.around(lambda *_: None)


def read_all(streams: list[Any]) -> list[Any]:
    """Read the streams in turn to their ends; the completions, held against their chunks."""
    still_open = list(streams)
    while still_open:
        for one in list(still_open):
            stream, chunks = one
            try:
                chunks.append(next(stream))
            except StopIteration:
                still_open.remove(one)
    completions = []
    for _, chunks in streams:
        completion = chunks[-1].completion
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == completion.token_ids
        completions.append(completion)
    return completions


def assert_same(found: Any, expected: Any) -> None:
    for name in ("token_ids", "text", "finish_reason", "error", "logprobs", "prompt_logprobs"):
        assert getattr(found, name) == getattr(expected, name), name


def assert_ended(found: Any, expected: Any) -> None:
    """With an error that says why, and with what came before it."""
    assert found.finish_reason == "error"
    assert "Boom()" in found.error
    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert found.logprobs is None or len(found.logprobs) == len(found.token_ids)
    assert expected.text.startswith(found.text)


@pytest.fixture(scope="module")
def expected(llm):
    return plain(llm)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", VICTIMS_OWN)
def test_what_fails_for_one_row_ends_its_request_alone(llm, expected, place):
    draw, num_ended = random.Random(place), 0
    victims = {"mask": (4,), "noise": (1, 3), "logprobs": (3,)}.get(place, range(len(PROMPTS)))
    for victim in victims:
        planted = Planted(draw, draw.choice([0.3, 1.0]), lambda *_: True)
        with ExitStack() as stack:
            streams = started(llm)
            plant_in_row(llm, place, victim, planted, stack)
            found = read_all(streams)
        for index, (own, plain_one) in enumerate(zip(found, expected, strict=True)):
            # With its last token an answer is whole: what fails in the commit then is only logged.
            if index == victim and planted.num_failed and own.finish_reason == "error":
                assert_ended(own, plain_one)
                num_ended += 1
            else:
                assert index != victim or not planted.num_failed or place in ("keep", "publish")
                assert_same(own, plain_one)
        assert_nothing_left(llm)
    assert num_ended


@pytest.mark.one_in(9)
@pytest.mark.parametrize("chance", [0.4])
@pytest.mark.parametrize("place", HARMLESS)
def test_what_fails_beside_the_rows_ends_nobody(llm, expected, place, chance):
    planted = Planted(random.Random(f"{place} {chance}"), chance, lambda *_: True)
    with ExitStack() as stack:
        if place == "open":  # which is called as soon as they have started
            plant_anywhere(llm, place, planted, stack)
        streams = started(llm)
        if place != "open":
            plant_anywhere(llm, place, planted, stack)
        found = read_all(streams)
    assert planted.num_failed
    for own, plain_one in zip(found, expected, strict=True):
        assert_same(own, plain_one)
    assert_nothing_left(llm)
