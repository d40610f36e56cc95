"""Answers of `blockdraft data` as compressed parts of a recipe, and back.

python tools/pack_answers.py ANSWERS RECIPE            packs what no part holds, in whole parts
python tools/pack_answers.py ANSWERS RECIPE --rest     ... the last part too, however small
python tools/pack_answers.py ANSWERS RECIPE --restore  writes ANSWERS/answers.jsonl from the parts,
                                                       so that `blockdraft data` goes on behind them

A part is RECIPE/answers-written-N.jsonl.gz, about 4 MB.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from blockdraft.core.jsonl import read_jsonl
from blockdraft.data.answer_file import Key, key_of, last_rows
from blockdraft.data.shards import ANSWERS

ROWS_PER_PART = 16_384
"""About 4 MB: an answer takes 250 bytes."""
Row = dict[str, Any]


def parts_of(recipe: Path) -> list[Path]:
    """The parts in their order."""
    found = recipe.glob("answers-written-*.jsonl.gz")
    return sorted(found, key=lambda path: int(path.name.split("-")[2].split(".")[0]))


def rows_of(parts: Iterable[Path]) -> Iterator[Row]:
    """All rows of some parts."""
    for part in parts:
        for _, row in read_jsonl(part):
            yield row


def write_part(path: Path, rows: list[Row]) -> None:
    """Write one part whole, the same bytes for the same rows."""
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def pack(answers: Path, recipe: Path, *, with_rest: bool) -> list[Path]:
    """Write the answers that no part holds; returns the new parts."""
    parts = parts_of(recipe)
    known: set[Key] = {key_of(row) for row in rows_of(parts)}
    new = [row for _, row in last_rows(answers / ANSWERS) if key_of(row) not in known]
    written: list[Path] = []
    for start in range(0, len(new), ROWS_PER_PART):
        rows = new[start : start + ROWS_PER_PART]
        if len(rows) < ROWS_PER_PART and not with_rest:
            break
        written.append(recipe / f"answers-written-{len(parts) + len(written)}.jsonl.gz")
        write_part(written[-1], rows)
    return written


def restore(answers: Path, recipe: Path) -> int:
    """Write the answers of all parts where `blockdraft data` looks for them; returns how many."""
    answers.mkdir(parents=True, exist_ok=True)
    path = answers / ANSWERS
    known = (
        {key_of(row) for _, row in read_jsonl(path, is_growing=True)} if path.exists() else set()
    )
    missing = [row for row in rows_of(parts_of(recipe)) if key_of(row) not in known]
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in missing)
    return len(missing)


def main() -> None:
    """Pack or restore, and say what the parts hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("answers", type=Path)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--restore", action="store_true")
    options = parser.parse_args()
    if options.restore:
        print(f"{restore(options.answers, options.recipe)} answers restored")
        return
    for path in pack(options.answers, options.recipe, with_rest=options.rest):
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MB")
    counts: Counter[str] = Counter()
    for row in rows_of(parts_of(options.recipe)):
        kind = "greedy" if row["temperature"] == 0 else "sampled"
        counts.update(("answers", f"{row['set']}, {kind}", f"finish {row['finish']}"))
        counts["tokens"] += len(row["response_ids"])
    print(json.dumps(dict(sorted(counts.items())), indent=1))


if __name__ == "__main__":
    main()
