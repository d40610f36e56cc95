"""What the decoder of a tokenizer sees in each token: a word, bytes, or nothing."""

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Backend

_SPELLED_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies made by SentencePiece write a single byte."""


class Vocabulary:
    """The tokens of a tokenizer as its decoder reads them.

    `is_byte_level`: every token stands for bytes, written in GPT-2's alphabet.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}
        kinds = _decoder_kinds(backend)
        self.is_byte_level = "ByteLevel" in kinds
        self._has_spelled_bytes = "ByteFallback" in kinds

    def has_text(self, token_id: int) -> bool:
        """False for special tokens, and for ids that only pad the vocabulary."""
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def letters_as_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary.

        Added tokens are read alike, as by the decoder, if they are written in the alphabet.
        """
        name, byte_of = self._name(token_id), byte_of_letter()
        try:
            return bytes(byte_of[letter] for letter in name)
        except KeyError:
            return name.encode()

    def spelled_byte(self, token_id: int) -> bytes | None:
        """The byte that a token spells, where the decoder joins such tokens to characters."""
        if not self._has_spelled_bytes:
            return None
        return spelled_byte(self._name(token_id))

    def _name(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""


def spelled_byte(name: str) -> bytes | None:
    """The byte that a token of this name spells, if it does."""
    spelled = _SPELLED_BYTE.fullmatch(name)
    return bytes.fromhex(spelled[1]) if spelled else None


@cache
def byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter that can be seen (GPT-2's alphabet).

    Visible letters of Latin-1 stand for themselves, the other bytes for the letters from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in visible}
    others = [byte for byte in range(256) if byte not in set(visible)]
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _decoder_kinds(backend: Backend) -> set[str]:
    """The types of all parts of the decoder."""
    if backend.decoder is None:
        return set()
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}
