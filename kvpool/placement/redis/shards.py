"""The Redis servers, their groups of keys, and back-off for each.

One server has all groups. Sentinels say which server that is at present. The nodes of a cluster say
which of them has which slots; each group of keys is in one slot.

A server that failed is not used for a while, and then tried in the background: a lookup never waits
for a Redis that is known to be unavailable. Event loop only.
"""

from __future__ import annotations

import asyncio
import binascii
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.redis.connection import (
    Command,
    Connection,
    Lost,
    Refused,
    info_field,
    open_connection,
    pack,
    refuse_errors,
)
from kvpool.placement.redis.settings import Address, RedisKind, RedisSettings, show_address
from kvpool.retry import Backoff

log = logging.getLogger("kvpool.placement")

BACKOFF_S, BACKOFF_S_MAX = 0.1, 1.0
CLUSTER_SLOTS = 16384

READING, WRITING = 0, 1  # a connection each, so that no lookup queues behind a long publish


@dataclass(slots=True)
class Counters:
    """Counts of failures and connections."""

    connects: int = 0
    failures: int = 0  # connections that failed, and servers that did not answer in time
    retries: int = 0  # calls repeated, elsewhere or on a new connection
    renewals: int = 0  # topology requests to sentinels or nodes


class Server:
    """One server and the two connections to it, each opened on demand."""

    def __init__(
        self, address: Address, access: Access, timeout_s: float, counters: Counters
    ) -> None:
        self.where = show_address(address)
        self.run_id = b""
        self._address = address
        self._access = access
        self._timeout_s = timeout_s
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._connections: list[Connection | None] = [None, None]
        self._connecting: list[asyncio.Task[KvpoolError | None] | None] = [None, None]
        # Consecutive, until an answer. While there are any, no call waits for a connection.
        self._backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._why = ""
        self._moved = False

    async def ask(self, lane: int, packed: bytes, wanted: int, deadline: float) -> list[Any]:
        """The replies, errors among them. deadline: on the loop's clock.

        Raises `Lost`, `Refused` (when it could not log in), or another `Unavailable`. Cancelling this
        is safe for others: see `Connection`.
        """
        connection = self._connections[lane]
        if connection is not None and connection.overdue(self._loop.time()):
            self._failed(Lost(f"Redis at {self.where} has stopped answering"), connection)
        if connection is None or connection.error is not None:
            connection = await self._connected(lane, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                replies = await connection.send(packed, wanted, deadline)
        except TimeoutError:
            error = Unavailable(f"Redis at {self.where} did not answer in time")
            self._failed(error, connection)
            raise error from None
        if self._backoff.failures:
            self._backoff.succeeded()
            log.info("Redis at %s answers again", self.where)
        return replies

    async def _connected(self, lane: int, deadline: float) -> Connection:
        task = self._connecting[lane]
        if task is None:
            left = self._backoff.retry_at - self._loop.time()
            if left > 0:
                raise self._known(f"next attempt in {left:.2f} s")
            task = self._connecting[lane] = self._loop.create_task(self._connect(lane))
        if self._backoff.failures:
            raise self._known("a new attempt is in progress")
        await asyncio.wait((task,), timeout=deadline - self._loop.time())
        if not task.done():
            raise Unavailable(f"Redis at {self.where} could not be reached in time")
        if task.cancelled():  # by `close`: another one has its place now
            raise Lost(f"Redis at {self.where} is asked no more")
        error = task.result()
        if error is not None:
            raise error.with_traceback(None)
        connection = self._connections[lane]
        assert connection is not None
        return connection

    def _known(self, more: str) -> Unavailable:
        """Why it is not asked now. What is not the right server any more is one that another call may be spared."""
        said = f"{self._why}; {more}"
        return Lost(said) if self._moved else Unavailable(said)

    async def _connect(self, lane: int) -> KvpoolError | None:
        """Open the connection of a lane, or return why there is none. Runs as a task of its own."""
        access = self._access
        self._counters.connects += 1
        try:
            connection = await open_connection(
                self._address, access.tls, self._timeout_s, login=access.login, db=access.db
            )
            try:
                await self._check_primary(connection)
            except BaseException:
                await connection.close()
                raise
        except Unavailable as error:
            self._failed(error)
            return error
        else:
            self._connections[lane] = connection
            self.run_id = connection.run_id
            return None
        finally:
            self._connecting[lane] = None

    async def _check_primary(self, connection: Connection) -> None:
        """A replica answers lookups too, but late, and accepts no writes: it cannot be used."""
        due = self._loop.time() + self._timeout_s
        replies = await _ask_once(connection, ("INFO", "replication"), due)
        if info_field(self.where, replies, b"role") != b"master":
            raise Refused(self.where, "REPLICA it is a replica, but the directory needs a primary")

    def _failed(self, error: KvpoolError, connection: Connection | None = None) -> None:
        if connection is not None:
            if connection.error is not None:
                return  # others who waited for it have reported it
            connection.fail(error)
        self._counters.failures += 1
        self._why = str(error)
        self._moved = isinstance(error, Refused) and error.moved
        if not self._backoff.failures:
            log.warning("%s", error)
        self._backoff.failed(self._loop.time())

    async def close(self) -> None:
        for task in self._connecting:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for connection in self._connections:
            if connection is not None:
                await connection.close()


class Access:
    """The credentials for a server: created once, because certificates are read from files.

    Raises `ConfigError` when they cannot be used.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.tls = settings.tls_context()
        self.db = settings.db
        self.login = _login(settings.username, settings.password)
        self.sentinel_login = _login("", settings.sentinel_password)


def _login(username: str, password: str) -> Command | None:
    if not password:
        return None
    return ("AUTH", username, password) if username else ("AUTH", password)


class Shards:
    """The servers, by group of keys.

    slots: the cluster slot of each group. Servers that have left the topology are closed.
    """

    def __init__(self, settings: RedisSettings, slots: Sequence[int], timeout_s: float) -> None:
        self.counters = Counters()
        self._settings = settings
        self._slots = slots
        self._timeout_s = timeout_s
        self._access = Access(settings)
        self._loop = asyncio.get_running_loop()
        self._servers: dict[Address, Server] = {}
        self._by_group: Sequence[Server] = ()
        self._renewal: asyncio.Task[None] | None = None
        self._backoff = Backoff(BACKOFF_S, BACKOFF_S_MAX)
        self._error: KvpoolError = Unavailable(
            f"nobody at {settings.url} has said yet where things are"
        )
        self._last_good: Address | None = None
        self._closed = False
        if not self._moves:
            self._set([settings.hosts[0]] * len(slots))

    @property
    def _moves(self) -> bool:
        """Whether the servers can change."""
        return self._settings.kind is not RedisKind.SERVER

    @property
    def in_one(self) -> bool:
        """Whether one server has all groups, so that one command may have keys of several."""
        return self._settings.kind is not RedisKind.CLUSTER

    async def by_group(self, deadline: float) -> Sequence[Server]:
        """The server of each group. Waits only if nothing is known yet; raises `Unavailable`."""
        if self._closed:
            raise Unavailable("the directory has been closed")
        if not self._by_group:
            await self.renew(deadline)
        if not self._by_group:
            raise self._error.with_traceback(None)
        return self._by_group

    async def servers(self, deadline: float) -> list[Server]:
        """Each server once, by the order of what `where` says."""
        await self.by_group(deadline)
        return sorted(self._servers.values(), key=lambda server: server.where.encode())

    def doubt(self) -> None:
        """Something is not where it was: read the topology again, in the background.

        With growing back-off while no host answers, or the answer does not help.
        """
        if self._moves and self._renewal is None and self._backoff.due(self._loop.time()):
            self._backoff.failed(self._loop.time())
            self._renewal = self._loop.create_task(self._renew())

    def trust(self) -> None:
        """Everything was where it should be."""
        self._backoff.failures = 0

    async def renew(self, deadline: float) -> None:
        """Have the topology read, unless that was done a moment ago, and wait for it."""
        self.doubt()
        if self._renewal is not None:
            # If it takes longer, the known topology is used, if any.
            await asyncio.wait((self._renewal,), timeout=deadline - self._loop.time())

    async def _renew(self) -> None:
        """Ask one host after the other, the last one that answered first, until one answers."""
        self.counters.renewals += 1
        known = [self._last_good] if self._last_good is not None else []
        candidates = dict.fromkeys([*known, *self._settings.hosts])
        if not self.in_one:
            candidates |= dict.fromkeys(self._servers)
        # So that a silent host does not use up the caller's time.
        timeout_s = self._timeout_s / min(len(candidates), 3)
        try:
            for address in candidates:
                try:
                    found = await self._ask_where(address, timeout_s)
                except Unavailable as error:
                    self._error = error
                else:
                    self._last_good = address
                    gone = self._set(found)
                    for server in gone:
                        await server.close()
                    return
            log.debug(
                "no host of %s reports the cluster's layout: %s", self._settings.url, self._error
            )
        finally:
            self._renewal = None

    def _set(self, addresses: Sequence[Address]) -> list[Server]:
        """Apply a topology, by group; close the servers that are no longer in it."""
        old, self._servers = self._servers, {}
        for address in addresses:
            if address in old:
                self._servers[address] = old.pop(address)
            elif address not in self._servers:
                self._servers[address] = Server(
                    address, self._access, self._timeout_s, self.counters
                )
        self._by_group = [self._servers[address] for address in addresses]
        return list(old.values())

    async def _ask_where(self, address: Address, timeout_s: float) -> list[Address]:
        """The address of each group's server, from one sentinel or node."""
        sentinel = self._settings.kind is RedisKind.SENTINEL
        command: Command = ("CLUSTER", "SLOTS")
        if sentinel:
            command = ("SENTINEL", "get-master-addr-by-name", self._settings.service)
        access = self._access
        connection = await open_connection(
            address,
            access.tls,
            timeout_s,
            login=access.sentinel_login if sentinel else access.login,
        )
        try:
            due = self._loop.time() + timeout_s
            answer = await _ask_once(connection, command, due)
            try:
                if sentinel:
                    return [_primary(answer)] * len(self._slots)
                return _owners(answer, self._slots, address[0])
            except (LookupError, TypeError, ValueError, AttributeError):
                what = f"UNKNOWN it has no service called {self._settings.service!r}"
                if not sentinel:
                    what = "CLUSTERDOWN not every slot has a node"
                raise Refused(connection.where, what) from None
        finally:
            await connection.close()

    async def close(self) -> None:
        """Calls under way end with `Unavailable`. Idempotent."""
        self._closed = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        for server in self._servers.values():
            await server.close()


async def _ask_once(connection: Connection, command: Command, due: float) -> Any:
    """One command on a connection that is not shared yet. Raises `Unavailable`."""
    try:
        async with asyncio.timeout_at(due):
            replies = await connection.send(pack([command]), 1, due)
    except TimeoutError:
        raise Lost(f"Redis at {connection.where} did not answer in time") from None
    refuse_errors(connection.where, replies)
    return replies[0]


def _primary(answer: Any) -> Address:
    host, port = answer
    return host.decode(), int(port)


def _owners(answer: Any, slots: Sequence[int], asked: str) -> list[Address]:
    """The primaries of slots in the answer to CLUSTER SLOTS. A node that does not know its own address
    leaves it empty: it is the address asked.
    """
    wanted = sorted(set(slots))
    owner: dict[int, Address] = {}
    for first, last, primary, *_ in answer:
        for slot in wanted[bisect_left(wanted, first) : bisect_right(wanted, last)]:
            owner[slot] = ((primary[0] or b"").decode() or asked, int(primary[1]))
    return [owner[slot] for slot in slots]


def slot_of(hash_tag: bytes) -> int:
    """The cluster slot of all keys that have this in braces."""
    return binascii.crc_hqx(hash_tag, 0) % CLUSTER_SLOTS
