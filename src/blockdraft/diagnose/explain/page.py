"""Explanations as one HTML page that needs nothing else, not even a network."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from blockdraft.diagnose.explain.round import CAUSE_LABELS

_PLACE = "__DATA__"


def render_page(report: Mapping[str, Any], about: str) -> str:
    """The page of a report as `make_report` makes it; `about` says in a line what was run."""
    template = (
        files("blockdraft.diagnose.explain").joinpath("page.html").read_text(encoding="utf-8")
    )
    shown = {name: report[name] for name in ("prompts", "sums", "groups")}
    data = {**shown, "about": about, "cause_labels": CAUSE_LABELS}
    before, after = template.split(_PLACE)
    return f"{before}{_script_json(data)}{after}"


def _script_json(value: object) -> str:
    """JSON that stands inside a script element: whatever its strings hold, none ends the element.

    Escapes keep it JSON with the same meaning. All of it is ASCII.
    """
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")
