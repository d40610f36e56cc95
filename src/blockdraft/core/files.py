"""Files that a command leaves behind."""

import os
from pathlib import Path

from blockdraft.core.errors import ConfigError


def check_output_folder(folder: Path) -> None:
    """Refuse a folder that could not be made or written, without making it.

    Asked before hours of work; the folder itself is made when there is something to put in.

    Raises:
        ConfigError: it, or what would hold it, is a file or not writable.
    """
    nearest = folder.absolute()
    while not nearest.exists() and not nearest.is_symlink():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"output {folder}: {nearest} is no folder; give another name")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"output {folder}: {nearest} is not writable; give another folder")


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
