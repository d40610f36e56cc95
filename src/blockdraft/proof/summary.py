"""A certificate in rows, for the table in the terminal and for the page.

Rows are made of the certificate alone, so that a page can be made of a file. Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.core.words import counted
from blockdraft.hub.catalog import display_name

Mark = Literal["ok", "failed", "note"]
MARKS: Mapping[Mark, str] = {"ok": "✓", "failed": "✗", "note": "·"}


@dataclass(frozen=True, slots=True)
class Line:
    """One check: its name, what was found, and how it ended."""

    name: str
    found: str
    mark: Mark


@dataclass(frozen=True, slots=True)
class Section:
    """Checks of one kind."""

    title: str
    about: str
    lines: list[Line]


def verdict_line(certificate: Mapping[str, Any]) -> str:
    """The verdict in one sentence."""
    verdict, only = certificate["verdict"], _only_kind(certificate)
    if verdict == "proven":
        return f"PROVEN: drafted output equals plain output, bit for bit{only}"
    if verdict == "no-violation":
        near = certificate["num_differences"]
        found = f"{counted(near, 'near-tie')}, nothing else" if near else "no output differs"
        return (
            "NO VIOLATION: drafted against plain output, which may differ with exact off: "
            f"{found}{only}"
        )
    if verdict == "partial":
        return "PARTIAL: the proof was interrupted; nothing had failed until then"
    return "FAILED: " + "; ".join(certificate["failures"])


def _only_kind(certificate: Mapping[str, Any]) -> str:
    """What the verdict does not cover: all cases may be greedy, or all sampled."""
    kinds = {case["params"]["temperature"] > 0 for case in certificate["cases"]}
    if len(kinds) != 1:
        return ""
    tested, other = ("sampled", "greedy") if kinds.pop() else ("greedy", "sampled")
    return f", in {tested} requests; no {other} request was tested"


def setting_line(certificate: Mapping[str, Any]) -> str:
    """What was proven, and how it ran."""
    config, drafter = certificate["config"], display_name(certificate["drafter_folder"])
    weights = f", weights in {config['quantize']}" if config.get("quantize") else ""
    if config.get("kv_cache_dtype", "auto") != "auto":
        weights += f", KV cache in {config['kv_cache_dtype']}"
    card = certificate["card"]["gpu"]
    where = config["device"] if card is None else f"{config['device']} ({card})"
    return (
        f"drafted by {drafter}; {config['dtype']}{weights} on {where}, "
        f"{counted(certificate['threads'], 'thread')}, "
        f"{'exact' if config['exact'] else 'exact off'}"
    )


def sections(certificate: Mapping[str, Any]) -> list[Section]:
    """All that was checked, in the order of the proof; what has not run yet is left out."""
    found = [
        Section(
            "Outputs against plain decoding",
            f"{_compared(certificate)} of every case, decoded in another mode, equal those of "
            f"plain decoding alone, {_how_far(certificate)}.",
            [*map(_way, certificate["checks"]), *_graphs(certificate.get("graphs", {}))],
        ),
        Section(
            "Draft context",
            "Keys and values that the drafter holds in the middle of a run, against those computed "
            "in one forward pass over the same tokens.",
            [_context(check) for check in certificate["draft_context"]],
        ),
        Section(
            "Planted faults",
            "Faults planted in the engine on purpose. The checks above must catch each.",
            [_control(control) for control in certificate["controls"]],
        ),
        Section(
            "Distribution of the choice rule",
            "Three tokens over a vocabulary of eight, drafted and verified, against exact "
            "probabilities; p below 0.001 means another distribution.",
            [_distribution(check) for check in certificate["distribution"]],
        ),
        Section(
            "For comparison: stock transformers",
            "Greedy outputs of an untouched model.generate. Its kernels round differently, so this "
            "is not part of the verdict.",
            [_stock(certificate["transformers"])] if certificate["transformers"] else [],
        ),
        Section(
            "Against the certificate",
            "What has changed since the replayed certificate was made.",
            _replay(certificate["replay"]) if "replay" in certificate else [],
        ),
    ]
    return [section for section in found if section.lines]


def _compared(certificate: Mapping[str, Any]) -> str:
    exact = certificate["config"]["exact"]
    return "Tokens, texts, ends and log-probabilities" if exact else "Tokens, texts and ends"


def _how_far(certificate: Mapping[str, Any]) -> str:
    if certificate["config"]["exact"]:
        return "to the last bit"
    noise = certificate["noise"]
    measured = "" if noise is None else f": up to {noise['largest']:.3g} logits on this pair"
    return f"except for near-ties within the noise of shapes{measured}"


def _graphs(graphs: Mapping[str, Any]) -> list[Line]:
    """Whether a card replayed graphs, as it does when it serves."""
    if not graphs:
        return []
    found = [
        f"none of the {name}: {own['why_not']}"
        if own["why_not"]
        else f"of the {name} for {', '.join(map(str, own['rows'])) or 'no'} rows"
        for name, own in graphs.items()
    ]
    return [Line("CUDA graphs", "; ".join(found), "note")]


def _way(check: Mapping[str, Any]) -> Line:
    differences = check["differences"]
    found = f"{counted(check['num_cases'], 'case')}, {counted(check['num_tokens'], 'token')}, "
    found += f"tau {check['acceptance_length']:.2f}, {counted(len(differences), 'difference')}"
    if near := len(differences) - check["num_failures"]:
        found += f" ({counted(near, 'near-tie')})"
    found = "; ".join([found, *check["lacks"]])
    if check["num_failures"] or check["lacks"]:
        return Line(check["name"], found, "failed")
    return Line(check["name"], found, "ok" if check["num_cases"] else "note")


def _context(check: Mapping[str, Any]) -> Line:
    found = f"{counted(check['num_tokens'], 'token')}, off by {check['deviation']:.2g} at most "
    found += f"(rounding: up to {check['bound']:g})"
    return Line(check["case_id"], found, "ok" if check["is_right"] else "failed")


def _control(control: Mapping[str, Any]) -> Line:
    name = control["name"]
    if control["skipped"]:
        return Line(name, f"not run: {control['skipped']}", "note")
    if control["caught"]:
        return Line(name, f"caught: {control['evidence']}", "ok")
    return Line(name, f"NOT CAUGHT on {counted(control['num_cases'], 'case')}", "failed")


def _distribution(check: Mapping[str, Any]) -> Line:
    found = f"{check['num_draws']} draws, p = {check['p_value']:.3g}"
    name = check["name"].replace("_", " ")
    if check["planted"]:
        name = f"planted: {name}"
        found += ", caught" if check["is_right"] else ", NOT CAUGHT"
    return Line(name, found, "ok" if check["is_right"] else "failed")


def _stock(rows: list[Mapping[str, Any]]) -> Line:
    equal = sum(row["first_difference"] is None for row in rows)
    found = f"{equal} of {len(rows)} outputs are identical"
    margins = [row["margin"] for row in rows if row["margin"] is not None]
    if margins:
        found += f"; where they first differ, our token leads by {max(margins):.3g} logits at most"
    return Line("model.generate", found, "note")


def _replay(replay: Mapping[str, Any]) -> list[Line]:
    compared = f"{replay['num_compared']} of {replay['num_cases']} cases compared"
    changed = [change for change in replay["changes"] if change["area"] == "outputs"]
    found = f"{compared}, {len(changed)} with another output"
    is_whole = 0 < replay["num_compared"] == replay["num_cases"]
    lines = [Line("outputs", found, "failed" if changed else "ok" if is_whole else "note")]
    for change in replay["changes"]:
        if change["area"] != "outputs":
            name = f"{change['area']}: {change['name']}"
            before, now = (_short(change["area"], change[when]) for when in ("before", "now"))
            lines.append(Line(name, f"was {before}, is {now}", "note"))
    return lines


def _short(area: str, value: object) -> str:
    """A hash is known by its beginning, and two whole ones fit no line."""
    return str(value)[:12] if area == "hashes" else str(value)
