"""The process of one part: `python -m gpucheck.child NAME MODULE WORK SECONDS`."""

import sys
from importlib import import_module
from pathlib import Path

from gpucheck.notes import Notes, notes_path
from gpucheck.settings import SETTINGS, read_settings


def main(name: str, module: str, work: Path, seconds: float) -> None:
    """Run a part; what it raises is in its log, and its last line in the notes."""
    notes = Notes(notes_path(work, name), seconds)
    try:
        import_module(module).run(read_settings(work / SETTINGS), notes)
    except BaseException as error:
        notes.note("error", value=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]))
