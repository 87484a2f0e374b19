"""Connections of clients: accept, handshake, requests, and their end's effect on held slots."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CoroutineType
from typing import Any, cast

from kvpool.daemon.cluster.engine_registry import EngineRegistry
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.logins import Logins
from kvpool.daemon.ops.operators import Operators
from kvpool.daemon.ops.stats_gatherer import ConnectionCounts
from kvpool.daemon.server.client_processes import ClientHandle, ClientProcess, ClientProcesses
from kvpool.daemon.server.loop_shares import OPERATORS, LoopShares
from kvpool.daemon.server.requests import ClientRequests
from kvpool.daemon.shares import Shares
from kvpool.daemon.tiers.device_tier import DeviceTier
from kvpool.daemon.tiers.engine_caches import Engines
from kvpool.decoding import WrongValue
from kvpool.errors import (
    InternalError,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NotAuthenticated,
    ProtocolError,
)
from kvpool.memory.mappers import may_touch
from kvpool.memory.peer_process import peer_pid, peer_uid
from kvpool.memory.segment import Segment
from kvpool.tasks import Tasks
from kvpool.wire import client as client_wire
from kvpool.wire import frame

HELLO_TIMEOUT_S = 5.0
ACCEPT_PAUSE_S = 0.1  # before the next try, when no descriptors are left
WRITE_BUFFER_BYTES = 1 << 20  # unread answers of a client before its requests wait
INTRODUCING_MAX = 64  # connections before their Hello: the oldest makes way
RECEIVED_BYTES_MAX = 64 << 20  # of incomplete frames, all connections together
WAITING_MAX = 64  # requests of one connection that wait for other nodes
ABSENT_MAX = 1 << 14  # clients without a connection that still hold something
IDLE_S = 5.0  # between two looks whether the leases of absent clients have ended
LOOK_S = 10.0  # between two looks at the processes of absent clients, each of which reads /proc


TIMER_S = 0.001  # uvloop's timers count in milliseconds


@dataclass(eq=False, repr=False, slots=True)
class ClientConnections:
    """All clients of a daemon. Event loop only.

    segments: by tenant; each client gets its tenant's as a descriptor with the first answer. counts: kept up to
    date. operators: for its present configuration. logins: is told of failed ones. loop_shares: None for one tenant
    alone, who has all of the loop's time.
    """

    _node: Node
    _requests: ClientRequests
    _operators: Operators
    _engines: Engines
    _registry: EngineRegistry
    _device: DeviceTier | None
    _segments: Mapping[str, Segment]
    counts: ConnectionCounts
    _logins: Logins
    loop_shares: LoopShares | None
    _tokens: dict[str, str | None] = field(init=False)
    _clients: dict[tuple[str, str, bool], ClientHandle] = field(default_factory=dict, init=False)
    """By tenant, the client's own id, and whether it is an operator."""
    _processes: ClientProcesses = field(init=False)
    _absent: dict[ClientHandle, None] = field(default_factory=dict, init=False)
    """Clients without a connection: the first to leave first."""
    _looking: bool = field(default=False, init=False)
    _looked_at: float = field(default=-LOOK_S, init=False)
    _shares: Shares = field(init=False)
    _admitted: Counter[str] = field(default_factory=Counter, init=False)
    """Connections, by tenant."""
    _received: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes of incomplete frames, by tenant."""
    _introducing: dict[asyncio.Task[None], None] = field(default_factory=dict, init=False)
    """The oldest first."""
    _tasks: Tasks = field(default_factory=Tasks, init=False)

    def __post_init__(self) -> None:
        tenants = self._operators.config.all_tenants()
        self._tokens = {tenant.name: tenant.token for tenant in tenants}
        self._processes = ClientProcesses(self._process_died)
        self._shares = Shares(self._tokens)

    def listen(self, listener: socket.socket, *, operators: bool) -> None:
        """Accept clients there until `ignore`. operators: whoever can open that socket is one."""
        loop = asyncio.get_running_loop()
        loop.add_reader(listener.fileno(), self._accept, listener, operators)

    def ignore(self, listener: socket.socket) -> None:
        """Stop accepting there."""
        asyncio.get_running_loop().remove_reader(listener.fileno())

    async def close(self) -> None:
        """Close all connections, and give back what their clients hold."""
        await self._tasks.end()
        for handle in list(self._clients.values()):
            for connection in list(handle.connections):
                connection.close()
            self._forget(handle)

    def _accept(self, listener: socket.socket, operators: bool) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED):
                self.counts.refused += 1
                # It stays in the queue, and the listener readable: retry a little later.
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener.fileno())
                loop.call_later(ACCEPT_PAUSE_S, self._accept_again, listener, operators)
                return
            raise
        most = self._operators.config.clients_max
        if not operators and (there := self._admitted.total()) >= most:
            self.counts.refused += 1
            full = LimitExceeded(
                f"{there} connections on this node, the limit (clients_max): "
                f"{self._processes.describe(peer_uid(sock))}"
            )
            _send_now(sock, frame.encode(frame.error_message(full), 0))
            sock.close()
            return
        if len(self._introducing) >= INTRODUCING_MAX:
            next(iter(self._introducing)).cancel()
        sock.setblocking(False)
        self.counts.connections += 1
        task = self._tasks.begin(self._introduce(sock, operators=operators))
        self._introducing[task] = None
        task.add_done_callback(lambda task: self._introducing.pop(task, None))

    def _accept_again(self, listener: socket.socket, operators: bool) -> None:
        if listener.fileno() >= 0:
            self.listen(listener, operators=operators)

    async def _introduce(self, sock: socket.socket, *, operators: bool) -> None:
        """Hello, Welcome; from there on the connection is a `ClientConnection`'s."""
        request = 0
        try:
            request, payload = await _first_frame(sock)
            if len(self._absent) >= ABSENT_MAX:
                await self._free_absent()
            hello = client_wire.decode_client(payload)
            if not isinstance(hello, client_wire.Hello):
                raise ProtocolError("the first frame must be a Hello")
            handle = self._admit(hello, sock, operators=operators)
            connection = ClientConnection(self, self._requests, handle)
            handle.connections.add(connection)
            self._absent.pop(handle, None)
        except BaseException as error:
            self.counts.connections -= 1
            if isinstance(error, KvpoolError):
                _send_now(sock, frame.encode(frame.error_message(error), request))
            sock.close()
            if not isinstance(error, (KvpoolError, OSError)):
                raise  # another one needs its place, or the daemon ends
            self.counts.refused += 1
            return
        self._admitted[hello.tenant] += 1
        current = asyncio.current_task()
        assert current is not None, "this runs in a task"
        self._introducing.pop(current, None)  # from here on it makes way for none
        segment = self._segments[hello.tenant]
        fds, memory, life = [segment.fd], b"", 0
        if hello.device and self._device is not None:
            try:
                exported = await self._device.export(handle.holder.tenant)
            except BaseException:
                sock.close()
                raise
            if exported is not None:
                memory, life, life_fd = exported
                fds.append(life_fd)
        welcome = client_wire.Welcome(
            frame.agree(hello.version, hello.oldest, "the client"),
            self._operators.config.node,
            self._node.incarnation,
            handle.holder.tenant.segment,
            segment.size,
            memory,
            life,
        )
        try:
            socket.send_fds(sock, [frame.encode(welcome, request)], fds)
        except OSError:
            sock.close()
            self.lost(connection)
            return
        await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)

    def _admit(
        self, hello: client_wire.Hello, sock: socket.socket, *, operators: bool
    ) -> ClientHandle:
        frame.agree(hello.version, hello.oldest, "the client")
        expected = self._tokens.get(hello.tenant)
        if hello.tenant not in self._tokens or (
            expected is not None
            and not secrets.compare_digest((hello.token or "").encode(), expected.encode())
        ):
            self._logins.fail("socket", _who(hello, sock), "unknown tenant, or wrong token")
            raise NotAuthenticated(
                "unknown tenant, or wrong token: check tenant and token of this client"
            )
        if not 0 < len(hello.client) <= 64 or len(hello.instance) > 256:
            raise InvalidRequest(
                "a client's id must have 1 to 64 characters, an instance's at most 256"
            )
        operator = self._is_operator(hello, operators=operators)
        if hello.operator and not operator:  # a client all the same
            self._logins.fail("socket", _who(hello, sock), "wrong operator token")
        process = self._processes.at(sock)
        try:
            return self._handle(hello, process, operator=operator)
        finally:
            self._processes.leave(process)  # if this is refused

    def _handle(
        self, hello: client_wire.Hello, process: ClientProcess, *, operator: bool
    ) -> ClientHandle:
        """The client that says this, known or new."""
        if not operator:  # tenants that take all keep out no operator
            self._check_share(hello.tenant, process)
        handle = self._clients.get((hello.tenant, hello.client, operator))
        if handle is not None:
            known = handle.process.may_be(process) and handle.holder.instance == hello.instance
            if not known:
                raise NotAuthenticated("this client id belongs to another process or instance")
            return handle
        holder = self._node.holders.add(hello.tenant, hello.instance, hello.client)
        holder.uid = process.uid
        holder.operator = operator
        handle = ClientHandle(holder, process)
        process.handles.add(handle)
        self._clients[hello.tenant, hello.client, operator] = handle
        self.counts.clients = len(self._clients)
        return handle

    def _check_share(self, tenant: str, process: ClientProcess) -> None:
        """Raises `LimitExceeded`."""
        most = self._operators.config.clients_max
        try:
            self._shares.check(self._admitted, tenant, most, "connections", "clients_max")
            if len(self._absent) >= ABSENT_MAX:
                gone = Counter(handle.holder.tenant.name for handle in self._absent)
                what = "clients without a connection hold slots"
                self._shares.check(gone, tenant, ABSENT_MAX, what, "no setting")
        except LimitExceeded as error:
            raise LimitExceeded(f"{error}: {self._processes.describe(process.uid)}") from None

    def may_hold(self, tenant: str, before: int, now: int) -> bool:
        """Whether a connection of this tenant may go on with an incomplete frame of this length."""
        more = now - before
        if more > 0 and not self._shares.room(self._received, tenant, RECEIVED_BYTES_MAX, more):
            return False
        self._received[tenant] += more
        return True

    def _is_operator(self, hello: client_wire.Hello, *, operators: bool) -> bool:
        """With a token whoever has it; else who came by the operators' socket, root of a container or not."""
        expected = self._operators.config.operator_token.encode()
        if not expected:
            return operators
        return secrets.compare_digest(hello.operator.encode(), expected)

    def _process_died(self, process: ClientProcess) -> None:
        for handle in list(process.handles):
            for connection in list(handle.connections):
                connection.close()
            self._forget(handle)

    def _forget(self, handle: ClientHandle) -> None:
        holder = handle.holder
        key = (holder.tenant.name, holder.name, holder.operator)
        if self._clients.pop(key, None) is None:
            return
        self.counts.clients = len(self._clients)
        self._absent.pop(handle, None)
        handle.process.handles.discard(handle)
        self._processes.leave(handle.process)
        self._engines.forget(handle.holder)
        self._registry.forget(handle.holder)
        self._node.holders.died(handle.holder)

    def lost(self, connection: ClientConnection) -> None:
        """A socket closed. Its client's slots stay held as long as its process may touch them."""
        self.counts.connections -= 1
        handle = connection.handle
        tenant = handle.holder.tenant.name
        self._admitted[tenant] -= 1
        self._received[tenant] -= connection.held
        connection.held = 0
        handle.connections.discard(connection)
        holder = handle.holder
        if not handle.connections:
            for stride, rows in holder.ready.items():
                self._node.grants.give_back(holder, stride, rows)  # the client never received them
            holder.ready.clear()
            if holder.idle and not self._told(handle):
                self._forget(handle)
            else:
                handle.departures += 1
                self._absent[handle] = None
                if not self._looking:
                    self._looking = True
                    self._tasks.begin(self._look_at_absent())

    def _told(self, handle: ClientHandle) -> bool:
        """Whether a client has announced its engine, which is valid until its process ends."""
        return self._engines.subscribes(handle.holder) or self._registry.has(handle.holder)

    async def _look_at_absent(self) -> None:
        """Free absent clients, now and from time to time, until there is none."""
        while self._absent:
            if time.monotonic() >= self._looked_at + LOOK_S:
                await self._free_absent()
            for handle in list(self._absent):
                if handle.holder.idle and not self._told(handle):
                    self._forget(handle)
            await asyncio.sleep(IDLE_S)
        self._looking = False

    async def _free_absent(self) -> None:
        """Forget clients without a connection whose processes cannot write to slots any more. Leases end by themselves."""
        self._looked_at = time.monotonic()
        absent = [(handle, handle.departures) for handle in self._absent if not self._told(handle)]
        by_process: dict[tuple[int, int], bool] = {}
        for handle, departures in absent:
            if handle.holder.leases or handle not in self._absent:
                continue
            seen = handle.process.pidfd, self._segments[handle.holder.tenant.name].inode
            if seen not in by_process:
                by_process[seen] = await asyncio.to_thread(may_touch, *seen)
            here = handle in self._absent and handle.departures == departures
            if here and not by_process[seen]:
                self._forget(handle)


def _who(hello: client_wire.Hello, sock: socket.socket) -> str:
    """A client that could not prove who it is, for the audit."""
    return f"uid {peer_uid(sock)}, process {peer_pid(sock)}, tenant {hello.tenant:.64}"


class ClientConnection(asyncio.Protocol):
    """One connection of a client, after its Welcome."""

    def __init__(
        self, connections: ClientConnections, requests: ClientRequests, handle: ClientHandle
    ) -> None:
        self._connections = connections
        self._requests = requests
        self.handle = handle
        self.reader = frame.FrameReader()
        self.held = 0  # bytes of an incomplete frame, as counted for its tenant
        self.transport: asyncio.Transport | None = None
        self.tasks = Tasks()
        self.closed = False
        self.paused = False  # answers pile up
        self.waiting = False  # its tenant has used its share of the loop's time
        self.backlog: list[tuple[int, bytes]] = []  # requests that wait for that to end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transport is compatible but not a subclass.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self.closed:  # the client's process died during the handshake
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.backlog.clear()
        self.tasks.cancel()
        self._connections.lost(self)

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more requests until it does."""
        self.paused = True
        self._live_transport.pause_reading()

    def resume_writing(self) -> None:
        self.paused = False
        self._go_on()

    @property
    def _live_transport(self) -> asyncio.Transport:
        assert self.transport is not None
        return self.transport

    def close(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            frames = self.reader.feed(data)
        except ProtocolError as error:
            self._refuse(error, [])
            return
        if self.held != (now := self.reader.held):
            if not self._connections.may_hold(self.handle.holder.tenant.name, self.held, now):
                self._refuse(LimitExceeded("too many unfinished requests of this tenant"), [])
                return
            self.held = now
        if self.backlog or self._must_wait():
            self._connections.counts.waits += self.waiting
            self.backlog += frames
            return
        self._serve(frames)
        self._requests.settle_soon(self._who, len(frames))

    @property
    def _who(self) -> str:
        """Against whom the time is held that its requests take."""
        holder = self.handle.holder
        return OPERATORS if holder.operator else holder.tenant.name

    def _must_wait(self) -> bool:
        """Whether its tenant's requests have to wait now; then it goes on by itself."""
        shares = self._connections.loop_shares
        if shares is None or self.waiting:
            return self.waiting
        wait_s = shares.wait_s(self._who, time.monotonic())
        if wait_s > 0:
            self.waiting = True
            self._live_transport.pause_reading()
            loop = asyncio.get_running_loop()
            loop.call_later(max(wait_s, TIMER_S), self._waited)  # less would be at once
        return self.waiting

    def _charge(self, seconds: float) -> None:
        shares = self._connections.loop_shares
        if shares is not None:
            shares.used(self._who, time.monotonic(), seconds)

    def _waited(self) -> None:
        self.waiting = False
        self._go_on()

    def _serve(self, frames: list[tuple[int, bytes]]) -> None:
        """Answer requests in order; send large amounts of answers in pieces."""
        if self._connections.loop_shares is None:
            self._answer_all(frames)
            return
        began = time.monotonic()
        self._answer_all(frames)
        self._charge(time.monotonic() - began)

    def _answer_all(self, frames: list[tuple[int, bytes]]) -> None:
        holder = self.handle.holder
        answers: list[bytes] = []
        size = 0
        for at, (request, payload) in enumerate(frames):
            try:
                message = client_wire.decode_client(payload)
                answer = self._requests.handle(holder, message)
            except WrongValue as error:
                answer = frame.error_message(InvalidRequest(str(error)))
            except ProtocolError as error:
                self._refuse(error, answers)
                return
            except Exception as error:  # noqa: BLE001  (it decides)
                told = self._requests.faults.answer(message, error)
                if isinstance(told, InternalError):
                    self._refuse(told, answers, request)
                    return
                answer = frame.error_message(told)
            if type(answer) is CoroutineType:
                if len(self.tasks) < WAITING_MAX:
                    self._later(request, message, answer)
                    continue
                answer.close()
                answer = frame.error_message(
                    LimitExceeded(f"{WAITING_MAX} requests of this connection are waiting already")
                )
            if request:
                framed = _frame(answer, request)
                answers.append(framed)
                size += len(framed)
                if size > WRITE_BUFFER_BYTES and at + 1 < len(frames):
                    self.backlog = frames[at + 1 :]
                    self._live_transport.pause_reading()
                    asyncio.get_running_loop().call_soon(self._go_on)
                    break
        if answers:
            self._live_transport.write(answers[0] if len(answers) == 1 else b"".join(answers))

    def _go_on(self) -> None:
        """Take up the requests that were waiting, then new ones."""
        transport = self._live_transport
        if self.paused or transport.is_closing() or self._must_wait():
            return
        frames, self.backlog = self.backlog, []
        if frames:
            self._serve(frames)
            self._requests.settle_soon(self._who, len(frames))
        if self._may_read():
            transport.resume_reading()

    def _may_read(self) -> bool:
        return not (
            self.backlog or self.paused or self.waiting or self._live_transport.is_closing()
        )

    def _refuse(self, error: KvpoolError, answers: list[bytes], request: int = 0) -> None:
        """Send the answers so far and the error, and end the connection."""
        answers.append(frame.encode(frame.error_message(error), request))
        self._live_transport.write(b"".join(answers))
        self._live_transport.close()

    def _later(
        self, request: int, message: frame.Message, answer: Coroutine[Any, Any, frame.Message]
    ) -> None:
        task = self.tasks.begin(self._answer(request, message, answer))
        # It may have been cancelled before it began.
        task.add_done_callback(lambda _: answer.close())

    async def _answer(
        self, request: int, message: frame.Message, answer: Coroutine[Any, Any, frame.Message]
    ) -> None:
        try:
            found = await _timed(answer, self._charge)
        except Exception as error:  # noqa: BLE001  (it decides)
            told = self._requests.faults.answer(message, error)
            if told is not error:
                if not self._live_transport.is_closing():
                    self._refuse(told, [], request)
                return
            found = frame.error_message(told)
        if request and self.transport is not None and not self.transport.is_closing():
            self.transport.write(_frame(found, request))


@types.coroutine
def _timed(
    work: Coroutine[Any, Any, frame.Message], spent: Callable[[float], None]
) -> Generator[Any, Any, frame.Message]:
    """As `await work`; each of its steps is told with how long it took."""
    step: Callable[[], Any] = partial(work.send, None)
    while True:
        began = time.monotonic()
        try:
            waits_for = step()
        except StopIteration as done:
            result: frame.Message = done.value
            return result
        finally:
            spent(time.monotonic() - began)
        try:
            step = partial(work.send, (yield waits_for))
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001  (it is the work's, which may handle it)
            step = partial(work.throw, error)


async def _first_frame(sock: socket.socket) -> tuple[int, bytes]:
    """What a client says first: the request's number, and the payload.

    Raises `ProtocolError`, `TimeoutError` and `OSError`.
    """
    reader = frame.FrameReader(frame.HELLO_BYTES_MAX)
    frames: list[tuple[int, bytes]] = []
    async with asyncio.timeout(HELLO_TIMEOUT_S):
        while not frames:
            data = await asyncio.get_running_loop().sock_recv(sock, frame.HELLO_BYTES_MAX)
            if not data:
                raise ProtocolError("the connection ended before its Hello")
            frames = reader.feed(data)
    if len(frames) > 1 or reader.partial:
        raise ProtocolError("a client must wait for the answer to its Hello")
    return frames[0]


def _frame(answer: frame.Message, request: int) -> bytes:
    try:
        return frame.encode(answer, request)
    except ProtocolError as error:
        too_long = LimitExceeded(f"the answer is too long, ask for less: {error}")
        return frame.encode(frame.error_message(too_long), request)


def _send_now(sock: socket.socket, data: bytes) -> None:
    try:
        sock.send(data)
    except OSError:
        pass  # it is gone; it was to be closed anyway
