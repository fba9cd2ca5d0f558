from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdcwatch.testing import GlooPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    pool = GlooPool(3)
    pool.start()  # outside of the time that a test has
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def larger_pool() -> Iterator[GlooPool]:
    pool = GlooPool(4)
    pool.start()  # outside of the time that a test has
    yield pool
    pool.close()
