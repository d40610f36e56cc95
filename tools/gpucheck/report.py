"""One JSON file and one page of everything that was found."""

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_whole
from gpucheck.notes import notes_path, read_notes
from gpucheck.parts import PARTS, Part
from gpucheck.private import Scrubber
from gpucheck.runner import DONE, read_state

FORMAT = 1
LOG_LINES, LOG_WIDTH, LOG_BYTES = 60, 2000, 2**20
"""The end of a part's log that is read, and what is shown of it."""
LONGEST = 600
"""Characters of a value on the page; the JSON file has all of them."""
MOST_BYTES = 60_000_000
"""Of all files in OUT. Pieces of a drafter that is too large for that stay in the work folder."""
Found = Mapping[str, Any]
Place = tuple[str, ...]

PIECES = "drafter.tar.*"
REHEARSED = "Tiny models with random weights: the numbers show that the parts run, nothing else."
WORDS = """\
*Plain* decoding is without drafts, *drafted* decoding with them; *tau* is the tokens that one pass
of the large model (the *target*) yields, 1 without drafts. A *row* is the vector of one token.
Drafted output equals plain output bit for bit only if the bits of a row do not depend on how many
rows are computed with it. A *rule* is a way to compute that may ensure this. At load, the *load
check* tests it on the model, and refuses a model that fails. docs/gpu.md says more."""
SAYS = {
    "environment": "Switches: what torch may round away in a product. Ceilings: what the device "
    "can do at best; speeds below are to be held against them.",
    "triton": "For each operation, with torch's as the measure: which numbers of rows give a row "
    "the same bits, the largest difference as a share of the largest value, and milliseconds.",
    "forwards": 'Whole layers with random weights, by the load check: "holds", or what it says. '
    '"the library\'s" is the rule that blockdraft has without Triton. "always N rows": forwards '
    'are filled up to so many; "multiples of 8": to the next one. "keys by 64": attention sums 64 '
    "keys at a time.",
    "proof": "The pair under each rule, in the order in which they were tried, up to the first "
    "that passes. The proof then compares drafted output with plain output. Its planted faults "
    "show that it would find one: each must be caught. "
    "p_value: of drafted draws, if they were the target's; a planted fault has a small one. "
    "first_difference: where transformers first chooses another token, as it rounds differently.",
    "speed": 'Decoding "fixed N" verifies N draft tokens in each pass, "adaptive" as many as save '
    'time. "same as plain": answers with the same tokens as plain decoding of the same engine.',
    "ledger": "Of one step of the engine: its time, the time that the device computes, kernels "
    "launched one by one, replays of CUDA graphs, waits for the device, and torch operations. "
    "Kernels and host: what takes most, how often per step, and for how long. The engine's "
    "ledger is explained in docs/diagnosis.md.",
    "steps": "A block is one drafted piece of text that a step learns from. The first step also "
    "compiles.",
    "training": "Held-out tau and loss: on recorded answers not used for training. True tau and "
    "speed-up: in real decoding, over plain decoding.",
}
"""What a reader must know to read a section."""

logger = logging.getLogger(__name__)


def write_findings(out: Path, work: Path, scrubber: Scrubber, is_rehearsal: bool) -> None:
    """Write OUT/report.json, OUT/report.md and OUT/logs.txt; also of a part that runs."""
    report = collect(work, is_rehearsal)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "report.json", json.dumps(scrubber.value(report), indent=1) + "\n")
    write_whole(out / "report.md", scrubber.text(page(report)))
    logs = [f"== {part.name}\n{_log(work, part)}\n" for part in PARTS if _log(work, part)]
    write_whole(out / "logs.txt", scrubber.text("\n".join(logs)))


def write_report(out: Path, work: Path, scrubber: Scrubber, is_rehearsal: bool) -> None:
    """The same, and copy the pieces of the drafter."""
    write_findings(out, work, scrubber, is_rehearsal)
    for stale in out.glob(PIECES):
        stale.unlink()
    pieces = list(work.glob(PIECES))
    if not _fits(out, pieces):
        logger.warning("the drafter is too large to be sent; its pieces stay in %s", work)
        return
    for piece in pieces:
        shutil.copyfile(piece, out / piece.name)


def _fits(out: Path, pieces: Iterable[Path]) -> bool:
    own = [path for path in out.iterdir() if path.is_file()]
    return sum(path.stat().st_size for path in (*own, *pieces)) <= MOST_BYTES


def collect(work: Path, is_rehearsal: bool) -> dict[str, Any]:
    """Plain values: of each part how it ended, what it found, and its last words if it failed."""
    parts = {}
    for part in PARTS:
        state = read_state(work, part.name)
        found = read_notes(notes_path(work, part.name))
        own = {"status": "not ended" if found else "not run", **state, "found": found}
        if state and state["status"] != DONE:
            own["log"] = _log(work, part).splitlines()[-12:]
        parts[part.name] = own
    return {"format": FORMAT, "is_rehearsal": is_rehearsal, "parts": parts}


def _log(work: Path, part: Part) -> str:
    path = work / f"{part.name}.log"
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(line[:LOG_WIDTH] for line in lines)


def page(report: Found) -> str:
    """The report as Markdown."""
    lines = ["# GPU check", "", WORDS, ""]
    if report["is_rehearsal"]:
        lines = ["# GPU check: a rehearsal on a CPU", "", REHEARSED, "", WORDS, ""]
    rows = []
    for part in PARTS:
        own = report["parts"][part.name]
        seconds = f"{own['seconds']:.0f}" if "seconds" in own else ""
        rows.append([part.name, part.about, own["status"], seconds])
    lines += _table(["part", "what", "status", "seconds"], rows)
    lines += _in_short({name: own["found"] for name, own in report["parts"].items()})
    for part in PARTS:
        own = report["parts"][part.name]
        if own["status"] == "not run":
            continue
        lines += ["", f"## {part.about} ({part.name}: {own['status']})", ""]
        lines += [SAYS[part.name], ""] if part.name in SAYS else []
        lines += _SECTIONS.get(part.name, _plain)(own["found"])
        if "log" in own:
            lines += ["", "```", *own["log"], "```"]
    return "\n".join(lines) + "\n"


def _in_short(found: Found) -> list[str]:
    """What a reader wants to know first, as far as it was found out."""
    lines = []
    if gpu := found["environment"].get("gpu"):
        versions = found["environment"].get("installation", {}).get("versions", {})
        lines.append(f"Card: {gpu['name']}, torch {versions.get('torch', 'unknown')}")
    if counts := found["tests"].get("counts"):
        lines.append(f"Tests on the card: {_pairs(counts)}")
    if checks := found["triton"].get("their own check"):
        lines.append(f"Own check of the Triton kernels: {_pairs(checks)}")
    if taken := found["proof"].get("taken"):
        dtype, rule = taken
        passed = "no rule passes" if rule is None else f"passes in {dtype}, rule: {rule}"
        lines.append(f"Load check of the pair: {passed}")
    if proof := found["proof"].get("proof"):
        lines.append(f"Proof of the pair: {proof['verdict']}")
    stock = found["speed"].get("transformers", {})
    for way, points in found["speed"].get("blockdraft", {}).items():
        for requests, figures in points.items():
            if requests != "error":
                rates = {one["way"]: one["tokens_per_second"] for one in figures}
                rates["transformers"] = stock.get(requests, {}).get("tokens_per_second")
                number = f"{requests} request" + ("s" if requests != "1" else "")
                lines.append(f"Tokens/s at {number} ({way}): {_pairs(rates)}")
    if rows := found["training"].get("evaluations"):
        before, after = (row["true_tau"].get("all", float("nan")) for row in (rows[0], rows[-1]))
        steps = rows[-1]["step"]
        lines.append(f"Tau before training and after {steps} steps: {before:.3f}, {after:.3f}")
    return ["", "## In short", "", *(f"- {line}" for line in lines)] if lines else []


def _table(head: list[str], rows: Iterable[Iterable[object]]) -> list[str]:
    shown = [[str(cell).replace("|", "/") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *shown]]


def _plain(found: Found) -> list[str]:
    """A line for each value."""
    return [_cut(f"- {name}: {value}") for name, value in _flat(found)]


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ... (the rest is in report.json)"


def _flat(found: Found, before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}, ")
        else:
            yield f"{before}{key}", value


def _rest(found: Found, *known: str) -> list[str]:
    return _plain({key: value for key, value in found.items() if key not in known})


_ROWS = (
    'Numbers of rows that are joined by a dash give a row the same bits: "1, then 2-64" says that',
    'one row alone has other bits than among 2 to 64, and "(as 1)" that it has those of 1 again.',
    '"depends on the place": a row has other bits at the end than at the beginning.',
    "",
    '* "plain": one call of torch, which chooses a kernel for the number of rows.',
    '* "whole sums": the same, and torch must not add up parts of a sum in the low precision.',
    '* "tiles of N": rows are filled up, and N at a time go to a call; "batched": all in one call.',
    '* "norm by parts": of simple operations of torch; "norm by torch": its own norm.',
    '* "keys hidden behind 64": a softmax over 64 keys, with ever more masked ones behind them.',
    '* Attention is of a row that sees 121 keys. "rows beside": more rows of its sequence;',
    '  "sequences beside": others in the call; "pages behind": 64 keys each that it must not see.',
    '* "keys by N": attention sums over N keys at a time.',
)


def _rows(found: Found) -> list[str]:
    """First how many layers hold, then every exception."""
    numbers = found.get("number of linear", {})
    lines = [*_ROWS, "", "Linear layers whose rows keep their bits, of all that were tried:"]
    layers = dict(_by_place(found.get("linear", {}), 3))
    ways = dict.fromkeys(way for layer in layers.values() for way in layer)
    ways = {way: None for way in ways if way not in ("ms", "error")}
    rows = [
        [*place, *(f"{held.get(way, 0)} of {numbers.get(place[1], '?')}" for way in ways)]
        for place, held in _by_place(found.get("linear that hold", {}), 2)
    ]
    lines += ["", *_table(["precision", "model", *ways], rows)]
    lines += ["", "Numbers of rows between which the bits of a linear layer change:", ""]
    lines += [
        _cut(f"- {name}: {value}")
        for name, value in _flat(found.get("linear", {}))
        if isinstance(value, str) and value != "same bits"
    ]
    lines += ["", *_operations(found), ""]
    attention = dict(_by_place(found.get("attention", {}), 3))
    lines += _grid(["precision", "model", "attention, by"], attention)
    times = {place: layer["ms"] for place, layer in layers.items() if "ms" in layer}
    if times:
        lines += ["", "Milliseconds:", "", *_grid(["precision", "model", "layer"], times)]
    return [*lines, *_failed(found), *_error(found)]


def _operations(found: Found) -> list[str]:
    """A line for each operation, a column for each precision and model."""
    by_name: dict[Place, dict[str, object]] = {}
    for (dtype, model, name), bits in _by_place(found.get("operations", {}), 3):
        by_name.setdefault((name,), {})[f"{dtype}, {model}"] = bits
    lines = _grid(["operation, by numbers of rows"], by_name)
    softmax = found.get("softmax in float32", {})
    return [*lines, "", *_table(["softmax in float32", "bits"], softmax.items())]


def _failed(found: Found) -> list[str]:
    lines = [_cut(f"- failed: {name}: {why}") for name, why in found.get("failed", {}).items()]
    return ["", *lines] if lines else []


def _error(found: Found) -> list[str]:
    return ["", f"**{found['error']}**"] if "error" in found else []


def _triton(found: Found) -> list[str]:
    """Whether they hold, then the times of each way."""
    tables = "bits", "largest error", "ms"
    values = {name: dict(_by_place(found.get(name, {}), 3)) for name in tables}
    places = list(dict.fromkeys(place for name in tables for place in values[name]))
    rows = [[*place, *(values[name].get(place, "") for name in tables[:2])] for place in places]
    lines = [
        _cut(f"- {key}: {value}")
        for key, value in _flat(found)
        if key.partition(", ")[0] not in (*tables, "attention ms")
    ]
    head = ["precision", "model", "operation"]
    lines += ["", *_table([*head, "bits of a row", "largest difference"], rows)] if rows else []
    if values["ms"]:
        lines += ["", "Milliseconds:", "", *_grid(head, values["ms"])]
    rows = [[*place, ms] for place, ms in _by_place(found.get("attention ms", {}), 3)]
    return [*lines, "", *_table([*head[:2], "attention", "ms"], rows)] if rows else lines


def _by_place(found: Found, depth: int) -> Iterator[tuple[Place, Any]]:
    """The values behind so many keys, such as precision, model and operation."""
    for key, value in found.items():
        if depth == 1:
            yield (key,), value
        else:
            yield from (((key, *rest), own) for rest, own in _by_place(value, depth - 1))


def _grid(names: list[str], rows: Mapping[Place, Found]) -> list[str]:
    """A line for each place, a column for each key that any of them has."""
    columns = dict.fromkeys(column for own in rows.values() for column in own)
    shown = [[*place, *(own.get(name, "") for name in columns)] for place, own in rows.items()]
    return _table([*names, *columns], shown)


def _forwards(found: Found) -> list[str]:
    table = _grid(["precision", "rule"], dict(_by_place(found.get("rules", {}), 2)))
    return [*table, *_failed(found), *_error(found)]


_BESIDE_CHECKS = ("seconds", "partial", "noise", "card", "graphs")


def _proof(found: Found) -> list[str]:
    rows = [[*place, value] for place, value in _by_place(found.get("load check", {}), 2)]
    lines = _table(["precision", "rule", "the check of a load"], rows)
    dtype, rule = found.get("taken") or ("nothing", None)
    lines += ["", f"Proven with: {dtype}, {'exact off' if rule is None else f'rule: {rule}'}"]
    proof = found.get("proof")
    if proof:
        lines += ["", f"Verdict: **{proof['verdict']}**, failures: {proof['failures'] or 'none'}"]
        head = ["name", "num_cases", "num_tokens", "num_failures", "tau"]
        checks = [
            [*(check[name] for name in head[:-1]), f"{check['tau']:.3f}"]
            for check in proof["checks"]
        ]
        lines += ["", *_table(head, checks), ""]
        head = ["name", "caught", "check", "num_cases", "evidence", "skipped"]
        controls = [[control[name] for name in head] for control in proof["controls"]]
        lines += [*_table(["planted fault", *head[1:]], controls), ""]
        for title, kept in (
            ("what the drafter has read", "draft_context"),
            ("draws", "distribution"),
            ("transformers", "transformers"),
        ):
            lines += [*_records(title, proof.get(kept) or []), ""]
        lines += _plain({name: proof[name] for name in _BESIDE_CHECKS if proof.get(name)})
    return [*lines, *_error(found)]


def _records(title: str, records: list[dict[str, Any]]) -> list[str]:
    """A table of records that have the same names."""
    if not records:
        return []
    first, *others = records[0]
    head = [f"{title}: {first}", *others]
    return _table(head, ([record.get(name, "") for name in (first, *others)] for record in records))


def _speed(found: Found) -> list[str]:
    stock = found.get("transformers", {})
    precision = found.get("transformers precision", "")
    rows = []
    for way, points in found.get("blockdraft", {}).items():
        for requests, figures in points.items():
            if requests == "error":
                rows.append([way, "", figures, "", "", "", ""])
                continue
            for one in figures:
                identical = f"{one['num_identical']} of {one['num_outputs']}"
                rate = one["tokens_per_second"]
                rows.append(
                    [way, requests, one["way"], rate, one["speedup"], one["tau"], identical]
                )
    for requests, own in stock.items():
        rate = own.get("tokens_per_second", own.get("error"))
        rows.append([f"transformers generate, {precision}", requests, "plain", rate, "", "", ""])
    head = ["engine", "requests", "decoding", "tokens/s", "over plain", "tau", "same as plain"]
    return [*_table(head, rows), *_error(found)]


def _ledger(found: Found) -> list[str]:
    head = ["ms a step", "device ms", "launches", "graphs", "waits", "operations"]
    steps = dict(_by_place(found.get("steps", {}), 2))
    rows = [[*place, *(own.get(name, "") for name in head)] for place, own in steps.items()]
    lines = _table(["engine", "requests", *head], rows)
    for (way, kind), own in steps.items():
        lines += ["", f"{way}, {kind}:", ""]
        lines += ["- ledger, ms: " + _pairs(own["ledger ms"])]
        for place in ("kernels", "host"):
            shown = [f"{name} {times:g}x {ms} ms" for name, times, ms in own[place][:8]]
            lines += [f"- {place}: " + "; ".join(shown)] if shown else []
    return [*lines, *_error(found)]


def _pairs(values: Found) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _training(found: Found) -> list[str]:
    rows = [
        [
            row["step"],
            f"{row['minutes']:.1f}",
            f"{row['held_out_tau']:.3f}",
            f"{row['loss']:.3f}",
            f"{row['true_tau'].get('all', float('nan')):.3f}",
            f"{row['speedup'].get('all', float('nan')):.2f}",
        ]
        for row in found.get("evaluations", [])
    ]
    head = ["step", "minutes", "held-out tau", "loss", "true tau", "speed-up"]
    return [*_table(head, rows), "", *_rest(found, "evaluations")]


_SECTIONS = {
    "triton": _triton,
    "rows": _rows,
    "forwards": _forwards,
    "proof": _proof,
    "speed": _speed,
    "ledger": _ledger,
    "training": _training,
}
