"""Writing streamed text smoothly: a thread lets it go while the engine works on."""

import threading
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

from blockdraft.text.pacing import Pacer


class SmoothWriter:
    """Writes text at its recent rate; on leaving the `with`, everything has been written.

    An error of `write` ends the writing, and is raised by the next `push` or on leaving. An
    exception inside the `with` lets out at once what is left.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._pacer = Pacer()
        self._changed = threading.Condition()
        self._is_closing = self._is_hurried = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="smooth-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_closing, self._is_hurried = True, error is not None
            self._changed.notify()
        self._thread.join()
        if error is None:
            self._raise_error()

    def push(self, text: str, num_tokens: int) -> None:
        """Take the text of a chunk."""
        self._raise_error()
        if text:
            with self._changed:
                self._pacer.push(text, num_tokens, monotonic())
                self._changed.notify()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (text := self._wait_for_text()) is not None:
                self._write(text)
        except Exception as error:  # whatever it is, it belongs to the thread that pushes
            self._error = error

    def _wait_for_text(self) -> str | None:
        """The next text whose time has come; None when all is out."""
        with self._changed:
            while True:
                at = self._pacer.next_at
                if at is None and self._is_closing:
                    return None
                if at is not None and (self._is_hurried or at <= monotonic()):
                    return self._pacer.pop(float("inf") if self._is_hurried else monotonic())
                self._changed.wait(None if at is None else max(0.0, at - monotonic()))
