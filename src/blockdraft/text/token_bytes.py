"""The bytes that a token stands for; a character may be split over several tokens."""

import re

from blockdraft.text.tokenizer import Tokenizer

_WORD_START = "\u2581"
_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies made by SentencePiece write a single byte."""


class TokenBytes:
    """Looks up tokens of a tokenizer, byte-level BPE or SentencePiece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        self._backend = backend
        self._special = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        decoder = backend.decoder
        state = b"" if decoder is None else decoder.__getstate__()
        self._byte_of = _byte_of_letter() if b'"ByteLevel"' in state else None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that only pads the vocabulary."""
        if token_id in self._special:
            return self._special[token_id].encode()
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self._byte_of is not None:
            return bytes(self._byte_of[letter] for letter in name if letter in self._byte_of)
        if spelled := _SPELLED_BYTE.fullmatch(name):
            return bytes.fromhex(spelled[1])
        return name.replace(_WORD_START, " ").encode()

    def text_of(self, token_id: int) -> str:
        """The text of a token; a part of a character is spelled, as in bytes:\\xe2\\x82."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter that can be seen (GPT-2's alphabet).

    Visible letters of Latin-1 stand for themselves, the other bytes for the letters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in visible}
    others = [byte for byte in range(256) if byte not in set(visible)]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}
