"""Shared by the daemon's worker processes: a control channel, mapped segments, an end.

A worker is started by `supervisor.py` as

    python -m MODULE FD PARENT

where FD is its end of a socket pair, the control channel, and PARENT control's process; frames are those
of `kvpool.wire`. The end of that channel is the end of the process, with all its threads, at once: control
can then reuse any row that was being written. Signals to the whole process group are ignored,
for the same reason: control decides when it ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from kvpool.errors import KvpoolError, ProtocolError, Unavailable, from_code
from kvpool.memory.segment import Segment
from kvpool.signals import ignore_ending
from kvpool.telemetry import logs
from kvpool.transfer.base import Deadline, Stop
from kvpool.transfer.memory import Memory
from kvpool.transfer.thread_pool import ThreadPool
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

READ_BYTES = 256 << 10
FDS_MAX = 8  # descriptors per read
STACK_BYTES = 512 << 10
SWITCH_S = 0.0005  # many short turns between the threads: each mostly waits for the kernel
NICE = 10

_PR_SET_PDEATHSIG = 1


class OwedAnswer:
    """A pending answer of control: an `Owed`."""

    def __init__(self, control: Control, request: int) -> None:
        self._control = control
        self._request = request
        try:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"no free descriptor to wait with: {error.strerror}") from None
        self._answer: frame.Message = frame.Done()

    def put(self, answer: frame.Message) -> None:
        """Takes the answer. Not after `close`."""
        self._answer = answer
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def result(self) -> frame.Bytes:
        answer = self._answer
        if isinstance(answer, frame.Error):
            raise from_code(answer.code, answer.message)
        if not isinstance(answer, frame.Bytes):
            raise ProtocolError(f"the answer to a worker's request is a {type(answer).__name__}")
        return answer

    def close(self) -> None:
        self._control.drop(self._request)
        os.close(self._fd)


class Control:
    """The worker's end of the control channel. Thread-safe.

    Writing may block while control does not read: then nothing here matters any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[frame.Message] | OwedAnswer] = {}
        self._last_request = 0

    def send(self, message: frame.Message, request: int) -> None:
        framed = frame.encode(message, request)
        with self._write_lock:
            try:
                self._sock.sendall(framed)
            except OSError:
                leave()  # control has gone

    def ask(self, message: frame.Message, deadline: Deadline) -> frame.Message:
        """The answer to a request. Raises control's error, and `Unavailable`."""
        answers: queue.SimpleQueue[frame.Message] = queue.SimpleQueue()
        with self._lock:
            request = self._next_request()
            self._waiting[request] = answers
        self.send(message, request)
        try:
            answer = answers.get(timeout=deadline.left())
        except (queue.Empty, Unavailable):
            with self._lock:
                late = self._waiting.pop(request, None) is None
            if not late:
                raise Unavailable("the daemon did not answer its worker in time") from None
            answer = answers.get()  # it has just arrived
        if isinstance(answer, frame.Error):
            raise from_code(answer.code, answer.message)
        return answer

    def begin(self, message: frame.Message) -> OwedAnswer:
        """Send a request that may take long. The caller closes the result. Raises `Unavailable`."""
        with self._lock:
            request = self._next_request()
            owed = self._waiting[request] = OwedAnswer(self, request)
        self.send(message, request)
        return owed

    def drop(self, request: int) -> None:
        """Nobody waits for this answer any more; tells control, unless it has arrived."""
        with self._lock:
            waiting = self._waiting.pop(request, None) is not None
        if waiting:
            self.send(worker_wire.StopOrder(request), 0)

    def _next_request(self) -> int:
        """Call with the lock. 0 is for messages without an answer; 32 bits are enough for concurrent requests."""
        self._last_request = self._last_request % 0xFFFFFFFF + 1
        return self._last_request

    def answered(self, request: int, answer: frame.Message) -> bool:
        """Pass an answer to the waiting thread; False if none waits any more."""
        with self._lock:
            answers = self._waiting.pop(request, None)
            if answers is not None:
                answers.put(answer)
        return answers is not None


class Jobs:
    """Orders that take time, each in one of a few threads. An error raised by a job is its answer."""

    def __init__(self, name: str, threads: int, control: Control) -> None:
        self._control = control
        self._crew = ThreadPool(name, threads)
        self._lock = threading.Lock()
        self._stops: dict[int, Stop] = {}
        self._queued: set[int] = set()  # of these, those that no thread has begun

    def add(
        self, request: int, deadline_s: float, job: Callable[[Stop, Deadline], frame.Message]
    ) -> None:
        """Queue it. The deadline counts from now."""
        stop, deadline = Stop(), Deadline(deadline_s)
        with self._lock:
            self._stops[request] = stop
            self._queued.add(request)
        self._crew.submit(lambda: self._run(request, job, stop, deadline))

    def stop(self, request: int) -> None:
        """Nobody waits for this one any more. Answered at once if it has not begun."""
        with self._lock:
            stop = self._stops.get(request)
            queued = request in self._queued
            if queued:
                self._queued.remove(request)
                del self._stops[request]
        if queued:
            self._control.send(
                frame.error_message(Unavailable("the request was cancelled")), request
            )
        elif stop is not None:
            stop.set()

    def _run(
        self,
        request: int,
        job: Callable[[Stop, Deadline], frame.Message],
        stop: Stop,
        deadline: Deadline,
    ) -> None:
        with self._lock:
            if request not in self._queued:
                return  # cancelled
            self._queued.remove(request)
        try:
            answer = job(stop, deadline)
        except KvpoolError as error:
            answer = frame.error_message(error)
        with self._lock:
            del self._stops[request]
        self._control.send(answer, request)


Work = Callable[[Any, Stop, Deadline], frame.Message]
"""Carries out an order in a thread of `Jobs`."""


class WorkerProcess:
    """The process: reads the control channel until it ends. Its main thread runs `run`.

    kind: its name in messages. A subclass enters what it takes into `orders`, `questions`, `notes` and `stoppable`.
    """

    kind: str
    decode: frame.Decoder

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.control = Control(sock)
        self.memory = Memory()
        self.orders: dict[type, tuple[Jobs, Work]] = {}
        """Messages with a deadline that take time: the threads for them, and the work."""
        self.questions: dict[type, Callable[[Any], frame.Message]] = {
            worker_wire.AttachSegment: self.attach
        }
        """Messages that the main thread answers at once."""
        self.notes: dict[type, Callable[[Any], object]] = {worker_wire.StopOrder: self._stop}
        """Messages without an answer, for the main thread."""
        self.stoppable: tuple[Jobs, ...] = ()
        """Threads whose orders end when nobody waits for them any more."""
        self._mappings: list[mmap.mmap] = []
        self._fds: deque[int] = deque()

    def run(self) -> NoReturn:
        reader = frame.FrameReader()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(
                    self._sock, READ_BYTES, FDS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                leave()
            if not data:
                leave()
            self._fds.extend(fds)
            for request, payload in reader.feed(data):
                message = self.decode(payload)
                self.handle(request, message)

    def handle(self, request: int, message: Any) -> None:
        """Answer a message from control at once, or queue a job. In the main thread."""
        kind = type(message)
        if kind in self.orders:
            jobs, work = self.orders[kind]
            jobs.add(request, message.deadline_s, partial(work, message))
        elif kind in self.questions:
            self._answer(request, partial(self.questions[kind], message))
        elif kind in self.notes:
            self.notes[kind](message)
        else:
            raise ProtocolError(f"the {self.kind} worker does not accept a {kind.__name__}")

    def _stop(self, order: worker_wire.StopOrder) -> None:
        for jobs in self.stoppable:
            jobs.stop(order.request)

    def _answer(self, request: int, work: Callable[[], frame.Message]) -> None:
        """Run it, and send its result or error."""
        try:
            answer = work()
        except KvpoolError as error:
            answer = frame.error_message(error)
        self.control.send(answer, request)

    def attach(self, order: worker_wire.AttachSegment) -> frame.Message:
        """Map a segment, whose descriptor came with the order."""
        if not self._fds:
            raise ProtocolError("an AttachSegment arrived without its descriptor")
        fd = self._fds.popleft()
        try:
            # Not waited for: for 100 GiB it takes a minute on a busy machine, and the daemon does not serve before its
            # workers do.
            mapping = Segment.attach(fd, order.size).map(fault_in=True)
        finally:
            os.close(fd)  # the mapping stays
        self.memory.attach(order.segment, mapping)
        self._mappings.append(mapping)
        return frame.Done()


def leave() -> NoReturn:
    """End this process with all its threads, now. None of them holds anything that survives it."""
    os._exit(0)


def step_back() -> None:
    """Let the control process have a core at once when it wants one.

    Bulk work lasts, so its threads can use the time that control leaves, which is most of it. With both
    cores of a small machine busy moving bytes, the p99 of a 50 us request went from 80 us to 1,700 us
    without this, and to 110 us with it, at 0.85 of the throughput. SCHED_IDLE, nice 19, and a session of
    its own (where the kernel groups by session) gave no better p99 and cost most of the throughput.
    """
    os.nice(NICE)


def run_worker(process: type[WorkerProcess]) -> NoReturn:
    """Run the main function of a worker's module."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ignore_ending()
    # The end of the channel has the same effect; this also works while the main thread is in a long call.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        leave()
    logs.setup_worker(process.kind)
    step_back()
    threading.excepthook = _crash
    sys.excepthook = _crash_main
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_S)
    process(socket.socket(fileno=fd)).run()


def _crash(args: threading.ExceptHookArgs) -> None:
    """A thread has broken an invariant: control restarts the process, nobody waits for the thread."""
    sys.__excepthook__(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def _crash_main(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """The main thread has. At once, without the exit handlers of interpreter and libraries: they would free
    memory that others still read, before the kernel signals the end of this process.
    """
    sys.__excepthook__(kind, error, traceback)
    sys.stderr.flush()
    os._exit(1)
