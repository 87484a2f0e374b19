"""Where blocks are that clients ask for: the same keys in one namespace or several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import Holder, NamespaceState, PartTable
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_counts
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.locate import LOOKUP_KEYS
from kvpool.daemon.ops.commands import namespace_for
from kvpool.types import KEY_BYTES, Presence, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame

AT_A_TIME = 256
"""Keys that are looked for in all namespaces at a time. The time that others take is then waited for once; but what the
event loop does in tasks of their own is not held against the tenant, so many keys go one namespace after the other.
"""
_IN_MEMORY = bytes([Presence.MEMORY])


class InMemory(NamedTuple):
    """What memory alone tells."""

    data: bytes
    whole: bool
    """Whether it is the whole answer; else ask `Presences.in_each`. Keys beside need not be in memory for that."""


class Presences:
    """Event loop only. Answers are a `Presence` a key, one byte each."""

    def __init__(self, node: Node, fetcher: BlockFetcher, clock: Callable[[], float]) -> None:
        self._node = node
        self._fetcher = fetcher
        self._clock = clock

    def present(
        self, holder: Holder, m: client_wire.Present
    ) -> frame.Bytes | Coroutine[Any, Any, frame.Bytes]:
        """Answer a client: a byte a key in each namespace, then for the keys beside them in the first."""
        check_counts(len(m.namespaces), m.keys, m.beside)
        namespaces = [namespace_for(self._node, holder, m.namespaces[0], m.keys)]
        if m.first and len(m.namespaces) > 1:
            # Mostly the first one has all, and the others are not looked at.
            found = self.all_in_memory(namespaces[0], m.part, m.keys, m.beside)
            if found is not None:
                here, besides = found
                return frame.Bytes(here + bytes(len(here) * (len(m.namespaces) - 1)) + besides)
        namespaces += [
            namespace_for(self._node, holder, number, m.keys) for number in m.namespaces[1:]
        ]
        answer = self.in_memory(namespaces, m.part, m.keys, first=m.first, beside=m.beside)
        wait_s = m.wait_s
        if answer.whole or wait_s is None:
            return frame.Bytes(answer.data)
        return self._present_below(namespaces, m, wait_s)

    async def _present_below(
        self, namespaces: Sequence[NamespaceState], m: client_wire.Present, wait_s: float
    ) -> frame.Bytes:
        wait_s = min(max(0.0, wait_s), self._node.limits.lease_s_max)
        found = await self.in_each(
            namespaces, m.part, m.keys, wait_s, first=m.first, beside=m.beside
        )
        return frame.Bytes(found)

    def all_in_memory(
        self, namespace: NamespaceState, part: int, packed: bytes, beside: bytes
    ) -> tuple[bytes, bytes] | None:
        """Of the keys, if all are in memory in this namespace, and of those beside, in memory or not; else None."""
        found = self._node.leases.contains(namespace, part, split_keys(packed + beside))
        n = len(packed) // KEY_BYTES
        if found.find(0, 0, n) >= 0:
            return None
        found = found.replace(b"\x01", _IN_MEMORY)
        return found[:n], found[n:]

    def in_memory(
        self,
        namespaces: Sequence[NamespaceState],
        part: int,
        packed: bytes,
        *,
        first: bool = False,
        beside: bytes = b"",
    ) -> InMemory:
        """Of the keys in each namespace, one after the other, then of those beside them, in the first.

        first: a block that is in memory in one namespace is not looked for in those after it.
        """
        if len(namespaces) == 1:
            together = split_keys(packed + beside)
            found = self._node.leases.contains(namespaces[0], part, together)
            lacking = found.find(0, 0, len(packed) // KEY_BYTES) >= 0
        else:
            rows = self._node.leases.contains_in(namespaces, part, split_keys(packed), first=first)
            lacking = 0 in _enough(rows, first=first)
            if beside:
                rows.append(self._node.leases.contains(namespaces[0], part, split_keys(beside)))
            found = b"".join(rows)
        whole = not (lacking and self._fetcher.active)
        return InMemory(found.replace(b"\x01", _IN_MEMORY), whole)

    async def in_each(
        self,
        namespaces: Sequence[NamespaceState],
        part: int,
        packed: bytes,
        wait_s: float,
        *,
        first: bool = False,
        beside: bytes = b"",
    ) -> bytes:
        """The same, below memory and elsewhere too. Others are asked for at most `wait_s`."""
        keys = split_keys(packed)
        rows = self._node.leases.contains_in(namespaces, part, keys, first=first)
        lacking = [at for at, enough in enumerate(_enough(rows, first=first)) if not enough]
        some, deadline = [keys[at] for at in lacking], self._clock() + wait_s
        tables = [namespace.table(part) for namespace in namespaces]
        wanted = [*((table, some) for table in tables), (tables[0], split_keys(beside))]
        if len(some) * len(tables) <= AT_A_TIME:
            lookups = [self.below(table, each, deadline) for table, each in wanted]
            *found, besides = await asyncio.gather(*lookups)
        else:
            *found, besides = [await self.below(table, each, deadline) for table, each in wanted]
        answers = []
        for row, near in zip(rows, found, strict=True):
            answer = bytearray(row.replace(b"\x01", _IN_MEMORY))
            for at, one in zip(lacking, near, strict=True):
                answer[at] = one
            answers.append(bytes(answer))
        return b"".join([*answers, besides])

    async def below(self, table: PartTable, keys: Sequence[bytes], deadline: float) -> bytes:
        """Of keys in one namespace, wherever their blocks are."""
        found = []
        for at in range(0, len(keys), LOOKUP_KEYS):
            wait_s = max(0.0, deadline - self._clock())
            found.append(
                await self._fetcher.lookups.presence(table, keys[at : at + LOOKUP_KEYS], wait_s)
            )
            await asyncio.sleep(0)  # others are served in between
        return b"".join(found)


def _enough(rows: Sequence[bytes], *, first: bool) -> bytes:
    """One byte a key, 0 for those that are to be looked for below memory and elsewhere too."""
    enough = int.from_bytes(rows[0], "little")
    for row in rows[1:]:
        here = int.from_bytes(row, "little")
        enough = enough | here if first else enough & here
    return enough.to_bytes(len(rows[0]), "little")
