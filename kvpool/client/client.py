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

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from kvpool.client.connection import TIMEOUT_S_MAX
from kvpool.client.connections import Connections
from kvpool.client.copying import copy_out, part_bytes, targets_of, wrong_blocks
from kvpool.client.dialer import Dialer
from kvpool.client.engines import OwnEngine, Routing
from kvpool.client.hints import Intents, Sessions
from kvpool.client.namespaces import RESET_S, Namespaces, Requests
from kvpool.client.puts import Puts, Reservations, chained
from kvpool.client.reads import Reads
from kvpool.client.slots import Lease, Reservation, lease_of
from kvpool.config import default_operator_socket, default_socket_path
from kvpool.decoding import finite
from kvpool.errors import InvalidRequest, PoolFull, Unavailable
from kvpool.telemetry import node_stats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import (
    DEFAULT_TENANT,
    KEY_BYTES,
    Keys,
    Namespace,
    NamespaceRecord,
    Presence,
    Recompute,
    pack_keys,
    split_keys,
)
from kvpool.wire import client as client_wire

if TYPE_CHECKING:
    from kvpool.client.device_memory import DeviceMemory

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

    namespaces, sessions, intents, routing: requests that are about no single blocks. engine: that of this process.
    All requests about blocks are methods of this class, however many there are.
    """

    _is_operator: ClassVar[bool] = False
    """Whether it connects to the operators' socket, if it may."""

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
        self.tenant = tenant
        self.instance = instance or secrets.token_hex(8)
        path = socket_path or default_socket_path()
        self._connections = Connections(
            Dialer(
                path,
                default_operator_socket(path) if self._is_operator else None,
                tenant,
                token,
                self.instance,
                operator_token,
            ),
            timeout_s=timeout_s,
            connections_max=connections_max,
            read_only=read_only,
        )
        self._requests = Requests(self._connections)
        self._reads = Reads(self._requests)
        self._reservations = Reservations(self._requests)
        self._puts = Puts(self._requests, self._reservations)
        self.namespaces = Namespaces(self._requests)
        self.sessions = Sessions(self._requests)
        self.intents = Intents(self._requests)
        self.engine = OwnEngine(self._requests)
        self.routing = Routing(self._requests.ask, RESET_S)
        if connect:
            self._connections.connect()

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
        return self._connections.dialer.socket_path

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
            (`namespaces.generation`); -1: the present one, at the time of the first answer. After a reset by
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
        known = self._requests.namespaces
        known.generations[namespace.digest] = generation
        try:
            with self._connections.request() as connection:
                known.make_known(connection, namespace)
        except Unavailable:
            pass
        return namespace

    # ---- reading -------------------------------------------------------------------------------------

    def match(self, ns: Namespace, keys: Keys, *, parts: Sequence[int] | None = None) -> int:
        """The longest prefix of `keys`, in blocks, that an engine could use from this node."""
        packed = pack_keys(keys)
        if not packed:
            return 0
        try:
            answer = self._requests.ask_in(ns, client_wire.Match, packed, list(parts or ()))
        except Unavailable:
            return 0
        return int(answer.value)

    def contains(self, ns: Namespace, keys: Keys, *, part: int = 0) -> npt.NDArray[np.bool_]:
        """For each key, whether the part of the block is on this node."""
        found, _ = self._reads.present((ns,), pack_keys(keys), part, None)
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
        data, besides = self._reads.present(
            namespaces, packed, part, seconds, first=first, beside=pack_keys(beside)
        )
        n = len(packed) // KEY_BYTES
        return [data[n * at : n * at + n] for at in range(asked)], besides

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
        return self._reads.acquire_each(ns, packed, part, lease_s, wait_s, request)

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
        chosen, price = list(parts or ()), _price(recompute)
        times = finite(lease_s, "lease_s"), finite(wait_s, "wait_s")
        rest = price, life, trace, ns.verify, request, for_others
        fields = packed, chosen, *times, False, *rest
        return self._reads.acquire(ns, fields, wait_s, device=device, life=life)

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
        message = client_wire.Join(token, list(parts or ()), verify)
        sent = time.monotonic()
        try:
            with self._connections.request() as connection:
                answer = connection.ask(message, self._connections.timeout_s)
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
        from kvpool.client.device_memory import attach

        return attach(self._connections, on)

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
        lease = self._reads.acquire_each(ns, packed, part, lease_s, wait_s, request, n * nbytes)
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
            lease.release_later()
        if not valid:
            here.fill(False)
        return here

    def get(
        self, ns: Namespace, keys: Keys, *, part: int = 0, wait_s: float = 0.0, request: str = ""
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
        parents = chained(packed, parent)
        return self.reserve_parts(ns, packed, [part], parents, requests=requests)[0]

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
        given = [reservation.checksums() if checksums is None else checksums]
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
        self._reservations.check()
        packed = pack_keys(keys)
        if not packed or not parts:
            raise InvalidRequest("a reservation needs at least one key and one part")
        with self._connections.request() as connection:
            return self._reservations.reserve(
                connection, ns, parts, packed, pack_keys(parents), requests
            )

    def commit_parts(self, reservations: Sequence[Reservation], *, replicas: int = 0) -> list[int]:
        """As `commit`, in one exchange, of what `reserve_parts` gave. How many blocks of each are new.

        Raises `UnknownReservation` if one was settled before, the others being committed, or if their daemon is
        gone; `Unavailable`.
        """
        open_ = [reservation for reservation in reservations if len(reservation.missing)]
        if not open_:
            return [0] * len(reservations)
        checksums = [reservation.checksums() for reservation in open_]
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
        stored, refused = self._puts.put(ns, packed, blocks, part, parents, replicas, request)
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
            _, refused = self._puts.put(ns, packed, blocks, part, before, replicas, request)
        except PoolFull:
            refused = n
        stored = np.ones(n, dtype=np.bool_)
        if refused:
            tail = packed[(n - refused) * KEY_BYTES :]
            stored[n - refused :] = self.contains(ns, tail, part=part)
        return stored

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
        data = self._requests.ask_in_all(
            namespaces, client_wire.Remove, packed, seconds, further, wait_s=max(seconds, 0.0)
        )
        return data[:n], data[n:]

    def pin(self, ns: Namespace, keys: Keys, kind: str = "soft") -> int:
        """Pin blocks: "soft" evicts them last, "hard" never, "none" unpins; returns how many are there.

        Raises `LimitExceeded` when the tenant's quota does not cover them.
        """
        packed = pack_keys(keys)
        if not packed:
            return 0
        return int(self._requests.ask_in(ns, client_wire.Pin, packed, kind).value)

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
        fields = packed, finite(wait_s, "wait_s"), _price(recompute), life, trace
        return int(self._requests.ask_in(ns, client_wire.Pull, *fields, wait_s=wait_s).value)

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
        fields = packed, finite(wait_s, "wait_s"), source, list(parts or ()), trace
        limit_s = self._connections.timeout_s + wait_s

        def ask(number: int) -> Any:
            message = client_wire.Follow(number, *fields)
            return self._connections.ask_long(connection, message, limit_s)

        with self._connections.request() as connection:
            return int(self._requests.namespaces.with_number(connection, ns, ask).value)

    def dropped(self, ns: Namespace, keys: Keys) -> None:
        """These blocks were to be put here, and will not be: streams of a prompt do not wait for them any more.

        Call it for blocks whose put has failed, or was given up, of a prompt that others may follow. Who follows keeps
        what comes before them, and the rest is computed. A hint: skipped while all connections are busy; an
        unreachable daemon, or a namespace that it does not know, is not an error.
        """
        packed = pack_keys(keys)
        if packed:  # if it is lost, who follows has a limit
            self._requests.hint_in(ns, client_wire.Dropped, packed)

    def stats(self) -> NodeStats:
        """The daemon's counters and this tenant's space. Raises `Unavailable`."""
        return node_stats.decode(self._requests.ask(client_wire.Stats()).data)


def _price(recompute: Recompute | None) -> tuple[float, float] | None:
    return None if recompute is None else (recompute.block_s, recompute.growth_s)
