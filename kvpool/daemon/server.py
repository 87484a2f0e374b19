"""The control process: sockets on one side, the rules (`node.py`) on the other.

One event loop, one thread. Clients speak `kvpool.wire` over a unix socket; each gets its tenant's
segment as a descriptor with the first answer. Bulk bytes never pass through here: clients copy in shared
memory, movers (`movers.py`) carry blocks between nodes.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import logging
import math
import os
import random
import secrets
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import CoroutineType
from typing import Any, cast

import msgspec
import uvloop

from kvpool import __version__, wire
from kvpool.config import DaemonConfig
from kvpool.daemon.announced import Announced, describe
from kvpool.daemon.blocks import (
    Block,
    Holder,
    Lease,
    Limits,
    NamespaceState,
    PartTable,
    Tenant,
)
from kvpool.daemon.cluster import Cluster
from kvpool.daemon.copies import Copies
from kvpool.daemon.devices import DeviceTier, check_environment
from kvpool.daemon.draining import Drainer
from kvpool.daemon.engines import Engines, zmq_subscribe
from kvpool.daemon.expiry import Expiry
from kvpool.daemon.follows import Follows
from kvpool.daemon.gateway import Gateway
from kvpool.daemon.heat import Heat
from kvpool.daemon.joining import open_directory, open_membership
from kvpool.daemon.journal import Journal, membership_news
from kvpool.daemon.lending import Lender
from kvpool.daemon.movers import Movers
from kvpool.daemon.node import Node
from kvpool.daemon.operators import KEYS_BYTES_MAX, Operators, asking_others
from kvpool.daemon.prefixes import prefixes
from kvpool.daemon.probing import Prober
from kvpool.daemon.processes import family, peer_pid, peer_pidfd, peer_uid
from kvpool.daemon.remote import NOT_NODES, Remote
from kvpool.daemon.requests import parse_parts, parse_wish, rows
from kvpool.daemon.sampling import Sampler
from kvpool.daemon.shelf import TableRecord
from kvpool.daemon.space import OWN, Origin
from kvpool.daemon.store_tier import StoreTier
from kvpool.daemon.surroundings import look_around
from kvpool.daemon.tasks import Tasks
from kvpool.daemon.tiers import Tiers
from kvpool.daemon.tracing import TRACED, traced
from kvpool.descriptors import raise_descriptor_limit
from kvpool.errors import (
    AlreadyRunning,
    ConfigError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    PoolFull,
    ProtocolError,
)
from kvpool.placement.directory import TIERS, Directory
from kvpool.placement.membership import Membership
from kvpool.placement.records import (
    NamespaceSettings,
    NodeState,
    View,
    new_incarnation,
    quota_bytes,
)
from kvpool.placement.sources import Peers
from kvpool.segment import Segment
from kvpool.spans import Spans
from kvpool.storage.dram import PAGE, DramSegment, free_memory_bytes
from kvpool.storage.eviction import DEFAULT_POLICY, Costs, make_policy
from kvpool.storage.stack import dram_costs, ssd_costs
from kvpool.types import KEY_BYTES, Recompute, split_keys

log = logging.getLogger("kvpool.daemon")

HELLO_TIMEOUT_S = 5.0
EXPIRY_TICK_S = 0.02  # leases end at most this much after their deadline
ACCEPT_PAUSE_S = 0.1  # before the next try, when there are no descriptors left
WRITE_BUFFER_BYTES = (
    1 << 20
)  # answers that a client has not read before its requests are left waiting
WAITING_MAX = 64  # requests of one connection that wait for other nodes
IDLE_S = 1.0
GARBAGE_BLOCKS = 500  # of ended epochs, given back in one go: about a millisecond


class ClientHandle:
    """One client: its connections, what it holds, and the process it lives in."""

    def __init__(self, holder: Holder, pid: int, pidfd: int) -> None:
        self.holder = holder
        self.pid = pid
        self.pidfd = pidfd
        self.connections: set[ClientConnection] = set()


class Server:
    """One daemon. `serve` runs it until it is told to stop."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.config = config
        self.incarnation = new_incarnation()
        self.clock = clock
        self._policy = config.policy or DEFAULT_POLICY
        make_policy(self._policy, 1)  # an unknown name is told before any memory is taken
        if config.device is not None:
            check_environment()
        self.node = self._make_rules(dram_costs(disks=bool(config.ssd)))
        self.segments: dict[str, Segment] = {}
        self.clients: dict[tuple[str, str], ClientHandle] = {}
        self.refused = 0
        self._tokens = {tenant.name: tenant.token for tenant in config.all_tenants()}
        self._loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by `run`
        self._stop = asyncio.Event()
        self._tasks = Tasks()
        self._expiry: asyncio.TimerHandle | None = None
        self._expiry_due = math.inf
        self._connections = 0
        self._settling = False
        self._released: list[tuple[Holder, str]] = []
        self._asked_grants: list[tuple[Holder, NamespaceState, int, int]] = []
        self._started = clock()
        self.movers: Movers
        self.cluster: Cluster
        self.remote: Remote
        self.follows: Follows
        self.tiers: Tiers
        self.store: StoreTier
        self.device: DeviceTier | None = None
        self.engines: Engines
        self.announced = Announced(config.engines_max)
        self.copies: Copies
        self.expiry: Expiry
        self.sampler: Sampler
        self._drainer: Drainer
        self.operators: Operators
        self._gateway: Gateway
        self.journal = Journal(config.node, wall)
        self.spans = Spans(wall_ns, secrets.token_bytes, on=bool(config.otlp))
        self.heat = Heat()
        self._handlers: dict[type, Callable[[Holder, Any], Any]] = {
            wire.OpenNamespace: self._open_namespace,
            wire.Reserve: self._reserve,
            wire.Commit: self._commit,
            wire.Progress: self._progress,
            wire.Abort: self._abort,
            wire.Acquire: self._acquire,
            wire.Join: self._join,
            wire.Release: self._release,
            wire.Match: self._match,
            wire.Contains: self._contains,
            wire.Remove: self._remove,
            wire.Pin: self._pin,
            wire.Stats: self._stats,
            wire.Pull: self._pull,
            wire.Grant: self._grant,
            wire.Store: self._store,
            wire.GiveBack: self._give_back,
            wire.Reset: self._reset,
            wire.FollowEvents: self._follow_events,
            wire.Follow: self._follow,
            wire.AnnounceEngine: self._announce_engine,
            wire.Engines: self._describe_engines,
            wire.Prefixes: self._prefixes,
        }
        if self.spans.on:
            for kind, name in TRACED.items():
                self._handlers[kind] = traced(self.spans, name, self._handlers[kind])

    def _make_rules(self, costs: Costs) -> Node:
        """Rules of a tier, with nothing in it."""
        return Node(
            make_policy=lambda capacity: make_policy(self._policy, capacity, costs),
            limits=Limits(
                lease_s_max=self.config.lease_s_max,
                waiters_max=max(
                    1, self.config.peers_max // 2
                ),  # the other connections are for pulls
            ),
            incarnation=self.incarnation,
        )

    # ---- life --------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[Server], None] | None = None) -> None:
        """Serve until `stop` or SIGTERM/SIGINT. `ready` is called once clients can connect."""
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(_crash)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        raise_descriptor_limit()
        locks = [_lock_socket(self.config.socket)]
        listener: socket.socket | None = None
        try:
            if self.config.data_dir:
                locks.append(_lock_data_dir(self.config.data_dir))
            self._create_segments()
            self.movers = Movers(self.config, self.incarnation)
            self._wire_up(
                open_membership(self.config, self.clock),
                await open_directory(self.config),
                random.Random(self.incarnation),
            )
            await self.movers.start()
            self.cluster.path_to = self.movers.paths.path
            if self.config.join:
                self.cluster.surroundings = look_around()
            for segment_id, tenant in enumerate(self.segments):
                await self.movers.attach_segment(segment_id, self.segments[tenant])
            await self._enter_cluster()
            if self.device is not None:
                self.device.start(dict(enumerate(self.segments.values())))
            await self.store.start(dict(enumerate(self.segments.values())))
            await self.tiers.start(dict(enumerate(self.segments.values())))
            listener = _listen(self.config.socket, self.config.socket_mode)
            loop.add_reader(listener.fileno(), self._accept, listener)
            self._gateway = Gateway(self.config)
            self._tasks.begin(self._gateway.run())
            _tune_gc()
            if ready is not None:
                ready(self)
            await self._stop.wait()
            await self._flush()
        finally:
            if listener is not None:
                loop.remove_reader(listener.fileno())
                listener.close()
                _unlink_socket(self.config.socket)
            await self._close()
            for lock in reversed(locks):
                os.close(lock)

    def _wire_up(
        self,
        membership: Membership,
        directory: Directory | None,
        rng: random.Random,
        next_incarnation: Callable[[], str] = new_incarnation,
    ) -> None:
        """Make what this node is to others, and introduce them to each other. rng: spreads ties only."""
        config, node, clock = self.config, self.node, self.clock
        peers = Peers(config.labels, rng, apart=NOT_NODES)
        self.cluster = Cluster(
            config, node, membership, directory, peers, clock, rng, next_incarnation
        )
        self.tiers = Tiers(config, node, clock, lambda: self._make_rules(ssd_costs()), self._adopt)
        self.store = StoreTier(config, node, self.cluster, clock)
        if config.device is not None:
            self.device = DeviceTier(
                config.device,
                node,
                clock,
                lambda: self._make_rules(dram_costs(disks=bool(config.ssd))),
            )
        self.remote = Remote(
            node, self.movers, self.cluster, self.tiers, self.store, peers, clock, self.device
        )
        self.follows = Follows(node, self.remote, self.movers, self.cluster, clock, config.node)
        self.copies = Copies(node, self.cluster, self.remote, self.movers, clock)
        self.expiry = Expiry(lambda: (node, *self._rules_below()), self._ttl_s, clock)
        self.sampler = Sampler(self._rules_by_tier, clock)
        self._drainer = Drainer(node, self.cluster, self.copies, self.tiers, clock)
        self.cluster.drain = self._drainer.wanted
        self.cluster.configured += [self._limit, self.tiers.limit]
        if self.tiers.shelves:
            self.cluster.holdings[TIERS["ssd"]] = self.tiers
            self.cluster.lower_tiers = self.tiers.records
            self.cluster.entered.append(self.tiers.enter)
            self.cluster.keep_epoch = self.tiers.record
        if self.device is not None:
            below, device = self.cluster.lower_tiers, self.device
            self.cluster.lower_tiers = lambda: (*below(), device.record())
            self.cluster.holdings[TIERS["device"]] = device
            self.cluster.entered.append(device.enter)
        self.engines = Engines(
            config,
            node,
            (node, self.tiers) if self.device is None else (node, self.tiers, self.device),
            zmq_subscribe(clock) if config.events else None,
            lambda: self.cluster.announce(TIERS["gpu"], self.engines),
        )
        self.cluster.entered += [self.engines.enter, self.store.enter]
        self.cluster.engines = self.announced.records
        self.cluster.lost_nodes.append(self.copies.repair)
        self.operators = Operators(
            config,
            node,
            self.cluster,
            self.tiers,
            self.store,
            self.device,
            self.remote,
            self.engines,
            self.movers,
            self.journal,
            clock,
            stats=self._all_stats,
            pin=self._pin_everywhere,
            tune=self._tune,
            spans=self.spans,
        )
        for kind in self.operators.requests:
            self._handlers[kind] = self.operators.bare
        self._handlers[wire.OnNode] = self.operators.on_node
        self.cluster.viewed = self._tell_news
        self.movers.route = self.cluster.route
        self.movers.source = Lender(
            node,
            self.remote,
            clock,
            may_serve=self.cluster.may_serve,
            stale=self.cluster.stale,
            take=self.copies.take,
            stores=lambda: self.cluster.state is NodeState.SERVING,
            operate=self.operators.operated,
            spans=self.spans,
        )

    async def _enter_cluster(self) -> None:
        """Become a member, and begin what a member does beside its requests."""
        await self.cluster.start(self.movers.addresses)
        self.tiers.begin()
        for work in (
            self.copies.replicate(),
            self.copies.forward(),
            self.expiry.run(),
            self.heat.run(),
            self.sampler.run(),
            Prober(self.movers, self.cluster, self.remote.peers, self.clock).run(
                self.config.probe_s
            ),
            self._reclaim_garbage(),
        ):
            self._tasks.begin(work)

    async def _adopt(self, record: TableRecord) -> NamespaceState | None:
        """What a disk remembers of a namespace is made known; None if there is no such tenant now."""
        tenant = self.node.tenants.get(record.tenant)
        if tenant is None:
            return None
        try:
            specs = parse_parts(record.base, record.fields, record.parts)
            return await self.cluster.adopt(
                tenant,
                record.base,
                record.fields,
                specs,
                record.epoch,
                record.generation,
                record.settings,
            )
        except KvpoolError as error:
            log.warning(
                "what a disk holds of namespace %s is dropped: %s", record.base.hex(), error
            )
            return None

    def _rules_below(self, tier: str = "") -> list[Node]:
        """Of the slots in tiers below memory, or in one of them."""
        rules = self.tiers.rules() if tier in {"", "ssd"} else []
        if self.device is not None and tier in {"", "device"}:
            rules.append(self.device.rules)
        return rules

    def _rules_by_tier(self) -> Iterator[tuple[str, Node]]:
        yield "dram", self.node
        for tier in ("ssd", "device"):
            for rules in self._rules_below(tier):
                yield tier, rules

    def _ttl_s(self, namespace: NamespaceState) -> float:
        """How long blocks live unused; asked about any tier's state of a namespace."""
        known = self.node.by_directory(namespace.directory_digest)
        return 0.0 if known is None else known.settings.ttl_s

    def _limit(self, namespace: NamespaceState) -> None:
        """Have a namespace keep to what it may hold in memory."""
        size = namespace.tenant.allocator.size
        self.node.set_quota(namespace, quota_bytes(namespace.settings.dram_quota, size))

    async def _reclaim_garbage(self) -> None:
        """Give slots of ended epochs back, and what is too much by a quota, a few at a time."""
        while True:
            self.node.reclaim_garbage(GARBAGE_BLOCKS)
            more = self.node.tend_quotas(GARBAGE_BLOCKS)
            await asyncio.sleep(0 if more or self.node.has_garbage else IDLE_S)

    async def _flush(self) -> None:
        """Have lower tiers take what is only in memory. Told to stop once more, it ends at once."""
        self._stop.clear()
        work = (self._flush_tiers(self.config.ssd_flush_s), self._stop.wait())
        tasks = [self._loop.create_task(each) for each in work]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _flush_tiers(self, seconds: float) -> None:
        await asyncio.gather(self.tiers.flush(seconds), self.store.flush(seconds))

    def stop(self) -> None:
        """End `run`; a second time, without waiting for disks."""
        self._stop.set()

    async def _close(self) -> None:
        await self._tasks.end()
        if hasattr(self, "_gateway"):
            await self._gateway.stop()
        for handle in list(self.clients.values()):
            for connection in list(handle.connections):
                connection.close()
            self._forget(handle)
        if self._expiry is not None:
            self._expiry.cancel()
        if hasattr(self, "engines"):
            await self.engines.close()
        if hasattr(self, "cluster"):
            await self.operators.close()
            await self._drainer.close()
            await self.follows.close()
            self.remote.close()
            await self.store.close()
            await self.cluster.close()
        if hasattr(self, "tiers"):
            await self.tiers.close()
        if self.device is not None:
            await self.device.close()
        if hasattr(self, "movers"):
            await self.movers.stop()
        for segment in self.segments.values():
            segment.close()

    def _create_segments(self) -> None:
        """One segment a tenant. Shares are of the memory that is free before the first one."""
        free = free_memory_bytes()
        for segment_id, tenant in enumerate(self.config.all_tenants()):
            size = tenant.memory if isinstance(tenant.memory, int) else int(free * tenant.memory)
            size -= size % PAGE
            self.segments[tenant.name] = DramSegment.create(size)
            self.node.add_tenant(tenant.name, segment_id, size)

    # ---- connections -------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                self.refused += 1
                # It stays in the queue, and the listener readable: look again a little later.
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again, listener)
                return
            raise
        if self._connections >= self.config.clients_max:
            self.refused += 1
            full = LimitExceeded(
                f"{self._connections} connections are open on this node, the limit (clients_max)"
            )
            _send_now(sock, wire.encode(wire.error_message(full), 0))
            sock.close()
            return
        sock.setblocking(False)
        self._connections += 1
        self._tasks.begin(self._introduce(sock))

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def _introduce(self, sock: socket.socket) -> None:
        """Hello, Welcome; from there on the connection is a `ClientConnection`'s."""
        reader = wire.FrameReader(wire.HELLO_BYTES_MAX)
        request = 0
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                frames: list[tuple[int, bytes]] = []
                while not frames:
                    data = await self._loop.sock_recv(sock, wire.HELLO_BYTES_MAX)
                    if not data:
                        raise ProtocolError("the connection ended before its Hello")
                    frames = reader.feed(data)
            request, payload = frames[0]
            hello = wire.decode_client(payload)
            if not isinstance(hello, wire.Hello) or len(frames) > 1 or reader.partial:
                raise ProtocolError("the first frame is a Hello, and its answer is waited for")
            handle = self._admit(hello, sock)
            connection = ClientConnection(self, handle)
            handle.connections.add(connection)
        except (TimeoutError, OSError):
            self._connections -= 1
            self.refused += 1
            sock.close()
            return
        except KvpoolError as error:
            self._connections -= 1
            self.refused += 1
            _send_now(sock, wire.encode(wire.error_message(error), request))
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        segment = self.segments[hello.tenant]
        fds, memory, life = [segment.fd], b"", 0
        if hello.device and self.device is not None:
            try:
                exported = await self.device.export(handle.holder.tenant)
            except BaseException:
                sock.close()
                raise
            if exported is not None:
                memory, life, life_fd = exported
                fds.append(life_fd)
        welcome = wire.Welcome(
            wire.agree(hello.version, hello.oldest, "the client"),
            self.config.node,
            self.incarnation,
            handle.holder.tenant.segment,
            segment.size,
            memory,
            life,
        )
        try:
            socket.send_fds(sock, [wire.encode(welcome, request)], fds)
        except OSError:
            sock.close()
            self.connection_lost(connection)
            return
        await self._loop.connect_accepted_socket(lambda: connection, sock)

    def _admit(self, hello: wire.Hello, sock: socket.socket) -> ClientHandle:
        wire.agree(hello.version, hello.oldest, "the client")
        expected = self._tokens.get(hello.tenant)
        if hello.tenant not in self._tokens or (
            expected is not None
            and not secrets.compare_digest((hello.token or "").encode(), expected.encode())
        ):
            raise NotAuthenticated(
                "no such tenant, or a wrong token for it: check tenant and token of this client"
            )
        if not 0 < len(hello.client) <= 64 or len(hello.instance) > 256:
            raise InvalidRequest("a client's id has 1 to 64 characters, an instance's at most 256")
        pid = peer_pid(sock)
        handle = self.clients.get((hello.tenant, hello.client))
        if handle is not None:
            if handle.pid != pid or handle.holder.instance != hello.instance:
                raise NotAuthenticated("this client id belongs to another process or instance")
            return handle
        if len(self.clients) >= self.config.clients_max:
            raise LimitExceeded(
                f"{len(self.clients)} clients are known here, the limit (clients_max)"
            )
        pidfd = peer_pidfd(sock)
        if pidfd is None:
            raise ProtocolError("the client's process has ended")
        holder = self.node.add_holder(hello.tenant, hello.instance, hello.client)
        holder.uid = peer_uid(sock)
        holder.operator = self._is_operator(hello, holder.uid)
        handle = ClientHandle(holder, pid, pidfd)
        self.clients[hello.tenant, hello.client] = handle
        self._loop.add_reader(pidfd, self._process_died, handle)
        return handle

    def _is_operator(self, hello: wire.Hello, uid: int) -> bool:
        if uid not in {0, os.getuid()}:
            return False
        expected = self.config.operator_token.encode()
        return not expected or secrets.compare_digest(hello.operator.encode(), expected)

    def _process_died(self, handle: ClientHandle) -> None:
        for connection in list(handle.connections):
            connection.close()
        self._forget(handle)

    def _forget(self, handle: ClientHandle) -> None:
        if self.clients.pop((handle.holder.tenant.name, handle.holder.name), None) is None:
            return
        self._loop.remove_reader(handle.pidfd)
        os.close(handle.pidfd)
        self.engines.forget(handle.holder)
        self.announced.forget(handle.holder)
        self.node.holder_died(handle.holder)

    def connection_lost(self, connection: ClientConnection) -> None:
        """A socket closed. What its client holds stays held: only its process's death ends that."""
        self._connections -= 1
        handle = connection.handle
        handle.connections.discard(connection)
        holder = handle.holder
        if not handle.connections:
            for stride, rows in holder.ready.items():
                self.node.give_back(holder, stride, rows)  # the client was never told of them
            holder.ready.clear()
            told = self.engines.follows(holder) or self.announced.has(holder)
            if holder.idle and not told:
                self._forget(handle)

    # ---- requests ------------------------------------------------------------------------------------

    def handle(self, holder: Holder, message: wire.Message) -> Any:
        """The answer to one request, or a coroutine that returns it. Raises `KvpoolError`."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a {type(message).__name__} in the middle of a connection")
        if self._released and type(message) not in _INDIFFERENT_TO_RELEASES:
            self._release_now()
        return handler(holder, message)

    def _namespace(self, holder: Holder, number: int, keys: bytes) -> NamespaceState:
        if len(keys) > KEYS_BYTES_MAX:
            raise LimitExceeded(
                f"{len(keys) // 16} keys in one request; the limit is {wire.KEYS_MAX}"
            )
        namespace = self.node.namespace(holder.tenant, number)
        self.engines.saw(namespace, keys)
        return namespace

    def _open_namespace(
        self, holder: Holder, m: wire.OpenNamespace
    ) -> Coroutine[Any, Any, wire.Opened]:
        specs, wish = parse_parts(m.digest, m.fields, m.parts), parse_wish(m)
        namespace = self.node.open_namespace(holder.tenant, m.digest, m.fields, specs)
        return self._agree(namespace, wish, m.generation)

    async def _agree(
        self, namespace: NamespaceState, wish: NamespaceSettings, generation: int
    ) -> wire.Opened:
        if self.config.join:
            known = await self.cluster.register(namespace, wish)
        else:
            known = await self.cluster.fill_in(namespace, wish)
        return await self.cluster.opened(known, generation)

    def _check_open(self) -> None:
        if self.cluster.state is not NodeState.SERVING:
            raise PoolFull(
                f"node {self.config.node} is {self.cluster.state}: it stores nothing new. "
                f"`kvpool drain {self.config.node} --cancel` takes that back"
            )

    def _reserve(self, holder: Holder, m: wire.Reserve) -> wire.Reserved:
        self._check_open()
        namespace = self._namespace(holder, m.ns, m.keys)
        try:
            answer = self.node.reserve(holder, namespace, m.part, m.ticket, m.keys, m.parent)
        except PoolFull:
            # Leases may have ended since the last look at the clock.
            self.node.expire(self.clock())
            answer = self.node.reserve(holder, namespace, m.part, m.ticket, m.keys, m.parent)
        return wire.Reserved(*answer)

    def _commit(self, holder: Holder, m: wire.Commit) -> wire.Done:
        indices = None
        if m.indices:
            indices = rows(m.indices)
        origin = Origin(copies=m.copies) if m.copies else OWN
        reservation = holder.reservations.get(m.ticket)
        stored = self.node.commit(holder, m.ticket, m.checksums, indices, origin)
        if stored and reservation is not None:
            namespace, part = reservation.table.namespace, reservation.table.part
            _count_put(reservation.table, stored)
            self.copies.want(namespace, reservation.keys, m.copies)
            self.tiers.stored(namespace, part, lambda: reservation.keys)
        return wire.Done(stored)

    def _progress(self, holder: Holder, m: wire.Progress) -> wire.Done:
        self.node.written(holder, m.ticket, m.nbytes)
        return wire.Done()

    def _grant(self, holder: Holder, m: wire.Grant) -> wire.Reserved:
        self._check_open()
        namespace = self.node.namespace(holder.tenant, m.ns)
        granted = self.node.grant(holder, namespace, m.part, min(m.count, wire.KEYS_MAX))
        return wire.Reserved(namespace.tables[m.part].stride, wire.pack_rows(granted))

    def _store(self, holder: Holder, m: wire.Store) -> wire.Stored:
        self._check_open()
        namespace = self._namespace(holder, m.ns, m.keys)
        origin = Origin(copies=m.copies) if m.copies else OWN
        new, unused = self.node.store(
            holder, namespace, m.part, rows(m.rows), m.keys, m.checksums, m.parent, origin
        )
        if new and (m.copies or namespace.settings.replicas) > 1:
            self.copies.want(namespace, split_keys(m.keys), m.copies)
        if new:
            _count_put(namespace.tables[m.part], new)
            self.tiers.stored(namespace, m.part, lambda: split_keys(m.keys))
        fresh: list[int] = []
        if m.count > 0:
            # What was made ready after the last answer; this one's wish is seen to after this answer.
            stride = namespace.tables[m.part].stride
            granted = holder.granted.get(stride, set())
            fresh = [row for row in holder.ready.pop(stride, fresh) if row in granted]
            self._asked_grants.append((holder, namespace, m.part, min(m.count, wire.KEYS_MAX)))
        return wire.Stored(new, wire.pack_rows(unused), wire.pack_rows(fresh))

    def _give_back(self, holder: Holder, m: wire.GiveBack) -> wire.Done:
        if m.stride:
            self.node.give_back(holder, m.stride, rows(m.rows))
        else:
            self.node.give_all_back(holder)
        return wire.Done()

    def _abort(self, holder: Holder, m: wire.Abort) -> wire.Done:
        for ticket in m.tickets:
            self.node.abort(holder, ticket)
        return wire.Done(len(m.tickets))

    def _acquire(
        self, holder: Holder, m: wire.Acquire
    ) -> wire.Leased | Coroutine[Any, Any, wire.Leased]:
        namespace = self._namespace(holder, m.ns, m.keys)
        asked_at = self.clock()
        if m.scattered and (m.life or len(m.parts) != 1):
            raise InvalidRequest("a scattered acquire is of one part, and not for device memory")
        if m.wait_s > 0 and self.remote.active:
            here = self._here(namespace, m)
            if here * KEY_BYTES < len(m.keys):
                return self._acquire_with_pull(holder, namespace, m, asked_at, here)
        return self._acquire_now(holder, namespace, m, asked_at)

    def _here(self, namespace: NamespaceState, m: wire.Acquire) -> int:
        """How many of the blocks that are asked for are where their reader reads them."""
        if m.scattered:
            return self.node.contains(namespace, m.parts[0], m.keys).count(1)
        direct = self._direct(m) is not None
        return self.remote.match(namespace, m.parts, m.keys, direct=direct)

    def _direct(self, m: wire.Acquire | wire.Pull) -> DeviceTier | None:
        """The spare device memory, if it is what the client has attached to and reads by itself."""
        device = self.device
        return device if device is not None and m.life and m.life == device.life else None

    def _acquire_now(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: wire.Acquire,
        asked_at: float,
        here: int = wire.KEYS_MAX,
    ) -> wire.Leased:
        """here: at most how many of the blocks could have been had without a wait."""
        now = self.clock()
        counters, before = self.node.counters, self.node.counters.leased_bytes
        direct = self._direct(m)
        if direct is not None:
            lease = direct.acquire(holder, namespace, m.parts, m.keys, m.lease_s, now)
        else:
            lease = self.node.acquire(
                holder, namespace, m.parts, m.keys, m.lease_s, now, scattered=m.scattered
            )
        reads = holder.tenant.traffic.reads
        reads.requests += 1
        reads.asked += len(m.keys) // KEY_BYTES
        if lease is None:
            return _NOTHING_LEASED
        reads.got += lease.blocks
        reads.nbytes += counters.leased_bytes - before
        if here < lease.blocks:
            reads.brought += lease.blocks - here
        if lease.beside is not None:
            holder.tenant.traffic.device_read_bytes += lease.beside.nbytes
        if lease.deadline is not None:
            self._expire_by(lease.deadline, now)
        if self.device is not None:
            self.device.was_read(lease)
        if not m.scattered:
            self.heat.read(namespace, m.keys, lease.blocks)
        return describe_lease(lease, lease.parts, asked_at, m.keys if m.scattered else None)

    async def _acquire_with_pull(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: wire.Acquire,
        asked_at: float,
        here: int,
    ) -> wire.Leased:
        wait_s = min(m.wait_s, self.config.lease_s_max)
        if m.scattered:
            await self.remote.pull_each(namespace, m.parts, m.keys, wait_s)
        else:
            direct = self._direct(m) is not None
            recompute = _recompute(m)
            await self.remote.pull(namespace, m.parts, m.keys, wait_s, recompute, direct=direct)
        self.remote.delivered.waits.add(self.clock() - asked_at)
        return self._acquire_now(holder, namespace, m, asked_at, here)

    def _join(self, holder: Holder, m: wire.Join) -> wire.Leased:
        if len(set(m.parts)) != len(m.parts):
            raise InvalidRequest("a part is named twice")
        now = self.clock()
        lease = self.node.join(holder, m.token, now)
        if lease is None:
            return _NOTHING_LEASED
        try:
            return describe_lease(lease, m.parts or lease.parts, now, None)
        except InvalidRequest:
            self.node.release(holder, m.token)
            raise

    def _release(self, holder: Holder, m: wire.Release) -> wire.Done:
        # Nobody waits for it: done when the answers to what came with it are on their way.
        self._released += [(holder, token) for token in m.tokens]
        return wire.Done(len(m.tokens))

    def _release_now(self) -> None:
        released, self._released = self._released, []
        for holder, token in released:
            self.node.release(holder, token)

    def _match(self, holder: Holder, m: wire.Match) -> wire.Done:
        found = self.node.match(self._namespace(holder, m.ns, m.keys), m.parts, m.keys)
        matches = holder.tenant.traffic.matches
        matches.requests += 1
        matches.asked += len(m.keys) // KEY_BYTES
        matches.got += found
        return wire.Done(found)

    def _contains(self, holder: Holder, m: wire.Contains) -> wire.Bytes:
        return wire.Bytes(self.node.contains(self._namespace(holder, m.ns, m.keys), m.part, m.keys))

    def _remove(self, holder: Holder, m: wire.Remove) -> wire.Done | Coroutine[Any, Any, wire.Done]:
        namespace = self._namespace(holder, m.ns, m.keys)
        gone = max(self.node.remove(namespace, m.keys), self.tiers.remove(namespace, m.keys))
        if self.device is not None:
            gone = max(gone, self.device.remove(namespace, m.keys))
        if self.config.remote:
            return self._remove_beyond(namespace, m.keys, gone)
        return wire.Done(gone)

    async def _remove_beyond(
        self, namespace: NamespaceState, packed: bytes, gone: int
    ) -> wire.Done:
        with asking_others():
            return wire.Done(max(gone, await self.store.remove(namespace, packed)))

    async def _pin(self, holder: Holder, m: wire.Pin) -> wire.Done:
        return wire.Done(await self._pin_everywhere([self._namespace(holder, m.ns, m.keys)], m))

    async def _pin_everywhere(
        self, namespaces: Sequence[NamespaceState], m: wire.Pin | wire.PinBlocks
    ) -> int:
        """In all tiers or in none; how many of the blocks are here."""
        for namespace in namespaces:
            self.node.check_pin(namespace, m.keys, m.kind)
            self.tiers.check_pin(namespace, m.keys, m.kind)
        count = 0
        for namespace in namespaces:
            found = self.node.pin(namespace, m.keys, m.kind)
            count += len(found | await self.tiers.pin(namespace, m.keys, m.kind))
        return count

    def _stats(self, holder: Holder, m: wire.Stats) -> wire.Bytes:
        """A tenant sees itself, and of the node what names no other."""
        name = holder.tenant.name
        stats = self._node_stats()
        stats["tenants"] = {name: stats["tenants"][name]}
        stats["usage"] = self._usage(holder.tenant)
        stats["engines"] = self.engines.stats(name)
        shares = stats["tiers"]["clean_share"]
        stats["tiers"]["clean_share"] = {name: shares[name]}
        return wire.Bytes(msgspec.json.encode(stats))

    def _all_stats(self) -> dict[str, Any]:
        """The same of all tenants, `usage` and `engines` by tenant."""
        tenants = self.node.tenants
        return {
            **self._node_stats(),
            "usage": {name: self._usage(tenant) for name, tenant in tenants.items()},
            "engines": {name: self.engines.stats(name) for name in tenants},
            "hot": self.heat.hottest(),
        }

    def _usage(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "dram": [{"where": "", **self.node.usage(tenant)}],
            "ssd": self.tiers.usage(tenant.name),
        }

    def _tune(self, config: DaemonConfig) -> None:
        """Follow a configuration in which an operator has changed what may change."""
        before, self.config = self.config, config
        self.cluster.config = config
        if config.copy_bandwidth != before.copy_bandwidth:
            self.copies.set_bandwidth(config.copy_bandwidth)
        if config.ssd_bytes_per_day != before.ssd_bytes_per_day:
            self.tiers.budget.change(config.ssd_bytes_per_day, self.clock())

    def _tell_news(self, before: View, after: View) -> None:
        for kind, details in membership_news(before, after):
            self.journal.note(kind, **details)

    def _node_stats(self) -> dict[str, Any]:
        stats = self.node.stats()
        stats["node"] = self.config.node
        stats["incarnation"] = self.incarnation
        stats["uptime_s"] = self.clock() - self._started
        stats["clients"] = len(self.clients)
        stats["connections"] = self._connections
        stats["refused_connections"] = self.refused
        stats["movers"] = self.movers.stats()
        stats["nixl"] = self.movers.nixl_stats()
        stats["paths"] = self.movers.paths.stats()
        stats["remote"] = self.remote.stats()
        stats["follows"] = self.follows.stats()
        stats["copies"] = self.copies.stats()
        device = [] if self.device is None else [self.device.stats()]
        stats["tiers"] = {**self.tiers.stats(), "remote": self.store.stats(), "device": device}
        stats["sources"] = self.remote.active
        stats["expired"] = self.expiry.expired
        stats["cluster"] = self.cluster.summary()
        stats["sampled"] = self.sampler.stats()
        stats["processes"] = family()
        stats["version"] = __version__
        return stats

    async def _pull(self, holder: Holder, m: wire.Pull) -> wire.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self.config.lease_s_max)
        direct = self._direct(m) is not None
        recompute = _recompute(m)
        here = self.remote.match(namespace, [], m.keys, direct=direct)
        asked_at = self.clock()
        found = await self.remote.pull(namespace, [], m.keys, wait_s, recompute, direct=direct)
        holder.tenant.traffic.pulls.waited(len(m.keys) // KEY_BYTES, found, here)
        self.remote.delivered.waits.add(self.clock() - asked_at)
        return wire.Done(found)

    async def _follow(self, holder: Holder, m: wire.Follow) -> wire.Done:
        namespace = self._namespace(holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self.config.lease_s_max)
        return wire.Done(await self.follows.follow(namespace, m.parts, m.keys, wait_s, m.source))

    def _follow_events(self, holder: Holder, m: wire.FollowEvents) -> wire.Done:
        namespace = self.node.namespace(holder.tenant, m.ns)
        return wire.Done(int(self.engines.follow(holder, namespace, m)))

    def _announce_engine(self, holder: Holder, m: wire.AnnounceEngine) -> wire.Done:
        namespace = self.node.namespace(holder.tenant, m.ns)
        self.announced.announce(holder, namespace, m.engine)
        return wire.Done(int(m.engine is not None))

    def _describe_engines(self, holder: Holder, m: wire.Engines) -> wire.Bytes:
        nodes, here = self.cluster.view.nodes.values(), self.cluster.record()
        return wire.Bytes(msgspec.json.encode(describe(nodes, here, holder.tenant.name)))

    async def _prefixes(self, holder: Holder, m: wire.Prefixes) -> wire.Bytes:
        if len(m.keys) > KEYS_BYTES_MAX:
            raise LimitExceeded(f"at most {wire.KEYS_MAX} keys are looked up in one request")
        keys = split_keys(m.keys)
        found = await prefixes(self.cluster, holder.tenant, m.digest, keys, m.wait_s)
        return wire.Bytes(msgspec.json.encode(found))

    async def _reset(self, holder: Holder, m: wire.Reset) -> wire.Opened:
        namespace = self.node.namespace(holder.tenant, m.ns)
        with asking_others():
            return await self.cluster.reset(namespace, m.generation)

    # ---- what nobody waits for -----------------------------------------------------------------------

    def settle_soon(self) -> None:
        """Let the policies catch up once the answers of this round are written."""
        if not self._settling:
            self._settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._settling = False
        self._release_now()
        self.node.settle()
        asked, self._asked_grants = self._asked_grants, []
        for holder, namespace, part, count in asked:
            stride = namespace.tables[part].stride
            alive = id(holder) in holder.tenant.holders and not namespace.retired
            if alive and not holder.ready.get(stride):
                holder.ready[stride] = self.node.grant(holder, namespace, part, count)

    def _expire_by(self, due: float, now: float) -> None:
        """See to it that leases are looked at when this one's deadline has come."""
        if due < self._expiry_due:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_due = due
            self._expiry = self._loop.call_later(max(EXPIRY_TICK_S, due - now), self._expire)

    def _expire(self) -> None:
        self._expiry, self._expiry_due = None, math.inf
        now = self.clock()
        due = self.node.expire(now)
        if due is not None:
            self._expire_by(due, now)


class ClientConnection(asyncio.Protocol):
    """One connection of a client, after its Welcome."""

    def __init__(self, server: Server, handle: ClientHandle) -> None:
        self.server = server
        self.handle = handle
        self.reader = wire.FrameReader()
        self.transport: asyncio.Transport | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self.paused = False  # answers pile up
        self.backlog: list[tuple[int, bytes]] = []  # requests that wait for that to end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self.closed:  # the client's process died during its introduction
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.backlog.clear()
        for task in self.tasks:
            task.cancel()
        self.server.connection_lost(self)

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more requests until it does."""
        self.paused = True
        self._live_transport.pause_reading()

    def resume_writing(self) -> None:
        self.paused = False
        self._go_on()

    @property
    def _live_transport(self) -> asyncio.Transport:
        assert self.transport is not None
        return self.transport

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self.reader.feed(data)
        except ProtocolError as error:
            self._refuse(error, [])
            return
        if self.backlog:
            self.backlog += frames
            return
        self._serve(frames)
        self.server.settle_soon()

    def _serve(self, frames: list[tuple[int, bytes]]) -> None:
        """Answer requests in order; when much is to be sent, first some, and the others later."""
        holder = self.handle.holder
        answers: list[bytes] = []
        size = 0
        for at, (request, payload) in enumerate(frames):
            try:
                message = wire.decode_client(payload)
                try:
                    answer = self.server.handle(holder, message)
                except ProtocolError:
                    raise
                except KvpoolError as error:
                    answer = wire.error_message(error)
            except ProtocolError as error:
                self._refuse(error, answers)
                return
            if type(answer) is CoroutineType:
                if len(self.tasks) < WAITING_MAX:
                    self._later(request, answer)
                    continue
                answer.close()
                answer = wire.error_message(
                    LimitExceeded(f"{WAITING_MAX} requests of this connection are waiting already")
                )
            if request:
                frame = _frame(answer, request)
                answers.append(frame)
                size += len(frame)
                if size > WRITE_BUFFER_BYTES and at + 1 < len(frames):
                    self.backlog = frames[at + 1 :]
                    self._live_transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._go_on)
                    break
        if answers:
            self._live_transport.write(answers[0] if len(answers) == 1 else b"".join(answers))

    def _go_on(self) -> None:
        """Take up the requests that were left waiting, then new ones."""
        transport = self._live_transport
        if self.paused or transport.is_closing():
            return
        frames, self.backlog = self.backlog, []
        if frames:
            self._serve(frames)
            self.server.settle_soon()
        if self._may_read():
            transport.resume_reading()

    def _may_read(self) -> bool:
        return not (self.backlog or self.paused or self._live_transport.is_closing())

    def _refuse(self, error: ProtocolError, answers: list[bytes]) -> None:
        answers.append(wire.encode(wire.error_message(error), 0))
        self._live_transport.write(b"".join(answers))
        self._live_transport.close()

    def _later(self, request: int, answer: Coroutine[Any, Any, wire.Message]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(request, answer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(
            lambda _: answer.close()
        )  # it may have been cancelled before it began

    async def _answer(self, request: int, answer: Coroutine[Any, Any, wire.Message]) -> None:
        try:
            message = await answer
        except KvpoolError as error:
            message = wire.error_message(error)
        if request and self.transport is not None and not self.transport.is_closing():
            self.transport.write(_frame(message, request))


def _count_put(table: PartTable, new: int) -> None:
    """A client has put so many blocks that are new."""
    traffic = table.namespace.tenant.traffic
    traffic.put_parts += new
    traffic.put_bytes += new * table.spec.nbytes


def _recompute(m: wire.Acquire | wire.Pull) -> Recompute | None:
    """Raises `InvalidRequest` for what is no price."""
    return None if m.recompute is None else Recompute(*m.recompute)


def _frame(answer: wire.Message, request: int) -> bytes:
    try:
        return wire.encode(answer, request)
    except ProtocolError as error:
        too_long = LimitExceeded(f"the answer is too long, ask for less: {error}")
        return wire.encode(wire.error_message(too_long), request)


_INDIFFERENT_TO_RELEASES = {wire.Acquire, wire.Match, wire.Contains, wire.Join, wire.Release}
_NOTHING_LEASED = wire.Leased("", 0, 0.0, [])


def describe_lease(
    lease: Lease, parts: Any, asked_at: float, scattered_keys: bytes | None
) -> wire.Leased:
    """What its holder is told: the rows of the parts it asked for, and for how long from `asked_at` on."""
    described = []
    for part in parts:
        if part not in lease.parts:
            raise InvalidRequest(f"part {part} is not in this lease")
        first, blocks = lease.parts[part]
        beside = [] if lease.beside is None else lease.beside.parts[part]
        if any(beside):
            described.append(_beside(part, first, blocks, beside))
            continue
        if not blocks:
            continue
        table = blocks[0].table
        if scattered_keys is None or len(blocks) * KEY_BYTES == len(scattered_keys):
            rows = [block.row for block in blocks]
        else:
            held = {block.key: block.row for block in blocks}
            rows = [held.get(key, wire.NO_ROW) for key in split_keys(scattered_keys)]
        described.append(
            wire.LeasedPart(part, first, table.stride, table.spec.nbytes, wire.pack_rows(rows))
        )
    left = 0.0 if lease.deadline is None else lease.deadline - asked_at
    life = 0 if lease.beside is None else lease.beside.life
    return wire.Leased(lease.token, lease.blocks, left, described, life)


def _beside(
    part: int, first: int, blocks: Sequence[Block], beside: Sequence[Block | None]
) -> wire.LeasedPart:
    """A part with slots on the device; blocks: the others, in memory."""
    memory = iter(blocks)
    rows = [next(memory).row if block is None else wire.NO_ROW for block in beside]
    device_rows = [wire.NO_ROW if block is None else block.row for block in beside]
    table = next(block.table for block in beside if block is not None)
    return wire.LeasedPart(
        *(part, first, table.stride, table.spec.nbytes),
        *(wire.pack_rows(rows), wire.pack_rows(device_rows)),
    )


def serve(config: DaemonConfig, ready: Callable[[Server], None] | None = None) -> None:
    """Run a daemon in this process until SIGTERM or SIGINT. Raises `KvpoolError` if it cannot start."""

    async def main() -> None:
        await Server(config).run(ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def _crash(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback raised what it should not have: the rules may be broken. End, rather than go on wrong.

    Clients see the socket close, and recompute; a supervisor starts a new incarnation.
    """
    error = context.get("exception")
    log.critical("%s", context.get("message"), exc_info=error)
    sys.stderr.flush()
    os._exit(70)


def _tune_gc() -> None:
    """Keep the cyclic collector from ever walking all long-lived objects.

    A full collection with a million blocks known stalls every request; blocks are untracked
    (`gc=False`) and make no cycles, so only what is young is worth collecting.
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
            f"another kvpool daemon (process {owner or 'unknown'}) uses the {what}. "
            f"Stop it, or choose another path."
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
    """Bind the control socket. Whoever calls holds its lock, so a socket found there is a dead one's."""
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
        pass  # somebody tidied up before us


def _send_now(sock: socket.socket, data: bytes) -> None:
    try:
        sock.send(data)
    except OSError:
        pass  # it is gone; it was to be closed anyway


__all__ = ["Server", "Tenant", "describe_lease", "serve"]
