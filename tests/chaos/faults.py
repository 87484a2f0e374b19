"""What the kinds of `plan.KINDS` are: each is begun, lasts, and is healed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvpool.errors import KvpoolError, Unavailable
from tests.chaos.history import Exited, FaultBegan, FaultEnded, Started
from tests.chaos.plan import BY_NAME, Fault
from tests.chaos.world import World
from tests.support.local_cluster import LocalNode
from tests.support.proxy import BOTH, Proxy
from tests.support.proxy import Fault as Broken

Breaking = contextlib.AbstractContextManager[None]
SILENT = Broken(silent=True, hold=BOTH)
SERVES_S = 0.3
"""For so long a daemon that is restarted again and again serves: it begins to say what it has on its disk."""
SPARE_DESCRIPTORS = 2
SPARE_BYTES = 1 << 20


def breaking(world: World, fault: Fault, lasts: threading.Event) -> None:
    """Do a fault, wait until it has lasted or the event is set, and heal it. Any thread.

    On a busy machine it may take longer to heal than was planned: the next one on that target waits for it.
    """
    with (
        world.turn(BY_NAME[fault.what].on, fault.target),
        FAULTS[fault.what](world, fault.target, fault.number),
    ):
        lasts.wait(fault.lasts_s)


@contextlib.contextmanager
def noted(world: World, number: int, what: str, target: str) -> Iterator[None]:
    """In the history."""
    world.write(FaultBegan(at=time.monotonic(), fault=number, what=what, target=target))
    try:
        yield
    finally:
        world.write(FaultEnded(at=time.monotonic(), fault=number))


# ---- daemons -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended(
    world: World, target: str, number: int, *, what: str, end: Callable[[World, LocalNode], None]
) -> Iterator[None]:
    """A daemon is killed, or asked to end, and started again."""
    with world.having(target) as node, noted(world, number, what, target):
        end(world, node)
        yield
        world.start(node)


@contextlib.contextmanager
def restarted(world: World, target: str, number: int) -> Iterator[None]:
    """A daemon is killed whenever it has served for a moment."""
    over = threading.Event()

    def again_and_again(node: LocalNode) -> None:
        while not over.wait(SERVES_S):
            world.kill(node)
            world.start(node)

    with (
        world.having(target) as node,
        noted(world, number, "restarts", target),
        ThreadPoolExecutor(1, thread_name_prefix="chaos-restarts") as thread,
    ):
        done = thread.submit(again_and_again, node)
        try:
            yield
        finally:
            over.set()
        done.result()


@contextlib.contextmanager
def stopped(world: World, target: str, number: int) -> Iterator[None]:
    """A daemon and its workers hang."""
    with world.having(target) as node, noted(world, number, "stop", target):
        world.order(node, signal.SIGSTOP, workers=True)
        try:
            yield
        finally:
            world.order(node, signal.SIGCONT, workers=True)


@contextlib.contextmanager
def without_descriptors(world: World, target: str, number: int) -> Iterator[None]:
    """The control process has about as many descriptors as it may have."""
    with world.having(target) as node, noted(world, number, "descriptors", target):
        least = len(os.listdir(f"/proc/{node.pid}/fd")) + SPARE_DESCRIPTORS
        with limited(node.pid, resource.RLIMIT_NOFILE, least):
            yield


@contextlib.contextmanager
def without_memory(world: World, target: str, number: int) -> Iterator[None]:
    """The control process gets no more memory; it may end of that."""
    with (
        world.having(target) as node,
        noted(world, number, "memory", target),
        world.saying_anything(node),
        cramped(world, target, node.pid),
    ):
        yield


@contextlib.contextmanager
def cramped(_world: World, _node: str, pid: int) -> Iterator[None]:
    """A process may map about as much as it has."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        yield
        return
    with limited(pid, resource.RLIMIT_AS, pages * resource.getpagesize() + SPARE_BYTES):
        yield


@contextlib.contextmanager
def limited(pid: int, what: int, most: int) -> Iterator[None]:
    """A process may have no more of something."""
    try:
        usual = resource.prlimit(pid, what)
        resource.prlimit(pid, what, (most, usual[1]))
    except ProcessLookupError:  # it has just ended
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, what, usual)


# ---- workers -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_worker(
    world: World,
    target: str,
    number: int,
    *,
    what: str,
    role: str,
    broken: Callable[[World, str, int], Breaking],
) -> Iterator[None]:
    """One worker of a node is broken: by its node and process. Nothing happens if the daemon does not name one."""
    with world.having(target):
        pid = _worker(world, target, role)
        if pid is None:
            yield
            return
        with noted(world, number, what, target), broken(world, target, pid):
            yield


@contextlib.contextmanager
def on_cramped_worker(
    world: World, target: str, number: int, *, what: str, role: str
) -> Iterator[None]:
    """A worker gets no more memory; it may end of that."""
    cramping = on_worker(world, target, number, what=what, role=role, broken=cramped)
    with world.having(target) as node, world.saying_anything(node), cramping:
        yield


@contextlib.contextmanager
def signalled(world: World, node: str, pid: int, *, first: int, then: int = 0) -> Iterator[None]:
    """A signal, and perhaps another one later."""
    world.order_process(pid, f"{node}/{pid}", first)
    try:
        yield
    finally:
        if then:
            world.order_process(pid, f"{node}/{pid}", then)


@contextlib.contextmanager
def without_room(_world: World, _node: str, pid: int) -> Iterator[None]:
    """The kernel refuses to write to files beyond their first bytes: what a worker gets of a full disk, with EFBIG."""
    with limited(pid, resource.RLIMIT_FSIZE, 1):
        yield


@contextlib.contextmanager
def read_only(world: World, target: str, number: int) -> Iterator[None]:
    """The kernel refuses all that would change a file of the disk, as where a file system turned read-only."""
    refusing = world.refusing[target]
    with noted(world, number, "read-only-disk", target):
        refusing.error = errno.EROFS
        try:
            yield
        finally:
            refusing.error = 0


def _worker(world: World, node: str, role: str) -> int | None:
    """A process of this kind; None: the daemon does not say, since something else is broken."""
    try:
        found = [one.pid for one in world.stats(node).processes if role in one.kind]
    except KvpoolError:
        return None
    return found[0] if found else None


# ---- the network ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_way(
    world: World,
    target: str,
    number: int,
    *,
    what: str,
    broken: Broken,
    proxies_of: Callable[[World, str], Sequence[Proxy]] = lambda world, target: [
        world.proxies[target]
    ],
) -> Iterator[None]:
    """What others say to a target, and hear from it, goes wrong."""
    proxies = proxies_of(world, target)
    with noted(world, number, what, target):
        for proxy in proxies:
            proxy.set(broken)
        try:
            yield
        finally:
            for proxy in proxies:
                proxy.set()
                proxy.cut()  # what was connected to nobody would stay so


@contextlib.contextmanager
def bridge(world: World, target: str, number: int) -> Iterator[None]:
    """Two nodes are cut from each other, and from nobody else."""
    one, other = target.split("-")
    ways = ((world.proxies[one], other), (world.proxies[other], one))
    with noted(world, number, "bridge", target):
        for proxy, caller in ways:
            proxy.set_for(caller, SILENT)
        try:
            yield
        finally:
            for proxy, caller in ways:
                proxy.set_for(caller, None)
                proxy.cut()


# ---- etcd and Redis ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_stopped(
    world: World, target: str, number: int, *, what: str, server_of: Callable[[World], Any]
) -> Iterator[None]:
    """It holds its connections and answers nothing. One member of etcd without answers is no quorum."""
    server = server_of(world)
    with noted(world, number, what, target):
        server.pause()
        try:
            yield
        finally:
            server.resume()


@contextlib.contextmanager
def etcd_killed(world: World, target: str, number: int) -> Iterator[None]:
    """And started again, on its data."""
    with noted(world, number, "etcd-kill", target):
        _end_etcd(world)
        yield
        _begin_etcd(world)


@contextlib.contextmanager
def etcd_restored(world: World, target: str, number: int) -> Iterator[None]:
    """What etcd took meanwhile is gone, revisions included, as after a restore of a snapshot."""
    member = world.cluster.etcd.members[0]
    data = member.folder / member.name
    kept = Path(f"{data}-kept")
    with noted(world, number, "etcd-restored", target):
        _end_etcd(world)
        shutil.copytree(data, kept)
        _begin_etcd(world)
        yield
        _end_etcd(world)
        shutil.rmtree(data)
        kept.rename(data)
        _begin_etcd(world)


def _end_etcd(world: World) -> None:
    member = world.cluster.etcd.members[0]
    assert member.process is not None
    pid = member.process.pid
    world.order_process(pid, "etcd", signal.SIGKILL)
    member.kill()
    world.write(Exited(at=time.monotonic(), pid=pid, who="etcd", role="etcd", status=-9))


def _begin_etcd(world: World) -> None:
    world.cluster.etcd.restart(0)
    process = world.cluster.etcd.members[0].process
    assert process is not None
    world.write(Started(at=time.monotonic(), pid=process.pid, who="etcd", role="etcd"))


@contextlib.contextmanager
def redis_killed(world: World, target: str, number: int) -> Iterator[None]:
    """It comes back empty."""
    redis = world.redis
    with noted(world, number, "redis-kill", target):
        redis.kill()
        yield
        redis.start()


@contextlib.contextmanager
def failed_over(world: World, target: str, number: int) -> Iterator[None]:
    """What the old primary takes until it knows of it is lost."""
    with noted(world, number, "redis-failover", target):
        with contextlib.suppress(
            Unavailable
        ):  # another failover is under way, or no replica is in step
            world.fail_over()
        yield


@contextlib.contextmanager
def redis_told(
    world: World,
    target: str,
    number: int,
    *,
    what: str,
    first: tuple[str, ...],
    then: Sequence[tuple[str, ...]] = (),
) -> Iterator[None]:
    """A command, and perhaps others later."""
    redis = world.redis
    with noted(world, number, what, target):
        redis.command(*first)
        try:
            yield
        finally:
            for words in then:
                redis.command(*words)


# ---- clients -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def clients_killed(world: World, target: str, number: int) -> Iterator[None]:
    """With leases and reservations open; others take their place."""
    with world.having_clients(target) as seat, noted(world, number, "kill-clients", target):
        seat.end(signal.SIGKILL)
        yield
        seat.begin()


@contextlib.contextmanager
def clients_stopped(world: World, target: str, number: int) -> Iterator[None]:
    """An engine hangs, with leases and reservations open."""
    with world.having_clients(target) as seat, noted(world, number, "stop-clients", target):
        seat.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            seat.signal(signal.SIGCONT)


def _way(what: str, broken: Broken) -> Callable[[World, str, int], Breaking]:
    return partial(on_way, what=what, broken=broken)


def _to_etcd(what: str, broken: Broken) -> Callable[[World, str, int], Breaking]:
    return partial(on_way, what=what, broken=broken, proxies_of=lambda world, _: [world.etcd_proxy])


def _to_redis(what: str, broken: Broken) -> Callable[[World, str, int], Breaking]:
    return partial(
        on_way, what=what, broken=broken, proxies_of=lambda world, _: world.redis_proxies
    )


def _signal(
    what: str, role: str, first: int, then: int = 0
) -> Callable[[World, str, int], Breaking]:
    broken = partial(signalled, first=first, then=then)
    return partial(on_worker, what=what, role=role, broken=broken)


FAULTS: dict[str, Callable[[World, str, int], Breaking]] = {
    "kill": partial(ended, what="kill", end=World.kill),
    "stop": stopped,
    "terminate": partial(ended, what="terminate", end=World.terminate),
    "restarts": restarted,
    "descriptors": without_descriptors,
    "memory": without_memory,
    "kill-worker": _signal("kill-worker", "transfer", signal.SIGKILL),
    "stop-worker": _signal("stop-worker", "transfer", signal.SIGSTOP, signal.SIGCONT),
    "memory-worker": partial(on_cramped_worker, what="memory-worker", role="transfer"),
    "kill-disk": _signal("kill-disk", "disk", signal.SIGKILL),
    "hung-disk": _signal("hung-disk", "disk", signal.SIGSTOP, signal.SIGCONT),
    "full-disk": partial(on_worker, what="full-disk", role="disk", broken=without_room),
    "read-only-disk": read_only,
    "memory-disk": partial(on_cramped_worker, what="memory-disk", role="disk"),
    "one-way": _way("one-way", SILENT),
    "unheard": _way("unheard", Broken(hold=frozenset({"down"}))),
    "refused": _way("refused", Broken(refuse=True)),
    "wrong-bytes": _way("wrong-bytes", Broken(flip=("down", 20_000), flip_every=16 << 10)),
    "slow-peer": _way("slow-peer", Broken(delay_s=0.1)),
    "lost": _way("lost", Broken(stop=("down", 100_000), ending="reset")),
    "bridge": bridge,
    "etcd-stop": partial(
        server_stopped, what="etcd-stop", server_of=lambda world: world.cluster.etcd.members[0]
    ),
    "etcd-kill": etcd_killed,
    "etcd-slow": _to_etcd("etcd-slow", Broken(delay_s=0.3)),
    "etcd-refused": _to_etcd("etcd-refused", Broken(refuse=True)),
    "etcd-restored": etcd_restored,
    "redis-stop": partial(server_stopped, what="redis-stop", server_of=lambda world: world.redis),
    "redis-kill": redis_killed,
    "redis-emptied": partial(redis_told, what="redis-emptied", first=("FLUSHALL",)),
    "redis-slow": _to_redis("redis-slow", Broken(delay_s=0.2)),
    "redis-full": partial(
        redis_told,
        what="redis-full",
        first=("CONFIG", "SET", "maxmemory", "1"),
        # Sentinel has a server's settings written to its file.
        then=[("CONFIG", "SET", "maxmemory", "0"), ("CONFIG", "REWRITE")],
    ),
    "redis-forbidden": partial(
        redis_told,
        what="redis-forbidden",
        first=("ACL", "SETUSER", "default", "-@all", "+acl|setuser"),
        then=[("ACL", "SETUSER", "default", "+@all")],
    ),
    "redis-failover": failed_over,
    "kill-clients": clients_killed,
    "stop-clients": clients_stopped,
}
