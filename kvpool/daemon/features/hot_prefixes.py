"""Which prefixes are read most recently. Event loop only.

Of each prefix that is read, the blocks at depths 1, 2, 4, 8, ... are counted: prompts share a beginning, and
diverge between two of these. Counts halve in `HALF_S`; the lowest counts are forgotten.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.events import Handlers, Read
from kvpool.telemetry.node_stats import HotPrefix
from kvpool.types import KEY_BYTES

KEPT_MAX = 2048
SHOWN_MAX = 50
HALF_S = 600.0
FADE_S = 60.0
SAME_SHARE = 0.9
"""A deeper prefix with this share of a shorter one's reads is shown in its place."""


@dataclass(slots=True)
class _Reads:
    depth: int
    parent: bytes  # the key counted before it in the same prefixes
    reads: float = 0.0


class HotPrefixes:
    """See the module."""

    def __init__(self) -> None:
        self._counts: dict[tuple[NamespaceState, bytes], _Reads] = {}
        self.handlers: Handlers = {Read: self._read}

    def _read(self, event: Read) -> None:
        if event.lease is not None and not event.scattered:
            self.read(event.namespace, event.packed, event.lease.blocks)

    def read(self, namespace: NamespaceState, packed: bytes, blocks: int) -> None:
        """This many blocks of this prefix were leased to a reader."""
        counts = self._counts
        depth, parent = 1, b""
        while depth <= blocks:
            key = packed[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            known = counts.get((namespace, key))
            if known is None:
                known = counts[namespace, key] = _Reads(depth, parent)
            known.reads += 1.0
            depth, parent = 2 * depth, key
        if len(counts) > 2 * KEPT_MAX:
            self._forget()

    def _forget(self) -> None:
        """Drop the lowest counts, and those of ended namespaces."""
        living = (one for one in self._counts.items() if not one[0][0].retired)
        self._counts = dict(heapq.nlargest(KEPT_MAX, living, key=lambda one: one[1].reads))

    def fade(self, seconds: float) -> None:
        """Decay the counts by this time."""
        share = 0.5 ** (seconds / HALF_S)
        for known in self._counts.values():
            known.reads *= share
        self._forget()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(FADE_S)
            self.fade(FADE_S)

    def hottest(self) -> list[HotPrefix]:
        """The most read first. reads: about those of the last one or two `HALF_S`."""
        counts = self._counts
        told = set()
        for (namespace, _), known in counts.items():
            shorter = counts.get((namespace, known.parent))
            if shorter is not None and known.reads >= SAME_SHARE * shorter.reads:
                told.add((namespace, known.parent))
        shown = heapq.nlargest(
            SHOWN_MAX,
            (one for one in counts.items() if one[0] not in told),
            key=lambda one: one[1].reads,
        )
        return [
            HotPrefix(
                namespace.tenant.name,
                namespace.base.hex(),
                key.hex(),
                known.depth,
                round(known.reads, 1),
            )
            for (namespace, key), known in shown
        ]
