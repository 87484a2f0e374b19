"""Many at a time: what a cluster does under as many requests as one node takes.

    .venv/bin/python bench/scale.py [--quick] [--json FILE] [--only PART]

steps      the longest step of the control process with many blocks resident, and its memory for each; and the
           longest one while slabs move to blocks of another size (`slab_step_ms_max`), which empties one at a time
ssd        its memory for each block on an SSD, full, with all evictions that it remembers
members    following a thousand nodes, ten of whose records change a second; three hundred that end at once
cluster    three daemons among a thousand members that come, go and end at once, and 10,000 that are dead
hung_peer  sixty-four prompts of eight parts at a time, while one of three nodes is stopped and the others have all
hung_disk  the same, while the disks of the reader and of one owner hang, and the other owner has all in memory

`--quick` has fewer blocks, simulated members and dead incarnations, and shorter phases: the sizes are in `QUICK`. What is
done is the same, and so are the bounds.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import uvloop
from harness import Report, median, parse_arguments, percentile

from kvpool.client import OperatorClient
from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.ssd_books import TableRecord
from kvpool.daemon.tiers.ssd_device import SsdDevice
from kvpool.daemon.workers.disk_proxy import Disk
from kvpool.placement.directory.base import TIERS
from kvpool.placement.directory.redis import RedisDirectory
from kvpool.placement.etcd.client import EtcdClient, delete, put
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.membership.etcd import EtcdMembership
from kvpool.placement.peers import Peers
from kvpool.placement.records import (
    NodeRecord,
    NodeState,
    TierRecord,
    TransportRecord,
    encode_record,
    new_incarnation,
)
from kvpool.placement.redis.settings import parse_url
from kvpool.storage.eviction import DEFAULT_POLICY, policy_maker
from kvpool.storage.stack import ssd_costs
from kvpool.types import BlockStatus, Namespace, NamespaceRecord, PartSpec, split_keys
from kvpool.wire import frame
from kvpool.wire import storage as storage_wire
from tests.support.local_cluster import LocalCluster
from tests.support.local_node import MemoryOnly
from tests.support.servers.etcd import Etcd
from tests.support.waiting import until, until_async

PROMPTS, PARTS, BLOCKS = 64, 8, 4
PART_BYTES = 16 << 10
WAIT_S = 4.0
DATA = np.random.default_rng(7).integers(0, 255, (PARTS, BLOCKS, PART_BYTES), dtype=np.uint8)

Prompt = list[bytes]

BLOCK_BYTES = 64 << 10
PUT_BLOCKS = 64
OTHER_SIZE_PUTS = 300
SSD_BLOCK_BYTES = 4096
CHANGES_S, CHURN_A_MINUTE = 10, 0.1


@dataclass(frozen=True)
class Sizes:
    """resident, on_ssd: blocks. followed_s: how long the cost of following 1,000 nodes is measured. simulated: members
    beside the three daemons, whose leases last ttl_s; ending: how many of them end at once. left: members that came and
    left again, and unseen: incarnations that nobody has seen alive (the sweep waits half a minute for them to come),
    whose entries are swept. sets: of prompts, read while all is well, and while a node or disks hang.
    """

    resident: int = 4_000_000
    on_ssd: int = 4_000_000
    followed_s: float = 8.0
    simulated: int = 1000
    ttl_s: int = 15
    ending: int = 300
    left: int = 2000
    unseen: int = 10_000
    churn_s: float = 60.0
    sets: int = 5


FULL = Sizes()
QUICK = Sizes(100_000, 50_000, 2.5, 300, 4, 100, unseen=0, churn_s=3.0, sets=1)
MEMBERS, ENDING = 1000, 300  # in part `members`, whatever the sizes: one process follows them


def sizes_of(report: Report) -> Sizes:
    return QUICK if report.quick else FULL


def _alone(run: Callable[[int], dict[str, float]], blocks: int) -> dict[str, float]:
    """In a process of its own, whose memory is measured."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, (blocks,))


def steps(report: Report) -> None:
    """Puts into a node's rules, each as large as an engine's, at the steady state of a full pool."""
    resident = sizes_of(report).resident
    one, two = _alone(_one_size, resident), _alone(_two_sizes, resident)
    report.row(f"one size, {resident:,} blocks", **one)
    report.row(f"two sizes, {resident:,} blocks", **two)
    report.check("loop_step_ms_max", one["longest_ms"], at_most=5.0)
    report.check("slab_step_ms_max", two["longest_ms"], at_most=5.0)
    report.check("dram_bytes_per_block", one["bytes_per_block"], at_most=350)


def ssd(report: Report) -> None:
    """Blocks of a small memory, written to a disk that takes all and keeps nothing: only the books are measured."""
    blocks = sizes_of(report).on_ssd
    found = _alone(_on_ssd, blocks)
    report.row(f"ssd, {blocks:,} blocks", **found)
    report.check("ssd_bytes_per_block", found["bytes_per_block"], at_most=80)


class _Rules:
    """A node's rules as in a daemon, without clients: as in `kvpool.daemon.server.server`."""

    def __init__(self, nbytes: int) -> None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 10, 1_000_000)
        self.node = Node(make_policy=policy_maker(DEFAULT_POLICY))
        self.node.inventory.follow_changes()
        self.tenant = self.node.add_tenant("bench", 0, nbytes)
        self.holder = self.node.holders.add("bench", "bench")
        self._ticket = 0

    def put(self, namespace: Any, blocks: int = PUT_BLOCKS) -> float:
        """Seconds of CPU of a put and what is done after its answer."""
        keys, checksums = secrets.token_bytes(16 * blocks), secrets.token_bytes(16 * blocks)
        return self._put(namespace, keys, checksums)

    def put_keys(self, namespace: Any) -> list[bytes]:
        """The keys of a put."""
        keys = secrets.token_bytes(16 * PUT_BLOCKS)
        self._put(namespace, keys, secrets.token_bytes(16 * PUT_BLOCKS))
        return list(split_keys(keys))

    def _put(self, namespace: Any, keys: bytes, checksums: bytes) -> float:
        self._ticket += 1
        began = time.thread_time()
        self.node.puts.reserve(self.holder, namespace, 0, self._ticket, split_keys(keys))
        self.node.puts.commit(self.holder, self._ticket, checksums)
        self.node.settle()
        taken = time.thread_time() - began
        self.node.inventory.take_changes()
        return taken


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _one_size(resident: int) -> dict[str, float]:
    before = _resident_bytes()
    rules = _Rules(resident * BLOCK_BYTES)
    parts = [PartSpec(BLOCK_BYTES)]
    namespace = rules.node.namespaces.open(rules.tenant, b"x" * 16, b"{}", parts)
    puts = rules.tenant.allocator.capacity(BLOCK_BYTES) // PUT_BLOCKS
    filling = [rules.put(namespace) for _ in range(puts)]
    filled = _resident_bytes() - before
    churn = [rules.put(namespace) for _ in range(2 * puts)]
    return {
        "filling_us": 1e6 * median(filling),
        "churn_us": 1e6 * median(churn),
        "churn_p99_us": 1e6 * percentile(churn, 0.99),
        "filling_longest_ms": 1e3 * max(filling),
        "longest_ms": 1e3 * max(*filling, *churn),
        "filled_bytes_per_block": filled / (puts * PUT_BLOCKS),
        "bytes_per_block": (_resident_bytes() - before) / (puts * PUT_BLOCKS),
    }


def _two_sizes(resident: int) -> dict[str, float]:
    """Small blocks fill the pool, then larger ones come: slabs change their class."""
    rules = _Rules(resident * 4096)
    small, large = (
        rules.node.namespaces.open(rules.tenant, name * 16, b"{}", [PartSpec(nbytes)])
        for name, nbytes in ((b"s", 4096), (b"l", 20 << 10))
    )
    for _ in range(rules.tenant.allocator.capacity(4096) // PUT_BLOCKS):
        rules.put(small)
    others = [rules.put(large) for _ in range(OTHER_SIZE_PUTS)]
    return {
        "median_us": 1e6 * median(others),
        "longest_ms": 1e3 * max(others),
        "slabs_moved": rules.node.counters.slabs_reclaimed,
    }


class _TakesAll:
    """A disk without an index and without bytes."""

    def __init__(self, segment_bytes: int) -> None:
        self.ready = storage_wire.DiskReady(segment_bytes, 1 << 40, False, [], [])

    async def scan(self, count: int) -> storage_wire.Scanned:
        return storage_wire.Scanned(b"")

    async def add_table(self, record: bytes, table: int = 0) -> int:
        return 1

    async def write(self, order: storage_wire.WriteBlocks) -> storage_wire.Written:
        return storage_wire.Written(bytes([BlockStatus.PRESENT]) * (len(order.slots) // 8), 0.0)

    async def forget(self, order: storage_wire.ForgetSlots) -> None:
        pass


def _on_ssd(resident: int) -> dict[str, float]:
    return asyncio.run(_fill_ssd(resident))


async def _fill_ssd(resident: int) -> dict[str, float]:
    """As many blocks as the disk has room for, and then twice as many that take the place of others."""
    rules = _Rules(64 * PUT_BLOCKS * SSD_BLOCK_BYTES)
    parts = [PartSpec(SSD_BLOCK_BYTES)]
    namespace = rules.node.namespaces.open(rules.tenant, b"x" * 16, b"{}", parts)
    (table,) = namespace.tables

    async def adopt(_record: TableRecord) -> NamespaceState | None:
        return namespace

    def make_rules() -> Node:
        return Node(make_policy=policy_maker(DEFAULT_POLICY, ssd_costs()), packed=True)

    segment_bytes = resident * SSD_BLOCK_BYTES
    device = SsdDevice("/disk", segment_bytes, {"bench": 1.0}, make_rules, time.monotonic)

    async def put() -> int:
        """Blocks that are on the disk now."""
        keys = rules.put_keys(namespace)
        return await device.write(table, [table.blocks[key] for key in keys], 0)

    for _ in range(128):  # memory itself is full, and takes no more of the process's
        rules.put_keys(namespace)
    gc.collect()
    before = _resident_bytes()
    await device.restore(cast(Disk, _TakesAll(segment_bytes)), adopt)
    puts = resident // PUT_BLOCKS
    began = time.thread_time()
    written = [await put() for _ in range(puts)]
    filled = _resident_bytes() - before
    written += [await put() for _ in range(2 * puts)]
    here = device.stats().blocks
    return {
        "write_us": 1e6 * (time.thread_time() - began) / len(written),
        "written": sum(written),
        "here": here,
        "filled_bytes_per_block": filled / here,
        "bytes_per_block": (_resident_bytes() - before) / here,
    }


def members(report: Report) -> None:
    """One member's whole process, on a real etcd; the records of the others are written by another process."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder, Etcd(Path(folder)) as etcd:
        found = uvloop.run(_follow(etcd.url, sizes_of(report).followed_s))
    report.row(f"{MEMBERS} nodes", **found)
    report.check("members_1000_core_share", found["core_share"], at_most=0.02)
    report.check("mass_expiry_stall_ms", found["mass_expiry_ms"], at_most=50)


def _member(number: int, used: int = 0) -> NodeRecord:
    return NodeRecord(
        f"n{number}",
        f"{number:016x}",
        NodeState.SERVING,
        (TransportRecord(f"tcp://10.0.{number // 250}.{number % 250}:7070"),),
        (TierRecord("dram", 1 << 38, used, used), TierRecord("ssd", 1 << 42, 1 << 41)),
        {"zone": "z", "rack": f"r{number // 32}"},
        "0.1.0",
        frame.PROTOCOL_VERSION,
        None,
        f"h{number}",
        0,
        (),
        frame.PROTOCOL_OLDEST,
    )


def _path(number: int) -> bytes:
    return f"/kvpool/bench/nodes/n{number}".encode()


async def _write_records(url: str) -> None:
    client = EtcdClient(EtcdSettings.from_url(url))
    rng, began, written = random.Random(5), time.monotonic(), 0
    while True:
        written += 1
        changed = _member(rng.randrange(1, MEMBERS), rng.randrange(1 << 38))
        number = int(changed.node[1:])
        await client.txn([], [put(_path(number), encode_record(changed))], [], "write")
        await asyncio.sleep(max(0.0, began + written / CHANGES_S - time.monotonic()))


def _writer(url: str) -> None:
    asyncio.run(_write_records(url))


async def _follow(url: str, seconds: float) -> dict[str, float]:
    client = EtcdClient(EtcdSettings.from_url(url))
    for first in range(1, MEMBERS, 100):
        numbers = range(first, min(MEMBERS, first + 100))
        await client.txn(
            [], [put(_path(n), encode_record(_member(n))) for n in numbers], [], "fill"
        )
    node = Node(make_policy=policy_maker("lru"), incarnation=new_incarnation())
    settings = EtcdSettings.from_url(url)
    membership = EtcdMembership(settings, "bench", protocol=frame.PROTOCOL_VERSION)
    rng = random.Random(1)
    config = DaemonConfig(socket="/s", node="own", join=url, cluster="bench")
    topology = HostTopology()
    member = ClusterMember(
        *(config, node, membership, None, Peers({}, rng)), *(time.monotonic, rng, topology)
    )
    await member.start(["tcp://own:1"], MemoryOnly(node))
    await asyncio.sleep(2)
    idle = await _core_share(seconds)
    writer = multiprocessing.get_context("spawn").Process(target=_writer, args=(url,), daemon=True)
    writer.start()
    await asyncio.sleep(2)
    busy = await _core_share(seconds)
    writer.terminate()
    writer.join()
    steps_seen: list[float] = [0.0]
    watch = asyncio.create_task(_longest_step(steps_seen))
    for first in range(1, ENDING, 100):  # at most 128 in one transaction
        await client.txn([], [delete(_path(n)) for n in range(first, first + 100)], [], "end")
    await until_async(lambda: len(member.view.nodes) <= MEMBERS - ENDING, "they have ended")
    await asyncio.sleep(1)
    watch.cancel()
    await member.close()
    await client.close()
    return {"core_share": busy, "core_share_idle": idle, "mass_expiry_ms": max(steps_seen)}


async def _longest_step(longest_ms: list[float]) -> None:
    """Between two turns of the event loop, CPU only."""
    while True:
        cpu = time.thread_time()
        await asyncio.sleep(0)
        longest_ms[0] = max(longest_ms[0], 1e3 * (time.thread_time() - cpu))


async def _core_share(seconds: float) -> float:
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.monotonic() - began)


class _Members:
    """Simulated members on a real etcd, each with its record and its lease; in this process."""

    def __init__(self, url: str, cluster: str, sizes: Sizes) -> None:
        self._sizes = sizes
        self._client = EtcdClient(EtcdSettings.from_url(url))
        self._root = f"/kvpool/{cluster}/nodes/"
        self._leases: dict[int, int] = {}
        self._shared = 0  # the lease of those who are to end at once
        self._rng = random.Random(9)
        self.lost = 0

    async def join(self) -> None:
        self._shared = await self._client.grant(self._sizes.ttl_s)
        ending, simulated = self._sizes.ending, self._sizes.simulated
        for first in range(0, ending, 100):
            puts = [self._record(n, self._shared) for n in range(first, first + 100)]
            await self._client.txn([], puts, [], "join")
        for first in range(ending, simulated, 50):
            await asyncio.gather(*map(self._join_one, range(first, min(simulated, first + 50))))

    async def come(self, count: int) -> tuple[int, list[bytes]]:
        """So many members more, with one lease; the lease, and their incarnations."""
        lease = await self._client.grant(60)
        incarnations = [secrets.token_bytes(8) for _ in range(count)]
        for at in range(0, count, 100):
            puts = [
                self._record(10 * MEMBERS + at + index, lease, incarnation)
                for index, incarnation in enumerate(incarnations[at : at + 100])
            ]
            await self._client.txn([], puts, [], "come")
        return lease, incarnations

    async def go(self, lease: int) -> None:
        await self._client.revoke(lease)

    def _record(self, number: int, lease: int, incarnation: bytes = b"") -> Any:
        name = (incarnation or secrets.token_bytes(8)).hex()
        member = msgspec.structs.replace(_member(number), incarnation=name)
        return put(f"{self._root}n{number}".encode(), encode_record(member), lease)

    async def _join_one(self, number: int) -> None:
        lease = self._leases[number] = await self._client.grant(self._sizes.ttl_s)
        await self._client.txn([], [self._record(number, lease)], [], "join")

    async def keep(self) -> None:
        """Renew all leases, each three times in its life. Runs until cancelled."""
        while True:
            began = time.monotonic()
            leases = [*self._leases.values(), *([self._shared] if self._shared else [])]
            for at in range(0, len(leases), 10):
                some = leases[at : at + 10]
                kept = await asyncio.gather(*map(self._client.keep_alive, some))
                self.lost += sum(
                    not ok and lease in self._leases.values()
                    for ok, lease in zip(kept, some, strict=True)
                )
                share = (at + 10) / max(len(leases), 1)
                await asyncio.sleep(
                    max(0.0, began + share * self._sizes.ttl_s / 3 - time.monotonic())
                )

    async def churn(self) -> None:
        """A tenth of them a minute leaves, and comes back as somebody else. Runs until cancelled."""
        while True:
            number = self._rng.randrange(self._sizes.ending, self._sizes.simulated)
            await self._client.revoke(self._leases.pop(number))
            await self._join_one(number)
            await asyncio.sleep(60 / (self._sizes.simulated * CHURN_A_MINUTE))

    def silence_many(self) -> None:
        """Those who are to end fall silent: one lease, so that etcd ends them all at once, within two of its lives."""
        self._shared = 0

    async def close(self) -> None:
        await self._client.close()


class _Traffic:
    """Blocks put on one of the daemons and looked for on the others, again and again. `members` and `swept`: another thread."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._nodes = {
            node.name: (client, client.open(NamespaceRecord({"model": "b"}, (PartSpec(4096),))))
            for node in cluster.nodes
            for client in (node.client(connect=True),)
        }
        self._watching = [node.client(connect=True) for node in cluster.nodes]
        self._bytes = np.ones((4, 4096), dtype=np.uint8)
        self.stopped = ""
        self.rounds = self.looked_for = self.missed = 0

    def round(self) -> None:
        self.rounds += 1
        well = [name for name in self._nodes if name != self.stopped]
        owner, ns = self._nodes[well[self.rounds % len(well)]]
        keys = [secrets.token_bytes(16) for _ in range(4)]
        owner.put(ns, keys, self._bytes)
        until(lambda: _announced(owner), "all is announced")
        for client, theirs in (self._nodes[name] for name in well):
            lease = client.acquire(theirs, keys, wait_s=WAIT_S)
            self.looked_for += 4
            self.missed += 4 - (0 if lease is None else lease.blocks)
            if lease is not None:
                lease.release()

    def members(self) -> int:
        """As seen by the daemon that sees the fewest."""
        return 1 + min(client.stats().cluster.others for client in self._watching)

    def swept(self) -> int:
        return sum(client.stats().cluster.swept for client in self._watching)

    def close(self) -> None:
        for client in (*self._watching, *(client for client, _ in self._nodes.values())):
            client.close()


def cluster(report: Report) -> None:
    """Real etcd, Redis and daemons; the others are records, leases and nothing else."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(Path(folder), nodes=3) as daemons,
    ):
        daemons.wait_acquainted()
        traffic = _Traffic(daemons)
        asyncio.run(_live(report, daemons, traffic))
        ended = [node.name for node in daemons.nodes if node.process and node.process.poll()]
        traffic.close()
    report.check("dead_incarnations_exits", len(ended), at_most=0)
    report.check("cluster_missed", traffic.missed, at_most=0)


async def _live(report: Report, daemons: LocalCluster, traffic: _Traffic) -> None:
    sizes = sizes_of(report)
    dead = sizes.left + sizes.unseen
    others = _Members(daemons.etcd.url, daemons.name, sizes)
    async with asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        await _phase(report, "join", daemons, traffic, others.join())
        await until_async(lambda: traffic.members() >= sizes.simulated + 3, "all are seen")
        running = [tasks.create_task(others.keep()), tasks.create_task(others.churn())]
        await _leave_dead(daemons, traffic, others, sizes)
        await _phase(report, "churn", daemons, traffic, asyncio.sleep(sizes.churn_s))
        left = sizes.simulated + 3 - sizes.ending  # one more or less is just leaving
        ending = _end_many(others, traffic, left)
        await _phase(report, f"{sizes.ending} end at once", daemons, traffic, ending)
        await _phase(report, "leader lost", daemons, traffic, _lose_leader(daemons, traffic))
        await until_async(lambda: traffic.swept() >= dead, "the dead are swept", seconds=180.0)
        report.row(f"{dead:,} dead", swept=traffic.swept(), after_s=time.monotonic() - began)
        for task in running:
            task.cancel()
    report.check("simulated_leases_lost", others.lost, at_most=0)
    await others.close()


async def _phase(
    report: Report, name: str, daemons: LocalCluster, traffic: _Traffic, work: Awaitable[None]
) -> None:
    """Blocks come and are found, for as long as the work takes."""
    looked_for, missed, began = traffic.looked_for, traffic.missed, time.monotonic()
    cpu = [_cpu_s(node.pid) for node in daemons.nodes]
    doing = asyncio.ensure_future(work)
    slowest = 0.0
    while True:
        turn = time.monotonic()
        await asyncio.to_thread(traffic.round)
        slowest = max(slowest, time.monotonic() - turn)
        if doing.done():
            break
        await asyncio.sleep(0.2)
    doing.result()
    seconds = time.monotonic() - began
    used = [_cpu_s(node.pid) - before for node, before in zip(daemons.nodes, cpu, strict=True)]
    report.row(
        name,
        seconds=seconds,
        looked_for=traffic.looked_for - looked_for,
        missed=traffic.missed - missed,
        members=traffic.members(),
        slowest_round_s=slowest,
        core_share_max=max(used) / seconds,
    )


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _leave_dead(
    daemons: LocalCluster, traffic: _Traffic, others: _Members, sizes: Sizes
) -> None:
    """Entries of members that have left again, and of incarnations that nobody has seen alive."""
    lease, dead = await others.come(sizes.left)
    until_seen = sizes.simulated + 3 + sizes.left
    await until_async(lambda: traffic.members() >= until_seen, "they are seen")
    await others.go(lease)
    dead += [secrets.token_bytes(8) for _ in range(sizes.unseen)]
    directory = RedisDirectory(parse_url(daemons.redis.url), cluster=daemons.name)
    for at in range(0, len(dead), 50):
        some = (
            directory.publish(
                b"d" * 16, 1, incarnation, TIERS["dram"], [secrets.token_bytes(16)], [1]
            )
            for incarnation in dead[at : at + 50]
        )
        await asyncio.gather(*some)
    await directory.close()


async def _end_many(others: _Members, traffic: _Traffic, left: int) -> None:
    others.silence_many()
    await until_async(lambda: traffic.members() <= left, "they have ended")


async def _lose_leader(daemons: LocalCluster, traffic: _Traffic) -> None:
    """Who sweeps stands still until its lease has ended and another one does it."""
    chore = f"/kvpool/{daemons.name}/chores/sweep"
    first = (daemons.etcd.get(chore) or b"").decode()
    leader = daemons.node(first)
    traffic.stopped, begun = first, traffic.rounds
    await until_async(lambda: traffic.rounds >= begun + 2, "nobody waits for it")
    leader.signal(signal.SIGSTOP)
    try:
        await until_async(
            lambda: (daemons.etcd.get(chore) or b"").decode() not in {"", first}, "another leads"
        )
        await asyncio.sleep(2)
    finally:
        leader.signal(signal.SIGCONT)
    client = leader.client(connect=True)
    await until_async(lambda: client.stats().cluster.standing == "member", "it is back")
    client.close()
    traffic.stopped = ""


def hung_peer(report: Report) -> None:
    """A prompt's blocks have the same bytes in all prompts, so that each can be compared."""
    rounds = sizes_of(report).sets
    record = NamespaceRecord({"model": "hung peer"}, (PartSpec(PART_BYTES),) * PARTS)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(Path(folder), memory="1GiB") as cluster,
        ThreadPoolExecutor(PROMPTS) as threads,
    ):
        cluster.wait_acquainted()
        owners = [cluster.node(name).client(connect=True) for name in "ab"]
        reader = cluster.node("c").client(connect=True, connections_max=PROMPTS)
        ns = reader.open(record)

        def fill() -> list[Prompt]:
            prompts = _put_prompts(owners, record)
            until(lambda: all(_announced(owner) for owner in owners), "all is announced")
            return prompts

        def read(sets: int) -> list[tuple[int, int, float]]:
            return _read_all(threads, reader, ns, [filled.pop() for _ in range(sets)])

        filled = [fill() for _ in range(2 * rounds + 1)]
        read(1)
        healthy = read(rounds)
        stopped = cluster.node("a")
        stopped.signal(signal.SIGSTOP)
        try:
            hung = read(rounds)
        finally:
            stopped.signal(signal.SIGCONT)
        _row(report, "all nodes well", healthy)
        missed = _row(report, "one of three stopped", hung)
        report.check("hung_peer_missed", missed, at_most=0)
        report.check("hung_peer_wrong", sum(wrong for _, wrong, _ in hung), at_most=0)
        report.check("hung_peer_max_s", max(taken for _, _, taken in hung), at_most=1.0)
        for client in (*owners, reader):
            client.close()


def hung_disk(report: Report) -> None:
    """All three nodes have the prompts: `a`, and `c`, which reads them, on disk only; `b` in memory."""
    rounds = sizes_of(report).sets
    record = NamespaceRecord({"model": "hung disk"}, (PartSpec(PART_BYTES),) * PARTS)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(
            Path(folder), memory="1GiB", ssd="1GiB", flags=["--ssd-write", "through"]
        ) as cluster,
        ThreadPoolExecutor(PROMPTS) as threads,
    ):
        cluster.wait_acquainted()
        clients = [
            cluster.node(name).client(connect=True, connections_max=PROMPTS) for name in "abc"
        ]
        on_disk, reader = (clients[0], clients[2]), clients[2]
        ns = reader.open(record)

        def fill() -> list[Prompt]:
            count = PROMPTS * BLOCKS * PARTS
            goals = [_written(client) + count for client in on_disk]
            prompts = _put_prompts(clients, record)
            until(
                lambda: all(_written(c) >= goal for c, goal in zip(on_disk, goals, strict=True)),
                "all is on disk",
            )
            return prompts

        def read(sets: int) -> list[tuple[int, int, float]]:
            return _read_all(threads, reader, ns, [filled.pop() for _ in range(sets)])

        filled = [fill() for _ in range(2 * rounds + 1)]
        for client in on_disk:
            client.evict(tier="dram")
        until(lambda: all(_announced(client) for client in clients), "all is announced")
        read(1)
        healthy = read(rounds)
        disks = [_disk_process(client) for client in on_disk]
        for pid in disks:
            os.kill(pid, signal.SIGSTOP)
        try:
            hung = read(rounds)
        finally:
            for name, pid in zip("ac", disks, strict=True):
                if pid in cluster.node(name).pids:  # otherwise its daemon has replaced it
                    os.kill(pid, signal.SIGCONT)
        _row(report, "all disks well", healthy)
        report.check("hung_disk_missed", _row(report, "two of three hang", hung), at_most=0)
        report.check("hung_disk_wrong", sum(wrong for _, wrong, _ in hung), at_most=0)
        for client in clients:
            client.close()


def _written(client: OperatorClient) -> int:
    (disk,) = client.stats().tiers.ssd
    return disk.written_blocks


def _put_prompts(owners: Sequence[OperatorClient], record: NamespaceRecord) -> list[Prompt]:
    """Prompts of new keys, put at each of these."""
    prompts = [[secrets.token_bytes(16) for _ in range(BLOCKS)] for _ in range(PROMPTS)]
    for owner in owners:
        mine = owner.open(record)
        for prompt in prompts:
            for part in range(PARTS):
                owner.put(mine, prompt, DATA[part], part=part)
    return prompts


def _read_all(
    threads: ThreadPoolExecutor, reader: OperatorClient, ns: Namespace, sets: list[list[Prompt]]
) -> list[tuple[int, int, float]]:
    """One set after the other, the prompts of each at once."""
    return [
        found
        for prompts in sets
        for found in threads.map(lambda prompt: _read(reader, ns, prompt), prompts)
    ]


def _disk_process(client: OperatorClient) -> int:
    (found,) = (one.pid for one in client.stats().processes if one.kind == "disk_worker")
    return found


def _row(report: Report, name: str, found: Sequence[tuple[int, int, float]]) -> int:
    """Reports reads; returns how many blocks were missed."""
    missed = sum(BLOCKS - blocks for blocks, _, _ in found)
    report.row(
        name,
        prompts=len(found),
        missed=missed,
        wrong=sum(wrong for _, wrong, _ in found),
        median_ms=1e3 * median([taken for _, _, taken in found]),
        max_ms=1e3 * max(taken for _, _, taken in found),
    )
    return missed


def _announced(client: OperatorClient) -> bool:
    directory = client.stats().cluster.directory
    return directory is not None and directory.queued == 0


def _read(client: OperatorClient, ns: Namespace, prompt: Prompt) -> tuple[int, int, float]:
    """The blocks that were there, the parts with wrong bytes, and the seconds until they were."""
    began = time.perf_counter()
    lease = client.acquire(ns, prompt, wait_s=WAIT_S)
    taken = time.perf_counter() - began
    if lease is None:
        return 0, 0, taken
    with lease:
        wrong = sum(
            bytes(slots.view(at)) != DATA[part, at].tobytes()
            for part, slots in lease.slots.items()
            for at in range(len(slots))
        )
        return lease.blocks, wrong, taken


PARTS_OF_BENCH: dict[str, Callable[[Report], None]] = {
    "steps": steps,
    "ssd": ssd,
    "members": members,
    "cluster": cluster,
    "hung_peer": hung_peer,
    "hung_disk": hung_disk,
}


def main() -> int:
    report, arguments = parse_arguments(__doc__.splitlines()[0])
    for name, part in PARTS_OF_BENCH.items():
        if arguments.only in name:
            began = time.monotonic()
            part(report)
            report.row(f"all of {name}", seconds=time.monotonic() - began)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
