"""Smooth release: text that arrives in bursts leaves at the rate at which it came. No threads here.

Drafted text comes a block at a time. A pacer hands it on piece by piece, so that a reader sees it
flow; nothing is changed, dropped or reordered, and nothing waits longer than the bound.
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

MAX_DELAY = 0.25
"""Seconds that a piece waits at most."""
WINDOW = 8
"""Bursts whose rate is the recent rate."""


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    at: float


class Pacer:
    """Spreads bursts over the time until the next one is expected.

    All times are seconds of one clock, which the caller reads.
    """

    def __init__(self, max_delay: float = MAX_DELAY) -> None:
        self._max_delay = max_delay
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)
        self._pieces: deque[_Piece] = deque()
        self._last_at = 0.0

    @property
    def next_at(self) -> float | None:
        """When the next piece leaves; None while there is none."""
        return self._pieces[0].at if self._pieces else None

    def push(self, text: str, num_tokens: int, now: float) -> None:
        """Take a burst of text that arrived now; it leaves in as many pieces as it has tokens."""
        self._arrivals.append((now, num_tokens))
        interval = self._seconds_per_token()
        for index, piece in enumerate(_split(text, num_tokens)):
            # The first leaves when the burst before is out; none overtakes, none is too late.
            at = max(now, self._last_at + interval) if index else max(now, self._last_at)
            self._last_at = min(at, now + self._max_delay)
            self._pieces.append(_Piece(piece, self._last_at))

    def _seconds_per_token(self) -> float:
        """Recent seconds a token; 0 before the second burst."""
        (first, _), (last, _) = self._arrivals[0], self._arrivals[-1]
        # The first burst's tokens came before the time that is looked at.
        num_tokens = sum(num for _, num in self._arrivals) - self._arrivals[0][1]
        return (last - first) / num_tokens if num_tokens else 0.0

    def pop(self, now: float) -> str:
        """All text whose time has come."""
        texts = []
        while self._pieces and self._pieces[0].at <= now:
            texts.append(self._pieces.popleft().text)
        return "".join(texts)


def _split(text: str, num_pieces: int) -> list[str]:
    """Cut a text into pieces of nearly equal length, at most `num_pieces` of them, none empty."""
    num_pieces = max(1, min(num_pieces, len(text)))
    ends = [len(text) * i // num_pieces for i in range(num_pieces + 1)]
    return [text[start:end] for start, end in pairwise(ends)]
