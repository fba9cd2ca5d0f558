from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdcwatch.testing import GlooPool


@pytest.fixture(scope="session")
def pool() -> Iterator[GlooPool]:
    """Processes of their own: frameworks train on all ranks of the default group."""
    heavy = ("transformers.trainer", "transformers.models.gpt2", "lightning.pytorch")
    pool = GlooPool(3, preload=heavy)
    pool.start()  # outside of the time that a test has
    yield pool
    pool.close()
