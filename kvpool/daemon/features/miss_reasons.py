"""Why a block is not here: what this node's books, its tiers and the directory know of it. Event loop only.

Nobody is asked: a verdict costs some microseconds, and is made for the first missing block of a read only. A block that
another node has dropped is known to that node; `kvpool blocks lookup --why` asks all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from kvpool.daemon.core.blocks import NamespaceState, PartTable, Tenant
from kvpool.daemon.core.events import Freed, Handlers, Pulled, Put, Read, Stage
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.departures import Departures
from kvpool.daemon.features.misses import Miss, Misses, Verdict, first_missing
from kvpool.daemon.features.reuse import ReuseCurve
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import ClusterView
from kvpool.decoding import decode_json
from kvpool.hit_rule import usable
from kvpool.telemetry.hit_curve import Memory, Reuse
from kvpool.telemetry.misses import WORDS, Reason
from kvpool.wire.answers import MissedBlock, Missing

LOOK_S = 1.0
OTHERS_MAX = 64  # namespaces of a tenant that are compared
COMPARED_MAX = 64  # pairs of namespaces of which it is remembered what differs
FACTS_MAX = 8
FACT_CHARACTERS_MAX = 80


@dataclass(eq=False)
class MissReasons:
    """Finds reasons, and counts them."""

    name: str
    node: Node
    departures: Departures
    fetcher: BlockFetcher
    cluster: ClusterView
    tenants: Sequence[str]
    """All names that there will be."""
    disk_bytes: Mapping[str, int]
    """Each tenant's part of the disks; empty without any."""
    disk_lost_since: Callable[[float], str]
    """Returns the name of a disk that was lost since a time, or an empty one."""
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        self.misses = Misses(self._counted)
        on = self.departures.most > 0
        self._curves = {name: ReuseCurve() for name in self.tenants} if on else {}
        self.handlers: Handlers = {}
        if on:
            self.handlers = {Read: self._read, Put: self._put, Freed: self.misses.freed}
            self.handlers |= self.departures.handlers

    # ---- for reads -----------------------------------------------------------------------------------

    def _read(self, event: Read) -> None:
        namespace, keys, found, stage = event.namespace, event.keys, event.found, event.stage
        if not keys:
            return
        if event.scattered:
            self._read_each(event)
            return
        misses = self.misses
        now, before = 0.0, None
        if misses.waits or found < len(keys):
            now = self.clock()
            misses.settle(now)
            before = misses.asked(namespace, keys, stage)
        curve = self._curves[namespace.tenant.name]
        if before is None:
            curve.asked(namespace, event.packed, found)
        elif before < found:
            curve.came(namespace, keys[before:found])
        if found < len(keys):
            tables = namespace.tables_of(event.parts)
            table, at = first_missing(tables, keys, found)
            verdict = self._verdict_of_read(table, keys[at], found, event.pulled, now)
            misses.missed(Miss(now, namespace, keys[at], len(keys), found, verdict), keys, stage)
        elif misses.waits or stage is Stage.PULLED:
            misses.found(namespace, keys, stage, now or self.clock())

    def _read_each(self, event: Read) -> None:
        """The same of blocks that are no chain: the first one that is missing stands for all."""
        namespace, keys, found = event.namespace, event.keys, event.found
        whole = found == len(keys)
        self._curves[namespace.tenant.name].asked(namespace, event.packed, found if whole else 0)
        if whole:
            return
        now = self.clock()
        self.misses.settle(now)
        table = namespace.table(event.parts[0])
        key = next((key for key in keys if key not in table.blocks), keys[-1])
        self.misses.asked(namespace, [key], Stage.AGAIN)
        verdict = self.why(table, key, now)
        self.misses.missed(Miss(now, namespace, key, len(keys), found, verdict), [key], Stage.AGAIN)

    def _put(self, event: Put) -> None:
        if event.table.part == 0:
            namespace = event.table.namespace
            self._curves[namespace.tenant.name].put(namespace, event.keys)

    def _verdict_of_read(
        self, table: PartTable, key: bytes, found: int, pulled: Pulled | None, now: float
    ) -> Verdict:
        if pulled is not None:
            if pulled.declined and found >= pulled.blocks:
                return Verdict(Reason.DECLINED)
            if found < pulled.blocks:
                return Verdict(Reason.LATE if pulled.late else Reason.DROPPED_ELSEWHERE)
        return self.why(table, key, now)

    def _counted(self, miss: Miss) -> None:
        if miss.verdict.reason is not Reason.DECLINED:
            self._curves[miss.namespace.tenant.name].missed(miss.asked - miss.found)

    async def run(self) -> None:
        """Until cancelled: give departures their time, count reads that have ended, and follow what was asked for."""
        while True:
            now = self.clock()
            self.departures.pass_time(now)
            self.misses.settle(now)
            for name, curve in self._curves.items():
                if (tenant := self.node.tenants.get(name)) is not None:
                    curve.present_bytes = tenant.allocator.size + self.disk_bytes.get(name, 0)
                for _ in curve.turns(now):
                    await asyncio.sleep(0)
            await asyncio.sleep(LOOK_S)

    def memory(self, tenant: Tenant) -> Memory:
        """What the tenant has here, and what was measured of its reads."""
        curve = self._curves.get(tenant.name)
        reuse = Reuse() if curve is None else curve.reuse()
        return Memory(self.name, tenant.allocator.size, self.disk_bytes.get(tenant.name, 0), reuse)

    # ---- for one block -------------------------------------------------------------------------------

    def why(self, table: PartTable, key: bytes, now: float) -> Verdict:
        """The reason why a part of a block is not in memory here."""
        namespace = table.namespace
        if namespace.retired:
            return Verdict(Reason.EPOCH)
        locator = self.fetcher.locator
        if key in locator.on_this_node([table], [key]):
            return Verdict(Reason.NOT_ASKED)
        departed = self.departures.find(namespace.space, key)
        lost = locator.lost_with(namespace, key)
        if lost is not None and (departed is None or departed.cause.reason in _ROOM):
            gone = self.cluster.gone.get(lost)
            drained = gone is not None and gone.drained
            reason = Reason.DRAINED if drained else Reason.NODE_LOST
            return Verdict(reason, where=lost.hex() if gone is None else gone.node)
        if departed is not None:
            cause = departed.cause
            age_s = max(0.0, now - departed.at)
            reason = Reason(cause.reason)
            if cause.kept and (disk := self.disk_lost_since(departed.at)):
                return Verdict(Reason.DISK_LOST, "ssd", where=disk)
            return Verdict(reason, cause.tier, age_s, departed.idle_s, cause.by)
        if any(key in each.garbage for each in self.node.ended_epochs.tables_of(namespace)):
            return Verdict(Reason.EPOCH)
        other = self._elsewhere(namespace, key)
        if other is not None:
            differs = differing(namespace.fields, other.fields)
            return Verdict(Reason.OTHER_NAMESPACE, where=other.base_hex, differs=differs)
        complete = self.departures.most and self.departures.reach_s() is None
        return Verdict(Reason.NEVER_STORED if complete else Reason.FORGOTTEN)

    def _elsewhere(self, namespace: NamespaceState, key: bytes) -> NamespaceState | None:
        """Another namespace of the tenant that has the block, or has had it lately."""
        others = list(islice(_others(namespace.tenant, namespace), OTHERS_MAX))
        for other in others:
            if any(key in table.blocks for table in other.tables):
                return other
        at = self.departures.first_of([other.space for other in others], key)
        return others[at] if at >= 0 else None

    # ---- for operators -------------------------------------------------------------------------------

    def explain(
        self, namespace: NamespaceState, parts: Sequence[int], keys: Sequence[bytes]
    ) -> Missing:
        """What a read of this prefix would find here now, and why not more; and the last one that did not."""
        now = self.clock()
        self.node.settle()
        tables = namespace.tables_of(parts)
        in_memory = usable([each.spec for each in tables], [each.blocks for each in tables], keys)
        on_node = self.fetcher.lookups.usable_on_node(namespace, parts, keys)
        missing = last = None
        if on_node < len(keys):
            table, at = self._first_missing_on_node(tables, keys, on_node)
            missing = describe(at, keys[at], self.why(table, keys[at], now))
        if (read := self.misses.last(namespace, keys)) is not None:
            last = describe(keys.index(read.key), read.key, read.verdict)
            last.asked, last.found, last.ago_s = read.asked, read.found, now - read.at
        return Missing(
            asked=len(keys),
            memory_blocks=in_memory,
            blocks=on_node,
            missing=missing,
            last=last,
            reach_s=self.departures.reach_s(),
        )

    def _first_missing_on_node(
        self, tables: Sequence[PartTable], keys: Sequence[bytes], found: int
    ) -> tuple[PartTable, int]:
        """Not in memory, and in no tier below it."""
        below = self.fetcher.locator.on_this_node(tables, keys)
        for at in range(found, len(keys)):
            for table in tables:
                if keys[at] not in table.blocks and keys[at] not in below:
                    return table, at
        return tables[0], found


_ROOM = {Reason.FULL, Reason.QUOTA, Reason.SUPERSEDED}
"""Reasons for which a block leaves one node only: another one has it, unless it is gone."""


def _others(tenant: Tenant, namespace: NamespaceState) -> Iterable[NamespaceState]:
    return (each for each in tenant.namespaces.values() if each is not namespace)


@lru_cache(maxsize=COMPARED_MAX)  # a read that misses is not to decode two documents each time
def differing(ours: bytes, theirs: bytes) -> Mapping[str, Sequence[object]]:
    """Facts of two namespaces that are not the same, each with its value there and here; at most `FACTS_MAX`.

    The same object each time: not to be changed.
    """
    mine: Mapping[str, Any] = decode_json(ours, dict[str, Any], "a namespace's fields")
    other: Mapping[str, Any] = decode_json(theirs, dict[str, Any], "a namespace's fields")
    names = [name for name in {**mine, **other} if mine.get(name) != other.get(name)]
    return {name: [_short(other.get(name)), _short(mine.get(name))] for name in names[:FACTS_MAX]}


def _short(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return text[:FACT_CHARACTERS_MAX] if len(text) > FACT_CHARACTERS_MAX else value


def describe(block: int, key: bytes, verdict: Verdict) -> MissedBlock:
    """The reason why a block is missing, in words too. block: its index in the prompt."""
    return MissedBlock(block=block, key=key.hex(), words=WORDS[verdict.reason], **verdict._asdict())
