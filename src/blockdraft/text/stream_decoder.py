"""Token ids to text, one at a time, with bounded work for each of them."""

from codecs import utf_8_decode
from collections.abc import Sequence

from blockdraft.text.tokenizer import Tokenizer

NUM_PRIMING_TOKENS = 6
"""Last tokens of the prompt that may be the context of the first token: they decide about a space
at the start."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """The text that is complete with each token; joined, it is what decode makes of all of them.

    A character of several tokens comes with the last of them. Bytes that belong to no character
    become U+FFFD as in decode: with a byte-level vocabulary one for what there is of a character,
    with tokens that spell bytes (<0xE2>) one for each byte.

    `shown_ids` are special tokens that are written out here.

    In one case the text is not decode's. Where tokens spell bytes, decode turns all bytes of a run
    into U+FFFD if a single one fits nowhere, the newlines and whole characters before it too. Those
    have been handed out by then, and stay; what follows in the run is as in decode.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.vocabulary
        self._shown_ids = shown_ids
        self._begun = b""
        self._is_run_broken = False
        tail = prompt_ids[-NUM_PRIMING_TOKENS:]
        self._context = [one for one in tail if self._vocabulary.has_text(one)][-1:]

    def push(self, token_id: int) -> str:
        """Take one token; the text that it completes."""
        if token_id in self._shown_ids:
            return self.close() + self._tokenizer.decode_all([token_id])
        if not self._vocabulary.has_text(token_id):
            return ""
        if self._vocabulary.is_byte_level:
            return self._join_bytes(self._vocabulary.letters_as_bytes(token_id))
        spelled = self._vocabulary.spelled_byte(token_id)
        text = self._end_run() + self._word(token_id) if spelled is None else self._spell(spelled)
        self._context = [token_id]
        return text

    def close(self) -> str:
        """No token follows: the bytes of a character that was never completed."""
        if not self._vocabulary.is_byte_level:
            return self._end_run()
        text, _ = utf_8_decode(self._begun, "replace", True)
        self._begun = b""
        return text

    def _join_bytes(self, new: bytes) -> str:
        data = self._begun + new
        text, num_used = utf_8_decode(data, "replace", False)
        self._begun = data[num_used:]
        return text

    def _spell(self, byte: bytes) -> str:
        """One more byte of a run of spelled bytes, which is text as a whole or not at all."""
        data = self._begun + byte
        if not self._is_run_broken:
            try:
                text, num_used = utf_8_decode(data, "strict", False)
            except UnicodeDecodeError:
                self._is_run_broken = True
            else:
                self._begun = data[num_used:]
                return text
        self._begun = b""
        return _REPLACEMENT * len(data)

    def _end_run(self) -> str:
        text = _REPLACEMENT * len(self._begun)
        self._begun, self._is_run_broken = b"", False
        return text

    def _word(self, token_id: int) -> str:
        """What a token adds behind the one before it, which decides about spaces between them."""
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode([*self._context, token_id])
        if whole.startswith(before):
            return whole[len(before) :]
        return self._tokenizer.decode([token_id])
