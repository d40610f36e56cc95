"""Values of a drafter's `config.json`, each of the type that is asked for."""

from collections.abc import Mapping
from typing import Any

from blockdraft.core.errors import ModelError


class Reader:
    """Typed look-up of config values: inside a nested object, then at the top level."""

    def __init__(self, raw: Mapping[str, Any], nested: str = "dflash_config") -> None:
        self._top, self._place = raw, nested
        self._nested: Mapping[str, Any] = raw.get(nested) or {}

    def get(self, name: str) -> Any:
        """The value; None where it is absent."""
        for place in (self._nested, self._top):
            if place.get(name) is not None:
                return place[name]
        return None

    def optional_integer(self, name: str) -> int | None:
        """An integer, or None where there is none."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(f"{name} is {value!r} in the drafter's config.json; give an integer")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer that must be there, unless there is a default.

        Raises:
            ModelError: it is missing, or no integer.
        """
        value = self.optional_integer(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(
                f"the drafter's config.json has no {name}, neither in {self._place} nor at the "
                f"top level; add it, or use a checkpoint in the published layout"
            )
        return value

    def optional_number(self, name: str) -> float | None:
        """A number, or None where there is none."""
        value = self.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ModelError(f"{name} is {value!r} in the drafter's config.json; give a number")
        return None if value is None else float(value)

    def optional_boolean(self, name: str) -> bool | None:
        """A truth value, or None where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(
                f"{name} is {value!r} in the drafter's config.json; give true or false"
            )
        return value

    def optional_string(self, name: str) -> str | None:
        """A string, or None where there is none."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{name} is {value!r} in the drafter's config.json; give a string")
        return value
