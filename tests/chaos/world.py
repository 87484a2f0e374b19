"""The processes of a run: daemons with an SSD, etcd, Redis, proxies before all of them, and clients.

All that is done to a process is in the history, and so is the end of each, ordered or not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from kvpool.errors import KvpoolError, Unavailable
from kvpool.telemetry.node_stats import NodeStats
from tests.chaos import starving
from tests.chaos.checker import HARNESS
from tests.chaos.clients import RECORD, Settings
from tests.chaos.history import Exited, Measured, Ordered, Said, Serving, Started, Starved, Writer
from tests.support.local_cluster import KVPOOL, LocalCluster, LocalNode
from tests.support.proxy import Proxy
from tests.support.refusing import Refusing
from tests.support.servers.etcd import Etcd
from tests.support.servers.redis import Redis, RedisSentinel
from tests.support.waiting import PATIENCE_S, until

MEMORY = "16MiB"
SSD = "64MiB"
WATCHED_S = 0.05
QUIET_S = 60.0
"""How long after the last use all has to be put away."""
CLIENT_WORD_S = 120.0
SIGNS = (
    "Traceback (most recent call last)",
    "AssertionError",
    "was never awaited",
    "ResourceWarning",
)
"""What only a defect makes a daemon write."""


class Clients:
    """A process of `tests.chaos.clients`. One thread at a time."""

    def __init__(self, settings: Settings, write: Writer) -> None:
        self.settings = settings
        self.name = settings.name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.clients", msgspec.json.encode(settings).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.ended = False
        write(Started(at=time.monotonic(), pid=self.process.pid, who=self.name, role="client"))

    def wait_ready(self) -> None:
        self._hear("ready")

    def tell(self, line: str) -> None:
        """And do not wait for the answer: `hear`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def hear(self) -> None:
        """Wait until the last word is done. Raises `Unavailable` when the process has ended."""
        self._hear("done")

    def say(self, line: str) -> None:
        self.tell(line)
        self.hear()

    def _hear(self, word: str) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != word:
            raise Unavailable(f"the clients {self.name} have ended")

    def close(self) -> None:
        """They finish what they do. Idempotent."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Seat:
    """A place for a process of clients that work, one after the other."""

    def __init__(self, world: World, node: str, threads: int, prompts: int) -> None:
        self._world = world
        self._node = node
        self._size = threads, prompts
        self.lock = threading.Lock()
        self.clients = world.add_clients(node, *self._size)

    def begin(self) -> None:
        """Others come, and work."""
        self.clients = self._world.add_clients(self._node, *self._size)
        self.clients.wait_ready()
        self.clients.say("work")

    def end(self, number: int) -> None:
        """By a signal."""
        self._world.end_clients(self.clients.name, number)

    def signal(self, number: int) -> None:
        """Send one."""
        self._world.order_process(self.clients.process.pid, self.clients.name, number)


class World:
    """See the module. Starts with `with`. Faults, each on a target of its own, may be done by threads.

    sentinel: the directory is a Redis with a replica and a Sentinel, else one server. refusing: writes to disks can be
    refused, by node.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        nodes: int,
        *,
        sentinel: bool = False,
        refusing: bool = False,
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.write = Writer(folder / "run.jsonl")
        self.proxies: dict[str, Proxy] = {}
        self.etcd_proxy: Proxy
        self.redis_proxies: list[Proxy] = []
        self.refusing: dict[str, Refusing] = {}
        self._redis: Redis | RedisSentinel
        self._count = nodes
        self._with_sentinel = sentinel
        self._with_refusing = refusing
        self._unjudged: dict[str, list[tuple[int, int]]] = {}
        self._stack = contextlib.ExitStack()
        self._locks: dict[str, threading.RLock] = {}
        self._turns: dict[tuple[str, str], threading.Lock] = {}
        self._watching = threading.Event()
        self._clients_made = 0
        self.clients: dict[str, Clients] = {}
        self.seats: dict[str, Seat] = {}
        self.cluster: LocalCluster

    # ---- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(starving.Lateness(self._tell_starved))
            etcd = stack.enter_context(Etcd(self.folder / "etcd"))
            host, _, port = etcd.endpoints[0].partition(":")
            self.etcd_proxy = stack.enter_context(Proxy((host, int(port))))
            directory = self._start_redis(stack)
            self.cluster = LocalCluster(
                self.folder,
                nodes=self._count,
                memory=MEMORY,
                ssd=SSD,
                etcd=etcd,
                etcd_url=lambda _: f"etcd://127.0.0.1:{self.etcd_proxy.address[1]}",
                directory=directory,
                advertise=lambda name, url: self._advertised(stack, name, url),
                program=lambda name: self._program(stack, name),
            )
            stack.enter_context(self.cluster)
            for node in self.cluster.nodes:
                self._locks[node.name] = threading.RLock()
                now = time.monotonic()
                self.write(Started(at=now, pid=node.pid, who=node.name, role="daemon"))
                self.write(Serving(at=now, pid=node.pid, who=node.name))
            self.cluster.wait_acquainted()
            watcher = threading.Thread(target=self._watch, name="chaos-watch")
            watcher.start()
            stack.callback(watcher.join)
            stack.callback(self._watching.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for clients in list(self.clients.values()):
            self.end_clients(clients.name)
        self._watching.set()
        for node in self.cluster.nodes:
            self.order(node, signal.SIGTERM)
        for node in self.cluster.nodes:
            self._reap(node, PATIENCE_S + QUIET_S)
        for node in self.cluster.nodes:
            self._note_said(node)
        self._stack.close()
        self.write.close()

    def _advertised(self, stack: contextlib.ExitStack, name: str, url: str) -> str:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        proxy = Proxy((parts.hostname, parts.port), caller=self._caller)
        self.proxies[name] = stack.enter_context(proxy)
        return proxy.url

    def _start_redis(self, stack: contextlib.ExitStack) -> str:
        """Returns where daemons find it. With a Sentinel, servers know one another by their proxies too."""

        def proxied(port: int) -> int:
            proxy = stack.enter_context(Proxy(("127.0.0.1", port)))
            self.redis_proxies.append(proxy)
            return proxy.address[1]

        if self._with_sentinel:
            servers = RedisSentinel(self.folder / "redis", announced=proxied)
            self._redis = stack.enter_context(servers)
            return servers.url
        self._redis = stack.enter_context(Redis(self.folder / "redis", announced=proxied))
        return f"redis://127.0.0.1:{self._redis.announced_port}"

    def _program(self, stack: contextlib.ExitStack, name: str) -> Sequence[str]:
        if not self._with_refusing:
            return KVPOOL
        refusing = stack.enter_context(Refusing(self.folder / f"{name}-ssd"))
        self.refusing[name] = refusing
        return [*refusing.python, *KVPOOL[1:]]

    @property
    def redis(self) -> Redis:
        """The server that takes the directory's writes now."""
        return self._redis.primary if isinstance(self._redis, RedisSentinel) else self._redis

    def fail_over(self) -> None:
        """The directory's replica becomes its primary. Raises `Unavailable` if there is none that could."""
        assert isinstance(self._redis, RedisSentinel)
        self._redis.fail_over()

    def _caller(self, port: int) -> str:
        """The node that a connection from a port of loopback comes from; empty: none of them, or it has gone."""
        inode = _inode(port)
        for node in self.cluster.nodes if inode else ():
            if node.process is not None and any(_has_socket(pid, inode) for pid in node.pids):
                return node.name
        return ""

    @property
    def nodes(self) -> list[str]:
        return [node.name for node in self.cluster.nodes]

    def node(self, name: str) -> LocalNode:
        return self.cluster.node(name)

    # ---- what is done to daemons ---------------------------------------------------------------------

    def turn(self, kind: str, target: str) -> threading.Lock:
        """Held by the fault that this target has; kind: what it is."""
        return self._turns.setdefault((kind, target), threading.Lock())

    @contextlib.contextmanager
    def having(self, name: str) -> Iterator[LocalNode]:
        """The node, which nobody else does anything to meanwhile."""
        with self._locks[name]:
            yield self.node(name)

    def order(self, node: LocalNode, number: int, *, workers: bool = False) -> None:
        """Send a signal to a daemon; workers: and to its workers."""
        if node.process is None or node.process.poll() is not None:
            return
        for pid in node.pids if workers else [node.pid]:
            self.order_process(pid, node.name if pid == node.pid else f"{node.name}/{pid}", number)

    def order_process(self, pid: int, who: str, number: int) -> None:
        """Send a signal to a process."""
        self.write(Ordered(at=time.monotonic(), pid=pid, who=who, signal=number))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill(self, node: LocalNode) -> None:
        """SIGKILL to the control process, and wait; its workers end with it."""
        self.order(node, signal.SIGKILL)
        self._reap(node, PATIENCE_S)

    def terminate(self, node: LocalNode) -> None:
        """SIGTERM, and wait for the end, which the checker has an opinion of."""
        self.order(node, signal.SIGTERM)
        self._reap(node, PATIENCE_S + QUIET_S)

    def start(self, node: LocalNode) -> None:
        """Start a daemon that has ended, as a supervisor does: again, when it does not start."""
        deadline = time.monotonic() + QUIET_S + PATIENCE_S
        while True:
            try:
                self._begin(node)
                return
            except RuntimeError:
                self._note_exit(node)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _begin(self, node: LocalNode) -> None:
        """Start a daemon, once. Raises `RuntimeError` if it ends before it serves."""
        node.begin()
        self.write(Started(at=time.monotonic(), pid=node.pid, who=node.name, role="daemon"))
        node.wait_ready()
        self.write(Serving(at=time.monotonic(), pid=node.pid, who=node.name))

    @contextlib.contextmanager
    def saying_anything(self, node: LocalNode) -> Iterator[None]:
        """What it writes meanwhile is no sign of a defect."""
        begin = node.log.stat().st_size
        try:
            yield
        finally:
            ranges = self._unjudged.setdefault(node.name, [])
            ranges.append((begin, node.log.stat().st_size))

    def _reap(self, node: LocalNode, seconds: float) -> None:
        if node.process is None or node.process.returncode is not None:
            return
        try:
            node.process.wait(seconds)
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()
        self._note_exit(node)

    def _note_exit(self, node: LocalNode) -> None:
        assert node.process is not None and node.process.returncode is not None
        self.write(
            Exited(
                at=time.monotonic(),
                pid=node.pid,
                who=node.name,
                role="daemon",
                status=node.process.returncode,
            )
        )
        node.kill()  # close its pipe

    def _note_said(self, node: LocalNode) -> None:
        log = node.log.read_bytes()
        for begin, end in reversed(self._unjudged.get(node.name, [])):
            log = log[:begin] + log[end:]
        for line in log.decode(errors="replace").splitlines():
            if any(sign in line for sign in SIGNS):
                self.write(Said(at=time.monotonic(), who=node.name, line=line[:300]))

    # ---- clients -------------------------------------------------------------------------------------

    def add_clients(self, node: str, threads: int, prompts: int) -> Clients:
        """Begin a process with clients; `wait_ready` has to follow."""
        self._clients_made += 1
        name = f"{node}-clients-{self._clients_made}"
        settings = Settings(
            name=name,
            node=node,
            socket=self.node(node).socket,
            history=str(self.folder / f"{name}.jsonl"),
            seed=self.seed,
            threads=threads,
            prompts=prompts,
        )
        self.clients[name] = Clients(settings, self.write)
        return self.clients[name]

    def add_seat(self, name: str, node: str, threads: int, prompts: int) -> Seat:
        """A place for clients, which are begun."""
        self.seats[name] = Seat(self, node, threads, prompts)
        return self.seats[name]

    @contextlib.contextmanager
    def having_clients(self, name: str) -> Iterator[Seat]:
        """Those of a seat, which nobody else does anything to meanwhile."""
        with self.seats[name].lock:
            yield self.seats[name]

    def end_clients(self, name: str, number: int = 0) -> None:
        """Have them finish; number: or by a signal."""
        clients = self.clients.pop(name)
        pid = clients.process.pid
        if number:
            self.order_process(pid, name, number)
        else:
            self.write(Ordered(at=time.monotonic(), pid=pid, who=name, signal=signal.SIGTERM))
            clients.close()
        try:
            status = clients.process.wait(CLIENT_WORD_S)
        except subprocess.TimeoutExpired:
            clients.process.kill()
            status = clients.process.wait()
        clients.close()
        now = time.monotonic()
        self.write(Exited(at=now, pid=pid, who=name, role="client", status=status))

    # ---- what is watched -----------------------------------------------------------------------------

    def _tell_starved(self, total_s: float) -> None:
        self.write(Starved(at=time.monotonic(), who=HARNESS, total_s=total_s))

    def _watch(self) -> None:
        """Notes how starved nodes are, and daemons that end by themselves; these are started again."""
        totals: dict[str, float] = {}
        before: dict[int, float] = {}
        workers: dict[str, tuple[int, set[int]]] = {}
        told_at = 0.0
        while not self._watching.wait(WATCHED_S):
            now = time.monotonic()
            sample = now - told_at >= starving.TOLD_S
            told_at = now if sample else told_at
            for node in self.cluster.nodes:
                if sample and node.process is not None:
                    pid, *children = node.pids
                    self._note_workers(node, pid, set(children), workers)
                    totals[node.name] = totals.get(node.name, 0.0) + _more(node.pids, before)
                    at = time.monotonic()
                    self.write(Starved(at=at, who=node.name, total_s=totals[node.name]))
                self._look_after(node)

    def _note_workers(
        self,
        node: LocalNode,
        pid: int,
        children: set[int],
        known: dict[str, tuple[int, set[int]]],
    ) -> None:
        """Workers that ended although their daemon lives."""
        before, others = known.get(node.name, (pid, set()))
        if before == pid and node.process is not None and node.process.poll() is None:
            for gone in others - children:
                at = time.monotonic()
                who = f"{node.name}/{gone}"
                self.write(Exited(at=at, pid=gone, who=who, role="worker", status=0))
        known[node.name] = (pid, children)

    def _look_after(self, node: LocalNode) -> None:
        lock = self._locks[node.name]
        if not lock.acquire(blocking=False):
            return  # somebody kills or starts it
        try:
            if node.process is not None and node.process.poll() is not None:
                self._note_exit(node)
                self._begin(node)
        except RuntimeError:
            pass  # it has not started: it is noted as an end the next time
        finally:
            lock.release()

    def stats(self, name: str) -> NodeStats:
        """Of a node, by an operator's client of its own."""
        with self.node(name).client(connect=True) as client:
            return client.stats()

    def until_well(self) -> None:
        """All daemons serve, see each other, and the directory knows all that they hold."""

        def well() -> bool:
            try:
                found = [self.stats(name) for name in self.nodes]
            except KvpoolError:
                return False
            return all(
                stats.cluster.standing == "member"
                and stats.cluster.others == len(found) - 1
                and stats.cluster.directory is not None
                and stats.cluster.directory.connected
                and not any(peer.suspended_s for peer in stats.fetch.peers)
                for stats in found
            )

        until(well, "all nodes are well", seconds=QUIET_S + PATIENCE_S)

    def measure(self, *, quiet: bool) -> None:
        """Note what each process of a daemon has, and each node. quiet: nobody is to use it any more."""
        for node in self.cluster.nodes:
            if quiet:
                amounts = self._put_away(node)
                self.write(
                    Measured(
                        at=time.monotonic(),
                        who=node.name,
                        role="node",
                        pid=node.pid,
                        quiet=True,
                        amounts=amounts,
                    )
                )
            for process in self.stats(node.name).processes:
                self.write(
                    Measured(
                        at=time.monotonic(),
                        who=f"{node.name}/{process.pid}",
                        role=process.kind,
                        pid=process.pid,
                        quiet=quiet,
                        amounts=_process_amounts(process.pid),
                    )
                )

    def _put_away(self, node: LocalNode) -> dict[str, int]:
        """What a node still holds for somebody, and what is in use after all blocks were evicted."""
        deadline = time.monotonic() + QUIET_S
        with node.client(connect=True) as client:
            ns = client.open(RECORD)
            while True:
                client.evict(digest=ns.digest)
                found = _held(client.stats())
                if not any(found.values()) or time.monotonic() > deadline:
                    return found
                time.sleep(0.2)


def _held(stats: NodeStats) -> dict[str, int]:
    tenants = stats.tenants.values()
    return {
        "leases": stats.leases,
        "granted_bytes": sum(tenant.granted_bytes for tenant in tenants),
        "used_bytes": sum(tenant.space.bytes_used for tenant in tenants),
        "pinned_bytes": sum(tenant.hard_pinned_bytes for tenant in tenants),
        "transfers": stats.fetch.transfers,
        "peer_inflight_bytes": sum(peer.inflight_bytes for peer in stats.fetch.peers),
        "orders": sum(worker.orders for worker in stats.transfer_workers),
        "loans": sum(worker.loans for worker in stats.transfer_workers),
        "streams": stats.prefix_streams.under_way,
        "waiters": stats.prefix_streams.waiters,
    }


def _more(pids: Sequence[int], before: dict[int, float]) -> float:
    """How much longer the processes were starved than before: of each, the thread that was longest."""
    more = 0.0
    for pid in pids:
        longest = 0.0
        for task, total_s in starving.tasks_s(pid).items():
            longest = max(longest, total_s - before.get(task, total_s))
            before[task] = total_s
        more += longest
    return more


def _inode(port: int) -> str:
    """Of the socket that is bound to a port and connected, as /proc/PID/fd shows it; empty: none."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1].endswith(f":{port:04X}") and not words[2].endswith(":0000"):
            return f"socket:[{words[9]}]"
    return ""


def _has_socket(pid: int, inode: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except FileNotFoundError:
        return False
    for number in numbers:
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"{folder}/{number}") == inode:
                return True
    return False


def _process_amounts(pid: int) -> dict[str, int]:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "memory_bytes": int(fields["RssAnon"].split()[0]) << 10,
    }
