"""The value of an argument as JSON, where a model writes it in another way."""

import json
import re
from collections.abc import Mapping

from blockdraft.text.call_syntax import quoted
from blockdraft.text.json_types import Schema, schema_types, value_types
from blockdraft.text.tool_calls import read_json

_SPELLINGS = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Python's words for these are common where JSON's are meant."""
_WORDS = {"True": "true", "False": "false", "None": "null", "(": "[", ")": "]"}
_TOKEN = re.compile(
    r"""'{3}(?:[^'\\]++|\\.|'(?!''))*+'{3}
    |"{3}(?:[^"\\]++|\\.|"(?!""))*+"{3}
    |'(?:[^'\\]++|\\.|'(?!\s*(?:[,)\]}:]|\Z)))*+'  # a quote with other letters behind it
    |"(?:[^"\\]++|\\.|"(?!\s*(?:[,)\]}:]|\Z)))*+"     # belongs to the text
    |\b(?:True|False|None)\b
    |,(?=\s*[)\]}])
    |(?<=\d)_(?=\d)
    |[()]""",
    re.S | re.X,
)
"""What Python writes in another way than JSON."""
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.S)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}


def argument_types(parameters: Schema, name: str) -> frozenset[str]:
    """The types that a function's schema allows an argument; none if it does not tell."""
    properties = parameters.get("properties")
    known = properties.get(name) if isinstance(properties, Mapping) else None
    return schema_types(known, parameters)


def from_text(text: str, types: frozenset[str]) -> str:
    """A value without quotes: what it is written as, if the types allow that, or else a string."""
    bare = text.strip()
    word = _SPELLINGS.get(bare.lower())
    if word is not None and (word == bare or types & value_types(json.loads(word))):
        bare = word
    try:
        found = value_types(read_json(bare))
    except (ValueError, RecursionError):
        return quoted(text)
    return quoted(text) if "string" in types and not found & types else bare


def from_python(text: str, types: frozenset[str]) -> str:
    """A literal of Python or JSON, as a text where the types want that; what is neither is one."""
    bare = text.strip()
    written = _TOKEN.sub(_token_as_json, bare)
    try:
        found = read_json(written)
    except (ValueError, RecursionError):
        return quoted(bare)
    if not types or value_types(found) & types:
        return written
    if isinstance(found, str):
        return from_text(found, types)
    return quoted(bare) if "string" in types else written


def _token_as_json(token: re.Match[str]) -> str:
    if token[0][0] not in "'\"":
        return _WORDS.get(token[0], "")  # a comma before an end is nothing, nor is _ in a number
    width = 3 if token[0].startswith(token[0][0] * 3) else 1
    text = _ESCAPE.sub(_unescaped, token[0][width:-width])
    # JSON's escapes may spell a letter as two surrogates; half of one is no text.
    return quoted(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _unescaped(escape: re.Match[str]) -> str:
    """The letter that is meant; as in Python an unknown escape stands for itself."""
    digits = escape[1] or escape[2] or escape[3]
    if not digits:
        return _ESCAPES.get(escape[4], escape[0])
    number = int(digits, 16)
    return chr(number) if number <= 0x10FFFF else escape[0]
