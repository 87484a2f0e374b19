"""Answers to clients about their leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.daemon.core.blocks import Block, Lease, checksums_of
from kvpool.errors import InvalidRequest
from kvpool.types import CHECKSUM_BYTES, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame

NO_CHECKSUM = bytes(CHECKSUM_BYTES)


def describe_lease(
    lease: Lease,
    parts: Any,
    asked_at: float,
    scattered_keys: Sequence[bytes] | None,
    *,
    checksums: bool = False,
) -> client_wire.Leased:
    """The answer to its holder: the rows of the requested parts, and the duration from `asked_at` on.

    checksums: of the blocks too.
    """
    described = []
    for part in parts:
        if part not in lease.parts:
            raise InvalidRequest(f"part {part} is not in this lease")
        first, blocks = lease.parts[part]
        beside = [] if lease.beside is None else lease.beside.parts[part]
        if any(beside):
            described.append(_beside(part, first, blocks, beside, checksums=checksums))
            continue
        if not blocks:
            continue
        table = blocks[0].table
        placed: Sequence[Block | None] = blocks
        if scattered_keys is not None and len(blocks) < len(scattered_keys):
            held = {block.key: block for block in blocks}
            placed = [held.get(key) for key in scattered_keys]
        rows = [frame.NO_ROW if block is None else block.row for block in placed]
        described.append(
            client_wire.LeasedPart(
                *(part, first, table.stride, table.spec.nbytes, frame.pack_rows(rows)),
                checksums=_checksums(placed) if checksums else b"",
            )
        )
    left = 0.0 if lease.deadline is None else lease.deadline - asked_at
    life = 0 if lease.beside is None else lease.beside.life
    return client_wire.Leased(lease.token, lease.blocks, left, described, life)


def _checksums(blocks: Sequence[Block | None]) -> bytes:
    here = [block for block in blocks if block is not None]
    packed = checksums_of(here)
    if len(here) == len(blocks):
        return packed
    found = iter(split_keys(packed))
    return b"".join([NO_CHECKSUM if block is None else next(found) for block in blocks])


def _beside(
    part: int,
    first: int,
    blocks: Sequence[Block],
    beside: Sequence[Block | None],
    *,
    checksums: bool,
) -> client_wire.LeasedPart:
    """A part with slots on the device; blocks: the others, in memory."""
    memory = iter(blocks)
    placed = [next(memory) if block is None else None for block in beside]
    rows = [frame.NO_ROW if block is None else block.row for block in placed]
    device_rows = [frame.NO_ROW if block is None else block.row for block in beside]
    table = next(block.table for block in beside if block is not None)
    return client_wire.LeasedPart(
        *(part, first, table.stride, table.spec.nbytes),
        *(frame.pack_rows(rows), frame.pack_rows(device_rows)),
        _checksums(placed) if checksums else b"",
    )
