"""What a JSON schema says of the type of a value, as far as a look at it tells."""

from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 16
"""Schemas in schemas that are looked at."""
_BY_CLASS = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}

Schema = Mapping[str, Any]


def value_types(value: object) -> frozenset[str]:
    """The types that a value read from JSON has; an integer is a number too."""
    return frozenset(_BY_CLASS[type(value)])


def schema_types(schema: object, root: Schema) -> frozenset[str]:
    """The types that a schema allows; none if it does not tell, or allows any.

    root: the schema that it is part of, to which its references refer.
    """
    return _types(schema, root, {}, 0)


def _types(
    schema: object, root: Schema, followed: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    """See schema_types. Each reference is followed once.

    Alternatives that refer to each other make more paths than can be walked, while all wait.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in followed:
            followed[reference] = frozenset()  # what it says where it comes back to itself
            found_there = resolve(schema["$ref"], root)
            followed[reference] = _types(found_there, root, followed, depth + 1)
        return followed[reference]
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(one for one in named if isinstance(one, str))
    if "const" in schema:
        return value_types(schema["const"])
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(value_types, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if options := subschemas(schema, key):
            found = [_types(one, root, followed, depth + 1) for one in options]
            return frozenset().union(*found) if all(found) else frozenset()
    found = [_types(one, root, followed, depth + 1) for one in subschemas(schema, "allOf")]
    return next(filter(None, found), frozenset())


def subschemas(schema: Schema, key: str) -> list[object]:
    """The schemas under a keyword that takes a list of them; none if it is malformed."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def resolve(reference: object, root: Schema) -> object:
    """The schema at a reference such as #/$defs/name; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found
