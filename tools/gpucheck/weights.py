"""The default target on a machine without internet: its package file, whole or in pieces."""

import shutil
from pathlib import Path

from blockdraft.core.config import DEFAULT_TARGET
from blockdraft.hub.catalog import CATALOG, WheelFile
from blockdraft.hub.prepare import CONVERSION_VERSION


def join_pieces(folder: Path, cache: Path) -> Path:
    """Write the pieces of `folder`, in the order of their names, to where the cache looks for it.

    The checksum is tested when the file is converted. What is there already is left alone.

    Raises:
        SystemExit: the folder holds too few bytes.
    """
    source = CATALOG[DEFAULT_TARGET].source
    assert isinstance(source, WheelFile)
    whole = cache / "work" / DEFAULT_TARGET / source.file_name
    is_converted = (cache / "models" / f"{DEFAULT_TARGET}-v{CONVERSION_VERSION}").is_dir()
    if is_converted or (whole.exists() and whole.stat().st_size == source.num_bytes):
        return whole
    pieces = sorted(folder.glob(f"{source.file_name}*"))
    found = sum(piece.stat().st_size for piece in pieces)
    if found != source.num_bytes:
        raise SystemExit(
            f"{folder} holds {found} bytes of {source.file_name}, which has {source.num_bytes}; "
            "put the file there, or all its pieces, whose names begin with its own"
        )
    whole.parent.mkdir(parents=True, exist_ok=True)
    with whole.open("wb") as joined:
        for piece in pieces:
            with piece.open("rb") as file:
                shutil.copyfileobj(file, joined)
    return whole
