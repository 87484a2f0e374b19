"""Outbound connections: introduced once, then kept and used again."""

from __future__ import annotations

import socket
import threading
import time

from kvpool.errors import Unavailable
from kvpool.transfer.addresses import parse, resolve, split_source
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.handshake import greet
from kvpool.transfer.stream import Stream, Unreachable

IDLE_PER_PEER_MAX = 8  # as many as one pull uses
IDLE_MAX = 64


class Connections:
    """Idle connections by URL, newest first. Thread-safe; connecting is done outside of the lock."""

    def __init__(self, identity: Identity, limits: TransferLimits) -> None:
        self._identity = identity
        self._limits = limits
        self._lock = threading.Lock()
        self._idle: dict[str, list[Stream]] = {}
        self._closed = False

    def take_idle(self, url: str) -> Stream | None:
        """An idle connection to this peer that looks alive, or None."""
        while True:
            with self._lock:
                idle = self._idle.get(url)
                if not idle:
                    return None
                stream = idle.pop()
            # Nothing is due on an idle connection: what can be read is its end, or nonsense.
            old = time.monotonic() - stream.idle_since > self._limits.idle_s
            if not old and not stream.readable():
                return stream
            stream.close()

    def connect(self, url: str, deadline: Deadline, stop: Stop) -> Stream:
        """A new connection, introduced. The caller owns it. A `?source=` in the URL is where it comes from.

        Raises `Unavailable`, `NotAuthenticated`, `ProtocolError` or `ConfigError` (for the URL).
        """
        target, source = split_source(url)
        host, port = parse(target)
        soon = deadline.sooner(self._limits.connect_s)
        failure = f"{url} has no address"
        for family, address in resolve(host, port, soon, stop):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # out of descriptors, or no such family on this machine
                failure = f"{url} cannot be reached: {error.strerror}"
                continue
            stream = Stream(sock, soon)
            try:
                stop.register(stream.shut)
                try:
                    stream.connect(address, source)
                    greet(stream, self._identity)
                    return stream
                finally:
                    stop.unregister(stream.shut)
            except Unreachable as error:
                stream.close()
                failure = f"{url} cannot be reached: {error}"
            except BaseException:
                stream.close()
                raise
        raise Unavailable(failure)

    def give(self, url: str, stream: Stream) -> None:
        """Keep a connection on which nothing is under way."""
        stream.idle_since = time.monotonic()
        with self._lock:
            full = sum(map(len, self._idle.values())) >= IDLE_MAX
            idle = self._idle.setdefault(url, [])
            if not (self._closed or full or len(idle) >= IDLE_PER_PEER_MAX):
                idle.append(stream)
                return
        stream.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [stream for streams in self._idle.values() for stream in streams]
            self._idle.clear()
        for stream in idle:
            stream.close()
