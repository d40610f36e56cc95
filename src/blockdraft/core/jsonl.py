"""The one reader of JSONL files: every row an object, every error with file and line."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from blockdraft.core.errors import ConfigError, why_unread

T = TypeVar("T")

MOST_NAMED = 20
"""Bad lines that an error names."""
_READ_ERRORS = (OSError, EOFError, zlib.error, ValueError)
"""OSError also says that a file is no gzip; EOFError and zlib.error that one is cut off."""


def read_jsonl(
    path: Path,
    *,
    is_growing: bool = False,
    on_bad_row: Callable[[ConfigError], None] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, row) of a (gzipped) JSONL file; blank lines are skipped.

    Args:
        path: read as gzip if it ends in ".gz".
        is_growing: the file may still be written, so a last line that is not whole is left out.
        on_bad_row: is given the error of a line that is no JSON object, which is then left out;
            without it such a line raises the error.

    Raises:
        ConfigError: the file cannot be read, is one JSON list, or a line is no JSON object.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        # Editors on Windows begin a file with a byte order mark. Bytes that are no UTF-8 come as
        # lone surrogates, so that `_parse` can say on which line they are.
        with opener(path, "rt", encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.startswith("["):
                    remedy = f"write each object on its own line (jq -c '.[]' {path})"
                    raise bad_row(path, number, "the file is one JSON list", remedy)
                if not line.strip() or (is_growing and not is_whole(line)):
                    continue
                row = _parse(line, path, number, on_bad_row)
                if row is not None:
                    yield number, row
    except _READ_ERRORS as error:
        reason = why_unread(error)
        raise ConfigError(
            f"cannot read {path}: {reason}; give a complete JSONL file in UTF-8"
        ) from error


def read_all(path: Path, read_row: Callable[[dict[str, Any], int], T]) -> list[T]:
    """What `read_row` makes of every row and its line number.

    Raises:
        ConfigError: see `read_each`; or the file holds no row.
    """
    found = read_each(path, read_row)
    if not found:
        raise ConfigError(f"{path} holds no prompts; give JSONL rows with turns or prompt")
    return found


def read_each(path: Path, read_row: Callable[[dict[str, Any], int], T]) -> list[T]:
    """What `read_row` makes of every row and its line number; there may be none.

    Raises:
        ConfigError: the file cannot be read, or lines are bad: all are named, up to MOST_NAMED,
            unless none of several is an object, as in a file of another form.
    """
    bad: list[ConfigError] = []
    found = []
    number = 0
    for number, row in read_jsonl(path, on_bad_row=bad.append):
        try:
            found.append(read_row(row, number))
        except ConfigError as error:
            bad.append(error)
    if len(bad) == 1:
        raise bad[0]
    if bad and not number:
        remedy = 'write one per line, in UTF-8, such as {"prompt": "Explain rain."}'
        raise ConfigError(f"none of the {len(bad)} lines of {path} is a JSON object; {remedy}")
    if bad:
        named = " | ".join(str(error) for error in bad[:MOST_NAMED])
        more = f" | and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        raise ConfigError(f"{len(bad)} lines are bad: {named}{more}")
    return found


def is_whole(line: str | bytes) -> bool:
    """Whether a last line is all that was to be written: it has its end, or is JSON without it."""
    if line[-1:] in ("\n", b"\n"):
        return True
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parse(
    line: str, path: Path, number: int, on_bad_row: Callable[[ConfigError], None] | None
) -> dict[str, Any] | None:
    """The row of a line; None if it is bad and was told to `on_bad_row`."""
    remedy = "fix or delete that line"
    try:
        line.encode()
    except UnicodeEncodeError:
        row, reason, remedy = None, "it is not in UTF-8", "save the file in UTF-8"
    else:
        row, reason = _row_of(line)
    if isinstance(row, dict):
        return row
    bad = bad_row(path, number, reason, remedy)
    if on_bad_row is None:
        raise bad
    on_bad_row(bad)
    return None


def _row_of(line: str) -> tuple[Any, str]:
    """What a line says, and why it is no row unless that is an object."""
    try:
        row = json.loads(line)
        # An escape can say half of a character, which no file, hash or tokenizer takes.
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "a text in it has half a character, a lone surrogate"
    # Also of a number with too many digits, and of lists in lists in lists.
    except (ValueError, RecursionError) as error:
        return None, f"invalid JSON ({error})"
    return row, "it is not a JSON object"


def bad_row(path: Path, number: int, reason: str, remedy: str) -> ConfigError:
    """The error that a row deserves."""
    return ConfigError(f"cannot read {path}, line {number}: {reason}; {remedy}")


def set_name(path: Path) -> str:
    """What the rows of a file are called together: its name without endings."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


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


def later_turns(row: Mapping[str, Any], path: Path, number: int) -> tuple[str, ...]:
    """The user's `turns` behind the first, of a row that `prompt_text` accepts.

    Raises:
        ConfigError: one is no text, or empty.
    """
    later = row.get("turns", [None])[1:]
    if not all(isinstance(turn, str) and turn.strip() for turn in later):
        reason = "a turn after the first is empty or not text"
        raise bad_row(path, number, reason, 'give "turns": ["text", "text"]')
    return tuple(later)
