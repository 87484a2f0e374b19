"""A mover: the process that moves bulk bytes between this node and others (a `WorkerProcess`).

It maps the daemon's segments, pulls blocks from peers into rows that its control process has reserved,
and sends peers the rows that control lends. It decides nothing.

Threads: the main one reads the control channel, a few pull, transports have theirs for serving. All block
in system calls that hold no GIL; none polls.
"""

from __future__ import annotations

import logging
import socket
import threading

import msgspec

from kvpool import wire
from kvpool.daemon.worker import Control, Jobs, OwedAnswer, WorkerProcess, run_worker
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.transfer import scheme_of, transport_for
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits, Transport
from kvpool.transfer.credentials import Credentials, TlsFiles
from kvpool.wire import (
    Ask,
    AskPeer,
    Await,
    Bytes,
    Corrupt,
    Done,
    Error,
    Lend,
    Lent,
    Message,
    MoverReady,
    MoverStart,
    Offer,
    Operate,
    PullBlocks,
    Return,
    StopOrder,
)

PULL_THREADS_MAX = 16
COPY_THREADS_MAX = 4
ASK_S_MAX = 10.0  # for control to answer what a peer asked


class ControlSource:
    """The rules, asked over the control channel: a `Source`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def lend(self, request: Lend) -> Lent:
        answer = self._control.ask(request, Deadline(request.deadline_s))
        if not isinstance(answer, Lent):
            raise ProtocolError(f"a Lend was answered with a {type(answer).__name__}")
        return answer

    def give_back(self, token: str) -> None:
        self._control.send(Return(token), 0)

    def asked(self, question: Ask | Offer) -> Done | Bytes:
        seconds = question.deadline_s if isinstance(question, Offer) else ASK_S_MAX
        answer = self._control.ask(question, Deadline(seconds))
        if not isinstance(answer, (Done, Bytes)):
            raise ProtocolError(f"a question was answered with a {type(answer).__name__}")
        return answer

    def awaited(self, question: Await | Operate) -> OwedAnswer:
        return self._control.begin(question)

    def corrupt(self, report: Corrupt) -> None:
        self._control.send(report, 0)


class Mover(WorkerProcess):
    """The process."""

    decode = wire.decode_mover

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._jobs = Jobs("kvpool-pull", PULL_THREADS_MAX, self.control)
        # Copies in the background and questions that wait have threads of their own, so that no pull waits
        # for them.
        self._copies = Jobs("kvpool-copy", COPY_THREADS_MAX, self.control)
        self._waits: Jobs | None = None
        self._operators: Jobs | None = None  # which wait too: theirs hold no engine's up
        self._transports: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._start: MoverStart | None = None
        self._credentials: Credentials | None = None

    def handle(self, request: int, message: Message) -> None:
        match message:
            case Lent() | Done() | Bytes() | Error():
                heard = self.control.answered(request, message)
                if not heard and isinstance(message, Lent) and message.token:
                    self.control.send(Return(message.token), 0)
            case PullBlocks() | AskPeer():
                self._jobs_for(message).add(
                    request,
                    message.deadline_s,
                    lambda stop, deadline: self._run_job(message, stop, deadline),
                )
            case StopOrder():
                for jobs in (self._jobs, self._copies, self._waits, self._operators):
                    if jobs is not None:
                        jobs.stop(message.request)
            case wire.AttachSegment():
                self.answer(request, lambda: self.attach(message))
            case MoverStart():
                self.answer(request, lambda: self._begin(message))
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not for a mover")

    def _jobs_for(self, order: PullBlocks | AskPeer) -> Jobs:
        """Whose threads do it."""
        if isinstance(order, PullBlocks):
            return self._copies if order.background else self._jobs
        match order.question:
            case Operate(wait_s=wait_s) if wait_s > 0:
                waits = self._operators
            case Await(wait_s=wait_s) if wait_s > 0:
                waits = self._waits
            case _:
                waits = None
        return waits or self._jobs

    def _begin(self, start: MoverStart) -> Message:
        if start.tls_cert:
            files = TlsFiles(start.tls_cert, start.tls_key, start.tls_ca, start.tls_crl)
            self._credentials = Credentials(files, start.cluster, start.node)
        self._start = start
        self._waits = Jobs("kvpool-wait", start.waits_max, self.control)
        self._operators = Jobs("kvpool-operator", start.waits_max, self.control)
        return MoverReady([self._transport(url).listen(url) for url in start.listen])

    def _run_job(self, order: PullBlocks | AskPeer, stop: Stop, deadline: Deadline) -> Message:
        """In a thread of `Jobs`: the answer to an order."""
        order = msgspec.structs.replace(order, deadline_s=deadline.left())
        transport = self._transport(order.url)
        if isinstance(order, AskPeer):
            return transport.ask(order, stop)
        return transport.pull(order, stop)

    def _transport(self, url: str) -> Transport:
        """Raises `ConfigError` for an unknown scheme."""
        scheme = scheme_of(url)
        with self._lock:
            transport = self._transports.get(scheme)
            if transport is None:
                transport = self._transports[scheme] = self._make(url)
            return transport

    def _make(self, url: str) -> Transport:
        start = self._start
        if start is None:
            raise InvalidRequest("a mover was used before its MoverStart")
        return transport_for(url)(
            self.memory,
            ControlSource(self.control),
            Identity(
                start.cluster,
                start.node,
                start.incarnation,
                start.secret.encode(),
                self._credentials,
                start.plaintext,
            ),
            TransferLimits(
                connections_max=start.connections_max, inflight_bytes_max=start.inflight_bytes_max
            ),
        )


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    run_worker(Mover)
