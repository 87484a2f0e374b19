"""Blocks from and for other nodes: what to ask whom, and what becomes of the answers.

Bytes go from segment to segment through the movers; here are only decisions and the rules' bookkeeping.
Peers are those of the configuration.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool import wire
from kvpool.daemon.movers import Movers
from kvpool.daemon.node import Holder, NamespaceState, Node, PartTable
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, NamespaceMismatch, PoolFull
from kvpool.types import KEY_BYTES, split_keys

log = logging.getLogger("kvpool.daemon")

PEER_BACKOFF_S = 1.0  # a peer that failed is left alone for so long
PROBE_SHARE = 0.25  # of the time there is: longest wait for what a peer says it has
_PRESENT, _MISMATCH = 1, 2


@dataclass(slots=True)
class Peer:
    """A node to pull from, and how it did so far."""

    url: str
    retry_at: float = 0.0
    asked: int = 0
    failures: int = 0
    mismatches: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    last_error: str = ""


class Puller:
    """Brings blocks here for clients, and lends ours to the movers that serve peers.

    Event loop only. Blocks pulled stay as ordinary local replicas.
    """

    def __init__(
        self,
        node: Node,
        movers: Movers,
        peers: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.movers = movers
        self.peers = [Peer(url) for url in peers]
        self._clock = clock
        self._tickets = 0
        self._holders: dict[str, Holder] = {}

    def stats(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            {
                "url": peer.url,
                "available": now >= peer.retry_at,
                "asked": peer.asked,
                "failures": peer.failures,
                "checksum_mismatches": peer.mismatches,
                "blocks": peer.blocks,
                "bytes": peer.bytes,
                "seconds": peer.seconds,
                "last_error": peer.last_error,
            }
            for peer in self.peers
        ]

    # ---- for our clients -----------------------------------------------------------------------------

    async def pull(
        self, namespace: NamespaceState, parts: Sequence[int], packed: bytes, wait_s: float
    ) -> int:
        """Bring what is missing of the prefix here; the usable blocks afterwards. Ends by `wait_s`."""
        if not wait_s > 0:
            raise InvalidRequest(f"a wait of {wait_s} seconds")
        node = self.node
        deadline = self._clock() + wait_s
        here = node.match(namespace, parts, packed)
        wanted = len(packed) // KEY_BYTES
        for peer in self.peers:
            now = self._clock()
            left = deadline - now
            if here == wanted or left <= 0:
                break
            if now < peer.retry_at:
                continue
            peer.asked += 1
            try:
                there = await self.movers.ask(
                    wire.AskPeer(
                        peer.url,
                        namespace.tenant.name,
                        namespace.digest,
                        list(parts),
                        packed,
                        left * PROBE_SHARE,
                    )
                )
                if there > here:
                    await self._pull_from(peer, namespace, parts, packed, there, deadline)
            except NamespaceMismatch:
                raise
            except KvpoolError as error:
                self._failed(peer, str(error))
            here = node.match(namespace, parts, packed)
        return here

    async def _pull_from(
        self,
        peer: Peer,
        namespace: NamespaceState,
        parts: Sequence[int],
        packed: bytes,
        there: int,
        deadline: float,
    ) -> None:
        """Fetch what is missing of the peer's prefix of `there` blocks, part by part."""
        keys = split_keys(packed)[:there]
        tables = [namespace.tables[p] for p in parts] if parts else namespace.tables
        for table in tables:
            wanted = [key for key in _needed(table, keys) if key not in table.blocks]
            left = deadline - self._clock()
            if not wanted:
                continue
            if left <= 0 or not await self._pull_part(peer, table, wanted, left):
                return

    async def _pull_part(
        self, peer: Peer, table: PartTable, wanted: Sequence[bytes], left_s: float
    ) -> bool:
        """Blocks of one part, into fresh slots; whether all of them arrived."""
        node = self.node
        namespace = table.namespace
        holder = self._holder(namespace.tenant.name)
        self._tickets += 1
        ticket = self._tickets
        try:
            node.reserve(holder, namespace, table.part, ticket, b"".join(wanted))
        except (PoolFull, LimitExceeded):
            return False
        reservation = holder.reservations.get(ticket)
        if reservation is None:
            return True  # somebody else brought them in the meantime
        indices = reservation.indices
        order = wire.PullBlocks(
            url=peer.url,
            tenant=namespace.tenant.name,
            digest=namespace.digest,
            part=table.part,
            nbytes=table.spec.nbytes,
            keys=b"".join(reservation.keys),
            segment=namespace.tenant.segment,
            stride=table.stride,
            rows=wire.pack_rows(reservation.rows),
            deadline_s=left_s,
        )
        # Whatever happens, `pull` returns only when nothing writes to the rows any more, so that what
        # did not arrive can be given back. That includes our own cancellation.
        try:
            pulled = await self.movers.pull(order)
            arrived = [i for i, s in zip(indices, pulled.status, strict=True) if s == _PRESENT]
            checksums = b"".join(
                checksum
                for checksum, status in zip(
                    split_keys(pulled.checksums), pulled.status, strict=True
                )
                if status == _PRESENT
            )
            if arrived:
                node.commit(holder, ticket, checksums, arrived)
        finally:
            node.abort(holder, ticket)
        nbytes = len(arrived) * table.spec.nbytes
        mismatches = pulled.status.count(_MISMATCH)
        node.counters.pulled_blocks += len(arrived)
        node.counters.pulled_bytes += nbytes
        node.counters.checksum_mismatches += mismatches
        peer.blocks += len(arrived)
        peer.bytes += nbytes
        peer.seconds += pulled.seconds
        peer.mismatches += mismatches
        if pulled.error:
            self._failed(peer, pulled.error)
        return len(arrived) == len(wanted)

    def _failed(self, peer: Peer, error: str) -> None:
        peer.failures += 1
        peer.last_error = error
        peer.retry_at = self._clock() + PEER_BACKOFF_S

    def _holder(self, tenant: str) -> Holder:
        """Who reserves for pulls. It lives as long as this process."""
        holder = self._holders.get(tenant)
        if holder is None:
            holder = self._holders[tenant] = self.node.add_holder(tenant, "", "pulls")
        return holder

    # ---- for peers, through our movers ---------------------------------------------------------------

    def asked(self, question: wire.Ask) -> int:
        """How many blocks of the prefix a peer could pull from here."""
        namespace = self._known(question.tenant, question.digest)
        if namespace is None:
            return 0
        return self.node.match(namespace, question.parts, question.keys)

    def lend(self, request: wire.Lend) -> wire.Lent:
        """Lease what is here of the wanted blocks to a mover, until `give_back`."""
        absent = array("I", [wire.NO_ROW]) * (len(request.keys) // KEY_BYTES)
        nothing = wire.Lent("", 0, 1, absent.tobytes(), b"")
        namespace = self._known(request.tenant, request.digest)
        if namespace is None:
            return nothing
        if not 0 <= request.part < len(namespace.tables):
            raise InvalidRequest(f"part {request.part}: this node's namespace has none such")
        table = namespace.tables[request.part]
        if table.spec.nbytes != request.nbytes:
            raise NamespaceMismatch(
                f"part {request.part} of namespace {request.digest.hex()} has {table.spec.nbytes} "
                f"bytes on node {self.node.incarnation}, the peer asks for {request.nbytes}"
            )
        tenant = namespace.tenant
        holder = self._lender(tenant.name)
        lease = self.node.acquire(
            holder, namespace, [request.part], request.keys, None, self._clock(), scattered=True
        )
        if lease is None:
            return nothing
        _, blocks = lease.parts[request.part]
        found = {block.key: block for block in blocks}
        rows = absent
        checksums = []
        for index, key in enumerate(split_keys(request.keys)):
            block = found.get(key)
            if block is not None:
                rows[index] = block.row
                checksums.append(block.checksum)
        self.node.counters.lent_blocks += len(blocks)
        return wire.Lent(
            lease.token, tenant.segment, table.stride, rows.tobytes(), b"".join(checksums)
        )

    def give_back(self, token: str) -> None:
        """A mover has finished with a loan, or is dead."""
        for holder in self._holders.values():
            if token in holder.leases:
                self.node.release(holder, token)
                return

    def corrupt(self, report: wire.Corrupt) -> None:
        """A peer found that bytes of ours do not match their checksum: drop that copy."""
        namespace = self._known(report.tenant, report.digest)
        if namespace is not None:
            for key in split_keys(report.keys):
                self.node.drop_corrupt(namespace, report.part, key)

    def _lender(self, tenant: str) -> Holder:
        """Who lends to movers. One for all movers: a dead mover's loans are given back one by one."""
        name = f"{tenant}/loans"
        holder = self._holders.get(name)
        if holder is None:
            holder = self._holders[name] = self.node.add_holder(tenant, "", "loans")
        return holder

    def _known(self, tenant: str, digest: bytes) -> NamespaceState | None:
        found = self.node.tenants.get(tenant)
        return None if found is None else found.namespaces.get(digest)


def _needed(table: PartTable, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Which keys of a usable prefix this part needs."""
    step = table.spec.stride
    chain = keys[step - 1 :: step] if step > 1 else keys
    window = table.spec.window_blocks
    return chain[-window:] if window else chain
