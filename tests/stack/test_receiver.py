"""The receiver one can see."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sdcwatch.stack import receiver as module
from sdcwatch.stack.receiver import Receiver, describe, printable, read_notification

NOTIFICATION = {
    "receiver": "page",
    "status": "firing",
    "alerts": [
        {
            "status": "firing",
            "startsAt": "2026-01-02T03:04:05.678Z",
            "labels": {
                "alertname": "SdcwatchSuspectRank",
                "severity": "critical",
                "run": "r7",
                "suspect_rank": "3",
                "suspect_node": "n1",
                "suspect_gpu": "GPU-3",
            },
            "annotations": {
                "summary": "A rank is suspect.",
                "runbook_url": "http://localhost:9090/user/runbook.html#sdcwatchsuspectrank",
            },
        }
    ],
}


@pytest.fixture
def written() -> list[str]:
    return []


@pytest.fixture
def server(tmp_path: Path, written: list[str]) -> Iterator[Receiver]:
    receiver = Receiver(write=written.append, log=tmp_path / "log.jsonl")
    receiver.start()
    yield receiver
    receiver.close()


def post(url: str, body: bytes) -> int:
    try:
        with urlopen(Request(url, data=body, method="POST"), timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        error.close()
        return error.code


def get(url: str) -> str:
    with urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def test_a_notification_is_printed_logged_and_shown(
    server: Receiver, written: list[str], tmp_path: Path
) -> None:
    assert post(f"{server.url}/page", json.dumps(NOTIFICATION).encode()) == 200

    assert written == [
        "FIRING critical SdcwatchSuspectRank run=r7 rank=3 node=n1 gpu=GPU-3 "
        "since 2026-01-02T03:04:05Z\n"
        "    A rank is suspect.\n"
        "    http://localhost:9090/user/runbook.html#sdcwatchsuspectrank"
    ]
    assert json.loads((tmp_path / "log.jsonl").read_text()) == NOTIFICATION
    assert json.loads(get(f"{server.url}/notifications")) == [NOTIFICATION]
    link = "http://localhost:9090/user/runbook.html#sdcwatchsuspectrank"
    assert "FIRING critical SdcwatchSuspectRank" in get(server.url)
    assert f'<a href="{link}">{link}</a>' in get(server.url)
    assert get(f"{server.url}/-/healthy") == "ok\n"


def test_an_empty_receiver_says_so(server: Receiver) -> None:
    assert "Nothing received yet." in get(server.url)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"alerts": {}}', b'{"alerts": [1]}', b"\xff"])
def test_a_body_that_is_no_notification_is_refused(
    body: bytes, server: Receiver, written: list[str]
) -> None:
    assert post(server.url, body) == 400
    assert written == []


def test_a_body_too_large_is_refused_unread(
    server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BODY_BYTES", 10)
    assert post(server.url, b"x" * 11) == 413


def test_an_unknown_path_is_not_found(server: Receiver) -> None:
    with pytest.raises(HTTPError) as caught:
        get(f"{server.url}/nothing")
    caught.value.close()
    assert caught.value.code == 404


def test_a_label_cannot_drive_the_terminal_or_the_page(server: Receiver) -> None:
    evil = {"alerts": [{"status": "firing", "labels": {"alertname": "\x1b[2J<b>\r\n"}}]}
    (text,) = describe(evil)

    assert "\x1b" not in text
    assert "\r" not in text
    assert len(text.splitlines()) == 1
    assert post(server.url, json.dumps(evil).encode()) == 200
    quoted = {"alerts": [{"annotations": {"summary": 'http://x/"onclick=evil('}}]}
    assert post(server.url, json.dumps(quoted).encode()) == 200
    assert "<b>" not in get(server.url)
    assert '"onclick' not in get(server.url)
    assert printable("a\tb\x07") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


def test_only_the_latest_notifications_are_kept() -> None:
    receiver = Receiver()
    for number in range(module.KEPT_NOTIFICATIONS + 5):
        receiver.receive({"alerts": [], "number": number})
    receiver.close()

    assert len(receiver.notifications) == module.KEPT_NOTIFICATIONS
    assert receiver.notifications[0]["number"] == 5


def test_a_port_that_is_taken_is_an_error() -> None:
    first = Receiver()
    with pytest.raises(OSError, match="in use"):
        Receiver(port=first.port)
    first.close()


def test_a_notification_without_labels_or_notes_is_described() -> None:
    assert list(describe({"alerts": [{}]})) == ["? - ?"]
    assert read_notification(b'{"alerts": []}') == {"alerts": []}


def test_the_one_file_runs_alone_as_the_container_runs_it(tmp_path: Path) -> None:
    copy = tmp_path / "receiver.py"
    copy.write_bytes(Path(module.__file__).read_bytes())
    process = subprocess.Popen(
        [sys.executable, "-I", "-u", str(copy), "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    assert post(url, json.dumps(NOTIFICATION).encode()) == 200
    assert process.stdout.readline().startswith("FIRING critical SdcwatchSuspectRank")
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


@pytest.mark.parametrize(
    "body",
    [
        {"alerts": [{"labels": "text", "annotations": [1]}]},
        {"alerts": [{"labels": None, "startsAt": 5}]},
        {"alerts": [{"labels": {"run": ["a"]}, "status": {}}]},
    ],
)
def test_any_alert_that_is_posted_leaves_the_page_alive(server: Receiver, body: Any) -> None:
    assert post(f"{server.url}/page", json.dumps(body).encode()) == 200
    assert "Alerts received" in get(server.url)


def test_json_too_deep_to_read_is_refused(server: Receiver) -> None:
    assert post(f"{server.url}/page", b"[" * 100_000) == 400
    assert "Nothing received yet." in get(server.url)


@pytest.mark.parametrize("depth", [20, 40, 800, 3000])
def test_what_was_taken_is_shown_and_what_is_too_deep_is_not_taken(
    server: Receiver, depth: int
) -> None:
    value: Any = "[" * depth + "]" * depth
    body = f'{{"alerts": [{{"labels": {{"alertname": {value}}}}}]}}'.encode()

    assert post(server.url, body) == (200 if depth < module.MAX_DEPTH else 400)
    assert get(server.url).endswith("</html>\n")
    assert len(json.loads(get(f"{server.url}/notifications"))) == (depth < module.MAX_DEPTH)


@pytest.mark.parametrize("length", ["0" * 20 + "9" * 12, "+2", "two", "\u0662", "-1", ""])
def test_a_length_that_cannot_be_is_refused_unread(server: Receiver, length: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as caller:
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        caller.sendall(head.encode())
        assert b" 413 " in caller.recv(100)
    assert get(f"{server.url}/-/healthy") == "ok\n"


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_page_of_another_origin_cannot_post(server: Receiver, header: str) -> None:
    request = Request(f"{server.url}/page", b'{"alerts": []}', {header: "https://evil.example"})
    with pytest.raises(HTTPError) as refused:
        urlopen(request, timeout=5)
    refused.value.close()

    assert refused.value.code == 403
