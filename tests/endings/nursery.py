"""Forks ranks from a process that has torch imported; each ends as a script of its own would.

`multiprocessing` leaves its children by `os._exit`, which hides whatever keeps a real interpreter
from ending. Here the child falls out of the loop below and through the end of this file, so that
atexit handlers run and objects are destroyed.

Jobs come as lines of JSON on stdin, ``{"id", "module", "scenario", "environment"}``; what becomes
of each child is written to stdout: ``{"id", "pid"}`` when it starts, ``{"id", "status", "time"}``
when it has ended. The same goes for connections to the socket NURSERY, one job each, on which
`stub.py` asks for what torchrun would start: a process group of its own, killed if whoever asked
for it is. The launcher itself is the module "torchrun".
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed.run

import sdcwatch.guard.api
import sdcwatch.sinks.otel
import sdcwatch.sinks.wandb
import sdcwatch.testing  # noqa: F401

torch.set_num_threads(1)


Say = Callable[[dict[str, Any]], None]


def say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def over(connection: socket.socket) -> Say:
    return lambda message: connection.sendall((json.dumps(message) + "\n").encode())


class Nursery:
    """Starts children, and tells whoever asked for one what becomes of it."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[str, Say, socket.socket | None]] = {}
        self._buffered = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(os.environ["NURSERY"])
        self._socket.listen(64)
        self._looking = selectors.DefaultSelector()
        self._looking.register(0, selectors.EVENT_READ)
        self._looking.register(self._socket, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Start children until stdin ends. Returns the job in a child, None in the nursery."""
        say({"ready": threading.active_count()})
        while True:
            for key, _ in self._looking.select(timeout=0.02):
                if key.data is not None:
                    self._kill(key.data)
                    continue
                asked = self._from_stdin() if key.fd == 0 else [self._from_socket()]
                if asked is None:
                    return None
                for job, connection in asked:
                    if self._start(job, connection):
                        return job
            self._reap()

    def _from_stdin(self) -> list[tuple[dict[str, Any], socket.socket | None]] | None:
        got = os.read(0, 65536)
        if not got:
            return None
        *lines, self._buffered = (self._buffered + got).split(b"\n")
        return [(json.loads(line), None) for line in lines]

    def _from_socket(self) -> tuple[dict[str, Any], socket.socket | None]:
        connection, _ = self._socket.accept()
        return json.loads(connection.makefile("rb").readline()), connection

    def _start(self, job: dict[str, Any], connection: socket.socket | None) -> bool:
        """Whether this is the child."""
        pid = os.fork()
        if pid == 0:
            if connection is not None:
                os.setpgid(0, 0)
            self._looking.close()
            self._socket.close()
            return True
        answer = say
        if connection is not None:
            answer = over(connection)
            with contextlib.suppress(OSError):  # the child may have been first, or be gone
                os.setpgid(pid, pid)
            self._looking.register(connection, selectors.EVENT_READ, pid)
        self._running[pid] = (job["id"], answer, connection)
        answer({"id": job["id"], "pid": pid})
        return False

    def _kill(self, pid: int) -> None:
        """Whoever asked for this child is gone."""
        _, _, connection = self._running[pid]
        assert connection is not None
        self._looking.unregister(connection)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            name, answer, connection = self._running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):  # who asked may have been killed
                answer({"id": name, "status": code, "time": time.time()})
            if connection is not None:
                with contextlib.suppress(KeyError):
                    self._looking.unregister(connection)
                connection.close()


def move_to_host(name: str) -> None:
    """Into a network namespace; Python has that from 3.12 on."""
    with open(f"/run/netns/{name}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


gc.collect()
gc.freeze()  # children that end need not copy what they never touched
job = Nursery().serve()
if job is not None:
    os.environ.update(job["environment"])
    if "NETNS" in job["environment"]:
        move_to_host(os.environ["NETNS"] + os.environ["RANK"])
    # A test run in the background ignores it, and so would every process that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(os.environ["STDERR"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if job["module"] == "torchrun":
        torch.distributed.run.main(job["scenario"].split())
    else:
        importlib.import_module(job["module"]).play(job["scenario"])
