"""Answers as token shards: compact files, and a manifest that says what is in them.

A shard is a safetensors file of `tokens` (prompt and answer of row after row, 2 bytes a token where
the vocabulary allows) and of `prompt_lens` and `lengths`; its metadata holds the other facts of
each row. The manifest names target, template, sampling and counts.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import (
    check_output_folder,
    folder_lock,
    full_disk_refused,
    read_json,
    replace_file,
    write_whole,
)
from blockdraft.core.jsonl import read_jsonl
from blockdraft.data.answer_file import hash_of, last_rows
from blockdraft.text.kinds import loops

logger = logging.getLogger(__name__)

ANSWERS, MANIFEST = "answers.jsonl", "manifest.json"

_FACTS = ("id", "set", "temperature", "sample", "finish")

Row = Mapping[str, Any]


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (number from 1, row) of a JSONL file, a shard, or a folder of `blockdraft data`.

    Of a folder the shards of its manifest are read, or the answers so far if it has none yet.

    Raises:
        ConfigError: something is missing or damaged.
    """
    if not path.exists():
        remedy = "give one that `blockdraft data` wrote"
        raise ConfigError(f"there is no folder or file of answers {path}; {remedy}")
    if path.is_dir():
        if _is_unfinished(path):
            yield from last_rows(path / ANSWERS)
        else:
            for file in files_of(path):
                yield from read_rows(file)
    elif path.suffix == ".safetensors":
        yield from enumerate(_read_shard(path), 1)
    else:
        yield from read_jsonl(path, is_growing=True)


def files_of(path: Path) -> list[Path]:
    """The files that `read_rows` reads: of a folder its shards, or the answers so far."""
    if not path.is_dir():
        return [path]
    shards = (read_manifest(path) or {}).get("shards")
    return [path / ANSWERS] if shards is None else [path / shard["name"] for shard in shards]


def write_shards(
    folder: Path, rows: Iterable[Row], *, rows_per_shard: int, drop_truncated: bool
) -> dict[str, Any]:
    """Write what is fit to train on; returns the manifest's `shards` and `counts`.

    Left out and counted: loops, repeated answers to a prompt, and with `drop_truncated` those that
    were cut off. Shards of an earlier time that are not written again are deleted.
    """
    counts: Counter[str] = Counter()
    kept = _kept(rows, counts, drop_truncated=drop_truncated)
    shards: list[dict[str, Any]] = []
    while part := list(islice(kept, rows_per_shard)):
        name = f"answers-{len(shards):05d}.safetensors"
        _write_shard(folder / name, part)
        tokens = sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in part)
        shards.append({"name": name, "num_answers": len(part), "num_tokens": tokens})
    for path in set(folder.glob("answers-*.safetensors")) - {folder / s["name"] for s in shards}:
        path.unlink()
    return {"shards": shards, "counts": dict(counts)}


def _kept(rows: Iterable[Row], counts: Counter[str], *, drop_truncated: bool) -> Iterator[Row]:
    seen = set()
    for row in rows:
        counts["answers"] += 1
        key = hash_of(row["prompt_ids"], row["response_ids"])
        if row["finish"] == "loop" or loops(row["response_ids"]):
            counts["loops"] += 1
        elif drop_truncated and row["finish"] == "length":
            counts["truncated"] += 1
        elif key in seen:
            counts["repeated"] += 1
        else:
            seen.add(key)
            counts["kept"] += 1
            counts["kept_answer_tokens"] += len(row["response_ids"])
            yield row


def _write_shard(path: Path, rows: Sequence[Row]) -> None:
    ids = [id_ for row in rows for id_ in (*row["prompt_ids"], *row["response_ids"])]
    dtype = np.uint16 if max(ids, default=0) < 2**16 else np.uint32
    prompt_lens = [len(row["prompt_ids"]) for row in rows]
    lengths = [size + len(row["response_ids"]) for size, row in zip(prompt_lens, rows, strict=True)]
    tensors = {
        "tokens": np.array(ids, dtype=dtype),
        "prompt_lens": np.array(prompt_lens, dtype=np.int64),
        "lengths": np.array(lengths, dtype=np.int64),
    }
    facts = json.dumps([[row[name] for name in _FACTS] for row in rows])
    replace_file(path, lambda part: save_file(tensors, part, metadata={"rows": facts}))


def _read_shard(path: Path) -> Iterator[Row]:
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {})["rows"])
            tokens = file.get_tensor("tokens")
            prompt_lens, lengths = file.get_tensor("prompt_lens"), file.get_tensor("lengths")
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path} ({error!r}); generate the answers again, or copy the shard again"
        ) from error
    start = 0
    for values, prompt_len, length in zip(facts, prompt_lens, lengths, strict=True):
        ids = tokens[start : start + int(length)].tolist()
        start += int(length)
        split = {"prompt_ids": ids[: int(prompt_len)], "response_ids": ids[int(prompt_len) :]}
        yield dict(zip(_FACTS, values, strict=True)) | split


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder of answers, None if there is none.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = read_json(path)
        texts = [manifest[name]["sha256"] for name in ("target", "template")]
        texts += [shard["name"] for shard in manifest.get("shards") or ()]
        good = all(isinstance(text, str) for text in texts)
        good = good and all(isinstance(run["config"], dict) for run in manifest["runs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); give another folder") from error
    if not good:
        raise ConfigError(
            f"{path} is not a manifest that `blockdraft data` wrote; give another folder"
        )
    return dict(manifest)


def _is_unfinished(folder: Path) -> bool:
    manifest = read_manifest(folder)
    return manifest is not None and "shards" not in manifest


def tell_unfinished(paths: Iterable[Path]) -> None:
    """Warn of folders that lack answers, since `blockdraft data` was interrupted there.

    Raises:
        ConfigError: a manifest is damaged.
    """
    for path in paths:
        if path.is_dir() and _is_unfinished(path):
            logger.warning(
                "the answers in %s are unfinished, and only those so far are read; to finish them, "
                "run the same `blockdraft data` again",
                path,
            )


def target_named(manifest: Mapping[str, Any]) -> str:
    """The target of a folder of answers, as its last run called it.

    The folder of a target from the hub is a hash, which tells nobody anything.
    """
    called = [run["config"].get("target") for run in manifest["runs"]]
    return str(called[-1] if called and called[-1] else manifest["target"].get("folder"))


def told_thinking(paths: Iterable[Path]) -> set[str]:
    """What the template was told of thinking when folders of answers were written.

    Answers that come as plain files do not say.

    Raises:
        ConfigError: a manifest is damaged.
    """
    manifests = [read_manifest(path) for path in paths if path.is_dir()]
    return {
        run["config"].get("thinking", "template")
        for manifest in manifests
        for run in (manifest["runs"] if manifest else ())
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    write_whole(folder / MANIFEST, json.dumps(dict(manifest), indent=1) + "\n")


def join_data(
    sources: Sequence[Path], output: Path, *, rows_per_shard: int, drop_truncated: bool = False
) -> Path:
    """Join folders of answers that were made apart, such as on several machines.

    An answer (prompt, temperature, sample) that several hold is taken from the first.

    Raises:
        ConfigError: a folder has no manifest, the answers are of different targets or templates,
            answers were written into `output`, or none is left.
    """
    check_output_folder(output)
    with folder_lock(output), full_disk_refused(output):
        manifest = _joined_manifest(sources, output)
        tell_unfinished(sources)
        if (output / MANIFEST).exists():
            # If joining fails, its old shards and new ones must not pass for all there are.
            write_manifest(output, manifest)
        rows = _without_repeats(sources)
        written = write_shards(
            output, rows, rows_per_shard=rows_per_shard, drop_truncated=drop_truncated
        )
        if not written["shards"]:
            raise ConfigError(
                f"no answer is left to join ({written['counts']}); give other folders"
            )
        write_manifest(output, manifest | written)
    return output


def _joined_manifest(sources: Sequence[Path], output: Path) -> dict[str, Any]:
    """Of all runs, with the target and template that they share."""
    if output.resolve() in {source.resolve() for source in sources}:
        raise ConfigError(f"{output} is one of the folders to join; give another --output")
    if (output / ANSWERS).exists():
        raise ConfigError(f"{output} holds answers of its own; give another --output, and join it")
    manifests = []
    for source in sources:
        manifest = read_manifest(source)
        if manifest is None:
            raise ConfigError(f"{source} has no {MANIFEST}; give folders that this command wrote")
        manifests.append(manifest)
    for name in ("target", "template"):
        hashes = [manifest[name]["sha256"] for manifest in manifests]
        if len(set(hashes)) > 1:
            other = next(i for i, sha256 in enumerate(hashes) if sha256 != hashes[0])
            raise ConfigError(
                f"{sources[0]} and {sources[other]} were made with a different {name}; join only "
                "answers of one target and one chat template"
            )
    # The target is the same, so what any folder knows of it holds; older ones know less.
    target = {name: value for one in reversed(manifests) for name, value in one["target"].items()}
    runs = [run for one in manifests for run in one["runs"]]
    return {"target": target, "template": manifests[0]["template"], "runs": runs}


def _without_repeats(sources: Sequence[Path]) -> Iterator[Row]:
    seen = set()
    for source in sources:
        for _, row in read_rows(source):
            key = (row["id"], tuple(row["prompt_ids"]), row["temperature"], row["sample"])
            if key not in seen:
                seen.add(key)
                yield row
