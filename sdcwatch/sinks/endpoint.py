"""The HTTP endpoint behind /metrics, and the file that tells Prometheus where it is."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections import deque
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import MetricsHandler

from sdcwatch.sinks.base import SCRAPE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

PORTS_TRIED = 64  # after the wanted one; a range a scrape configuration can list
_GAPS = 5
_POLL_SECONDS = 0.05  # how late `close` may notice; the default of half a second delays every exit


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer.server_bind asks DNS for the host's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # see `in_background`: the last scrape comes in an atexit handler
            self.process_request_thread(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent: a scraper that hangs up is no news for the console of a training run."""


class Scrapes:
    """When a registry was fetched, and how long it is worth waiting for the next time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = time.monotonic()
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._complete = -1.0

    def serve(self, send: Callable[[], None], limit_seconds: float = math.inf) -> None:
        """Answer one request; an answer that takes longer than the limit is thrown away there."""
        started = time.monotonic()
        send()
        in_time = time.monotonic() - started < limit_seconds
        with self._lock:
            self._gaps.append(max(0.0, started - self._latest))
            self._latest = max(self._latest, started)
            if in_time:
                self._complete = max(self._complete, started)

    def since(self, moment: float) -> bool:
        """Whether one that began after that moment of the monotonic clock has been answered."""
        with self._lock:
            return self._complete >= moment

    def patience(self) -> float:
        """Seconds in which the next one should come; 0 where there never was one.

        Two of the intervals that were seen. Of a single one no more is known than when it came,
        and that no other has come since.
        """
        with self._lock:
            if not self._gaps:
                return 0.0
            interval = max(self._gaps)
            if len(self._gaps) == 1:
                interval = max(interval, time.monotonic() - self._latest)
            return min(SCRAPE_SECONDS, 2 * interval)


class MetricsEndpoint:
    """Serves a registry over HTTP from a daemon thread.

    Args:
        registry: What to serve.
        host: Address to bind.
        port: Port to bind, 0 for any free one. If it is taken the next ones are tried.

    Raises:
        OSError: No port could be bound.

    Attributes:
        host: Address bound.
        port: Port bound.
        scrapes: When it was fetched.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.host = host
        self.scrapes = Scrapes()
        self._server = _bind(registry, host, port, self.scrapes)
        self.port = int(self._server.server_address[1])
        self._entry: Path | None = None
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="sdcwatch-metrics",
            daemon=True,
        )
        self._thread.start()

    @property
    def target(self) -> str:
        """``host:port`` for a scrape configuration."""
        host = self.host
        if host in ("", "0.0.0.0", "::"):
            host = socket.gethostname()
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Where a person can look."""
        return f"http://{self.target}/metrics"

    @property
    def _announcement(self) -> str:
        return json.dumps([{"targets": [self.target], "labels": {}}])

    def announce(self, directory: Path, name: str) -> Path:
        """Write a file_sd entry; it appears whole or not at all, and `close` removes it.

        Args:
            directory: Where Prometheus looks; made if needed.
            name: Tells this run and process from all others that share the directory. A later
                segment of the run on this host takes the place of one that was killed.
        """
        directory.mkdir(parents=True, exist_ok=True)
        entry = directory / f"{socket.gethostname()}-{name}.json"
        handle, name = tempfile.mkstemp(dir=directory, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._announcement)
            Path(name).chmod(0o644)  # Prometheus runs as another user
            Path(name).replace(entry)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        self._entry = entry
        return entry

    def close(self) -> None:
        """Stop serving and remove the file_sd entry, unless another process has replaced it."""
        entry, self._entry = self._entry, None
        if entry is not None:
            with contextlib.suppress(OSError):
                if entry.read_text(encoding="utf-8") == self._announcement:
                    entry.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)

    def release_in_child(self) -> None:
        """In a forked child: drop the listening socket, so that the port dies with the parent."""
        self._server.socket.close()


def _bind(registry: CollectorRegistry, host: str, port: int, scrapes: Scrapes) -> _Server:
    plain: Any = MetricsHandler.factory(registry)

    def do_get(handler: Any) -> None:
        scrapes.serve(lambda: plain.do_GET(handler), _limit_seconds(handler))

    handler = type("_Handler", (plain,), {"do_GET": do_get})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server_class = type("_FamilyServer", (_Server,), {"address_family": family})
    problem: OSError | None = None

    def bind(candidate: int) -> _Server | None:
        nonlocal problem
        try:
            server: _Server = server_class((host, candidate), handler)
        except OSError as error:
            problem = error
            return None
        return server

    for candidate in _candidates(port):
        if (server := bind(candidate)) is not None:
            return server
    assert problem is not None
    raise problem


def _limit_seconds(handler: Any) -> float:
    """How long whoever asks will wait: Prometheus says it."""
    with contextlib.suppress(TypeError, ValueError):
        return float(handler.headers.get("X-Prometheus-Scrape-Timeout-Seconds"))
    return math.inf


def _candidates(port: int) -> list[int]:
    if port == 0:
        return [0]
    return [p for p in range(port, port + PORTS_TRIED + 1) if p <= 65535] + [0]
