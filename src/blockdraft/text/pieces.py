"""What each token of a text adds to it, and how a token is shown that is in no text."""

from collections.abc import Sequence

from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.tokenizer import Tokenizer

_WORD_START = "\u2581"
"""Vocabularies made by SentencePiece write a space at the start of a word so."""

_CONTROLS = frozenset([*range(0x20), *range(0x7F, 0xA0)])
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
    """A token's own text; its name where it has none, as special tokens."""
    name = tokenizer.backend.id_to_token(token_id)
    if name is None:
        return f"<{token_id}>"  # vocabularies are padded
    text = tokenizer.decode([token_id])
    if not text:
        return name
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
    """Text that commands no terminal: control characters but line ends and tabs are spelled out."""
    return "".join(
        sign if sign in "\n\t" or ord(sign) not in _CONTROLS else f"\\x{ord(sign):02x}"
        for sign in text
    )
