"""How likely drafts are kept, position by position, as learned from verification."""

_FIRST_RATE = 0.6
"""What is believed of a drafter that was never tried: enough to give it a hearing."""
_START_WEIGHT = 4.0
"""Observations that the first belief counts for."""
_FADING_STEPS = 8
"""A rate loses the weight of one observation in so many steps without one."""


class Acceptance:
    """Rates of acceptance by position, of one sequence or of all.

    A rate is the share of drafts that were kept where all before them were. Positions that were
    never tested are believed to be like the last one that was.
    """

    def __init__(self, max_depth: int, memory: float) -> None:
        self.rates = [_FIRST_RATE] * max_depth
        self._num_tested = 0
        self._weights = [_START_WEIGHT] * max_depth
        self._memory = memory

    def start(self, memory: float) -> "Acceptance":
        """The same beliefs, ready to be changed by new observations."""
        acceptance = Acceptance(len(self.rates), memory)
        acceptance.rates = list(self.rates)
        acceptance._num_tested = self._num_tested
        return acceptance

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from one block. What comes behind the first miss was not tested."""
        num_tested = min(num_drafted, num_accepted + 1)
        for i in range(num_tested):
            weight = self._weights[i] = min(self._weights[i] + 1, self._memory)
            self.rates[i] += ((i < num_accepted) - self.rates[i]) / weight
        self._num_tested = max(self._num_tested, num_tested)
        num_untested = len(self.rates) - self._num_tested
        self.rates[self._num_tested :] = [self.rates[self._num_tested - 1]] * num_untested

    def fade(self, num_steps: int) -> None:
        """Trust the rates less after steps without a test, so that news counts for more."""
        loss = num_steps / _FADING_STEPS
        self._weights = [max(weight - loss, _START_WEIGHT) for weight in self._weights]
