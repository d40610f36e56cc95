"""Whether the lines of a ledger sum to the wall time, and how much no line claims.

    blockdraft bench speed --prompts FILE --limit 20 --no-transformers --ledger --output run.json
    python tools/experiments/ledger_sum.py run.json

The ledger's clock is held against the one that timed the requests, which knows nothing of phases.
Exits with 1 if they differ by over 2 %, or the remainder is over 5 %. On a machine with other work
a line is charged for each moment in which the process had to wait for its turn.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_APART = 0.02
MOST_REMAINDER = 0.05


def main(path: Path) -> int:
    """Print a line for each way to decode; the exit status."""
    within = True
    for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
        if "ledger" not in run:
            sys.exit(f"{path} holds no ledger; measure with --ledger")
        for name, line, is_within in _ways(run):
            print(f"{name:>8}: {line}{'' if is_within else '  TOO MUCH'}")
            within = within and is_within
    return 0 if within else 1


def _ways(run: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    for name, account in run["ledger"]["accounts"].items():
        lines = sum(line["nanoseconds"] for line in account["lines"].values()) / 1e9
        wall = sum(prompt[name]["total_seconds"] for prompt in run["prompts"])
        apart, remainder = lines / wall - 1, account["remainder_share"]
        yield (
            name,
            f"{len(run['prompts'])} prompts, lines sum to {lines:.3f} s, requests took "
            f"{wall:.3f} s ({apart:+.2%}), remainder {remainder:.2%}",
            abs(apart) <= MOST_APART and remainder <= MOST_REMAINDER,
        )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
