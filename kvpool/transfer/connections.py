"""Outbound connections: authenticated once, then kept and reused."""

from __future__ import annotations

import socket
import threading
import time

from kvpool.errors import Declined, Unavailable
from kvpool.net import host_and_port
from kvpool.transfer.addresses import resolve, split_source
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.handshake import greet
from kvpool.transfer.stream import Stream, Unreachable
from kvpool.transfer.tls import open_stream

IDLE_PER_PEER_MAX = 8  # as many as one pull uses
IDLE_MAX = 64


class NoPlace(Declined):
    """The peer has no place for one more connection from here. Those that there are go on."""


class Connections:
    """Idle connections by URL, newest last. Thread-safe; connecting is done outside of the lock."""

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
                if url not in self._idle:
                    return None
                stream = self._pop(url, -1)
            # Nothing is expected on an idle connection: readable bytes are its end, or invalid.
            old = time.monotonic() - stream.idle_since > self._limits.idle_s
            if not old and stream.fresh() and not stream.readable():
                return stream
            stream.close()

    def connect(self, url: str, deadline: Deadline, stop: Stop) -> Stream:
        """A new connection, authenticated. The caller owns it. A `?source=` in the URL is its source address.

        Raises `Unavailable`, `NoPlace`, `NotAuthenticated`, `ProtocolError` or `ConfigError` (for the URL).
        """
        target, source = split_source(url)
        host, port = host_and_port(target)
        soon = deadline.sooner(self._limits.connect_s)
        failure = f"{url} has no address"
        for family, address in resolve(host, port, soon, stop):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # out of descriptors, or no such family on this machine
                failure = f"{url} cannot be reached: {error.strerror}"
                continue
            stream = open_stream(sock, soon, self._identity.tls, listens=False)
            try:
                stop.register(stream.shut)
                try:
                    stream.connect(address, source)
                    stream.secure()
                    greet(stream, self._identity)
                    return stream
                finally:
                    stop.unregister(stream.shut)
            except Unreachable as error:
                stream.close()
                failure = f"{url} cannot be reached: {error}"
            except Declined as error:
                stream.close()
                raise NoPlace(str(error)) from None
            except BaseException:
                stream.close()
                raise
        raise Unavailable(failure)

    def give(self, url: str, stream: Stream) -> None:
        """Keep an idle connection. If there are too many, the longest idle one is closed."""
        stream.idle_since = time.monotonic()
        surplus: Stream | None = stream
        with self._lock:
            if not self._closed:
                self._idle.setdefault(url, []).append(stream)
                surplus = self._surplus(url)
        if surplus is not None:
            surplus.close()

    def _surplus(self, url: str) -> Stream | None:
        """Connections above the limits, of this peer or of all."""
        if len(self._idle[url]) > IDLE_PER_PEER_MAX:
            return self._pop(url, 0)
        if sum(map(len, self._idle.values())) <= IDLE_MAX:
            return None
        # Otherwise those of nodes that have left would keep out all others forever.
        return self._pop(min(self._idle, key=lambda each: self._idle[each][0].idle_since), 0)

    def _pop(self, url: str, index: int) -> Stream:
        idle = self._idle[url]
        stream = idle.pop(index)
        if not idle:
            del self._idle[url]
        return stream

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [stream for streams in self._idle.values() for stream in streams]
            self._idle.clear()
        for stream in idle:
            stream.close()
