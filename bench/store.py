"""How fast one node is, beside what the machine can do: put, get, match, pull.

    .venv/bin/python bench/store.py [--quick] [--json FILE] [--only PART]

Limits: memcpy is numpy's, one call over the batch, into or out of the very slots of the segment that
the store used; the stream is one plain TCP connection between two processes, `sendall` to `recv_into`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Daemon, Report, daemon, in_turns, median, parse_arguments, percentile, seconds
from xxhash import xxh3_128_digest

from kvpool.client import Client
from kvpool.client.copying import CopyIn
from kvpool.memory.buffers import Source
from kvpool.transfer.base import Deadline
from kvpool.transfer.stream import Stream
from kvpool.types import Namespace, NamespaceRecord
from kvpool.wire.peer import GROUP_BYTES

MIB = 1 << 20
SIZES = [
    (4 << 10, 128),
    (16 << 10, 128),
    (64 << 10, 1),
    (64 << 10, 8),
    (64 << 10, 64),
    (256 << 10, 64),
    (1 << 20, 1),
    (1 << 20, 8),
    (1 << 20, 32),
    (4 << 20, 8),
]
_numbers = itertools.count(1)


def fresh_keys(n: int) -> bytes:
    """Keys that were never used, spread like hashes."""
    start = next(_numbers)
    return np.random.default_rng([start, os.getpid()]).bytes(16 * n)


def open_namespace(client: Client, name: str, nbytes: int) -> Namespace:
    return client.open(NamespaceRecord.simple(name, block_bytes=nbytes, block_tokens=16))


RESIDENT_BYTES = 256 * MIB  # far more than a cache: what a get reads is as cold as in a real pool


def rows_of(client: Client, ns: Namespace, keys: bytes) -> tuple[Any, Any]:
    """The segment as rows, and which of them hold these blocks."""
    lease = client.acquire(ns, keys)
    assert lease is not None, "the blocks are here"
    with lease:
        slots = lease.slots[0]
        return slots.table, slots.rows.copy()


def shared_memory(report: Report, client: Client, sizes: Sequence[tuple[int, int]] = SIZES) -> None:
    """Put and get on one node, beside memcpy of as many bytes at such slots.

    Each get and each memcpy takes another batch at random of 256 MiB that are resident; each put
    goes to the slots that were used longest ago, and its memcpy into those of a random batch. So store
    and limit meet equally cold memory. "hot" repeats one batch, which then lies in the CPU's cache. "verified"
    compares each block with its checksum.
    """
    print("same node, GB/s")
    rng = np.random.default_rng(3)
    for nbytes, n in sizes:
        small = nbytes * n < 8 * MIB
        rounds = (41 if report.quick else 201) if small else (21 if report.quick else 51)
        ns = open_namespace(client, f"shm-{nbytes}-{n}", nbytes)
        verified_ns = replace(ns, verify=True)
        source = rng.integers(0, 255, (n, nbytes), dtype=np.uint8)
        out = np.empty_like(source)
        ring = [fresh_keys(n) for _ in range(RESIDENT_BYTES // (nbytes * n))]
        for keys in ring:
            assert client.put(ns, keys, source) == n
        places = [rows_of(client, ns, keys) for keys in ring]
        table = places[0][0]
        order = itertools.cycle(rng.permutation(len(ring)).tolist())

        def get() -> None:
            client.get_into(ns, ring[next(order)], out)

        def get_verified() -> None:
            client.get_into(verified_ns, ring[next(order)], out)

        def copy_out() -> None:
            np.take(table, places[next(order)][1], axis=0, out=out, mode="clip")

        got, verified, copied_out = in_turns(rounds, get, get_verified, copy_out)
        out[:] = 0
        assert client.get_into(ns, ring[0], out).all(), "a block is gone"
        assert (out == source).all(), "wrong bytes"
        hot_got, hot_copied = in_turns(
            rounds,
            lambda: client.get_into(ns, ring[0], out),
            lambda: np.take(table, places[0][1], axis=0, out=out, mode="clip"),
        )

        put: list[float] = []
        copied_in: list[float] = []
        for number in range(rounds + 3):
            client.remove(ns, ring.pop(0))
            places.pop(0)
            # A batch that stays: its blocks are overwritten with the bytes that they have.
            keys, target = fresh_keys(n), places[rng.integers(len(places) - 3)][1]
            steps = [
                (put, lambda: client.put(ns, keys, source)),
                (copied_in, lambda: table.__setitem__(target, source)),
            ]
            for times, work in steps if number % 2 else reversed(steps):
                taken = seconds(work)
                if number >= 3:
                    times.append(taken)
            ring.append(keys)
            places.append(rows_of(client, ns, keys))
        for keys in ring:
            out[:] = 0
            assert client.get_into(ns, keys, out).all(), "a block is gone"
            assert (out == source).all(), "wrong bytes"
            client.remove(ns, keys)

        total = nbytes * n / 1e9
        ratio_get = median(copied_out) / median(got)
        ratio_put = median(copied_in) / median(put)
        report.row(
            f"shm {nbytes >> 10} KiB x {n}",
            get=total / median(got),
            memcpy_out=total / median(copied_out),
            get_ratio=ratio_get,
            verified_get=total / median(verified),
            verified_ratio=median(got) / median(verified),
            put=total / median(put),
            memcpy_in=total / median(copied_in),
            put_ratio=ratio_put,
            hot_get=total / median(hot_got),
            hot_get_ratio=median(hot_copied) / median(hot_got),
        )
        if (nbytes, n) == (1 << 20, 32):
            report.check("shm_get_1m", ratio_get, at_least=0.85)
            report.check("shm_put_1m", ratio_put, at_least=0.75)
        if (nbytes, n) == (64 << 10, 64):
            report.check("shm_get_64k", ratio_get, at_least=0.6)
            report.check("shm_put_64k", ratio_put, at_least=0.5)


def fill_chains(
    client: Client, ns: Namespace, chains: int, length: int, nbytes: int
) -> list[bytes]:
    data = np.zeros((length, nbytes), dtype=np.uint8)
    keys = [fresh_keys(length) for _ in range(chains)]
    for chain in keys:
        client.put(ns, chain, data)
    return keys


def lookups(report: Report, client: Client) -> None:
    """`match` and `contains`, 128 keys a call, one caller, 100,000 blocks resident."""
    print("lookups, 128 keys a call")
    ns = open_namespace(client, "lookups", 1024)
    chains = fill_chains(client, ns, 800, 128, 1024)
    rounds = 4000 if report.quick else 20_000
    order = np.random.default_rng(1).integers(0, len(chains), rounds + 200).tolist()
    for name, call in (("match", client.match), ("contains", client.contains)):
        times = [seconds(lambda: call(ns, chains[index])) for index in order][200:]
        keys_s = 128 * len(times) / sum(times)
        p50, p99 = percentile(times, 0.5) * 1e6, percentile(times, 0.99) * 1e6
        report.row(name, keys_s=keys_s, p50_us=p50, p99_us=p99)
        if name == "match":
            report.check("match_keys_s", keys_s, at_least=1_000_000)
            report.check("match_p50_us", p50, at_most=150)
        else:
            report.check("contains_keys_s", keys_s, at_least=1_000_000)
    assert client.match(ns, chains[0]) == 128
    client.remove(ns, b"".join(chains[:500]))
    client.remove(ns, b"".join(chains[500:]))


# ---- pulls -------------------------------------------------------------------------------------------

STREAM_SENDER = """
import socket, sys
size = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
chunk = bytes(128 << 10)
while peer.recv(1):
    for _ in range(size // len(chunk)):
        peer.sendall(chunk)
"""


@contextlib.contextmanager
def plain_stream(size: int) -> Any:
    """A function that receives `size` bytes over one TCP connection from another process."""
    sender = subprocess.Popen(
        [sys.executable, "-c", STREAM_SENDER, str(size)], stdout=subprocess.PIPE, text=True
    )
    assert sender.stdout is not None
    port = int(sender.stdout.readline())
    sock = socket.create_connection(("127.0.0.1", port))
    buffer = bytearray(128 << 10)

    def receive() -> None:
        sock.sendall(b"g")
        left = size
        while left:
            left -= sock.recv_into(buffer, min(left, len(buffer)))

    try:
        yield receive
    finally:
        sock.close()
        sender.wait(timeout=10)


def pulls(report: Report, owner: Client, puller: Client) -> None:
    """Daemon to daemon over TCP, checksums verified, beside one plain stream of as many bytes."""
    print("pulls, daemon to daemon, GB/s")
    for nbytes, n in ((1 << 20, 32), (64 << 10, 512), (4 << 10, 4096)):
        name = f"pull-{nbytes}"
        here, there = open_namespace(puller, name, nbytes), open_namespace(owner, name, nbytes)
        source = np.random.default_rng(2).integers(0, 255, (n, nbytes), dtype=np.uint8)
        keys = fresh_keys(n)
        assert owner.put(there, keys, source) == n
        times: dict[str, list[float]] = {"pull": [], "stream": []}
        with plain_stream(nbytes * n) as receive:
            for number in range((11 if report.quick else 31) + 2):
                for which in ("pull", "stream") if number % 2 else ("stream", "pull"):
                    if which == "stream":
                        taken = seconds(receive)
                    else:
                        puller.remove(here, keys)
                        start = time.perf_counter()
                        pulled = puller.pull(here, keys, wait_s=30.0)
                        taken = time.perf_counter() - start
                        assert pulled == n, f"{pulled} of {n} blocks arrived"
                    if number >= 2:
                        times[which].append(taken)
        out = np.empty_like(source)
        assert puller.get_into(here, keys, out).all(), "a block is gone"
        assert (out == source).all(), "wrong bytes"
        total = nbytes * n / 1e9
        ratio = median(times["stream"]) / median(times["pull"])
        report.row(
            f"tcp {nbytes >> 10} KiB x {n}",
            pull=total / median(times["pull"]),
            stream=total / median(times["stream"]),
            ratio=ratio,
        )
        if nbytes == 1 << 20:
            report.check("tcp_pull_1m", ratio, at_least=1.0)
        owner.remove(there, keys)
        puller.remove(here, keys)


def lookups_under_pulls(report: Report, owner: Client, puller: Client, sockets: list[str]) -> None:
    """The p99 of `match` at both daemons while bulk pulls run between them, over that of idle ones."""
    print("match while pulls run")
    n, nbytes = 32, 1 << 20
    there = open_namespace(owner, "bulk", nbytes)
    keys = fresh_keys(n)
    owner.put(there, keys, np.zeros((n, nbytes), dtype=np.uint8))
    chains = {}
    for client in (owner, puller):
        ns = open_namespace(client, "under", 1024)
        chains[client] = (ns, fill_chains(client, ns, 100, 128, 1024))
    rounds, calls = (5, 1500) if report.quick else (11, 4000)
    p99: dict[tuple[bool, Client], list[float]] = {}
    pulled = 0
    for _ in range(rounds):
        for busy in (False, True):
            load = None
            if busy:
                load = subprocess.Popen(
                    [sys.executable, "-c", PULL_LOOP, sockets[1], keys.hex()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=Path(__file__).parent,
                )
                assert load.stdout is not None
                load.stdout.readline()
            for client in (owner, puller):
                ns, known = chains[client]
                times = [seconds(lambda: client.match(ns, known[i % 100])) for i in range(calls)]
                p99.setdefault((busy, client), []).append(percentile(times, 0.99))
            if load is not None:
                counted, _ = load.communicate("stop\n", timeout=60)
                pulled += int(counted)
    worst = 0.0
    for name, client in (("owner", owner), ("puller", puller)):
        idle, loaded = median(p99[False, client]) * 1e6, median(p99[True, client]) * 1e6
        report.row(f"p99 at the {name}", idle_us=idle, under_pull_us=loaded, ratio=loaded / idle)
        worst = max(worst, loaded / idle)
    report.row("pulls meanwhile", count=pulled)
    report.check("match_p99_under_pull", worst, at_most=2)


PULL_LOOP = """
import sys, threading
from store import open_namespace
from kvpool.client import Client
client = Client(sys.argv[1], connect=True)
keys = bytes.fromhex(sys.argv[2])
ns = open_namespace(client, "bulk", 1 << 20)
stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), stop.set()), daemon=True).start()
done = 0
while not stop.is_set():
    client.remove(ns, keys)
    if client.pull(ns, keys, wait_s=10.0) == 32:
        done += 1
    if done == 1:
        print("running", flush=True)
        done += 1
print(done - 1)
"""


# ---- full pools --------------------------------------------------------------------------------------


def full_pools(report: Report, folder: Path) -> None:
    """A put into a full pool of a million blocks, beside one of ten thousand; and puts that fail."""
    print("full pools, blocks of 1 KiB")
    nbytes, n = 1024, 32
    source = np.zeros((n, nbytes), dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        pools = []
        for blocks in (10_000, 1_000_000):
            started = stack.enter_context(daemon(folder, f"full-{blocks}", str(blocks * nbytes)))
            client = stack.enter_context(Client(started.socket, connect=True))
            ns = open_namespace(client, "full", nbytes)
            batch = np.zeros((1000, nbytes), dtype=np.uint8)
            for _ in range(blocks // 1000 + 1):
                client.put(ns, fresh_keys(1000), batch)
            resident = client.stats().tenants["default"].blocks
            pools.append((client, ns, resident))
        small, large = in_turns(
            400 if report.quick else 2000,
            *[lambda c=c, ns=ns: c.put(ns, fresh_keys(n), source) for c, ns, _ in pools],
            warmup=50,
        )
        report.row(
            "put of 32 blocks",
            us_at_10k=median(small) * 1e6,
            us_at_1m=median(large) * 1e6,
            resident=[resident for _, _, resident in pools],
        )
        report.check("put_1m_vs_10k", median(large) / median(small), at_most=1.2)
        client, ns, _ = pools[1]
        failed = 0
        one = source[:1]
        start = time.perf_counter()
        for _ in range(100):
            keys = fresh_keys(1000)
            for at in range(0, len(keys), 16):
                failed += client.put(ns, keys[at : at + 16], one) != 1
        report.row("100,000 puts of one block", seconds=time.perf_counter() - start, failed=failed)
        report.check("full_pool_failed_puts", failed, at_most=0)


def idle(report: Report, one: Daemon) -> None:
    """What a daemon costs that nobody talks to: CPU, and memory besides its segments."""
    print("idle daemon")
    clock = os.sysconf("SC_CLK_TCK")

    def ticks() -> int:
        total = 0
        for pid in one.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    for _ in range(30):  # its workers enter the segment in their page tables when it serves already
        before = ticks()
        threading.Event().wait(1.0)
        if ticks() - before <= 1:
            break
    before, start = ticks(), time.monotonic()
    threading.Event().wait(5.0)
    share = (ticks() - before) / clock / (time.monotonic() - start)
    resident = 0
    for pid in one.pids:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        kib = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
        resident += int(kib["RssAnon"]) + int(kib["RssFile"])
    report.row("idle", cpu_share=share, rss_mb=resident / 1024, processes=len(one.pids))
    report.check("idle_cpu_share", share, at_most=0.01)
    report.check("idle_rss_mb", resident / 1024, at_most=120)


# ---- checksums ---------------------------------------------------------------------------------------


def timed(rounds: int, *works: Callable[[], Any]) -> list[tuple[float, float]]:
    """Of each work the median seconds, and the CPU seconds of this process, all its threads."""
    spent: list[list[tuple[float, float]]] = [[] for _ in works]
    for number in range(rounds + 3):
        for index in range(len(works)) if number % 2 else reversed(range(len(works))):
            cpu = time.process_time()
            taken = seconds(works[index])
            if number >= 3:
                spent[index].append((taken, time.process_time() - cpu))
    return [(median([s for s, _ in each]), median([c for _, c in each])) for each in spent]


def checksums(report: Report) -> None:
    """What checksums cost: the very copies, with and without the hashing that the store does beside them.

    Put: one numpy copy of a batch into rows of a table, and what the client does instead, with the hashing in it. Pull:
    a TCP stream into rows, each group hashed when it has been received, as a transfer worker has it. Disk: the same with
    `preadv` of a file that is in the page cache, a disk without equal.
    There is no way to switch checksums off in the store; "without" exists here only.
    """
    print("checksums, GB/s and CPU seconds a GB")
    rng = np.random.default_rng(4)
    rounds = 15 if report.quick else 51
    copy_in = CopyIn()
    with tempfile.TemporaryFile() as file:
        for nbytes, n in ((16 << 10, 64), (64 << 10, 64), (1 << 20, 32), (4 << 20, 8)):
            size = nbytes * n
            source = rng.integers(0, 255, (n, nbytes), dtype=np.uint8)
            held, indices = Source(source, n, nbytes), np.arange(n)
            table = np.zeros((RESIDENT_BYTES // nbytes, nbytes), dtype=np.uint8)
            places = itertools.cycle(np.split(rng.permutation(len(table)), len(table) // n))
            file.seek(0)
            file.write(source.data)
            file.flush()
            group = max(1, GROUP_BYTES // nbytes)
            expected = held.checksums(range(n))

            def copy() -> None:
                table[next(places)] = source

            def put() -> None:
                copy_in(held, indices, table, next(places), -1)

            def groups(fill: Callable[[list[Any], int], None], *, hashed: bool) -> None:
                rows = next(places)
                for low in range(0, n, group):
                    views = [table[row].data for row in rows[low : low + group]]
                    fill(views, low)
                    if hashed:
                        found = b"".join(map(xxh3_128_digest, views))
                        assert found == expected[16 * low : 16 * (low + len(views))]

            def read(views: list[Any], low: int) -> None:
                assert os.preadv(file.fileno(), views, low * nbytes) == sum(map(len, views))

            with served_bytes(source) as receive:
                pairs = {
                    "put": timed(rounds, copy, put),
                    "pull": timed(
                        rounds,
                        lambda: groups(receive, hashed=False),
                        lambda: groups(receive, hashed=True),
                    ),
                    "disk": timed(
                        rounds,
                        lambda: groups(read, hashed=False),
                        lambda: groups(read, hashed=True),
                    ),
                }
            ((alone, _),) = timed(rounds, lambda: held.checksums(range(n)))
            for what, ((without, cpu_without), (with_, cpu_with)) in pairs.items():
                report.row(
                    f"{what} {nbytes >> 10} KiB x {n}",
                    without=size / without / 1e9,
                    with_checksums=size / with_ / 1e9,
                    ratio=without / with_,
                    cpu_without=cpu_without / size * 1e9,
                    cpu_with=cpu_with / size * 1e9,
                    hashing_alone=size / alone / 1e9,
                )


SOURCE_SENDER = """
import socket, sys
size = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer, _ = listener.accept()
data = bytearray(size)
peer.recv_into(data, size, socket.MSG_WAITALL)
while peer.recv(1):
    peer.sendall(data)
"""


@contextlib.contextmanager
def served_bytes(source: Any) -> Iterator[Callable[[list[Any], int], None]]:
    """A function that fills views from a process that sends these bytes over TCP, again and again."""
    with subprocess.Popen(
        [sys.executable, "-c", SOURCE_SENDER, str(source.nbytes)], stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None
        with socket.create_connection(("127.0.0.1", int(sender.stdout.readline()))) as sock:
            sock.sendall(source)
            stream = Stream(sock, Deadline(600))

            def receive(views: list[Any], low: int) -> None:
                if low == 0:
                    sock.sendall(b"g")
                stream.receive_into([view.cast("B") for view in views])

            yield receive


def main() -> int:
    report, arguments = parse_arguments(__doc__ or "")

    def wanted(part: str) -> bool:
        return arguments.only in part

    if wanted("checksums"):
        checksums(report)
    if arguments.only == "checksums":  # which take no daemons
        return report.finish()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        a = stack.enter_context(daemon(folder, "a", "1GiB", "--listen", "tcp://127.0.0.1:0"))
        b = stack.enter_context(daemon(folder, "b", "1GiB", "--peer", a.url))
        if wanted("idle"):
            idle(report, b)
        owner = stack.enter_context(Client(a.socket, connect=True))
        puller = stack.enter_context(Client(b.socket, connect=True))
        if wanted("shm"):
            shared_memory(report, owner)
        if wanted("lookups"):
            lookups(report, owner)
        if wanted("pulls"):
            pulls(report, owner, puller)
        if wanted("under"):
            lookups_under_pulls(report, owner, puller, [a.socket, b.socket])
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        if wanted("full"):
            full_pools(report, Path(name))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
