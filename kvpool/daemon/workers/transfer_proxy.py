"""The control process's side of one transfer worker: what it is told, what it asks, what it borrowed.

Event loop only. When it dies, what it had borrowed is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from kvpool.config import DaemonConfig
from kvpool.daemon.workers.supervisor import START_S, Worker
from kvpool.errors import KvpoolError, LimitExceeded
from kvpool.memory.segment import Segment
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

INFLIGHT_BYTES_MAX = 1 << 30  # lent to peers at a time, by one transfer worker
OFFERS_MAX = 32  # taken up at a time, through one transfer worker
WAITS_MAX = 64  # questions to peers that wait, at a time, by one transfer worker


class Rules(Protocol):
    """What transfer workers ask of the rules. Called on the event loop; quick."""

    def open_loan(
        self, request: worker_wire.OpenLoan
    ) -> worker_wire.Loan | Coroutine[Any, Any, worker_wire.Loan]:
        """Lease what is here of these blocks until `give_back`. Raises `KvpoolError`.

        A coroutine where that takes a while; it ends by the request's deadline.
        """
        ...

    def give_back(self, token: str) -> None:
        """Nothing reads this loan any more."""
        ...

    def asked(self, question: peer_wire.Ask) -> frame.Done:
        """How many blocks of the prefix could be lent. Raises `KvpoolError`."""
        ...

    def offered(self, offer: peer_wire.Offer) -> Coroutine[Any, Any, frame.Bytes]:
        """Take what is wanted of the offered blocks. Ends by the offer's deadline. Raises `KvpoolError`."""
        ...

    def answer_later(self, question: peer_wire.Await) -> Coroutine[Any, Any, frame.Bytes]:
        """What is in memory of some blocks, once there is news. Raises `KvpoolError`."""
        ...

    def operated(self, order: peer_wire.Operate) -> Coroutine[Any, Any, frame.Bytes]:
        """The answer to what an operator of another node wants. Raises `KvpoolError`."""
        ...

    def corrupt(self, report: peer_wire.Corrupt) -> None:
        """A peer got these blocks from here, and they did not match their checksums."""
        ...


class TransferWorkerProxy(Worker):
    """One life of a transfer worker. segments: to map. rules: answer what peers ask. listen: the URLs that it serves."""

    module = "kvpool.daemon.workers.transfer_worker"
    kind = "transfer"
    decode = worker_wire.decode_transfer

    def __init__(
        self,
        config: DaemonConfig,
        incarnation: str,
        segments: Mapping[int, Segment],
        rules: Rules,
        listen: list[str],
    ) -> None:
        super().__init__()
        self._config = config
        self._incarnation = incarnation
        self._segments = segments
        self._rules = rules
        self._listen = listen
        self._loans: set[str] = set()
        self._taking: set[asyncio.Task[None]] = set()
        self._lending: set[asyncio.Task[None]] = set()
        self._awaiting: set[asyncio.Task[None]] = set()
        self._awaited: dict[
            int, asyncio.Task[None]
        ] = {}  # of these, by the transfer worker's request
        self.urls: list[str] = []

    @property
    def lending(self) -> int:
        return len(self._loans)

    async def _prepare(self) -> None:
        config = self._config
        for segment_id, segment in self._segments.items():
            await self.attach(segment_id, segment)
        ready = await self._ask(
            worker_wire.TransferStart(
                cluster=config.cluster,
                node=config.node,
                incarnation=self._incarnation,
                secret=config.cluster_secret,
                listen=self._listen,
                connections_max=config.peers_max,
                inflight_bytes_max=INFLIGHT_BYTES_MAX,
                waits_max=WAITS_MAX,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                tls_ca=config.tls_ca,
                tls_crl=config.tls_crl,
                plaintext=config.plaintext,
            ),
            START_S,
        )
        self.urls = ready.listening

    def _received(self, request: int, message: Any) -> None:
        match message:
            case peer_wire.Ask():
                self._channel.send(self._asked(message), request)
            case worker_wire.OpenLoan():
                self._lend(message, request)
            case peer_wire.Offer():
                if len(self._taking) < OFFERS_MAX:
                    self._later(self._rules.offered(message), request, self._taking)
                else:
                    full = LimitExceeded(f"{OFFERS_MAX} offers are being taken up here already")
                    self._channel.send(frame.error_message(full), request)
            case peer_wire.Await() | peer_wire.Operate():
                work = (
                    self._rules.answer_later(message)
                    if isinstance(message, peer_wire.Await)
                    else self._rules.operated(message)
                )
                task = self._later(work, request, self._awaiting)
                self._awaited[request] = task
                task.add_done_callback(lambda _: self._awaited.pop(request, None))
            case worker_wire.StopOrder():
                if message.request in self._awaited:
                    self._awaited[message.request].cancel()
            case worker_wire.Return():
                if message.token in self._loans:
                    self._loans.remove(message.token)
                    self._rules.give_back(message.token)
            case peer_wire.Corrupt():
                self._rules.corrupt(message)
            case _:
                super()._received(request, message)

    def _asked(self, question: peer_wire.Ask) -> frame.Message:
        try:
            return self._rules.asked(question)
        except KvpoolError as error:
            return frame.error_message(error)

    def _lend(self, message: worker_wire.OpenLoan, request: int) -> None:
        try:
            found = self._rules.open_loan(message)
        except KvpoolError as error:
            self._channel.send(frame.error_message(error), request)
            return
        if isinstance(found, worker_wire.Loan):
            self._lent(found, request)
        else:
            self._later(found, request, self._lending)

    def _lent(self, lent: worker_wire.Loan, request: int) -> None:
        if lent.token:
            self._loans.add(lent.token)
        self._channel.send(lent, request)

    def _later(
        self,
        work: Coroutine[Any, Any, worker_wire.Loan | frame.Bytes],
        request: int,
        tasks: set[asyncio.Task[None]],
    ) -> asyncio.Task[None]:
        """Send what this comes to, if the transfer worker lives then."""
        task = self._loop.create_task(self._answer(work, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before it begins
        return task

    async def _answer(
        self, work: Coroutine[Any, Any, worker_wire.Loan | frame.Bytes], request: int
    ) -> None:
        try:
            answer = await work
        except KvpoolError as error:
            self._channel.send(frame.error_message(error), request)
            return
        if isinstance(answer, worker_wire.Loan):
            self._lent(answer, request)
        else:
            self._channel.send(answer, request)

    def on_worker_exit(self) -> None:
        for token in self._loans:
            self._rules.give_back(token)
        self._loans.clear()
        for task in (*self._taking, *self._lending, *self._awaiting):
            task.cancel()
