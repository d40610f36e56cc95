"""An engine in a process: started, asked, held while others work, ended."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from blockdraft.bench.outside.interface import EngineFailed, OutsideOutput, PromptFailed
from blockdraft.bench.timed_output import TimedOutput

START_SECONDS = 1200.0
"""To load, and for vLLM to compile."""
_END_SECONDS = 20.0
_STOP_SECONDS = 1.0
_TAIL = 3
"""Lines of its log that say why a process died."""


class EngineProcess:
    """A worker (see `workers`) that runs only while it is asked.

    Between two requests it is stopped, for some engines wait by looking again and again. It is in a
    process group of its own but in our session: if we are killed, the system wakes and ends it.

    Args:
        command: of the worker.
        environment: variables of the process.
        answer_seconds: that one answer may take.

    Raises:
        EngineFailed: it did not become ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        answer_seconds: float,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._answer_seconds = answer_seconds
        # It lives as long as the process that writes there.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._lines: Queue[str | None] = Queue()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                process_group=0,
                env=dict(environment),
            )
        except OSError as error:
            self._log.close()
            raise EngineFailed(f"cannot be started: {error}") from error
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            ready = self._receive(start_seconds, "to start")
            if "error" in ready:
                raise EngineFailed(f"cannot be started: {ready['error']}")
            self.versions: Mapping[str, str] = ready["versions"]
        except BaseException:
            self.close()
            raise

    def decode(self, prompt_ids: list[int], max_tokens: int) -> OutsideOutput:
        """Answer greedily.

        Raises:
            EngineFailed: it has died, took too long, or answered something else.
            PromptFailed: it refuses this prompt.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            request = json.dumps({"prompt_ids": prompt_ids, "max_tokens": max_tokens})
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error
        answer = self._receive(
            self._answer_seconds, "for an answer", "; --against-timeout sets the limit"
        )
        if "error" in answer:
            raise PromptFailed(str(answer["error"]))
        if not answer.get("token_ids", True):
            raise PromptFailed("returned no token")
        try:
            timed = TimedOutput(
                token_ids=tuple(answer["token_ids"]),
                total_seconds=answer["total_seconds"],
                decode_seconds=answer["decode_seconds"],
            )
            return OutsideOutput(timed, answer["num_passes"])
        except (KeyError, TypeError) as error:
            raise EngineFailed(f"its worker answered without {error}") from error

    def close(self) -> None:
        """End it, and all that it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(OSError):
            self._process.stdin.close()  # its worker ends when there is nothing more to read
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if self._process.returncode is None else 0)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _receive(self, seconds: float, what: str, hint: str = "") -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except Empty as error:
            self._signal(signal.SIGKILL)
            raise EngineFailed(
                f"took more than {seconds:g} s {what} and was stopped{hint}"
            ) from error
        if line is None:
            raise self._died()
        self._rest()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise EngineFailed(f"its worker wrote no JSON: {line.strip()[:200]!r}") from error
        if not isinstance(answer, dict):
            raise EngineFailed(f"its worker wrote no object: {line.strip()[:200]!r}")
        return answer

    def _rest(self) -> None:
        """Stop it, and wait a moment until it is.

        If we are killed before it has stopped, the system does not wake and end it: it would stay
        stopped for ever. It stops late if it is just starting a process. One that has died is left
        for `_died`.
        """
        self._signal(signal.SIGSTOP)
        how = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = perf_counter() + _STOP_SECONDS
        with suppress(ChildProcessError):
            while os.waitid(os.P_PID, self._process.pid, how) is None and perf_counter() < end:
                sleep(0.001)

    def _died(self) -> EngineFailed:
        status = self._process.wait()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        self._log.seek(0)
        lines = [" ".join(line.split()) for line in self._log if line.strip()]
        tail = " | ".join(lines[-_TAIL:])[-500:]
        return EngineFailed(f"died with {how}" + (f": {tail}" if tail else ""))

    def _signal(self, number: int) -> None:
        # Its group outlives it as long as something that it started runs.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
