"""The client: everything that an engine, or another process on the node, needs to use the pool.

    with Client() as client:
        ns = client.open(NamespaceRecord.simple("my-model", block_bytes=65536, block_tokens=32))
        client.put(ns, keys, blocks)
        hit = client.match(ns, keys)

It talks to its own node's daemon over a unix socket and copies in shared memory; it never opens a
network connection. Needs numpy, msgspec and xxhash.

**An unreachable daemon is a miss, not an exception**, for reads: `match` is 0, `contains`
and `get` find nothing, `acquire` is None. Writes raise `Unavailable`. After a failure, requests
fail at once until the next attempt to reconnect is due (50 ms, doubling to 1 s).

**Threads**: all methods may be called from any thread; each request in flight has a connection of its
own, up to `connections_max`. Not for use in a forked child: create a new client there.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.client.connection import TIMEOUT_S_MAX
from kvpool.client.connections import Connections
from kvpool.client.copying import CopyIn, copy_out, part_bytes, targets_of, wrong_blocks
from kvpool.client.namespaces import OpenNamespaces
from kvpool.client.puts import GrantedPuts, Reservations, chained
from kvpool.client.slots import Lease, Reservation, lease_of
from kvpool.config import default_socket_path
from kvpool.decoding import decode_json, finite
from kvpool.errors import (
    InvalidRequest,
    PoolFull,
    SegmentError,
    StaleEpoch,
    Unavailable,
)
from kvpool.memory.buffers import Source, row_checksums
from kvpool.telemetry import node_stats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import (
    DEFAULT_TENANT,
    KEY_BYTES,
    EngineRecord,
    Intent,
    IntentAnswer,
    Keys,
    Namespace,
    NamespaceRecord,
    Presence,
    Recompute,
    check_digest,
    pack_keys,
    split_keys,
)
from kvpool.wire import client as client_wire
from kvpool.wire import frame

if TYPE_CHECKING:
    from kvpool.client.device_memory import DeviceMemory

RESET_S = 15.0  # longest wait for the cluster's answer, on top of the client's time-out
INTENT_S = 10.0  # for pins on disks, and the answers of others
_PAGE = 4096


class Client:
    """A connection to the pool. See the module's text for failures and threads.

    socket_path: the daemon's socket; None: `KVPOOL_SOCKET`, else the user's default.
    tenant, token: credentials; the default tenant needs no token.
    instance: names the engine instance that leases belong to; the same in all its processes.
    timeout_s: deadline of every request.
    connect: True raises `Unavailable` or the daemon's refusal now, instead of missing later.
    operator_token: the daemon's operator token, if it has one.
    read_only: map the pool's memory without the right to write, so that a stray write in this process cannot damage
        blocks. `put`, `reserve` and `attach_device` are refused.
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
        read_only: bool = False,
    ) -> None:
        if not 0 < timeout_s <= TIMEOUT_S_MAX:
            raise InvalidRequest(
                f"timeout_s is {timeout_s}; it must be above 0 and at most {TIMEOUT_S_MAX:g}"
            )
        self.timeout_s = timeout_s
        self.tenant = tenant
        self.instance = instance or secrets.token_hex(8)
        self._connections = Connections(
            socket_path or default_socket_path(),
            tenant=tenant,
            token=token,
            instance=self.instance,
            operator_token=operator_token,
            operator_socket=self._operators_at(socket_path or default_socket_path()),
            timeout_s=timeout_s,
            connections_max=connections_max,
            read_only=read_only,
        )
        self._namespaces = OpenNamespaces(timeout_s)
        self._copy_in = CopyIn()
        self._reservations = Reservations(self._connections, self._namespaces)
        self._granted_puts = GrantedPuts(self._connections, self._namespaces, self._copy_in)
        if connect:
            self._connections.connect()

    def _check_writes(self) -> None:
        if self._connections.read_only:
            raise InvalidRequest(
                "this client has mapped the pool's memory read-only: it writes no blocks"
            )

    def _operators_at(self, socket_path: str) -> str | None:
        """The operators' socket, for a client that needs it."""
        return None

    # ---- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Open leases and reservations remain until this process ends."""
        self._connections.close()

    @property
    def socket_path(self) -> str:
        """Of the daemon's socket."""
        return self._connections.socket_path

    @property
    def available(self) -> bool:
        """Whether a request would be sent now: False between a failure and the next attempt."""
        return self._connections.available

    @property
    def incarnation(self) -> str:
        """Of the daemon that answered last; empty before the first."""
        return self._connections.incarnation

    def warm(self, use: Callable[[npt.NDArray[np.uint8]], None] | None = None) -> bool:
        """Connect and map the segment now, and begin to fault its pages in, so that the first copy does not pay for it.

        use: is given the segment, as rows of bytes, for what else has to be done to it.
        False if the daemon is unreachable. A thread goes on faulting pages in, 0.1 to 0.2 s per GiB.
        """
        try:
            with self._connections.request() as connection:
                table = connection.daemon.table(_PAGE)
                if use is not None:
                    use(table)
        except Unavailable:
            return False
        return True

    def open(
        self,
        record: NamespaceRecord,
        *,
        replicas: int = 0,
        write: str = "",
        ttl_s: float = 0.0,
        ssd_codec: str = "",
        write_remote: str = "",
        generation: int = -1,
        verify: bool = False,
    ) -> Namespace:
        """Register a namespace with the daemon, now or when it is reachable, and again after each restart.

        The settings apply if the namespace is new to the cluster, and on a node that is alone
        if no others were set; later `configure` changes them.

        replicas: how many are wanted of each block, on as many nodes; 0: one.
        write: when blocks are written to SSD: "through" (after the put), "back" (before their
            eviction from memory), "none", or empty: each node's default.
        ttl_s: a block that was not used for this long on a node is dropped there; 0: never.
        ssd_codec: lossless compression of blocks on SSD: "blosc2", or empty for none.
        write_remote: when blocks are written to object storage, if nodes have one: "back" (before
            their eviction from memory, if they were read again) or empty, which is the same, or "none".
        generation: of the caller's weights, as reported to another client of the same engine
            (`generation`); -1: the present one, at the time of the first answer. After a reset by
            another engine -1 lets this one in again, so its weights must be the new ones.
        verify: compare what this client reads with the checksums of what was put. `get` and `get_into` leave out
            blocks that differ, and have them dropped (not in device memory, which only engines read); of a lease,
            ask `Slots.wrong`, and `Lease.report` them. Other clients of the tenant can write to the shared memory:
            one that does so by mistake is found out.
        Raises `NamespaceMismatch` if the daemon, or the cluster, knows it with other sizes.
        """
        namespace = Namespace(
            record,
            record.digest(),
            replicas,
            write,
            finite(ttl_s, "ttl_s"),
            ssd_codec,
            write_remote,
            verify,
        )
        self._namespaces.generations[namespace.digest] = generation
        try:
            with self._connections.request() as connection:
                self._namespaces.make_known(connection, namespace)
        except Unavailable:
            pass
        return namespace

    def generation(self, ns: Namespace) -> int:
        """Of the weights of the blocks that this client reads and writes; -1 before the daemon's first answer."""
        return self._namespaces.generations.get(ns.digest, -1)

    # ---- reading -------------------------------------------------------------------------------------

    def match(self, ns: Namespace, keys: Keys, *, parts: Sequence[int] | None = None) -> int:
        """The longest prefix of `keys`, in blocks, that an engine could use from this node."""
        packed = pack_keys(keys)
        if not packed:
            return 0
        try:
            answer = self._ask_ns(
                ns, lambda number: client_wire.Match(number, packed, list(parts) if parts else [])
            )
        except Unavailable:
            return 0
        return int(answer.value)

    def contains(self, ns: Namespace, keys: Keys, *, part: int = 0) -> npt.NDArray[np.bool_]:
        """For each key, whether the part of the block is on this node."""
        found, _ = self._present((ns,), pack_keys(keys), b"", part, None)
        here: npt.NDArray[np.bool_] = np.frombuffer(found, dtype=np.uint8) == Presence.MEMORY
        return here

    def present(
        self, ns: Namespace, keys: Keys, *, part: int = 0, wait_s: float = 0.05
    ) -> npt.NDArray[np.uint8]:
        """For each key, where the nearest replica of a part of the block is: a `Presence`, u8 (n,).

        Anything above `Presence.NOWHERE` can be had with `wait_s` in `get_into` or `acquire_each`; what is elsewhere, or
        on disk, may be gone by then. All 0 when the daemon is unreachable.

        wait_s: how long to wait for what others know of blocks that are not on this node; 0: they are not asked.
        """
        rows, _ = self.present_in((ns,), keys, part=part, wait_s=wait_s)
        return np.frombuffer(rows[0], dtype=np.uint8)

    def present_in(
        self,
        namespaces: Sequence[Namespace],
        keys: Keys,
        *,
        part: int = 0,
        first: bool = False,
        beside: Keys = b"",
        wait_s: float = 0.05,
    ) -> tuple[list[bytes], bytes]:
        """As `present`, in one exchange, of the same keys in several namespaces: for each of these one byte a key, a
        `Presence`; then one for each key beside, in the first namespace.

        first: a block that is in memory in one namespace is not looked for in those after it, and is 0 there. beside:
        others are asked for these only if they are asked for one of `keys`.
        Raises `LimitExceeded` for more than 16 namespaces, or 65,536 keys in all of them together.
        """
        packed, asked = pack_keys(keys), len(namespaces)
        seconds = finite(wait_s, "wait_s")
        data, besides = self._present(
            namespaces, packed, pack_keys(beside), part, seconds, first=first
        )
        n = len(packed) // KEY_BYTES
        return [data[n * at : n * at + n] for at in range(asked)], besides

    def _present(
        self,
        namespaces: Sequence[Namespace],
        packed: bytes,
        beside: bytes,
        part: int,
        wait_s: float | None,
        *,
        first: bool = False,
    ) -> tuple[bytes, bytes]:
        """Return a `Presence` for each namespace and key, and one for each key beside. wait_s: None: only in memory."""
        n = len(packed) // KEY_BYTES * len(namespaces)
        data = bytes(n + len(beside) // KEY_BYTES)
        if namespaces and data:
            rest = part, packed, wait_s, first, beside
            try:
                data = self._ask_each(client_wire.Present, namespaces, rest, wait_s or 0.0)
            except Unavailable:
                pass
        return data[:n], data[n:]

    def acquire_each(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        part: int = 0,
        lease_s: float = 10.0,
        wait_s: float = 0.0,
        request: str = "",
    ) -> Lease | None:
        """A lease on one part of each of these blocks that is here, whatever the others are; None if none is.

        Slot i of `lease.slots[part]` belongs to key i: where there is none its row is `NO_ROW`. `lease.blocks` counts
        those that are there. lease_s, wait_s, request: as for `acquire`.
        """
        packed = pack_keys(keys)
        if not packed:
            return None
        return self._acquire(
            ns,
            lambda number: self._each(ns, number, packed, part, lease_s, wait_s, request),
            wait_s,
        )

    @staticmethod
    def _each(
        ns: Namespace,
        number: int,
        packed: bytes,
        part: int,
        lease_s: float,
        wait_s: float,
        request: str,
    ) -> client_wire.Acquire:
        # By position: keywords cost a third of a microsecond here.
        return client_wire.Acquire(
            number,
            packed,
            [part],
            finite(lease_s, "lease_s"),
            finite(wait_s, "wait_s"),
            True,
            None,
            0,
            "",
            ns.verify,
            request,
        )

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
        request: str = "",
        for_others: bool = False,
    ) -> Lease | None:
        """A lease on the longest usable prefix of `keys`; None if there is none.

        parts: which must be usable; default: all of the namespace's. A prefix is usable when full
            parts have all its blocks and window parts their last ones.
        lease_s: how long; the daemon may grant less (see `Lease.deadline`).
        wait_s: how long to wait for blocks that are not in memory here, but on disks or other nodes.
        recompute: the price of computing the keys' blocks instead. Blocks that take longer to bring are not
            waited for. None: bring all.
        device: of `attach_device`: blocks there are leased there (`Slots.device_rows`), and not brought
            into memory. Once its process has died the lease is on memory only.
        life: the same for a caller that is not attached, on behalf of processes that will `join` the lease and
            are all attached: their `DeviceMemory.life`. The slots there are theirs to read.
        trace: the W3C `traceparent` of the request; the daemon's spans belong to it.
        request: on whose behalf, as its engine names it: what is read is in its receipt (`end_request`), beside the tenant's
            account. At most 256 printable characters.
        for_others: those who `join` the lease read, not the caller: it counts as read with the first of them.
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
            lambda number: client_wire.Acquire(
                number,
                packed,
                chosen,
                finite(lease_s, "lease_s"),
                finite(wait_s, "wait_s"),
                False,
                price,
                life,
                trace,
                ns.verify,
                request,
                for_others,
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
        verify: bool = False,
    ) -> Lease | None:
        """Become a holder of a lease that another process of this instance acquired; None if it ended.

        parts: whose slots to describe; default: all of the lease's.
        device: see `acquire`. Also None if the lease has slots in other device memory
            than this one.
        verify: the slots are to have checksums, for `Slots.wrong`.
        """
        message = client_wire.Join(token, list(parts) if parts else [], verify)
        sent = time.monotonic()
        try:
            with self._connections.request() as connection:
                answer = connection.ask(message, self.timeout_s)
                return lease_of(self._connections, connection, answer, sent, device)
        except Unavailable:
            return None

    def attach_device(self, on: Any = None) -> DeviceMemory | None:
        """Map this tenant's part of the daemon's spare device memory, to read there by leases (`acquire`).

        None if the daemon has none that serves now, or is unreachable. It stays mapped until it is closed; when
        its process has died (`DeviceMemory.alive`), attach again. Needs torch, and to see the same device.

        on: the required torch device; None: any that is visible here.
        Raises `SegmentError` if it cannot be mapped, or is on another device than `on`, which is not touched.
        """
        from kvpool.client.device_memory import DeviceMemory

        if self._connections.read_only:
            raise InvalidRequest(
                "a read-only client does not map device memory: it could not be kept from writing there"
            )
        found = self._connections.attach_device()
        if found is None:
            return None
        welcome, view = found
        try:
            return DeviceMemory(welcome.device, welcome.life, view, on)
        except SegmentError:
            if view.alive:
                raise
            return None  # its process has died meanwhile, and the memory with it

    def release(self, lease: Lease) -> None:
        """Stop reading. Never raises: a lease whose release is lost ends at its deadline."""
        lease.release()

    def get_into(
        self,
        ns: Namespace,
        keys: Keys,
        out: Any,
        *,
        part: int = 0,
        lease_s: float = 5.0,
        wait_s: float = 0.0,
        request: str = "",
    ) -> npt.NDArray[np.bool_]:
        """Copy blocks into `out`; True for each key that is complete, the rest of `out` is undefined.

        out: one writable buffer, array or tensor of n times the part's bytes, or a list of n items, each a buffer or
            a list of buffers over which the block is scattered.
        lease_s: the copy must be done by then. The lease is released with this client's next request.
        wait_s: how long to wait for blocks that are not in memory here, but on disks or other nodes.
        request: as for `acquire`.
        """
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        here = np.zeros(n, dtype=np.bool_)
        nbytes = part_bytes(ns, part)
        targets = targets_of(out, n, nbytes)
        if not n:
            return here
        lease = self._acquire(
            ns,
            lambda number: self._each(ns, number, packed, part, lease_s, wait_s, request),
            wait_s,
            n * nbytes,
        )
        if lease is None:
            return here
        try:
            slots = lease.slots[part]
            copy_out(slots, targets, here, complete=lease.blocks == n)
            valid = lease.valid
            if ns.verify and valid:
                wrong = wrong_blocks(slots, targets, here)
                here[wrong] = False
                lease.report(part, wrong)
        finally:
            self._connections.release_later(lease.token)
        if not valid:
            here.fill(False)
        return here

    def get(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        part: int = 0,
        wait_s: float = 0.0,
        request: str = "",
    ) -> list[bytes | None]:
        """The bytes of each block, or None; as `get_into`. For bulk use prefer that, or `acquire`."""
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        out = np.empty((n, part_bytes(ns, part)), dtype=np.uint8)
        here = self.get_into(ns, packed, out, part=part, wait_s=wait_s, request=request)
        return [out[i].tobytes() if here[i] else None for i in range(n)]

    # ---- writing -------------------------------------------------------------------------------------

    def reserve(
        self,
        ns: Namespace,
        keys: Keys,
        *,
        part: int = 0,
        parent: bytes | None = None,
        request: str = "",
    ) -> Reservation:
        """Slots for the blocks that are not present yet. Write them, then `commit`.

        parent: the key before the first one in the prefix chain, if there is one. request: as for `acquire`.
        Raises `PoolFull`, `LimitExceeded`, `Unavailable`.
        """
        packed = pack_keys(keys)
        requests = [(request, len(packed) // KEY_BYTES)] if request else []
        (reservation,) = self._reserve(ns, packed, [part], chained(packed, parent), requests)
        return reservation

    def _reserve(
        self,
        ns: Namespace,
        packed: bytes,
        parts: Sequence[int],
        parents: bytes,
        requests: Sequence[tuple[str, int]],
    ) -> list[Reservation]:
        self._check_writes()
        if not packed or not parts:
            raise InvalidRequest("a reservation needs at least one key and one part")
        with self._connections.request() as connection:
            return self._reservations.reserve(connection, ns, parts, packed, parents, requests)

    def commit(
        self, reservation: Reservation, checksums: bytes | None = None, *, replicas: int = 0
    ) -> int:
        """Make the slots readable; returns the number of new blocks. The others had been put meanwhile.

        checksums: xxh3-128 of each slot's bytes, 16 bytes each in order; computed here if not given.
        replicas: see `put`.
        Raises `UnknownReservation` if it was settled before or its daemon is gone, and `Unavailable`.
        """
        if not len(reservation.missing):
            return 0
        given = [_checksums(reservation) if checksums is None else checksums]
        with self._connections.request() as connection:
            (stored,) = self._reservations.commit(connection, [reservation], given, replicas)
        return stored

    def reserve_parts(
        self,
        ns: Namespace,
        keys: Keys,
        parts: Sequence[int],
        parents: Keys,
        *,
        requests: Sequence[tuple[str, int]] = (),
    ) -> list[Reservation]:
        """As `reserve`, in one exchange, of the same blocks in several parts. The blocks may be of several prompts.

        parents: of each key, the one before it in its prefix chain, or `NO_PARENT`. requests: as for `acquire`, each with
            how many of the keys, in their order, are on its behalf: at least one, and all together no more than there are.
        A part without space is refused as the last keys of a reservation are: its `refused` are all of them.
        Raises `PoolFull` if there is no space for any of the parts, `LimitExceeded` also for more than 65,536 keys and
        parts, and `Unavailable`.
        """
        return self._reserve(ns, pack_keys(keys), parts, pack_keys(parents), requests)

    def commit_parts(self, reservations: Sequence[Reservation], *, replicas: int = 0) -> list[int]:
        """As `commit`, in one exchange, of what `reserve_parts` gave. How many blocks of each are new.

        Raises `UnknownReservation` if one was settled before, the others being committed, or if their daemon is
        gone; `Unavailable`.
        """
        open_ = [reservation for reservation in reservations if len(reservation.missing)]
        if not open_:
            return [0] * len(reservations)
        checksums = [_checksums(reservation) for reservation in open_]
        with self._connections.request() as connection:
            counts = iter(self._reservations.commit(connection, open_, checksums, replicas))
        return [next(counts) if len(reservation.missing) else 0 for reservation in reservations]

    def abort(self, reservation: Reservation) -> None:
        """Give slots back unwritten. Never raises; no effect after a commit."""
        reservation.abort()

    def put(
        self,
        ns: Namespace,
        keys: Keys,
        blocks: Any,
        *,
        part: int = 0,
        parent: bytes | None = None,
        replicas: int = 0,
        request: str = "",
    ) -> int:
        """Store blocks; returns the number of new ones.

        Puts of up to 32 MiB are copied into granted slots before the daemon is asked; if
        the previous one met present blocks, and above that size, present blocks are not copied.

        blocks: one buffer, array or CPU tensor of n times the part's bytes, or a list of n items, each a
            buffer or a list of buffers that are gathered. Read until this returns, never kept.
        replicas: how many are wanted in the cluster of each; 0: the namespace's setting. Made
            afterwards, in the background.
        request: as for `acquire`.
        Raises `PoolFull` when not all could be stored (the first ones were: see `contains`),
        `Unavailable`, `InvalidRequest`.
        """
        packed = pack_keys(keys)
        parents = chained(packed, parent)
        stored, refused = self._put(ns, packed, blocks, part, parents, replicas, request)
        if refused:
            raise PoolFull(
                f"{refused} of {len(packed) // KEY_BYTES} blocks found no space: leases, reservations or hard "
                "pins hold it. The blocks before them are stored"
            )
        return stored

    def put_each(
        self,
        ns: Namespace,
        keys: Keys,
        blocks: Any,
        *,
        part: int = 0,
        parents: Keys | None = None,
        replicas: int = 0,
        request: str = "",
    ) -> npt.NDArray[np.bool_]:
        """As `put`, of blocks that need not follow each other; True for each that is stored then, by this put or before.

        parents: of each key, the one before it in its prefix chain, or `NO_PARENT`. None: they have none.
        Raises `Unavailable`, `InvalidRequest`, and `LimitExceeded`; what finds no space is False.
        """
        packed = pack_keys(keys)
        n = len(packed) // KEY_BYTES
        before = bytes(len(packed)) if parents is None else pack_keys(parents)
        try:
            _, refused = self._put(ns, packed, blocks, part, before, replicas, request)
        except PoolFull:
            refused = n
        stored = np.ones(n, dtype=np.bool_)
        if refused:
            tail = packed[(n - refused) * KEY_BYTES :]
            stored[n - refused :] = self.contains(ns, tail, part=part)
        return stored

    def _put(
        self,
        ns: Namespace,
        packed: bytes,
        blocks: Any,
        part: int,
        parents: bytes,
        replicas: int,
        request: str,
    ) -> tuple[int, int]:
        """How many blocks are new, and how many of the last ones found no space. Raises `PoolFull` if none did."""
        self._check_writes()
        n = len(packed) // KEY_BYTES
        source = Source(blocks, n, part_bytes(ns, part))
        if not n:
            return 0, 0
        if self._granted_puts.fits(ns, part, source):
            found = self._granted_puts.put(ns, packed, source, part, parents, replicas, request)
            if found is not None:
                return found, 0
        with self._connections.request() as connection:
            requests = [(request, n)] if request else []
            (reservation,) = self._reservations.reserve(
                connection, ns, [part], packed, parents, requests, source.total
            )
            stored = 0
            if len(reservation.missing):
                with reservation:
                    slots = reservation.slots
                    checksums = self._copy_in(
                        source, reservation.missing, slots.table, slots.rows, slots.fd
                    )
                    connection.be_patient(source.total)
                    (stored,) = self._reservations.commit(
                        connection, [reservation], [checksums], replicas
                    )
            stash = connection.daemon.stashes.get((ns.digest, part))
            if stash is not None:
                stash.ask_first = len(reservation.missing) < n
        return stored, reservation.refused

    def remove(self, ns: Namespace, keys: Keys, *, others_s: float = 0.0) -> int:
        """Remove blocks, all their parts; returns how many were there. Readers under a lease finish.

        others_s: then also from all other nodes, within so many seconds; 0: they keep theirs. What is on its way to
        a node meanwhile is not kept there.
        Raises `ClusterUnavailable` if some nodes did not remove them in time: repeat it.
        """
        packed = pack_keys(keys)
        gone, _ = self.remove_each((ns,), packed, others_s=others_s)
        return len(set(compress(split_keys(packed), gone)))

    def remove_each(
        self,
        namespaces: Sequence[Namespace],
        keys: Keys,
        *,
        beside: Keys = b"",
        others_s: float = 0.0,
    ) -> tuple[bytes, bytes]:
        """As `remove`, in one exchange, from several namespaces: one byte a key, 1 where any of them had it.

        beside: keys that stay; a byte for each tells where its block of the first namespace is, as in `present_in`.
        Raises `LimitExceeded` as that does.
        """
        packed, further = pack_keys(keys), pack_keys(beside)
        n = len(packed) // KEY_BYTES
        if not namespaces or not (packed or further):
            return bytes(n), bytes(len(further) // KEY_BYTES)
        seconds = finite(others_s, "others_s")
        rest = packed, seconds, further
        data = self._ask_each(client_wire.Remove, namespaces, rest, max(seconds, 0.0))
        return data[:n], data[n:]

    def clear_namespace(self, ns: Namespace, *, wait_s: float = RESET_S) -> int:
        """Empty a namespace, for the whole cluster; returns its new epoch. Its clients find nothing, and go on storing.

        wait_s: for the cluster's answer, on top of the client's time-out.
        Raises `Unavailable`, or `ClusterUnavailable` when the membership does not answer: then nothing has changed.
        """
        return int(self._ask_ns(ns, client_wire.ClearNamespace, finite(wait_s, "wait_s")).value)

    def pin(self, ns: Namespace, keys: Keys, kind: str = "soft") -> int:
        """Pin blocks: "soft" evicts them last, "hard" never, "none" unpins; returns how many are there.

        Raises `LimitExceeded` when the tenant's quota does not cover them.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        return int(self._ask_ns(ns, lambda number: client_wire.Pin(number, packed, kind)).value)

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
        """Bring blocks into memory here, from disks and other nodes; returns how many of the prefix are then
        usable.

        recompute, life, trace: as for `acquire`; blocks in that device memory count as here.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        price = _price(recompute)
        return int(
            self._ask_ns(
                ns,
                lambda number: client_wire.Pull(
                    number, packed, finite(wait_s, "wait_s"), price, life, trace
                ),
                wait_s,
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
        """Bring a prompt's blocks here while another node's engine computes them; returns how many are then
        usable.

        Returns when all of the prompt is here, or after `wait_s` (the daemon's `lease_s_max` at most) with
        the blocks that have arrived: a lost node is not an error. Sooner where the next block was `dropped`. Arrived blocks are held until it returns,
        so `acquire` soon. It takes one of this client's connections for that time; `close`, from another
        thread, cancels it.

        source: the name of the node where the prompt is computed; without it the directory is asked for
            its beginning. parts: only these; None: all. trace: as for `acquire`.
        Raises `Unavailable` when the daemon is unreachable, or if it was cancelled, and `LimitExceeded` for
        too many concurrent streams.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        with self._connections.request() as connection:
            listed, limit_s = list(parts or ()), self.timeout_s + wait_s
            answer = self._namespaces.with_number(
                connection,
                ns,
                lambda number: self._connections.ask_long(
                    connection,
                    client_wire.Follow(
                        number, packed, finite(wait_s, "wait_s"), source, listed, trace
                    ),
                    limit_s,
                ),
            )
            return int(answer.value)

    def dropped(self, ns: Namespace, keys: Keys) -> None:
        """These blocks were to be put here, and will not be: streams of a prompt do not wait for them any more.

        Call it for blocks whose put has failed, or was given up, of a prompt that others may follow. Who follows keeps
        what comes before them, and the rest is computed. A hint: skipped while all connections are busy; an
        unreachable daemon, or a namespace that it does not know, is not an error.
        """
        packed = pack_keys(keys)
        if packed:  # if it is lost, who follows has a limit
            self._hint(lambda number: client_wire.Dropped(number, packed), ns)

    def session_turn(
        self,
        ns: Namespace,
        session: str,
        keys: Keys,
        *,
        agent: str = "",
        ended: bool = False,
        shared: bool = False,
    ) -> None:
        """A turn of a session has used these blocks: its prompt's and, if stored, its answer's, from the first on.

        Blocks of the session's turn before that this one does not use, and all of a session that has ended, are evicted
        before others. A hint: it drops nothing, works in the client's own tenant only, and is skipped while all connections are busy; an
        unreachable daemon is no error.

        session, agent: at most 256 characters; `agent` is a strand of the session whose turns follow one another. keys:
        of one chain. ended: there will be no further turn. shared: several
        conversations may have this name, so a turn that has less than half of the blocks of the one before leaves nothing.
        """
        packed = pack_keys(keys)
        self._hint(
            lambda number: client_wire.SessionTurn(
                number, session, packed, agent, ended=ended, shared=shared
            ),
            ns,
        )

    def end_session(self, session: str, nodes: Sequence[str] = ()) -> None:
        """End a session on these nodes, at most 16, or on the client's own if there are none.

        A hint, as `session_turn`. Where the session is not known it changes nothing.
        """
        self._hint(lambda _: client_wire.EndSessionOn(session, list(nodes)))

    def end_request(self, ns: Namespace, request: str, *, session: str = "") -> None:
        """This request has ended: its receipt says so. What is still stored on its behalf is added.

        request: as in `acquire` and `put`. session: that it was a turn of. A hint: skipped while all connections are busy;
        an unreachable daemon is no error.
        """
        self._hint(lambda number: client_wire.EndRequest(number, request, session), ns)

    def intend(
        self,
        ns: Namespace,
        intent: Intent,
        keys: Keys = b"",
        *,
        session: str = "",
        hard: bool = False,
        for_s: float = 0.0,
        dry_run: bool = False,
    ) -> IntentAnswer:
        """What this client wants for blocks of a prompt, or of a session; the answer tells for how many of them it holds.

        The daemon bounds it: pins by the tenant's quotas, what is kept by a share of the memory, and what is prefetched by
        the room that there is without the eviction of others' blocks. Too much is clipped, at whole blocks, from the
        first one on: it never fails for that.

        intent: to pin them softly, or with `hard` never to evict them; to unpin; to keep them in memory for
            `for_s` seconds, at most seven days; to prefetch them into memory, which goes on after the answer; to
            expend them, so that they go before others until they are read; to drop them from this node. Dropped are none
            with a hard pin.
        keys: of a prompt, from its first block on; or else session: see `session_turn`, all its agents in this namespace.
            What other sessions use too is neither expended nor dropped with it.
        dry_run: only answer.
        Raises `InvalidRequest` and `Unavailable`.
        """
        packed = pack_keys(keys)
        seconds = finite(for_s, "for_s")
        message = client_wire.Intend(0, str(intent), packed, session, hard, seconds, dry_run)
        answer = self._ask_ns(
            ns, lambda number: msgspec.structs.replace(message, ns=number), INTENT_S
        )
        return decode_answer(answer.data)

    def intend_on(
        self,
        digest: bytes,
        intent: Intent,
        keys: Keys,
        *,
        node: str = "",
        hard: bool = False,
        for_s: float = 0.0,
        dry_run: bool = False,
    ) -> IntentAnswer:
        """The same as `intend` for blocks of a prompt, on another node, in a namespace that this client need not open.

        digest: of the namespace, which must be open on that node, unless it is to prefetch. node: its name; empty: this
        client's. Raises `InvalidRequest`, also for a node that is not there, and `Unavailable`.
        """
        seconds = finite(for_s, "for_s")
        packed = pack_keys(keys)
        message = client_wire.Intend(
            *(0, str(intent), packed, "", hard, seconds, dry_run, check_digest(digest), node)
        )
        with self._connections.request() as connection:
            answer = connection.ask(message, self.timeout_s + INTENT_S)
        return decode_answer(answer.data)

    def close_namespace(self, ns: Namespace) -> None:
        """This client does not use the namespace any more: one that holds nothing may make room for others.

        It may be opened again. A hint: skipped while all connections are busy; an unreachable daemon is no error. The
        daemon keeps what is in it.
        """
        self._namespaces.generations.pop(ns.digest, None)
        try:
            with self._connections.request(0.0) as connection:
                number = connection.daemon.numbers.pop(ns.digest, None)
                if number is not None:
                    connection.tell(client_wire.CloseNamespace(number))
        except Unavailable:
            pass  # it does not count any more once this client has ended

    def reset(self, ns: Namespace) -> None:
        """This engine's weights are new: blocks stored under the namespace before are no longer found.

        Starts a new epoch for the whole cluster, or enters the one that another engine's reset has started:
        each engine resets once for each change of weights. Other clients find nothing and store
        nothing until they `reset` or `open` the namespace themselves. Held leases stay valid.
        Raises `StaleEpoch` when others have changed their weights more often than this engine: it is one
        change further, and finds and stores nothing until it has caught up. Raises `Unavailable`, or
        `ClusterUnavailable` when the membership does not answer: then the old epoch continues, and the caller
        must not use the namespace any more.
        """
        with self._connections.request() as connection:
            answer = self._namespaces.with_number(
                connection,
                ns,
                lambda number: connection.ask(
                    client_wire.Reset(number, self._namespaces.generations[ns.digest]),
                    self.timeout_s + RESET_S,
                ),
            )
            self._namespaces.opened(connection, ns.digest, answer)
        if not answer.current:
            raise StaleEpoch(
                f"the weights of namespace {ns.digest.hex()} changed more often elsewhere than here; its generation "
                f"is {answer.generation} now: reset again with each remaining change, or open the namespace once the "
                "weights are the latest"
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
        """Have the daemon follow the KV events of this process's engine, now and again after each restart.

        Blocks in its cache are announced as tier `gpu`, until this process ends: a hint for
        routers, never a source of bytes. One engine a client: a new call replaces
        the previous one.

        endpoint: ZeroMQ address to connect to: `tcp://127.0.0.1:5557` or `ipc:///path`, on this
            machine only; empty: stop following.
        replay: where the engine repeats missed events, or empty. topic: of the events.
        groups: the cache group, in the events' numbers, of each part of the namespace, in their order.
        False when the daemon does not follow them: it is unreachable (it is told later, when the namespace
        is used), or it is configured not to (`events`).
        Raises `InvalidRequest` for addresses that cannot be followed, and `LimitExceeded`.
        """
        listed = list(groups)

        def message(number: int) -> client_wire.FollowEvents:
            return client_wire.FollowEvents(number, endpoint, replay, topic, listed)

        self._namespaces.events = (ns.digest, message) if endpoint else None
        try:
            return bool(self._ask_ns(ns, message).value)
        except Unavailable:
            return False

    def announce_engine(self, ns: Namespace, engine: EngineRecord | None) -> bool:
        """Announce this process's engine to all nodes, so that routers send requests to it; None: withdraw.

        Valid until this process ends. A restarted daemon is told again once the namespace is used there; a client
        that seldom uses it should repeat the call periodically, which is cheap. One engine a client: a new call
        replaces the previous one. False when the daemon is unreachable. Raises `InvalidRequest` for invalid
        records, and `LimitExceeded`.
        """

        def message(number: int) -> client_wire.AnnounceEngine:
            return client_wire.AnnounceEngine(number, engine)

        self._namespaces.engine = (ns.digest, message) if engine is not None else None
        try:
            self._ask_ns(ns, message)
        except Unavailable:
            return False
        return True

    # ---- for routers ---------------------------------------------------------------------------------

    def engines(self) -> list[dict[str, Any]]:
        """The engines of this tenant, on all nodes: see `kvpool.wire.client.Engines`. Raises `Unavailable`."""
        found: list[dict[str, Any]] = self._ask_json(client_wire.Engines())
        return found

    def prefixes(
        self, digest: bytes, keys: Keys, *, wait_s: float = 0.05
    ) -> dict[str, tuple[int, int]]:
        """How much of a prefix each node could provide, in blocks: from its memory, and from its memory and
        disks.

        Engines' own caches are not counted. digest: of the namespace, which need not be
        open here. wait_s: other nodes are left out when the directory takes longer. Nodes without blocks
        are left out. A hint: blocks come and go. Raises `Unavailable`.
        """
        message = client_wire.Prefixes(
            check_digest(digest), pack_keys(keys), finite(wait_s, "wait_s")
        )
        with self._connections.request() as connection:
            answer = connection.ask(message, self.timeout_s + wait_s)
        return {node: (first, last) for node, (first, last) in json.loads(answer.data).items()}

    def why_missing(self, digest: bytes, keys: Keys, *, node: str = "") -> dict[str, Any]:
        """Why a node could not provide more of a prompt, now and when it was last read: see
        `kvpool.wire.client.WhyMissing`.

        digest: of the namespace, which must be open on that node. node: its name; empty: this client's. Raises
        `Unavailable`, and `InvalidRequest` for a namespace that is not open there.
        """
        found: dict[str, Any] = self._ask_json(
            client_wire.WhyMissing(check_digest(digest), pack_keys(keys), node)
        )
        return found

    def _ask_json(self, message: frame.Message) -> Any:
        with self._connections.request() as connection:
            return json.loads(connection.ask(message, self.timeout_s + RESET_S).data)

    def stats(self) -> NodeStats:
        """The daemon's counters and this tenant's space. Raises `Unavailable`."""
        with self._connections.request() as connection:
            return node_stats.decode(connection.ask(client_wire.Stats(), self.timeout_s).data)

    # ---- inside --------------------------------------------------------------------------------------

    def _ask_ns(self, ns: Namespace, make: Any, wait_s: float = 0.0) -> Any:
        with self._connections.request() as connection:
            return self._namespaces.with_number(
                connection,
                ns,
                lambda number: connection.ask(make(number), self.timeout_s + wait_s),
            )

    def _hint(self, make: Callable[[int], frame.Message], ns: Namespace | None = None) -> None:
        """Tell the daemon something that it may miss: while all connections are busy, or about a namespace that it does not
        know. make: is given the namespace's number; 0 without one.
        """
        try:
            with self._connections.request(0.0) as connection:
                number = 0 if ns is None else connection.daemon.numbers.get(ns.digest)
                if number is not None:
                    connection.tell(make(number))
        except Unavailable:
            pass

    def _ask_each(
        self,
        kind: Callable[..., frame.Message],
        namespaces: Sequence[Namespace],
        rest: tuple[Any, ...],
        wait_s: float,
    ) -> bytes:
        """The answer to a message about several namespaces. rest: of its fields, after their numbers."""
        limit_s = self.timeout_s + wait_s
        with self._connections.request() as connection:
            answer = self._namespaces.with_numbers(
                connection,
                namespaces,
                lambda numbers: connection.ask(kind(numbers, *rest), limit_s),
            )
        return bytes(answer.data)

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
            with self._connections.request() as connection:
                sent = 0.0

                def ask(number: int) -> Any:
                    nonlocal sent
                    sent = time.monotonic()
                    connection.be_patient(nbytes)
                    return connection.ask(make(number), self.timeout_s + wait_s)

                answer = self._namespaces.with_number(connection, ns, ask)
                return lease_of(self._connections, connection, answer, sent, device, life)
        except Unavailable:
            return None


def _checksums(reservation: Reservation) -> bytes:
    slots = reservation.slots
    return row_checksums(slots.table, slots.rows, slots.nbytes)


def decode_answer(raw: bytes) -> IntentAnswer:
    """The answer to an intent."""
    return decode_json(raw, IntentAnswer, "an answer to an intent of this version")


def _price(recompute: Recompute | None) -> tuple[float, float] | None:
    return None if recompute is None else (recompute.block_s, recompute.growth_s)
