"""How slots are filled by one source, and what is learned of it: arrived blocks are committed, estimates updated.

Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from kvpool.daemon.core.blocks import Holder, Origin, PartTable, Reservation
from kvpool.daemon.core.events import Loaded
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.tier import SharedTier
from kvpool.daemon.fetch.locate import Locator
from kvpool.daemon.fetch.ports import (
    PEER,
    TIER_OF,
    ClusterView,
    LocalSource,
    PeerTransport,
    node_name,
)
from kvpool.daemon.fetch.pull_leases import PullLeases
from kvpool.daemon.fetch.transfer import Transfer
from kvpool.errors import KvpoolError, LimitExceeded
from kvpool.placement.peers import Peers
from kvpool.telemetry.cluster_stats import FetchStats
from kvpool.telemetry.memory_stats import Loads
from kvpool.telemetry.spans import CALLED_OFF, READ, TRANSFER, Span, child, working_for
from kvpool.types import CHECKSUM_BYTES, BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire


@dataclass(eq=False)
class Filling:
    """See the module. local: the tiers below memory on this node, by the name of each as a source."""

    _node: Node
    _transport: PeerTransport
    _cluster: ClusterView
    _local: Mapping[bytes, LocalSource]
    _objects: SharedTier
    _locator: Locator
    _peers: Peers
    _clock: Callable[[], float]
    _stats: FetchStats
    _leases: PullLeases

    async def fill(
        self,
        transfer: Transfer,
        holder: Holder,
        url: str,
        seconds: float,
        origin: Origin,
    ) -> worker_wire.Pulled | None:
        """Have the slots filled, and commit the arrived blocks; None on failure."""
        node, reserved = self._node, transfer.reserved
        count = sum(len(reservation.keys) for reservation in reserved.values())
        nbytes = sum(len(each.keys) * each.table.spec.nbytes for each in reserved.values())
        now = self._clock()
        transfer.expected_s = self._estimate_s(transfer.source, nbytes, now)
        self._peers.started(transfer.source, nbytes, now)
        span = child(TRANSFER if url else READ)
        try:
            # This returns, raises or is cancelled only when nothing writes to the rows any more, so
            # that unfilled rows can be freed.
            filled = list(reserved.values())
            if span is None:
                pulled = await self._bring(transfer, url, filled, seconds)
            else:
                with working_for(span):
                    pulled = await self._bring_traced(transfer, url, filled, seconds, span)
            arrived: dict[PartTable, Sequence[bytes]] = {}
            for ticket, outcome in zip(reserved, _outcomes(filled, pulled), strict=True):
                reservation, status, checksums = outcome
                table, keys = reservation.table, reservation.keys
                if transfer.removed:
                    status = bytes(
                        BlockStatus.ABSENT if key in transfer.removed else each
                        for key, each in zip(keys, status, strict=True)
                    )
                came = status.count(BlockStatus.PRESENT)
                if came == len(keys):
                    node.puts.commit(holder, ticket, checksums, None, origin)
                    arrived[table] = keys
                elif came:
                    here = [each == BlockStatus.PRESENT for each in status]
                    some = b"".join(compress(split_keys(checksums), here))
                    indices = list(compress(reservation.indices, here))
                    node.puts.commit(holder, ticket, some, indices, origin)
                    arrived[table] = list(compress(keys, here))
            # Lease what has arrived until those who wait for it have had their turn of the loop. Where memory is full,
            # what comes next would evict it first: many prompts at a time took each other's blocks away, and none was
            # ever whole.
            if not transfer.background:
                self._leases.hold(arrived, transfer.kept)
        except KvpoolError as error:
            if span is not None:
                span.end(str(error))
            if isinstance(error, LimitExceeded):  # it was not begun, here: nobody's fault
                self._peers.stopped(transfer.source, nbytes)
            else:
                self._failed(transfer, nbytes, str(error))
            self._count(transfer, Loads(failed=count))
            return None
        except asyncio.CancelledError:
            if span is not None:
                span.end(CALLED_OFF)
            self._peers.stopped(transfer.source, nbytes)
            self._count(transfer, Loads(cancelled=count))
            raise
        return pulled

    async def _bring_traced(
        self,
        transfer: Transfer,
        url: str,
        reserved: Sequence[Reservation],
        seconds: float,
        span: Span,
    ) -> worker_wire.Pulled:
        """As `_bring`, and record the result in the span."""
        tier = TIER_OF.get(transfer.source, PEER)
        asked = sum(len(reservation.keys) for reservation in reserved)
        first = reserved[0].table.part
        span.set(tier=tier, part=first, parts=len(reserved), blocks_asked=asked)
        if url:
            span.set(node=node_name(self._cluster, transfer.source))
        trace = span.traceparent if url else ""
        pulled = await self._bring(transfer, url, reserved, seconds, trace)
        came = pulled.status.count(BlockStatus.PRESENT)
        span.count_above(f"parts_from_{tier}", came)
        span.end(
            pulled.error,
            blocks=came,
            bytes=sum(
                status.count(BlockStatus.PRESENT) * reservation.table.spec.nbytes
                for reservation, status, _ in _outcomes(reserved, pulled)
            ),
            mismatches=pulled.status.count(BlockStatus.MISMATCH),
            absent=pulled.status.count(BlockStatus.ABSENT),
        )
        return pulled

    async def _bring(
        self,
        transfer: Transfer,
        url: str,
        reserved: Sequence[Reservation],
        seconds: float,
        trace: str = "",
    ) -> worker_wire.Pulled:
        """Have reserved rows filled by a peer, or without a URL by a lower tier or object storage."""
        if not url:
            (only,) = reserved
            tier = self._local.get(transfer.source, self._objects)
            return await tier.load(only.table, only.keys, only.rows, seconds)
        namespace = transfer.namespace
        order = worker_wire.PullBlocks(
            url=url,
            tenant=namespace.tenant.name,
            digest=namespace.digest,
            segment=namespace.tenant.segment,
            parts=[
                worker_wire.PartRows(
                    part=table.part,
                    nbytes=table.spec.nbytes,
                    stride=table.stride,
                    keys=b"".join(each.keys),
                    rows=frame.pack_rows(each.rows),
                )
                for each in reserved
                for table in [each.table]
            ],
            deadline_s=seconds,
            background=transfer.background,
            trace=trace,
        )
        return await self._transport.pull(order)

    # ---- what is learned from it ---------------------------------------------------------------------

    def _estimate_s(self, source: bytes, nbytes: int, now: float) -> float:
        """How long this many bytes from a source should take, after those in flight."""
        peer = self._peers.get(source) or self._peers.stranger(source)
        latency_s, per_byte = peer.expected(now)
        return latency_s + (peer.ahead_bytes + nbytes) * per_byte

    def _count(self, transfer: Transfer, loads: Loads) -> None:
        """Count the outcome of a transfer, by source and tenant."""
        tier = TIER_OF.get(transfer.source, PEER)
        self._node.events.emit(Loaded(transfer.namespace, tier, loads))
        if tier == PEER:
            self._stats.delivered.from_peer(node_name(self._cluster, transfer.source), loads)

    def learn(self, transfer: Transfer, pulled: worker_wire.Pulled) -> None:
        """Count a transfer that has ended on its own, and update its source's estimates."""
        reserved = list(transfer.reserved.values())
        source, now = transfer.source, self._clock()
        count = len(pulled.status)
        came = pulled.status.count(BlockStatus.PRESENT)
        absent = pulled.status.count(BlockStatus.ABSENT)
        mismatches = pulled.status.count(BlockStatus.MISMATCH)
        nbytes = came_bytes = largest = 0
        lacks = {BlockStatus.ABSENT, BlockStatus.MISMATCH}
        for reservation, status, _ in _outcomes(reserved, pulled):
            table, keys = reservation.table, reservation.keys
            each = table.spec.nbytes
            here = status.count(BlockStatus.PRESENT)
            nbytes += len(keys) * each
            came_bytes += here * each
            largest = max(largest, each)
            if here < len(keys):
                for key, of_key in zip(keys, status, strict=True):
                    if of_key in lacks:
                        self._locator.was_missing(table, key, source, now)
        counters = self._node.counters
        counters.pulled_blocks += came
        counters.pulled_bytes += came_bytes
        counters.checksum_mismatches += mismatches
        self._stats.mismatches += mismatches
        self._stats.absent += absent
        failed = count - came - absent - mismatches
        self._count(transfer, Loads(came, absent, mismatches, failed, nbytes=came_bytes))
        tier = TIER_OF.get(source, PEER)
        if came and not transfer.background:
            self._stats.delivered.took(tier, pulled.seconds)
            if came == count:
                self._stats.delivered.foreseen(tier, transfer.expected_s, pulled.seconds)
        if pulled.error:
            # After an error, up to one block's worth of bytes may have arrived in part.
            self._failed(transfer, nbytes, pulled.error, came_bytes + largest, pulled.seconds)
        elif transfer.background:  # its low priority does not measure the source's speed
            self._peers.stopped(source, nbytes)
        else:
            self._peers.finished(source, came_bytes, pulled.seconds, now, asked=nbytes)

    def _failed(
        self, transfer: Transfer, nbytes: int, error: str, at_most: int = 0, seconds: float = 0.0
    ) -> None:
        self._stats.failed_transfers += 1
        if transfer.background:
            self._peers.stopped(transfer.source, nbytes)
            return
        self._peers.failed(
            transfer.source,
            self._clock(),
            error=error,
            asked=nbytes,
            at_most=at_most,
            seconds=seconds,
        )


def _outcomes(
    reserved: Sequence[Reservation], pulled: worker_wire.Pulled
) -> Iterator[tuple[Reservation, bytes, bytes]]:
    """Each reservation with a `BlockStatus` and a checksum of each of its keys."""
    at = 0
    for reservation in reserved:
        end = at + len(reservation.keys)
        checksums = pulled.checksums[at * CHECKSUM_BYTES : end * CHECKSUM_BYTES]
        yield reservation, pulled.status[at:end], checksums
        at = end
