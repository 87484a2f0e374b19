"""An order to pull blocks of a part into rows of the tenant's segment."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool import wire
from kvpool.daemon.blocks import PartTable


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
) -> wire.PullBlocks:
    """From the peer at `url`. start, stop: the bytes of each block that are wanted; see `wire.PullBlocks`.

    trace: of the span that this is done for, or empty.
    """
    namespace = table.namespace
    return wire.PullBlocks(
        url=url,
        tenant=namespace.tenant.name,
        digest=namespace.digest,
        part=table.part,
        nbytes=table.spec.nbytes,
        keys=b"".join(keys),
        segment=namespace.tenant.segment,
        stride=table.stride,
        rows=wire.pack_rows(rows),
        deadline_s=seconds,
        background=background,
        start=start,
        stop=stop,
        trace=trace,
    )
