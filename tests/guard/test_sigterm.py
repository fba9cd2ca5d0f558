"""A process that is told to end does so in time, also if its training thread never comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

STUCK = textwrap.dedent(
    """
    import ctypes, threading, time
    from sdcwatch.guard import sigterm

    sigterm.GRACE_SECONDS, sigterm.STUCK_SECONDS = 0.1, 0.2
    sigterm.LIMIT_SECONDS, sigterm.LAST_SECONDS = {limit}, 0.3
    begun = threading.Lock()

    def end():
        if begun.acquire(blocking=False):
            print("ends", flush=True)
            time.sleep({seconds})  # for a scrape
        return 83

    handler = sigterm.TerminationHandler(lambda: {busy}, end)
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("stuck", flush=True)
    lock(mutex)  # like a collective whose peer has gone: no signal gets it out of there
    """
)


@pytest.mark.parametrize(
    ("limit", "seconds", "busy"),
    [(60.0, 0.0, "False"), (1.0, 60.0, "False"), (1.0, 60.0, "begun.locked()"), (1.0, 0.0, "True")],
    ids=["it ends", "its end takes too long", "which counts as busy", "it seems to be ending"],
)
def test_a_process_that_is_stuck_ends_by_the_limit_however_long_its_end_takes(
    limit: float, seconds: float, busy: str
) -> None:
    script = STUCK.format(limit=limit, seconds=seconds, busy=busy)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stuck\n"
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=30) == 83
        assert process.stdout.read() == "ends\n"
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


LEFT_BEHIND = textwrap.dedent(
    """
    import threading, time
    from sdcwatch.guard import sigterm

    sigterm.GRACE_SECONDS, sigterm.LIMIT_SECONDS = 0.1, 0.5
    handler = sigterm.TerminationHandler(lambda: False, lambda: 143)
    training = threading.Thread(target=time.sleep, args=(60,))
    training.start()
    print("trains", flush=True)
    try:
        training.join()
    finally:
        handler.close(failed=True)
    """
)


def test_a_training_thread_does_not_keep_a_process_that_was_told_to_end() -> None:
    arguments = [sys.executable, "-c", LEFT_BEHIND]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "trains\n"
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(timeout=30) == 143
        finally:
            process.kill()
