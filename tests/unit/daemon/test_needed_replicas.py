"""A replica that is one of those wanted is not evicted ahead of others, whichever node had the primary one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.replication import AUDIT_KEYS, Replication
from kvpool.daemon.core.blocks import NamespaceState, Origin
from kvpool.placement.directory.base import Entry
from kvpool.placement.records import NamespaceSettings, NodeState
from tests.contract.suites.membership import until
from tests.support.embedded_directory import EmbeddedDirectory
from tests.support.tiers import without_disks

SECOND = Origin(secondary=True)


class Locator:
    """So many other nodes have each block."""

    def __init__(self, others: int) -> None:
        self.others = others
        self.asked = 0
        self.first = 0  # keys in the first call

    async def replicas(
        self, _namespace: NamespaceState, keys: Sequence[bytes]
    ) -> list[list[Entry]]:
        self.first = self.first or len(keys)
        self.asked += len(keys)
        return [[Entry(b"node%4d" % n, 1, 1) for n in range(self.others)] for _ in keys]


def make(pool: Any, locator: Locator) -> Replication:
    cluster = SimpleNamespace(
        config=DaemonConfig(socket="/s", forward=False),
        directory=EmbeddedDirectory(),
        own=b"ourself!",
        living={b"another!": None},
        state=NodeState.SERVING,
    )
    ticks = iter(range(10**9))
    return Replication(
        pool.node,
        cast("Any", cluster),
        cast("Any", SimpleNamespace(locator=locator)),
        without_disks(pool.node),
        cast("Any", None),
        lambda: float(next(ticks)),
    )


@contextlib.asynccontextmanager
async def running(work: Any):
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("how", ["audit", "repair"])
@pytest.mark.parametrize(
    ("others", "wanted", "needed"), [(0, 1, True), (1, 1, False), (1, 2, True), (2, 2, False)]
)
def test_a_secondary_replica_is_kept_when_too_few_others_are_left(
    make_pool, how: str, others: int, wanted: int, needed: bool
) -> None:
    async def main() -> None:
        if how == "repair" and wanted == 1:
            return  # such blocks are not walked through
        pool = make_pool()
        pool.namespace.settings = NamespaceSettings(replicas=wanted)
        pool.put(range(8), origin=SECOND)
        locator = Locator(others)
        replication = make(pool, locator)
        replication.repair()
        work = replication.forward() if how == "audit" else replication.replicate()
        async with running(work):
            await until(lambda: locator.asked >= 8)
            await until(lambda: bool(replication.stats().promoted) is needed)
        assert {block.secondary for block in pool.blocks(range(8))} == {not needed}
        assert replication.stats().promoted == 8 * needed

    asyncio.run(main())


def test_what_is_evicted_fast_is_audited_as_fast(make_pool) -> None:
    """Else most secondary replicas would go without a look at whether they are the last."""

    async def main() -> None:
        slabs = 500  # of four blocks
        pool = make_pool(slabs=slabs)
        pool.put(range(4 * slabs), origin=SECOND)
        pool.put(range(10_000, 10_000 + 2 * AUDIT_KEYS))
        assert pool.node.counters.evicted_secondary == 2 * AUDIT_KEYS
        locator = Locator(1)
        async with running(make(pool, locator).forward()):
            await until(lambda: locator.asked > 0)
        assert locator.first == 4 * AUDIT_KEYS, "twice as many as went"

    asyncio.run(main())
