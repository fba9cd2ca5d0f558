"""What reaches stderr, and what is left of it when guards have closed."""

from __future__ import annotations

import logging

import pytest

from sdcwatch.guard.reporter import LOG, open_console


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_of_two_guards_the_one_that_is_open_keeps_the_console(
    capsys: pytest.CaptureFixture[str], first_to_close: int
) -> None:
    before = LOG.level, list(LOG.handlers)
    close = [open_console(console=True), open_console(console=True)]
    close.pop(first_to_close)()
    LOG.info("still open")
    close.pop()()
    LOG.log(logging.INFO, "all are closed")
    assert capsys.readouterr().err == "sdcwatch: still open\n"
    assert (LOG.level, list(LOG.handlers)) == before
