"""What is stored for the jobs of a step, against storing each block of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.engine_plugins.vllm.layout.pages import GroupPages, HostPages, PartPages
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.plan import GroupSave, SaveJob
from kvpool.engine_plugins.vllm.worker import saves
from kvpool.engine_plugins.vllm.worker.saves import Saved, Saves
from kvpool.errors import PoolFull
from kvpool.types import KEY_BYTES, NamespaceRecord, PartSpec

BLOCKS, BYTES, PARTS = 64, 16, 3
RECORD = NamespaceRecord({"m": 1}, tuple(PartSpec(BYTES) for _ in range(PARTS)))
Chains = Sequence[tuple[int, int]]


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def groups(memory: np.ndarray) -> list[GroupPages]:
    """One group of two parts, which lie in the same pages, and one of the third."""
    first = [HostPages([memory[part]]) for part in range(PARTS)]
    parts = [PartPages(part, first[part]) for part in range(PARTS)]
    return [GroupPages(parts[:2]), GroupPages(parts[2:])]


def job(number: int, begins: int, length: int) -> SaveJob:
    """A request's blocks, which have keys of their own; it follows a block that is stored already."""
    packed = b"".join(key(1000 * number + begins + at) for at in range(length))
    parent = key(1000 * number + begins - 1) if begins else None
    ids = [(7 * number + at) % BLOCKS for at in range(length)]
    return SaveJob(
        number, f"r{number}", 1, [GroupSave(rule, packed, ids, parent) for rule in (0, 1)]
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chains=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=6),
    limit=st.integers(1, 20),
)
def test_each_block_is_stored_with_its_bytes_and_its_parent(
    pool_types: Any, chains: Chains, limit: int
) -> None:
    pool = pool_types.FakePool()
    memory = np.random.default_rng(1).integers(0, 256, (PARTS, BLOCKS, BYTES), np.uint8)
    jobs = [job(number, *chain) for number, chain in enumerate(chains, start=1)]
    namespace = pool.open(RECORD)
    with patch.object(saves, "TOGETHER", limit):
        results = Saves(pool, groups(memory), Counters()).save(namespace, jobs, None)
    assert results == [Saved.ALL] * len(jobs)
    expected = {}
    for number, (begins, length) in enumerate(chains, start=1):
        for part in range(PARTS):
            for at in range(length):
                name = key(1000 * number + begins + at)
                before = key(1000 * number + begins + at - 1) if begins + at else None
                expected[part, name] = (before, memory[part, (7 * number + at) % BLOCKS].tobytes())
    found = {
        (part, name): (pool.parents[part, name], pool.table[row, :BYTES].tobytes())
        for (_, part, name), row in pool.rows.items()
    }
    assert found == expected
    assert all(len(parts) * count <= max(limit, len(parts)) for parts, count in pool.exchanges)


def test_a_step_is_one_exchange_for_each_group(pool: Any) -> None:
    memory = np.zeros((PARTS, BLOCKS, BYTES), np.uint8)
    jobs = [job(number, 0, 2) for number in range(1, 9)]
    Saves(pool, groups(memory), Counters()).save(pool.open(RECORD), jobs, None)
    assert pool.exchanges == [((0, 1), 16), ((2,), 16)]
    assert pool.labelled == 2 * [(f"r{number}", 2) for number in range(1, 9)], "whose they are"


def test_those_whose_last_blocks_found_no_space_have_failed(pool: Any) -> None:
    """One part takes three blocks less than it is given, the first time."""
    reserve, room = pool.reserve, [5]

    def little(
        ns: Any, keys: Any, *, part: int = 0, parent: bytes | None = None, request: str = ""
    ) -> Any:
        count = len(pool_keys := bytes(keys)) // KEY_BYTES
        if part != 1:
            return reserve(ns, keys, part=part, parent=parent)
        fits = min(count, room[0])
        room[0] -= fits
        if not fits:
            raise PoolFull("no more")
        reservation = reserve(ns, pool_keys[: fits * KEY_BYTES], part=part, parent=parent)
        reservation.refused = count - fits
        return reservation

    pool.reserve = little
    memory = np.zeros((PARTS, BLOCKS, BYTES), np.uint8)
    jobs = [job(number, 0, 2) for number in range(1, 5)]
    results = Saves(pool, groups(memory), Counters()).save(pool.open(RECORD), jobs, None)
    assert results == [Saved.ALL, Saved.ALL, Saved.FAILED, Saved.FAILED]
    assert sum(part == 1 for part, _ in pool.writes) == 5


def test_bytes_that_may_have_been_overwritten_while_they_were_read_are_not_stored(
    pool: Any,
) -> None:
    memory = np.zeros((PARTS, BLOCKS, BYTES), np.uint8)
    jobs = [job(number, 0, 2) for number in (1, 2)]
    overwritten = iter(
        [False, True]
    )  # the second time it is asked, the bytes of the first group were read
    store = Saves(pool, groups(memory), Counters())
    results = store.save(pool.open(RECORD), jobs, None, lambda: next(overwritten, True))
    assert results == [Saved.FAILED] * 2
    assert pool.writes == []
