"""`bench/node.py transfer`: brings blocks to another node, pulls them back, and sees how fast they come and by which way.

Its only means are those of any client and operator: blocks are put here, a job on the other node warms them, they are
removed here, and pulled.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from node_local import wait_available
from node_report import (
    NIXL,
    ROUNDS,
    SINGLES,
    Cpu,
    Latency,
    Machine,
    Measured,
    Report,
    Size,
    Ways,
    by_transport,
    choose,
    find_node,
    of_peer,
    quantile,
    remarks,
    since,
    why_lacking,
)
from rich.progress import BarColumn, TextColumn

from kvpool.cli.jobs import Job, follow
from kvpool.cli.render.bars import make_bar
from kvpool.cli.render.text import size_text
from kvpool.errors import ClusterUnavailable, InvalidRequest
from kvpool.memory.buffers import row_checksums
from kvpool.telemetry.cluster_stats import NixlStats, PeerWays
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import KEY_BYTES, NamespaceRecord, Presence, split_keys
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import job_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from kvpool.client import OperatorClient

NAME = "bench/node.py transfer"
BLOCK_TOKENS = 16
TTL_S = 600.0  # then a node drops blocks of a measurement that could not remove them
TOGETHER_BYTES = 8 << 20  # in one put
PULL_S = 60.0
SINGLES_S = 5.0  # for all pulls of one block
SEEN_S = 10.0  # until others, or the directory, know
OTHERS_S = 5.0  # for all nodes to remove blocks
SETTLE_S = 3.0  # after an interruption, for what is under way
LOOK_S = 0.05
MACHINE_ROWS, MACHINE_BYTES = 32, 1 << 20

Clock = Callable[[], float]
Sleep = Callable[[float], None]


def measure(
    client: OperatorClient,
    node: str,
    wanted: Sequence[int],
    total_bytes: int,
    *,
    seed: int,
    console: Console | None = None,
) -> Report:
    """Pull blocks of these sizes from a node, with a bar where there is a terminal. Nothing of it stays.

    total_bytes: of all blocks of one size; less is taken where there is less memory. seed: of keys and bytes.
    Raises `InvalidRequest` where it cannot be measured, and what the daemons say.
    """
    bench = TransferBench(client, node, seed=seed)
    sizes, notes = choose(wanted, total_bytes, bench.memory())
    columns = (TextColumn("measuring blocks of {task.description}"), BarColumn())
    with make_bar(*columns, console=console) as bar:
        task = bar.add_task("", total=len(sizes))
        found = []
        for size in sizes:
            bar.update(task, description=size_text(size.block_bytes))
            found.append(bench.run(size))
            bar.advance(task)
    ways = bench.ways()
    pulled = bench.pulled_bytes
    return Report(
        bench.here,
        node,
        found,
        _machine(time.perf_counter),
        ways,
        pulled,
        [*notes, *bench.notes],
        remarks(node, ways, pulled),
    )


class TransferBench:
    """Pulls from one node into the one that the client is connected to. Not thread-safe.

    pulled_bytes, notes: so far.
    """

    def __init__(
        self,
        client: OperatorClient,
        node: str,
        *,
        seed: int,
        clock: Clock = time.perf_counter,
        sleep: Sleep = time.sleep,
    ) -> None:
        """Raises `InvalidRequest` if that node cannot be pulled from."""
        cluster = client.cluster()
        record = find_node(cluster, node)
        own: Mapping[str, Any] = next(
            (one for one in cluster["nodes"] if one["node"] == cluster["node"]), {}
        )
        self.here: str = cluster["node"]
        self.pulled_bytes = 0
        self.notes: list[str] = []
        self._client = client
        self._node = node
        self._clock = clock
        self._sleep = sleep
        self._random = np.random.default_rng(seed)
        self._urls = _urls(record)
        self._nixl = _has_nixl(_urls(own)), _has_nixl(self._urls)
        self._began = client.inspect()

    def memory(self) -> dict[str, int]:
        """The tenant's memory at both nodes, in bytes."""
        tenant, found = self._client.tenant, {}
        for stats in (self._began, self._client.inspect(self._node)):
            if tenant not in stats.tenants:
                raise InvalidRequest(
                    f"node {stats.node} has no tenant {tenant}: name one with --tenant that both nodes have"
                )
            found[stats.node] = stats.tenants[tenant].segment_bytes
        return found

    def ways(self) -> Ways:
        """By which ways blocks have come since the beginning, and why."""
        after = self._client.inspect()
        settings = {
            each.name: each.value
            for each in self._client.ask_node(operator_wire.Settings(), node="")
        }
        before, now = (of_peer(stats.paths, self._urls) for stats in (self._began, after))
        gains = [
            seen["gain"] for group, seen in now.others.items() if group.partition(" ")[0] == NIXL
        ]
        nixl = after.nixl
        then = self._began.nixl or NixlStats()
        return Ways(
            pull_over=settings["pull_over"],
            transfer_workers=settings["transfer_workers"],
            nixl_here=self._nixl[0],
            nixl_there=self._nixl[1],
            usual=now.usual,
            nixl_gain=gains[0] if gains else None,
            ways=since(before, now),
            failed_over=0 if nixl is None else nixl.failed_over - then.failed_over,
            rested=0 if nixl is None else nixl.rested - then.rested,
            error="" if nixl is None else nixl.last_error,
        )

    def run(self, size: Size) -> Measured:
        """Measure blocks of one size. They are gone from all nodes when this ends, whatever ends it."""
        with self._blocks(size) as blocks:
            before = self._client.inspect()
            rounds, cpu = self._rounds(blocks)
            singles = self._singles(blocks)
            after = self._client.inspect()
        return Measured(
            size.block_bytes,
            size.blocks,
            rounds,
            size.blocks * size.block_bytes / min(rounds),
            Latency(len(singles), quantile(singles, 0.5), quantile(singles, 0.99)),
            cpu,
            by_transport(since(self._peer(before), self._peer(after))),
            after.counters.checksum_mismatches - before.counters.checksum_mismatches,
        )

    def _peer(self, stats: NodeStats) -> PeerWays:
        return of_peer(stats.paths, self._urls)

    @contextmanager
    def _blocks(self, size: Size) -> Iterator[_Blocks]:
        """Blocks that only the other node has, until the `with` ends."""
        blocks = _Blocks(
            self._client, (self.here, self._node), size, self._random, self._clock, self._sleep
        )
        settled = False
        try:
            blocks.place()
            yield blocks
            settled = True
        finally:
            if left := blocks.forget(settled=settled):
                self.notes.append(left)

    def _rounds(self, blocks: _Blocks) -> tuple[list[float], Cpu]:
        """Seconds of each request for all blocks, and the CPU seconds of all these requests."""
        seconds, here_s, there_s, nbytes = [], 0.0, 0.0, 0
        for _ in range(ROUNDS):
            before = self._cpu()
            seconds.append(self._pull(blocks, blocks.keys))
            after = self._cpu()
            here_s += after[0] - before[0]
            there_s += after[1] - before[1]
            nbytes += len(blocks.keys) * blocks.block_bytes
            blocks.compare()
            blocks.remove_here(blocks.keys)
        return seconds, Cpu(nbytes, here_s, there_s)

    def _singles(self, blocks: _Blocks) -> list[float]:
        """Seconds of each request for one block."""
        seconds: list[float] = []
        limit = self._clock() + SINGLES_S
        while len(seconds) < SINGLES and (not seconds or self._clock() < limit):
            key = blocks.keys[len(seconds) % len(blocks.keys)]
            seconds.append(self._pull(blocks, [key]))
            blocks.remove_here([key])
        return seconds

    def _pull(self, blocks: _Blocks, keys: Sequence[bytes]) -> float:
        began = self._clock()
        there = self._client.pull(blocks.ns, keys, wait_s=PULL_S)
        seconds = self._clock() - began
        if there != len(keys):
            after = self._client.inspect()
            raise InvalidRequest(
                why_lacking(self._node, len(keys) - there, len(keys), self._began, after)
            )
        self.pulled_bytes += len(keys) * blocks.block_bytes
        return seconds

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of all processes of the daemon here, and of the other one."""
        here, there = (
            sum(process.cpu_s for process in self._client.inspect(node).processes)
            for node in ("", self._node)
        )
        return here, there


class _Blocks:
    """Blocks of one size in a namespace of their own."""

    def __init__(
        self,
        client: OperatorClient,
        nodes: tuple[str, str],
        size: Size,
        random: np.random.Generator,
        clock: Clock,
        sleep: Sleep,
    ) -> None:
        """nodes: this one, and the other."""
        self.block_bytes = size.block_bytes
        self.keys = split_keys(random.bytes(KEY_BYTES * size.blocks))
        self._client = client
        self._nodes = nodes
        self._clock = clock
        self._sleep = sleep
        together = max(1, min(size.blocks, TOGETHER_BYTES // size.block_bytes))
        self._rows = random.integers(0, 256, (together, size.block_bytes), dtype=np.uint8)
        self._job = Job(client, job_name("warm", secrets.randbits(32)))
        record = NamespaceRecord.simple(
            f"{NAME} {size.block_bytes}", block_bytes=size.block_bytes, block_tokens=BLOCK_TOKENS
        )
        self.ns = client.open(record, write="none", write_remote="none", ttl_s=TTL_S)

    def _batches(self) -> list[Sequence[bytes]]:
        step = len(self._rows)
        return [self.keys[at : at + step] for at in range(0, len(self.keys), step)]

    def place(self) -> None:
        """Put them here, have the other node take them, and remove them here.

        Raises `InvalidRequest` if it does not take all, `ClusterUnavailable` if that is not known in time.
        """
        _, there = self._nodes
        parent = None
        for keys in self._batches():
            self._client.put(self.ns, keys, self._rows[: len(keys)], parent=parent)
            parent = keys[-1]
        stored_at = self._clock()
        self._until(self._known_there, f"node {there} has not heard of the namespace")
        spec = {
            "kind": "warm",
            "namespace": self.ns.digest.hex(),
            "keys": [key.hex() for key in self.keys],
        }
        self._until(
            lambda: self._here_or_there(Presence.MEMORY), "the blocks are not in memory here"
        )
        self._until(
            lambda: self._announced(self._clock() - stored_at),
            "the directory was not told of the blocks",
        )
        self._job.begin([there], spec)
        follow(self._job, lambda _: None, sleep=self._sleep)
        if not self._job.good:
            view = self._job.views.get(there)
            error = view.error if view else ""
            raise InvalidRequest(
                f"node {there} did not take the blocks: {error or self._job.failures.get(there, '')}"
            )
        if (came := self._job.sum("blocks")) != len(self.keys):
            raise InvalidRequest(
                f"node {there} took {came:,} of {len(self.keys):,} blocks of {size_text(self.block_bytes)}: it has no "
                "room for them, or they were evicted here meanwhile. Use a smaller --size, or measure when it is quiet"
            )
        self.remove_here(self.keys)
        self._until(
            lambda: self._here_or_there(Presence.ELSEWHERE),
            f"the directory does not say that node {there} has the blocks",
        )

    def _known_there(self) -> bool:
        known = self._client.ask_node(operator_wire.Cluster(), node=self._nodes[1])
        return self.ns.digest.hex() in {entry["digest"] for entry in known["namespaces"]}

    def _announced(self, age_s: float) -> bool:
        """Whether the directory was told of what is so old. On a busy node there is always something newer to tell."""
        directory = self._client.inspect().cluster.directory
        return directory is None or not directory.queued or directory.lag_s < age_s

    def _here_or_there(self, where: Presence) -> bool:
        return bool((self._client.present(self.ns, self.keys, wait_s=1.0) == where).all())

    def _until(self, true: Callable[[], bool], otherwise: str) -> None:
        limit = self._clock() + SEEN_S
        while not true():
            if self._clock() > limit:
                raise ClusterUnavailable(
                    f"{otherwise} after {SEEN_S:g} s: `kvpool nodes` tells how the cluster is"
                )
            self._sleep(LOOK_S)

    def compare(self) -> None:
        """Compare what came with what was put. Raises `InvalidRequest`."""
        out = np.empty_like(self._rows)
        for keys in self._batches():
            there = self._client.get_into(self.ns, keys, out[: len(keys)])
            if not there.all():
                raise InvalidRequest(
                    "pulled blocks were evicted at once: the pool here is under pressure; use a smaller --size, or "
                    "measure when it is quiet"
                )
            if not np.array_equal(out[: len(keys)], self._rows[: len(keys)]):
                raise InvalidRequest(
                    "pulled blocks hold other bytes than were put, and their checksums did not tell: report this as a "
                    "bug of kvpool"
                )

    def remove_here(self, keys: Sequence[bytes]) -> None:
        """Remove them from this node alone."""
        self._client.remove(self.ns, keys)

    def forget(self, *, settled: bool) -> str:
        """Remove them from all nodes; in words, where they could not be removed. settled: nothing of them is under way.

        Else what is under way would come after that, so its end is waited for, though not for long where others pull, too.
        """
        if not settled:
            wait_available(self._client, self._sleep)
            self._settle()
        try:
            self._client.remove(self.ns, self.keys, others_s=OTHERS_S)
        except ClusterUnavailable as error:
            return f"blocks of {size_text(self.block_bytes)} that are left are dropped after {TTL_S:g} s: {error}"
        self._client.namespaces.close(self.ns)
        return ""

    def _settle(self) -> None:
        self._job.stop()
        limit = self._clock() + SETTLE_S
        while any(self._client.inspect(node).fetch.transfers for node in self._nodes):
            if self._clock() > limit:
                return
            self._sleep(LOOK_S)


def _urls(record: Mapping[str, Any]) -> list[str]:
    return [transport["url"] for transport in record.get("transports", ())]


def _has_nixl(urls: Sequence[str]) -> bool:
    return any(url.startswith("nixl://") for url in urls)


def _machine(clock: Clock) -> Machine:
    """What a core of this machine copies and hashes."""
    rows = np.ones((MACHINE_ROWS, MACHINE_BYTES), dtype=np.uint8)
    out = np.ones_like(rows)
    nbytes = rows.nbytes

    def best(work: Callable[[], object]) -> float:
        found = 0.0
        for _ in range(ROUNDS):
            began = clock()
            work()
            found = max(found, nbytes / max(clock() - began, 1e-9))
        return found

    return Machine(
        best(lambda: np.copyto(out, rows)),
        best(lambda: row_checksums(rows, range(MACHINE_ROWS), MACHINE_BYTES)),
    )
