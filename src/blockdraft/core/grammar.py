"""What an answer must look like: a plain value, compiled by text/grammar.py."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from math import lcm
from typing import Any, Literal, Self, get_args

from blockdraft.core.errors import RequestError

_LARGEST_INTEGER = 2**53
"""Up to here llguidance keeps each integer of a schema; it rounds larger ones."""
_NUMBERS = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"
_LARGEST_MULTIPLE = 20_000
"""llguidance has a state for each remainder: with ten million it compiled for minutes and took
gigabytes, and nothing can stop it. With so many it takes 0.2 s and 10 MB."""
_COMBINING = frozenset({"allOf", "anyOf", "oneOf"})
_INLINE_SCHEMA = re.compile(r"%json\s*")
"""Begins a schema in a Lark rule; without one behind it, it is a part of a text or a comment."""

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the whole answer belongs to; the constructors below are the way to make one.

    `source` is the text of a JSON schema, a regular expression, a JSON list of strings, or a
    grammar in llguidance's variant of Lark, whose first rule is `start`. `parts` are grammars that
    its rules refer to, each as `@name`.

    Raises:
        RequestError: the kind is unknown, or the source is not even a text of its kind. What it
            means is checked when it is compiled.
    """

    kind: GrammarKind
    source: str
    parts: tuple[tuple[str, "Grammar"], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"the kind of grammar is {self.kind!r}; give one of {kinds}")
        if not isinstance(self.source, str):
            raise RequestError(f"the source of a grammar is {self.source!r:.60}; give text")
        _check_unicode(self.source)
        if self.kind == "json_schema":
            _check_schema(self.source)
        elif self.kind == "choice":
            _check_options(self.options)
        elif not self.source:
            name = "Lark grammar" if self.kind == "lark" else self.kind
            raise RequestError(f"the {name} is empty; it allows no answer, leave it out")
        elif self.kind == "lark":
            for schema in _inline_schemas(self.source):
                check_numbers(schema)

    @classmethod
    def json_object(cls) -> Self:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Self:
        """JSON that a schema accepts, given as a mapping or as its text; no reference leaves it."""
        return cls("json_schema", schema if isinstance(schema, str) else _to_json(schema))

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that matches a regular expression from start to end; without look-around."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Self:
        """One of several texts."""
        # A plain string would be taken for its letters.
        if isinstance(options, str | Mapping) or not isinstance(options, Iterable):
            raise RequestError(f"the choice is {options!r:.60}; give a list of texts")
        return cls("choice", _to_json(list(options)))

    @classmethod
    def lark(cls, source: str, **parts: "Grammar") -> Self:
        """A context-free grammar in llguidance's variant of Lark, or in llama.cpp's GBNF."""
        return cls("lark", source, tuple(parts.items()))

    @property
    def num_chars(self) -> int:
        """Of its source and of all that it refers to."""
        return len(self.source) + sum(part.num_chars for _, part in self.parts)

    @property
    def options(self) -> list[Any]:
        """The texts of a choice."""
        options = _from_json("choice", self.source)
        return options if isinstance(options, list) else [options]


def _check_schema(source: str) -> None:
    schema = _from_json("JSON schema", source)
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {source!r:.60}; give a JSON object")
    check_numbers(schema)


def _inline_schemas(source: str) -> Iterator[Any]:
    """The JSON schemas in the rules of a Lark grammar."""
    for found in _INLINE_SCHEMA.finditer(source):
        try:
            yield json.JSONDecoder().raw_decode(source, found.end())[0]
        except (ValueError, RecursionError):  # llguidance refuses it, if it is one at all
            continue


def check_numbers(schema: Any) -> None:
    """Raise a RequestError for numbers of a JSON schema that llguidance cannot keep to.

    It rounds large integers, may allow a bound that is excluded, and needs too much memory for
    multiples of large numbers.
    """
    try:
        _check_values(schema)
    except RecursionError as error:  # from Python 3.12 on json reads deeper ones than this can
        raise RequestError("the JSON schema is nested too deeply; make it flatter") from error
    _check_multiples(schema)


def _check_multiples(schema: Any) -> None:
    """Refuse numbers of which an answer's numbers must be multiples, if they are too large.

    What is combined may meet in one number, and so may all that a schema holds if it has references
    to its parts.
    """
    found: dict[int, int] = {}
    has_references = False
    waiting: list[tuple[Any, int | None]] = [(schema, None)]
    while waiting:
        own, group = waiting.pop()
        if isinstance(own, list):
            waiting += [(item, group) for item in own]
        if not isinstance(own, dict):
            continue
        has_references = has_references or "$ref" in own
        if group is None and _COMBINING & own.keys():
            group = id(own)
        number = own.get("multipleOf")
        if isinstance(number, int | float) and not isinstance(number, bool):
            place = id(own) if group is None else group
            found[place] = _common_multiple(found.get(place, 1), _digits(number))
        waiting += [(item, group) for name, item in own.items() if name not in ("const", "enum")]
    if has_references:
        reduce(_common_multiple, found.values(), 1)


def _common_multiple(one: int, other: int) -> int:
    number = lcm(one, other)
    if number > _LARGEST_MULTIPLE:
        raise RequestError(
            f"the JSON schema asks for multiples of {number} (of several numbers their least "
            "common multiple, without decimal points and the zeros at their ends), but at most "
            f"{_LARGEST_MULTIPLE} is supported; leave multipleOf out"
        )
    return number


def _digits(number: float) -> int:
    """Without its decimal point and the zeros at its end."""
    digits = "".join(map(str, Decimal(repr(number)).as_tuple().digits)).rstrip("0")
    return int(digits or 1)


def _check_values(schema: Any, *, is_value: bool = False) -> None:
    """`is_value`: what is given is itself a value that an answer may have to hold."""
    if isinstance(schema, list):
        for own in schema:
            _check_values(own, is_value=is_value)
    elif isinstance(schema, dict):
        bound = None if is_value else _bound_not_excluded(schema)
        if bound is not None:
            raise RequestError(
                f"the JSON schema excludes {bound:g}, but it would be allowed, because the other "
                "bound is less than 1 away; give a minimum or maximum that is not a whole number"
            )
        for key, own in schema.items():
            is_own_value = is_value or key in ("const", "enum", *_NUMBERS)
            _check_values(own, is_value=is_own_value)
    elif is_value and isinstance(schema, int) and abs(schema) > _LARGEST_INTEGER:
        raise RequestError(
            f"the JSON schema holds the integer {schema!s:.40}, and integers beyond "
            f"{_LARGEST_INTEGER} would be rounded; give it as a string"
        )


def _bound_not_excluded(schema: Mapping[str, Any]) -> float | None:
    """The whole number that numbers of a schema would not stay above, or below where negative."""

    parts = list(_with_all_of(schema))

    def given(*names: str) -> list[float]:
        return [
            part[name] for part in parts for name in names if type(part.get(name)) in (int, float)
        ]

    lows, highs = given("minimum", "exclusiveMinimum"), given("maximum", "exclusiveMaximum")
    if not lows or not highs:
        return None
    low, high = max(lows), min(highs)
    if not low < high < low + 1:
        return None
    if low >= 0:
        return low if low % 1 == 0 and low in given("exclusiveMinimum") else None
    return high if high % 1 == 0 and high in given("exclusiveMaximum") else None


def _with_all_of(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that its values have to meet too; none behind references."""
    yield schema
    parts = schema.get("allOf")
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict):
            yield from _with_all_of(part)


def _check_options(options: list[Any]) -> None:
    if not options:
        raise RequestError("the choice is empty; give at least one text")
    for option in options:
        if not isinstance(option, str) or not option:
            raise RequestError(f"the choice holds {option!r:.60}; give texts that are not empty")


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the grammar {value!r:.60} is not valid JSON: {error}") from error


def _from_json(name: str, source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the {name} {source!r:.60} is not valid JSON: {error}") from error


def _check_unicode(source: str) -> None:
    try:
        source.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the grammar is not valid Unicode ({error}); give UTF-8") from error
