"""How many tokens a text has at least, by its length: millions of letters are not worth tokenizing.

The bound is certain, or there is none. It holds where every letter ends up in some token: in
byte-level BPE, and in BPE that spells what it does not know in bytes.
"""

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from blockdraft.text.vocabulary import byte_of_letter

_UTF8_BYTES = 4
"""Of a letter at most."""
_KEPT = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})
"""Pre-tokenizers that take no letter away, if none of them removes what it splits at."""
_NORMALIZERS = frozenset({"NFC", "NFKC", "Prepend", "Replace"})
"""Normalizers that give a whole text no more letters than its parts between added tokens."""


class LeastTokens:
    """Bounds the number of tokens of texts from below."""

    def __init__(self, backend: Backend) -> None:
        self._normalizer = backend.normalizer
        types = {part["type"] for part in _parts(backend.pre_tokenizer)}
        self._is_byte_level = "ByteLevel" in types
        vocab = backend.get_vocab(with_added_tokens=False)
        # A byte without a token is dropped.
        self._dropped = bytes(byte for name, byte in byte_of_letter().items() if name not in vocab)
        self._longest = self._longest_token(backend, vocab) if _keeps_letters(backend) else None

    def of(self, text: str, most: int) -> int:
        """At least so many tokens, from `most` on: 0 for a text that may have no more than that."""
        if self._longest is None or len(text) * _UTF8_BYTES <= most * self._longest:
            return 0
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        least = -(-self._size(text) // self._longest)
        return least if least > most else 0

    def _size(self, text: str) -> int:
        """Bytes or letters, as tokens are made of them."""
        if not self._is_byte_level:
            return len(text)
        return len(text.encode().translate(None, delete=self._dropped))

    def _longest_token(self, backend: Backend, vocab: dict[str, int]) -> int:
        lengths = [len(name) for name in vocab]
        for token in backend.get_added_tokens_decoder().values():
            forms = [token.content]
            if self._normalizer is not None:
                forms.append(self._normalizer.normalize_str(token.content))
            lengths += [len(form.encode()) for form in forms]
        return max(1, *lengths)


def _keeps_letters(backend: Backend) -> bool:
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    # Those take the spaces beside them along.
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return False
    parts = _parts(backend.pre_tokenizer)
    if any(part["type"] not in _KEPT or part.get("behavior") == "Removed" for part in parts):
        return False
    for part in _parts(backend.normalizer):
        # A longer pattern may be found across an added token, where none is replaced.
        of_letter = len(part.get("pattern", {}).get("String", "")) == 1
        if part["type"] not in _NORMALIZERS or (part["type"] == "Replace" and not of_letter):
            return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return model.unk_token is None or not model.fuse_unk
    spelled = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return bool(model.byte_fallback) and None not in spelled


def _parts(component: Any) -> list[dict[str, Any]]:
    """The settings of a pre-tokenizer or normalizer, of each part of a sequence."""
    return [] if component is None else list(_flat(json.loads(component.__getstate__())))


def _flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for part in state.get("pretokenizers", state.get("normalizers", [])):
        yield from _flat(part)
