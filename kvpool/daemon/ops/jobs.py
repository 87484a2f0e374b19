"""Operators' jobs on one node: each works in small steps and reports its progress. Event loop only.

A job takes a tenth of the loop's time at most, so that engines' requests do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

import msgspec

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import PIN_HARD, Block, NamespaceState, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.ops.commands import Asker, namespaces_of
from kvpool.daemon.ops.event_log import EventLog
from kvpool.daemon.ops.listing import give_up, part_bytes, some_blocks
from kvpool.daemon.shares import Shares
from kvpool.daemon.tiers.ssd_tier import SsdTier
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded
from kvpool.tasks import crash_if_failed
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import EvictJob, JobSpec, JobState, JobView, ScrubJob, WarmJob, parse_job

REMEMBERED_MAX = 100
RUNNING_MAX = 8
RUNNING_OF_TENANT_MAX = 4
TOGETHER = 20  # blocks in one go: about 70 microseconds
LEAST_TOGETHER = 50
IDLE_SHARE = 9.0  # pause after a step, relative to its duration
DRY_LEAST_MAX = 20_000  # blocks of least value that are counted in a dry run
UNRELATED_MAX = 100_000  # blocks remembered as not in any wanted chain
WARM_TOGETHER = 256
WARM_S = 30.0  # for this many
SCRUB_TOGETHER = 64
SHORT_S = 0.2  # between attempts while nothing can be done

ListOn = Callable[[str, NamespaceState, str], Awaitable[tuple[list[bytes], str | None]]]
"""Blocks of a node in a namespace, from a cursor on, and the next cursor."""
EvictOn = Callable[[str, NamespaceState, Mapping[bytes, int], str], Awaitable[int]]
"""Have a node evict blocks of which it has only these parts, on whose behalf; returns how many it had."""


@dataclass(eq=False, slots=True)
class Job:
    """One job. `task` ends when it does."""

    spec: JobSpec
    tenant: Tenant
    began: float
    view: JobView
    """Its progress. The times in it are those of the last look."""
    ended: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(eq=False)
class JobRunner:
    """The jobs of a node: a few at a time, half of them kept for the tenants in equal parts, the most recent ones
    remembered.
    """

    node: str
    work: Work
    journal: EventLog
    clock: Callable[[], float]
    tenants: Collection[str] = ()

    def __post_init__(self) -> None:
        self._shares = Shares(self.tenants)
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def begin(
        self,
        name: str,
        spec: JobSpec,
        namespaces: Sequence[NamespaceState],
        tenant: Tenant,
        by: str,
        *,
        dry_run: bool,
    ) -> JobView:
        """Raises `LimitExceeded` when too many are running, `InvalidRequest` for a name that is taken."""
        if not 0 < len(name) <= 64 or name in self._jobs:
            raise InvalidRequest(
                f"job {name!r:.80} already exists on this node, or the name is invalid"
            )
        running = [j.tenant.name for j in self._jobs.values() if j.view.state is JobState.RUNNING]
        mine = running.count(tenant.name)
        room = self._shares.room(Counter(running), tenant.name, RUNNING_MAX)
        if mine >= RUNNING_OF_TENANT_MAX or not room:
            raise LimitExceeded(
                f"{mine} jobs of tenant {tenant.name!r} are running on node {self.node}, "
                f"{len(running)} in all: wait until one ends, or stop one"
            )
        kind = str(type(spec).__struct_config__.tag)
        view = JobView(
            job=name, node=self.node, kind=kind, dry_run=dry_run, tenant=tenant.name, by=by
        )
        job = Job(spec, tenant, self.clock(), view)
        self._jobs[name] = job
        if len(self._jobs) > REMEMBERED_MAX:
            self._forget_one()
        self.journal.note("job began", job=name, what=kind, by=by, dry_run=dry_run)
        job.task = asyncio.get_running_loop().create_task(self._run(job, namespaces))
        job.task.add_done_callback(crash_if_failed)
        job.task.add_done_callback(partial(self._ended, job))
        return self._view(job)

    async def _run(self, job: Job, namespaces: Sequence[NamespaceState]) -> None:
        try:
            await self.work.run(job, namespaces)
            job.view.state = JobState.DONE
        except KvpoolError as error:
            job.view.state, job.view.error = JobState.FAILED, str(error)

    def _forget_one(self) -> None:
        """The oldest ended job of the tenant with the most: no tenant displaces another's."""
        ended = [job for job in self._jobs.values() if job.view.state is not JobState.RUNNING]
        ((most, _),) = Counter(job.tenant.name for job in ended).most_common(1)
        del self._jobs[next(job.view.job for job in ended if job.tenant.name == most)]

    def _ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """Its remembered state is small."""
        if task.cancelled():
            job.view.state = JobState.CANCELLED  # perhaps before it began
        job.ended = self.clock()
        if not isinstance(job.spec, ScrubJob):
            job.spec = msgspec.structs.replace(job.spec, keys=[])
        self.journal.note(
            "job ended",
            job=job.view.job,
            what=job.view.kind,
            state=str(job.view.state),
            blocks=job.view.blocks,
            error=job.view.error,
        )

    def views(self, names: Iterable[str]) -> list[JobView]:
        """The known ones of these; without names all."""
        wanted = list(names) or list(self._jobs)
        return [self._view(self._jobs[name]) for name in wanted if name in self._jobs]

    def stop(self, name: str) -> bool:
        """Whether it was running."""
        job = self._jobs.get(name)
        if job is None or job.task is None or job.task.done():
            return False
        job.task.cancel()
        return True

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _view(self, job: Job) -> JobView:
        now = self.clock()
        return msgspec.structs.replace(
            job.view,
            age_s=round(now - job.began, 3),
            took_s=round((job.ended or now) - job.began, 3),
        )


@dataclass(eq=False)
class Work:
    """The work of jobs. rules: of this node's slots, by tier; all, or of one."""

    tiers: SsdTier
    fetcher: BlockFetcher
    rules: Callable[[], Mapping[str, list[Node]]]
    list_on: ListOn
    evict_on: EvictOn
    clock: Callable[[], float]

    async def run(self, job: Job, namespaces: Sequence[NamespaceState]) -> None:
        """Raises `KvpoolError` when it cannot continue."""
        match job.spec:
            case EvictJob() as spec if spec.least_bytes:
                await self._evict_least(job, spec)
            case EvictJob() as spec:
                await self._evict(job, spec, namespaces)
            case WarmJob() as spec:
                await self._warm(job, spec, namespaces[0])
            case ScrubJob():
                await self._scrub(job)
            case other:
                assert_never(other)

    async def _pause(self, began: float) -> None:
        await asyncio.sleep((self.clock() - began) * IDLE_SHARE)

    # ---- evict -------------------------------------------------------------------------------------

    def _chosen(self, spec: EvictJob) -> list[Node]:
        rules = self.rules()
        return [node for tier in spec.tiers or rules for node in rules.get(tier, [])]

    async def _evict(self, job: Job, spec: EvictJob, namespaces: Sequence[NamespaceState]) -> None:
        chosen, tenant = self._chosen(spec), job.tenant.name
        wanted = {namespace.directory_digest for namespace in namespaces}
        keys = list(dict.fromkeys(map(bytes.fromhex, spec.keys)))
        named = [] if spec.chains else keys
        every = [node for rules in self.rules().values() for node in rules]
        chains = _Chains(keys, every, wanted, self.tiers.parents)
        job.view.total = len(named) * len(chosen) or sum(
            node.inventory.rows_of(t) for node in chosen if (t := node.tenants.get(tenant))
        )
        began = self.clock()
        for node in chosen:
            for seen, blocks in some_blocks(node, tenant, wanted, named, TOGETHER):
                going = await chains.those_of(blocks) if keys and not named else blocks
                self._give_up(job, spec, node, going)
                job.view.seen = min(job.view.total, job.view.seen + seen)
                await self._pause(began)
                began = self.clock()
        job.view.seen = job.view.total

    def _give_up(self, job: Job, spec: EvictJob, node: Node, blocks: Sequence[Block]) -> None:
        """Evict blocks that are not pinned and not used too recently; or only count them."""
        oldest = -1
        if spec.unused_s:
            oldest = node.idle_age.tick_before(spec.unused_s, self.clock())
        going = []
        for block in blocks:
            if spec.unused_s and block.used > oldest:
                continue
            if block.pin == PIN_HARD:
                job.view.kept += 1
                continue
            job.view.blocks += 1
            job.view.nbytes += part_bytes(block)[1]
            going.append(block)
        if not job.view.dry_run:
            give_up(node, going)

    async def _evict_least(self, job: Job, spec: EvictJob) -> None:
        """Evict the policy's next victims, until enough is free."""
        chosen = self._chosen(spec)
        job.view.total = spec.least_bytes
        for node in chosen:
            tenant = node.tenants.get(job.tenant.name)
            if tenant is None:
                continue
            if job.view.dry_run:
                began = self.clock()
                _count_least(job, spec, node, tenant)
                await self._pause(began)
            gone = -1
            while gone and not job.view.dry_run and job.view.nbytes < spec.least_bytes:
                began = self.clock()
                largest = max(tenant.classes, default=1)
                n = min(LEAST_TOGETHER, -(-(spec.least_bytes - job.view.nbytes) // largest))
                gone, nbytes = node.eviction.evict_least(tenant, n)
                job.view.blocks += gone
                job.view.nbytes += nbytes
                await self._pause(began)
            job.view.seen = min(job.view.total, job.view.nbytes)

    # ---- warm --------------------------------------------------------------------------------------

    async def _warm(self, job: Job, spec: WarmJob, namespace: NamespaceState) -> None:
        keys = [bytes.fromhex(key) for key in spec.keys]
        cursor: str | None = None if keys else ""
        while True:
            if cursor is not None:
                keys, cursor = await self.list_on(spec.source, namespace, cursor)
            job.view.total += len(keys)
            for first in range(0, len(keys), WARM_TOGETHER):
                await self._bring(job, spec, namespace, keys[first : first + WARM_TOGETHER])
            if cursor is None:
                return
            await asyncio.sleep(0)

    async def _bring(
        self, job: Job, spec: WarmJob, namespace: NamespaceState, keys: Sequence[bytes]
    ) -> None:
        """Raises `LimitExceeded` if moving would evict others' sole replicas, or blocks moved before."""
        job.view.seen += len(keys)
        (node,) = self.rules()["dram"]
        _, before = node.inventory.masks(namespace.directory_digest, keys)
        every = (1 << len(namespace.tables)) - 1
        lacking = [
            k for k, mask in zip(keys, before or [0] * len(keys), strict=True) if mask != every
        ]
        if job.view.dry_run:
            job.view.blocks += len(lacking)
            return
        most = _room(node, namespace) if spec.move else len(lacking)
        left = set(lacking[most:])
        lacking = lacking[:most]
        keys = [key for key in keys if key not in left]
        if lacking:
            await self.fetcher.pull_each(namespace, [], lacking, WARM_S)
        _, after = node.inventory.masks(namespace.directory_digest, keys)
        here = {key: mask for key, mask in zip(keys, after, strict=False) if mask}
        came = [key for key in lacking if key in here]
        job.view.blocks += len(came)
        for key in came:
            block = next(block for table in namespace.tables if (block := table.blocks.get(key)))
            job.view.nbytes += part_bytes(block)[1]
        if spec.move and here:
            await self._take_over(job, spec, namespace, node, here)
        if left:
            raise LimitExceeded(
                f"this node has no room for more blocks of namespace {namespace.base.hex()}: the remaining blocks stay "
                f"on node {spec.source}. Evict blocks here first (kvpool job start evict --least SIZE), then move the rest"
            )

    async def _take_over(
        self,
        job: Job,
        spec: WarmJob,
        namespace: NamespaceState,
        node: Node,
        here: Mapping[bytes, int],
    ) -> None:
        """Have the source drop the blocks that are here: from now on these replicas are primary.

        They are held until it has, so that no block is lost.
        """
        kept: list[str] = []
        try:
            held = {
                table: [key for key in here if key in table.blocks] for table in namespace.tables
            }
            if not self.fetcher.leases.hold(held, kept):
                raise LimitExceeded("too many leases are held on this node: try again")
            node.candidates.promote(
                [b for t in namespace.tables for key in here if (b := t.blocks.get(key))]
            )
            await self.evict_on(spec.source, namespace, here, job.view.by)
        finally:
            self.fetcher.leases.let_go(namespace.tenant.name, kept)

    # ---- scrub -------------------------------------------------------------------------------------

    async def _scrub(self, job: Job) -> None:
        if job.view.dry_run:
            raise InvalidRequest(
                "a scrub has no dry run: it changes nothing except dropping damaged blocks"
            )
        job.view.total = sum(node.inventory.block_count() for node in self.rules().get("ssd", []))
        cursor: int | None = 0
        while cursor is not None:
            began = self.clock()
            seen, bad, cursor = await self.tiers.scrub(cursor, SCRUB_TOGETHER)
            job.view.seen += seen
            job.view.blocks += bad
            # Half of the disks' time is for engines.
            await asyncio.sleep(self.clock() - began if seen else SHORT_S)


class _Chains:
    """Which blocks follow any of some keys, in prefix chains that may be in several tiers."""

    def __init__(
        self,
        keys: Iterable[bytes],
        nodes: Sequence[Node],
        wanted: set[bytes],
        parents: Callable[[Sequence[Block]], Awaitable[Sequence[bytes]]],
    ) -> None:
        """parents: see `SsdTier.parents`."""
        self._parents = parents
        self._in = set(keys)
        self._out: set[bytes] = set()
        self._states = [
            state
            for node in nodes
            for digest in wanted
            if (state := node.namespaces.by_directory(digest)) is not None and not state.retired
        ]

    async def those_of(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of the blocks that follow one of the keys, and are still here afterwards."""
        asked = [(block.table, block.key) for block in blocks]
        parents = await self._parents(blocks)
        chosen = [
            (table, key)
            for (table, key), parent in zip(asked, parents, strict=True)
            if await self._has(key, parent)
        ]
        return [block for table, key in chosen if (block := table.blocks.get(key))]

    async def _has(self, key: bytes, parent: bytes) -> bool:
        way: dict[bytes, None] = {}
        while key not in self._in:
            # Clients name the parents: they may form a cycle.
            circle = key in way
            way[key] = None
            if circle or not parent or key in self._out or parent in self._out:
                if len(self._out) > UNRELATED_MAX:
                    self._out.clear()
                self._out.update(way)
                return False
            key = parent
            known = [b for s in self._states for t in s.tables if (b := t.blocks.get(key))]
            (parent,) = await self._parents(known[:1]) or (b"",)
        self._in.update(way)
        return True


def _room(node: Node, namespace: NamespaceState) -> int:
    """How many more whole blocks fit into this node's memory without evicting sole replicas."""
    tenant = namespace.tenant
    room = node.candidates.spare_bytes(tenant)
    if namespace.quota:
        room = min(room, namespace.quota - namespace.held_bytes)
    return max(0, int(room // sum(table.stride / table.spec.stride for table in namespace.tables)))


def _count_least(job: Job, spec: EvictJob, node: Node, tenant: Tenant) -> None:
    """An estimate of the victims: policies spare recently read blocks, which only shows at eviction."""
    coldest = [
        *node.candidates.coldest_secondary(tenant, DRY_LEAST_MAX),
        *node.candidates.coldest(tenant, DRY_LEAST_MAX),
    ]
    for block in coldest:
        if job.view.nbytes >= spec.least_bytes:
            return
        job.view.blocks += 1
        job.view.nbytes += block.table.stride
    if len(coldest) >= DRY_LEAST_MAX:
        raise LimitExceeded(f"a dry run counts at most {DRY_LEAST_MAX} blocks: request fewer bytes")


@dataclass(frozen=True, eq=False, slots=True)
class JobCommands:
    """Answers commands about jobs."""

    name: str
    cluster: ClusterMember
    jobs: JobRunner
    journal: EventLog

    async def _begin_job(self, who: Asker, m: operator_wire.BeginJob) -> Any:
        spec = parse_job(m.spec)
        digest = bytes.fromhex(getattr(spec, "namespace", ""))
        if isinstance(spec, WarmJob):
            if spec.source == self.name:
                raise InvalidRequest(
                    f"node {spec.source} is both source and destination: start this on the nodes that should receive "
                    "the blocks"
                )
            # A new node is warmed before its engines start.
            self.cluster.namespaces.open_known(who.tenant, digest)
        namespaces = namespaces_of(who.tenant, digest)
        view = self.jobs.begin(m.job, spec, namespaces, who.tenant, who.by, dry_run=m.dry_run)
        if not m.dry_run:
            self.journal.audit(
                who.by, view.kind, tenant=who.tenant.name, job=m.job, **_chosen_by(spec)
            )
        return view

    async def _jobs(self, _who: Asker, m: operator_wire.Jobs) -> Any:
        return self.jobs.views(m.jobs)

    async def _stop_job(self, who: Asker, m: operator_wire.StopJob) -> int:
        stopped = self.jobs.stop(m.job)
        if stopped:
            self.journal.audit(who.by, "stop job", job=m.job)
        return int(stopped)


def _chosen_by(spec: JobSpec) -> dict[str, Any]:
    """A short description of a job: how many keys, not which."""
    asked = {name: value for name, value in msgspec.structs.asdict(spec).items() if value}
    if "keys" in asked:
        asked["keys"] = len(asked["keys"])
    return asked
