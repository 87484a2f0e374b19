"""Operators' jobs on one node, and what they and lists look at of its books."""

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.jobs import JobRunner, Work
from kvpool.daemon.ops.listing import describe_block, list_blocks
from kvpool.errors import LimitExceeded
from kvpool.types import PartSpec
from kvpool.wire.jobs import EvictJob, JobState, JobView
from tests.support.tiers import without_disks
from tests.support.waiting import until_async
from tests.unit.daemon.conftest import BASE, QUARTER, SLAB, Pool


@pytest.fixture
def pool() -> Pool:
    return Pool(slabs=8)


def hexed(*numbers: int) -> list[str]:
    return [n.to_bytes(16, "big").hex() for n in numbers]


SHOW = partial(describe_block, "a", "dram")


class Jobs:
    """A runner over the rules of one node's memory, whose clock stands still."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.journal = EventLog("a", lambda: 0.0)
        nothing: Any = None
        rules = {"dram": [pool.node]}
        work = Work(without_disks(pool.node), nothing, lambda: rules, nothing, nothing, lambda: 0.0)
        self.runner = JobRunner("a", work, self.journal, lambda: 0.0)

    def begin(
        self, spec: EvictJob, name: str = "j", namespace: NamespaceState | None = None
    ) -> None:
        namespace = namespace or self.pool.namespace
        self.runner.begin(name, spec, [namespace], namespace.tenant, "somebody", dry_run=False)

    async def ended(self, name: str = "j") -> JobView:
        await until_async(lambda: self.view(name).state is not JobState.RUNNING, "it ends")
        return self.view(name)

    def view(self, name: str = "j") -> JobView:
        return self.runner.views([name])[0]


class Forever(Work):
    """Work that does not end."""

    def __init__(self) -> None:
        pass

    async def run(self, *_: object) -> None:
        await asyncio.Event().wait()


def test_chains_that_lead_in_a_circle_end(pool: Pool) -> None:
    """What comes before a block is what its client says."""
    first, second, third, itself, free = range(1, 6)
    for number, parent in ((first, third), (second, first), (third, second), (itself, itself)):
        pool.put([number], parent=pool.keys([parent]))
    pool.put([free])

    async def story() -> JobView:
        jobs = Jobs(pool)
        jobs.begin(EvictJob(keys=hexed(free), chains=True))
        return await jobs.ended()

    view = asyncio.run(story())
    assert (view.state, view.blocks) == (JobState.DONE, 1), view
    assert pool.here([first, second, third, itself, free]) == [first, second, third, itself]


def test_two_tenants_leave_a_job_for_the_third(pool: Pool) -> None:
    tenants = {"red": pool.tenant}
    for name in ("blue", "green"):
        tenants[name] = pool.node.add_tenant(name, 0, SLAB, SLAB)

    async def story() -> dict[str, int]:
        jobs = Jobs(pool)
        jobs.runner = JobRunner("a", Forever(), jobs.journal, lambda: 0.0, list(tenants))
        begun = dict.fromkeys(tenants, 0)
        for name, tenant in tenants.items():
            with contextlib.suppress(LimitExceeded):
                while True:
                    what = f"{name} {begun[name]}"
                    jobs.runner.begin(what, EvictJob(), [], tenant, "x", dry_run=True)
                    begun[name] += 1
        await jobs.runner.close()
        return begun

    assert asyncio.run(story()) == {"red": 4, "blue": 3, "green": 1}


def test_a_job_that_is_stopped_before_it_begins_has_ended(pool: Pool) -> None:
    pool.put([1])

    async def story() -> tuple[JobView, list[str]]:
        jobs = Jobs(pool)
        jobs.begin(EvictJob())
        assert jobs.runner.stop("j"), "both came in one go"
        view = await jobs.ended()
        return view, [event.kind for event in jobs.journal.after(0, 10)]

    view, told = asyncio.run(story())
    assert view.state is JobState.CANCELLED
    assert told == ["job began", "job ended"]
    assert pool.here([1]) == [1]


def test_what_is_remembered_of_a_job_is_small(pool: Pool) -> None:
    async def story() -> JobView:
        jobs = Jobs(pool)
        jobs.begin(EvictJob(keys=hexed(*range(1000))))
        view = await jobs.ended()
        (job,) = jobs.runner._jobs.values()
        assert isinstance(job.spec, EvictJob)
        assert job.spec.keys == []
        return view

    assert asyncio.run(story()).seen == 1000


@pytest.fixture
def others(pool: Pool) -> list[NamespaceState]:
    """Another tenant's namespaces beside ours, whose blocks are of two sizes."""
    tenant = pool.node.add_tenant("blue", 1, 8 * 4096, 4096)
    holder = pool.node.holders.add("blue", "engine")
    namespaces = []
    for base, spec in ((BASE, QUARTER), (b"m" * 16, PartSpec(2048))):
        namespace = pool.node.namespaces.open(tenant, base, b"{}", (spec,))
        pool.put(range(100, 108), namespace=namespace, holder=holder)
        namespaces.append(namespace)
    return namespaces


def test_one_tenants_jobs_leave_room_for_anothers(pool: Pool, others: list[NamespaceState]) -> None:
    """Among those that run, and among those that are remembered."""

    async def story() -> list[JobView]:
        jobs = Jobs(pool)
        jobs.begin(EvictJob(), "blue", others[0])
        await jobs.ended("blue")
        for number in range(200):
            jobs.begin(EvictJob(), f"j{number}")
            await jobs.ended(f"j{number}")
        for number in range(4):
            jobs.begin(EvictJob(), f"k{number}")
        with pytest.raises(LimitExceeded, match="4 jobs of tenant"):
            jobs.begin(EvictJob(), "k4")
        jobs.begin(EvictJob(), "blue-2", others[0])
        for number in range(4):
            await jobs.ended(f"k{number}")
        await jobs.ended("blue-2")
        return jobs.runner.views([])

    views = asyncio.run(story())
    assert len(views) == 100
    assert [view.job for view in views if view.tenant == "blue"] == ["blue", "blue-2"]


@pytest.mark.usefixtures("others")
def test_numbers_of_others_do_not_show(pool: Pool) -> None:
    """Neither in how far a job has to go, nor in cursors."""
    pool.put([1, 2])

    async def story() -> JobView:
        jobs = Jobs(pool)
        jobs.begin(EvictJob(unused_s=1.0))
        return await jobs.ended()

    own = len(pool.tenant.classes[1024].by_row)
    assert asyncio.run(story()).total == own
    page = list_blocks([pool.node], [pool.namespace], "", 10, 0.0, SHOW)
    assert [each.key for each in page.blocks] == hexed(1, 2)
    assert page.cursor is None


@pytest.mark.parametrize("row", [0, 3, 1 << 20, (1 << 40) - 1])
@pytest.mark.parametrize("number", [0, 1, 2, 1 << 30])
def test_a_cursor_that_somebody_made_up_costs_no_more(
    pool: Pool, others: list[NamespaceState], number: int, row: int
) -> None:
    """Than one that came with an answer: so many slots are looked at, and no more."""
    pool.put([1, 2])
    for tenant in (None, others[0].tenant):
        blocks, after = pool.node.inventory.scan((number << 40) + row, 3, tenant)
        assert len(blocks) <= 3
        assert after is None or after > (number << 40)
    page = list_blocks([pool.node], others, f"0.{(number << 40) + row}", 3, 0.0, SHOW)
    assert len(page.blocks) <= 3
