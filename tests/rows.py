"""JSONL files."""

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_prompts(path: Path, num: int) -> Path:
    """Short ones, each another."""
    return write_rows(path, ({"prompt": f"say {n}"} for n in range(num)))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """One row a line, compressed if the file is to be."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
