"""Handlers of clients' requests to find and read blocks. Event loop only."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.commit_waiters import DROPPED_S
from kvpool.daemon.core.events import Joined, Matched, Pulled, Read, Stage
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_request, rows
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.daemon.ops.commands import namespace_for
from kvpool.daemon.server.answers import describe_lease
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.errors import InvalidRequest
from kvpool.types import Recompute, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame

EXPIRY_TICK_S = 0.02  # leases end at most this much after their deadline
log = logging.getLogger("kvpool.daemon")

_NOTHING_LEASED = client_wire.Leased("", 0, 0.0, [])


@dataclass(eq=False, repr=False, slots=True)
class Reads:
    """Looks blocks up, leases them, and brings them here. Ends leases."""

    _node: Node
    _device: DeviceTier | None
    _fetcher: BlockFetcher
    _streams: PrefixStreams
    _clock: Callable[[], float]
    released: list[tuple[Holder, str]] = field(default_factory=list, init=False)
    """Leases to end soon, by their tokens: nobody waits for it."""
    _expiry: asyncio.TimerHandle | None = field(default=None, init=False)
    _expiry_due: float = field(default=math.inf, init=False)

    def close(self) -> None:
        """Stop checking leases."""
        if self._expiry is not None:
            self._expiry.cancel()

    def _acquire(
        self, holder: Holder, m: client_wire.Acquire
    ) -> client_wire.Leased | Coroutine[Any, Any, client_wire.Leased]:
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
        asked_at = self._clock()
        if m.scattered and (m.life or len(m.parts) != 1):
            raise InvalidRequest(
                "a scattered acquire must name exactly one part, and cannot use device memory"
            )
        if m.request:
            check_request(m.request)
        keys = split_keys(m.keys)
        if m.wait_s > 0 and self._fetcher.active:
            here = self._here(namespace, m, keys)
            if here < len(keys):
                return self._acquire_with_pull(holder, namespace, m, keys, asked_at, here)
        return self._acquire_now(holder, namespace, m, keys, asked_at)

    def _here(
        self, namespace: NamespaceState, m: client_wire.Acquire, keys: Sequence[bytes]
    ) -> int:
        """How many of the requested blocks are where their reader reads them."""
        if m.scattered:
            return self._node.leases.contains(namespace, m.parts[0], keys).count(1)
        direct = self._direct(m) is not None
        return self._fetcher.lookups.match(namespace, m.parts, keys, direct=direct)

    def _direct(self, m: client_wire.Acquire | client_wire.Pull) -> DeviceTier | None:
        """The spare device memory, if the client is attached to it."""
        device = self._device
        return device if device is not None and m.life and m.life == device.life else None

    def _acquire_now(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: client_wire.Acquire,
        keys: Sequence[bytes],
        asked_at: float,
        here: int = frame.KEYS_MAX,
        pulled: Pulled | None = None,
        waited_s: float | None = None,
    ) -> client_wire.Leased:
        """here: the most blocks that could have been leased without waiting. pulled: what a wait for others was for."""
        now = self._clock()
        direct = self._direct(m)
        if direct is not None:
            lease = direct.acquire(holder, namespace, m.parts, keys, m.lease_s, now)
        else:
            lease = self._node.leases.acquire(
                holder,
                namespace,
                m.parts,
                keys,
                m.lease_s,
                now,
                scattered=m.scattered,
            )
        if lease is not None:
            lease.request, lease.unread = m.request, m.for_others
        found = 0 if lease is None else lease.blocks
        stage = Stage.AGAIN if m.wait_s > 0 else Stage.HERE
        asked = (namespace, m.parts, m.keys, keys)
        self._node.events.emit(
            Read(*asked, found, here, stage, pulled, lease, m.scattered, waited_s)
        )
        if lease is None:
            return _NOTHING_LEASED
        if lease.deadline is not None:
            self._expire_by(lease.deadline, now)
        return describe_lease(
            *(lease, lease.parts, asked_at, keys if m.scattered else None), checksums=m.verify
        )

    async def _acquire_with_pull(
        self,
        holder: Holder,
        namespace: NamespaceState,
        m: client_wire.Acquire,
        keys: Sequence[bytes],
        asked_at: float,
        here: int,
    ) -> client_wire.Leased:
        wait_s = min(m.wait_s, self._node.limits.lease_s_max)
        pulled = None
        if m.scattered:
            await self._fetcher.pull_each(namespace, m.parts, keys, wait_s)
        else:
            pulled = await self._fetcher.pull(
                namespace,
                m.parts,
                keys,
                here,
                wait_s,
                _recompute(m),
                direct=self._direct(m) is not None,
            )
        waited_s = self._clock() - asked_at
        return self._acquire_now(holder, namespace, m, keys, asked_at, here, pulled, waited_s)

    def _join(self, holder: Holder, m: client_wire.Join) -> client_wire.Leased:
        if len(set(m.parts)) != len(m.parts):
            raise InvalidRequest("a part is named twice")
        now = self._clock()
        lease = self._node.leases.join(holder, m.token, now)
        if lease is None:
            return _NOTHING_LEASED
        try:
            answer = describe_lease(lease, m.parts or lease.parts, now, None, checksums=m.verify)
        except InvalidRequest:
            self._node.leases.release(holder, m.token)
            raise
        if lease.unread:
            lease.unread = False
            self._node.events.emit(Joined(lease))
        return answer

    def _corrupt_slots(self, holder: Holder, m: client_wire.CorruptSlots) -> frame.Done:
        """A client's word is enough: it may remove its tenant's blocks anyway."""
        lease = holder.leases.get(m.token)
        if lease is None or m.part not in lease.parts:
            return frame.Done(0)
        wanted = set(rows(m.rows))
        _, blocks = lease.parts[m.part]
        found = [block for block in blocks if block.row in wanted and not block.gone]
        for block in found:
            self._node.removal.drop_corrupt(block.table.namespace, m.part, block.key)
        if found:
            log.warning(
                "client %s of tenant %s found %d blocks in memory that do not match their checksums: dropped",
                holder.name,
                holder.tenant.name,
                len(found),
            )
        return frame.Done(len(found))

    def _release(self, holder: Holder, m: client_wire.Release) -> frame.Done:
        # Not waited for: done when the answers of this round are written.
        self.released += [(holder, token) for token in m.tokens]
        return frame.Done(len(m.tokens))

    def release(self) -> None:
        released, self.released = self.released, []
        for holder, token in released:
            self._node.leases.release(holder, token)

    def _match(self, holder: Holder, m: client_wire.Match) -> frame.Done:
        keys = split_keys(m.keys)
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
        found = self._node.leases.match(namespace, m.parts, keys)
        self._node.events.emit(Matched(namespace, len(keys), found))
        return frame.Done(found)

    async def _pull(self, holder: Holder, m: client_wire.Pull) -> frame.Done:
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self._node.limits.lease_s_max)
        direct = self._direct(m) is not None
        keys = split_keys(m.keys)
        here = self._fetcher.lookups.match(namespace, [], keys, direct=direct)
        asked_at = self._clock()
        pulled = await self._fetcher.pull(
            namespace, [], keys, here, wait_s, _recompute(m), direct=direct
        )
        found = self._fetcher.lookups.match(namespace, [], keys, direct=direct)
        waited_s = self._clock() - asked_at
        asked = (namespace, (), m.keys, keys)
        self._node.events.emit(Read(*asked, found, here, Stage.PULLED, pulled, waited_s=waited_s))
        return frame.Done(found)

    async def _follow(self, holder: Holder, m: client_wire.Follow) -> frame.Done:
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
        wait_s = min(m.wait_s, self._node.limits.lease_s_max)
        keys = split_keys(m.keys)
        return frame.Done(await self._streams.follow(namespace, m.parts, keys, wait_s, m.source))

    def _dropped(self, holder: Holder, m: client_wire.Dropped) -> frame.Done:
        namespace = namespace_for(self._node, holder, m.ns, m.keys)
        waiters = self._node.commit_waiters
        waiters.drop(namespace.directory_digest, split_keys(m.keys), self._clock())
        loop = asyncio.get_running_loop()
        loop.call_later(2 * DROPPED_S, lambda: waiters.forget_dropped(self._clock()))
        return frame.Done()

    def _expire_by(self, due: float, now: float) -> None:
        """Check leases when this one's deadline has come."""
        if due < self._expiry_due:
            if self._expiry is not None:
                self._expiry.cancel()
            self._expiry_due = due
            self._expiry = asyncio.get_running_loop().call_later(
                max(EXPIRY_TICK_S, due - now), self._expire
            )

    def _expire(self) -> None:
        self._expiry, self._expiry_due = None, math.inf
        now = self._clock()
        due = self._node.leases.expire(now)
        if due is not None:
            self._expire_by(due, now)


def _recompute(m: client_wire.Acquire | client_wire.Pull) -> Recompute | None:
    """Raises `InvalidRequest` for invalid prices."""
    return None if m.recompute is None else Recompute(*m.recompute)
