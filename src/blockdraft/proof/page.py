"""A certificate as one HTML file: no script, nothing from the network. Loads no model library."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from blockdraft.proof.summary import (
    MARKS,
    Line,
    Section,
    sections,
    setting_line,
    verdict_line,
)

_CSS = Path(__file__).with_name("page.css")
_MARK_WORDS = {"ok": "passed", "failed": "failed", "note": "not judged"}
_TEXT_LENGTH = 160
"""Characters of an output that the page shows."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell with a CSS class; the text is escaped like any other."""

    text: str
    css: str


_Row = list[str | _Cell]


def make_page(certificate: Mapping[str, Any]) -> str:
    """The page of a certificate, whole or partial."""
    config = certificate["config"]
    title = f"Proof of {config['target']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(certificate))}</p>',
        f'<p class="verdict {certificate["verdict"]}" role="status">'
        f"{escape(verdict_line(certificate))}</p>",
        *map(_section, sections(certificate)),
        _differences(certificate),
        _facts("Made of", "SHA-256 of what the outputs depend on", certificate["hashes"]),
        _facts("Made with", "Settings, versions and machine", _setting(certificate)),
        _cases(certificate["cases"], certificate["left_out"]),
    ]
    css = _CSS.read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def _subtitle(certificate: Mapping[str, Any]) -> str:
    return f"{setting_line(certificate)}; {certificate['date']}, {certificate['seconds']:.0f} s"


def _section(section: Section) -> str:
    rows: list[_Row] = [[line.name, line.found, _mark(line)] for line in section.lines]
    return _table(section.title, section.about, ("check", "found", "result"), rows)


def _mark(line: Line) -> _Cell:
    return _Cell(f"{MARKS[line.mark]} {_MARK_WORDS[line.mark]}", f"mark {line.mark}")


def _differences(certificate: Mapping[str, Any]) -> str:
    rows: list[_Row] = [
        [
            f"{difference['case_id']}, {check['name']}",
            f"{difference['what']}[{difference['index']}] is {difference['found']!r}, plain "
            f"{difference['expected']!r}",
            difference["verdict"]
            + ("" if difference["margin"] is None else f", margin {difference['margin']:.3g}"),
        ]
        for check in certificate["checks"]
        for difference in check["differences"]
    ]
    if not rows:
        return ""
    return _table("Differences", "The first of each output.", ("case", "found", "verdict"), rows)


def _facts(title: str, about: str, facts: Mapping[str, Any]) -> str:
    rows: list[_Row] = [
        [name, _Cell(str(value), "mono")] for name, value in facts.items() if value is not None
    ]
    return _table(title, about, ("what", "value"), rows)


def _setting(certificate: Mapping[str, Any]) -> dict[str, Any]:
    proof, machine = certificate["proof"], certificate["machine"]
    return {
        "command": " ".join(map(str, certificate["command"])),
        "commit": certificate["git_commit"],
        "machine": f"{machine['cpu']}, {machine['num_cpus']} CPUs, {machine['platform']}",
        "versions": ", ".join(f"{name} {v}" for name, v in certificate["versions"].items()),
        "kernels": _kernels(certificate["kernels"]),
        "pair": ", ".join(f"{name} {value}" for name, value in certificate["config"].items()),
        "proof": ", ".join(f"{name} {value}" for name, value in proof.items()),
    }


def _kernels(kernels: Mapping[str, Any]) -> str:
    return f"{kernels['compiler']}: {kernels['flags']}" if kernels["used"] else "none ran"


def _cases(cases: Iterable[Mapping[str, Any]], left_out: Mapping[str, str]) -> str:
    rows: list[_Row] = [
        [
            case["id"],
            str(case["num_prompt_tokens"]),
            (case["text"] or "")[:_TEXT_LENGTH],
            _Cell((case["output"] or "not decoded")[:12], "mono"),
        ]
        for case in cases
    ]
    heads = ("case", "prompt tokens", "output of plain decoding", "hash")
    table = _table("", f"{len(rows)} cases. Texts are cut.", heads, rows)
    skipped = "".join(
        f"<li>{escape(name)}: {escape(reason)}</li>" for name, reason in left_out.items()
    )
    skipped = (
        f"<p>Left out, as the target cannot take them:</p><ul>{skipped}</ul>" if skipped else ""
    )
    return f"<details>\n<summary>All cases</summary>\n{table}\n{skipped}\n</details>"


def _table(title: str, about: str, heads: Iterable[str], rows: Iterable[_Row]) -> str:
    """The first cell of a row names it."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(f"<tr>{''.join(_cells(row))}</tr>" for row in rows)
    heading = f"<h2>{escape(title)}</h2>\n" if title else ""
    # Wide tables scroll by themselves, with the keyboard too.
    region = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title or about)}">'
    )
    return (
        f"{heading}{region}<table>\n<caption>{escape(about)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cells(row: _Row) -> Iterator[str]:
    for index, cell in enumerate(row):
        if isinstance(cell, _Cell):
            yield f'<td class="{cell.css}">{escape(cell.text)}</td>'
        elif index:
            yield f"<td>{escape(cell)}</td>"
        else:
            yield f'<th scope="row">{escape(cell)}</th>'
