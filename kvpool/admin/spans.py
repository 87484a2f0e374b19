"""The daemon's spans, taken from it and sent on to a collector."""

from __future__ import annotations

from kvpool import wire
from kvpool.admin.daemon import Daemon
from kvpool.otlp import EVERY_S, Counts, Exporter, export_spans
from kvpool.spans import Batch

SERVICE = "kvpool-daemon"


async def export_of(
    daemon: Daemon, exporter: Exporter, counts: Counts, every_s: float = EVERY_S
) -> None:
    """Until it is cancelled. See `export_spans`."""

    async def take(count: int) -> Batch:
        return await daemon.json(wire.TakeSpans(count), Batch)

    await export_spans(take, exporter, counts, every_s)
