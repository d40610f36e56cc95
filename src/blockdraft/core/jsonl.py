"""The one reader of JSONL files: every row an object, every error with file and line."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blockdraft.core.errors import ConfigError

_READ_ERRORS = (OSError, EOFError, zlib.error, ValueError)
"""OSError also says that a file is no gzip; EOFError and zlib.error that one is cut off."""


def read_jsonl(path: Path, *, is_growing: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) of a (gzipped) JSONL file; blank lines are skipped.

    Args:
        path: read as gzip if it ends in ".gz".
        is_growing: the file may still be written, so a last line without its end is left out.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object.
    """
    for number, line in read_lines(path):
        if is_growing and not line.endswith("\n"):
            continue
        yield number, parse_row(line, path, number)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line) of a (gzipped) text file; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except _READ_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot read {path}: {reason}; give a JSONL file, whole and in UTF-8"
        ) from error


def parse_row(line: str, path: Path, number: int) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        ConfigError: it holds none; names the line.
    """
    try:
        row = json.loads(line)
    except ValueError as error:  # also of a number with too many digits
        raise bad_row(path, number, f"no JSON ({error})", "mend or delete that line") from error
    if not isinstance(row, dict):
        raise bad_row(path, number, "it is no JSON object", "mend or delete that line")
    return row


def bad_row(path: Path, number: int, reason: str, remedy: str) -> ConfigError:
    """The error that a row deserves."""
    return ConfigError(f"cannot read {path}, line {number}: {reason}; {remedy}")


def prompt_text(row: Mapping[str, Any], path: Path, number: int) -> str:
    """The text of a row of prompts: the first of its `turns`, or its `prompt`.

    Raises:
        ConfigError: it holds neither, or no text there.
    """
    turns = row["turns"] if "turns" in row else [row.get("prompt")]
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        remedy = 'give "turns": ["text"] or "prompt": "text"'
        raise bad_row(path, number, "it holds no prompt", remedy)
    if not turns[0].strip():
        raise bad_row(path, number, "its prompt is empty", "give some text, or delete that line")
    return turns[0]
