"""Schedulers that most of these tests begin with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.engine_plugins.scheduler.harness import Harness


@pytest.fixture
def harness(pool: Any, block_pool: Any) -> Harness:
    return Harness(pool, block_pool, load_mode="async")


@pytest.fixture
def clustered(pool: Any, block_pool: Any, threads: Any) -> Harness:
    """With one other node; pulls happen when the test lets `threads` run."""
    pool.others = 1
    return Harness(pool, block_pool, load_mode="async", threads=threads, pulls_max=2)
