"""The client: all that an engine, or anything else on the node, needs to use the pool.

    with Client() as client:
        ns = client.open(NamespaceRecord.simple("my-model", block_bytes=65536, block_tokens=32))
        client.put(ns, keys, blocks)
        hit = client.match(ns, keys)

It talks to its own node's daemon over a unix socket and copies in shared memory; it never opens a
network connection. Needs numpy, msgspec and xxhash.

**A daemon that is away is a miss, not an exception**, for everything that reads: `match` is 0, `contains`
and `get` find nothing, `acquire` is None. What writes raises `Unavailable`. After a failure, requests
end at once until the next attempt to reconnect is due (50 ms, doubling to 1 s).

**Threads**: all methods may be called from any thread; each request in flight has a connection of its
own, up to `connections_max`. Not for use in a forked child: make a new client there.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvpool import wire
from kvpool.buffers import Rows2D, Source, as_bytes, read_rows, row_checksums
from kvpool.config import default_socket_path
from kvpool.connection import TIMEOUT_S_MAX, Connection, DaemonState, Stash, refused, timeval
from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    LeaseLost,
    LimitExceeded,
    PoolFull,
    ProtocolError,
    SegmentError,
    StaleEpoch,
    Unavailable,
    UnknownReservation,
)
from kvpool.life import LifeView
from kvpool.types import (
    DEFAULT_TENANT,
    KEY_BYTES,
    EngineRecord,
    Keys,
    Namespace,
    NamespaceRecord,
    Recompute,
    pack_keys,
    plain_parts,
)

if TYPE_CHECKING:
    from kvpool.device_memory import DeviceMemory

BACKOFF_S = (0.05, 1.0)
FINISHED_MAX = 1024
ONE_EXCHANGE_BYTES = 32 << 20  # puts up to this copy first and ask afterwards
EVICT_S = 60.0  # for all of a node's blocks
SCRUB_S = 60.0
RESET_S = 15.0  # longest wait for the cluster's word, on top of the client's time-out
HASH_IN_THREAD_BYTES = 2 << 20  # below this, handing the work over costs more than it saves
_PAGE = 4096

Indices = npt.NDArray[np.int64]


class Slots:
    """n slots of one part in the segment.

    part: the part number.
    first: index, among the keys asked for, of the first block these slots belong to: above 0 for
        window parts. With a stride of s in the namespace, slot i belongs to block
        `first + (i + 1) * s - 1`.
    nbytes: bytes used of each slot. stride: bytes from one row of the segment to the next.
    rows: int64, one a slot; slot i starts at byte `rows[i] * stride` of the segment.
    device_rows: None, or where some of the slots are in device memory, one a slot: the row of
        `device_table`, and `wire.NO_ROW` for those that are in the segment. Each slot is in one of both.

    Reading and writing is for the time of the lease or reservation that they came with.
    """

    __slots__ = (
        "_daemon",
        "_device",
        "device_rows",
        "first",
        "nbytes",
        "part",
        "rows",
        "stride",
    )

    def __init__(
        self,
        daemon: DaemonState,
        part: int,
        first: int,
        nbytes: int,
        stride: int,
        rows: Indices,
        device_rows: Indices | None = None,
        device: DeviceMemory | None = None,
    ) -> None:
        self._daemon = daemon
        self.part = part
        self.first = first
        self.nbytes = nbytes
        self.stride = stride
        self.rows = rows
        self.device_rows = device_rows
        self._device = device

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> Rows2D:
        """The whole segment, shape (rows, stride), uint8, C-contiguous: `table[rows]` are the slots."""
        return self._daemon.table(self.stride)

    @property
    def device_table(self) -> Any:
        """The device memory, a uint8 tensor of shape (rows, stride): `device_table[device_rows]`."""
        assert self._device is not None, "these slots are in the segment, or others are attached"
        return self._device.table(self.stride)

    @property
    def fd(self) -> int:
        """The segment's memfd, for `os.preadv` and `os.pwritev` at `offsets`. Not yours to close."""
        return self._daemon.segment.fd

    @property
    def offsets(self) -> Indices:
        return self.rows * self.stride

    def view(self, index: int) -> memoryview:
        """The bytes of one slot."""
        return self.table[int(self.rows[index]), : self.nbytes].data

    def __repr__(self) -> str:
        return f"<Slots part={self.part} first={self.first} n={len(self)} nbytes={self.nbytes}>"


class Lease:
    """The right to read the slots of a prefix until `deadline`. Release it when done, or use `with`.

    token: hand it to other processes of the same engine instance; they `Client.join`.
    blocks: how many blocks of the prefix may be used.
    deadline: `time.monotonic()` of this process after which the bytes may be somebody else's.
    slots: by part number.
    device: the device memory that some of the slots are in, or None.
    life: of that memory, also where only others are attached to it; 0: all slots are in the segment.
    """

    __slots__ = ("_client", "blocks", "deadline", "device", "life", "slots", "token")

    def __init__(
        self,
        client: Client,
        token: str,
        blocks: int,
        deadline: float,
        slots: dict[int, Slots],
        device: DeviceMemory | None = None,
        life: int = 0,
    ) -> None:
        self._client = client
        self.token = token
        self.blocks = blocks
        self.deadline = deadline
        self.slots = slots
        self.device = device
        self.life = life

    @property
    def valid(self) -> bool:
        owned = self.device is None or self.device.alive
        return owned and time.monotonic() < self.deadline

    def check(self) -> None:
        """Call after the copy is complete (on a GPU: after its event). Raises `LeaseLost` if too late.

        So it does when the process has died that owned the device memory of some of the slots.
        """
        if self.device is not None and not self.device.alive:
            raise LeaseLost(
                f"the device memory of lease {self.token} went with its process: discard what was "
                f"read, and recompute"
            )
        late = time.monotonic() - self.deadline
        if late >= 0:
            raise LeaseLost(
                f"the lease {self.token} ended {late:.3f} s before its reader did: "
                f"discard what was read, and recompute"
            )

    def release(self) -> None:
        self._client.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return (
            f"<Lease {self.token} {self.blocks} blocks, {self.deadline - time.monotonic():.1f} s>"
        )


class Reservation:
    """Slots to be written, then committed. With `with`, what is not committed is aborted at the end.

    slots: one for each block that the caller has to write.
    missing: their indices among the keys asked for.
    refused: how many of the last keys got no slot, because leases or hard pins hold the space.
    """

    __slots__ = ("_client", "_daemon", "_settled", "_ticket", "missing", "refused", "slots")

    def __init__(
        self,
        client: Client,
        daemon: DaemonState,
        ticket: int,
        slots: Slots,
        missing: Indices,
        refused: int,
    ) -> None:
        self._client = client
        self._daemon = daemon
        self._ticket = ticket
        self._settled = len(missing) == 0
        self.slots = slots
        self.missing = missing
        self.refused = refused

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.abort(self)

    def __repr__(self) -> str:
        return f"<Reservation {self._ticket} of {len(self.slots)} slots>"


class Client:
    """A connection to the pool. See the module's text for failures and threads.

    socket_path: the daemon's socket; None: `KVPOOL_SOCKET`, else the user's default.
    tenant, token: whose pool; the daemon knows the default tenant without a token.
    instance: names the engine instance that leases belong to; the same in all its processes.
    timeout_s: deadline of every request.
    connect: True raises `Unavailable` or the daemon's refusal now, instead of missing later.
    operator_token: what the daemon asks of operators, if it does.
    """

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        tenant: str = DEFAULT_TENANT,
        token: str | None = None,
        instance: str | None = None,
        timeout_s: float = 1.0,
        connections_max: int = 16,
        connect: bool = False,
        operator_token: str = "",
    ) -> None:
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise InvalidRequest(f"a time-out of {timeout_s} s: above 0, at most {TIMEOUT_S_MAX:g}")
        self.socket_path = socket_path or default_socket_path()
        self.tenant = tenant
        self.timeout_s = timeout_s
        self.instance = instance or secrets.token_hex(8)
        self._token = token
        self._operator_token = operator_token
        self._id = secrets.token_hex(16)
        self._pid = os.getpid()
        self._idle: deque[Connection] = deque()
        self._open = 0  # connections, idle ones included
        self._long: set[Connection] = set()  # those with a request that may take long
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0
        self._daemon: DaemonState | None = None
        self._generations: dict[bytes, int] = {}  # of weights, by namespace
        # The namespace whose engine publishes events, or takes requests, and what the daemon is told of that.
        self._events: tuple[bytes, Callable[[int], wire.FollowEvents]] | None = None
        self._engine: tuple[bytes, Callable[[int], wire.AnnounceEngine]] | None = None
        self._tickets = itertools.count(1)
        self._finished: deque[str] = deque(maxlen=FINISHED_MAX)  # tokens of leases to release
        self._orphans: deque[tuple[str, wire.Message]] = deque(maxlen=1 << 16)
        self._retry_at = 0.0
        self._failure = ""
        self._backoff = BACKOFF_S[0]
        self._probing = False
        self._hasher: ThreadPoolExecutor | None = None
        self._closed = False
        if connect:
            self._give_back(self._take(self.timeout_s))

    # ---- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Leases and reservations that are open stay so until this process ends."""
        if self._finished and self._idle:
            try:
                with self._request() as connection:
                    connection.flush()
            except KvpoolError:
                pass  # they end by themselves
        daemon = self._daemon
        used = daemon is not None and bool(daemon.stashes or daemon.grants.doubtful)
        if daemon is not None and used and self._idle and daemon.grants.begin_last():
            try:
                with self._request() as connection:
                    if connection.daemon is daemon:
                        connection.tell(wire.GiveBack(0, b""))
            except KvpoolError:
                pass  # they come back with the end of this process
        self._closed = True
        for connection in list(self._long):
            connection.shut()
        with self._lock:
            self._close_idle()
        if self._hasher is not None:
            self._hasher.shutdown(wait=False)
        self._daemon = None

    @property
    def available(self) -> bool:
        """Whether a request would be tried now: False between a failure and the next attempt's time."""
        return not self._closed and time.monotonic() >= self._retry_at

    @property
    def incarnation(self) -> str:
        """Of the daemon that answered last; empty before the first."""
        return self._daemon.incarnation if self._daemon is not None else ""

    def warm(self) -> bool:
        """Connect and map the segment now, so that the first copy does not pay for it.

        False when the daemon is away. Mapping 2 GiB takes about 0.1 s.
        """
        try:
            with self._request() as connection:
                connection.daemon.table(_PAGE)
        except Unavailable:
            return False
        return True

    def open(
        self,
        record: NamespaceRecord,
        *,
        copies: int = 0,
        write: str = "",
        ttl_s: float = 0.0,
        ssd_codec: str = "",
        write_remote: str = "",
        generation: int = -1,
    ) -> Namespace:
        """Make a namespace known to the daemon, now or when it is there, and after each restart again.

        The settings count if the cluster does not know the namespace yet, and on a node that is alone
        where nobody has asked for another one; later `configure` changes them.

        copies: how many are wanted of each block, on as many nodes; 0: one.
        write: when blocks are written to SSD: "through" (when they were put), "back" (ahead of their
            eviction from memory), "none", or empty: as each node does by default.
        ttl_s: a block that was not used for so long on a node is not found there any more; 0: never.
        ssd_codec: what makes blocks smaller on SSD, without loss: "blosc2", or empty for nothing.
        write_remote: when blocks are written to object storage, where nodes have some: "back" (ahead of
            their eviction from memory, if they were read again), which empty is as well, or "none".
        generation: of the caller's weights, as another client of the same engine was told
            (`generation`); -1: they are the present ones, at the time of the first answer. After a reset by
            another engine that is what lets this one in again, so be sure that it is so.
        Raises `NamespaceMismatch` if the daemon, or the cluster, knows it with other sizes.
        """
        namespace = Namespace(
            record, record.digest(), copies, write, ttl_s, ssd_codec, write_remote
        )
        self._generations[namespace.digest] = generation
        try:
            with self._request() as connection:
                self._make_known(connection, namespace)
        except Unavailable:
            pass
        return namespace

    def generation(self, ns: Namespace) -> int:
        """Of the weights that this client reads and writes blocks of; -1 before the daemon told it."""
        return self._generations.get(ns.digest, -1)

    # ---- reading -------------------------------------------------------------------------------------

    def match(self, ns: Namespace, keys: Keys, *, parts: Sequence[int] | None = None) -> int:
        """The longest prefix of `keys`, in blocks, that an engine could use from this node."""
        packed = pack_keys(keys)
        if not packed:
            return 0
        try:
            answer = self._ask_ns(
                ns, lambda number: wire.Match(number, packed, list(parts) if parts else [])
            )
        except Unavailable:
            return 0
        return int(answer.value)

    def contains(self, ns: Namespace, keys: Keys, *, part: int = 0) -> npt.NDArray[np.bool_]:
        """For each key, whether the part of the block is on this node."""
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        if n:
            try:
                answer = self._ask_ns(ns, lambda number: wire.Contains(number, part, packed))
            except Unavailable:
                pass
            else:
                return np.frombuffer(answer.data, dtype=np.bool_)
        return np.zeros(n, dtype=np.bool_)

    def acquire(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        parts: Sequence[int] | None = None,
        lease_s: float = 10.0,
        wait_s: float = 0.0,
        recompute: Recompute | None = None,
        device: DeviceMemory | None = None,
        life: int = 0,
        trace: str = "",
    ) -> Lease | None:
        """A lease on the longest usable prefix of `keys`; None if there is none.

        parts: which must be usable; all of the namespace's unless given. A prefix is usable when full
            parts have all its blocks and window parts their last ones.
        lease_s: how long; the daemon may grant less (see `Lease.deadline`).
        wait_s: how long to wait for blocks that are not in memory here, but on disks or other nodes.
        recompute: the price of computing the keys' blocks instead. What takes longer to bring is not waited
            for. None: all that there is is brought.
        device: of `attach_device`: what lies there is leased there (`Slots.device_rows`), and is not brought
            into memory for it. Once its process has died the lease is on memory only.
        life: the same for a caller that is not attached, in the name of those who will `join` the lease and all
            are: `DeviceMemory.life` of theirs. The slots there are theirs to read.
        trace: the W3C `traceparent` of the request that this is for; the daemon's spans belong to it.
        """
        packed = pack_keys(keys)
        if not packed:
            return None
        if device is not None:
            life = device.life if device.alive else 0
        chosen = list(parts) if parts else []
        price = _price(recompute)
        return self._acquire(
            ns,
            lambda number: wire.Acquire(
                number, packed, chosen, lease_s, wait_s, False, price, life, trace
            ),
            wait_s,
            device=device,
            life=life,
        )

    def join(
        self,
        token: str,
        *,
        parts: Sequence[int] | None = None,
        device: DeviceMemory | None = None,
    ) -> Lease | None:
        """Become a holder of a lease that another process of this instance acquired; None if it ended.

        parts: whose slots to describe; all of the lease's unless given.
        device: see `acquire`. None is the answer too where the lease has slots in device memory that is not
            this one.
        """
        message = wire.Join(token, list(parts) if parts else [])
        sent = time.monotonic()
        try:
            with self._request() as connection:
                answer = connection.ask(message, self.timeout_s)
                return self._lease(connection, answer, sent, device)
        except Unavailable:
            return None

    def attach_device(self, on: Any = None) -> DeviceMemory | None:
        """Map this tenant's part of the daemon's spare device memory, to read there by leases (`acquire`).

        None where the daemon has none that serves now, or is away. It stays mapped until it is closed; when
        its process has died (`DeviceMemory.alive`), attach anew. Needs torch, and to see the same device.

        on: the torch device that it has to be on; None: any that is seen here.
        Raises `SegmentError` where it cannot be mapped, or is on another device than `on`, which is not touched.
        """
        from kvpool.device_memory import DeviceMemory

        self._check_process()
        if self._closed:
            return None
        with self._freed:
            self._open += 1
        try:
            connection, welcome, view = self._introduce(device=True)
            connection.close()  # a descriptor can only come with a connection's first answer
        except Unavailable:
            return None
        finally:
            self._closed_one()
        if view is None:
            return None
        try:
            return DeviceMemory(welcome.device, welcome.life, view, on)
        except SegmentError:
            if view.alive:
                raise
            return None  # its process has died meanwhile, and the memory with it

    def release(self, lease: Lease) -> None:
        """Stop reading. Never raises: a lease whose release is lost ends at its deadline."""
        if not lease.token:
            return
        token, lease.token = lease.token, ""
        try:
            with self._request() as connection:
                connection.tell(wire.Release([token]))
        except Unavailable:
            pass

    def get_into(
        self,
        ns: Namespace,
        keys: Keys,
        out: Any,
        *,
        part: int = 0,
        lease_s: float = 5.0,
        wait_s: float = 0.0,
    ) -> npt.NDArray[np.bool_]:
        """Copy blocks into `out`; True for each key that is there in full, the rest of `out` is undefined.

        out: one writable buffer, array or tensor of n times the part's bytes, or a list of n of them.
        lease_s: the copy must be done by then. The lease is released with this client's next request.
        wait_s: how long to wait for blocks that are not in memory here, but on disks or other nodes.
        """
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        nothing = np.zeros(n, dtype=np.bool_)
        nbytes = _nbytes(ns, part)
        targets = _targets(out, n, nbytes)
        if not n:
            return nothing
        lease = self._acquire(
            ns,
            lambda number: wire.Acquire(number, packed, [part], lease_s, wait_s, True),
            wait_s,
            n * nbytes,
        )
        if lease is None:
            return nothing
        slots = lease.slots[part]
        here = slots.rows != wire.NO_ROW
        complete = bool(here.all())
        if isinstance(targets, list):
            table = slots.table
            for index in np.flatnonzero(here).tolist():
                np.copyto(targets[index], table[int(slots.rows[index]), :nbytes])
        elif complete:
            read_rows(slots.table, slots.rows, targets)
        else:
            found = np.flatnonzero(here)
            targets[found] = slots.table[slots.rows[found], :nbytes]
        valid = lease.valid
        self._finished.append(lease.token)
        return here if valid else nothing

    def get(
        self, ns: Namespace, keys: Keys, *, part: int = 0, wait_s: float = 0.0
    ) -> list[bytes | None]:
        """The bytes of each block, or None; as `get_into`. For bulk use prefer that, or `acquire`."""
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        out = np.empty((n, _nbytes(ns, part)), dtype=np.uint8)
        here = self.get_into(ns, packed, out, part=part, wait_s=wait_s)
        return [out[i].tobytes() if here[i] else None for i in range(n)]

    # ---- writing -------------------------------------------------------------------------------------

    def reserve(
        self, ns: Namespace, keys: Keys, *, part: int = 0, parent: bytes | None = None
    ) -> Reservation:
        """Slots for the blocks that are not there yet. Write them, then `commit`.

        parent: the key before the first one in the prefix chain, if there is one.
        Raises `PoolFull`, `LimitExceeded`, `Unavailable`.
        """
        packed = pack_keys(keys)
        if not packed:
            raise InvalidRequest("a reservation of no keys")
        ticket = next(self._tickets)
        with self._request() as connection:
            sent = self._send_reserve(connection, ns, part, ticket, packed, parent)
            return self._reserved(connection, sent, ns, part, ticket, packed)

    def commit(
        self, reservation: Reservation, checksums: bytes | None = None, *, copies: int = 0
    ) -> int:
        """Make the slots readable; how many blocks are new. Others had been put meanwhile.

        checksums: xxh3-128 of each slot's bytes, 16 bytes each in order; computed here if not given.
        copies: see `put`.
        Raises `UnknownReservation` if it was settled before or its daemon is gone, and `Unavailable`.
        """
        if not len(reservation.missing):
            return 0
        if checksums is None:
            slots = reservation.slots
            checksums = row_checksums(slots.table, slots.rows, slots.nbytes)
        with self._request() as connection:
            return self._commit(connection, reservation, checksums, copies)

    def written(self, reservation: Reservation, nbytes: int) -> None:
        """The first `nbytes` bytes of each of its slots are written, and will not change until the commit.

        Nodes that follow the prompt may fetch them meanwhile; a long commit, of many layers, then has little left
        to be fetched. To be called with more and more bytes: once a layer, at most some hundred times a second.
        A hint: given up where all connections are busy, and a daemon that is away is no error. Raises
        `InvalidRequest` for bytes that a slot does not have.
        """
        if not 0 < nbytes <= reservation.slots.nbytes:
            raise InvalidRequest(f"{nbytes} bytes are written of {reservation.slots.nbytes}")
        if reservation._settled:
            return
        try:
            with self._request(0.0) as connection:
                if connection.daemon is reservation._daemon:
                    connection.tell(wire.Progress(reservation._ticket, nbytes))
        except Unavailable:
            pass  # busy with more than a hint, or gone as those are who would have been told

    def abort(self, reservation: Reservation) -> None:
        """Give slots back unwritten. Never raises; nothing after a commit."""
        if reservation._settled:
            return
        reservation._settled = True
        abort = wire.Abort([reservation._ticket])
        self._orphans.append((reservation._daemon.incarnation, abort))
        try:
            with self._request():
                pass  # whoever takes a connection tells the daemon of the orphans first
        except Unavailable:
            pass

    def put(
        self,
        ns: Namespace,
        keys: Keys,
        blocks: Any,
        *,
        part: int = 0,
        parent: bytes | None = None,
        copies: int = 0,
    ) -> int:
        """Store blocks; how many are new.

        Puts of up to 32 MiB are copied into slots held ready for them before the daemon is asked; where
        the last one met blocks that were there, and above that size, what is there is not copied.

        blocks: one buffer, array or CPU tensor of n times the part's bytes, or a list of n items, each a
            buffer or a list of buffers that are gathered. Read until this returns, never kept.
        copies: how many are wanted in the cluster of each; 0: as many as of all of the namespace's. Made
            afterwards, in the background.
        Raises `PoolFull` when not all could be stored (the first ones were: see `contains`),
        `Unavailable`, `InvalidRequest`.
        """
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        source = Source(blocks, n, _nbytes(ns, part))
        if not n:
            return 0
        if source.total <= ONE_EXCHANGE_BYTES and self._copies_first(ns, part, n):
            stored = self._put_in_one_exchange(ns, packed, source, part, parent, copies)
            if stored is not None:
                return stored
        ticket = next(self._tickets)
        with self._request() as connection:
            sent = self._send_reserve(connection, ns, part, ticket, packed, parent)
            connection.be_patient(source.total)
            reservation = self._reserved(connection, sent, ns, part, ticket, packed)
            stored = 0
            if len(reservation.missing):
                with reservation:
                    slots = reservation.slots
                    checksums = self._copy_in(
                        source, reservation.missing, slots.table, slots.rows, slots.fd
                    )
                    connection.be_patient(source.total)
                    stored = self._commit(connection, reservation, checksums, copies)
            stash = connection.daemon.stashes.get((ns.digest, part))
            if stash is not None:
                stash.ask_first = len(reservation.missing) < n
        if reservation.refused:
            raise PoolFull(
                f"{reservation.refused} of {n} blocks found no space: leases, reservations or "
                f"hard pins hold it. The blocks before them are stored"
            )
        return stored

    def _copies_first(self, ns: Namespace, part: int, n: int) -> bool:
        """Whether a put of n blocks is better copied before the daemon is asked what is there."""
        daemon = self._daemon
        stash = None if daemon is None else daemon.stashes.get((ns.digest, part))
        return stash is None or (not stash.ask_first and n < stash.most)

    def _put_in_one_exchange(
        self,
        ns: Namespace,
        packed: bytes,
        source: Source,
        part: int,
        parent: bytes | None,
        copies: int,
    ) -> int | None:
        """Copy into slots granted earlier, then name them; None when the daemon grants too few.

        An exchange costs as much as copying megabytes. So this copies without asking what is there
        already; a block that is, costs its copy and nothing else.
        """
        with self._request() as connection:
            grants = connection.daemon.grants
            if not grants.begin():
                return None
            try:
                if grants.doubtful:
                    connection.ask(wire.GiveBack(0, b""), self.timeout_s)
                    for known in connection.daemon.stashes.values():
                        known.take(len(known))
                    grants.doubtful = False
                return self._store(connection, ns, packed, source, part, parent, copies)
            except BaseException as error:
                if not refused(error):
                    grants.doubtful = True
                raise
            finally:
                grants.end()

    def _store(
        self,
        connection: Connection,
        ns: Namespace,
        packed: bytes,
        source: Source,
        part: int,
        parent: bytes | None,
        copies: int,
    ) -> int | None:
        n = source.n
        number = self._number(connection, ns)
        stash = connection.daemon.stashes.get((ns.digest, part))
        rows = stash.take(n) if stash is not None else []
        if len(rows) < n:
            answer = connection.ask(wire.Grant(number, part, n - len(rows)), self.timeout_s)
            if stash is None:
                stash = Stash(answer.stride)
                stash = connection.daemon.stashes.setdefault((ns.digest, part), stash)
            stash.add(answer.rows)
            rows += stash.take(n - len(rows))
            if len(rows) < n:
                stash.most = n
                connection.tell(wire.GiveBack(stash.stride, wire.pack_rows(rows)))
                return None
        assert stash is not None
        try:
            checksums = self._copy_in(
                source,
                np.arange(n),
                connection.daemon.table(stash.stride),
                np.array(rows, dtype=np.int64),
                connection.daemon.segment.fd,
            )
            packed_rows = wire.pack_rows(rows)
            connection.be_patient(source.total)
            answer = connection.ask(
                wire.Store(number, part, packed_rows, packed, checksums, n, parent or b"", copies),
                self.timeout_s,
            )
        except KvpoolError as error:
            if refused(error):
                stash.put_back(rows)
            raise
        stash.ask_first = bool(answer.unused)
        stash.add(answer.unused)
        stash.add(answer.fresh)
        if len(stash) > 2 * n:
            spare = wire.pack_rows(stash.take(len(stash) - 2 * n))
            connection.tell(wire.GiveBack(stash.stride, spare))
        return int(answer.new)

    def remove(self, ns: Namespace, keys: Keys) -> int:
        """Forget blocks, all their parts; how many were there. Readers under a lease finish."""
        packed = pack_keys(keys)
        if not packed:
            return 0
        return int(self._ask_ns(ns, lambda number: wire.Remove(number, packed)).value)

    def pin(self, ns: Namespace, keys: Keys, kind: str = "soft") -> int:
        """Keep blocks: "soft" evicts them last, "hard" never, "none" unpins; how many are there.

        Raises `LimitExceeded` when the tenant's quota does not cover them.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        return int(self._ask_ns(ns, lambda number: wire.Pin(number, packed, kind)).value)

    def pull(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        wait_s: float = 1.0,
        recompute: Recompute | None = None,
        life: int = 0,
        trace: str = "",
    ) -> int:
        """Bring blocks into memory here, from disks and other nodes; how many of the prefix are then.

        recompute, life, trace: as for `acquire`; what is in that device memory counts as here.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        price = _price(recompute)
        return int(
            self._ask_ns(
                ns, lambda number: wire.Pull(number, packed, wait_s, price, life, trace), wait_s
            ).value
        )

    def follow(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        wait_s: float,
        source: str = "",
        parts: Sequence[int] | None = None,
        trace: str = "",
    ) -> int:
        """Bring a prompt's blocks here while another node's engine computes them; how many are usable then.

        Returns when all of the prompt is here, or after `wait_s` (the daemon's `lease_s_max` at most) with
        what has come by then: never an error because a node was lost. What comes is held until it returns,
        so `acquire` soon. It takes one of this client's connections for so long; `close`, from another
        thread, calls it off.

        source: the name of the node where the prompt is computed; without it the directory is asked who has
            its beginning. parts: only these; None: all. trace: as for `acquire`.
        Raises `Unavailable` when the daemon is away, or called off, and `LimitExceeded` when it follows too
        many prompts already.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        with self._request() as connection:
            message = wire.Follow(
                self._number(connection, ns), packed, wait_s, source, list(parts or ()), trace
            )
            self._long.add(connection)
            try:
                if self._closed:
                    raise Unavailable("this client is closed")
                return int(connection.ask(message, self.timeout_s + wait_s).value)
            finally:
                self._long.discard(connection)

    def reset(self, ns: Namespace) -> None:
        """This engine's weights are new: nothing that was stored under the namespace is found any more.

        Begins a new epoch for the whole cluster, or enters the one that another engine's reset has begun:
        each engine resets once for each change of weights. Other clients find nothing and store
        nothing until they `reset` or `open` the namespace themselves. Leases that are held stay valid.
        Raises `StaleEpoch` when others have changed their weights more often than this engine: it is one
        change further, and finds and stores nothing until it has caught up. Raises `Unavailable`, or
        `ClusterUnavailable` when the membership does not answer: then the old epoch goes on, and the caller
        must not use the namespace any more.
        """
        with self._request() as connection:
            number = self._number(connection, ns)
            generation = self._generations[ns.digest]
            answer = connection.ask(wire.Reset(number, generation), self.timeout_s + RESET_S)
            connection.daemon.renumber(ns.digest, answer.number)
            self._generations[ns.digest] = answer.generation
            self._tell_engine(connection, ns.digest, answer.number)
        if not answer.current:
            raise StaleEpoch(
                f"the weights of namespace {ns.digest.hex()} have changed more often elsewhere than "
                f"here, where it is generation {answer.generation} now: reset again with each change "
                f"that is still to come, or open the namespace when the weights are the latest"
            )

    def follow_events(
        self,
        ns: Namespace,
        endpoint: str,
        *,
        replay: str = "",
        topic: str = "",
        groups: Sequence[int] = (),
    ) -> bool:
        """Have the daemon follow the KV events of this process's engine, now and after each restart again.

        What they say its cache holds is tier `gpu` to others, until this process ends: a hint for those who
        route requests, never a source of bytes. One engine a client: another call takes the place of
        the one before.

        endpoint: where to connect to, in ZeroMQ's words: `tcp://127.0.0.1:5557` or `ipc:///path`, on this
            machine only; empty: the daemon is to follow no more.
        replay: where the engine repeats missed events, or empty. topic: of the events.
        groups: the cache group, in the events' numbers, of each part of the namespace, in their order.
        False when the daemon does not follow them: it is away (it is told when it is back and the namespace
        is used), it is set not to (`events`), or it has no pyzmq.
        Raises `InvalidRequest` for what cannot be followed, and `LimitExceeded`.
        """
        listed = list(groups)

        def message(number: int) -> wire.FollowEvents:
            return wire.FollowEvents(number, endpoint, replay, topic, listed)

        self._events = (ns.digest, message) if endpoint else None
        try:
            return bool(self._ask_ns(ns, message).value)
        except Unavailable:
            return False

    def announce_engine(self, ns: Namespace, engine: EngineRecord | None) -> bool:
        """Tell all nodes of this process's engine, so that requests are sent to it; None: not any more.

        That holds until this process ends. To a daemon that was started anew it is told again once the
        namespace is used there: whoever uses it seldom says it again now and then, which is cheap. One
        engine a client: another call takes the place of the one before.
        False when the daemon is away. Raises `InvalidRequest` for what no engine can be, and `LimitExceeded`.
        """

        def message(number: int) -> wire.AnnounceEngine:
            return wire.AnnounceEngine(number, engine)

        self._engine = (ns.digest, message) if engine is not None else None
        try:
            self._ask_ns(ns, message)
        except Unavailable:
            return False
        return True

    # ---- for routers ---------------------------------------------------------------------------------

    def engines(self) -> list[dict[str, Any]]:
        """The engines of this tenant, on all nodes: see `wire.Engines`. Raises `Unavailable`."""
        found: list[dict[str, Any]] = self._ask_json(wire.Engines())
        return found

    def prefixes(
        self, digest: bytes, keys: Keys, *, wait_s: float = 0.05
    ) -> dict[str, tuple[int, int]]:
        """How much of a prefix each node could give, in blocks: from its memory, and from that and its disks.

        What engines have in caches of their own is not counted. digest: of the namespace, which need not be
        open here. wait_s: other nodes are left out when the directory takes longer. Nodes that have nothing
        are left out. A hint: blocks come and go. Raises `Unavailable`.
        """
        message = wire.Prefixes(digest, pack_keys(keys), wait_s)
        with self._request() as connection:
            answer = connection.ask(message, self.timeout_s + wait_s)
        return {node: (first, last) for node, (first, last) in json.loads(answer.data).items()}

    # ---- for operators -------------------------------------------------------------------------------

    def cluster(self) -> dict[str, Any]:
        """The cluster as this node sees it: nodes, namespaces, directory. Operators only."""
        found: dict[str, Any] = self._ask_json(wire.Cluster())
        return found

    def locate(self, keys: Keys, *, digest: bytes = b"") -> list[dict[str, Any]]:
        """Where blocks of this tenant are: one dict for each that is found. Operators only.

        digest: of one namespace; all of the tenant's that are open on this node unless given.
        """
        found: list[dict[str, Any]] = self._ask_json(wire.Locate(pack_keys(keys), digest))
        return found

    def drain(self, node: str, *, wanted: bool = True) -> None:
        """Have a node copy what only it has and leave, or call that off. Operators only; see `cluster`."""
        with self._request() as connection:
            connection.ask(wire.Drain(node, wanted), self.timeout_s + RESET_S)

    def clear(self, digest: bytes, *, fence: bool = False) -> int:
        """Begin a new epoch of a namespace of this tenant; its number. Operators only.

        fence: engines must open it again before they go on; else they go on in the new epoch.
        """
        with self._request() as connection:
            answer = connection.ask(wire.Clear(digest, fence), self.timeout_s + RESET_S)
            return int(answer.value)

    def configure(
        self,
        digest: bytes,
        *,
        copies: int | None = None,
        write: str | None = None,
        ttl_s: float | None = None,
        ssd_codec: str | None = None,
        dram_quota: float | None = None,
        ssd_quota: float | None = None,
        write_remote: str | None = None,
    ) -> None:
        """Change settings of a namespace of this tenant, for the whole cluster. Operators only.

        See `open` for what they mean, but `copies` is at least 1. None: that one stays as it is.

        dram_quota, ssd_quota: what its blocks may take of each node's memory and disks: bytes (an int), or
            a share of the tenant's part (a float up to 1.0); 0: as much as the tenant has.
        """
        message = wire.Configure(
            digest, copies, write, ttl_s, ssd_codec, dram_quota, ssd_quota, write_remote
        )
        with self._request() as connection:
            connection.ask(message, self.timeout_s + RESET_S)

    def evict(self, keys: Keys = b"", *, digest: bytes = b"", tier: str = "") -> int:
        """Give blocks up on this node, as if there were no room: how many went, each tier counted.

        keys: none for all. digest: of one namespace; empty: all of the tenant's. tier: "dram", "ssd", "device".
        """
        message = wire.Evict(pack_keys(keys), digest, tier)
        with self._request() as connection:
            return int(connection.ask(message, self.timeout_s + EVICT_S).value)

    def pin_blocks(self, keys: Keys, kind: str = "soft", *, digest: bytes = b"") -> int:
        """As `pin`, by an operator, in one namespace or all of the tenant's; how many blocks are there."""
        message = wire.PinBlocks(pack_keys(keys), kind, digest)
        with self._request() as connection:
            return int(connection.ask(message, self.timeout_s).value)

    def scrub(self, cursor: int, count: int) -> dict[str, Any]:
        """Compare some blocks on this node's disks with their checksums: see `wire.Scrub`."""
        with self._request() as connection:
            answer = connection.ask(wire.Scrub(cursor, count), self.timeout_s + SCRUB_S)
        found: dict[str, Any] = json.loads(answer.data)
        return found

    def ask_node(
        self,
        message: wire.Message,
        *,
        node: str = "",
        tenant: str = "",
        by: str = "",
        wait_s: float = 0.0,
    ) -> Any:
        """What a node of the cluster answers to an operator's request: its number, or its JSON decoded.

        message: see `kvpool.wire`, "operator → daemon". node: empty for this one. tenant: whose blocks it is about;
        empty for this client's. by: on whose behalf. wait_s: how long the answer may take beyond the usual. For
        operators only.
        """
        payload = wire.encode(message, 0)[wire.HEADER.size :]
        order = wire.OnNode(node, payload, wait_s, tenant, by)
        with self._request() as connection:
            answer = connection.ask(order, wait_s + self.timeout_s + RESET_S)
        return answer.value if type(answer) is wire.Done else json.loads(answer.data)

    def _ask_json(self, message: wire.Message) -> Any:
        with self._request() as connection:
            return json.loads(connection.ask(message, self.timeout_s + RESET_S).data)

    def stats(self) -> dict[str, Any]:
        """The daemon's counters and this tenant's space. Raises `Unavailable`."""
        with self._request() as connection:
            found: dict[str, Any] = json.loads(connection.ask(wire.Stats(), self.timeout_s).data)
            return found

    # ---- inside --------------------------------------------------------------------------------------

    def _ask_ns(self, ns: Namespace, make: Any, wait_s: float = 0.0) -> Any:
        with self._request() as connection:
            number = self._number(connection, ns)
            return connection.ask(make(number), self.timeout_s + wait_s)

    def _acquire(
        self,
        ns: Namespace,
        make: Any,
        wait_s: float,
        nbytes: int = 0,
        device: DeviceMemory | None = None,
        life: int = 0,
    ) -> Lease | None:
        try:
            with self._request() as connection:
                number = self._number(connection, ns)
                sent = time.monotonic()
                connection.be_patient(nbytes)
                answer = connection.ask(make(number), self.timeout_s + wait_s)
                return self._lease(connection, answer, sent, device, life)
        except Unavailable:
            return None

    def _lease(
        self,
        connection: Connection,
        answer: wire.Leased,
        sent: float,
        device: DeviceMemory | None,
        life: int = 0,
    ) -> Lease | None:
        """`answer.lease_s` counts from when the daemon was asked; counted from before that, it is safe.

        life: what the caller may be given slots of without reading them itself.
        """
        if not answer.token:
            return None
        if not answer.life:
            device = None
        elif answer.life != (life if device is None else device.life):
            connection.tell(wire.Release([answer.token]))
            return None
        slots = {
            part.part: Slots(
                connection.daemon,
                part.part,
                part.first,
                part.nbytes,
                part.stride,
                _rows(part.rows),
                _rows(part.device_rows) if part.device_rows else None,
                device,
            )
            for part in answer.parts
        }
        deadline = sent + answer.lease_s
        return Lease(self, answer.token, answer.blocks, deadline, slots, device, answer.life)

    def _send_reserve(
        self,
        connection: Connection,
        ns: Namespace,
        part: int,
        ticket: int,
        packed: bytes,
        parent: bytes | None,
    ) -> int:
        number = self._number(connection, ns)
        message = wire.Reserve(number, part, ticket, packed, parent or b"")
        return connection.send(message, self.timeout_s)

    def _reserved(
        self,
        connection: Connection,
        request: int,
        ns: Namespace,
        part: int,
        ticket: int,
        packed: bytes,
    ) -> Reservation:
        daemon = connection.daemon
        try:
            answer = connection.receive(request, self.timeout_s)
        except Unavailable:
            # The daemon may have reserved, and only an abort or the end of this process undoes it.
            self._orphans.append((daemon.incarnation, wire.Abort([ticket])))
            raise
        rows = np.frombuffer(answer.rows, dtype=np.uint32)
        refused = len(packed) // KEY_BYTES - len(rows)
        if rows.max(initial=0) == wire.NO_ROW:
            missing = np.flatnonzero(rows != wire.NO_ROW)
            rows = rows[missing]
        else:
            missing = np.arange(len(rows))
        slots = Slots(daemon, part, 0, _nbytes(ns, part), answer.stride, rows.astype(np.int64))
        return Reservation(self, daemon, ticket, slots, missing, refused)

    def _commit(
        self, connection: Connection, reservation: Reservation, checksums: bytes, copies: int
    ) -> int:
        message = wire.Commit(reservation._ticket, checksums, copies=copies)
        if connection.daemon is not reservation._daemon:
            reservation._settled = True
            raise UnknownReservation(
                "the daemon that gave these slots is gone; put the blocks again"
            )
        try:
            answer = connection.ask(message, self.timeout_s)
        except Unavailable:
            # It may have been committed or not: the abort that follows makes sure that it is settled.
            reservation._settled = True
            abort = wire.Abort([reservation._ticket])
            self._orphans.append((connection.daemon.incarnation, abort))
            raise
        reservation._settled = True
        return int(answer.value)

    def _copy_in(
        self, source: Source, indices: Indices, table: Rows2D, rows: Indices, fd: int
    ) -> bytes:
        """Copy the chosen blocks into rows of the segment; their checksums.

        Those of many bytes are computed by a second thread meanwhile: copying and hashing both release
        the GIL. When this returns or raises, nobody reads the caller's buffers any more.
        """
        chosen = indices.tolist()
        if len(chosen) * source.nbytes < HASH_IN_THREAD_BYTES:
            source.write(indices, table, rows, fd)
            return source.checksums(chosen)
        going = [True]  # emptied when the checksums are not needed any more
        wanted = itertools.takewhile(lambda _: going, chosen)
        hashing = self._hash_thread().submit(source.checksums, wanted)
        try:
            source.write(indices, table, rows, fd)
            return hashing.result()
        finally:
            if not hashing.done():
                going.clear()
                wait((hashing,))

    def _hash_thread(self) -> ThreadPoolExecutor:
        hasher = self._hasher
        if hasher is None:
            with self._lock:
                if self._hasher is None:
                    self._hasher = ThreadPoolExecutor(1, "kvpool-checksum")
                hasher = self._hasher
        return hasher

    def _number(self, connection: Connection, ns: Namespace) -> int:
        """The daemon's number of a namespace, which is made known to it where it is not yet."""
        number = connection.daemon.numbers.get(ns.digest)
        return self._make_known(connection, ns) if number is None else number

    def _make_known(self, connection: Connection, ns: Namespace) -> int:
        """Make a namespace known to the daemon, which compares its sizes. Its number."""
        # With the generation that it was opened in: its weights have not changed with the daemon.
        generation = self._generations.get(ns.digest, -1)
        message = wire.OpenNamespace(
            ns.digest,
            ns.record.canonical(),
            plain_parts(ns.parts),
            ns.copies,
            generation,
            ns.write,
            ns.ttl_s,
            ns.ssd_codec,
            ns.write_remote,
        )
        answer = connection.ask(message, self.timeout_s)
        connection.daemon.renumber(ns.digest, answer.number)
        self._generations[ns.digest] = answer.generation
        self._tell_engine(connection, ns.digest, answer.number)
        return int(answer.number)

    def _tell_engine(self, connection: Connection, digest: bytes, number: int) -> None:
        """A namespace was opened: the daemon is to know its engine, and what that publishes. Waits for nothing."""
        for told in (self._events, self._engine):
            if told is not None and told[0] == digest:
                connection.tell(told[1](number))

    def _request(self, wait_s: float | None = None) -> _Request:
        """wait_s: for a connection that is free, where it is not `timeout_s`."""
        return _Request(self, self.timeout_s if wait_s is None else wait_s)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidRequest("a client is not for a forked child: make a new one there")

    def _take(self, timeout_s: float) -> Connection:
        """A connection for one request; give it back or drop it. Raises `Unavailable`."""
        if self._closed:
            raise Unavailable("this client is closed")
        self._check_process()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._another(timeout_s)
        if self._orphans:
            self._abandon(connection)
        if self._finished:
            tokens: list[str] = []
            while self._finished and len(tokens) < FINISHED_MAX:
                try:
                    tokens.append(self._finished.popleft())
                except IndexError:  # another thread took the last one
                    break
            connection.ahead += wire.encode(wire.Release(tokens), 0)
        return connection

    def _another(self, timeout_s: float) -> Connection:
        """A new connection, or, when there are as many as may be, the next one that comes free."""
        with self._freed:
            if self._open >= self._connections_max:
                deadline = time.monotonic() + timeout_s
                self._waiting += 1
                try:
                    while self._open >= self._connections_max:
                        try:
                            return self._idle.pop()
                        except IndexError:
                            pass  # none, or somebody was faster
                        left = deadline - time.monotonic()
                        if left <= 0 or not self._freed.wait(left):
                            raise Unavailable(f"all connections were busy for {timeout_s:g} s")
                finally:
                    self._waiting -= 1
            self._open += 1
        try:
            return self._connect()
        except BaseException:
            self._closed_one()
            raise

    def _closed_one(self) -> None:
        with self._freed:
            self._open -= 1
            self._freed.notify()

    def _give_back(self, connection: Connection) -> None:
        if self._closed or connection.daemon is not self._daemon:
            connection.close()
            self._closed_one()
            return
        self._idle.append(connection)
        if self._waiting:
            with self._freed:
                self._freed.notify()

    def _drop(self, connection: Connection) -> None:
        """A connection failed: the daemon is gone, hangs, or broke the protocol. Back off."""
        connection.close()
        with self._freed:
            self._open -= 1
            if connection.daemon is self._daemon:  # not one whose successor answers already
                self._close_idle()
                self._back_off(f"the daemon at {self.socket_path} failed")
            self._freed.notify()

    def _close_idle(self) -> None:
        """With the lock held, or at the end."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return  # a request was faster, and will find out by itself
            connection.close()
            self._open -= 1

    def _abandon(self, connection: Connection) -> None:
        """Tell the daemon of slots that nobody will commit."""
        while self._orphans:
            try:
                incarnation, message = self._orphans.popleft()
            except IndexError:
                break  # another thread tells the daemon
            if incarnation == connection.daemon.incarnation:
                try:
                    connection.tell(message)
                except Unavailable:
                    self._orphans.append((incarnation, message))
                    self._drop(connection)
                    raise

    def _back_off(self, why: str) -> None:
        """With the lock held. Many requests that fail together are one failure."""
        now = time.monotonic()
        self._failure = why
        if now >= self._retry_at:
            self._retry_at = now + self._backoff
            self._backoff = min(2 * self._backoff, BACKOFF_S[1])

    def _connect(self) -> Connection:
        """A new connection. When the daemon failed, one thread at a time finds out whether it is back."""
        with self._lock:
            wait_s = self._retry_at - time.monotonic()
            probe = self._backoff > BACKOFF_S[0]
            if wait_s > 0 or (probe and self._probing):
                raise Unavailable(
                    f"{self._failure} (the next attempt is in {max(wait_s, 0):.2f} s)"
                )
            self._probing = probe
        try:
            connection, _, _ = self._introduce()
            return connection
        finally:
            if probe:
                self._probing = False

    def _introduce(
        self, *, device: bool = False
    ) -> tuple[Connection, wire.Welcome, LifeView | None]:
        """A connection; with `device`, what tells of the end of the device memory in its Welcome, if any."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            limit = timeval(self.timeout_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            sock.connect(self.socket_path)
            hello = wire.Hello(
                wire.PROTOCOL_VERSION,
                self.tenant,
                self.instance,
                self._id,
                self._token,
                self._operator_token,
                device,
                wire.PROTOCOL_OLDEST,
            )
            try:
                sock.sendall(wire.encode(hello, 1))
            except BrokenPipeError:
                pass  # turned away at the door; the reason is there to be read
            data, fds, _, _ = socket.recv_fds(sock, wire.HELLO_BYTES_MAX, 2)
            for fd in fds:
                os.set_inheritable(fd, False)  # `recv_fds` drops the flag that would do it
        except OSError as error:
            sock.close()
            why = (
                f"no kvpool daemon answers at {self.socket_path} ({error.strerror or error}). "
                f"Start one with `kvpool serve`, or name its socket (--socket, KVPOOL_SOCKET)"
            )
            with self._lock:
                self._back_off(why)
            raise Unavailable(why) from None
        try:
            frames = wire.FrameReader(wire.HELLO_BYTES_MAX).feed(data)
            if not frames:
                raise Unavailable("the daemon closed the connection before its Welcome")
            welcome = wire.decode_daemon(frames[0][1])
            if type(welcome) is wire.Error:
                wire.raise_error(welcome)
            if type(welcome) is not wire.Welcome or len(fds) != 1 + bool(welcome.device):
                raise ProtocolError("the daemon's first answer is not a Welcome with a segment")
            wire.agree(welcome.version, welcome.version, "the daemon")
            view = LifeView(fds.pop()) if welcome.device else None
            daemon = self._meet(welcome, fds.pop())
        except LimitExceeded as error:
            sock.close()
            why = f"the daemon at {self.socket_path} takes no more: {error}"
            with self._lock:
                self._back_off(why)
            raise Unavailable(why) from None
        except KvpoolError as error:
            sock.close()
            for fd in fds:
                os.close(fd)
            with self._lock:
                self._back_off(str(error))
            raise
        return Connection(sock, daemon), welcome, view

    def _meet(self, welcome: wire.Welcome, fd: int) -> DaemonState:
        """The state that belongs to this incarnation: the known one, or a new one."""
        with self._lock:
            self._backoff = BACKOFF_S[0]
            self._retry_at = 0.0
            daemon = self._daemon
            if daemon is not None and daemon.incarnation == welcome.incarnation:
                os.close(fd)
                return daemon
            daemon = DaemonState(welcome, fd)
            self._daemon = daemon
            self._close_idle()
            return daemon


class _Request:
    """A connection for the length of a `with`: back to the pool, or dropped if it failed."""

    __slots__ = ("client", "connection", "wait_s")

    def __init__(self, client: Client, wait_s: float) -> None:
        self.client = client
        self.wait_s = wait_s

    def __enter__(self) -> Connection:
        self.connection = self.client._take(self.wait_s)
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None or (
            issubclass(kind, KvpoolError) and not issubclass(kind, (Unavailable, ProtocolError))
        ):
            self.client._give_back(self.connection)
        else:
            self.client._drop(self.connection)


def _price(recompute: Recompute | None) -> tuple[float, float] | None:
    return None if recompute is None else (recompute.block_s, recompute.growth_s)


def _rows(packed: bytes) -> Indices:
    return np.frombuffer(packed, dtype=np.uint32).astype(np.int64)


def _nbytes(ns: Namespace, part: int) -> int:
    if not 0 <= part < len(ns.parts):
        raise InvalidRequest(f"part {part}: this namespace has parts 0 to {len(ns.parts) - 1}")
    return ns.parts[part].nbytes


def _targets(out: Any, n: int, nbytes: int) -> Any:
    """Where blocks go: rows of one array, or a list of flat arrays. Raises `InvalidRequest`."""
    if isinstance(out, (list, tuple)):
        flats = [as_bytes(item, writable=True) for item in out]
        if len(flats) != n or any(flat.size != nbytes for flat in flats):
            raise InvalidRequest(f"the destination is not {n} buffers of {nbytes} bytes")
        return flats
    flat = as_bytes(out, writable=True)
    if flat.size != n * nbytes:
        raise InvalidRequest(f"a destination of {flat.size} bytes for {n} blocks of {nbytes}")
    return flat.reshape(n, nbytes)
