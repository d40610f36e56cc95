"""Figures that others have published, beside one's own. None of them was measured here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockdraft.bench.report.section import Grid, Section, without_repeats
from blockdraft.bench.report.speed_sections import speedup_and_tau
from blockdraft.bench.result import Result, damage_refused, need

SETS = ("GSM8K", "MATH-500", "AIME25", "HumanEval", "MBPP", "LiveCodeBench", "MT-Bench")
"""The paper's seven sets of prompts, in its order."""

_PAPER = "arXiv 2602.06036, table 1"
_MACHINE = "H200, transformers, one request at a time, at most 2048 tokens"
_SERVING = "arXiv 2602.06036, serving"
_SERVING_MACHINE = "B200, SGLang"


@dataclass(frozen=True, slots=True)
class Published:
    """Speed-up over plain decoding and tau, by set; `average` over all seven."""

    method: str
    target: str
    temperature: float
    by_set: tuple[tuple[float, float], ...]
    average: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PublishedLoad:
    """Speed-up over plain decoding by concurrency, and tau."""

    method: str
    target: str
    prompts: str
    speedups: tuple[float, ...]
    tau: float


LOADS = (1, 4, 8, 16, 32)
"""The concurrencies of PublishedLoad."""


def _published(method: str, target: str, temperature: float, figures: str) -> Published:
    """From `speed-up/tau` of each of SETS, and the average behind them."""
    pairs = [one.split("/") for one in figures.split()]
    *by_set, average = ((float(speedup), float(tau)) for speedup, tau in pairs)
    return Published(method, target, temperature, tuple(by_set), average)


PUBLISHED = (
    _published(
        *("EAGLE-3, tree of 16", "Qwen3-4B", 0.0),
        "1.99/3.30 1.83/3.08 1.79/3.05 1.84/3.05 1.78/2.95 1.73/2.91 1.74/3.02 1.81/3.05",
    ),
    _published(
        *("EAGLE-3, tree of 60", "Qwen3-4B", 0.0),
        "2.27/3.77 2.10/3.52 2.13/3.51 2.12/3.47 2.02/3.38 1.90/3.22 2.04/3.49 2.08/3.48",
    ),
    _published(
        *("DFlash, block of 16", "Qwen3-4B", 0.0),
        "5.15/6.53 6.09/7.84 5.68/7.27 5.21/6.64 4.78/6.09 5.41/7.09 2.85/4.35 4.91/6.54",
    ),
    _published(
        *("EAGLE-3, tree of 16", "Qwen3-8B", 0.0),
        "1.94/3.23 1.81/3.02 1.79/3.00 1.89/3.17 1.69/2.82 1.57/2.65 1.63/2.83 1.76/2.96",
    ),
    _published(
        *("EAGLE-3, tree of 60", "Qwen3-8B", 0.0),
        "2.23/3.71 2.05/3.49 2.05/3.44 2.17/3.65 1.93/3.25 1.81/3.03 1.90/3.26 2.02/3.40",
    ),
    _published(
        *("DFlash, block of 16", "Qwen3-8B", 0.0),
        "5.15/6.54 6.08/7.87 5.62/7.08 5.14/6.50 4.65/5.95 5.51/7.27 2.75/4.24 4.86/6.49",
    ),
    _published(
        *("DFlash, block of 16", "Qwen3-4B", 1.0),
        "4.71/6.00 5.09/6.67 3.73/4.92 4.74/6.04 4.42/5.66 4.90/6.50 2.67/4.07 4.24/5.69",
    ),
    _published(
        *("DFlash, block of 16", "Qwen3-8B", 1.0),
        "4.67/5.98 4.84/6.40 3.57/4.73 4.32/5.52 4.04/5.21 4.93/6.69 2.47/3.80 4.03/5.48",
    ),
)

PUBLISHED_LOADS = (
    PublishedLoad("DFlash", "Qwen3-4B", "MATH", (4.8, 4.3, 4.1, 3.5, 2.9), 8.01),
    PublishedLoad("DFlash", "Qwen3-4B", "HumanEval", (4.0, 3.6, 3.2, 2.7, 2.2), 6.63),
    PublishedLoad("DFlash", "Qwen3-8B", "MATH", (5.1, 4.5, 4.5, 3.9, 2.8), 8.01),
    PublishedLoad("DFlash", "Qwen3-8B", "HumanEval", (4.2, 3.6, 3.6, 3.0, 2.4), 6.50),
    PublishedLoad("EAGLE-3, tree of 60", "Llama-3.1-8B", "GSM8K", (1.9, 1.6, 1.3, 0.9, 0.6), 4.55),
    PublishedLoad("DFlash", "Llama-3.1-8B", "GSM8K", (2.4, 2.2, 2.1, 1.8, 1.6), 4.32),
)


def set_of(name: str) -> str | None:
    """Which of SETS a set of one's own is, by its name; None if it is none of them."""
    letters = "".join(letter for letter in name.lower() if letter.isalnum())
    return next(
        (each for each in SETS if letters.startswith("".join(filter(str.isalnum, each.lower())))),
        None,
    )


def published_section(results: Sequence[Result]) -> Section:
    """Figures of others, below one's own of the same sets, or beside load; else no table."""
    own = []
    for result in results:
        with damage_refused(result):
            own += _own_rows(result)
    rows = own + [
        [
            f"published: {one.method}, {one.target}",
            f"{one.temperature:g}",
            *(f"{speedup:.2f}, {tau:.2f}" for speedup, tau in one.by_set),
            f"{one.average[0]:.2f}, {one.average[1]:.2f}",
            _MACHINE,
            _PAPER,
        ]
        for one in PUBLISHED
    ]
    loads = [
        [
            f"published: {one.method}, {one.target}",
            one.prompts,
            *(f"{speedup:.1f}" for speedup in one.speedups),
            f"{one.tau:.2f}",
            _SERVING_MACHINE,
            _SERVING,
        ]
        for one in PUBLISHED_LOADS
    ]
    about = (
        'Speed-up over plain decoding, and tau. Rows named "published" were measured by others, on '
        "other machines, with other models and engines, and come without a spread: compare "
        "orders of magnitude only."
    )
    heads = ["method", "temperature", *SETS, "all seven", "machine", "source"]
    load_heads = [
        "method",
        "prompts",
        *(f"concurrency {n}" for n in LOADS),
        "tau",
        "machine",
        "source",
    ]
    grids = []
    if own:
        # Some of one's own have no interval here either.
        grid = Grid("One request at a time", about, heads, rows)
        grids.append(without_repeats(grid, "*", "*: one prompt, no spread."))
    if any(result.kind in ("concurrency", "pareto") for result in results):
        grids.append(Grid("Many concurrent requests", f"By load. {about}", load_heads, loads))
    return Section("Beside figures that others published, on other machines", grids=grids)


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
