"""A receiver one can see: prints what Alertmanager sends, and keeps it.

Alertmanager proves nothing until something at its other end has received a notification. This is
that other end for a workstation or a test: it prints a line per alert, writes each notification as
one JSON line, and shows the latest ones at ``GET /`` (``GET /notifications`` as JSON).

Standard library only, and no import from the package: the container runs this one file.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

MAX_BODY_BYTES = 4 << 20
MAX_DEPTH = 32
"""Levels of JSON; Alertmanager sends five. Python reads deeper ones than it can write."""
KEPT_NOTIFICATIONS = 200
WHO = ("run", "suspect_rank", "suspect_node", "suspect_gpu", "suspect_instance_id")
SECONDS = len("2006-01-02T15:04:05")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""What a page of ours may load: nothing. Texts of alerts come from anywhere."""


def printable(text: object) -> str:
    """`text` without control characters: label values must not drive a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def describe(notification: Mapping[str, Any]) -> Iterator[str]:
    """One block of text per alert of a notification: state, severity, name, who, links."""
    for alert in notification.get("alerts", ()):
        labels, notes = _mapping(alert.get("labels")), _mapping(alert.get("annotations"))
        words = [str(alert.get("status", "?")).upper(), labels.get("severity", "-")]
        words += [labels.get("alertname", "?")]
        words += [f"{k.removeprefix('suspect_')}={labels[k]}" for k in WHO if labels.get(k)]
        if since := str(alert.get("startsAt", "")):
            words += [f"since {since[:SECONDS]}Z"]
        lines = [printable(" ".join(map(str, words)))]
        lines += [
            printable(f"    {notes[key]}")
            for key in ("summary", "description", "runbook_url", "dashboard_url")
            if notes.get(key)
        ]
        yield "\n".join(lines)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def read_notification(body: bytes) -> dict[str, Any]:
    """The notification in `body`.

    Raises:
        ValueError: `body` is no JSON object with a list of alerts, or deeper than `MAX_DEPTH`.
    """
    too_deep = f"Expected JSON of at most {MAX_DEPTH} levels, but got more."
    try:
        notification = json.loads(body)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if _deeper_than(notification, MAX_DEPTH):
        raise ValueError(too_deep)
    alerts = notification.get("alerts") if isinstance(notification, dict) else None
    if not isinstance(alerts, list) or not all(isinstance(a, dict) for a in alerts):
        msg = "Expected a JSON object with a list `alerts`, but got something else."
        raise ValueError(msg)
    return dict(notification)


def _deeper_than(value: object, levels: int) -> bool:
    """Whether JSON is nested more than that, without recursion."""
    here = [value]
    for _ in range(levels):
        lists = [one for one in here if isinstance(one, list)]
        lists += [list(one.values()) for one in here if isinstance(one, dict)]
        here = [child for one in lists for child in one]
        if not here:
            return False
    return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a sender that hung up before its answer."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind, without asking DNS for the name of the host as `HTTPServer` does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class Receiver:
    """An HTTP server for Alertmanager's webhook.

    Args:
        host: Address to bind.
        port: Port to bind; 0 takes a free one, see `port`.
        write: Called with a block of text per alert received.
        log: File that gets each notification as one JSON line; None keeps none.

    Raises:
        OSError: The port is taken.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        write: Callable[[str], None] = lambda text: None,
        log: Path | None = None,
    ) -> None:
        self.notifications: deque[dict[str, Any]] = deque(maxlen=KEPT_NOTIFICATIONS)
        self._write, self._log, self._lock = write, log, threading.Lock()
        self._server = _Server((host, port), _handler(self))
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Its address as seen from this machine."""
        return f"http://{self._server.server_address[0]!s}:{self.port}"

    def start(self) -> None:
        """Serve from a thread until `close`."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def receive(self, notification: dict[str, Any]) -> None:
        """Keep, log and print one notification; one at a time."""
        line, texts = json.dumps(notification, sort_keys=True), list(describe(notification))
        with self._lock:
            self.notifications.append(notification)
            if self._log is not None:
                with self._log.open("a", encoding="utf-8") as log:
                    log.write(line + "\n")
            for text in texts:
                self._write(text)

    def page(self) -> str:
        """The latest notifications as HTML, newest first."""
        with self._lock:
            kept = tuple(reversed(self.notifications))
        texts = [text for n in kept for text in describe(n)]
        blocks = [f"<pre>{_linked(escape(text))}</pre>" for text in texts]
        body = "\n".join(blocks) or "<p>Nothing received yet.</p>"
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta http-equiv="refresh" content="5"><title>Alerts received</title>'
            f"<h1>Alerts received</h1>\n{body}</html>\n"
        )


def _linked(escaped: str) -> str:
    return re.sub(r"https?://\S+", lambda found: f'<a href="{found[0]}">{found[0]}</a>', escaped)


def _refused(headers: Message) -> tuple[HTTPStatus, str, str] | None:
    """Why a POST is not read; None if it is."""
    # Alertmanager sends neither of these; a page that a browser shows, one of them.
    if "Origin" in headers or headers.get("Sec-Fetch-Site", "none") != "none":
        return HTTPStatus.FORBIDDEN, "text/plain", "not from a browser\n"
    size = headers.get("Content-Length", "")
    shown = size.lstrip("0") or "0"  # so that its digits tell how large it is
    if not (size.isascii() and size.isdecimal()) or int(shown[:12]) > MAX_BODY_BYTES:
        text = "body missing or too large\n"
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain", text
    return None


def _handler(receiver: Receiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            """Health, the page, or the notifications as JSON."""
            if self.path == "/-/healthy":
                self._answer(HTTPStatus.OK, "text/plain", "ok\n")
            elif self.path == "/notifications":
                kept = json.dumps(list(receiver.notifications), indent=2)
                self._answer(HTTPStatus.OK, "application/json", kept)
            elif self.path == "/":
                self._answer(HTTPStatus.OK, "text/html; charset=utf-8", receiver.page())
            else:
                self._answer(HTTPStatus.NOT_FOUND, "text/plain", "not found\n")

        def do_POST(self) -> None:
            """Take a notification; not from a page of another origin that a browser shows."""
            if refused := _refused(self.headers):
                self.close_connection = True
                self._answer(*refused)
                return
            try:
                size = int(self.headers["Content-Length"].lstrip("0") or 0)
                notification = read_notification(self.rfile.read(size))
            except (ValueError, OSError) as error:  # no JSON, or the sender went away
                self._answer(HTTPStatus.BAD_REQUEST, "text/plain", f"{error}\n")
                return
            receiver.receive(notification)
            self._answer(HTTPStatus.OK, "text/plain", "ok\n")

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing per request: only alerts are news."""

        def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _to_stdout(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Receive until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description="Print what Alertmanager sends.")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=9095, help="port to bind, 0 for a free one")
    parser.add_argument("--log", type=Path, help="file for one JSON line per notification")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    receiver = Receiver(options.host, options.port, write=_to_stdout, log=options.log)
    receiver.start()
    _to_stdout(f"receiving at {receiver.url}")
    try:
        stop.wait()
    finally:
        receiver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
