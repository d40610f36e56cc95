"""Whether forwards were replayed as CUDA graphs, as far as it has run."""

from typing import Any

from blockdraft.models.layers.graphs import Graphs


def describe_graphs(target: object, drafter: object) -> dict[str, dict[str, Any]]:
    """Of an engine's target and drafter on a card; plain values for JSON.

    Each has `rows`, the shapes that were captured, and `why_not`, empty where nothing failed. One
    that has no fixed shapes is left out.
    """
    parts = {"target": target, "drafter": drafter}
    found = {name: getattr(part, "graphs", None) for name, part in parts.items()}
    return {
        name: {"rows": graphs.shapes, "why_not": graphs.why_not}
        for name, graphs in found.items()
        if isinstance(graphs, Graphs)
    }
