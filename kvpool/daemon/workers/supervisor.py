"""Worker processes of the control process: start, order, and restart them.

Event loop only. A worker is disposable: when it dies, its orders fail, and another one is started. One that hangs
in the kernel does not die when it is killed. It is quarantined: what it may still write to stays reserved until it
has ended, however late, and nobody waits for it, a stopping daemon included.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
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
QUARANTINED_MAX = 4  # processes of one supervisor that were killed and have not ended
BACKOFF_S, BACKOFF_S_MAX = 0.1, 10.0
STEADY_S = 60.0  # of life, after which a death is the first one again
READ_BYTES = 256 << 10

M = TypeVar("M", bound=frame.Message)


@dataclass(eq=False)
class Channel:
    """Control's end of a control channel: non-blocking, frames in, frames and descriptors out."""

    _loop: asyncio.AbstractEventLoop
    _sock: socket.socket
    _decode: frame.Decoder
    _received: Callable[[int, Any], None]

    def __post_init__(self) -> None:
        self._sock.setblocking(False)
        self._fd = self._sock.fileno()
        self._reader = frame.FrameReader()
        # Bytes to be written; bounded by the orders that may be under way.
        self._queue: deque[tuple[memoryview, int | None]] = deque()
        self._open = True
        self._writing = False
        self._loop.add_reader(self._fd, self._read)

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
    its name in messages. fills: the orders that have it write to rows of memory. alone: it owns what only one
    process can have, so that no other one is started before it has ended. start_s: the longest that it may take to
    start; if it dies sooner, that is noticed at once. segments: mapped by the process before it is configured.
    """

    module: str
    kind: str
    decode: frame.Decoder
    fills: tuple[type[frame.Message], ...] = ()
    alone = True
    start_s = START_S

    GRACE_S = 5.0
    """After an order's deadline; then the worker is considered dead, and killed."""
    STOP_S = 5.0
    KILL_S = 5.0
    """For a killed process to end; then it hangs in the kernel."""

    def __init__(self, segments: Mapping[int, Segment] = MappingProxyType({})) -> None:
        self._segments = segments
        self._log = logging.LoggerAdapter(log, {"worker": self.kind})
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._channel: Channel
        self._process: asyncio.subprocess.Process
        self._filling: set[int] = set()  # requests, of those that write to rows
        self._killed = False
        self._left = asyncio.Event()  # it is dead, or quarantined
        self.alive = False
        self.quarantined = False

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
            for segment_id, segment in self._segments.items():
                await self.attach(segment_id, segment)
            await self._prepare()
        except BaseException:
            self._kill()
            await self.left()
            raise

    @abstractmethod
    async def _prepare(self) -> None:
        """Configure a new process. Raises its error."""

    async def attach(self, segment_id: int, segment: Segment) -> None:
        await self._ask(
            worker_wire.AttachSegment(segment_id, segment.size), self.start_s, segment.fd
        )

    async def order(self, message: frame.Message, deadline_s: float) -> Any:
        """The answer to an order, at the latest `GRACE_S` after its deadline.

        Returns, raises, or is cancelled only when the worker no longer works on the order: it
        has answered, or its process is dead. If that is quarantined, an order that writes to rows of memory
        (`fills`) waits for its death, however long; the others raise `Unavailable`.
        """
        if self.busy >= OUTSTANDING_MAX:
            raise LimitExceeded(
                f"{OUTSTANDING_MAX} orders of one {self.kind} worker are in progress, the limit"
            )
        return await self._ask(message, deadline_s + self.GRACE_S)

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
            raise Unavailable(
                self._does_not_end if self.quarantined else f"the {self.kind} process has ended"
            )
        self._last_request = request = self._last_request % 0xFFFFFFFF + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[request] = answer
        if isinstance(message, self.fills):
            self._filling.add(request)
        self._channel.send(message, request, fd)
        cancelled: asyncio.CancelledError | None = None
        # A process is not killed because an order came too late to be done.
        seconds = max(seconds, self.GRACE_S)
        while not answer.done():
            try:
                await asyncio.wait((answer,), timeout=seconds)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancelled = error
                    seconds = self.GRACE_S
                    self._channel.send(worker_wire.StopOrder(request), 0)
                continue
            if not answer.done() and not self._killed:
                self._log.error("%s %d does not answer: killed", self.kind, self.pid)
                self._kill()
        failure = answer.exception()  # also marks it as seen
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure
        return answer.result()

    def _received(self, request: int, message: Any) -> None:
        answer = self._answers.pop(request, None)
        self._filling.discard(request)
        if answer is None:
            raise ProtocolError(
                f"a {self.kind} process answered request {request}, which was not sent"
            )
        if isinstance(message, frame.Error):
            answer.set_exception(from_code(message.code, message.message))
        else:
            answer.set_result(message)

    def _kill(self) -> None:
        if self.alive and not self._killed:
            self._killed = True
            self._send_kill()
            self._loop.call_later(self.KILL_S, self._quarantine)

    def _send_kill(self) -> None:
        try:
            self._process.kill()
        except ProcessLookupError:
            pass  # dead, and about to be noticed

    @property
    def _does_not_end(self) -> str:
        return f"the {self.kind} process {self.pid} was killed and does not end: it hangs in the kernel"

    def _quarantine(self) -> None:
        """It was killed and has not ended: leave it alone, with the rows that it may still write to."""
        if not self.alive:
            return
        self.alive, self.quarantined = False, True
        self._log.error(
            "%s. %d orders that it may still write for keep their memory until it has ended",
            self._does_not_end,
            len(self._filling),
        )
        self._fail([one for one in self._answers if one not in self._filling], self._does_not_end)
        self._left.set()

    def _fail(self, requests: Iterable[int], reason: str) -> None:
        for request in requests:
            self._answers.pop(request).set_exception(Unavailable(reason))
            self._filling.discard(request)

    async def _wait_for_death(self) -> None:
        """The process's death is the proof that it no longer reads or writes anywhere."""
        status = await self._process.wait()
        self._channel.drain()
        if self.quarantined:
            self._log.warning(
                "%s %d has ended: what it might have written to is free again", self.kind, self.pid
            )
        self.alive = self.quarantined = False
        self._channel.close()
        self._fail(list(self._answers), f"the {self.kind} process ended (status {status})")
        self.on_worker_exit()
        self._left.set()

    def on_worker_exit(self) -> None:  # noqa: B027  (most workers leave nothing)
        """Clean up what else belonged to a dead process."""

    async def died(self) -> None:
        """Wait for the death of the process and for the cleanup after it."""
        await asyncio.shield(self._death)

    async def left(self) -> None:
        """Wait until it is dead, or quarantined: at most `KILL_S` after it was killed."""
        await self._left.wait()

    async def stop(self) -> None:
        """End the process and wait for it, at most `STOP_S` and `KILL_S`. Idempotent.

        For a daemon that stops: nothing is put into the rows any more that a process which does not end might
        write to, so its last orders fail, too.
        """
        self._channel.close()
        try:
            async with asyncio.timeout(self.STOP_S):
                await self.left()
        except TimeoutError:
            self._kill()
            await self.left()
        self._fail(list(self._answers), f"the {self.kind} process was left alone")


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class WorkerSupervisor(Generic[W]):
    """Keeps one worker running: restarts it, with growing back-off, when it dies.

    It never gives up: who can end a worker must not be able to end its service. make: a new life of it, not started.
    began: called with each that serves; ended: when it has died, or could not be restarted, with the reason.
    """

    INSIST_S = 5.0
    """Wait before retrying a process that does not start."""

    make: Callable[[], W]
    began: Callable[[W], None] = lambda _: None
    ended: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._quarantined: list[W] = []
        self.worker: W | None = None
        self.restarts = 0
        self.hangs = 0  # processes that were killed and did not end

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
            await self._until_another_may_start()
            try:
                await self.start()
                return
            except KvpoolError as error:
                if said != str(error):
                    said = str(error)
                    log.warning("%s is not used: %s", what, said)
                self.ended(said)
            await asyncio.sleep(self.INSIST_S)

    async def _start_worker(self) -> None:
        worker = self.make()
        try:
            await worker.start()
        except BaseException:
            self._note_hang(worker)
            raise
        self.worker = worker
        self.began(worker)

    def _note_hang(self, worker: W) -> None:
        if worker.quarantined:
            self.hangs += 1
            self._quarantined.append(worker)

    @property
    def quarantined(self) -> int:
        """How many processes were killed and have not ended."""
        return sum(worker.quarantined for worker in self._quarantined)

    async def _until_another_may_start(self) -> None:
        """One that does not end may own what the next one needs; and there must not be ever more of them."""
        while left := [worker for worker in self._quarantined if worker.quarantined]:
            self._quarantined = left
            if not left[0].alone and len(left) < QUARANTINED_MAX:
                return
            deaths = [self._loop.create_task(worker.died()) for worker in left]
            try:
                await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for death in deaths:
                    death.cancel()
        self._quarantined = []

    async def _keep(self) -> None:
        failures = 0
        kind = self.worker.kind if self.worker is not None else "worker"
        worker_log = logging.LoggerAdapter(log, {"worker": kind})
        while True:
            started = self._loop.time()
            if self.worker is not None:
                await self.worker.left()
                self._note_hang(self.worker)
                self.ended(
                    f"its process {self.worker.pid} was killed and does not end: it hangs in the kernel"
                    if self.worker.quarantined
                    else "its process ended"
                )
            if self._stopping:
                return
            failures = 0 if self._loop.time() - started > STEADY_S else failures + 1
            pause = backoff_s(BACKOFF_S, BACKOFF_S_MAX, failures - 1) if failures else 0.0
            worker_log.error("a %s process died: restart in %.1f s", kind, pause)
            await asyncio.sleep(pause)
            await self._until_another_may_start()
            self.worker = None
            self.restarts += 1
            try:
                await self._start_worker()
            except KvpoolError as error:
                worker_log.warning("a %s process could not be restarted: %s", kind, error)
                self.ended(str(error))

    async def stop(self) -> None:
        self._stopping = True
        for worker in self._quarantined:
            await worker.stop()
        if self.worker is not None:
            await self.worker.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.worker is not None:  # one that was being started meanwhile
            await self.worker.stop()
