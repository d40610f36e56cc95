"""What the frozen dataclasses of settings share: kinds of values, and how they are written."""

from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from blockdraft.core.errors import ConfigError


class Settings(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number below 2^63",
    float: "a finite number below 3.4e38",
    str: "text",
    Path: "a path",
    type(None): "unset",
}


def require(settings: Settings, name: str, good: bool, rule: str) -> None:
    """Raise ConfigError with the value and the rule unless `good`."""
    if not good:
        raise ConfigError(f"{name} is {plain(getattr(settings, name))!r}; it must be {rule}")


def check_kinds(settings: Settings) -> None:
    """Raise ConfigError for the first value that is not of its field's type."""
    for name, kind in get_type_hints(type(settings)).items():
        require(settings, name, _is_of(getattr(settings, name), kind), described(kind))


def plain(value: object) -> object:
    """A value for JSON."""
    if isinstance(value, Path):
        return str(value)
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def to_dict(settings: Settings) -> dict[str, object]:
    """The settings as JSON values."""
    return {field.name: plain(getattr(settings, field.name)) for field in fields(settings)}


def from_toml(kind: Any, value: Any) -> Any:
    """A value of TOML as the kind of a field: text as a path, a list (or one item) as a tuple.

    TOML has no word for a value that is unset: it is "none" where a field may be so. What does not
    fit is returned as it is, for `check_kinds` to refuse.
    """
    if _is_union(kind):
        if value == "none" and type(None) in get_args(kind):
            return None
        fitting = [one for one in get_args(kind) if _is_of(from_toml(one, value), one)]
        return from_toml(fitting[0], value) if fitting else value
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(from_toml(get_args(kind)[0], item) for item in items)
    return Path(value) if kind is Path and isinstance(value, str) else value


def _is_union(kind: Any) -> bool:
    # A union with a Literal is of the older kind.
    return get_origin(kind) in (UnionType, Union)


def _is_of(value: object, kind: Any) -> bool:
    """True if a value is of a field's type; a whole number passes for a float, a bool for none."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if _is_union(kind):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(v, get_args(kind)[0]) for v in value)
    if isinstance(value, bool):
        return kind is bool
    # What is larger fits no tensor: 64 bits for whole numbers, float32 for others.
    if kind is float:
        return isinstance(value, int | float) and abs(value) < 3.4e38
    return isinstance(value, kind) and (kind is not int or abs(value) < 2**63)


def described(kind: Any) -> str:
    """A field's type in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if _is_union(kind):
        return " or ".join(described(one) for one in get_args(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {described(get_args(kind)[0])}"
    return _NAMES[kind]
