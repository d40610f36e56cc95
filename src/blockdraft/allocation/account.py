"""What drafting has gained or lost against plain decoding, and what it may lose. No torch."""

_SHARE = 1 / 100
"""The share of the time that drafting may lose."""
_FIRST_STEPS, _MOST_STEPS = 8.0, 32.0
"""The credit at the start and the most credit, in plain steps. It is bounded so that earlier gains
do not pay for a long loss."""
_MOST_DEBT = 1.0
"""In plain steps. It is bounded so that one stall of the machine does not stop drafting for long:
at _SHARE this much is paid back in 100 plain steps."""
_TRY_SHARE = 1 / 2
"""A step that is expected to lose may take at most this share of the credit. The rest is for steps
that are expected to gain and have bad luck."""
_FIRST_CONTROL, _CONTROL_STEPS = 4, 126
"""After _FIRST_CONTROL drafted steps come two plain ones; the cost of a plain step is learned from
the second. The next two come after twice as many drafted steps, and so on up to _CONTROL_STEPS, so
that one step in 64 is plain. All is compared with the cost of plain decoding, so it must be known
soon and stay known."""


class Account:
    """The seconds that drafting may still lose in an engine: its `credit`.

    A drafted step books its seconds less those that plain decoding takes for as many tokens. So
    over any time drafting loses at most a share of that time, the credit at its start, and what
    single steps lose beyond _MOST_DEBT, however wrong the predictions are.
    """

    def __init__(self) -> None:
        self.credit = 0.0
        self._num_drafted, self._control_after = 0, _FIRST_CONTROL
        self._is_new = True

    def open_step(self, plain_seconds: float, num_steps: int = 1) -> None:
        """Add credit for the step about to run, and for those before it that were not opened.

        plain_seconds: what it would take undrafted.
        """
        if self._is_new:
            self._is_new, self.credit = False, _FIRST_STEPS * plain_seconds
        self.credit = max(self.credit, -_MOST_DEBT * plain_seconds)
        self.credit += num_steps * _SHARE * plain_seconds
        self.credit = min(self.credit, _MOST_STEPS * plain_seconds)

    def book(self, seconds: float) -> None:
        """Take off the seconds that a step has lost; negative if it has gained."""
        self.credit -= seconds

    @property
    def may_lose(self) -> bool:
        """True while a step may be drafted that could lose."""
        return self._is_new or self.credit > 0

    def allows(self, loss: float) -> bool:
        """True if a step may draft that loses so many seconds, and is expected to gain in the end.

        It may lose the whole credit. A draft behind a long prompt is such a step: the features of
        the prompt are projected at once, and serve many later drafts.
        """
        return self.credit > max(loss, 0.0)

    def allows_try(self, loss: float) -> bool:
        """True if a step may draft that is expected to lose so many seconds, to learn from it."""
        return self.credit > 0 and loss <= _TRY_SHARE * self.credit

    def credit_for_try(self, loss: float) -> float:
        """The least credit with which `allows_try` holds."""
        return max(loss, 0.0) / _TRY_SHARE

    @property
    def wants_control(self) -> bool:
        """True if the next step should be plain."""
        return self._num_drafted >= self._control_after

    def control_soon(self) -> None:
        """What plain decoding costs has changed: plain steps are as frequent again as at first."""
        self._control_after = _FIRST_CONTROL

    def count(self, *, drafted: bool, is_control: bool) -> None:
        """A step has ended. is_control: the cost of a plain step is learned from it."""
        if is_control and self.wants_control:
            self._control_after = min(2 * self._control_after, _CONTROL_STEPS)
        self._num_drafted = 0 if is_control else self._num_drafted + drafted
