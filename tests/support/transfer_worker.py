"""A side of a transport in a process of its own: a real transfer worker, whose rules are a test's.

The bytes and the `ScriptedSource` are here, the transport is there; both map the same segment.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from kvpool.errors import KvpoolError, Unavailable, from_code
from kvpool.security.cluster_secrets import UNTIL
from kvpool.security.credentials import TlsFiles
from kvpool.storage.dram import DramSegment
from kvpool.transfer.base import Identity, Stop, TransferLimits
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.frame import Bytes, Done, Message
from kvpool.wire.worker import AskPeer, PullBlocks, Pulled
from tests.contract.suites.transport import SECRET, SEGMENT, ScriptedSource, Side
from tests.support.waiting import PATIENCE_S

WORKER = "kvpool.daemon.workers.transfer_worker"


class MoverSide(Side):
    """A `Side` whose transport runs in a transfer worker. environ: what the process has beyond ours.

    tls: files, which the process reads itself. module: what the process runs.
    """

    def __init__(
        self,
        url: str,
        *,
        size: int = 24 << 20,
        secrets: tuple[str, ...] = (SECRET,),
        cluster: str = "test",
        limits: TransferLimits | None = None,
        environ: Mapping[str, str] | None = None,
        tls: TlsFiles | None = None,
        module: str = WORKER,
    ) -> None:
        self._segment = DramSegment.create(size)
        self.bytes = self._segment.map()
        self.source = ScriptedSource(self.bytes)
        self.worker = MoverTransport(
            self._segment,
            self.source,
            Identity(cluster, "node", "incarnation"),
            secrets,
            limits or TransferLimits(),
            environ or {},
            tls,
            module,
        )
        self.transport = self.worker


class MoverTransport:
    """See `Transport`: everything is passed on to the process. Thread-safe.

    `fetch_bytes_max` of the limits is the transfer worker's own.
    """

    def __init__(
        self,
        segment: DramSegment,
        source: ScriptedSource,
        identity: Identity,
        secrets: tuple[str, ...],
        limits: TransferLimits,
        environ: Mapping[str, str],
        tls: TlsFiles | None = None,
        module: str = WORKER,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-test-")
        self._secrets = Path(self._folder.name) / "secrets"
        if secrets:
            end = f"{UNTIL}2100-01-01T00:00:00Z"
            text = secrets[0] + "".join(f"\n{each}{end}" for each in secrets[1:])
            self._secrets.write_text(text)
            self._secrets.chmod(0o600)
        self._source = source
        self._identity = identity
        self._limits = limits
        self._tls = tls or TlsFiles("", "", "")
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._bells: dict[
            int, int
        ] = {}  # descriptors that tell of the end of a question that waits
        self._last = 0
        self._ended = False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    module,
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, **environ},
            )
        self._sock = ours
        self._thread = threading.Thread(
            target=self._receive, name="kvpool-test-transfer-worker", daemon=True
        )
        self._thread.start()
        self._exchange(worker_wire.AttachSegment(SEGMENT, segment.size), fd=segment.fd)
        self._begun = False

    def listen(self, url: str) -> str:
        return self._begin([url])[0]

    def pull(self, order: PullBlocks, stop: Stop) -> Pulled:
        if not self._begun:
            self._begin([])
        answer = self._exchange(order, stop)
        assert isinstance(answer, Pulled)
        return answer

    def ask(self, order: AskPeer, stop: Stop) -> Done | Bytes:
        answer = self._exchange(order, stop)
        assert isinstance(answer, (Done, Bytes))
        return answer

    def _begin(self, listen: list[str]) -> list[str]:
        self._begun = True
        us, limits = self._identity, self._limits
        ready = self._exchange(
            worker_wire.TransferStart(
                us.cluster,
                us.node,
                us.incarnation,
                "",
                listen,
                limits.connections_max,
                limits.inflight_bytes_max,
                tls_cert=self._tls.cert,
                tls_key=self._tls.key,
                tls_ca=self._tls.ca,
                tls_crl=self._tls.crl,
                secret_file=str(self._secrets) if self._secrets.exists() else "",
            )
        )
        assert isinstance(ready, worker_wire.TransferReady)
        return ready.listening

    def _exchange(
        self, message: Message, stop: Stop | None = None, fd: int | None = None
    ) -> Message:
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                raise Unavailable("the transfer worker has ended")
            self._last = request = self._last + 1
            self._answers[request] = answers
            self._send(message, request, fd)

        def interrupt() -> None:
            with self._lock:
                self._send(worker_wire.StopOrder(request), 0)

        if stop is not None:
            stop.register(interrupt)
        try:
            answer = answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise Unavailable("the transfer worker does not answer") from None
        finally:
            if stop is not None:
                stop.unregister(interrupt)
        if isinstance(answer, frame.Error):
            raise from_code(answer.code, answer.message)
        return answer

    def _send(self, message: Message, request: int, fd: int | None = None) -> None:
        framed = frame.encode(message, request)
        try:
            if fd is None:
                self._sock.sendall(framed)
            else:
                socket.send_fds(self._sock, [framed], [fd])
        except OSError:
            pass  # it has ended, which its reader notices

    def _receive(self) -> None:
        reader = frame.FrameReader()
        while data := self._sock_receive():
            for request, payload in reader.feed(data):
                self._handle(request, worker_wire.decode_transfer(payload))
        self.process.wait()
        ended = frame.error_message(
            Unavailable(f"the transfer worker ended (status {self.process.returncode})")
        )
        with self._lock:
            self._ended = True
            for answers in self._answers.values():
                answers.put(ended)
            self._answers.clear()

    def _sock_receive(self) -> bytes:
        try:
            return self._sock.recv(1 << 18)
        except OSError:
            return b""

    def _handle(self, request: int, message: Message) -> None:
        match message:
            case (
                worker_wire.OpenLoan()
                | peer_wire.Ask()
                | peer_wire.Offer()
                | peer_wire.SessionEnded()
            ):
                # In a thread, since a test may have it wait.
                threading.Thread(target=self._answer, args=(request, message)).start()
            case peer_wire.Await():
                threading.Thread(target=self._answer_later, args=(request, message)).start()
            case worker_wire.StopOrder():
                with self._lock:
                    bell = self._bells.get(message.request)
                    if bell is not None:
                        os.eventfd_write(bell, 1)
            case worker_wire.Return():
                self._source.give_back(message.token)
            case peer_wire.Corrupt():
                self._source.corrupt(message)
            case _:
                with self._lock:
                    answers = self._answers.pop(request)
                answers.put(message)

    def _answer(
        self,
        request: int,
        message: worker_wire.OpenLoan | peer_wire.Ask | peer_wire.Offer | peer_wire.SessionEnded,
    ) -> None:
        answer: Message
        try:
            if isinstance(message, worker_wire.OpenLoan):
                answer = self._source.open_loan(message)
            else:
                answer = self._source.asked(message)
        except KvpoolError as error:
            answer = frame.error_message(error)
        with self._lock:
            self._send(answer, request)

    def _answer_later(self, request: int, question: peer_wire.Await) -> None:
        """Answer when the source does, unless the transfer worker says that nobody waits any more."""
        answer: Message | None = None
        bell = os.eventfd(0)
        with self._lock:
            self._bells[request] = bell
        try:
            owed = self._source.answer_later(question)
            try:
                both = select.poll()
                both.register(owed.fileno(), select.POLLIN)
                both.register(bell, select.POLLIN)
                if owed.fileno() in dict(both.poll(PATIENCE_S * 1000)):
                    answer = owed.result()
            finally:
                owed.close()
        except KvpoolError as error:
            answer = frame.error_message(error)
        with self._lock:
            del self._bells[request]
            if answer is not None:
                self._send(answer, request)
        os.close(bell)

    def close(self) -> None:
        """End the process and wait for it. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ended already
        self._thread.join()
        self._sock.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        self._folder.cleanup()
