"""How often a guess of some kind was right, learned from what the target chose."""

from collections.abc import Sequence

_MEMORY = 500.0
"""Observations of a bucket that count; older ones fade."""
_REQUEST_MEMORY = 32.0
_BELIEF = 8.0
"""Observations of its own that weigh as much as those of all other requests, or as a prior."""


class Rates:
    """Shares of right guesses by bucket, beginning with a prior."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._right = [_BELIEF * rate for rate in prior]
        self._num = [_BELIEF] * len(prior)

    def __getitem__(self, bucket: int) -> float:
        return self._right[bucket] / self._num[bucket]

    def record(self, bucket: int, is_right: bool) -> None:
        """Count one guess."""
        fading = min(1.0, _MEMORY / (self._num[bucket] + 1.0))
        self._right[bucket] = fading * (self._right[bucket] + is_right)
        self._num[bucket] = fading * (self._num[bucket] + 1.0)

    def of_request(self) -> "RequestRates":
        """The rates of a request that begins."""
        return RequestRates(self, len(self._num))


class RequestRates:
    """Those of one request: what it has shown itself, beside what is known of all."""

    def __init__(self, everyone: Rates, num_buckets: int) -> None:
        self._everyone = everyone
        self._right = [0.0] * num_buckets
        self._num = [0.0] * num_buckets

    def __getitem__(self, bucket: int) -> float:
        right = self._right[bucket] + _BELIEF * self._everyone[bucket]
        return right / (self._num[bucket] + _BELIEF)

    def record(self, bucket: int, is_right: bool) -> None:
        """Count one guess, here and for all."""
        self._everyone.record(bucket, is_right)
        fading = min(1.0, _REQUEST_MEMORY / (self._num[bucket] + 1.0))
        self._right[bucket] = fading * (self._right[bucket] + is_right)
        self._num[bucket] = fading * (self._num[bucket] + 1.0)

    def path(self, buckets: Sequence[int]) -> list[float]:
        """Of guesses that follow each other: that one and all before it are right."""
        probabilities, probability = [], 1.0
        for bucket in buckets:
            probability *= self[bucket]
            probabilities.append(probability)
        return probabilities
