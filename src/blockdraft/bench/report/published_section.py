"""Figures that others have published, below one's own of the same sets."""

from collections.abc import Mapping, Sequence

from blockdraft.bench.report.published import LOADS, PUBLISHED, PUBLISHED_LOADS, SETS, set_of
from blockdraft.bench.report.section import Grid, Section, without_repeats
from blockdraft.bench.report.speed_sections import speedup_and_tau
from blockdraft.bench.result import Result, need


def published_section(results: Sequence[Result]) -> Section:
    """Figures of others, below one's own of the same sets."""
    rows = [row for result in results for row in _own_rows(result)]
    rows += [
        [
            f"published: {one.method}, {one.target}",
            f"{one.temperature:g}",
            *(f"{speedup:.2f}, {tau:.2f}" for speedup, tau in one.by_set),
            f"{one.average[0]:.2f}, {one.average[1]:.2f}",
            one.machine,
            one.source,
        ]
        for one in PUBLISHED
    ]
    loads = [
        [
            f"published: {one.method}, {one.target}",
            one.prompts,
            *(f"{speedup:.1f}" for speedup in one.speedups),
            f"{one.tau:.2f}",
            one.machine,
            one.source,
        ]
        for one in PUBLISHED_LOADS
    ]
    about = (
        'Speed-up over plain decoding, and tau. Rows named "published" were measured by others, on '
        "other machines, with other models and engines, and come without a spread: nothing follows "
        "from one of them beside a figure of yours, but for the order of magnitude."
    )
    heads = ["method", "temperature", *SETS, "all seven", "machine", "source"]
    load_heads = ["method", "prompts", *(f"{n} at once" for n in LOADS), "tau", "machine", "source"]
    return Section(
        "Beside figures that others published, on other machines",
        grids=[
            # Some of one's own have no band here either.
            without_repeats(
                Grid("One request at a time", about, heads, rows), "*", "*: one prompt, no spread."
            ),
            Grid("Many requests at once", f"By load. {about}", load_heads, loads),
        ],
    )


def _own_rows(result: Result) -> list[list[str]]:
    """Of the sets that the published figures are of; the others are in their own section."""
    rows = []
    if result.kind == "summary":
        for run in need(result, "runs").values():
            for kind, temperature in (("greedy", 0.0), ("sampled", run["sampled_temperature"])):
                cells = {
                    row["name"]: f"{row[kind]['speedup']:.2f}, {row[kind]['tau']:.2f}"
                    for row in run["rows"]
                    if row[kind] is not None
                }
                rows += _own_row(result, temperature, cells)
    if result.kind == "speed":
        for run in need(result, "runs"):
            cells = {
                group: speedup_and_tau(row)
                for group, row in run["figures"].items()
                if row["speedup_bands"]["plain"] is not None
            }
            rows += _own_row(result, run["config"]["temperature"], cells)
    if result.kind == "ways":
        temperature = float(need(result, "settings")["temperature"])
        for way, by_group in need(result, "figures").items():
            cells = {group: speedup_and_tau(row) for group, row in by_group.items()}
            rows += _own_row(result, temperature, cells, way)
    return rows


def _own_row(
    result: Result, temperature: float, cells: Mapping[str, str], way: str = ""
) -> list[list[str]]:
    """A row of the cells whose group is a published set; none without such a group."""
    by_set = {name: cell for group, cell in cells.items() if (name := set_of(group)) is not None}
    if not by_set:
        return []
    title = f"yours: {result.name}, {way}" if way else f"yours: {result.name}"
    known = [by_set.get(name, "") for name in SETS]
    return [[title, f"{temperature:g}", *known, "", result.machine, str(result.path)]]
