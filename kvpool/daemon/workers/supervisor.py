"""Worker processes of the control process: start, order, and restart them.

Event loop only. A worker is disposable: when it dies, its orders fail, and another one is started.
`transfer_workers.py` has those that carry bytes between nodes, `disk_proxy.py` those that own a disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvpool.errors import KvpoolError, LimitExceeded, ProtocolError, Unavailable, from_code
from kvpool.memory.segment import Segment
from kvpool.retry import backoff_s
from kvpool.telemetry import logs
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

log = logging.getLogger("kvpool.daemon")

OUTSTANDING_MAX = 512  # orders given to one worker and not answered
START_S = 60.0  # to start, and to map a segment
GRACE_S = 5.0  # after an order's deadline; then the worker is considered dead, and killed
STOP_S = 5.0
INSIST_S = 5.0  # wait before retrying a process that does not start
BACKOFF_S, BACKOFF_S_MAX = 0.1, 10.0
RESTARTS_MAX = 10  # in a row, each before the worker had lived for STEADY_S
STEADY_S = 60.0
READ_BYTES = 256 << 10

M = TypeVar("M", bound=frame.Message)


class Channel:
    """Control's end of a control channel: non-blocking, frames in, frames and descriptors out."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        decode: frame.Decoder,
        received: Callable[[int, Any], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._decode = decode
        self._received = received
        self._reader = frame.FrameReader()
        # Bytes to be written; bounded by the orders that may be under way.
        self._queue: deque[tuple[memoryview, int | None]] = deque()
        self._open = True
        self._writing = False
        loop.add_reader(self._fd, self._read)

    def send(self, message: frame.Message, request: int, fd: int | None = None) -> None:
        """Queue a frame, with a descriptor. Ignored if the worker has ended."""
        framed = memoryview(frame.encode(message, request))
        if self._open:
            self._queue.append((framed, fd))
            if not self._writing:
                self._write()

    def _write(self) -> None:
        while self._queue:
            data, fd = self._queue[0]
            try:
                if fd is None:
                    sent = self._sock.send(data)
                else:
                    sent = socket.send_fds(self._sock, [data], [fd])
            except BlockingIOError:
                break
            except OSError:
                self._queue.clear()  # the supervisor notices its end
                break
            if sent == len(data):
                self._queue.popleft()
            else:
                self._queue[0] = (data[sent:], None)  # the descriptor went with the first byte
        if bool(self._queue) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._fd, self._write)
            else:
                self._loop.remove_writer(self._fd)

    def _read(self) -> bool:
        """Read available frames; returns whether there may be more."""
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            return False
        for request, payload in self._reader.feed(data):
            self._received(request, self._decode(payload))
        return True

    def drain(self) -> None:
        """Read everything that a dead worker has left."""
        while self._read():
            pass

    def close(self) -> None:
        """Close this end: the worker ends. Idempotent."""
        if self._open:
            self._open = False
            self._queue.clear()
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
            self._sock.close()


class Worker(ABC):
    """One life of a worker: from its start to the death of the process.

    module: run as `python -m MODULE FD PARENT`, where FD is its end of the control channel. kind:
    its name in messages.
    """

    module: str
    kind: str
    decode: frame.Decoder

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._channel: Channel
        self._process: asyncio.subprocess.Process
        self.alive = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> int:
        """Number of unanswered orders."""
        return len(self._answers)

    async def start(self) -> None:
        """Returns when it serves. Raises the worker's error, or `Unavailable`; then it is dead."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # modules in the working directory must not be imported
                    "-m",
                    self.module,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **logs.inherited()},
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"a {self.kind} process cannot be started: {error}") from None
        self._channel = Channel(self._loop, ours, self.decode, self._received)
        self.alive = True
        self._death = self._loop.create_task(self._wait_for_death())
        try:
            await self._prepare()
        except BaseException:
            self._kill()
            await asyncio.shield(self._death)
            raise

    @abstractmethod
    async def _prepare(self) -> None:
        """Configure a new process. Raises its error."""

    async def attach(self, segment_id: int, segment: Segment) -> None:
        await self._ask(worker_wire.AttachSegment(segment_id, segment.size), START_S, segment.fd)

    async def order(self, message: frame.Message, deadline_s: float) -> Any:
        """The answer to an order, at the latest `GRACE_S` after its deadline.

        Returns, raises, or is cancelled only when the worker no longer works on the order: it
        has answered, or its process is dead.
        """
        if self.busy >= OUTSTANDING_MAX:
            raise LimitExceeded(
                f"{OUTSTANDING_MAX} orders of one {self.kind} worker are in progress, the limit"
            )
        return await self._ask(message, deadline_s + GRACE_S)

    async def expect(self, kind: type[M], message: frame.Message, deadline_s: float) -> M:
        """As `order`, if all answers are of one kind."""
        answer = await self.order(message, deadline_s)
        assert isinstance(answer, kind), f"a {type(message).__name__} was answered with {answer!r}"
        return answer

    def tell(self, message: frame.Message) -> None:
        """A message without an answer. Ignored if the worker has ended."""
        self._channel.send(message, 0)

    async def _ask(self, message: frame.Message, seconds: float, fd: int | None = None) -> Any:
        if not self.alive:
            raise Unavailable(f"the {self.kind} process has ended")
        self._last_request = request = self._last_request % 0xFFFFFFFF + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[request] = answer
        self._channel.send(message, request, fd)
        cancelled: asyncio.CancelledError | None = None
        seconds = max(
            seconds, GRACE_S
        )  # a process is not killed because an order came too late to be done
        while not answer.done():
            try:
                await asyncio.wait((answer,), timeout=seconds)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancelled = error
                    seconds = GRACE_S
                    self._channel.send(worker_wire.StopOrder(request), 0)
                continue
            if not answer.done():
                log.error(
                    "%s %d does not answer: killed",
                    self.kind,
                    self.pid,
                    extra={"worker": self.kind},
                )
                self._kill()
        failure = answer.exception()  # also marks it as seen
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure
        return answer.result()

    def _received(self, request: int, message: Any) -> None:
        answer = self._answers.pop(request, None)
        if answer is None:
            raise ProtocolError(
                f"a {self.kind} process answered request {request}, which was not sent"
            )
        if isinstance(message, frame.Error):
            answer.set_exception(from_code(message.code, message.message))
        else:
            answer.set_result(message)

    def _kill(self) -> None:
        if self.alive:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass  # dead, and about to be noticed

    async def _wait_for_death(self) -> None:
        """The process's death is the proof that it no longer reads or writes anywhere."""
        status = await self._process.wait()
        self._channel.drain()
        self.alive = False
        self._channel.close()
        for answer in self._answers.values():
            answer.set_exception(Unavailable(f"the {self.kind} process ended (status {status})"))
        self._answers.clear()
        self.on_worker_exit()

    @abstractmethod
    def on_worker_exit(self) -> None:
        """The process is dead: hook for further cleanup."""

    async def died(self) -> None:
        """Wait for the death of the process and for the cleanup after it."""
        await asyncio.shield(self._death)

    async def stop(self) -> None:
        """End the process and wait for it. Idempotent."""
        self._channel.close()
        try:
            async with asyncio.timeout(STOP_S):
                await self.died()
        except TimeoutError:
            self._kill()
            await self.died()


W = TypeVar("W", bound=Worker)


class WorkerSupervisor(Generic[W]):
    """Keeps one worker running: restarts it, with growing back-off, when it dies.

    make: a new life of it, not started. began: called with each that serves; ended: when it has died, or
    could not be restarted, with the reason. restarts_max: in a row; None: no limit.
    """

    def __init__(
        self,
        make: Callable[[], W],
        began: Callable[[W], None] = lambda _: None,
        ended: Callable[[str], None] = lambda _: None,
        restarts_max: int | None = RESTARTS_MAX,
    ) -> None:
        self._make = make
        self._began = began
        self._ended = ended
        self._restarts_max = restarts_max
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.worker: W | None = None
        self.restarts = 0

    @property
    def alive(self) -> bool:
        return self.worker is not None and self.worker.alive

    async def start(self) -> None:
        """Raises the error of the first start; then nothing runs."""
        await self._start_worker()
        self._task = self._loop.create_task(self._keep())

    async def insist(self, what: str) -> None:
        """The same for an optional process: retry until it starts. what: its purpose, in the log."""
        said = ""
        while True:
            try:
                await self.start()
                return
            except KvpoolError as error:
                if said != str(error):
                    said = str(error)
                    log.warning("%s is not used: %s", what, said)
                self._ended(said)
            await asyncio.sleep(INSIST_S)

    async def _start_worker(self) -> None:
        worker = self._make()
        await worker.start()
        self.worker = worker
        self._began(worker)

    async def _keep(self) -> None:
        failures = 0
        kind = self.worker.kind if self.worker is not None else "worker"
        while True:
            started = self._loop.time()
            if self.worker is not None:
                await self.worker.died()
                self._ended("its process ended")
            if self._stopping:
                return
            failures = 0 if self._loop.time() - started > STEADY_S else failures + 1
            if self._restarts_max is not None and failures > self._restarts_max:
                log.error(
                    "a %s process died %d times in a row: it is not restarted again",
                    kind,
                    failures,
                    extra={"worker": kind},
                )
                return
            pause = backoff_s(BACKOFF_S, BACKOFF_S_MAX, failures - 1) if failures else 0.0
            log.error(
                "a %s process died: restart in %.1f s",
                kind,
                pause,
                extra={"worker": kind},
            )
            await asyncio.sleep(pause)
            self.worker = None
            self.restarts += 1
            try:
                await self._start_worker()
            except KvpoolError as error:
                log.warning(
                    "a %s process could not be restarted: %s",
                    kind,
                    error,
                    extra={"worker": kind},
                )
                self._ended(str(error))

    async def stop(self) -> None:
        self._stopping = True
        if self.worker is not None:
            await self.worker.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.worker is not None:  # one that was being started meanwhile
            await self.worker.stop()
