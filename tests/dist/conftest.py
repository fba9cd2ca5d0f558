from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdcwatch.testing import GlooPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    pool = GlooPool(6, timeout_seconds=120.0)
    pool.start()  # outside of the time that a test has
    yield pool
    pool.close()
