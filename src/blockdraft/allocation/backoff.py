"""How often is tried what seldom leads to anything. No torch."""


class Backoff:
    """Attempts that lead to nothing come ever more seldom.

    After the first so many steps pass, `first`, after each further one twice as many, up to `most`.
    """

    def __init__(self, first: int, most: int) -> None:
        self._first, self._most = first, most
        self._pause, self._next = first, 0

    def is_due(self, step: int) -> bool:
        """True if the pause behind the last attempt is over."""
        return step >= self._next

    def attempt(self, step: int) -> None:
        """Something was tried in this step."""
        self._next = step + self._pause
        self._pause = min(2 * self._pause, self._most)

    def succeed(self) -> None:
        """It led to something: the next pause is a short one."""
        self._pause = self._first

    def wait_until(self, step: int) -> None:
        """The pause lasts until then at least."""
        self._next = max(self._next, step)
