"""An order to pull blocks of a part into rows of the tenant's segment."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.daemon.core.blocks import PartTable
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire


def pull_order(
    table: PartTable,
    url: str,
    keys: Sequence[bytes],
    rows: list[int],
    seconds: float,
    *,
    background: bool = False,
    start: int = 0,
    stop: int = 0,
    trace: str = "",
) -> worker_wire.PullBlocks:
    """From the peer at `url`. start, stop: the wanted bytes of each block; see `kvpool.wire.worker.PullBlocks`.

    trace: of the span that this is done for, or empty.
    """
    namespace = table.namespace
    return worker_wire.PullBlocks(
        url=url,
        tenant=namespace.tenant.name,
        digest=namespace.digest,
        part=table.part,
        nbytes=table.spec.nbytes,
        keys=b"".join(keys),
        segment=namespace.tenant.segment,
        stride=table.stride,
        rows=frame.pack_rows(rows),
        deadline_s=seconds,
        background=background,
        start=start,
        stop=stop,
        trace=trace,
    )
