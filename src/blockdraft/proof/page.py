"""A certificate as one HTML file: no script, nothing from the network. Loads no model library."""

from collections.abc import Iterable, Mapping
from typing import Any

from blockdraft.core.words import counted
from blockdraft.hub.catalog import display_name
from blockdraft.measure.provenance import command_line
from blockdraft.proof.summary import (
    MARKS,
    Line,
    Section,
    sections,
    setting_line,
    verdict_line,
)
from blockdraft.report.render import Cell, Table, render

_MARK_WORDS = {"ok": "passed", "failed": "failed", "note": "not judged"}
_TEXT_LENGTH = 160
"""Characters of an output that the page shows."""


def make_page(certificate: Mapping[str, Any]) -> str:
    """The page of a certificate, whole or partial."""
    tables = [
        *map(_section, sections(certificate)),
        _differences(certificate),
        _facts("Made of", "SHA-256 of what the outputs depend on", certificate["hashes"]),
        _facts("Made with", "Settings, versions and machine", _setting(certificate)),
    ]
    return render(
        "proof.html",
        title=f"Proof of {display_name(certificate['config']['target'])}",
        subtitle=_subtitle(certificate),
        verdict=certificate["verdict"],
        verdict_line=verdict_line(certificate),
        tables=[table for table in tables if table is not None],
        cases=_cases(certificate["cases"]),
        left_out=certificate["left_out"],
    )


def _subtitle(certificate: Mapping[str, Any]) -> str:
    return f"{setting_line(certificate)}; {certificate['date']}, {certificate['seconds']:.0f} s"


def _section(section: Section) -> Table:
    rows = [[Cell(line.name), Cell(line.found), _mark(line)] for line in section.lines]
    return Table(section.title, section.about, ("check", "found", "result"), rows)


def _mark(line: Line) -> Cell:
    return Cell(f"{MARKS[line.mark]} {_MARK_WORDS[line.mark]}", f"mark {line.mark}")


def _differences(certificate: Mapping[str, Any]) -> Table | None:
    rows = [
        [
            Cell(f"{difference['case_id']}, {check['name']}"),
            Cell(
                f"{difference['what']}[{difference['index']}] is {difference['found']!r}, plain "
                f"{difference['expected']!r}"
            ),
            Cell(
                difference["verdict"]
                + ("" if difference["margin"] is None else f", margin {difference['margin']:.3g}")
            ),
        ]
        for check in certificate["checks"]
        for difference in check["differences"]
    ]
    if not rows:
        return None
    return Table("Differences", "The first of each output.", ("case", "found", "verdict"), rows)


def _facts(title: str, about: str, facts: Mapping[str, Any]) -> Table:
    rows = [
        [Cell(name), Cell(str(value), "mono")] for name, value in facts.items() if value is not None
    ]
    return Table(title, about, ("what", "value"), rows)


def _setting(certificate: Mapping[str, Any]) -> dict[str, Any]:
    proof, machine = certificate["proof"], certificate["machine"]
    return {
        "command": command_line(certificate["command"]),
        "commit": certificate["git_commit"],
        "machine": f"{machine['cpu']}, {machine['num_cpus']} CPUs, {machine['platform']}",
        "versions": ", ".join(f"{name} {v}" for name, v in certificate["versions"].items()),
        "GPU": certificate["card"]["gpu"],
        "kernels": _kernels(certificate["kernels"], certificate["card"]),
        "pair": ", ".join(f"{name} {value}" for name, value in certificate["config"].items()),
        "proof": ", ".join(f"{name} {value}" for name, value in proof.items()),
    }


def _kernels(kernels: Mapping[str, Any], card: Mapping[str, Any]) -> str:
    if card["triton"]:
        return f"Triton {card['triton']}"
    return f"{kernels['compiler']}: {kernels['flags']}" if kernels["used"] else "none ran"


def _cases(cases: Iterable[Mapping[str, Any]]) -> Table:
    rows = [
        [
            Cell(case["id"]),
            Cell(str(case["num_prompt_tokens"])),
            Cell((case["text"] or "")[:_TEXT_LENGTH]),
            Cell((case["output"] or "not decoded")[:12], "mono"),
        ]
        for case in cases
    ]
    heads = ("case", "prompt tokens", "output of plain decoding", "hash")
    return Table("", f"{counted(len(rows), 'case')}. Texts are cut.", heads, rows)
