"""A daemon's start and stop: take sockets and memory, make the parts, and end all in order.

One event loop, one thread: the control process. Bulk bytes never pass through here: clients copy in shared
memory, transfer workers carry blocks between nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import random
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from kvpool.config import DaemonConfig
from kvpool.daemon.cluster.host_topology import HostTopology, look_around
from kvpool.daemon.cluster.joining import open_directory, open_membership, open_secrets
from kvpool.daemon.core.ended_epochs import GARBAGE_BLOCKS
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.audit_file import AuditFile
from kvpool.daemon.ops.receipts import ReceiptsFile
from kvpool.daemon.server.composition import Clocks, Daemon, make_memory_rules
from kvpool.daemon.server.connections import ClientConnections
from kvpool.daemon.server.memory_wait import (
    MemoryWait,
    end_wait,
    last_mappers,
    read_last,
    sizes,
    wait_for_room,
    write_last,
    write_wait,
)
from kvpool.daemon.tiers.device_tier import check_environment
from kvpool.daemon.workers.gateway import Gateway
from kvpool.daemon.workers.transfer_workers import TransferWorkers
from kvpool.errors import AlreadyRunning, ConfigError
from kvpool.memory.segment import Segment
from kvpool.net import raise_descriptor_limit
from kvpool.placement.records import new_incarnation
from kvpool.security.encryption_secrets import EncryptionSecrets
from kvpool.signals import handle_ending
from kvpool.storage.at_rest import check_package
from kvpool.storage.dram import DramSegment, free_memory_bytes
from kvpool.storage.eviction import DEFAULT_POLICY, make_policy
from kvpool.tasks import Tasks
from kvpool.waits import wait_for

log = logging.getLogger("kvpool.daemon")

IDLE_S = 1.0
ETCD_SAY_S = 1.5  # without an answer, before it is said
MEMORY_BYTES_MIN = 1 << 20  # of a tenant: below, not even a few small blocks fit
NOTE_S = 1.0  # between two notes of how much memory is taken

GatewayAnswers = Callable[[list[str]], None]
"""Is told the addresses of the HTTP gateway once it answers there."""

Taking = Callable[[int, int], None]
"""Is told, in another thread, how many bytes of memory are taken of how many, once for each few MiB."""


class Started(NamedTuple):
    """A running daemon's values for callers. others: nodes to pull from."""

    config: DaemonConfig
    memory_bytes: int
    urls: Sequence[str]
    incarnation: str
    others: int


class _Stopped(Exception):
    """The daemon was told to stop while it took memory."""


class Server:
    """One daemon. `serve` runs it until it is told to stop."""

    def __init__(self, config: DaemonConfig) -> None:
        self.config = config
        # Unknown names are reported before any memory is taken.
        make_policy(config.policy or DEFAULT_POLICY, 1)
        for tenant in config.all_tenants():
            if isinstance(tenant.memory, int) and tenant.memory < MEMORY_BYTES_MIN:
                raise ConfigError(
                    f"memory of tenant {tenant.name}: {tenant.memory} bytes are too few for blocks: give at least "
                    f"{MEMORY_BYTES_MIN >> 20}MiB"
                )
        if config.device is not None:
            check_environment()
        self.node = make_memory_rules(config, new_incarnation())
        self.segments: dict[str, Segment] = {}
        self._stop = asyncio.Event()
        self._interrupted = False

    async def run(
        self,
        ready: Callable[[Started], None] | None = None,
        taking: Taking | None = None,
        gateway_answers: GatewayAnswers = lambda _: None,
    ) -> bool:
        """Serve until `stop`, or a signal of `kvpool.signals.ENDING`. `ready` is called once clients can connect.

        Returns whether a SIGINT has stopped it before that.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_crash)
        handle_ending(loop, self._told)
        raise_descriptor_limit()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(os.close, _lock_socket(self.config.socket))
            if self.config.data_dir:
                stack.callback(os.close, _lock_data_dir(self.config.data_dir))
            _warn_of_root(self.config)
            await self._create_segments(stack, taking)
            if self._stop.is_set():
                return self._interrupted
            secrets = open_secrets(self.config)
            encryption = EncryptionSecrets(
                self.config.encryption_secret_file, self.config.encryption_secret_command
            )
            await encryption.open()
            if encryption.current():
                check_package()
            audit = open_audit(self.config)
            if audit is not None:
                stack.callback(audit.close)
            daemon = Daemon(
                self.config,
                self.node,
                open_membership(self.config, secrets.known, time.monotonic),
                await open_directory(self.config),
                self.segments,
                lambda route: TransferWorkers(self.config, self.node.incarnation, secrets, route),
                look_around() if self.config.join else HostTopology(),
                random.Random(self.node.incarnation),
                Clocks(),
                secrets.current,
                encryption.current,
                audit,
                open_receipts(self.config),
            )
            stack.push_async_callback(daemon.transport.stop)
            stack.push_async_callback(close, daemon)
            await daemon.transport.start(daemon.peer_service)
            segments = dict(enumerate(self.segments.values()))
            for segment_id, segment in segments.items():
                await daemon.transport.attach_segment(segment_id, segment)
            gateway = Gateway(self.config, partial(daemon.logins.fail_all, "http"), gateway_answers)
            stack.push_async_callback(gateway.stop)
            tasks = Tasks()
            stack.push_async_callback(tasks.end)
            with _said_if_late(loop, self.config):
                await enter_cluster(daemon, daemon.transport.addresses, tasks)
            if daemon.device is not None:
                daemon.device.start(segments)
            await daemon.objects.start(segments)
            await daemon.ssd.start(segments)
            for path, mode, operators in (
                (self.config.operators_at(), 0o600, True),
                (self.config.socket, self.config.socket_mode, False),
            ):
                listener = _listen(path, mode)
                stack.callback(_stop_listening, daemon.connections, listener, path)
                daemon.connections.listen(listener, operators=operators)
            tasks.begin(encryption.follow(partial(_use_secrets, daemon)))
            _tune_gc()
            if ready is not None:
                ready(
                    Started(
                        self.config,
                        sum(segment.size for segment in segments.values()),
                        daemon.transport.urls,
                        daemon.cluster.incarnation,
                        len(daemon.cluster.living),
                    )
                )
            tasks.begin(gateway.run())  # its line comes after the first one, which programs read
            await self._stop.wait()
            await self._flush(daemon)
        return False

    def _told(self, number: signal.Signals) -> None:
        self._interrupted = self._interrupted or number is signal.SIGINT
        self.stop()

    def stop(self) -> None:
        """End `run`; a second call does not wait for disks."""
        self._stop.set()

    async def _flush(self, daemon: Daemon[TransferWorkers]) -> None:
        """Have lower tiers take blocks that are only in memory. A second stop ends it at once."""
        self._stop.clear()
        seconds = daemon.operators.config.ssd_flush_s
        flush = asyncio.gather(daemon.ssd.flush(seconds), daemon.objects.flush(seconds))
        stop = asyncio.ensure_future(self._stop.wait())
        tasks: list[asyncio.Future[Any]] = [flush, stop]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _create_segments(
        self, stack: contextlib.AsyncExitStack, taking: Taking | None
    ) -> None:
        """One segment a tenant, once there is room for them, or as large as there is after `memory_wait_s`."""
        tenants = self.config.all_tenants()
        socket_path = self.config.socket
        try:
            free = await wait_for_room(
                tenants,
                read_last(socket_path),
                self.config.memory_wait_s,
                free_bytes=self._free_bytes,
                total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
                pause=partial(wait_for, self._stop),
                clock=time.monotonic,
                note=lambda waits: write_wait(socket_path, waits),
                mappers=lambda: last_mappers(socket_path),
            )
        finally:
            end_wait(socket_path)
        if self._stop.is_set():
            return
        planned = sizes(tenants, free)
        try:
            for segment_id, (name, size) in enumerate(planned.items()):
                # A thread: the loop sees a signal meanwhile.
                segment = await asyncio.to_thread(
                    DramSegment.create, size, taken=self._taken(sum(planned.values()), taking)
                )
                stack.callback(segment.close)
                self.segments[name] = segment
                self.node.add_tenant(name, segment_id, segment.size)
        except _Stopped:
            return
        finally:
            end_wait(socket_path)
        write_last(socket_path, tenants, self.segments)

    def _taken(self, wanted: int, taking: Taking | None) -> Callable[[int], None]:
        """For the next segment: tells how far all of them are, and ends it if the daemon is to stop."""
        before = sum(segment.size for segment in self.segments.values())
        note_at = time.monotonic() + NOTE_S

        def taken(nbytes: int) -> None:
            nonlocal note_at
            if self._stop.is_set():
                raise _Stopped
            if taking is not None:
                taking(before + nbytes, wanted)
            if time.monotonic() >= note_at:
                note_at = time.monotonic() + NOTE_S
                write_wait(self.config.socket, MemoryWait(0, 0, 0, 0, before + nbytes, wanted))

        return taken

    def _free_bytes(self) -> int:
        # A daemon that is told to stop waits for nothing.
        return sys.maxsize if self._stop.is_set() else free_memory_bytes()


def _warn_of_root(config: DaemonConfig) -> None:
    for path in on_root([disk.path for disk in config.ssd]):
        log.warning(
            "the SSD folder %s is on the root file system: blocks on it can fill that, up to the given size. If a disk "
            "should be mounted there, it is not",
            path,
            extra={"disk": path},
        )


@contextlib.contextmanager
def _said_if_late(loop: asyncio.AbstractEventLoop, config: DaemonConfig) -> Iterator[None]:
    """Around joining: it waits for etcd longer than people do for a word."""
    hosts = config.join.partition("://")[2].rpartition("@")[2]

    def say() -> None:
        if hosts:
            log.warning("etcd at %s does not answer so far: a node joins before it serves", hosts)

    timer = loop.call_later(ETCD_SAY_S, say)
    try:
        yield
    finally:
        timer.cancel()


def _use_secrets(daemon: Daemon[TransferWorkers]) -> None:
    daemon.ssd.use_secrets()
    daemon.objects.use_secrets()


def open_audit(config: DaemonConfig) -> AuditFile | None:
    """The audit file, if there is to be one. Raises `ConfigError`."""
    if not config.audit_file:
        return None
    return AuditFile(Path(config.audit_file), config.audit_file_bytes, config.audit_files)


def open_receipts(config: DaemonConfig) -> ReceiptsFile | None:
    """Where tenants' accounts are kept, if they are. Raises `ConfigError`."""
    if not config.data_dir or not config.receipts_bytes:
        return None
    try:
        return ReceiptsFile(Path(config.data_dir), config.receipts_bytes)
    except OSError as error:
        raise ConfigError(f"data_dir: cannot open {error.filename}: {error.strerror}") from None


def _stop_listening(connections: ClientConnections, listener: socket.socket, path: str) -> None:
    connections.ignore(listener)
    listener.close()
    _unlink_socket(path)


def on_root(paths: Sequence[str], root: str = "/") -> list[str]:
    """Those of the folders that are on the root file system, or would be when they are created in their parent."""
    device = os.stat(root).st_dev
    found = []
    for path in paths:
        for place in (path, os.path.dirname(path)):
            with contextlib.suppress(OSError):
                if os.stat(place).st_dev == device:
                    found.append(path)
                break
    return found


async def enter_cluster(daemon: Daemon[Any], urls: Sequence[str], tasks: Tasks) -> None:
    """Become a member, and start a member's background tasks. urls: where peers reach this node."""
    daemon.publisher.begin()
    await daemon.cluster.start(urls, daemon.local)
    daemon.ssd.begin()
    for work in (
        daemon.replication.replicate(),
        daemon.replication.forward(),
        daemon.expiry.run(),
        daemon.features.hot_prefixes.run(),
        daemon.features.miss_reasons.run(),
        daemon.features.sampler.run(),
        daemon.sessions.run(),
        daemon.receipts.run(),
        daemon.prefetcher.run(),
        daemon.intents.run(),
        daemon.prober.run(daemon.operators.config.probe_s),
        _reclaim_garbage(daemon.node),
    ):
        tasks.begin(work)


async def close(daemon: Daemon[Any]) -> None:
    """End all parts but the transport, users before the parts that they use."""
    await daemon.connections.close()
    daemon.reads.close()
    daemon.receipts.close()
    await daemon.engines.close()
    await daemon.publisher.close()
    await daemon.operators.close()
    await daemon.drainer.close()
    await daemon.streams.close()
    daemon.fetcher.close()
    await daemon.objects.close()
    await daemon.cluster.close()
    await daemon.ssd.close()
    if daemon.device is not None:
        await daemon.device.close()


async def _reclaim_garbage(node: Node) -> None:
    """Free slots of ended epochs and blocks above quotas, a few at a time."""
    while True:
        node.ended_epochs.reclaim(GARBAGE_BLOCKS)
        more = node.quotas.tend(GARBAGE_BLOCKS)
        await asyncio.sleep(0 if more or node.ended_epochs else IDLE_S)


def serve(
    config: DaemonConfig,
    ready: Callable[[Started], None] | None = None,
    taking: Taking | None = None,
    gateway_answers: GatewayAnswers = lambda _: None,
) -> None:
    """Run a daemon in this process until a signal of `kvpool.signals.ENDING`.

    Raises `KvpoolError` if it cannot start, and `KeyboardInterrupt` if a SIGINT has stopped it before it served.
    """

    async def main() -> bool:
        return await Server(config).run(ready, taking, gateway_answers)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        interrupted = runner.run(main())
    if interrupted:
        raise KeyboardInterrupt


def _crash(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback raised an unexpected error: the rules may be broken. End the process.

    Clients see the socket close, and recompute; a supervisor starts a new incarnation.
    """
    error = context.get("exception")
    log.critical("%s", context.get("message"), exc_info=error)
    sys.stderr.flush()
    os._exit(70)


def _tune_gc() -> None:
    """Keep the cyclic collector from walking long-lived objects.

    A full collection with a million blocks known stalls every request; blocks are untracked
    (`gc=False`) and make no cycles, so only young objects are worth collecting.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 1_000_000)


def _lock(path: str, what: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise AlreadyRunning(
            f"another kvpool daemon (process {owner or 'unknown'}) uses the {what}. Stop it, or choose another path."
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _lock_socket(path: str) -> int:
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return _lock(f"{path}.lock", f"socket {path}")
    except OSError as error:
        raise ConfigError(f"cannot use the socket path {path}: {error.strerror}") from None


def _lock_data_dir(path: str) -> int:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return _lock(os.path.join(path, "lock"), f"data directory {path}")
    except OSError as error:
        raise ConfigError(f"cannot use the data directory {path}: {error.strerror}") from None


def _listen(path: str, mode: int) -> socket.socket:
    """Bind a control socket. The caller holds its lock, so an existing socket is a dead daemon's."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(mask)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def _unlink_socket(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # another process has removed it
