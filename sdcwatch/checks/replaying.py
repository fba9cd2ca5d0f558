"""Whether a replay is going on: one question that code of the user's may ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0  # of the process, not of a thread: on a GPU, hooks run in threads of the engine


def replaying() -> bool:
    """Whether the module is being run by a replay of the guard, not by the training loop.

    For code in a forward or in a hook that logs or counts. Answers in any thread, and before torch
    is imported; need not be called by every rank.

    Example:
        >>> replaying()
        False
    """
    return _depth > 0


@contextmanager
def replay_in_progress() -> Iterator[None]:
    """Make `replaying` true inside."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
