"""Generations as JSON, and as a line for people. Loads no model library."""

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from blockdraft.core.errors import (
    AnswerFailed,
    BlockdraftError,
    ConfigError,
    DiskError,
    Refusal,
    RequestError,
)
from blockdraft.core.files import FULL, is_special, write_whole
from blockdraft.core.words import counted

if TYPE_CHECKING:
    from blockdraft.engine.completion import Completion, Generation
    from blockdraft.llm import LLM

_BLOCK = 4096
"""Bytes that a file takes at least, on most disks."""


def prints_unicode(stream: TextIO) -> bool:
    """True if its encoding has every letter."""
    return (stream.encoding or "utf-8").lower().startswith("utf")


def print_json(value: object, *, as_line: bool = False) -> None:
    """Print one JSON document, on one line if several follow each other.

    Text beyond ASCII stays readable, where it can be printed.
    """
    is_ascii = not prints_unicode(sys.stdout)
    json.dump(value, sys.stdout, ensure_ascii=is_ascii, indent=None if as_line else 2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def check_writable(path: Path | None) -> None:
    """Refuse at once a file that could not be written at the end.

    Raises:
        ConfigError: its folder does not exist or takes no new file, or it is a folder.
        DiskError: the disk is full.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: its folder does not exist; create it first")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    if is_special(path):
        return
    try:
        # Permissions do not say it all: a disk may be full or mounted for reading alone. A full
        # one still takes a file without content.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_BLOCK))
            file.flush()
    except OSError as error:
        kind = DiskError if error.errno in FULL else ConfigError
        raise kind(
            f"cannot write {path}: no file can be created in its folder ({error.strerror}); name "
            "another"
        ) from None


def check_not_read(path: Path | None, inputs: Iterable[Path] | None) -> None:
    """Refuse to write over a file that the command reads, such as somebody's prompts.

    Raises:
        ConfigError: it is one of them.
    """
    # A device or a pipe may be read and written; a link is written through.
    if path is None or not path.is_file():
        return
    for read in inputs or ():
        if read.exists() and path.samefile(read):
            raise ConfigError(f"cannot write {path}: this command reads it; name another file")


def write_report(path: Path, text: str) -> None:
    """Write a file that was asked for, whole or not at all.

    Raises:
        DiskError: it cannot be written; the system's own error may not name the file.
    """
    try:
        write_whole(path, text)
    except BrokenPipeError:
        raise  # the file is a pipe, and whoever read it has left
    except OSError as error:
        raise DiskError(
            f"cannot write {path}: {error.strerror}; free space there, or name another file"
        ) from error


def describe_llm(llm: "LLM") -> dict[str, Any]:
    """What was loaded, as it was resolved."""
    import torch

    return {
        "target": llm.config.target,
        "drafter": None if llm.drafter_folder is None else str(llm.drafter_folder),
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantize": llm.config.quantize,
        "kv_cache_dtype": llm.config.kv_cache_dtype,
        "device": llm.device,
        "exact": llm.config.exact,
        "num_draft_tokens": llm.config.num_draft_tokens,
        "draft_depth": llm.config.draft_depth,
        "threads": torch.get_num_threads(),
    }


def describe_completion(completion: "Completion") -> dict[str, Any]:
    """One sample with its statistics."""
    timings = completion.timings
    described: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "tokens_per_second": timings.tokens_per_second,
        "time_to_first_token": timings.first_token,
        "decode_seconds": timings.decode,
        "total_seconds": timings.total,
        **completion.acceptance.to_dict(),
    }
    if completion.error is not None:
        described["error"] = completion.error
    if completion.logprobs is not None:
        described["logprobs"] = [
            {
                "token_id": token_id,
                "logprob": entry.logprob,
                "top": [{"token_id": i, "logprob": logprob} for i, logprob in entry.top],
            }
            for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return described


def check_answered(generation: "Generation") -> None:
    """Refuse an answer that was not finished.

    Raises:
        RequestError: its request asks for what cannot be followed to the end.
        AnswerFailed: a fault that is not the request's ended it.
    """
    for completion in generation.completions:
        if completion.error is not None:
            kind = kind_of_failure([completion.error])
            raise kind(f"sample {completion.index} ended with an error: {completion.error}")


def kind_of_failure(errors: Iterable[str]) -> type[BlockdraftError]:
    """What a command raises for answers that ended so: the requests' doing, or a fault."""
    return RequestError if all(isinstance(one, Refusal) for one in errors) else AnswerFailed


def summary_line(completion: "Completion") -> str:
    """Tokens, speed, how many were drafted a step and how they fared, on one line."""
    acceptance = completion.acceptance
    parts = [counted(len(completion.token_ids), "token")]
    # Without a pass behind the prompt's there is no speed of decoding, and no tau.
    if acceptance.num_passes:
        parts += [
            f"{completion.timings.tokens_per_second:.1f} tok/s",
            f"tau {acceptance.acceptance_length:.2f}",
            f"depth {acceptance.mean_depth:.1f}",
        ]
    if acceptance.drafted:
        parts.append(f"acceptance {acceptance.acceptance_rate:.0%}")
    # The prompt's pass gives the first token.
    passes = acceptance.num_passes + 1
    parts.append(f"{passes} target {'pass' if passes == 1 else 'passes'}")
    return ", ".join(parts)
