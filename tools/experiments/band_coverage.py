"""How often a 95 % band of few prompts holds the speed-up of all of them.

    python tools/experiments/band_coverage.py RESULT.json... [--sizes 2,6,10,60] [--draws 600]

RESULT is one of one run of `bench speed`. Its conversations are taken for all there are: so many of
them are drawn with replacement, again and again, and each draw gets its band.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockdraft.bench.measures import bootstrap_band, summed_by_prompt


def conversations(path: Path) -> np.ndarray:
    """Tokens and seconds, drafted and then plain, of all turns of each; see `bootstrap_band`."""
    turns = json.loads(path.read_text(encoding="utf-8"))["runs"][0]["prompts"]
    rows = [
        [value for side in ("drafted", "plain") for value in _work(turn[side])] for turn in turns
    ]
    return summed_by_prompt(np.array(rows), [(turn["category"], turn["id"]) for turn in turns])


def _work(output: Mapping[str, Any]) -> tuple[int, float]:
    return len(output["token_ids"]), output["total_seconds"]


def coverage(rows: np.ndarray, size: int, draws: int) -> float:
    """The share of draws of `size` rows whose band holds the ratio of all rows."""
    generator = np.random.default_rng(1)
    tokens, seconds, plain_tokens, plain_seconds = rows.sum(axis=0)
    truth = tokens / seconds / (plain_tokens / plain_seconds)
    bands = (bootstrap_band(generator.choice(rows, size)) for _ in range(draws))
    return sum(bool(low <= truth <= high) for low, high in bands) / draws


def table(paths: Sequence[Path], sizes: Sequence[int], draws: int) -> str:
    """A row for each size, a column for each result, as Markdown."""
    columns = [conversations(path) for path in paths]
    lines = ["| prompts | " + " | ".join(path.stem for path in paths) + " |"]
    lines.append("|---" * (1 + len(paths)) + "|")
    for size in sizes:
        cells = [f"{coverage(rows, size, draws):.1%}" for rows in columns]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--sizes", default="2,6,10,60")
    parser.add_argument("--draws", type=int, default=600)
    args = parser.parse_args()
    print(table(args.results, [int(size) for size in args.sizes.split(",")], args.draws))


if __name__ == "__main__":
    main()
