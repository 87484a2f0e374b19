"""Answers to clients about their leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.daemon.core.blocks import Block, Lease
from kvpool.errors import (
    InvalidRequest,
)
from kvpool.wire import client as client_wire
from kvpool.wire import frame


def describe_lease(
    lease: Lease, parts: Any, asked_at: float, scattered_keys: Sequence[bytes] | None
) -> client_wire.Leased:
    """The answer to its holder: the rows of the requested parts, and the duration from `asked_at` on."""
    described = []
    for part in parts:
        if part not in lease.parts:
            raise InvalidRequest(f"part {part} is not in this lease")
        first, blocks = lease.parts[part]
        beside = [] if lease.beside is None else lease.beside.parts[part]
        if any(beside):
            described.append(_beside(part, first, blocks, beside))
            continue
        if not blocks:
            continue
        table = blocks[0].table
        if scattered_keys is None or len(blocks) == len(scattered_keys):
            rows = [block.row for block in blocks]
        else:
            held = {block.key: block.row for block in blocks}
            rows = [held.get(key, frame.NO_ROW) for key in scattered_keys]
        described.append(
            client_wire.LeasedPart(
                part, first, table.stride, table.spec.nbytes, frame.pack_rows(rows)
            )
        )
    left = 0.0 if lease.deadline is None else lease.deadline - asked_at
    life = 0 if lease.beside is None else lease.beside.life
    return client_wire.Leased(lease.token, lease.blocks, left, described, life)


def _beside(
    part: int, first: int, blocks: Sequence[Block], beside: Sequence[Block | None]
) -> client_wire.LeasedPart:
    """A part with slots on the device; blocks: the others, in memory."""
    memory = iter(blocks)
    rows = [next(memory).row if block is None else frame.NO_ROW for block in beside]
    device_rows = [frame.NO_ROW if block is None else block.row for block in beside]
    table = next(block.table for block in beside if block is not None)
    return client_wire.LeasedPart(
        *(part, first, table.stride, table.spec.nbytes),
        *(frame.pack_rows(rows), frame.pack_rows(device_rows)),
    )
