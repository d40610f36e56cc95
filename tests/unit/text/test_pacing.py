"""Smooth release: the same text, evenly, and never later than the bound."""

import random
from itertools import pairwise

import pytest

from blockdraft.cli.smooth import SmoothWriter
from blockdraft.text.pacing import MAX_DELAY, Pacer

TICK = 0.001


def release(bursts, max_delay=MAX_DELAY):
    """(time, text) of everything that leaves, on a clock that ticks; bursts: (at, text, tokens)."""
    pacer, left, waiting = Pacer(max_delay), [], list(bursts)
    now = 0.0
    while waiting or pacer.next_at is not None:
        while waiting and waiting[0][0] <= now:
            at, text, num_tokens = waiting.pop(0)
            pacer.push(text, num_tokens, at)
        if text := pacer.pop(now):
            left.append((now, text))
        now += TICK
    return left


def steady(num, size=4, gap=0.1):
    return [(i * gap, f"<{i:0{size * 2}d}>", size) for i in range(num)]


def test_the_text_is_unchanged_and_none_is_late():
    chances = random.Random(7)
    for _ in range(50):
        at, bursts = 0.0, []
        for _ in range(chances.randint(1, 30)):
            at += chances.choice([0.0, 0.002, 0.05, 0.4, 2.0]) * chances.random()
            text = "".join(chances.choices("ab \n你🙂", k=chances.randint(0, 30)))
            bursts.append((at, text, chances.randint(1, 12)))
        left = release(bursts)
        assert "".join(text for _, text in left) == "".join(text for _, text, _ in bursts)
        # Each character leaves after it came, and no later than the bound.
        left_at = [now for now, text in left for _ in text]
        came_at = [at for at, text, _ in bursts for _ in text]
        delays = [out - came for out, came in zip(left_at, came_at, strict=True)]
        assert all(0 <= delay <= MAX_DELAY + 2 * TICK for delay in delays)


def test_bursts_flow_at_the_recent_rate():
    left = release(steady(30))
    times = [now for now, _ in left if 1.0 < now < 2.8]
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert len(times) > 3 * 17  # four pieces a burst, but for those that share a tick
    assert max(gaps) < 0.05  # the bursts themselves come every 0.1 s
    assert left[-1][0] <= 2.9 + MAX_DELAY + 2 * TICK


def test_before_a_rate_is_known_nothing_waits():
    assert release([(0.0, "abcd", 4)]) == [(0.0, "abcd")]


def test_a_pause_leaves_nothing_behind():
    left = release([*steady(10), (9.0, "end", 3)])
    assert left[-1][0] <= 9.0 + MAX_DELAY + 2 * TICK
    assert not any(1.0 + MAX_DELAY < now < 9.0 for now, _ in left)


def test_no_delay_allowed_is_no_smoothing():
    left = release(steady(6), max_delay=0.0)
    assert [text for _, text in left] == [text for _, text, _ in steady(6)]


def test_the_writer_writes_everything_in_order():
    written = []
    with SmoothWriter(written.append) as writer:
        for i in range(40):
            writer.push(f"{i},", 1)
        writer.push("", 1)
    assert "".join(written) == "".join(f"{i}," for i in range(40))


def interrupted(written):
    with SmoothWriter(written.append) as writer:
        for _ in range(5):
            writer.push("abcdefgh", 8)
        raise KeyboardInterrupt


def test_an_interrupt_lets_out_what_is_left():
    written = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(written)
    assert "".join(written) == "abcdefgh" * 5


def broken(text):
    raise BrokenPipeError


def push_to(write):
    with SmoothWriter(write) as writer:
        writer.push("text", 1)


def test_an_error_of_the_reader_reaches_the_one_who_writes():
    with pytest.raises(BrokenPipeError):
        push_to(broken)
