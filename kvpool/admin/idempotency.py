"""Repeated changes are made once: answers by the request's idempotency key. No I/O."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kvpool.admin.problems import Refused
from kvpool.errors import InvalidRequest, LimitExceeded

KEEP_S = 600.0
KEYS_MAX = 1024
BYTES_MAX = 16 << 20
KEY_CHARACTERS_MAX = 128
_KEY = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Answer:
    """As it goes out."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(eq=False, slots=True)
class _Entry:
    body: bytes
    began: float
    task: asyncio.Task[Answer]
    nbytes: int = 0


def check_key(key: str) -> None:
    """Raises `InvalidRequest`."""
    if not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"an Idempotency-Key must have 1 to {KEY_CHARACTERS_MAX} visible ASCII characters"
        )


class Remembered:
    """Answers to the last changes, bounded in number, bytes and time. Event loop only.

    Temporary failures (5xx, 429) are not remembered: the same request may be made again.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._nbytes = 0

    async def once(
        self, scope: str, key: str, body: bytes, make: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """scope: who asks, and for what; keys of different ones are different. Raises `Refused` and `KvpoolError`."""
        check_key(key)
        name = hashlib.sha256(f"{scope}\n{key}".encode()).hexdigest()
        digest = hashlib.sha256(body).digest()
        self._trim()
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) >= KEYS_MAX:
                raise LimitExceeded("too many changes are in progress")
            # A client's disconnect cancels no change.
            task = asyncio.get_running_loop().create_task(self._make(name, make))
            task.add_done_callback(lambda made: made.cancelled() or made.exception())
            entry = self._entries[name] = _Entry(digest, self._clock(), task)
        elif entry.body != digest:
            raise Refused(
                422,
                "idempotency",
                "this Idempotency-Key was used with a different body: use a new one",
            )
        return await asyncio.shield(entry.task)

    async def _make(self, name: str, make: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            made = await make()
        except BaseException:
            del self._entries[name]
            raise
        if made.status >= 500 or made.status == 429:
            del self._entries[name]
        else:
            entry = self._entries[name]
            entry.nbytes = len(made.body)
            self._nbytes += entry.nbytes
        return made

    def _trim(self) -> None:
        """The oldest go; those under way stay, which are as many as requests may be."""
        oldest = self._clock() - KEEP_S
        for name, entry in list(self._entries.items()):
            over = len(self._entries) >= KEYS_MAX or self._nbytes > BYTES_MAX
            if not (over or entry.began < oldest):
                break
            if entry.task.done():
                self._nbytes -= entry.nbytes
                del self._entries[name]
