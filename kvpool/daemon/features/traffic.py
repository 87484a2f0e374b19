"""Metrics of what clients asked for, got and put, by tenant and by namespace."""

from __future__ import annotations

from collections import defaultdict

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.events import Freed, Handlers, Loaded, Matched, Put, Read, Stage
from kvpool.telemetry.memory_stats import Asked, Loads, Traffic


class TrafficCounts:
    """Counts since the daemon started. Not thread-safe. Counts of a namespace outlive its epochs."""

    def __init__(self) -> None:
        self._tenants: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._reads: defaultdict[int, Asked] = defaultdict(Asked)
        self.handlers: Handlers = {Matched: self._matched, Read: self._read, Put: self._put}
        self.handlers |= {Loaded: self._loaded, Freed: self._freed}

    def of(self, tenant: str) -> Traffic:
        """Counts of a tenant. They go on."""
        return self._tenants[tenant]

    def reads(self, namespace: NamespaceState) -> Asked:
        """Counts of a namespace's reads. They go on."""
        return self._reads[namespace.space]

    def _matched(self, event: Matched) -> None:
        matches = self._tenants[event.namespace.tenant.name].matches
        matches.requests += 1  # not by `add`: this is the hottest request
        matches.local += event.found
        matches.missed += event.asked - event.found

    def _read(self, event: Read) -> None:
        traffic = self._tenants[event.namespace.tenant.name]
        asked = len(event.keys)
        if event.stage is Stage.PULLED:
            traffic.pulls.add(asked, event.found, event.here)
            return
        traffic.reads.add(asked, event.found, event.here)
        self._reads[event.namespace.space].add(asked, event.found, event.here)
        if event.lease is None:
            return
        for _, blocks in event.lease.parts.values():
            if blocks:
                traffic.read_bytes += len(blocks) * blocks[0].table.spec.nbytes
        if event.lease.beside is not None:
            traffic.device_read_bytes += event.lease.beside.nbytes

    def _put(self, event: Put) -> None:
        traffic = self._tenants[event.table.namespace.tenant.name]
        traffic.put_parts += event.new
        traffic.put_bytes += event.new * event.table.spec.nbytes

    def _loaded(self, event: Loaded) -> None:
        loads = self._tenants[event.namespace.tenant.name].loads
        loads.setdefault(event.source, Loads()).add(event.loads)

    def _freed(self, event: Freed) -> None:
        if event.tier.name == "dram":
            self._reads.pop(event.namespace.space, None)
