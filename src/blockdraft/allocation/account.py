"""What drafting has gained or lost against plain decoding, and what it may lose. No torch."""

_SHARE = 1 / 100
"""Of the time that passes, what drafting may lose."""
_FIRST_STEPS, _MOST_STEPS = 8.0, 32.0
"""Credit to begin with, and the most of it, in plain steps: earlier gains excuse no long loss."""
_MOST_DEBT = 1.0
"""In plain steps. A moment in which the machine stood still is not to keep drafting from all that
follows: at _SHARE this is paid back in 100 plain steps."""
_TRY_SHARE = 1 / 2
"""A step that is expected to lose takes at most so much of the credit. The rest is for steps that
are expected to gain, and have bad luck."""
_FIRST_CONTROL, _CONTROL_STEPS = 4, 126
"""After so many drafted steps come two plain ones, of which the second is learned from. Each time
it is after twice as many, until one step in 64 is plain: the cost of plain decoding must be known
soon, and stay known, since all is compared with it."""


class Account:
    """One for an engine: seconds that drafting may still lose.

    A drafted step books its seconds less what its tokens would have cost plainly. Over any time
    drafting loses at most a share of it and what the account held, whatever was predicted.
    """

    def __init__(self) -> None:
        self.credit = 0.0
        self._num_drafted, self._control_after = 0, _FIRST_CONTROL
        self._is_new = True

    def open_step(self, plain_seconds: float) -> None:
        """Take the seconds of a plain step in place of the one about to run."""
        if self._is_new:
            self._is_new, self.credit = False, _FIRST_STEPS * plain_seconds
        self.credit = max(self.credit, -_MOST_DEBT * plain_seconds) + _SHARE * plain_seconds
        self.credit = min(self.credit, _MOST_STEPS * plain_seconds)

    def book(self, seconds: float) -> None:
        """Take what a step has lost, or gained where it is negative."""
        self.credit -= seconds

    @property
    def may_lose(self) -> bool:
        """True while anything may be spent that is not sure to come back."""
        return self._is_new or self.credit > 0

    def allows(self, loss: float) -> bool:
        """True if a step may draft that is expected to gain in the end, and loses so much at once.

        It may lose all there is: that is what a prompt costs whose features were never projected.
        """
        return self.credit > max(loss, 0.0)

    def allows_try(self, loss: float) -> bool:
        """True if a step may draft that is expected to lose so much."""
        return self.credit > 0 and loss <= _TRY_SHARE * self.credit

    def credit_for_try(self, loss: float) -> float:
        """The credit from which on such a step may be drafted."""
        return max(loss, 0.0) / _TRY_SHARE

    @property
    def wants_control(self) -> bool:
        """True if the next step should be plain."""
        return self._num_drafted >= self._control_after

    def count(self, *, drafted: bool, is_control: bool) -> None:
        """A step has ended. is_control: it tells what plain steps cost."""
        if is_control and self.wants_control:
            self._control_after = min(2 * self._control_after, _CONTROL_STEPS)
        self._num_drafted = 0 if is_control else self._num_drafted + drafted
