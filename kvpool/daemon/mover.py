"""A mover: the process that moves bulk bytes for a daemon.

It maps the daemon's segments, pulls blocks from peers into rows that its control process has reserved,
and sends peers the rows that control lends. It decides nothing. Started by `movers.py` as

    python -m kvpool.daemon.mover FD PARENT

where FD is its end of a socket pair, the control channel, and PARENT control's process; frames are those of `kvpool.wire`. The end of
that channel is the end of the process, with all its threads, at once: control can then give any row
that was being written to somebody else. Signals to the whole process group leave it alone, for the same
reason: control decides when it ends.

Threads: the main one reads the control channel, a few pull, transports have theirs for serving. All block
in system calls that hold no GIL; none polls.
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
from typing import NoReturn

import msgspec

from kvpool.errors import (
    InvalidRequest,
    KvpoolError,
    ProtocolError,
    Unavailable,
    from_code,
)
from kvpool.segment import Segment
from kvpool.transfer import scheme_of, transport_for
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits, Transport
from kvpool.transfer.crew import Crew
from kvpool.transfer.memory import Memory
from kvpool.wire import (
    Ask,
    AskPeer,
    AttachSegment,
    Bytes,
    Corrupt,
    Done,
    Error,
    FrameReader,
    Lend,
    Lent,
    Message,
    MoverReady,
    MoverStart,
    Offer,
    PullBlocks,
    Return,
    StopPull,
    decode_mover,
    encode,
    error_message,
)

READ_BYTES = 256 << 10
FDS_MAX = 8  # descriptors with one read
PULL_THREADS_MAX = 16
STACK_BYTES = 512 << 10
SWITCH_S = 0.0005  # many short turns between the threads: each mostly waits for the kernel
NICE = 10
ASK_S_MAX = 10.0  # for control to answer what a peer asked

_PR_SET_PDEATHSIG = 1


class Control:
    """This end of the control channel. Thread-safe.

    Writing may block for as long as control does not read: then nothing here matters to anybody.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: dict[int, queue.SimpleQueue[Message]] = {}
        self._last_request = 0

    def send(self, message: Message, request: int) -> None:
        frame = encode(message, request)
        with self._write_lock:
            try:
                self._sock.sendall(frame)
            except OSError:
                leave()  # control has gone

    def ask(self, message: Message, deadline: Deadline) -> Message:
        """The answer to a request of ours. Raises what control answers, and `Unavailable`."""
        answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        with self._lock:
            # 0 is for what wants no answer; 32 bits outlast what can be waiting at a time.
            self._last_request = request = self._last_request % 0xFFFFFFFF + 1
            self._waiting[request] = answers
        self.send(message, request)
        try:
            answer = answers.get(timeout=deadline.left())
        except (queue.Empty, Unavailable):
            with self._lock:
                late = self._waiting.pop(request, None) is None
            if not late:
                raise Unavailable("the daemon did not answer its mover in time") from None
            answer = answers.get()  # it has come in this very moment
        if isinstance(answer, Error):
            raise from_code(answer.code, answer.message)
        return answer

    def answered(self, request: int, answer: Message) -> None:
        """Hand an answer to the thread that waits for it; a loan that nobody waits for goes back."""
        with self._lock:
            answers = self._waiting.pop(request, None)
            if answers is not None:
                answers.put(answer)
                return
        if isinstance(answer, Lent) and answer.token:
            self.send(Return(answer.token), 0)


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

    def corrupt(self, report: Corrupt) -> None:
        self._control.send(report, 0)


class Jobs:
    """Pulls and questions on the way to peers, each in one of a few threads."""

    def __init__(self, mover: Mover, control: Control) -> None:
        self._mover = mover
        self._control = control
        self._crew = Crew("kvpool-pull", PULL_THREADS_MAX)
        self._lock = threading.Lock()
        self._stops: dict[int, Stop] = {}

    def add(self, request: int, order: PullBlocks | AskPeer) -> None:
        stop, deadline = Stop(), Deadline(order.deadline_s)
        with self._lock:
            self._stops[request] = stop
        self._crew.submit(lambda: self._run(request, order, stop, deadline))

    def stop(self, request: int) -> None:
        with self._lock:
            stop = self._stops.get(request)
        if stop is not None:
            stop.set()

    def _run(
        self, request: int, order: PullBlocks | AskPeer, stop: Stop, deadline: Deadline
    ) -> None:
        try:
            answer = self._mover.run_job(order, stop, deadline)
        except KvpoolError as error:
            answer = error_message(error)
        with self._lock:
            del self._stops[request]
        self._control.send(answer, request)


class Mover:
    """The process: reads the control channel until it ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._control = Control(sock)
        self._jobs = Jobs(self, self._control)
        self._memory = Memory()
        self._mappings: list[mmap.mmap] = []
        self._transports: dict[str, Transport] = {}
        self._lock = threading.Lock()
        self._fds: deque[int] = deque()
        self._start: MoverStart | None = None

    def run(self) -> NoReturn:
        reader = FrameReader()
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
                self._handle(request, decode_mover(payload))

    def _handle(self, request: int, message: Message) -> None:
        match message:
            case Lent() | Done() | Bytes() | Error():
                self._control.answered(request, message)
            case PullBlocks() | AskPeer():
                self._jobs.add(request, message)
            case StopPull():
                self._jobs.stop(message.request)
            case MoverStart() | AttachSegment():
                try:
                    answer = (
                        self._begin(message)
                        if isinstance(message, MoverStart)
                        else self._attach(message)
                    )
                except KvpoolError as error:
                    answer = error_message(error)
                self._control.send(answer, request)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not for a mover")

    def _begin(self, start: MoverStart) -> Message:
        self._start = start
        return MoverReady([self._transport(url).listen(url) for url in start.listen])

    def _attach(self, order: AttachSegment) -> Message:
        if not self._fds:
            raise ProtocolError("an AttachSegment came without its descriptor")
        fd = self._fds.popleft()
        try:
            mapping = Segment.attach(fd, order.size).map(populate=True)
        finally:
            os.close(fd)  # the mapping stays
        self._memory.attach(order.segment, mapping)
        self._mappings.append(mapping)
        return Done()

    def run_job(self, order: PullBlocks | AskPeer, stop: Stop, deadline: Deadline) -> Message:
        """In a thread of `Jobs`: the answer to an order. `deadline` counts from its arrival."""
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
            self._memory,
            ControlSource(self._control),
            Identity(start.cluster, start.node, start.incarnation, start.secret.encode()),
            TransferLimits(
                connections_max=start.connections_max, inflight_bytes_max=start.inflight_bytes_max
            ),
        )


def leave() -> NoReturn:
    """End this process with all its threads, now. None of them holds anything that outlives it."""
    os._exit(0)


def step_back() -> None:
    """Let the control process have a core at once when it wants one.

    Bulk work lasts, so its threads can take what control leaves, which is most of the time. With both
    cores of a small machine busy moving bytes, the p99 of a 50 us request went from 80 us to 1,700 us
    without this, and to 110 us with it, at 0.85 of the throughput. SCHED_IDLE, nice 19, and a session of
    our own (where the kernel groups by session) gave no better p99 and cost most of the throughput.
    """
    os.nice(NICE)


def main() -> NoReturn:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The end of the channel says the same; this also works while the main thread is in a long call.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        leave()
    step_back()
    threading.excepthook = _crash
    threading.stack_size(STACK_BYTES)
    sys.setswitchinterval(SWITCH_S)
    Mover(socket.socket(fileno=fd)).run()


def _crash(args: threading.ExceptHookArgs) -> None:
    """A thread has broken an invariant: control restarts the process, nobody waits for the thread."""
    sys.__excepthook__(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
