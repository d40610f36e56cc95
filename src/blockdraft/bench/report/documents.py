"""Results as one HTML page, and as the tables and plots of Markdown pages. Loads no model library.

Each result is a section, see `sections.py`. Every speed-up stands beside its baseline and
its spread, but for the summary of the default pair and for published figures, which say so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from blockdraft.bench.report import summary
from blockdraft.bench.report.changes import change_section
from blockdraft.bench.report.published import published_section
from blockdraft.bench.report.section import Grid, Section
from blockdraft.bench.report.sections import section_of
from blockdraft.bench.result import Result, machines_of
from blockdraft.bench.tables import markdown_table
from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.report.render import Cell, Table, render

SUMMARY = "summary"
BEGIN, END = "<!-- results{} -->\n", "<!-- end of results{} -->\n"


def sections_of(results: Sequence[Result], earlier: Sequence[Result]) -> list[Section]:
    """A section for each result, one for what changed, and one for what others published of it.

    Raises:
        ConfigError: a result lacks what its kind has, or nothing can be compared.
    """
    sections = [section_of(result) for result in results]
    if earlier:
        sections.append(change_section(results, earlier))
    published = published_section(results)
    return [*sections, published] if published.grids else sections


def machine_lines(results: Sequence[Result]) -> list[str]:
    """The machine of the results, or a warning that there are several."""
    machines = machines_of(results)
    if len(machines) == 1:
        return [f"Measured on {machines[0]}."]
    listed = "; ".join(
        f"{machine} ({', '.join(r.name for r in results if r.machine == machine)})"
        for machine in machines
    )
    return [
        f"MIXED MACHINES: these results come from {len(machines)} machines, so their figures "
        f"cannot be compared: {listed}."
    ]


def render_page(sections: Sequence[Section], results: Sequence[Result]) -> str:
    """One HTML page that needs nothing else."""
    return render(
        "bench.html",
        title="blockdraft benchmarks",
        machines=machine_lines(results),
        is_mixed=len(machines_of(results)) > 1,
        sections=[
            {
                "id": f"section-{number}",
                "title": section.title,
                "facts": section.facts,
                "tables": [_table(grid) for grid in section.grids],
                "plots": [Markup(plot) for plot in section.page_plots],
                "definitions": section.definitions,
            }
            for number, section in enumerate(sections, 1)
        ],
    )


def _table(grid: Grid) -> Table:
    rows = [[Cell(text) for text in row] for row in grid.rows]
    return Table(title=grid.title, about=grid.about, heads=tuple(grid.heads), rows=rows)


def markdown(sections: Sequence[Section], results: Sequence[Result]) -> str:
    """All tables, for the terminal or a page."""
    parts = ["\n".join(machine_lines(results)) + "\n"]
    for section in sections:
        parts.append(f"## {section.title}\n")
        parts.append(section_markdown(section))
    return "\n".join(parts)


def section_markdown(section: Section) -> str:
    """Facts and tables of one section."""
    facts = "".join(f"{fact}\n" for fact in section.facts)
    tables = [f"{grid.about}\n\n{markdown_table(grid.heads, grid.rows)}" for grid in section.grids]
    return "\n".join([facts, *tables]) if facts else "\n".join(tables)


def documents(results: Sequence[Result], pages: Sequence[Path]) -> dict[Path, str]:
    """What each page, and each plot that a page's marks ask for, should hold.

    Raises:
        ConfigError: a page cannot be read, has no marks, or an end of them is missing.
    """
    written: dict[Path, str] = {}
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = why_unread(error)
            raise ConfigError(f"cannot read {page}: {reason}; name a Markdown file") from error
        asked = [result for result in results if _mark(BEGIN, result) in text]
        if not asked:
            marks = ", ".join(_mark(BEGIN, result).strip() for result in results)
            raise ConfigError(f"{page} lacks a mark of these results; put one of {marks} in")
        for result in asked:
            text = _between_marks(text, _content(result, page), page, result)
            for ending, plot in section_of(result).plots.items():
                written[result.path.with_name(f"{result.name}{ending}.svg")] = plot
        written[page] = text
    return written


def _mark(mark: str, result: Result) -> str:
    return mark.format("" if result.kind == SUMMARY else f": {result.name}")


def _content(result: Result, page: Path) -> str:
    """README has a short form of the summary, other pages the whole."""
    if result.kind != SUMMARY:
        return section_markdown(section_of(result))
    values: Mapping[str, object] = result.values
    if page.name == "README.md":
        return f"{summary.summary(values)}\n{summary.small_table(values)}"
    return f"{summary.whole_table(values)}\n{summary.same_tokens(values)}"


def _between_marks(text: str, content: str, path: Path, result: Result) -> str:
    head, begin, rest = text.partition(_mark(BEGIN, result))
    _, end, tail = rest.partition(_mark(END, result))
    if not end:
        raise ConfigError(f"{path} lacks the mark {_mark(END, result).strip()!r}; put it in")
    return f"{head}{begin}\n{content}\n{end}{tail}"
