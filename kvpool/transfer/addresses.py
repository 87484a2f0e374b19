"""Addresses of `tcp://host:port`: look-up within a deadline, and the source to connect from."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

from kvpool import net as loopback
from kvpool.errors import KvpoolError, Unavailable
from kvpool.transfer.base import Deadline, Stop

AddressInfo = tuple[int, tuple[Any, ...]]  # family and address, as sockets take them
_UNRESOLVED = (OSError, ValueError, OverflowError)  # UnicodeError is a ValueError


def split_source(url: str) -> tuple[str, str]:
    """A URL to connect to, and the source address: tcp://HOST:PORT?source=ADDRESS. Empty: any."""
    target, _, source = url.partition("?source=")
    return target, source


def url_of(host: str, port: int) -> str:
    """The URL of a TCP address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(info: AddressInfo) -> bool:
    """Whether a resolved address is this machine's own."""
    return loopback.is_loopback(str(info[1][0]))


def resolve(
    host: str, port: int, deadline: Deadline, stop: Stop | None = None
) -> list[AddressInfo]:
    """Addresses to connect to or listen on, best first. Raises `Unavailable` if they are not resolved in time."""
    try:
        return _look_up(host, port, socket.AI_NUMERICHOST)
    except _UNRESOLVED:
        pass  # a name, not an address
    # The system's resolver has no deadline, so it gets a thread that may be left behind.
    answers: queue.SimpleQueue[list[AddressInfo] | KvpoolError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_look_up(host, port, 0))
        except _UNRESOLVED as error:
            reason = error.strerror if isinstance(error, OSError) else error
            answers.put(Unavailable(f"the name {host!r} cannot be resolved: {reason}"))

    def cancel() -> None:
        answers.put(Unavailable("the transfer was cancelled"))

    stop = stop or Stop()
    stop.register(cancel)
    try:
        threading.Thread(target=ask, name="kvpool-resolve", daemon=True).start()
        answer = answers.get(timeout=deadline.left())
    except queue.Empty:
        raise Unavailable(f"the name {host!r} was not resolved in {deadline.seconds:g} s") from None
    finally:
        stop.unregister(cancel)
    if isinstance(answer, KvpoolError):
        raise answer
    return answer


def _look_up(host: str, port: int, flags: int) -> list[AddressInfo]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]
