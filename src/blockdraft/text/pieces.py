"""What each token of a text adds to it, and how a token is shown that is in no text."""

from collections.abc import Sequence

from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.token_bytes import TokenBytes
from blockdraft.text.tokenizer import Tokenizer

_WORD_START = "\u2581"
"""Vocabularies made by SentencePiece write a space at the start of a word so."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no character."""

_CONTROLS = frozenset(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They turn the order of the text behind them, that of others on the line too."""
_SIGNS = {"\n": "⏎", "\t": "⇥", " ": "␣"}


def text_pieces(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> list[str]:
    """The text that each token adds behind the prompt; joined they are the whole text.

    A character of several tokens counts for the last of them. Special tokens add nothing.
    """
    text = Detokenizer(tokenizer, prompt_ids=prompt_ids)
    pieces = []
    for index, token_id in enumerate(token_ids):
        text.push(token_id)
        if index == len(token_ids) - 1:
            text.close()
        pieces.append(text.read())
    return pieces


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's own text; its name where it has none, as special tokens.

    What is no whole character is spelled, as in \\xe2\\x82: all of these would look the same.
    """
    name = tokenizer.backend.id_to_token(token_id)
    if name is None:
        return f"<{token_id}>"  # vocabularies are padded
    text = tokenizer.decode([token_id])
    if not text:
        return name
    if _REPLACEMENT in text:
        text = TokenBytes(tokenizer).bytes_of(token_id).decode(errors="backslashreplace")
    # A decoder takes the first space of a text away, and here every token is the first.
    return f" {text}" if name.startswith(_WORD_START) and not text.startswith(" ") else text


def visible(label: str) -> str:
    """A token on one line: what cannot be seen is shown by a sign, as is a space at an end."""
    signs = [_SIGNS.get(sign, sign) if sign != " " else sign for sign in printable(label)]
    for end in (0, -1):
        if signs and signs[end] == " ":
            signs[end] = _SIGNS[" "]
    return "".join(signs)


def printable(text: str) -> str:
    """Text that commands no terminal: control characters but line ends and tabs are spelled out.

    So are the marks of a direction of writing.
    """
    return "".join(map(_printable, text))


def _printable(sign: str) -> str:
    if sign in _DIRECTIONS:
        return f"\\u{ord(sign):04x}"
    if sign in _CONTROLS and sign not in "\n\t":
        return f"\\x{ord(sign):02x}"
    return sign
