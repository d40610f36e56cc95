"""How often a guess of some kind was right, learned from what the target chose."""

from collections.abc import Sequence

LEAST_PROBABILITY = 0.1
"""Of a path that is worth proposing. A row of the target's forward is worth more elsewhere, or is
better not computed."""

_MEMORY, _REQUEST_MEMORY = 500.0, 32.0
"""Observations of a bucket that count, of all requests and of one; older ones fade."""
_BELIEF = 8.0
"""The prior counts as so many observations, and for one request so does what all others show."""


class Rates:
    """The share of guesses that were right, by bucket; at first the prior.

    A bucket is a kind of guess that its drafter tells apart, such as the length of a match.
    """

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
    """The same for one request: its own guesses, mixed with those of all requests."""

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
        """For guesses in a row, the probability that each and all before it are right."""
        probabilities, probability = [], 1.0
        for bucket in buckets:
            probability *= self[bucket]
            probabilities.append(probability)
        return probabilities

    def likely_path(self, buckets: Sequence[int]) -> list[float]:
        """The same, without those below LEAST_PROBABILITY."""
        path = self.path(buckets)
        return path[: sum(probability >= LEAST_PROBABILITY for probability in path)]
