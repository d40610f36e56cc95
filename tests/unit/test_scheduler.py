import pytest

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence
from blockdraft.engine.scheduler import Scheduler


def make_sequence(key: int, num_prompt: int = 3, num_output: int = 0, **params: object) -> Sequence:
    num_tokens = num_prompt + num_output
    return Sequence(
        key=key,
        params=SamplingParams(**{"max_tokens": 20, **params}),
        seed=0,
        sample_index=0,
        stop_ids=frozenset(),
        token_ids=list(range(num_tokens)),
        num_prompt=num_prompt,
        num_cached=num_tokens - 1 if num_output else 0,
    )


def make_scheduler(**changes: int) -> Scheduler:
    options = {"max_running": 2, "prefill_chunk": 4, "max_draft_tokens": 7}
    return Scheduler(**(options | changes))


def test_first_come_first_served_and_ends_make_room() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(key) for key in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [row.sequence.key for row in scheduler.schedule()] == [0, 1]
    sequences[0].finish_reason = "stop"
    assert [row.sequence.key for row in scheduler.schedule()] == [1, 2]
    scheduler.remove(1)
    scheduler.remove(3)
    scheduler.remove(99)
    assert [row.sequence.key for row in scheduler.schedule()] == [2]
    assert scheduler.has_work
    sequences[2].finish_reason = "length"
    assert not scheduler.has_work
    assert scheduler.schedule() == []


def test_a_prompt_goes_in_chunks_and_drafts_nothing() -> None:
    scheduler, sequence = make_scheduler(), make_sequence(0, num_prompt=9)
    scheduler.add(sequence)
    chunks = []
    while sequence.num_cached < 9:
        (row,) = scheduler.schedule()
        assert row.num_draft_tokens == 0
        chunks.append((row.new_ids, row.is_complete))
        sequence.num_cached += len(row.new_ids)
    assert chunks == [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8], True)]


@pytest.mark.parametrize(
    ("num_output", "speculative", "expected"),
    [
        (1, True, 7),
        (1, 3, 3),
        (1, 100, 7),
        (1, False, 0),
        (1, 0, 0),
        (12, True, 7),
        (13, True, 6),
        (18, True, 1),
        (19, True, 0),
        (18, 5, 1),
    ],
)
def test_nothing_is_drafted_past_the_last_token(
    num_output: int, speculative: bool | int, expected: int
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, num_output=num_output, speculative=speculative))
    (row,) = scheduler.schedule()
    assert row.num_draft_tokens == expected
    assert row.new_ids == [row.sequence.token_ids[-1]]
    assert row.is_complete
