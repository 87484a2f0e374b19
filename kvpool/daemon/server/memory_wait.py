"""Whether there is room for the tenants' segments: rules, and the wait for engines that still map a dead daemon's.

A daemon that crashed leaves its memory to the engines that map it; each lets go of it as it learns of the death. The
next daemon may start sooner. It waits a while (`memory_wait_s`), instead of failing, or of taking a share of the little
that is free just then.

What the last daemon had of memory is kept beside its socket, for those whose memory is a share, and so that the
processes that still map it can be named. What is waited for is kept there too, as long as it is: a daemon without
memory has nothing to serve, so its socket does not answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvpool.config.tables import TenantConfig
from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError
from kvpool.memory.mappers import Mapper, find_mappers
from kvpool.memory.segment import Segment
from kvpool.storage.dram import KEEP_FREE_BYTES, PAGE

LESS = 0.9
"""A share that became smaller than this part of the last one is less than was to be expected."""

LOOK_S = 0.25  # between two looks at the free memory
SAY_S = 60.0  # between two records in the log
FORGOTTEN_S = 5.0  # a note that was not written for so long is that of a daemon which was killed while it waited

log = logging.getLogger("kvpool.daemon")


class LastSegment(msgspec.Struct, frozen=True):
    """What a tenant had in the life before: its setting, bytes, and which segment it was, to the kernel."""

    memory: int | float
    nbytes: int
    inode: int = 0


class MemoryWait(msgspec.Struct, frozen=True):
    """What a starting daemon waits for. Durations: who reads it looks at the age of the file.

    wanted_bytes: of its segments, once it waits for no one and allocates them; taken_bytes: those that it has.
    """

    missing_bytes: int
    free_bytes: int
    waited_s: float
    left_s: float
    taken_bytes: int = 0
    wanted_bytes: int = 0


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
    pause: Callable[[float], Awaitable[object]],
    clock: Callable[[], float],
    note: Callable[[MemoryWait], None],
    mappers: Callable[[], Sequence[Mapper]],
) -> int:
    """The memory that is free when there is room, or the time is up, or there can never be room.

    free_bytes: of this machine and its control group. total_bytes: of the machine. pause: wait so many seconds.
    note: is told at each look what is waited for. mappers: who maps the last daemon's segments, as far as known.
    """
    began = say_at = clock()
    until = began + seconds
    while missing := missing_bytes(tenants, free := free_bytes(), last):
        left = until - clock()
        never = free + missing > total_bytes
        if left <= 0 or never:
            break
        now = clock()
        note(MemoryWait(missing, free, now - began, left))
        if now >= say_at:
            say_at = now + SAY_S
            log.warning(
                "%d MiB of memory are missing for the segments, of which %d MiB are free: waiting up to %g s more. %s",
                missing >> 20,
                free >> 20,
                left,
                held_by(mappers()),
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


def held_by(mappers: Sequence[Mapper]) -> str:
    """A sentence on who holds the memory of the last daemon."""
    if not mappers:
        # It sees processes of its own user only; systemd's ProtectProc hides even that there are others.
        return "Engines may still map the segment of an ended daemon: `kvpool doctor`, run by root, names them"
    return f"The ended daemon's segment is still mapped by {', '.join(map(str, mappers))}"


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


# ---- beside the socket ------------------------------------------------------------------------------------


def read_last(socket: str) -> Last:
    """What `write_last` has kept; nothing if that cannot be read."""
    try:
        data = Path(f"{socket}.memory").read_bytes()
        return decode_json(data, dict[str, LastSegment], "sizes of segments")
    except (OSError, ProtocolError):
        return {}


def write_last(socket: str, tenants: Sequence[TenantConfig], made: Mapping[str, Segment]) -> None:
    """Keep it for the next life. What is there stays if it cannot be written."""
    last = {
        each.name: LastSegment(each.memory, made[each.name].size, made[each.name].inode)
        for each in tenants
    }
    try:
        _replace(f"{socket}.memory", last)
    except OSError as error:
        log.warning("the sizes of segments cannot be kept at %s.memory: %s", socket, error.strerror)


def last_mappers(socket: str, root: Path = Path("/")) -> list[Mapper]:
    """Who still maps the segments of the daemon that was the last one at this socket."""
    return find_mappers({each.inode for each in read_last(socket).values()} - {0}, root)


def read_wait(socket: str) -> MemoryWait | None:
    """What the daemon at this socket waits for, if it starts just now, and waits."""
    path = Path(f"{socket}.waits")
    try:
        if time.time() - path.stat().st_mtime > FORGOTTEN_S:
            return None
        return decode_json(path.read_bytes(), MemoryWait, "what a daemon waits for")
    except (OSError, ProtocolError):
        return None


def write_wait(socket: str, waits: MemoryWait) -> None:
    """For `read_wait`, until `end_wait`. The log says it too, so nothing is done where it cannot be written."""
    with contextlib.suppress(OSError):
        _replace(f"{socket}.waits", waits)


def end_wait(socket: str) -> None:
    """The daemon waits no more, or never did."""
    with contextlib.suppress(OSError):
        Path(f"{socket}.waits").unlink()


def _replace(path: str, value: object) -> None:
    Path(f"{path}.new").write_bytes(msgspec.json.encode(value))
    os.replace(f"{path}.new", path)
