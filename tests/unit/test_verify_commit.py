"""verify is pure and decides; commit is the only writer."""

import copy
from typing import Any

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target import TargetOutput
from blockdraft.speculate.commit import StepOutput, commit
from blockdraft.speculate.verify import Verdict, verify

VOCAB = 16
TRUTH = [3, 5, 7, 9, 11]


class Recorder:
    """A target and a drafter that write down what commit tells them."""

    layer_ids = (0,)
    max_draft_tokens = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def truncate(self, key: int, length: int) -> None:
        self.calls.append(("truncate", key, length))

    def absorb(self, key: int, features: torch.Tensor | None) -> None:
        assert features is not None
        self.calls.append(("absorb", key, features[:, 0].tolist()))

    def close(self, key: int) -> None:
        self.calls.append(("close", key))


def make_row(
    *, num_prompt: int = 3, cached: int = 3, output: tuple[int, ...] = (1,), **params: Any
) -> Row:
    stop_ids = params.pop("stop_ids", frozenset())
    scan_stop = params.pop("scan_stop", None)
    sequence = Sequence(
        key=8,
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


def decide(row: Row, draft: list[int]) -> Verdict:
    (verdict,) = verify([draft], [make_logits(1 + len(draft))], [row])
    return verdict


def commit_one(row: Row, draft: list[int], recorder: Recorder) -> StepOutput:
    num_rows = len(row.new_ids) + len(draft)
    features = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, 2)
    output = TargetOutput([make_logits(1 + len(draft))], [features])
    verdicts = verify([draft], output.logits, [row])
    (result,) = commit([row], [draft], verdicts, output.features, recorder, recorder)
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
    row = make_row(num_prompt=5, cached=0, output=())
    (verdict,) = verify([[]], [torch.empty(0, VOCAB)], [row])
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
    assert recorder.calls == [("truncate", 8, 6), ("absorb", 8, [0.0, 1.0, 2.0])]
    assert (output.num_drafted, output.num_accepted) == (4, 2)
    assert output.finish_reason is None


def test_a_chunk_of_the_prompt_commits_its_tokens_only() -> None:
    recorder = Recorder()
    sequence = make_row(num_prompt=6, cached=2, output=()).sequence
    row = Row(sequence, sequence.token_ids[2:4], 0)
    features: list[torch.Tensor | None] = [torch.ones(2, 2)]
    (output,) = commit([row], [[]], [Verdict([], 0, [])], features, recorder, recorder)
    assert (output.token_ids, sequence.num_cached, sequence.num_output) == ([], 4, 0)
    assert recorder.calls == [("truncate", 8, 4), ("absorb", 8, [1.0, 1.0])]


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
    assert recorder.calls == [("close", 8), ("close", 8)]


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
