"""The control process's side of its movers: start them, give them work, outlive them.

Event loop only. A mover is an equal of a cable: when it breaks, what was under way fails, what it had
borrowed is given back, and another one is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvpool import wire
from kvpool.config import DaemonConfig
from kvpool.errors import KvpoolError, LimitExceeded, ProtocolError, Unavailable, from_code
from kvpool.segment import Segment

log = logging.getLogger("kvpool.daemon")

OUTSTANDING_MAX = 256  # orders given to one mover and not answered
INFLIGHT_BYTES_MAX = 1 << 30  # lent to peers at a time, by one mover
OFFERS_MAX = 32  # taken up at a time, through one mover
START_S = 60.0  # to start, and to map a segment
GRACE_S = 5.0  # after an order's deadline; then the mover is taken for dead, and killed
STOP_S = 5.0
BACKOFF_S, BACKOFF_S_MAX = 0.1, 10.0
RESTARTS_MAX = 10  # in a row, each before the mover had lived for STEADY_S
STEADY_S = 60.0
READ_BYTES = 256 << 10


class Rules(Protocol):
    """What movers ask of the rules. Called on the event loop; quick."""

    def lend(self, request: wire.Lend) -> wire.Lent:
        """Lease what is here of these blocks until `give_back`. Raises `KvpoolError`."""
        ...

    def give_back(self, token: str) -> None:
        """Nothing reads this loan any more."""
        ...

    def asked(self, question: wire.Ask) -> wire.Done:
        """How many blocks of the prefix could be lent. Raises `KvpoolError`."""
        ...

    async def offered(self, offer: wire.Offer) -> wire.Bytes:
        """Take what is wanted of the offered blocks. Ends by the offer's deadline. Raises `KvpoolError`."""
        ...

    def corrupt(self, report: wire.Corrupt) -> None:
        """A peer got these blocks from here, and they did not match their checksums."""
        ...


class Channel:
    """Control's end of a control channel: non-blocking, frames in, frames and descriptors out."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        received: Callable[[int, Any], None],
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._received = received
        self._reader = wire.FrameReader()
        # What is to be written; its length is bounded by what may be under way at a time.
        self._queue: deque[tuple[memoryview, int | None]] = deque()
        self._open = True
        self._writing = False
        loop.add_reader(self._fd, self._read)

    def send(self, message: wire.Message, request: int, fd: int | None = None) -> None:
        """Queue a frame, with a descriptor. To a mover that has gone it is not sent, and no error."""
        frame = memoryview(wire.encode(message, request))
        if self._open:
            self._queue.append((frame, fd))
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
                self._queue.clear()  # its end is noticed by whoever waits for the process
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
        """Take what is there; whether there may be more."""
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
            self._received(request, wire.decode_mover(payload))
        return True

    def drain(self) -> None:
        """Take all that a dead mover has left behind."""
        while self._read():
            pass

    def close(self) -> None:
        """Close our end: the mover ends. Idempotent."""
        if self._open:
            self._open = False
            self._queue.clear()
            self._loop.remove_reader(self._fd)
            if self._writing:
                self._loop.remove_writer(self._fd)
            self._sock.close()


class MoverProcess:
    """One life of a mover: from its start to the death of the process."""

    def __init__(self, movers: Movers) -> None:
        self._movers = movers
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loans: set[str] = set()
        self._taking: set[asyncio.Task[None]] = set()
        self._last_request = 0
        self._channel: Channel
        self._process: asyncio.subprocess.Process
        self.urls: list[str] = []
        self.alive = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> int:
        """Orders that are not answered."""
        return len(self._answers)

    @property
    def lending(self) -> int:
        return len(self._loans)

    async def start(self, listen: list[str]) -> None:
        """Returns when it serves. Raises what the mover reports, or `Unavailable`; then it is dead."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # what lies in the working directory is not to be imported
                    "-m",
                    "kvpool.daemon.mover",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"a mover process cannot be started: {error}") from None
        self._channel = Channel(self._loop, ours, self._received)
        self.alive = True
        self._death = self._loop.create_task(self._wait_for_death())
        try:
            await self._prepare(listen)
        except BaseException:
            self._kill()
            await asyncio.shield(self._death)
            raise

    async def _prepare(self, listen: list[str]) -> None:
        config = self._movers.config
        for segment_id, segment in self._movers.segments.items():
            await self.attach(segment_id, segment)
        ready = await self._ask(
            wire.MoverStart(
                cluster=config.cluster,
                node=config.node,
                incarnation=self._movers.incarnation,
                secret=config.cluster_secret,
                listen=listen,
                connections_max=config.peers_max,
                inflight_bytes_max=INFLIGHT_BYTES_MAX,
            ),
            START_S,
        )
        self.urls = ready.listening

    async def attach(self, segment_id: int, segment: Segment) -> None:
        await self._ask(wire.AttachSegment(segment_id, segment.size), START_S, segment.fd)

    async def order(self, message: wire.PullBlocks | wire.AskPeer) -> Any:
        """The mover's answer to an order, at latest `GRACE_S` after its deadline.

        Returns, raises, or is cancelled only when the mover has nothing to do with the order any more: it
        has said so, or its process is dead.
        """
        if self.busy >= OUTSTANDING_MAX:
            raise LimitExceeded(f"{OUTSTANDING_MAX} transfers are under way in one mover already")
        return await self._ask(message, message.deadline_s + GRACE_S)

    async def _ask(self, message: wire.Message, seconds: float, fd: int | None = None) -> Any:
        if not self.alive:
            raise Unavailable("the mover process has ended")
        self._last_request = request = self._last_request % 0xFFFFFFFF + 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[request] = answer
        self._channel.send(message, request, fd)
        cancelled: asyncio.CancelledError | None = None
        while not answer.done():
            try:
                await asyncio.wait((answer,), timeout=seconds)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancelled = error
                    seconds = GRACE_S
                    self._channel.send(wire.StopPull(request), 0)
                continue
            if not answer.done():
                log.error("mover %d does not answer: killed", self.pid)
                self._kill()
        failure = answer.exception()  # also marks it as seen
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure
        return answer.result()

    def _received(self, request: int, message: Any) -> None:
        match message:
            case wire.Lend() | wire.Ask():
                self._channel.send(self._answer(message), request)
            case wire.Offer():
                task = self._loop.create_task(self._take(message, request))
                self._taking.add(task)
                task.add_done_callback(self._taking.discard)
            case wire.Return():
                if message.token in self._loans:
                    self._loans.remove(message.token)
                    self._movers.source.give_back(message.token)
            case wire.Corrupt():
                self._movers.source.corrupt(message)
            case _:
                answer = self._answers.pop(request, None)
                if answer is None:
                    raise ProtocolError(f"a mover answered request {request}, which nobody made")
                if isinstance(message, wire.Error):
                    answer.set_exception(from_code(message.code, message.message))
                else:
                    answer.set_result(message)

    def _answer(self, message: wire.Lend | wire.Ask) -> wire.Message:
        try:
            if isinstance(message, wire.Ask):
                return self._movers.source.asked(message)
            lent = self._movers.source.lend(message)
        except KvpoolError as error:
            return wire.error_message(error)
        if lent.token:
            self._loans.add(lent.token)
        return lent

    async def _take(self, offer: wire.Offer, request: int) -> None:
        answer: wire.Message
        try:
            if len(self._taking) > OFFERS_MAX:
                raise LimitExceeded(f"{OFFERS_MAX} offers are being taken up here already")
            answer = await self._movers.source.offered(offer)
        except KvpoolError as error:
            answer = wire.error_message(error)
        self._channel.send(answer, request)

    def _kill(self) -> None:
        if self.alive:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass  # dead, and about to be noticed

    async def _wait_for_death(self) -> None:
        """The process's end is the proof that it writes nowhere and reads nothing any more."""
        status = await self._process.wait()
        self._channel.drain()
        self.alive = False
        self._channel.close()
        for answer in self._answers.values():
            answer.set_exception(Unavailable(f"the mover process ended (status {status})"))
        self._answers.clear()
        for token in self._loans:
            self._movers.source.give_back(token)
        self._loans.clear()
        for task in self._taking:
            task.cancel()

    async def died(self) -> None:
        """Wait for the death of the process and for all that follows from it."""
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


class Keeper:
    """Keeps one mover running: restarts it, less and less eagerly, when it dies."""

    def __init__(self, movers: Movers, listen: list[str]) -> None:
        self._movers = movers
        self._listen = listen
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.mover: MoverProcess | None = None
        self.restarts = 0

    @property
    def alive(self) -> bool:
        return self.mover is not None and self.mover.alive

    async def start(self) -> None:
        await self._start_mover()
        self._task = self._loop.create_task(self._keep())

    async def _start_mover(self) -> None:
        mover = MoverProcess(self._movers)
        await mover.start(self._listen)
        self.mover = mover
        # A later one takes the ports that this one was given, which peers know by now.
        self._listen = mover.urls or self._listen

    async def _keep(self) -> None:
        failures = 0
        while True:
            started = self._loop.time()
            if self.mover is not None:
                await self.mover.died()
            if self._stopping:
                return
            failures = 0 if self._loop.time() - started > STEADY_S else failures + 1
            if failures > RESTARTS_MAX:
                log.error("a mover process died %d times in a row: not started again", failures)
                return
            pause = min(BACKOFF_S * 2 ** (failures - 1), BACKOFF_S_MAX) if failures else 0.0
            log.error("a mover process died: starting another one in %.1f s", pause)
            await asyncio.sleep(pause)
            self.mover = None
            self.restarts += 1
            try:
                await self._start_mover()
            except KvpoolError as error:
                log.warning("a mover process could not be started again: %s", error)

    async def stop(self) -> None:
        self._stopping = True
        if self.mover is not None:
            await self.mover.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self.mover is not None:  # one that was being started meanwhile
            await self.mover.stop()


class Movers:
    """All movers of a daemon.

    The URLs that peers pull from are shared out among them; orders go to the one with the fewest.
    `source`: the rules; set before `start`.
    """

    def __init__(self, config: DaemonConfig, incarnation: str, source: Rules | None = None) -> None:
        self.config = config
        self.incarnation = incarnation
        self.segments: dict[int, Segment] = {}
        self._source = source
        self._keepers: list[Keeper] = []

    @property
    def source(self) -> Rules:
        assert self._source is not None, "set before the start"
        return self._source

    @source.setter
    def source(self, rules: Rules) -> None:
        self._source = rules

    @property
    def urls(self) -> list[str]:
        """Where peers can pull from, with the ports that were really taken."""
        return [url for mover in self._running() for url in mover.urls]

    async def start(self) -> None:
        """Start all of them. Raises `ConfigError` for a URL that cannot be served; then none runs."""
        count = self.config.movers
        for number in range(count):
            keeper = Keeper(self, list(self.config.listen[number::count]))
            try:
                await keeper.start()
            except BaseException:
                await self.stop()
                raise
            self._keepers.append(keeper)

    async def attach_segment(self, segment_id: int, segment: Segment) -> None:
        """Have all movers map a segment, later ones too. It must stay open until `stop`."""
        self.segments[segment_id] = segment
        for mover in self._running():
            await mover.attach(segment_id, segment)

    async def pull(self, order: wire.PullBlocks) -> wire.Pulled:
        """Have blocks fetched. See `MoverProcess.order`: afterwards nothing writes to the rows.

        Raises `Unavailable` when no mover runs or the one that did it died, `LimitExceeded` when too
        much is under way, and `InvalidRequest` for an order that can never work.
        """
        pulled = await self._least_busy().order(order)
        assert isinstance(pulled, wire.Pulled)
        return pulled

    async def ask(self, order: wire.AskPeer) -> wire.Done | wire.Bytes:
        """A peer's answer to a question. Raises as `pull`, and what the peer reports."""
        answer = await self._least_busy().order(order)
        assert isinstance(answer, (wire.Done, wire.Bytes))
        return answer

    def _running(self) -> list[MoverProcess]:
        return [k.mover for k in self._keepers if k.mover is not None and k.mover.alive]

    def _least_busy(self) -> MoverProcess:
        running = self._running()
        if not running:
            raise Unavailable("no mover process runs at the moment")
        return min(running, key=lambda mover: mover.busy)

    def stats(self) -> list[dict[str, Any]]:
        return [
            {
                "pid": keeper.mover.pid if keeper.mover is not None else None,
                "alive": keeper.alive,
                "restarts": keeper.restarts,
                "orders": keeper.mover.busy if keeper.mover is not None else 0,
                "loans": keeper.mover.lending if keeper.mover is not None else 0,
                "listening": keeper.mover.urls if keeper.mover is not None else [],
            }
            for keeper in self._keepers
        ]

    async def stop(self) -> None:
        """End all mover processes and wait for their death. Idempotent."""
        await asyncio.gather(*[keeper.stop() for keeper in self._keepers])
        self._keepers.clear()
