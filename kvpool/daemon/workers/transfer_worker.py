"""A transfer worker: the process that moves bulk bytes between this node and others (a `WorkerProcess`).

It maps the daemon's segments, pulls blocks from peers into rows that its control process has reserved,
and sends peers the rows on loan. It decides nothing.

Threads: the main one reads the control channel, each order has one, transports have their own for serving. All
block in system calls without the GIL; none polls. No order waits for a thread: control sends none too many, of any
peer or of all, so that one that hangs keeps nothing from the others.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec

from kvpool.daemon.workers.worker_main import Control, Jobs, OwedAnswer, WorkerProcess, run_worker
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.net import scheme_of
from kvpool.security.cluster_secrets import ClusterSecrets, SecretSource
from kvpool.security.credentials import Credentials, TlsFiles
from kvpool.security.failed_logins import Failures
from kvpool.transfer import transport_for
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits, Transport
from kvpool.wire import worker as worker_wire
from kvpool.wire.frame import Bytes, Done, Error, Message
from kvpool.wire.peer import Corrupt, Discard, LongQuestion, Offer, Question
from kvpool.wire.worker import (
    AskPeer,
    Loan,
    LoginsFailed,
    OpenLoan,
    PullBlocks,
    RequestFailed,
    Return,
    TransferReady,
    TransferStart,
)

THREADS_MAX = 512  # for one kind of orders; control orders far fewer at a time (`turns.py`)
ASK_S_MAX = 10.0  # for control to answer a peer's request


class ControlSource:
    """The rules, asked over the control channel: a `Source`."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def open_loan(self, request: OpenLoan) -> Loan:
        answer = self._control.ask(request, Deadline(request.deadline_s))
        if not isinstance(answer, Loan):
            raise ProtocolError(f"the answer to an OpenLoan is a {type(answer).__name__}")
        return answer

    def give_back(self, token: str) -> None:
        self._control.send(Return(token), 0)

    def asked(self, question: Question) -> Done | Bytes:
        seconds = question.deadline_s if isinstance(question, (Offer, Discard)) else ASK_S_MAX
        answer = self._control.ask(question, Deadline(seconds))
        if not isinstance(answer, (Done, Bytes)):
            raise ProtocolError(f"the answer to a peer's request is a {type(answer).__name__}")
        return answer

    def answer_later(self, question: LongQuestion) -> OwedAnswer:
        return self._control.begin(question)

    def logins_failed(self, failures: Failures) -> None:
        self._control.send(LoginsFailed(failures), 0)

    def request_failed(self, name: str) -> None:
        self._control.send(RequestFailed(name), 0)

    def corrupt(self, report: Corrupt) -> None:
        self._control.send(report, 0)


class TransferWorker(WorkerProcess):
    """The process."""

    kind = "transfer"
    decode = worker_wire.decode_transfer

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        jobs = Jobs("kvpool-order", THREADS_MAX, self.control)
        self.orders = dict.fromkeys((PullBlocks, AskPeer), (jobs, self._run_job))
        self.questions[TransferStart] = self._begin
        self.stoppable = (jobs,)
        self._transports: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._start: TransferStart | None = None
        self._credentials: Credentials | None = None
        self._secrets = ClusterSecrets.of()

    def handle(self, request: int, message: Any) -> None:
        """Pass control's answers on to the threads that wait for them."""
        if not isinstance(message, (Loan, Done, Bytes, Error)):
            super().handle(request, message)
            return
        heard = self.control.answered(request, message)
        if not heard and isinstance(message, Loan) and message.token:
            self.control.send(Return(message.token), 0)

    def _begin(self, start: TransferStart) -> Message:
        if start.tls_cert:
            files = TlsFiles(start.tls_cert, start.tls_key, start.tls_ca, start.tls_crl)
            self._credentials = Credentials(files, start.cluster, start.node)
        self._secrets = ClusterSecrets(
            SecretSource(start.secret, start.secret_file, start.secret_is_local),
            before=start.secrets_before,
        )
        self._start = start
        return TransferReady([self._transport(url).listen(url) for url in start.listen])

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
            raise InvalidRequest("the first message to a transfer worker must be a TransferStart")
        return transport_for(url)(
            self.memory,
            ControlSource(self.control),
            Identity(
                start.cluster,
                start.node,
                start.incarnation,
                self._secrets,
                self._credentials,
                start.plaintext,
            ),
            TransferLimits(
                connections_max=start.connections_max, inflight_bytes_max=start.inflight_bytes_max
            ),
        )


if __name__ == "__main__":
    run_worker(TransferWorker)
