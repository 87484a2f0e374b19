"""What `kvpool put`, `get`, `ls` and `rm` do with objects, and print."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from kvpool.cli.asking import PAGE
from kvpool.cli.render.text import Column, Parts, rows_table, size_text
from kvpool.client.operator import OperatorRequests
from kvpool.engine_plugins.mooncake import codes
from kvpool.engine_plugins.mooncake.blocks import How
from kvpool.engine_plugins.mooncake.objects import Objects
from kvpool.engine_plugins.mooncake.pieces import Made, View
from kvpool.errors import (
    ClusterUnavailable,
    InvalidRequest,
    KvpoolError,
    LeaseLost,
    PoolFull,
    Unavailable,
)
from kvpool.wire import operator as operator_wire

BYTES_MAX = 1 << 30
"""The object and a copy of it are in this process's memory."""
LOOKED_AT_MAX = 100_000
"""Blocks, for one list."""
READ_S = 5.0
READ_TOGETHER = 64
"""Blocks on disks whose labels are read at a time: they come into memory for that."""

MISSING = "no such object can be read from this node"


def check_name(name: str) -> bytes:
    """The key of an object. Raises `InvalidRequest`."""
    try:
        key = name.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"the name {name!r:.60} is no text in UTF-8") from None
    if not key:
        raise InvalidRequest("an object's name has one character at least")
    return key


def read_source(path: Path | None) -> bytes:
    """All bytes of a file, or of standard input. Raises `InvalidRequest`."""
    what = "standard input" if path is None else str(path)
    try:
        if path is None:
            data = sys.stdin.buffer.read(BYTES_MAX + 1)
        else:
            with path.open("rb") as file:
                data = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be read: {error.strerror}") from None
    if not data:
        raise InvalidRequest(f"{what} is empty: an object has one byte at least")
    if len(data) > BYTES_MAX:
        raise InvalidRequest(
            f"{what} has more than {size_text(BYTES_MAX)}: put larger objects with "
            "kvpool.engine_plugins.mooncake, or in pieces"
        )
    return data


def check_stored(objects: Objects, key: bytes, data: bytes) -> None:
    """Store an object in place of another. Raises `KvpoolError`."""
    [code] = objects.writer.replace([key], [View(np.frombuffer(data, np.uint8))], How())
    if code != codes.OK:
        raise _error(code, "the object is not stored", key)


def read_object(objects: Objects, key: bytes) -> bytes:
    """Raises `KvpoolError`."""
    made = Made(bytes, BYTES_MAX)
    [code] = objects.reader.read([key], [made])
    if code < 0:
        raise _error(code, "the object is not read", key)
    data: bytes = made.value
    return data


def size_of(objects: Objects, key: bytes) -> int:
    """In bytes. Raises `KvpoolError`."""
    found = objects.reader.sizes([key])
    if found is None:
        raise _error(codes.UNAVAILABLE, "the object is not found", key)
    if found[0][0] < 0:
        raise _error(codes.NOT_FOUND, "the object is not found", key)
    return found[0][0]


def remove(objects: Objects, keys: Sequence[bytes]) -> dict[int, str]:
    """Remove objects; by their places those that were not, with the reasons."""
    found = {}
    for at, code in enumerate(objects.writer.remove(keys)):
        if code == codes.NOT_FOUND:
            found[at] = "no node has such an object"
        elif code != codes.OK:
            found[at] = (
                "a node did not answer in time and may still have it: remove it again later "
                "(`kvpool nodes` shows which are there)"
            )
    return found


def _error(code: int, what: str, key: bytes) -> KvpoolError:
    name = f"{key.decode()!r:.100}"
    match code:
        case codes.NOT_FOUND:
            return InvalidRequest(f"{name}: {MISSING}")
        case codes.NO_SPACE:
            return PoolFull(
                f"{name}: {what}: leases or hard pins hold the memory of the node, or it and its disks have too "
                "little for the object"
            )
        case codes.INVALID:
            return InvalidRequest(
                f"{name}: {what}: it has more than {size_text(BYTES_MAX)}; read it with kvpool.engine_plugins.mooncake"
            )
        case codes.LEASE_LOST:
            return LeaseLost(f"{name}: {what}: the copy took too long; try again")
        case codes.UNAVAILABLE:
            return ClusterUnavailable(
                f"{name}: {what}: this node's daemon, or another one, did not answer in time (`kvpool nodes`)"
            )
        case _:
            return Unavailable(f"{name}: {what}: the daemon refused it (code {code}); see its log")


def write_whole(path: Path, data: bytes) -> None:
    """Raises `InvalidRequest`; then a file that was there is as it was."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(data)  # such as a pipe: it cannot be replaced
            return
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            part.write_bytes(data)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None


def list_objects(
    client: OperatorRequests, objects: Objects, tier: str, prefix: str, limit: int
) -> tuple[list[dict[str, Any]], bool]:
    """Up to so many objects with blocks in this node's tier, and whether there may be more of them."""
    wanted = prefix.encode()
    together, wait_s = (PAGE, 0.0) if tier == "dram" else (READ_TOGETHER, READ_S)
    found: list[dict[str, Any]] = []
    looked_at = 0
    for space in objects.spaces.all:
        cursor: str | None = ""
        while cursor is not None:
            if len(found) >= limit or looked_at >= LOOKED_AT_MAX:
                return found[:limit], True
            page = client.ask_node(operator_wire.ListBlocks(tier, cursor, PAGE, space.ns.digest))
            cursor, blocks = page.cursor, page.blocks
            looked_at += len(blocks)
            for first in range(0, len(blocks), together):
                some = blocks[first : first + together]
                packed = bytes.fromhex("".join(block.key for block in some))
                found += [
                    {
                        "name": f"sha256:{owner.key.hex()}"
                        if owner.hashed
                        else owner.key.decode("utf-8", "backslashreplace"),
                        "hashed": owner.hashed,
                        "bytes": owner.length,
                        "unused_s": block.age_s,
                        "pin": block.pin,
                    }
                    for block, owner in zip(
                        some, objects.reader.owners(space, packed, wait_s), strict=True
                    )
                    if owner is not None
                    and (owner.key.startswith(wanted) if not owner.hashed else not wanted)
                ]
                if len(found) > limit:
                    return found[:limit], True
    return found, False


def objects_view(
    found: Sequence[Mapping[str, Any]], *, prefix: str, tier: str, more: bool
) -> Parts:
    """What `list_objects` gives."""
    if not found:
        with_prefix = f" whose names begin with {prefix}" if prefix else ""
        looked = " among those that were looked at" if more else ""
        yield Text(f"no objects{with_prefix} in {tier} here{looked}")
        return
    columns: dict[str, Column] = {
        "size": "bytes",
        "unused for": "unused_s",
        "pin": lambda each: "" if each["pin"] == "none" else each["pin"],
        "name": "name",
    }
    yield rows_table("", found, columns, wraps={"name"})
    if any(each["hashed"] for each in found):
        yield Text("sha256: names too long to be kept; `kvpool get` takes them as they were put")
    if more:
        yield Text("there is more: name a prefix, or a higher --limit")
