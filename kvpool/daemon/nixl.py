"""Which pulls go over NIXL, and what becomes of those that fail: they go on over TCP, and it is counted.

Event loop only. The bytes are moved by a mover process of its own (`transfer/nixl.py` says why).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool import wire
from kvpool.errors import KvpoolError
from kvpool.transfer.base import ARRIVED, MISMATCH, MISSING
from kvpool.types import CHECKSUM_BYTES, split_keys

DEADLINE_SHARE = 0.5  # of a pull's time: the rest is TCP's, should it be needed
ATTEMPT_S, ATTEMPT_BYTES_S = 5.0, 100e6  # a path that is slower than this is not worth waiting for
REST_S, REST_S_MAX = 1.0, 60.0  # after a failure; doubling
PEERS_MAX = 1024  # of which failures are remembered

Pull = Callable[[wire.PullBlocks], Awaitable[wire.Pulled]]


@dataclass(slots=True)
class Resting:
    """A peer to which NIXL has failed. until: when it is tried again; failures: in a row."""

    until: float
    failures: int
    reason: str


class NixlPath:
    """Pulls over NIXL where the peer has it, and over TCP where it has not or that fails.

    nixl, tcp: how to pull over each. Both return or raise only when nothing writes to an order's rows any
    more, so that one may follow the other. url_of: the peer's nixl:// URL, given its tcp:// URL; empty: none.
    """

    def __init__(
        self, nixl: Pull, tcp: Pull, url_of: Callable[[str], str], clock: Callable[[], float]
    ) -> None:
        self._nixl = nixl
        self._tcp = tcp
        self._url_of = url_of
        self._clock = clock
        self._resting: OrderedDict[str, Resting] = OrderedDict()
        self.pulls = self.blocks = self.nbytes = 0
        self.failed_over = self.failed_over_blocks = self.rested = 0
        self.last_error = ""

    async def pull(self, order: wire.PullBlocks) -> wire.Pulled:
        """As `Movers.pull`."""
        url = self._url_of(order.url)
        if not url:
            return await self._tcp(order)
        rest = self._resting.get(url)
        if rest is not None and self._clock() < rest.until:
            self.rested += 1
            return await self._tcp(order)
        started = self._clock()
        pulled = await self._try(order, url)
        came = pulled.status.count(ARRIVED)
        self.pulls += 1
        self.blocks += came
        self.nbytes += came * order.nbytes
        if not pulled.error:
            self._resting.pop(url, None)
            return pulled
        self._failed(url, pulled.error)
        left = [i for i, status in enumerate(pulled.status) if status in {MISSING, MISMATCH}]
        if not left:
            return msgspec.structs.replace(pulled, error="")
        seconds = self._clock() - started
        if seconds >= order.deadline_s:
            return pulled
        self.failed_over += 1
        self.failed_over_blocks += len(left)
        try:
            rest_came = await self._tcp(_cut(order, left, seconds))
        except KvpoolError as error:
            return msgspec.structs.replace(pulled, error=str(error))
        return _merged(pulled, left, rest_came)

    async def _try(self, order: wire.PullBlocks, url: str) -> wire.Pulled:
        """What came of it over NIXL. `error` says why not all did."""
        count = len(order.rows) // 4
        attempt_s = ATTEMPT_S + count * order.nbytes / ATTEMPT_BYTES_S
        seconds = min(order.deadline_s * DEADLINE_SHARE, attempt_s)
        started = self._clock()
        try:
            pulled = await self._nixl(msgspec.structs.replace(order, url=url, deadline_s=seconds))
        except KvpoolError as error:
            nothing = bytes([MISSING]) * count, bytes(CHECKSUM_BYTES * count)
            return wire.Pulled(*nothing, self._clock() - started, str(error))
        if not pulled.error and MISMATCH in pulled.status:
            # The owner's copy may be broken, or this path. TCP tells: it is the owner's then as well.
            wrong = pulled.status.count(MISMATCH)
            return msgspec.structs.replace(
                pulled, error=f"{wrong} blocks do not match their checksums"
            )
        return pulled

    def _failed(self, url: str, reason: str) -> None:
        self.last_error = f"{url}: {reason}"
        rest = self._resting.pop(url, None)
        failures = 1 if rest is None else rest.failures + 1
        pause = min(REST_S * 2.0 ** min(failures - 1, 16), REST_S_MAX)
        self._resting[url] = Resting(self._clock() + pause, failures, reason)
        while len(self._resting) > PEERS_MAX:
            self._resting.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        """For `kvpool stats`. rested: pulls that went over TCP since the last one over NIXL had failed."""
        now = self._clock()
        return {
            "pulls": self.pulls,
            "blocks": self.blocks,
            "bytes": self.nbytes,
            "failed_over": self.failed_over,
            "failed_over_blocks": self.failed_over_blocks,
            "rested": self.rested,
            "resting": {url: r.reason for url, r in self._resting.items() if now < r.until},
            "last_error": self.last_error,
        }


def _cut(order: wire.PullBlocks, indices: list[int], seconds: float) -> wire.PullBlocks:
    """The order for these blocks alone, in the time that is left."""
    keys = split_keys(order.keys)
    rows = array("I", order.rows)
    return msgspec.structs.replace(
        order,
        keys=b"".join([keys[index] for index in indices]),
        rows=array("I", [rows[index] for index in indices]).tobytes(),
        deadline_s=order.deadline_s - seconds,
    )


def _merged(first: wire.Pulled, indices: list[int], second: wire.Pulled) -> wire.Pulled:
    """What two attempts have brought; the second one was for these blocks."""
    status, checksums = bytearray(first.status), bytearray(first.checksums)
    for at, index in enumerate(indices):
        status[index] = second.status[at]
        checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] = second.checksums[
            at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES
        ]
    return wire.Pulled(
        bytes(status), bytes(checksums), first.seconds + second.seconds, second.error
    )
