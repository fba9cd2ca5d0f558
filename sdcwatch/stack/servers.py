"""Servers of other projects, started here: found on the PATH, health-checked, and surely stopped.

Each child is the leader of a session of its own, so that Ctrl-C in the terminal reaches this
process alone, which then stops them in order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from sdcwatch.errors import ConfigurationError, SdcwatchError

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 2000

_DIRECT = build_opener(ProxyHandler({}))
"""Loopback is never asked through a proxy."""


class ServerFailed(SdcwatchError):
    """A server of the stack did not become healthy, or ended by itself."""


class Interrupted(Exception):
    """The person asked to stop while servers were still starting."""


def find_binary(title: str, names: Sequence[str], package: str) -> Path:
    """The first of `names` on the PATH.

    Raises:
        ConfigurationError: None of them is there; names the Debian package that has it.
    """
    for name in names:
        if found := shutil.which(name):
            return Path(found)
    wanted = " or ".join(f"`{n}`" for n in names)
    msg = (
        f"Expected {title} on the PATH as {wanted}, but got none of them. "
        f"Install it, for example with `apt-get install {package}`, or use docker-compose.yml."
    )
    raise ConfigurationError(msg)


def choose_port(title: str, port: int, option: str) -> int:
    """`port` itself if it is free on loopback, or any free one for 0.

    Raises:
        ConfigurationError: Something listens there already.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            msg = (
                f"Expected port {port} of {LOOPBACK} to be free for {title}, but got: {error}. "
                f"Stop what listens there, or pass {option} 0 for any free port."
            )
            raise ConfigurationError(msg) from None
        return int(probe.getsockname()[1])


def is_healthy(url: str) -> bool:
    """Whether `url` answers 200 within two seconds."""
    try:
        with _DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError, ValueError):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How to start one server and tell that it is up.

    Attributes:
        title: Its name for people.
        command: Program and arguments.
        url: Where people find it.
        health: Path that answers 200 once it is ready.
        log: File that gets its output.
    """

    title: str
    command: tuple[str, ...]
    url: str
    health: str
    log: Path


class Server:
    """One running child process."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        with spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                spec.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def check_alive(self) -> None:
        """Return if it runs.

        Raises:
            ServerFailed: It has ended; carries the end of its log.
        """
        code = self._process.poll()
        if code is not None:
            msg = (
                f"Expected {self.spec.title} to keep running, but got exit code {code}. "
                f"Read {self.spec.log}, which ends:\n{self.log_tail()}"
            )
            raise ServerFailed(msg)

    def wait_healthy(self, timeout_seconds: float, stopping: Callable[[], bool]) -> None:
        """Return once its health check answers.

        Args:
            timeout_seconds: Budget.
            stopping: Asked between tries; True gives up.

        Raises:
            ServerFailed: It ended, or did not answer in time.
            Interrupted: `stopping` said so.
        """
        url = self.spec.url + self.spec.health
        deadline = time.monotonic() + timeout_seconds
        while not is_healthy(url):
            self.check_alive()
            if stopping():
                raise Interrupted
            if time.monotonic() > deadline:
                msg = (
                    f"Expected {self.spec.title} to answer at {url} within {timeout_seconds:g} s, "
                    f"but got nothing. Read {self.spec.log}, which ends:\n{self.log_tail()}"
                )
                raise ServerFailed(msg)
            time.sleep(POLL_SECONDS)
        self.check_alive()  # what answered may be another process on the same port

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL to its whole group after `STOP_SECONDS`."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)  # plugins that outlived their parent, too
        self._process.wait()

    def log_tail(self) -> str:
        """The last lines it wrote."""
        with self.spec.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
