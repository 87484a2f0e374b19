"""Transport over TCP: one blocking connection a transfer, bytes straight from segment to segment.

The reader sends a `Fetch`, the owner answers with a `Fetched` and then the raw bytes of the blocks
that are present; both sides hand the kernel lists of slots, so nothing is copied in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvpool.errors import KvpoolError, Unavailable
from kvpool.transfer.base import (
    Deadline,
    Identity,
    Outcome,
    Run,
    Source,
    Stop,
    TransferLimits,
    arrived_bytes,
    check_order,
    cut,
)
from kvpool.transfer.connections import Connections, NoPlace
from kvpool.transfer.listener import Server
from kvpool.transfer.memory import Memory
from kvpool.transfer.priority import Priority
from kvpool.transfer.requester import Refused, ask, fetch
from kvpool.transfer.responder import Conversation, Converse
from kvpool.transfer.stream import Closed, Stream
from kvpool.transfer.stream_tuner import StreamCounts
from kvpool.transfer.thread_pool import ThreadPool
from kvpool.wire.frame import Bytes, Done
from kvpool.wire.worker import AskPeer, PullBlocks, Pulled

T = TypeVar("T")


HELPERS_MAX = 16  # threads for second connections, and third ones


class TcpTransport:
    """See `Transport`. A pull runs in the calling thread, and a large one in other threads as well."""

    def __init__(
        self,
        memory: Memory,
        source: Source,
        identity: Identity,
        limits: TransferLimits,
        converse: Converse = Conversation,
    ) -> None:
        self.memory = memory
        self.limits = limits
        self.helpers = ThreadPool("kvpool-stream", HELPERS_MAX)
        self._connections = Connections(identity, limits)
        self.precedence = Priority()
        self.streams = StreamCounts()
        self._server = Server(memory, source, identity, limits, self.precedence, converse)

    def listen(self, url: str) -> str:
        return self._server.listen(url)

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        outcome = Outcome(check_order(order, self.memory))
        pull = _Pull(self, order, outcome, stop)
        if order.background:
            return pull.run()
        with self.precedence.urgent():
            return pull.run()

    def ask(self, order: AskPeer, stop: Stop) -> Done | Bytes:
        deadline = Deadline(order.deadline_s)
        return self.talk(order.url, deadline, stop, lambda stream: ask(stream, order.question))

    def close(self) -> None:
        self._server.close()
        self._connections.close()
        self.helpers.close()

    def talk(self, url: str, deadline: Deadline, stop: Stop, talk: Callable[[Stream], T]) -> T:
        """The result of `talk` over a connection to the peer. It may be called twice."""
        stream = self._connections.take_idle(url)
        if stream is not None:
            try:
                return self._talk_over(url, stream, deadline, stop, talk)
            except Closed:
                # The peer had closed it while it was idle, or fails now. A new connection shows which;
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


class _Pull:
    """One pull: its slices, taken by one or more threads, each with a connection of its own."""

    def __init__(
        self, transport: TcpTransport, order: PullBlocks, outcome: Outcome, stop: Stop
    ) -> None:
        self._transport = transport
        self._order = order
        self._outcome = outcome
        self._stop = stop
        self._ours = Stop()  # set by `stop`, and when one thread fails: then the others stop too
        self._deadline = Deadline(order.deadline_s)
        count = len(outcome.status)
        work = order.nbytes
        # A background pull needs no speed.
        self._streams = 1 if order.background else transport.streams.choose(order.url, work, count)
        # Its popleft is atomic.
        self._slices = deque(cut(order, transport.limits.fetch_bytes_max, self._streams))
        self._error: KvpoolError | None = None
        self._alone = False  # the peer had no place for all of its connections

    def run(self) -> Pulled:
        """Returns when all threads have finished with the rows."""
        try:
            self._stop.register(self._ours.set)
        except KvpoolError as error:
            return self._outcome.finish(error)
        wanted = min(self._streams, len(self._slices)) - 1
        with self._transport.helpers.helping(lambda: self._work(more=True), wanted) as helpers:
            self._work(more=helpers > 0)
        self._work(more=False)  # what one had taken and found no connection for
        self._stop.unregister(self._ours.set)
        if self._stop.is_set and self._error is None and self._slices:
            self._error = Unavailable("the transfer was cancelled")
        pulled = self._outcome.finish(self._error)
        order = self._order
        together = helpers == self._streams - 1 and not self._alone
        if together and not (pulled.error or order.background):
            nbytes = arrived_bytes(order, pulled)
            self._transport.streams.learn(order.url, self._streams, nbytes, pulled.seconds)
        return pulled

    def _work(self, *, more: bool) -> None:
        """Fetch slices until there are no more, or a thread has failed.

        more: other threads do the same. If the peer has no place for one more connection, they go on without.
        """
        part = None
        try:
            while (part := self._next()) is not None:
                self._fetch(part)
        except KvpoolError as error:
            if more and isinstance(error, NoPlace):
                assert part is not None, "a slice has been refused"
                self._alone = True
                self._slices.append(part)
                return
            self._error = self._error or error
            self._ours.set()

    def _next(self) -> list[Run] | None:
        try:
            return None if self._ours.is_set else self._slices.popleft()
        except IndexError:
            return None

    def _fetch(self, runs: list[Run]) -> None:
        def talk(stream: Stream) -> None:
            transport = self._transport
            fetch(
                stream,
                self._order,
                runs,
                transport.memory,
                self._outcome,
                self._ours,
                transport.precedence,
            )

        self._transport.talk(self._order.url, self._deadline, self._ours, talk)
