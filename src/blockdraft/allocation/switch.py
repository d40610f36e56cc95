"""When drafting goes on and off, and when something else is tried. No torch."""

import math

# Switching.
MARGIN = 0.05
_LARGEST_MARGIN = 0.24
"""Believed gain that switches drafting on. Doubles when that soon proves to be an error."""
_SOON = 256
_MARGIN_STEPS = 1024
"""Steps in which a raised margin falls back by a factor e."""
_PATIENCE = 8
"""Steps in a row without a gain that switch drafting off. A request's last steps have none."""
_MEASURED_STEPS = 64
"""Steps that the measured gain looks back, half of which it must have seen."""

# Probing.
_PROBE_SHARE = 1 / 256
"""Share of the time that probes may cost: what is predicted is paid at first, then what it was."""
_FIRST_BUDGET = 0.05
_LARGEST_BUDGET = 0.25
"""Seconds that probes may cost at first, and that they may save up."""
_SAVED_STEPS = 8
"""Plain steps that they may save up instead, where steps are long."""
_FIRST_WAIT = 4
"""Steps between probes: doubles after a failure, up to where probes like the last take half of
their share of the time, and starts again after a success."""
_LONGEST_WAIT = 256
"""Steps between probes where none can be paid, or nothing could come of one."""


class Switch:
    """Whether drafting is on, with hysteresis."""

    def __init__(self) -> None:
        self.on = False
        self.num_switches = 0
        self._num_steps = 0
        """Since the last switch."""
        self._num_plain = 0
        """Steps in a row in which plain decoding was best."""
        self._margin = MARGIN
        self._worth = self._seconds = 0.0

    def update(self, gain: float) -> None:
        """Take the believed gain of the best plan of the next step, a ratio of rates."""
        self._num_steps += 1
        self._margin -= (self._margin - MARGIN) / _MARGIN_STEPS
        self._num_plain = 0 if gain > 1 else self._num_plain + 1
        if not self.on and gain >= 1 + self._margin:
            self._flip()
        elif self.on and (self._num_plain >= _PATIENCE or self._measured_loss()):
            if self._num_steps < _SOON:
                self._margin = min(2 * self._margin, _LARGEST_MARGIN)
            self._flip()

    def measure(self, worth: float, seconds: float) -> None:
        """Take predicted seconds: of a drafted step, and of plain decoding for its tokens."""
        kept = 1 - 1 / _MEASURED_STEPS
        self._worth = kept * self._worth + worth
        self._seconds = kept * self._seconds + seconds

    def _measured_loss(self) -> bool:
        return self._num_steps >= _MEASURED_STEPS // 2 and self._worth < self._seconds

    def _flip(self) -> None:
        self.on = not self.on
        self.num_switches += 1
        self._num_steps = self._num_plain = 0
        self._worth = self._seconds = 0.0


class Probes:
    """When to probe: rarer with each failure, and within a budget of seconds."""

    def __init__(self) -> None:
        self.num_probes = 0
        self._budget = _FIRST_BUDGET
        self._wait = self._left = _FIRST_WAIT
        self._longest_wait = float(_FIRST_WAIT)

    def pass_step(self, plain_seconds: float) -> None:
        """Earn a share of the step about to run."""
        self._left -= 1
        saved = max(_LARGEST_BUDGET, _SAVED_STEPS * plain_seconds)
        self._budget = min(self._budget + _PROBE_SHARE * plain_seconds, saved)

    @property
    def due(self) -> bool:
        """True once the wait is over."""
        return self._left <= 0

    def afford(self, loss: float, plain_seconds: float) -> bool:
        """Pay a probe that is predicted to lose so many seconds, or wait until it can be paid."""
        if loss > self._budget:
            missing = (loss - self._budget) / (_PROBE_SHARE * plain_seconds)
            self._left = min(math.ceil(missing), _LONGEST_WAIT)
            return False
        self._budget -= loss
        self._longest_wait = 2 * loss / (_PROBE_SHARE * plain_seconds)
        self.num_probes += 1
        return True

    def postpone(self) -> None:
        """Nothing could come of it."""
        self._wait = self._left = min(2 * self._wait, _LONGEST_WAIT)

    def settle(self, success: bool, saving: float) -> None:
        """Take the outcome of the probe: it lost `saving` seconds less than was paid."""
        self._budget += saving
        longest = max(_FIRST_WAIT, int(self._longest_wait))
        self._wait = _FIRST_WAIT if success else min(2 * self._wait, longest)
        self._left = self._wait

    def hurry(self) -> None:
        """Probe soon: there is a new text, or more room."""
        self._wait = _FIRST_WAIT
        self._left = min(self._left, self._wait)
