"""One connection to one Redis server, and its failures.

Requests go out in order and answers come back in that order, so many calls share a connection without
waiting for one another; each awaits a future of its own. A cancelled call keeps its place in
the queue: its answer is dropped when it arrives, and no other call can get it. (redis-py's pool would lend a
connection to each call and close it with a cancelled one; a lookup of 256 keys also takes 2.5 times
the CPU there: the control process, which answers clients in 50 us, has none to spare.)

All errors of sockets, TLS, and Redis are mapped here: to `Lost` and `Refused`, both `Unavailable`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

import hiredis

from kvpool.errors import ConfigError, KvpoolError, NotAuthenticated, Unavailable
from kvpool.placement.redis.settings import Address, show_address

UNANSWERED_MAX = 1024  # requests on one connection
BUFFER_BYTES_MAX = 4 << 20  # bytes the kernel has not taken yet; above it nothing more is sent

Command = tuple[str | int | float | bytes | memoryview, ...]

_MORE = object()

# These are temporary; any other refusal of the first call is a mistake in the configuration.
_TRANSIENT = frozenset(
    (
        *("ASK", "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS"),
        *("OOM", "READONLY", "REPLICA", "TRYAGAIN"),
    )
)
_LOGIN = frozenset(("NOAUTH", "WRONGPASS"))
# Another server has, or may have, the requested keys.
_MOVED = frozenset(("MOVED", "READONLY", "REPLICA", "CLUSTERDOWN"))


class Lost(Unavailable):
    """The connection ended before the answer. Whether Redis executed the request is not known."""


class Refused(Unavailable):
    """Redis answered with an error. kind: its first word, or a name given here."""

    def __init__(self, where: str, text: str) -> None:
        super().__init__(f"Redis at {where} refused: {text}")
        self.kind = text.split(" ", 1)[0]

    @property
    def moved(self) -> bool:
        """Whether to read the topology again."""
        return self.kind in _MOVED

    def verdict(self, *, cluster: bool) -> KvpoolError | None:
        """Its meaning as the answer to the very first call; None if it may be temporary."""
        if self.kind in _LOGIN or "AUTH" in str(self) or "invalid password" in str(self):
            return NotAuthenticated(f"{self}. Check the directory's user and password")
        if self.kind in _TRANSIENT or (cluster and self.kind == "MOVED"):
            return None
        if self.kind in {"MOVED", "CROSSSLOT"}:
            return ConfigError(f"{self}. It is part of a cluster: write redis+cluster://")
        return ConfigError(
            f"{self}. The directory needs Redis and a user that may use INFO, MGET, SET, MSET, DEL, EVAL and SCAN on "
            "its keys"
        )


class Connection(asyncio.Protocol):
    """See the module. Event loop only; created by `open_connection`, ended by `fail` or `close`.

    run_id: of the server's process: a new one after each restart.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.run_id = b""
        self.error: KvpoolError | None = None  # why it can no longer be used
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(notEnoughData=_MORE)
        self._requests: deque[_Request] = deque()
        self._transport: asyncio.Transport | None = None
        self._full = False
        self._gone = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Uvloop's transport is not a subclass.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES_MAX)
        if self.error is not None:  # it was given up while the socket was being made
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(Lost(f"the connection to Redis at {self.where} ended: {exc or 'closed by it'}"))
        self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def data_received(self, data: bytes) -> None:
        if self.error is not None:
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _MORE:
                self._take(reply)
        except (hiredis.ProtocolError, UnicodeDecodeError) as error:
            self.fail(Refused(self.where, f"GARBAGE instead of the Redis protocol ({error})"))

    def _take(self, reply: Any) -> None:
        if not self._requests:
            raise hiredis.ProtocolError("an answer without a request")
        request = self._requests[0]
        request.replies.append(reply)
        if len(request.replies) == request.wanted:
            self._requests.popleft()
            if not request.answer.done():  # otherwise it was cancelled
                request.answer.set_result(request.replies)

    def overdue(self, now: float) -> bool:
        """Whether a request's time has passed without an answer, even a cancelled one's."""
        return bool(self._requests) and self._requests[0].due < now

    def send(self, packed: bytes, wanted: int, due: float) -> asyncio.Future[list[Any]]:
        """Send packed commands; their replies, errors among them as `hiredis.ReplyError`.

        due: on the loop's clock, when to consider the server stopped. The future may be cancelled.
        Raises `Unavailable` when too much is unanswered, or the error that ended the connection.
        """
        if self.error is not None:
            raise self.error.with_traceback(None)  # or it would grow with every call
        if self._full or len(self._requests) >= UNANSWERED_MAX:
            raise Unavailable(
                f"Redis at {self.where} is behind: {len(self._requests)} requests without an answer"
            )
        assert self._transport is not None
        request = _Request(self._loop.create_future(), wanted, due)
        self._requests.append(request)
        self._transport.write(packed)
        return request.answer

    def fail(self, error: KvpoolError) -> None:
        """End it at once: waiting calls get the error. Later calls are ignored."""
        if self.error is not None:
            return
        self.error = error
        if self._transport is not None:
            self._transport.abort()
        for request in self._requests:
            if not request.answer.done():
                request.answer.set_exception(error)
        self._requests.clear()

    async def close(self) -> None:
        """End it and wait until its socket is closed. Idempotent."""
        self.fail(Lost(f"the connection to Redis at {self.where} was closed"))
        if self._transport is not None:
            await asyncio.shield(self._gone)


class _Request:
    """Commands that were sent together, and the replies so far."""

    __slots__ = ("answer", "due", "replies", "wanted")

    def __init__(self, answer: asyncio.Future[list[Any]], wanted: int, due: float) -> None:
        self.answer = answer
        self.wanted = wanted
        self.due = due
        self.replies: list[Any] = []


def pack(commands: Iterable[Command]) -> bytes:
    """Commands as they travel."""
    # hiredis' stub knows only tuples of one element.
    return b"".join([hiredis.pack_command(command) for command in commands])  # type: ignore[arg-type]


def refuse_errors(where: str, replies: Iterable[Any]) -> None:
    """Raises `Refused` if one of the replies is an error."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise Refused(where, str(reply))


async def open_connection(
    address: Address,
    tls: ssl.SSLContext | None,
    timeout_s: float,
    *,
    login: Command | None = None,
    db: int = 0,
) -> Connection:
    """Connect and log in, all within the time.

    login: the AUTH command. Raises `Lost` when nothing answers, `Refused` when the server rejects the
    login, or is not Redis.
    """
    where = show_address(address)
    loop = asyncio.get_running_loop()
    connection = Connection(where)
    host, port = address
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(
                lambda: connection, host, port, ssl=tls, server_hostname=host if tls else None
            )
            greeting: list[Command] = [] if login is None else [login]
            greeting += [("SELECT", db)] if db else []
            greeting += [("INFO", "server")]
            replies = await connection.send(pack(greeting), len(greeting), loop.time() + timeout_s)
        refuse_errors(where, replies)
        connection.run_id = info_field(where, replies[-1], b"run_id")
    except TimeoutError:
        error: KvpoolError = Lost(f"Redis at {where} does not answer: nothing in {timeout_s:g} s")
    except ssl.SSLError as problem:
        error = Refused(where, f"TLS does not work with it: {problem}")
    except OSError as problem:
        error = Lost(f"Redis at {where} cannot be reached: {problem}")
    except Unavailable as problem:
        error = problem
    except BaseException:
        connection.fail(Lost(f"the connection to Redis at {where} is no longer needed"))
        raise
    else:
        return connection
    connection.fail(error)
    raise error


def info_field(where: str, info: Any, name: bytes) -> bytes:
    """One line of INFO. Raises `Refused` when it is missing."""
    if isinstance(info, bytes):
        for line in info.splitlines():
            if line.startswith(name + b":"):
                return line.partition(b":")[2]
    raise Refused(where, f"GARBAGE instead of INFO: it names no {name.decode()}")
