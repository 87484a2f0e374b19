"""Many nodes on one machine: what losing one costs the others, and what the directory costs everybody.

    .venv/bin/python bench/cluster.py [--quick] [--json FILE] [--only PART]

Real etcd, real Redis, real daemons, real signals. Numbers of DESIGN section 8, and those that go with them:

owner   a node that holds what others read is killed or stopped, by turns, while reads go on
redis   prefix lookups; and Redis killed and emptied: how soon hits are back
expiry  a node with a million blocks dies: the longest that anything else is held up
etcd    three members, the leader killed: how long joins and drains take
many    sixty-four members: how soon all of them see a change
pull    the whole remote path, beside one plain stream of as many bytes
follow  a prompt that is followed while it is put in chunks, beside a pull when all of it is there
waiting a pull that somebody waits for, while the same two nodes make copies as fast as they can
idle    a working set larger than one node: what of it is found, with and without the others' memory
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from harness import Report, median, parse_arguments, percentile, seconds
from store import plain_stream

from kvpool.client import OperatorClient
from kvpool.hit_rule import usable
from kvpool.placement.directory.redis import open_directory
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.membership.etcd import EtcdMembership
from kvpool.placement.records import NodeRecord, NodeState, TransportRecord, new_incarnation
from kvpool.placement.redis.settings import parse_url
from kvpool.types import Namespace, NamespaceRecord, PartSpec
from tests.support.local_cluster import LocalCluster, LocalNode
from tests.support.servers.etcd import Etcd

SMALL = 64
READ_BYTES = 64 << 10
WAIT_S = 30.0


def keys_of(space: int, numbers: range | list[int]) -> list[bytes]:
    """Distinct keys whose bytes look like hashes'."""
    return [
        random.Random(space << 40 | number).getrandbits(128).to_bytes(16, "big")
        for number in numbers
    ]


def many_keys(space: int, n: int) -> bytes:
    """The same, packed and quickly."""
    return np.random.default_rng(space).bytes(16 * n)


def block(number: int) -> bytes:
    """What the block with this number holds: nothing of ours has a part in making or checking it."""
    return np.random.default_rng(number).bytes(READ_BYTES)


def open_as(client: OperatorClient, name: str, nbytes: int) -> Namespace:
    return client.open(NamespaceRecord.simple(name, block_bytes=nbytes, block_tokens=16))


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> float:
    """Seconds until it held."""
    begun = time.perf_counter()
    while not condition():
        if time.perf_counter() - begun > timeout_s:
            raise SystemExit(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)
    return time.perf_counter() - begun


def settled(client: OperatorClient) -> bool:
    directory = client.stats().cluster.directory
    return directory is not None and directory.settled and not directory.queued


@contextmanager
def cluster(**settings: Any) -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        LocalCluster(Path(folder), **settings) as running,
    ):
        yield running


# ---- owner: killed or stopped ------------------------------------------------------------------------


class Reads:
    """Threads that read blocks through one node, each block once, and check every byte."""

    def __init__(self, node: LocalNode, count: int, rounds: int, threads: int = 4) -> None:
        self.client = node.client(timeout_s=WAIT_S)
        self.ns = open_as(self.client, "owner", READ_BYTES)
        self.keys = keys_of(1, range(count))
        self.expected = [block(number) for number in range(count)]
        self.threads = threads
        self.rounds = rounds
        self.wrong = self.missed = 0
        self.times: list[float] = []
        self._lock = threading.Lock()

    def run(self, halfway: Callable[[], None]) -> list[float]:
        """Read all; `halfway` is called when half has been read. The seconds of each read."""
        order = list(range(len(self.keys)))
        random.Random(len(self.times)).shuffle(order)
        half = len(order) // 2
        times: list[float] = []
        at = iter(order)
        done = threading.Semaphore(0)

        def work() -> None:
            while True:
                with self._lock:
                    number = next(at, None)
                if number is None:
                    return
                taken = self._read(number)
                with self._lock:
                    times.append(taken)
                done.release()

        workers = [threading.Thread(target=work) for _ in range(self.threads)]
        for worker in workers:
            worker.start()
        for _ in range(half):
            done.acquire()
        halfway()
        for worker in workers:
            worker.join()
        self.client.remove(self.ns, self.keys)
        self.times += times
        return times

    def _read(self, number: int) -> float:
        begun = time.perf_counter()
        lease = self.client.acquire(self.ns, [self.keys[number]], wait_s=10.0)
        if lease is None:
            taken = time.perf_counter() - begun
            with self._lock:
                self.missed += 1
            return taken
        with lease:
            data = bytes(lease.slots[0].view(0))
            late = not lease.valid
            taken = time.perf_counter() - begun
        if data != self.expected[number] and not late:
            with self._lock:
                self.wrong += 1
        return taken


def owner(report: Report) -> None:
    """Blocks on a and b; c reads them, while a dies or stands still."""
    rounds, count = (4, 200) if report.quick else (20, 1000)
    print(f"owner killed or stopped, {rounds} rounds of {count} reads")
    with cluster(nodes=3, memory="256MiB") as running:
        a, b, c = running.nodes
        reads = Reads(c, count, rounds)
        worst: list[float] = []
        for number in range(rounds):
            replicate(a, b, reads)
            kill = number % 2 == 0
            before = asked(reads.client)
            struck: list[LocalNode] = []

            def strike(kill: bool = kill, before: Any = before, struck: Any = struck) -> None:
                """Whichever of the two the reads come from."""
                now = asked(reads.client)
                names = {x["incarnation"]: x["node"] for x in reads.client.cluster()["nodes"]}
                busiest = max(names, key=lambda inc: now.get(inc, 0) - before.get(inc, 0))
                struck.append(running.node(names[busiest]))
                struck[0].signal(signal.SIGKILL if kill else signal.SIGSTOP, workers=not kill)

            times = reads.run(strike)
            worst.append(max(times))
            victim = struck[0]
            report.row(
                f"{'SIGKILL' if kill else 'SIGSTOP'} {victim.name} {number}",
                max_s=max(times),
                p99_s=percentile(times, 0.99),
                p50_ms=1e3 * median(times),
            )
            if kill:
                victim.kill()
                victim.start()
            else:
                victim.signal(signal.SIGCONT)
            wait_until(lambda: len(reads.client.cluster()["nodes"]) == 3, "it is back")
        report.row("reads", count=len(reads.times), missed=reads.missed, wrong=reads.wrong)
        report.check("killed_owner_wrong", reads.wrong, at_most=0)
        report.check("killed_owner_missed", reads.missed, at_most=0)
        report.check("killed_owner_max_s", max(worst), at_most=1)
        reads.client.close()


def asked(client: OperatorClient) -> dict[str, int]:
    """How many requests each peer has been sent, by incarnation."""
    return {peer.incarnation: peer.asked for peer in client.stats().fetch.peers}


def replicate(a: LocalNode, b: LocalNode, reads: Reads) -> None:
    """See to it that a and b both hold all blocks, and that the directory knows."""
    with a.client(timeout_s=WAIT_S) as at_a, b.client(timeout_s=WAIT_S) as at_b:
        for client in (at_a, at_b):
            ns = open_as(client, "owner", READ_BYTES)
            here = client.contains(ns, reads.keys)
            missing = [number for number, there in enumerate(here) if not there]
            if missing:
                client.put(
                    ns,
                    [reads.keys[number] for number in missing],
                    [reads.expected[number] for number in missing],
                )
        wait_until(lambda: settled(at_a) and settled(at_b), "all is announced")
        own = {at_a.cluster()["incarnation"], at_b.cluster()["incarnation"]}

        def known() -> bool:
            found = at_b.locate(reads.keys)
            return len(found) == len(reads.keys) and all(
                own <= {replica.incarnation for replica in line.replicas} for line in found
            )

        wait_until(known, "the directory knows both replicas")


# ---- redis -------------------------------------------------------------------------------------------


def fill(client: OperatorClient, name: str, n: int, space: int) -> bytes:
    """Put n small blocks; their keys."""
    ns = open_as(client, name, SMALL)
    keys = many_keys(space, n)
    step = 1 << 15
    data = np.zeros((step, SMALL), dtype=np.uint8)
    for at in range(0, n, step):
        chunk = keys[16 * at : 16 * (at + step)]
        client.put(ns, chunk, data[: len(chunk) // 16])
    return keys


def redis(report: Report) -> None:
    """A million blocks in the directory: lookups; then all is lost and comes back."""
    n = 200_000 if report.quick else 1_000_000
    print(f"redis with {n} blocks")
    with cluster(nodes=2, memory="512MiB") as running, ExitStack() as stack:
        at_a, at_b = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        keys = fill(at_a, "redis", n, 2)
        taken = wait_until(lambda: settled(at_a), "all is announced", 300)
        report.row("announced", blocks=n, seconds=taken)
        lookups(report, at_a, running.directory_url, keys)
        ns = open_as(at_b, "redis", SMALL)
        chooser = random.Random(3)

        def hit_rate(samples: int = 100) -> float:
            chosen = [chooser.randrange(n) for _ in range(samples)]
            found = 0
            for number in chosen:
                key = keys[16 * number : 16 * number + 16]
                found += at_b.pull(ns, key, wait_s=2.0)
                at_b.remove(ns, key)
            return found / samples

        before = hit_rate(200)
        running.redis.kill()
        away = hit_rate(20)
        begun = time.perf_counter()
        running.redis.start()
        started = time.perf_counter()
        slowest = 0.0
        while (rate := hit_rate(50)) < 0.95 * before:
            slowest = max(slowest, rate)
            if time.perf_counter() - started > 120:
                break
        back = time.perf_counter() - started
        report.row(
            "emptied", before=before, away=away, back_s=back, restart_s=started - begun, after=rate
        )
        report.check("redis_refill_s", back, at_most=10)


def lookups(report: Report, at_a: OperatorClient, url: str, keys: bytes) -> None:
    """What a daemon does for a prompt of 256 blocks: locate, and the longest prefix."""

    async def measure() -> list[float]:
        directory = await open_directory(parse_url(url), cluster="kvpool", timeout_s=5.0)
        digest = bytes.fromhex(at_a.cluster()["namespaces"][0]["digest"])
        from kvpool.daemon.core.blocks import directory_digest

        where = directory_digest("default", digest)
        spec = PartSpec(SMALL)
        times = []
        chooser = random.Random(4)
        for number in range(300 if report.quick else 2000):
            at = 16 * chooser.randrange(len(keys) // 16 - 256)
            prompt = [keys[at + 16 * i : at + 16 * i + 16] for i in range(256)]
            begun = time.perf_counter()
            entries = await directory.locate(where, 1, prompt)
            held = {key for key, found in zip(prompt, entries, strict=True) if found}
            n = usable([spec], [held], prompt)
            taken = time.perf_counter() - begun
            assert n == 256, n
            if number >= 20:
                times.append(taken)
        await directory.close()
        return times

    times = uvloop.run(measure())
    report.row("lookup of 256", p50_ms=1e3 * median(times), p99_ms=1e3 * percentile(times, 0.99))
    report.check("redis_lookup_256_p50_ms", 1e3 * median(times), at_most=2)


# ---- expiry ------------------------------------------------------------------------------------------


def expiry(report: Report) -> None:
    """a has a million blocks and dies; b and c go on, and are watched."""
    n = 200_000 if report.quick else 1_000_000
    print(f"a node with {n} blocks expires")
    with cluster(nodes=3, memory="512MiB") as running, ExitStack() as stack:
        at_a, at_b, at_c = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        fill(at_a, "expiry", n, 5)
        wait_until(lambda: settled(at_a), "all is announced", 300)
        probes = [Probe(at_b, 6), Probe(at_c, 7)]
        for probe in probes:
            probe.thread.start()
        time.sleep(1.0 if report.quick else 5.0)
        calm = [probe.take() for probe in probes]
        running.nodes[0].kill()
        wait_until(lambda: len(at_b.cluster()["nodes"]) == 2, "a has expired")
        time.sleep(1.0 if report.quick else 5.0)
        during = [probe.take() for probe in probes]
        for probe in probes:
            probe.stop()
        for name, found in (("before", calm), ("during", during)):
            times = [seconds for each in found for seconds in each]
            report.row(
                name,
                operations=len(times),
                p50_ms=1e3 * median(times),
                p99_ms=1e3 * percentile(times, 0.99),
                max_ms=1e3 * max(times),
            )
        report.check("expiry_stall_ms", 1e3 * max(max(times) for times in during), at_most=50)


class Probe:
    """Puts, lookups, reads and remote misses on one node, one after the other, timed."""

    def __init__(self, client: OperatorClient, space: int) -> None:
        self._client = client
        self._ns = open_as(client, "probe", 4096)
        self._space = space
        self._times: list[float] = []
        self._stop = False
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        client, ns = self._client, self._ns
        data = np.zeros((16, 4096), dtype=np.uint8)
        number = 0
        while not self._stop:
            keys = many_keys(self._space << 32 | number, 16)
            number += 1
            absent = many_keys(self._space << 33 | number, 64)
            for work in (
                lambda keys=keys: client.put(ns, keys, data),
                lambda keys=keys: client.match(ns, keys),
                lambda keys=keys: client.get_into(ns, keys, data),
                lambda absent=absent: client.pull(ns, absent, wait_s=2.0),
            ):
                self._times.append(seconds(work))
            time.sleep(0.002)

    def take(self) -> list[float]:
        times, self._times = self._times, []
        return times

    def stop(self) -> None:
        self._stop = True
        self.thread.join()


# ---- etcd --------------------------------------------------------------------------------------------


def etcd(report: Report) -> None:
    """The leader of three is killed: a join and a drain that begin then, and reads all the while."""
    rounds = 1 if report.quick else 3
    print("etcd's leader killed")
    times: list[float] = []
    with cluster(nodes=2, memory="64MiB", etcd_members=3) as running, ExitStack() as stack:
        at_a, at_b = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        probe = Probe(at_b, 9)
        probe.thread.start()
        for number in range(rounds):
            name = f"joiner-{number}"
            leader = running.etcd.leader()
            running.etcd.members[leader].kill()
            begun = time.perf_counter()
            node = running.add(name)
            stack.callback(node.stop)
            joined = time.perf_counter() - begun
            begun = time.perf_counter()
            at_a.drain(name)
            wait_until(
                partial(_left, at_a, name),
                "the node has left",
            )
            drained = time.perf_counter() - begun
            times += [joined, drained]
            report.row(f"round {number}", join_s=joined, drain_s=drained)
            node.stop()
            running.etcd.restart(leader)
        found = probe.take()
        probe.stop()
        report.row("others", operations=len(found), max_ms=1e3 * max(found))
    report.check("etcd_leader_killed_s", max(times), at_most=3)
    report.check("etcd_leader_killed_stall_ms", 1e3 * max(found), at_most=1000)


# ---- many --------------------------------------------------------------------------------------------


def many(report: Report) -> None:
    """Sixty-four members in one process, on a real etcd."""
    count, rounds = 64, 3 if report.quick else 10
    print(f"{count} members")

    def record(number: int, incarnation: str, state: NodeState) -> NodeRecord:
        url = TransportRecord(f"tcp://127.0.0.1:{20_000 + number}")
        return NodeRecord(f"node-{number}", incarnation, state, (url,))

    async def measure(url: str) -> list[float]:
        settings = EtcdSettings.from_url(url)
        members = [EtcdMembership(settings, "many") for _ in range(count)]
        names = [new_incarnation() for _ in range(count)]
        times = []
        try:
            await asyncio.gather(*(member.start() for member in members))
            await asyncio.gather(
                *(
                    member.join(record(number, names[number], NodeState.SERVING))
                    for number, member in enumerate(members)
                )
            )
            for turn in range(rounds):
                state = (NodeState.DRAINING, NodeState.SERVING)[turn % 2]
                seen = asyncio.Event()
                name = f"node-{turn}"

                def look(state: NodeState = state, name: str = name, seen: Any = seen) -> None:
                    if all(
                        (found := member.view.nodes.get(name)) is not None and found.state == state
                        for member in members
                    ):
                        seen.set()

                for member in members:
                    member.watch(look)
                if turn % 2:
                    await members[turn].update(record(turn, names[turn], NodeState.DRAINING))
                    await asyncio.sleep(0.5)
                begun = time.perf_counter()
                await members[turn].update(record(turn, names[turn], state))
                look()
                await asyncio.wait_for(seen.wait(), 30)
                times.append(time.perf_counter() - begun)
        finally:
            await asyncio.gather(*(member.leave() for member in members))
            await asyncio.gather(*(member.close() for member in members))
        return times

    with (
        tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder,
        Etcd(Path(folder)) as server,
    ):
        times = uvloop.run(measure(server.url))
    report.row("seen by all", median_s=median(times), max_s=max(times))
    report.check("membership_64_seen_s", max(times), at_most=2)


# ---- pull --------------------------------------------------------------------------------------------


def pull(report: Report) -> None:
    """Acquire of 1 MiB x 32 that another node has: directory, choice, transfer, lease, release."""
    nbytes, n = 1 << 20, 32
    rounds = 11 if report.quick else 31
    print("the whole remote path")
    with cluster(nodes=2, memory="512MiB") as running, ExitStack() as stack:
        at_a, at_b = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        there, here = open_as(at_a, "pull", nbytes), open_as(at_b, "pull", nbytes)
        source = np.random.default_rng(8).integers(0, 255, (n, nbytes), dtype=np.uint8)
        keys = keys_of(8, range(n))
        assert at_a.put(there, keys, source) == n
        wait_until(lambda: settled(at_a), "all is announced")
        times: dict[str, list[float]] = {"pull": [], "stream": []}
        with plain_stream(nbytes * n) as receive:
            for number in range(rounds + 3):
                for which in ("pull", "stream") if number % 2 else ("stream", "pull"):
                    if which == "stream":
                        taken = seconds(receive)
                    else:
                        at_b.remove(here, keys)
                        begun = time.perf_counter()
                        lease = at_b.acquire(here, keys, wait_s=WAIT_S)
                        taken = time.perf_counter() - begun
                        assert lease is not None
                        assert lease.blocks == n, f"{lease.blocks} of {n} blocks arrived"
                        lease.release()
                    if number >= 3:
                        times[which].append(taken)
        out = np.empty_like(source)
        assert at_b.get_into(here, keys, out).all(), "a block is gone"
        assert (out == source).all(), "wrong bytes"
        ratio = median(times["stream"]) / median(times["pull"])
        report.row(
            "1 MiB x 32",
            pull_gb_s=nbytes * n / 1e9 / median(times["pull"]),
            stream_gb_s=nbytes * n / 1e9 / median(times["stream"]),
            ratio=ratio,
        )
        report.check("remote_pull_vs_stream", ratio, at_least=0.8)


# ---- waiting, while copies are made -----------------------------------------------------------------------

COPY_LOOP = """
import itertools, sys, threading
import numpy as np
from cluster import open_as
from kvpool.client import OperatorClient
client = OperatorClient(sys.argv[1], connect=True)
ns = open_as(client, "copied", 1 << 20)
data = np.ones((8, 1 << 20), np.uint8)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
numbers = itertools.count()
print("running", flush=True)
while not stop.is_set():
    if client.stats().replication.wanted < 32:
        client.put(ns, [next(numbers).to_bytes(16, "big") for _ in range(8)], data, replicas=2)
    stop.wait(0.005)
"""


# ---- follow ------------------------------------------------------------------------------------------


def follow(report: Report) -> None:
    """512 MiB in 16 chunks, put on a as an engine's prefill does: how soon after the last one b has all."""
    nbytes, n, chunks, every_s = 1 << 20, 512, 16, 0.1
    rounds = 3 if report.quick else 8
    size = n // chunks
    print("a prompt that is followed while it is computed, and one that is pulled when it is there")
    with (
        cluster(nodes=2, memory="1280MiB") as running,
        ExitStack() as stack,
    ):
        at_a, at_b = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        there, here = (open_as(client, "followed", nbytes) for client in (at_a, at_b))
        data = np.zeros((size, nbytes), np.uint8)
        wait_until(lambda: at_b.stats().cluster.others == 1, "they know each other")
        times: dict[str, list[float]] = {"follow": [], "unnamed": [], "pull": [], "chunk": []}
        put_s = []

        def prefill(keys: list[bytes]) -> float:
            """Put them chunk by chunk; when the last one was there."""
            for at in range(0, n, size):
                time.sleep(every_s)
                begun = time.perf_counter()
                at_a.put(there, keys[at : at + size], data)
                put_s.append(time.perf_counter() - begun)
            return time.perf_counter()

        for number in range(rounds + 1):
            for kind in ("follow", "unnamed", "pull"):
                keys = keys_of(20, [number << 12 | len(kind) << 20 | at for at in range(n)])
                ended: list[tuple[int, float]] = []

                def run(keys: list[bytes] = keys, kind: str = kind) -> None:
                    source = "a" if kind == "follow" else ""
                    found = at_b.follow(here, keys, wait_s=WAIT_S, source=source)
                    ended.append((found, time.perf_counter()))

                follower = threading.Thread(target=run)
                if kind != "pull":
                    follower.start()
                last = prefill(keys)
                if kind == "pull":
                    wait_until(lambda: settled(at_a), "all is announced")
                    last = time.perf_counter()
                    ended.append((at_b.pull(here, keys, wait_s=WAIT_S), time.perf_counter()))
                else:
                    follower.join()
                assert ended[0][0] == n, f"{ended[0][0]} of {n} blocks came"
                if number:  # the first is for warmth
                    times[kind].append(ended[0][1] - last)
                at_b.remove(here, keys)
                begun = time.perf_counter()
                assert at_b.pull(here, keys[:size], wait_s=WAIT_S) == size
                if number:
                    times["chunk"].append(time.perf_counter() - begun)
                at_b.remove(here, keys[:size])
                at_a.remove(there, keys)
        report.row(
            "from the last commit, ms",
            follow=1e3 * median(times["follow"]),
            slowest=1e3 * max(times["follow"]),
            without_a_name=1e3 * median(times["unnamed"]),
            pull_of_all=1e3 * median(times["pull"]),
            pull_of_the_last_chunk=1e3 * median(times["chunk"]),
            put_of_a_chunk=1e3 * median(put_s),
        )
        follows = at_b.stats().prefix_streams
        report.row(
            "in all",
            follows=follows.ended,
            questions=follows.questions,
            lookups=follows.lookups,
            lag_ms=1e3 * follows.lag_s,
        )
        report.check(
            "follow_vs_pull_end", median(times["follow"]) / median(times["pull"]), at_most=0.2
        )


def _left(client: OperatorClient, name: str) -> bool:
    """Whether no node of this name is in the cluster."""
    return all(node["node"] != name for node in client.cluster()["nodes"])


def _copied_more(client: OperatorClient, nbytes: int) -> bool:
    return copied(client) > nbytes


def copied(client: OperatorClient) -> int:
    """Bytes that other nodes took from this one."""
    return int(client.stats().replication.accepted_bytes)


def waiting(report: Report) -> None:
    """Acquire of 64 KiB x 64 of another node, idle, and while that node's new blocks are copied here."""
    nbytes, n = 64 << 10, 64
    rounds, calls = (4, 100) if report.quick else (10, 200)
    print("a pull that is waited for, while copies are made between the same nodes")
    with (
        cluster(nodes=2, memory="512MiB") as running,
        ExitStack() as stack,
    ):
        at_a, at_b = (stack.enter_context(x.client(timeout_s=WAIT_S)) for x in running.nodes)
        there, here = open_as(at_a, "waited", nbytes), open_as(at_b, "waited", nbytes)
        keys = keys_of(9, range(n))
        assert at_a.put(there, keys, np.zeros((n, nbytes), np.uint8)) == n
        at_a.pin(there, keys, "hard")
        wait_until(lambda: settled(at_a), "all is announced")

        def one() -> float:
            at_b.remove(here, keys)
            begun = time.perf_counter()
            lease = at_b.acquire(here, keys, wait_s=WAIT_S)
            taken = time.perf_counter() - begun
            assert lease is not None
            assert lease.blocks == n, f"{lease.blocks} of {n} blocks arrived"
            lease.release()
            return taken

        for _ in range(20):
            one()
        p50: dict[bool, list[float]] = {False: [], True: []}
        p99: dict[bool, list[float]] = {False: [], True: []}
        copied_s = copied_bytes = 0.0
        for number in range(2 * rounds):
            busy = number % 2 == 1
            if busy:
                load = subprocess.Popen(
                    [sys.executable, "-c", COPY_LOOP, running.nodes[0].socket],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=Path(__file__).parent,
                    text=True,
                )
                assert load.stdout is not None
                assert load.stdout.readline() == "running\n"
                settle_at = copied(at_a) + (192 << 20)  # the burst that its pace allows is over
                wait_until(partial(_copied_more, at_a, settle_at), "replicas are made")
                before, begun = copied(at_a), time.perf_counter()
            times = [one() for _ in range(calls)]
            p50[busy].append(median(times))
            p99[busy].append(percentile(times, 0.99))
            if busy:
                copied_s += time.perf_counter() - begun
                copied_bytes += copied(at_a) - before
                load.communicate("stop\n", timeout=WAIT_S)
                wait_until(lambda: not at_a.stats().replication.wanted, "all is copied")
        report.row(
            "4 MiB in blocks of 64 KiB, ms",
            idle_p50=1e3 * median(p50[False]),
            idle_p99=1e3 * median(p99[False]),
            busy_p50=1e3 * median(p50[True]),
            busy_p99=1e3 * median(p99[True]),
            copied_mb_s=copied_bytes / copied_s / 1e6,
        )
        ratio = median(p99[True]) / median(p99[False])
        report.check("waiting_p99_under_copies", ratio, at_most=1.5)


# ---- idle --------------------------------------------------------------------------------------------


def idle(report: Report) -> None:
    """All load is on a; b and c have memory to spare."""
    print("a working set of 2.5 times one node's memory, all through one node")
    memory, nbytes = 64 << 20, 64 << 10
    count = int(2.5 * memory / nbytes)
    rates = {}
    for name, nodes in (("alone", 1), ("with two idle nodes", 3)):
        with cluster(nodes=nodes, memory="64MiB") as running, ExitStack() as stack:
            at_a = stack.enter_context(running.nodes[0].client(timeout_s=WAIT_S))
            ns = open_as(at_a, "idle", nbytes)
            rates[name] = working_set(at_a, ns, count, nbytes, report.quick)
            stats = at_a.stats()
            report.row(
                name,
                hit_rate=rates[name],
                forwarded=stats.replication.forwarded_blocks,
                pulled=stats.counters.pulled_blocks,
                refused_puts=stats.counters.refused_full,
            )
    report.check("idle_memory_hit_rate", rates["with two idle nodes"], at_least=0.9)


def working_set(
    client: OperatorClient, ns: Namespace, count: int, nbytes: int, quick: bool
) -> float:
    """Ask for blocks of a working set at random, put what is missing; the share found in the second half."""
    keys = keys_of(10, range(count))
    chooser = random.Random(11)
    asked = (4 if quick else 8) * count
    group = 8
    found = counted = 0
    for turn in range(asked // group):
        chosen = chooser.sample(range(count), group)
        for number in chosen:
            key = keys[number]
            lease = client.acquire(ns, [key], wait_s=2.0)
            hit = lease is not None
            if lease is not None:
                data = bytes(lease.slots[0].view(0)[:8])
                assert data == number.to_bytes(8, "big") or not lease.valid, "wrong bytes"
                lease.release()
            else:
                client.put(ns, [key], [number.to_bytes(8, "big") + bytes(nbytes - 8)])
            if turn * group > asked // 2:
                counted += 1
                found += hit
        time.sleep(0.002)
    return found / counted


PARTS = {
    "owner": owner,
    "redis": redis,
    "expiry": expiry,
    "etcd": etcd,
    "many": many,
    "pull": pull,
    "follow": follow,
    "waiting": waiting,
    "idle": idle,
}


def main() -> int:
    report, arguments = parse_arguments(__doc__.splitlines()[0])
    for name, part in PARTS.items():
        if arguments.only in name:
            part(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
