"""Forks ranks from a process that has torch imported; each ends as a script of its own would.

`multiprocessing` leaves its children by `os._exit`, which hides whatever keeps a real interpreter
from ending. Here the child falls out of the loop below and through the end of this file, so that
atexit handlers run and objects are destroyed.

Jobs come as lines of JSON on stdin: ``{"id", "scenario", "environment"}``; what becomes of each
child is written to stdout: ``{"id", "pid"}`` when it starts, ``{"id", "status", "time"}`` when it
has ended.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch._dynamo

import sdcwatch.guard.api
import sdcwatch.testing  # noqa: F401 - loaded once, for every rank

torch.set_num_threads(1)


def say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def serve() -> dict[str, Any] | None:
    """Start ranks until stdin ends. Returns the job in a child, None in the nursery."""
    running: dict[int, str] = {}
    looking = selectors.DefaultSelector()
    looking.register(0, selectors.EVENT_READ)
    buffered = b""
    say({"ready": threading.active_count()})
    while True:
        if looking.select(timeout=0.02):
            got = os.read(0, 65536)
            if not got:
                return None
            buffered += got
        while b"\n" in buffered:
            line, buffered = buffered.split(b"\n", 1)
            job = json.loads(line)
            pid = os.fork()
            if pid == 0:
                looking.close()
                return job
            running[pid] = job["id"]
            say({"id": job["id"], "pid": pid})
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            say({"id": running.pop(pid), "status": code, "time": time.time()})


job = serve()
if job is not None:
    os.environ.update(job["environment"])
    # A test run in the background ignores it, and so would every process that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(os.environ["STDERR"], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import scenarios

    scenarios.play(job["scenario"])
