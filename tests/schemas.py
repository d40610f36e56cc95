"""JSON schemas of every kind that a grammar takes; what each accepts is short."""

from typing import Any


def _object(properties: dict[str, Any], **changes: Any) -> dict[str, Any]:
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, **changes}


def _array(items: Any, low: int = 0, high: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


_WORD = {"type": "string", "maxLength": 5}
_AGE = {"type": "integer", "minimum": 0, "maximum": 120}
_YES = {"type": "boolean"}
_COLOR = {"enum": ["red", "green", "blue"]}
_POINT = _object({"x": _AGE, "y": _AGE})
_LEAF = _object({"leaf": _YES})

SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": _YES,
    "null": {"type": "null"},
    "integer": _AGE,
    "negative": {"type": "integer", "minimum": -50, "maximum": -7},
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 99, "multipleOf": 7},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    "string": _WORD,
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    "enum": _COLOR,
    "enum of kinds": {"enum": [1, "1", None, True, [2], {"a": 3}]},
    "const": {"const": {"version": [1, 2], "name": "blöck"}},
    "types": {"type": ["integer", "null", "boolean"], "minimum": 0, "maximum": 9},
    "any of": {"anyOf": [_AGE, _COLOR, _POINT]},
    "one of": {"oneOf": [_YES, {"type": "integer", "minimum": 1, "maximum": 5}]},
    "all of": {"allOf": [_AGE, {"minimum": 18}, {"maximum": 65}]},
    "object": _object({"name": _WORD, "age": _AGE}),
    "empty object": _object({}),
    "optional": _object({"a": _AGE, "b": _YES, "c": _COLOR}, required=["b"]),
    "nested": _object({"who": _object({"first": _WORD, "last": _WORD}), "at": _POINT}),
    "quotes in names": _object({'a "b"\n': _YES, "ünder": _AGE, "": _YES}),
    "array": _array(_AGE),
    "array of strings": _array(_WORD, 1, 2),
    "array of arrays": _array(_array(_YES, 1, 2), 1, 2),
    "array of objects": _array(_POINT, 1, 2),
    "tuple": {"type": "array", "prefixItems": [_AGE, _COLOR, _YES], "items": False, "minItems": 3},
    "definitions": {"$defs": {"point": _POINT}, **_object({"from": {"$ref": "#/$defs/point"}})},
    "tree": {
        "$defs": {"node": {"anyOf": [_LEAF, _object({"left": _LEAF, "right": _LEAF})]}},
        **_object({"root": {"$ref": "#/$defs/node"}}),
    },
    "described": _object({"ok": {"type": "boolean", "title": "OK", "description": "Is it?"}}),
}
