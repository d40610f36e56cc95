"""Tokens to text, one at a time, and the search for stop strings in it."""

from collections.abc import Sequence
from itertools import pairwise

from tokenizers.decoders import DecodeStream

from blockdraft.text.tokenizer import Tokenizer

NUM_PRIMING_TOKENS = 6
"""Last tokens of the prompt that the decoder sees: they decide about a space at the start."""


class Detokenizer:
    """The text of one sample, written while its tokens are committed.

    `push` is the sequence's stop scan: it is told every committed token, so where the text ends
    does not depend on how many tokens a step commits. `read` hands out text that is final:
    complete characters that cannot become part of a stop string any more.

    Args:
        stop: strings that end the text; the text is cut before the one that begins first.
        stop_ids: tokens that end the sequence; they have no text.
        min_tokens: stop strings that begin before the `min_tokens`-th token do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = _primed_stream(tokenizer, prompt_ids)
        self._stop = stop
        self._stop_ids = stop_ids
        self._num_early_tokens = max(0, min_tokens - 1)
        self._undecoded: list[int] = []
        self._scan_from = 0
        self._num_read = 0
        self._is_closed = False
        self._ends: list[int] = []
        self.text = ""

    def push(self, token_id: int) -> bool:
        """Take one token; True if it completes a stop string."""
        is_stop = self._write(token_id)
        self._ends.append(len(self.text))
        return is_stop

    def _write(self, token_id: int) -> bool:
        if self._is_closed or token_id in self._stop_ids:
            return False
        piece = self._stream.step(self._tokenizer.backend, token_id)
        if piece is None:  # the middle of a character, or a special token
            self._undecoded.append(token_id)
            piece = ""
        else:
            self._undecoded.clear()
        return self._extend(piece)

    def _extend(self, piece: str) -> bool:
        old_len = len(self.text)
        self.text += piece
        if self._num_early_tokens:
            self._num_early_tokens -= 1
            self._scan_from = len(self.text)
            return False
        end = self._find_stop(old_len)
        if end is None:
            return False
        self.text = self.text[:end]
        self._undecoded.clear()
        self._is_closed = True
        return True

    def _find_stop(self, old_len: int) -> int | None:
        """Where the first stop string that ends behind `old_len` begins."""
        starts = []
        for stop in self._stop:
            start = self.text.find(stop, max(self._scan_from, old_len - len(stop) + 1))
            if start >= 0:
                starts.append(start)
        return min(starts, default=None)

    def close(self) -> None:
        """No token follows: what was held back becomes final."""
        if not self._is_closed:
            # The first bytes of a character that was never completed show as U+FFFD.
            self.text += self._tokenizer.decode(self._undecoded)
            self._undecoded.clear()
            self._is_closed = True
            if self._ends:
                self._ends[-1] = len(self.text)

    def read(self) -> str:
        """The final text since the last call."""
        end = len(self.text) if self._is_closed else len(self.text) - self._num_held_back()
        piece = self.text[self._num_read : end]
        self._num_read = max(self._num_read, end)
        return piece

    def token_texts(self, start: int, stop: int) -> tuple[str, ...] | None:
        """What each of the tokens from `start` up to `stop` adds to the text; joined they are it.

        None while some of it may yet be cut off: not before `read` has handed it out. A character
        of several tokens counts for the last of them.
        """
        if stop and not self._is_closed and self._ends[stop - 1] > self._num_read:
            return None
        borders = [self._ends[start - 1] if start else 0, *self._ends[start:stop]]
        return tuple(self.text[begin:end] for begin, end in pairwise(borders))

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        scanned = self.text[self._scan_from :]
        lengths = [
            length
            for stop in self._stop
            for length in range(1, min(len(stop), len(scanned) + 1))
            if scanned.endswith(stop[:length])
        ]
        return max(lengths, default=0)


def _primed_stream(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> DecodeStream:
    tail = list(prompt_ids[-NUM_PRIMING_TOKENS:])
    # A prompt that ends inside a character cannot prime: its text would come out with the answer.
    if tokenizer.decode(tail).endswith("\N{REPLACEMENT CHARACTER}"):
        tail = []
    return DecodeStream(ids=tail, skip_special_tokens=True)
