"""Tokens to text, one at a time, and the search for stop strings in it."""

from collections.abc import Sequence

from blockdraft.text.stop_strings import StopStrings
from blockdraft.text.stream_decoder import StreamDecoder
from blockdraft.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sample, written while its tokens are committed.

    `push` is the sequence's stop scan: it is told every committed token, so where the text ends
    does not depend on how many tokens a step commits. `read` hands out text that is final:
    complete characters that cannot become part of a stop string any more. See StreamDecoder for
    bytes that are no text.

    Args:
        stop: strings that end the text; the text is cut before the one that begins first.
        stop_ids: tokens that end the sequence; they have no text.
        min_tokens: stop strings that begin before the `min_tokens`-th token do not count.
        shown_ids: special tokens that have text here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt_ids, shown_ids)
        self._stop = StopStrings(stop)
        self._stop_ids = stop_ids
        self._num_early_tokens = max(0, min_tokens - 1)
        self._is_closed = False
        self._texts: list[str] = []
        self._ends: list[int] = []
        self._num_written = 0
        self._unread = ""

    @property
    def text(self) -> str:
        """All of it, what may yet be cut off included."""
        return "".join(self._texts)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stop.found

    def push(self, token_id: int) -> bool:
        """Take one token; True if it completes a stop string."""
        is_silent = self._is_closed or token_id in self._stop_ids
        piece = "" if is_silent else self._decoder.push(token_id)
        self._texts.append(piece)
        self._num_written += len(piece)
        self._ends.append(self._num_written)
        self._unread += piece
        return not is_silent and self._is_stopped_by(piece)

    def _is_stopped_by(self, piece: str) -> bool:
        if self._num_early_tokens:
            self._num_early_tokens -= 1
            return False
        start = self._stop.push(piece)
        if start is None:
            return False
        self._cut(len(piece) - start)
        self._is_closed = True
        return True

    def _cut(self, num_characters: int) -> None:
        """Take so many characters off the end of the text, all of them unread."""
        self._unread = self._unread[: len(self._unread) - num_characters]
        for index in reversed(range(len(self._texts))):
            text = self._texts[index]
            self._texts[index] = text[: max(0, len(text) - num_characters)]
            num_characters -= len(text) - len(self._texts[index])
            if not num_characters:
                return

    def close(self) -> None:
        """No token follows: what was held back becomes final."""
        if self._is_closed:
            return
        self._is_closed = True
        if rest := self._decoder.close():
            self._texts[-1] += rest
            self._unread += rest

    def read(self) -> str:
        """The final text since the last call."""
        num_held = 0 if self._is_closed else self._stop.num_held
        end = len(self._unread) - num_held
        piece, self._unread = self._unread[:end], self._unread[end:]
        return piece

    def token_texts(self, start: int, stop: int) -> tuple[str, ...] | None:
        """What each of the tokens from `start` up to `stop` adds to the text; joined they are it.

        None while some of it may yet be cut off: not before `read` has handed it out. A character
        of several tokens counts for the last of them.
        """
        num_read = self._num_written - len(self._unread)
        if stop and not self._is_closed and self._ends[stop - 1] > num_read:
            return None
        return tuple(self._texts[start:stop])
