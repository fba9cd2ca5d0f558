"""SIGTERM: a run that is told to end still says how it ended.

A launcher sends SIGTERM to every rank when one of them has failed, and kills what is left half a
minute later. A signal handler of Python does not run while the training thread is inside a
collective, so the signal also wakes a thread, through a file descriptor. Where the training thread
finds out by itself what has happened, because its connection breaks, it is left to it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType

from sdcwatch.sinks.patience import in_background

EXIT_TERMINATED = 128 + signal.SIGTERM
GRACE_SECONDS = 1.0
"""How long the training thread has to find out by itself why it was told to end."""
STUCK_SECONDS = 4.0
"""After that long in a collective the thread ends the run in its place."""
LIMIT_SECONDS = 25.0
"""After that long the process ends, whatever it still waits for; a launcher kills it after 30.

Whom it waits for is known after at most 9 of them, and the usual scrape comes within 15 more."""
LAST_SECONDS = 2.0
"""What an end that has not even begun by then may take."""
FAILED_SECONDS = 10.0
"""How long after a run has failed the signal says nothing new: its process is ending already."""


class Terminated(SystemExit):
    """The process was told to end by SIGTERM."""

    exit_code = EXIT_TERMINATED

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)

    def __str__(self) -> str:
        return "the process received SIGTERM"


class TerminationHandler:
    """Handles SIGTERM while a guard is open, where the program does not do so itself.

    Args:
        busy: Whether the training thread is ending the run already.
        end: Ends the run from another thread, and returns the exit code; at once where another
            thread is ending it.
        remember: Told what is about to be raised.
        trains: Which thread trains.

    Attributes:
        received: The signal came.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        end: Callable[[], int],
        remember: Callable[[BaseException], None] = lambda error: None,
        trains: Callable[[], int] = threading.get_ident,
    ) -> None:
        self._busy, self._end, self._remember, self._trains = busy, end, remember, trains
        self._pid = os.getpid()
        self._failed_at, self._code = 0.0, EXIT_TERMINATED
        self.received = self._decided = self._raised = self._installed = False
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        current = signal.getsignal(signal.SIGTERM)
        other = getattr(current, "__self__", None)
        if isinstance(other, TerminationHandler) and other._installed:
            # Of another guard: whichever is closed last gives the signal back.
            self._first: TerminationHandler = other
            self._open: list[TerminationHandler] = other._open
            self._open.append(self)
            return
        self._first, self._open = self, [self]
        self._installed = threading.current_thread() is threading.main_thread() and _nobody_handles(
            current
        )
        if not self._installed:
            return
        if isinstance(other, TerminationHandler):
            other._end_listening()  # the thread that closed it could not
        signal.signal(signal.SIGTERM, self._handle)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if previous != -1:  # somebody else listens there: only Python's own handler is left
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
            os.close(reader)
            os.close(writer)
        else:
            self._pipe = (reader, writer)
            self._thread = threading.Thread(
                target=self._listen, args=(reader,), name="sdcwatch-sigterm", daemon=True
            )
            self._thread.start()
        _forget_in_children(self)

    def close(self, *, failed: bool, code: int = EXIT_TERMINATED) -> None:
        """Give the signal back. One that came meanwhile takes effect now, unless the run failed.

        After a failure a launcher tells every process to end. This one does, and with its own code.
        """
        if os.getpid() != self._pid or self not in self._open:
            return
        self._first._code = code  # that of the last record
        if self._open == [self]:
            self._first._give_back(failed=failed)
        self._open.remove(self)

    def _give_back(self, *, failed: bool) -> None:
        if not self._installed:
            return
        main = threading.current_thread() is threading.main_thread()
        ours = main and signal.getsignal(signal.SIGTERM) == self._handle
        if ours:  # first of all: the thread may be about to have the handler raise
            self._failed_at = time.monotonic()
            signal.signal(signal.SIGTERM, self._after_failure if failed else signal.SIG_DFL)
        self._installed = False
        if not main:
            return
        self._end_listening()
        if not ours:
            return
        if failed:
            atexit.register(self._ignore)  # Python's handlers go before the interpreter does
            if self.received:
                follow = threading.Thread(target=_follow_main, args=(self._code,), daemon=True)
                with contextlib.suppress(RuntimeError):  # all others have ended before atexit
                    follow.start()
        elif self.received and not self._raised:  # else the program has caught it, and goes on
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_listening(self) -> None:
        """Give the wakeup descriptor back; only the main thread may."""
        if self._pipe is not None:
            _listen_no_more(self._pipe[1])
            self._wake(0)  # the thread ends, and closes both ends
        if self._thread is not None:
            self._thread.join(1.0)

    def _after_failure(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._failed_at > FAILED_SECONDS:  # the program goes on after all
            raise Terminated

    def _ignore(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._after_failure:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trains = self._trains()
        if self.received and trains != threading.get_ident() and trains in sys._current_frames():
            # A thread inside of torch aborts the process when the interpreter ends under it.
            atexit.unregister(self._ignore)
            with contextlib.suppress(Exception):
                atexit._run_exitfuncs()
                sys.stdout.flush()
            os._exit(self._code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._receive()
        # A handler that was set later and calls this one: there is no thread to wait for.
        chained = signal.getsignal(signal.SIGTERM) != self._handle
        if not (chained or self._pipe is None or self._decided):
            self._wake(number)  # an event loop may have taken the descriptor
        elif not self._anyone_busy():
            error, self._raised = Terminated(), True
            for one in self._open:
                one._remember(error)
            raise error

    def _receive(self) -> None:
        self.received = True
        for one in list(self._open):
            one.received = True

    def _anyone_busy(self) -> bool:
        return any(one._busy() for one in list(self._open))

    def _wake(self, number: int) -> None:
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([number]))

    def _listen(self, reader: int) -> None:
        while self._pipe is not None:
            numbers = os.read(reader, 64)
            if 0 in numbers or not numbers:
                break
            ours = signal.getsignal(signal.SIGTERM) == self._handle
            if ours and signal.SIGTERM in numbers and not self._decided:
                self._receive()
                self._decide()
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    def _decide(self) -> None:
        started = time.monotonic()
        time.sleep(GRACE_SECONDS)
        self._decided = True
        if not self._anyone_busy():
            # Once more, and now the handler raises: also out of a sleep, or a wait for a worker.
            main = threading.main_thread().ident
            if main is not None:
                signal.pthread_kill(main, signal.SIGTERM)
        ending = False
        while self._installed or ending:
            waited = time.monotonic() - started
            stuck = waited > GRACE_SECONDS + STUCK_SECONDS and not self._anyone_busy()
            if not ending and (stuck or waited > LIMIT_SECONDS):
                ending = True
                # Apart: this end waits for a scrape too, and no longer than any other.
                in_background(self._exit, "sdcwatch-end")
            if waited > LIMIT_SECONDS + LAST_SECONDS:
                self._exit()
                os._exit(EXIT_TERMINATED)
            time.sleep(0.05)

    def _exit(self) -> None:
        codes = [one._end() for one in list(self._open)]
        if codes:  # else all have ended meanwhile, and the process ends by itself
            os._exit(codes[0])

    def _forget(self) -> None:
        """In a forked child, whose signals are none of the guard's business."""
        if self._installed and self._pipe is not None:
            _listen_no_more(self._pipe[1])
        self._installed = False
        if signal.getsignal(signal.SIGTERM) in (self._handle, self._after_failure):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _follow_main(code: int) -> None:
    """The main thread has ended as it was told to, but some other keeps the process from it."""
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end or threading.main_thread().is_alive():
        time.sleep(0.1)
    os._exit(code)


def _listen_no_more(writer: int) -> None:
    """Take the wakeup descriptor away, unless it is an event loop's by now."""
    found = signal.set_wakeup_fd(-1)
    if found not in (-1, writer):
        signal.set_wakeup_fd(found)


def _nobody_handles(current: object) -> bool:
    """Whether the program leaves the signal to itself, or to a guard that has ended.

    One that failed stays there, and so does one that another thread has closed.
    """
    owner = getattr(current, "__self__", None)
    ended = isinstance(owner, TerminationHandler) and not owner._installed
    return ended or current is signal.SIG_DFL


def _forget_in_children(handler: TerminationHandler) -> None:
    weak = weakref.ref(handler)

    def after_fork() -> None:
        if (alive := weak()) is not None:
            alive._forget()

    os.register_at_fork(after_in_child=after_fork)
