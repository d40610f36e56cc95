"""From a template and values to a page. Loads no model library."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table, with a class of the stylesheet."""

    text: str
    css: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a title, empty for none; the first cell of a row names it."""

    title: str
    about: str
    heads: tuple[str, ...]
    rows: list[list[Cell]]


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(template: str, **values: Any) -> str:
    """The page of a template; a value that it needs and does not get is an error."""
    return _environment().get_template(template).render(values)
