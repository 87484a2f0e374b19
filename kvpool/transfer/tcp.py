"""Transport over TCP: one blocking connection a transfer, bytes straight from segment to segment.

The reader asks with a `Fetch`, the owner answers with a `Fetched` and then the raw bytes of the blocks
that are present; both sides hand the kernel lists of slots, so nothing is copied in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvpool.errors import KvpoolError
from kvpool.transfer.base import (
    Deadline,
    Identity,
    Outcome,
    Source,
    Stop,
    TransferLimits,
    check_order,
)
from kvpool.transfer.connections import Connections
from kvpool.transfer.fetching import Refused, ask, fetch
from kvpool.transfer.memory import Memory
from kvpool.transfer.serving import Server
from kvpool.transfer.stream import Closed, Stream
from kvpool.wire import AskPeer, PullBlocks, Pulled

T = TypeVar("T")


class TcpTransport:
    """See `Transport`. Pulls run in the calling thread, each on a connection of its own."""

    def __init__(
        self, memory: Memory, source: Source, identity: Identity, limits: TransferLimits
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._connections = Connections(identity, limits)
        self._server = Server(memory, source, identity, limits)

    def listen(self, url: str) -> str:
        return self._server.listen(url)

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        outcome = Outcome(check_order(order, self._memory))
        deadline = Deadline(order.deadline_s)
        step = max(1, self._limits.fetch_bytes_max // order.nbytes)
        try:
            for first in range(0, len(outcome.status), step):
                end = min(first + step, len(outcome.status))

                def fetch_slice(stream: Stream, first: int = first, end: int = end) -> None:
                    fetch(stream, order, first, end, self._memory, outcome, stop)

                self._talk(order.url, deadline, stop, fetch_slice)
        except KvpoolError as error:
            return outcome.finish(error)
        return outcome.finish()

    def ask(self, question: AskPeer, stop: Stop) -> int:
        deadline = Deadline(question.deadline_s)
        return self._talk(question.url, deadline, stop, lambda stream: ask(stream, question))

    def close(self) -> None:
        self._server.close()
        self._connections.close()

    def _talk(self, url: str, deadline: Deadline, stop: Stop, talk: Callable[[Stream], T]) -> T:
        """The result of `talk` over a connection to the peer. It may be called twice."""
        stream = self._connections.take_idle(url)
        if stream is not None:
            try:
                return self._talk_over(url, stream, deadline, stop, talk)
            except Closed:
                # The peer had closed it while it was idle, or fails now. A new connection tells which;
                # blocks that had arrived are simply fetched again.
                if stop.is_set:
                    raise
        stream = self._connections.connect(url, deadline, stop)
        return self._talk_over(url, stream, deadline, stop, talk)

    def _talk_over(
        self, url: str, stream: Stream, deadline: Deadline, stop: Stop, talk: Callable[[Stream], T]
    ) -> T:
        """One conversation over this connection, which is kept or closed here."""
        stream.deadline = deadline
        usable = False
        try:
            stop.register(stream.shut)
            try:
                result = talk(stream)
                usable = True
                return result
            except Refused as refused:
                usable = True
                raise refused.error from None
            finally:
                stop.unregister(stream.shut)
        finally:
            if usable and not stop.is_set:
                self._connections.give(url, stream)
            else:
                stream.close()
