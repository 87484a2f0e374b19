"""Takes the daemon's spans and exports them to a collector."""

from __future__ import annotations

from kvpool.admin.daemon_link import Daemon
from kvpool.telemetry.otlp import EVERY_S, Counts, Exporter, export_spans
from kvpool.telemetry.spans import Batch
from kvpool.wire import operator as operator_wire

SERVICE = "kvpool-daemon"


async def export_of(
    daemon: Daemon, exporter: Exporter, counts: Counts, every_s: float = EVERY_S
) -> None:
    """Until it is cancelled. See `export_spans`."""

    async def take(count: int) -> Batch:
        batch: Batch = await daemon.get(operator_wire.TakeSpans(count), Batch)
        return batch

    await export_spans(take, exporter, counts, every_s)
