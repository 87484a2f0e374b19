"""Whether there is room for the tenants' segments: rules, and the wait for engines that still map a dead daemon's.

A daemon that crashed leaves its memory to the engines that map it; each lets go of it as it learns of the death. The
next daemon may start sooner. It waits a while (`memory_wait_s`), instead of failing, or of taking a share of the little
that is free just then.

What the last daemon had of memory is kept beside its socket, for those whose memory is a share.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvpool.config.tables import TenantConfig
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE

LESS = 0.9
"""A share that became smaller than this part of the last one is less than was to be expected."""

LOOK_S = 0.25  # between two looks at the free memory

log = logging.getLogger("kvpool.daemon")


class LastSegment(msgspec.Struct, frozen=True):
    """What a tenant had in the life before: its setting, and bytes."""

    memory: int | float
    nbytes: int


Last = Mapping[str, LastSegment]


def sizes(tenants: Sequence[TenantConfig], free: int) -> dict[str, int]:
    """Bytes of each tenant's segment. Shares are of the memory that is free before the first one."""
    found = {}
    for tenant in tenants:
        size = tenant.memory if isinstance(tenant.memory, int) else int(free * tenant.memory)
        found[tenant.name] = size - size % PAGE
    return found


def missing_bytes(tenants: Sequence[TenantConfig], free: int, last: Last) -> int:
    """How much more memory has to be free for segments as large as they should be; 0: there is enough.

    A share should be about as large as the last time, if its setting is the same.
    """
    planned = sizes(tenants, free)
    missing = max(0, sum(planned.values()) + KEEP_FREE_BYTES - free)
    for tenant in tenants:
        before = last.get(tenant.name)
        if isinstance(tenant.memory, int) or before is None or before.memory != tenant.memory:
            continue
        if planned[tenant.name] < LESS * before.nbytes:
            missing = max(missing, int((before.nbytes - planned[tenant.name]) / tenant.memory))
    return missing


async def wait_for_room(
    tenants: Sequence[TenantConfig],
    last: Last,
    seconds: float,
    *,
    free_bytes: Callable[[], int],
    total_bytes: int,
    pause: Callable[[float], Awaitable[None]],
    clock: Callable[[], float],
) -> int:
    """The memory that is free when there is room, or the time is up, or there can never be room.

    free_bytes: of this machine and its control group. total_bytes: of the machine. pause: wait so many seconds.
    """
    until = clock() + seconds
    said = False
    while missing := missing_bytes(tenants, free := free_bytes(), last):
        left = until - clock()
        never = free + missing > total_bytes
        if left <= 0 or never:
            break
        if not said:
            said = True
            log.warning(
                "%d MiB of memory are missing for the segments, of which %d MiB are free: waiting up to %g s for them. "
                "Engines may still map the segment of an ended daemon",
                missing >> 20,
                free >> 20,
                seconds,
            )
        await pause(min(left, LOOK_S))
    for name, (had, size) in shrunk(tenants, free, last).items():
        log.warning(
            "the memory of tenant %s is smaller than before: %d MiB instead of %d MiB, its share of the memory that is "
            "free now. Something else holds the rest; restart the daemon once that is free, or give its memory in "
            "bytes",
            name,
            size >> 20,
            had >> 20,
        )
    return free


def shrunk(tenants: Sequence[TenantConfig], free: int, last: Last) -> dict[str, tuple[int, int]]:
    """Tenants whose share gives them less than the last time: bytes then, and now."""
    planned = sizes(tenants, free)
    return {
        tenant.name: (before.nbytes, planned[tenant.name])
        for tenant in tenants
        if not isinstance(tenant.memory, int)
        and (before := last.get(tenant.name)) is not None
        and before.memory == tenant.memory
        and planned[tenant.name] < LESS * before.nbytes
    }


def read_last(path: str) -> Last:
    """What `write_last` has kept; nothing if that cannot be read."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, LastSegment])
    except (OSError, msgspec.DecodeError):
        return {}


def write_last(path: str, tenants: Sequence[TenantConfig], made: Mapping[str, int]) -> None:
    """Keep it for the next life. What is there stays if it cannot be written."""
    last = {each.name: LastSegment(each.memory, made[each.name]) for each in tenants}
    try:
        Path(f"{path}.new").write_bytes(msgspec.json.encode(last))
        os.replace(f"{path}.new", path)
    except OSError as error:
        log.warning("the sizes of segments cannot be kept at %s: %s", path, error.strerror)
