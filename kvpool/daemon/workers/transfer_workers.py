"""How this node pulls from peers and asks them: by the paths that `paths.py` gives, one after the other.

What one path did not bring the next one does, over TCP at last. What a peer refuses it refuses by all paths. The bytes
are moved by processes: `transfer_pool.py`. Event loop only.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.workers.paths import DEADLINE_SHARE, Paths, PeerPath, PeerPaths
from kvpool.daemon.workers.transfer_pool import TransferPool
from kvpool.errors import Declined, KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.nic_pairs import Route
from kvpool.placement.records import NIXL as NIXL_URL
from kvpool.telemetry.node_stats import NixlStats, PathsStats, WorkerStats
from kvpool.telemetry.spans import current
from kvpool.transfer.base import span_of
from kvpool.types import CHECKSUM_BYTES, BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

FETCHED_AGAIN = {BlockStatus.LATE, BlockStatus.MISMATCH}


class TransferWorkers:
    """Pulls and questions, each by the paths to its peer."""

    def __init__(self, pool: TransferPool, paths: Paths, clock: Callable[[], float]) -> None:
        self.pool = pool
        self._paths = paths
        self._clock = clock

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        """Have blocks fetched. Afterwards nothing writes to the rows, as with `TransferPool.send`.

        Raises what that raises by the last path, unless something has come by another one, and `InvalidRequest` for
        an order that can never work.
        """
        started = self._clock()
        peer = self._paths.peer(order.url)
        count = len(order.rows) // 4
        # How long a pull gave way, or hashed what was here already, says nothing of a path.
        tells = not (order.background or order.start)
        paths, tried_s = peer.for_pull(started, count * span_of(order)[1] if tells else 0)
        self._paths.chosen(peer, paths[0], started)
        whole: worker_wire.Pulled | None = None
        left: Sequence[int] = range(count)
        part = order
        for at, path in enumerate(paths):
            last = at + 1 == len(paths)
            if order.trace and (span := current()) is not None:
                span.set(path=path.transport)
                span.count("tries", 1)
            try:
                came = await self._pull_by(
                    peer, path, part, last=last, tried_s=0.0 if at else tried_s
                )
            except KvpoolError as error:
                if whole is None or set(whole.status) == {BlockStatus.LATE}:
                    raise
                return msgspec.structs.replace(whole, error=str(error))
            whole = came if whole is None else _merged(whole, left, came)
            if last or not came.error or came.refused:
                break
            left = [i for i, status in enumerate(whole.status) if status in FETCHED_AGAIN]
            if not left:
                return msgspec.structs.replace(whole, error="")
            seconds = self._clock() - started
            if seconds >= order.deadline_s:
                break
            self._paths.failed_over(path, len(left))
            part = _cut(order, left, seconds)
        assert whole is not None, "there is always one path"
        return whole

    async def _pull_by(
        self,
        peer: PeerPaths,
        path: PeerPath,
        order: worker_wire.PullBlocks,
        *,
        last: bool,
        tried_s: float,
    ) -> worker_wire.Pulled:
        """What came by one path. `error` says why not all did; the last path may raise.

        tried_s: for so long it is tried at most; 0: it is the one to use.
        """
        count = len(order.rows) // 4
        _, each = span_of(order)
        seconds = path.attempt_s(count * each, order.deadline_s, last=last)
        seconds = min(seconds, tried_s or seconds)
        started, before = self._clock(), path.nbytes

        def failed(reason: str) -> None:
            now = self._clock()
            # What gives way to others is not broken for being late.
            if not (order.background and now - started >= seconds):
                self._paths.failed(path, reason, now)

        peer.begin(path, count * each, started)
        try:
            pulled = await self.pool.send(
                msgspec.structs.replace(order, url=path.url, deadline_s=seconds)
            )
        except KvpoolError as error:
            broken = path.shortcut or isinstance(error, Unavailable)
            # What is too much for our own transfer worker for NIXL may not be for the others.
            if broken and not isinstance(error, LimitExceeded):
                failed(str(error))
            if last or not broken:
                raise
            nothing = bytes([BlockStatus.LATE]) * count, bytes(CHECKSUM_BYTES * count)
            return worker_wire.Pulled(*nothing, self._clock() - started, str(error))
        finally:
            peer.end(path, count * each)
        assert isinstance(pulled, worker_wire.Pulled)
        blocks = pulled.status.count(BlockStatus.PRESENT)
        tells = not (order.background or order.start)
        self._paths.came(peer, path, blocks, blocks * each, pulled.seconds if tells else None)
        error_text = pulled.error
        wrong = pulled.status.count(BlockStatus.MISMATCH)
        if wrong and path.shortcut and not (error_text or last or order.start):
            # The owner's copy may be broken, or this path. TCP tells: it is the owner's then as well. (Where some
            # came before it was committed, that may be what is wrong.)
            error_text = f"{wrong} blocks do not match their checksums"
        if error_text and not pulled.refused:
            failed(error_text)
            return msgspec.structs.replace(pulled, error=error_text)
        if pulled.refused or not tells:
            path.well()
        else:
            peer.measured(path, path.nbytes - before, pulled.seconds, self._clock())
        return pulled

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        """A peer's answer to a question. Raises as `pull`, and what the peer reports."""
        started = self._clock()
        paths = self._paths.peer(order.url).for_ask(started)
        for path in paths:
            last = path is paths[-1]
            left_s = order.deadline_s - (self._clock() - started)
            if not last:
                # A card that swallows all leaves time for the next one, but a peer may wait as it was asked to.
                asks = order.question
                waits_s = (
                    asks.wait_s if isinstance(asks, (peer_wire.Await, peer_wire.Operate)) else 0.0
                )
                left_s = min(left_s, waits_s + max(0.0, left_s - waits_s) * DEADLINE_SHARE)
            try:
                answer = await self.pool.send(
                    msgspec.structs.replace(order, url=path.url, deadline_s=left_s)
                )
            except Declined:
                path.well()
                raise
            except Unavailable as error:
                now = self._clock()
                if not order.background:
                    path.failed(str(error), now)
                if last or now - started >= order.deadline_s:
                    raise
            else:
                path.well()
                assert isinstance(answer, (frame.Done, frame.Bytes))
                return answer
        raise AssertionError("there is always one path")

    # ---- for the rest of the daemon ------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether a question now would wait for nothing but its answer."""
        return self.pool.idle

    def path_to(self, url: str) -> str:
        """The URL by which a peer is pulled from at present."""
        return self._paths.path_to(url, self._clock())

    def stats(self) -> list[WorkerStats]:
        return self.pool.stats()

    def path_stats(self) -> PathsStats:
        """What is known of the paths to each peer."""
        return self._paths.stats(self._clock())

    def nixl_stats(self) -> NixlStats | None:
        """None where this node has no NIXL."""
        return self._paths.nixl_stats(self._clock()) if self._paths.nixl else None


def transfer_workers(
    config: DaemonConfig,
    incarnation: str,
    route: Callable[[str], Route | None] = lambda _: None,
) -> TransferWorkers:
    """Those of a daemon; nothing runs yet. route: all ways to a peer, by the URL that it is known by."""
    nixl = any(url.startswith(NIXL_URL) for url in config.listen)
    first = "" if config.pull_over == "auto" else config.pull_over
    paths = Paths(route, random.Random(incarnation), nixl=nixl, first=first)
    return TransferWorkers(TransferPool(config, incarnation), paths, time.monotonic)


def _cut(
    order: worker_wire.PullBlocks, indices: Sequence[int], seconds: float
) -> worker_wire.PullBlocks:
    """The order for these blocks alone, in the time that is left."""
    keys = split_keys(order.keys)
    rows = array("I", order.rows)
    return msgspec.structs.replace(
        order,
        keys=b"".join([keys[index] for index in indices]),
        rows=array("I", [rows[index] for index in indices]).tobytes(),
        deadline_s=order.deadline_s - seconds,
    )


def _merged(
    first: worker_wire.Pulled, indices: Sequence[int], second: worker_wire.Pulled
) -> worker_wire.Pulled:
    """What two attempts have brought; the second one was for these blocks."""
    status, checksums = bytearray(first.status), bytearray(first.checksums)
    for at, index in enumerate(indices):
        status[index] = second.status[at]
        checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] = second.checksums[
            at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES
        ]
    return worker_wire.Pulled(
        bytes(status),
        bytes(checksums),
        first.seconds + second.seconds,
        second.error,
        second.refused,
    )
