"""Blocks that lack replicas are found although nodes come and go faster than a walk takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.repair_walk import RepairWalk
from kvpool.daemon.cluster.replication import Replication
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.errors import Unavailable
from kvpool.placement.directory.base import Entry
from kvpool.placement.records import NamespaceSettings
from tests.contract.suites.membership import until
from tests.support.embedded_directory import EmbeddedDirectory
from tests.support.tiers import without_disks

PAGES = 4


@given(
    st.lists(st.sampled_from(["want", "step", "want within a step", "failed step"]), max_size=60)
)
def test_each_page_is_examined_after_the_last_wish_and_the_walk_ends(what: list[str]) -> None:
    walk = RepairWalk()
    examined: list[int] = []  # in order; a wish is marked by -1
    steps = 0
    for one in [*what, *["step"] * (2 * PAGES)]:
        if one == "want":
            walk.request()
            examined.append(-1)
            continue
        if walk.position is None:
            continue
        at = walk.begin_step()
        if one == "want within a step":
            examined.append(at)
            walk.request()
            examined.append(-1)
        if one == "failed step":
            assert walk.position == at
            continue
        if one == "step":
            examined.append(at)
            steps += 1
        walk.end_step(at + 1 if at + 1 < PAGES else None)
    assert walk.position is None
    if -1 in examined:
        last = len(examined) - 1 - examined[::-1].index(-1)
        assert set(examined[last + 1 :]) == set(range(PAGES))


@given(st.integers(1, 50))
def test_wishes_without_end_keep_no_page_from_being_examined(rounds: int) -> None:
    walk = RepairWalk()
    walk.request()
    seen = []
    for _ in range(rounds * PAGES):
        at = walk.begin_step()
        walk.request()
        seen.append(at)
        walk.end_step(at + 1 if at + 1 < PAGES else None)
    assert seen == [*range(PAGES)] * rounds


class Locator:
    """Finds each block on one other node. `changes` more membership changes come while it looks.

    failing: the numbers of the calls that fail.
    """

    def __init__(self) -> None:
        self.looked: list[int] = []
        self.changes = 0
        self.failing: set[int] = set()
        self.calls = 0
        self.replication: Replication

    async def replicas(
        self, _namespace: NamespaceState, keys: Sequence[bytes]
    ) -> list[list[Entry]]:
        self.calls += 1
        if self.calls in self.failing:
            raise Unavailable("not now")
        self.looked += [int.from_bytes(key, "big") for key in keys]
        if self.changes:
            self.changes -= 1
            self.replication.repair()
        await asyncio.sleep(0)
        return [[Entry(b"another!", 1, 1)] for _ in keys]


class Disks:
    """Disks that hold these blocks, and no memory has: their walks and masks. first: those that go before others."""

    def __init__(self, digest: bytes, numbers: range, first: range = range(0)) -> None:
        self.digest = digest
        self.first = {number.to_bytes(16, "big") for number in first}
        self.keys = [number.to_bytes(16, "big") for number in numbers]

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        after = cursor + count
        found = [(self.digest, self.keys[cursor:after])]
        return found, after if after < len(self.keys) else None

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        assert digest == self.digest
        return 1, [int(key in self.keys) for key in keys]

    def ordinary(self, _: NamespaceState, keys: list[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self.first]


def make(pool: Any, disks: Any = None) -> tuple[Replication, Locator]:
    locator = Locator()
    pool.namespace.settings = NamespaceSettings(replicas=2)
    cluster = SimpleNamespace(
        config=DaemonConfig(socket="/s"), directory=EmbeddedDirectory(), own=b"ourself!", living={}
    )
    ticks = iter(range(10**9))
    replication = Replication(
        pool.node,
        cast("Any", cluster),
        cast("Any", SimpleNamespace(locator=locator)),
        disks or without_disks(pool.node),
        cast("Any", None),
        lambda: float(next(ticks)),
    )
    locator.replication = replication
    return replication, locator


async def run(replication: Replication) -> None:
    """Until the walk is done."""
    task = asyncio.create_task(replication.replicate())
    await until(lambda: not replication.stats().repairing)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


BLOCKS = 3000  # six steps


def test_a_walk_that_is_slower_than_the_changes_reaches_the_last_block(make_pool) -> None:
    async def main() -> None:
        pool = make_pool(slabs=BLOCKS)
        pool.put(range(BLOCKS))
        replication, locator = make(pool)
        locator.changes = 60  # one for each step of ten walks
        replication.repair()
        await run(replication)
        first = locator.looked[:BLOCKS]
        assert set(first) == set(range(BLOCKS)), "the first round is a whole one"
        assert locator.changes == 0
        assert set(locator.looked[-BLOCKS:]) == set(range(BLOCKS)), "so is the last one"
        assert len(locator.looked) <= 12 * BLOCKS, "and it ends"

    asyncio.run(main())


def test_a_directory_that_is_away_for_a_moment_does_not_begin_the_walk_anew(make_pool) -> None:
    async def main() -> None:
        pool = make_pool(slabs=BLOCKS)
        pool.put(range(BLOCKS))
        replication, locator = make(pool)
        locator.failing = {3, 4}
        replication.repair()
        await run(replication)
        assert locator.calls > 4
        assert locator.looked[:BLOCKS] == [*dict.fromkeys(locator.looked)], (
            "none is looked at twice"
        )
        assert set(locator.looked) == set(range(BLOCKS))

    asyncio.run(main())


def test_blocks_only_on_disks_are_examined_after_those_in_memory(make_pool) -> None:
    async def main() -> None:
        pool = make_pool(slabs=BLOCKS)
        pool.put(range(1000))
        disks = Disks(pool.namespace.directory_digest, range(900, 2500))
        replication, locator = make(pool, disks)
        replication.repair()
        await run(replication)
        assert set(locator.looked[:1000]) == set(range(1000))
        assert locator.looked[1000:] == [*range(1000, 2500)], "each once"

    asyncio.run(main())


def test_blocks_that_go_before_others_are_not_worth_replicas(make_pool) -> None:
    async def main() -> None:
        pool = make_pool(slabs=BLOCKS)
        pool.put(range(1000))
        pool.node.settle()
        left = [number.to_bytes(16, "big") for number in range(100)]
        pool.node.candidates.expend(pool.namespace, left)
        disks = Disks(pool.namespace.directory_digest, range(1000, 1500), range(1000, 1050))
        replication, locator = make(pool, disks)
        replication.repair()
        await run(replication)
        assert sorted(locator.looked) == [*range(100, 1000), *range(1050, 1500)]

    asyncio.run(main())
