import random
from time import perf_counter

import pytest

from blockdraft.text.stop_strings import StopStrings


def slow_search(stops, pieces):
    """The index of the piece that completes a string first, and where the text is cut."""
    text = ""
    for index, piece in enumerate(pieces):
        old_len, text = len(text), text + piece
        starts = [
            start
            for stop in stops
            if (start := text.find(stop, max(0, old_len - len(stop) + 1))) >= 0
        ]
        if starts:
            return index, min(starts)
    return None


def slow_held(stops, text):
    ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(ends, default=0)


def search(stops, pieces):
    found, num_before = StopStrings(stops), 0
    for index, piece in enumerate(pieces):
        start = found.push(piece)
        if start is not None:
            return index, num_before + start
        num_before += len(piece)
        assert found.num_held == slow_held(stops, "".join(pieces[: index + 1]))
    return None


def test_it_finds_what_a_slow_search_finds():
    draw = random.Random(0)

    def text(longest):
        return "".join(draw.choice("ab") for _ in range(draw.randrange(longest)))

    num_found = 0
    for _ in range(3000):
        stops = tuple("a" * draw.randrange(3) + text(6) + "b" for _ in range(draw.randrange(4)))
        pieces = [text(4) for _ in range(12)]
        expected = slow_search(stops, pieces)
        assert search(stops, pieces) == expected, (stops, pieces)
        num_found += expected is not None
    assert 1000 < num_found < 3000


@pytest.mark.parametrize("piece", ["a", "b"])
def test_long_strings_cost_no_more_than_short_ones(piece):
    """A search that looks at them as a whole takes a minute."""
    found = StopStrings(tuple("a" * 10_000 + str(number) for number in range(64)))
    started_at = perf_counter()
    for _ in range(2000):
        assert found.push(piece) is None
    assert found.num_held == (2000 if piece == "a" else 0)
    assert perf_counter() - started_at < 5.0


def test_it_tells_which_string_it_has_found():
    for stops, text, expected in [
        (("zz", "bc"), "abcd", "bc"),
        (("bcd", "cd"), "abcd", "bcd"),
        (("b", "bc"), "abcd", "b"),
        (("x",), "abcd", None),
    ]:
        found = StopStrings(stops)
        found.push(text)
        assert found.found == expected
