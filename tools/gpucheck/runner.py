"""Runs parts as processes under time limits; one that fails or hangs never stops the next."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from blockdraft.core.files import write_whole
from gpucheck.notes import notes_path
from gpucheck.parts import Part
from gpucheck.settings import ROOT, SETTINGS, Settings, write_settings

DONE, FAILED, OUT_OF_TIME, INTERRUPTED = "done", "failed", "out of time", "interrupted"
"""How a part ended; interrupted: the call's time was over, and the next call goes on with it."""
KILL_SECONDS = 10.0
"""A killed process may hang in the driver; nobody waits for it longer than this."""
REPORT_SECONDS = 15.0
"""Between two reports while a part runs: whoever ends this command may leave it no time for one."""
LEAST_FREE = 2**20
"""Bytes. A part that fails where less is left has failed for want of room."""

logger = logging.getLogger(__name__)


class Runner:
    """Runs parts and keeps how each ended, in `work`; `on_result` is called after each.

    Also when the run itself is ended, by Ctrl-C for instance: what a part has found is on the disk.
    `meanwhile` is called now and then while a part runs.
    """

    def __init__(
        self,
        work: Path,
        settings: Settings,
        on_result: Callable[[], object] = lambda: None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        self.has_failed = False
        self._work, self._on_result, self._meanwhile = work, on_result, meanwhile
        self._settings = settings

    def waiting(self, parts: Iterable[Part]) -> list[Part]:
        """Those that have not ended yet, whether well or not."""
        return [
            part for part in parts
            if read_state(self._work, part.name).get("status") in (None, INTERRUPTED)
        ]  # fmt: skip

    def run(self, parts: Sequence[Part], seconds: float) -> None:
        """Run them in order, as far as the seconds last.

        Raises:
            OSError: the disk is full. The part that met this is not counted as ended.
        """
        end = monotonic() + seconds
        write_settings(self._work / SETTINGS, self._settings)
        for part in parts:
            left = end - monotonic()
            if left < part.least_seconds:
                logger.info("%s: not begun, %.0f s are left", part.name, left)
                continue
            logger.info("%s: %s", part.name, part.about)
            try:
                self._run(part, left)
            finally:
                self._on_result()
        self._on_result()

    def _run(self, part: Part, left: float) -> None:
        limit = left if part.seconds is None else min(part.seconds, left)
        is_cut = part.seconds is None or left < part.seconds
        begin = monotonic()
        # Of an earlier run of it: without its end the next call runs it again.
        for stale in (notes_path(self._work, part.name), state_path(self._work, part.name)):
            stale.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gpucheck.child", part.name, part.module]
        with (self._work / f"{part.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, str(self._work), f"{limit:.0f}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=self._environment(part),
                start_new_session=True,  # so that a signal reaches what the part started, too
            )
            code = _wait(process, limit, min(part.grace_seconds, limit / 2), self._meanwhile)
        status = DONE if code == 0 else FAILED
        if code is None:
            status = INTERRUPTED if is_cut else OUT_OF_TIME
        if status == FAILED and shutil.disk_usage(self._work).free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._work))
        self.has_failed |= status in (FAILED, OUT_OF_TIME)
        state = {"status": status, "seconds": round(monotonic() - begin, 1), "limit": round(limit)}
        write_whole(state_path(self._work, part.name), json.dumps(state))
        logger.info("%s: %s after %.0f s", part.name, status, state["seconds"])

    def _environment(self, part: Part) -> dict[str, str]:
        paths = [
            str(ROOT / "src"),
            str(ROOT / "tools"),
            str(ROOT),
            os.environ.get("PYTHONPATH", ""),
        ]
        own = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "BLOCKDRAFT_REMEMBER": "off",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if not part.has_cpu_kernels or self._settings.is_rehearsal:  # they take a minute to compile
            own["BLOCKDRAFT_KERNELS"] = "off"
        cache = self._work / "cache"
        if cache.exists():
            own["BLOCKDRAFT_CACHE"] = str(cache)
        return os.environ | own


def state_path(work: Path, name: str) -> Path:
    """Where it is kept how a part ended."""
    return work / f"{name}.state.json"


def read_state(work: Path, name: str) -> dict[str, Any]:
    """How a part ended; empty if it has not."""
    path = state_path(work, name)
    if not path.exists():
        return {}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def _wait(
    process: "subprocess.Popen[bytes]",
    limit: float,
    grace: float,
    meanwhile: Callable[[], object],
) -> int | None:
    """The exit status; None if the process had to be ended. Nothing of it is left running."""
    code, end = None, monotonic() + limit - grace
    try:
        while code is None and (left := end - monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left, REPORT_SECONDS))
            if code is None and left > REPORT_SECONDS:
                meanwhile()
        if code is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace)
    finally:  # also at Ctrl-C, which reaches this process alone
        _signal(process, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_SECONDS)
    return code


def _signal(process: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
