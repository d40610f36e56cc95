"""Fingerprints of files: whether they are those that were looked at before.

What a model is known by differs by who asks. Each value stands in files that people keep, so none
can take the place of another:

* `models.fingerprint.weights_sha256`: the tensors alone, however they are saved. Drafters and
  manifests of answers say by it which target they are of, on any machine.
* `data.identity.target_sha256`: config and files of weights. Answers, states and caches in a folder
  go on only with it.
* `measure.identity.hash_model`: the same and how it generates. Certificates and receipts have it,
  for an output depends on all of it.
* `sample_files` below: no reading of all. What was measured at a start, and a run of `bench` that
  goes on, are held against it.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

SAMPLE_BYTES = 2**16
NUM_SAMPLES = 64
HEAD_BYTES = 2**20


def hash_file(path: Path) -> str:
    """SHA-256 of the content of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path, patterns: Iterable[str]) -> str:
    """SHA-256 over the names and contents of the files that match, in the order of their names."""
    digest = hashlib.sha256()
    for path in _matching(folder, patterns):
        digest.update(f"{path.relative_to(folder).as_posix()} {hash_file(path)}\n".encode())
    return digest.hexdigest()


def sample_files(folder: Path, patterns: Iterable[str]) -> str:
    """SHA-256 over names, sizes, times of change and samples of the contents of large files.

    Milliseconds where hashing all would take as long as reading the weights. It tells another
    model from this one, and a file that was written again. It does not find a change that somebody
    hides on purpose, by setting the time back.
    """
    digest = hashlib.sha256()
    for path in _matching(folder, patterns):
        status = path.stat()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEAD_BYTES))
            last = max(0, status.st_size - SAMPLE_BYTES)
            for number in range(NUM_SAMPLES):
                file.seek(number * last // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)
