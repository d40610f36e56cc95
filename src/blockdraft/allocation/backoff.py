"""Pauses between attempts that seldom succeed. No torch."""


class Backoff:
    """Pauses that double with each attempt, from `first` steps up to `most`, until one succeeds."""

    def __init__(self, first: int, most: int) -> None:
        self._first, self._most = first, most
        self._pause, self._next = first, 0

    def is_due(self, step: int) -> bool:
        """True if the pause after the last attempt is over."""
        return step >= self._next

    def attempt(self, step: int) -> None:
        """An attempt is made in this step; a pause begins, and the next one will be longer."""
        self._next = step + self._pause
        self._pause = min(2 * self._pause, self._most)

    def succeed(self) -> None:
        """The attempt succeeded: the next pause is the shortest again."""
        self._pause = self._first

    def restart(self) -> None:
        """No pause now, and the shortest behind the next attempt."""
        self._pause, self._next = self._first, 0

    def wait_until(self, step: int) -> None:
        """Make the pause last until this step at least."""
        self._next = max(self._next, step)
