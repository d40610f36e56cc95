"""verify is pure and decides; commit is the only writer."""

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from blockdraft.cache.memory import Unlimited
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target import TargetOutput
from blockdraft.speculate import verify as verify_module
from blockdraft.speculate.commit import StepOutput, commit
from blockdraft.speculate.proposer import Proposer
from blockdraft.speculate.verify import Verdict, verify

VOCAB = 16
TRUTH = [3, 5, 7, 9, 11]


class Recorder(Unlimited):
    """A target with its memory, and a drafter, that write down what commit tells them.

    Of the features, the last two wait, as with a drafter that projects them later.
    """

    layer_ids: tuple[int, ...] = (0,)
    max_draft_tokens = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    @property
    def memory(self) -> "Recorder":
        return self

    def truncate(self, key: int, length: int) -> None:
        self.calls.append(("truncate", key, length))

    def absorb(self, key: int, start: int, features: torch.Tensor) -> None:
        self.calls.append(("absorb", key, start, features[:, 0].tolist()))

    def publish(self, key: int, token_ids: list[int], num_tokens: int) -> None:
        self.calls.append(("publish", key, list(token_ids), num_tokens))

    def close(self, key: int) -> None:
        self.calls.append(("close", key))


def proposer(recorder: Recorder) -> Proposer:
    return Proposer(recorder, VOCAB)


def make_row(
    *,
    key: int = 8,
    num_prompt: int = 3,
    cached: int = 3,
    output: tuple[int, ...] = (1,),
    **params: Any,
) -> Row:
    stop_ids = params.pop("stop_ids", frozenset())
    scan_stop = params.pop("scan_stop", None)
    sequence = Sequence(
        key=key,
        params=SamplingParams(**params),
        seed=1,
        sample_index=0,
        stop_ids=stop_ids,
        token_ids=[2] * num_prompt + list(output),
        num_prompt=num_prompt,
        scan_stop=scan_stop,
        num_cached=cached,
    )
    return Row(sequence, sequence.token_ids[cached:], 4)


def make_logits(num: int) -> torch.Tensor:
    """Rows whose argmaxes are TRUTH."""
    logits = torch.zeros(num, VOCAB)
    for index in range(num):
        logits[index, TRUTH[index]] = 1.0
    return logits


def without_number(num: int, index: int, value: float = math.nan) -> torch.Tensor:
    """The same with a logit at `index` that is no number."""
    logits = make_logits(num)
    logits[index, 2] = value
    return logits


def decide(row: Row, draft: list[int]) -> Verdict:
    (verdict,) = verify([draft], make_logits(1 + len(draft)), [row])
    return verdict


def commit_one(
    row: Row, draft: list[int], recorder: Recorder, one: Proposer | None = None
) -> StepOutput:
    num_rows = len(row.new_ids) + len(draft)
    features = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, 2)
    output = TargetOutput(make_logits(1 + len(draft)), [features])
    verdicts = verify([draft], output.logits, [row])
    one = one or proposer(recorder)
    (result,) = commit([row], [draft], verdicts, output.features, recorder, one)
    return result


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        ([], [3]),
        ([3, 5, 7, 9], [3, 5, 7, 9, 11]),
        ([3, 5, 0, 9], [3, 5, 7]),
        ([0, 5, 7, 9], [3]),
        ([3, 5, 7, 0], [3, 5, 7, 9]),
    ],
)
def test_drafts_are_kept_up_to_the_first_difference(draft: list[int], expected: list[int]) -> None:
    row = make_row()
    before = copy.deepcopy(row)
    verdict = decide(row, draft)
    assert verdict.token_ids == expected
    assert verdict.num_accepted == len(expected) - 1
    for name in ("token_ids", "num_cached", "output_counts", "finish_reason"):
        assert getattr(row.sequence, name) == getattr(before.sequence, name)


def test_a_row_without_logits_gets_no_verdict() -> None:
    sequence = make_row(num_prompt=5, cached=0, output=()).sequence
    row = Row(sequence, sequence.token_ids[:4], 0, is_prompt=True)
    (verdict,) = verify([[]], torch.empty(0, VOCAB), [row])
    assert verdict == Verdict([], 0, [])


def test_logprobs_belong_to_the_kept_tokens() -> None:
    verdict = decide(make_row(logprobs=1), [3, 0, 0])
    assert [entry.top[0][0] for entry in verdict.logprobs] == verdict.token_ids == [3, 5]


def test_both_caches_end_before_the_anchor() -> None:
    recorder, row = Recorder(), make_row()
    output = commit_one(row, [3, 5, 0, 9], recorder)
    assert row.sequence.token_ids == [2, 2, 2, 1, 3, 5, 7]
    assert row.sequence.num_cached == 6
    # The rejected slot's features are cut, and those of the bonus do not exist yet.
    assert recorder.calls == [
        ("truncate", 8, 6),
        ("absorb", 8, 3, [0.0, 1.0, 2.0]),
        ("publish", 8, [2, 2, 2, 1, 3, 5, 7], 6),
    ]
    assert (output.num_drafted, output.num_accepted) == (4, 2)
    assert output.finish_reason is None


def test_a_chunk_of_the_prompt_commits_its_tokens_only() -> None:
    recorder = Recorder()
    sequence = make_row(num_prompt=6, cached=2, output=()).sequence
    row = Row(sequence, sequence.token_ids[2:4], 0)
    features: list[torch.Tensor | None] = [torch.ones(2, 2)]
    (output,) = commit([row], [[]], [Verdict([], 0, [])], features, recorder, proposer(recorder))
    assert (output.token_ids, sequence.num_cached, sequence.num_output) == ([], 4, 0)
    assert recorder.calls == [
        ("truncate", 8, 4),
        ("absorb", 8, 2, [1.0, 1.0]),
    ]


@pytest.mark.parametrize("way", ["no drafter", "plain request"])
def test_without_a_draft_context_all_that_is_cached_is_published(way: str) -> None:
    recorder, params = Recorder(), {}
    if way == "no drafter":
        recorder.layer_ids = ()
    else:
        params = {"speculative": False}
    commit_one(make_row(**params), [3, 5, 0, 9], recorder)
    assert recorder.calls == [("truncate", 8, 6), ("publish", 8, [2, 2, 2, 1, 3, 5, 7], 6)]


@pytest.mark.parametrize(
    ("params", "expected", "reason"),
    [
        ({"stop_ids": frozenset({5})}, [3, 5], "stop"),
        ({"stop_ids": frozenset({3, 5})}, [3], "stop"),
        ({"stop_ids": frozenset({11})}, TRUTH, "stop"),
        ({"max_tokens": 4}, [3, 5, 7], "length"),
        ({"max_tokens": 4, "stop_ids": frozenset({7})}, [3, 5, 7], "stop"),
        ({"scan_stop": lambda token_id: token_id == 7}, [3, 5, 7], "stop"),
    ],
)
def test_nothing_is_committed_after_the_end(
    params: dict[str, Any], expected: list[int], reason: str
) -> None:
    recorder, row = Recorder(), make_row(logprobs=0, **params)
    output = commit_one(row, TRUTH[:4], recorder)
    assert output.token_ids == expected
    assert len(output.logprobs) == len(expected)
    assert output.finish_reason == row.sequence.finish_reason == reason
    assert row.sequence.output_ids == [1, *expected]
    (absorbed, published, *closed) = recorder.calls
    num_cached = row.sequence.num_cached
    # What is published, others may draft from.
    assert absorbed == ("absorb", 8, 3, [float(i) for i in range(num_cached - 3)])
    assert published == ("publish", 8, row.sequence.token_ids, num_cached)
    assert num_cached == 3 + len(expected)
    assert closed == [("close", 8), ("close", 8)]


def test_the_stop_scanner_hears_committed_tokens_only_and_a_stop_token_too() -> None:
    heard: list[int] = []

    def scan(token_id: int) -> bool:
        heard.append(token_id)
        return False

    commit_one(make_row(scan_stop=scan), [3, 5, 0, 9], Recorder())
    assert heard == [3, 5, 7]
    heard.clear()
    commit_one(make_row(scan_stop=scan, stop_ids=frozenset({5})), TRUTH[:4], Recorder())
    assert heard == [3, 5]


CHOOSERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1e-3, "seed": 1},
    {"temperature": 1e-3, "seed": 1, "top_k": 3, "min_p": 0.1},
    {"logit_bias": {3: 0.5}},
)


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
@pytest.mark.parametrize("index", range(5))
def test_logits_that_are_no_numbers_end_the_row_with_the_tokens_before(
    index: int, params: dict[str, Any]
) -> None:
    recorder, row = Recorder(), make_row(logprobs=1, **params)
    (verdict,) = verify([TRUTH[:4]], without_number(5, index), [row])
    assert verdict.token_ids == TRUTH[:index]
    assert verdict.num_accepted == len(verdict.logprobs) == index
    (output,) = commit(
        [row], [TRUTH[:4]], [verdict], [torch.ones(5, 2)], recorder, proposer(recorder)
    )
    # The sequence had four tokens.
    message = (
        f"the target's logits for the token at position {4 + index} are not numbers, or all -inf"
    )
    assert output.error == row.sequence.error == message
    assert output.finish_reason == row.sequence.finish_reason == "error"
    assert output.token_ids == TRUTH[:index]
    assert row.sequence.output_ids == [1, *TRUTH[:index]]
    assert recorder.calls[-2:] == [("close", 8), ("close", 8)]


def test_what_follows_a_rejected_draft_may_be_no_number() -> None:
    (verdict,) = verify([[3, 0, 7, 9]], without_number(5, 2), [make_row()])
    assert verdict == Verdict([3, 5], 1, [])


def test_an_end_before_the_missing_number_is_no_error() -> None:
    for params in ({"stop_ids": frozenset({5})}, {"max_tokens": 3}):
        recorder, row = Recorder(), make_row(**params)
        verdicts = verify([TRUTH[:4]], without_number(5, 2), [row])
        (output,) = commit(
            [row], [TRUTH[:4]], verdicts, [torch.ones(5, 2)], recorder, proposer(recorder)
        )
        assert output.finish_reason in ("stop", "length")
        assert (output.error, output.token_ids) == (None, [3, 5])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_logits_are_ordered_like_any_others(value: float) -> None:
    (verdict,) = verify([[]], without_number(1, 0, value), [make_row()])
    assert verdict == Verdict([2 if value > 0 else 3], 0, [])


def test_each_row_of_a_batch_gets_its_own_logits() -> None:
    """Greedy, sampled and incomplete rows mixed, packed row after row; one ends with an error."""
    prompt = make_row(key=4, num_prompt=9, cached=2, output=()).sequence
    batch = [
        make_row(key=0),
        make_row(key=1, temperature=1e-3, seed=2),
        Row(prompt, prompt.token_ids[2:5], 0, is_prompt=True),
        make_row(key=2),
        make_row(key=3, logit_bias={11: 0.5}),
    ]
    block = [[3, 5, 0], [3], [], [0, 5, 7, 9], TRUTH[:4]]
    own = [make_logits(4), make_logits(2), make_logits(0), without_number(5, 0), make_logits(5)]
    verdicts = verify(block, torch.cat(own), batch)
    assert [v.token_ids for v in verdicts] == [[3, 5, 7], [3, 5], [], [], TRUTH]
    assert [v.num_accepted for v in verdicts] == [2, 1, 0, 0, 4]
    assert [v.error is not None for v in verdicts] == [False, False, False, True, False]
    for row, draft, logits, verdict in zip(batch, block, own, verdicts, strict=True):
        assert verify([draft], logits, [row]) == [verdict]


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
def test_a_stop_scanner_that_fails_leaves_every_row_consistent(error: BaseException) -> None:
    """Its own row ends, the others are committed; those behind an interrupt are untouched."""

    def fail(token_id: int) -> bool:
        if token_id == 5:
            raise error
        return False

    is_interrupt = isinstance(error, KeyboardInterrupt)
    recorder = Recorder()
    batch = [make_row(key=0), make_row(key=1, scan_stop=fail), make_row(key=2)]
    block = [TRUTH[:4]] * 3
    verdicts = verify(block, torch.cat([make_logits(5)] * 3), batch)
    features: list[torch.Tensor | None] = [torch.ones(5, 2)] * 3
    outputs: list[StepOutput] = []
    with pytest.raises(KeyboardInterrupt) if is_interrupt else nullcontext():
        outputs.extend(commit(batch, block, verdicts, features, recorder, proposer(recorder)))
    num_done = 2 if is_interrupt else 3
    expected = [(0, TRUTH, None), (1, [3, 5], "error"), (2, TRUTH, None)][:num_done]
    assert [(o.key, o.token_ids, o.finish_reason) for o in outputs] == expected
    for row in batch:
        row.sequence.check()
    last = [1] if is_interrupt else [1, *TRUTH]
    assert [row.sequence.output_ids for row in batch] == [[1, *TRUTH], [1, 3, 5], last]
    assert [row.sequence.num_cached for row in batch] == [8, 3, 3 if is_interrupt else 8]
    kept = [("truncate", 0), ("absorb", 0), ("publish", 0), ("close", 1), ("close", 1)]
    if not is_interrupt:
        kept += [("truncate", 2), ("absorb", 2), ("publish", 2)]
    assert [call[:2] for call in recorder.calls] == kept


@pytest.mark.parametrize("failing", ["truncate", "publish", "close"])
def test_a_cache_that_fails_ends_its_row_alone(failing: str) -> None:
    class Failing(Recorder):
        def truncate(self, key: int, length: int) -> None:
            self.meet("truncate", key)

        def publish(self, key: int, token_ids: list[int], num_tokens: int) -> None:
            self.meet("publish", key)

        def close(self, key: int) -> None:
            self.meet("close", key)

        def meet(self, name: str, key: int) -> None:
            if (name, key) == (failing, 1):
                raise RuntimeError("boom")

    recorder = Failing()
    # A sequence that ends is closed.
    num_tokens = 6 if failing == "close" else 256
    batch = [make_row(key=key, max_tokens=num_tokens) for key in range(3)]
    block = [TRUTH[:4]] * 3
    verdicts = verify(block, torch.cat([make_logits(5)] * 3), batch)
    features: list[torch.Tensor | None] = [torch.ones(5, 2)] * 3
    outputs = list(commit(batch, block, verdicts, features, recorder, proposer(recorder)))
    assert [output.token_ids for output in outputs] == [TRUTH] * 3
    # With its last token an answer is whole, whatever fails then.
    expected = ["length"] * 3 if failing == "close" else [None, "error", None]
    assert [output.finish_reason for output in outputs] == expected


def test_features_that_the_drafter_does_not_take_end_its_drafts_and_no_request() -> None:
    class Failing(Recorder):
        def absorb(self, key: int, start: int, features: torch.Tensor) -> None:
            raise RuntimeError("boom")

    recorder, row = Failing(), make_row()
    one = proposer(recorder)
    output = commit_one(row, TRUTH[:4], recorder, one)
    assert (output.token_ids, output.error) == (TRUTH, None)
    assert one.failures.num_failures == 1
    assert row.sequence.has_lost_context
    assert not row.sequence.may_draft
    # Nobody may take over pages whose draft context is missing.
    assert [call[0] for call in recorder.calls] == ["truncate", "close"]


@pytest.mark.parametrize("params", CHOOSERS, ids=str)
def test_logits_without_any_chance_end_the_row(params: dict[str, Any]) -> None:
    logits = make_logits(5)
    logits[2] = -math.inf
    (verdict,) = verify([TRUTH[:4]], logits, [make_row(**params)])
    assert verdict.token_ids == TRUTH[:2]
    assert verdict.error == "the target's logits for the token at position 6 are all minus infinity"


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_infinite_logits_cannot_be_sampled_from(filters: dict[str, Any]) -> None:
    row = make_row(temperature=1.0, seed=1, **filters)
    (verdict,) = verify([[]], without_number(1, 0, math.inf), [row])
    assert verdict.token_ids == []
    expected = "logits for the token at position 4 are infinite, and cannot be sampled from"
    assert expected in str(verdict.error)


def test_more_logprobs_than_tokens_are_those_of_all_tokens() -> None:
    (verdict,) = verify([[]], make_logits(1), [make_row(logprobs=20)])
    assert verdict.error is None
    assert sorted(token_id for token_id, _ in verdict.logprobs[0].top) == list(range(VOCAB))


@pytest.mark.parametrize("failing", ["choices", "token_logprobs"])
@pytest.mark.parametrize("index", range(3))
def test_what_fails_while_a_token_is_chosen_ends_its_row_alone(
    index: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [make_row(key=key, logprobs=1, temperature=1e-3, seed=1) for key in range(3)]
    draft = TRUTH[:4]
    expected = [decide(row, draft) for row in batch]
    real, calls = getattr(verify_module, failing), itertools.count()

    def fail(*args: Any) -> Any:
        if failing == "choices":
            if args[1] is batch[index].sequence:
                raise RuntimeError("boom")
        elif next(calls) == 5 * index:
            raise RuntimeError("boom")
        return real(*args)

    def lazily(*args: Any) -> Any:
        yield from fail(*args)

    monkeypatch.setattr(verify_module, failing, lazily if failing == "choices" else fail)
    verdicts = verify([draft] * 3, torch.cat([make_logits(5)] * 3), batch)
    reason = "the token at position 4 could not be chosen: RuntimeError('boom')"
    expected[index] = Verdict([], 0, [], reason)
    assert verdicts == expected


def test_a_prompt_that_cannot_be_scored_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"output": (), "cached": 0, "logprobs": 1, "prompt_logprobs": True}
    batch = [make_row(key=0, **changes), make_row(key=1), make_row(key=2, **changes)]
    logits = torch.cat([make_logits(3), make_logits(1), make_logits(3)])
    expected = verify([[]] * 3, logits, batch)
    real = verify_module._score

    def fail(row: Row, own: torch.Tensor) -> Any:
        if row.sequence.key == 0:
            raise RuntimeError("boom")
        return real(row, own)

    monkeypatch.setattr(verify_module, "_score", fail)
    first, *others = verify([[]] * 3, logits, batch)
    assert "log-probabilities could not be found: RuntimeError('boom')" in str(first.error)
    assert others == expected[1:]
