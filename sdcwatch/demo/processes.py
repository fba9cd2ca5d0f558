"""Starts the process that runs the ranks, and makes sure that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from sdcwatch.demo.settings import DemoSettings

_GRACE_SECONDS = 6.0
_LOG_TAIL_LINES = 12


class Launch:
    """The launcher of a demo and its ranks, in a session of their own.

    A Ctrl-C on the terminal therefore reaches only the process in front, which decides how the
    others end.
    """

    def __init__(self, settings: DemoSettings) -> None:
        self.log = settings.run_dir / "logs" / "launcher.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "sdcwatch.demo.agent", str(settings.save())]
        # One thread per rank: the ranks share this machine's cores, and bits depend on the number.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End the launcher and every rank; returns when none is left."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)
        self._end_group()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _end_group(self) -> None:
        """Kill what is left of the session; a process that has ended but was not reaped counts."""
        end = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < end:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return
            self._process.poll()
            time.sleep(0.02)

    def last_words(self) -> str:
        """The end of its log, for a person who has to find out why it failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def rank_errors(run_dir: Path) -> list[Path]:
    """The stderr files of ranks that wrote any, newest first."""
    files = [p for p in run_dir.glob("logs/**/stderr.log") if p.stat().st_size]
    return sorted(files, key=lambda p: p.stat().st_mtime, reverse=True)
