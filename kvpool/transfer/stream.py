"""A blocking socket with a deadline on every wait: frames, and bulk bytes by scatter and gather.

Writing blocks in the kernel, with the kernel's own time-out (SO_SNDTIMEO), because Python's makes the
socket non-blocking: then a gather of many blocks returns at each full socket buffer and costs a poll
and another pass over the list. Here it is one call that holds no GIL. Reading waits until a good part
of the expected bytes is there (SO_RCVLOWAT), then takes all of it.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.errors import Declined, KvpoolError, NotAuthenticated, ProtocolError, Unavailable
from kvpool.transfer.base import Deadline
from kvpool.transfer.sealing import TAG_BYTES, Sealer
from kvpool.wire.frame import HEADER, Message, encode

IOV_MAX = 1024  # buffers in one sendmsg or recvmsg_into
WAKE_BYTES = 1 << 20  # wait for this much of the expected bytes
CALL_BYTES = 1 << 20  # moved by one call: on many kernels nothing else runs on its core meanwhile
SLACK_BYTES = 4096  # more: for a header or a tag beside that much
LINGER_S = 1.0  # for a refused peer to read why
LINGER_BYTES = 64 << 10
TLS_HANDSHAKE = b"\x16\x03"  # the first bytes a TLS peer sends
_TIMEVAL = struct.Struct("@ll")
_LINGER = struct.Struct("@ii")


class Closed(Unavailable):
    """The peer ended the connection."""


class Unreachable(Unavailable):
    """Nothing listens at this address, or there is no route to it."""


class Stream:
    """One connection. Used by one thread at a time, except `shut`, which any thread may call.

    Every method raises `Closed` when the connection has ended, `Unavailable` when `deadline` passes,
    `ProtocolError` for a frame above the limit, and `NotAuthenticated` for a frame with a wrong tag.
    After any of these the stream can only be closed: its position in the conversation is unknown.

    peer_node: the peer's node, by its certificate, or by its own message once it has been admitted
    to the cluster; None: not known. binding: a value shared by only the two ends of this connection; empty: there is
    none. trusted: whether what the peer has authenticated with is still accepted.
    """

    peer_node: str | None = None
    binding: bytes = b""
    trusted: Callable[[], bool] = staticmethod(lambda: True)
    _seals: tuple[Sealer, Sealer] | None = None  # for sending and for receiving

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._wake_bytes = 1
        self._armed = 0.0  # seconds of the kernel's time-out for writes
        self.deadline = deadline
        self.idle_since = 0.0

    def connect(self, address: tuple[Any, ...], source: str = "") -> None:
        """From one of this machine's addresses, or any. Raises `Unreachable`, also when the time
        is up, or after `shut`.
        """
        self._arm()
        try:
            if source:
                self._sock.bind((source, 0))
            self._sock.connect(address)
        except OSError as error:
            late = isinstance(error, BlockingIOError)
            raise Unreachable("no answer in time" if late else str(error.strerror)) from None

    def secure(self) -> None:
        """Negotiate protection, before anything else. Here: none."""

    def fresh(self) -> bool:
        """Whether the peer would still be accepted, so that this connection may continue. If not, it ends."""
        return self.trusted()

    def use_keys(self, send: bytes, receive: bytes) -> None:
        """From here on each frame, and each group of bulk bytes, has a tag behind it, made and checked with these."""
        self._seals = Sealer(send), Sealer(receive)

    @property
    def keyed(self) -> bool:
        """Whether it has keys, by `use_keys`."""
        return self._seals is not None

    def send(self, message: Message, request: int) -> None:
        self.send_frame(encode(message, request))

    def send_frame(self, frame: bytes) -> None:
        self.send_buffers(self.sealed([memoryview(frame)]))

    def sealed(self, buffers: list[memoryview]) -> list[memoryview]:
        """These, with their tag behind them where there are keys."""
        return [*buffers, *self.tag(buffers)]

    def tag(self, buffers: list[memoryview]) -> list[memoryview]:
        """What is to follow one frame, or one group of bulk bytes: their tag; nothing where there are no keys.

        To be called in the order in which they are sent.
        """
        return [] if self._seals is None else [memoryview(self._seals[0].tag(buffers))]

    def send_buffers(self, buffers: list[memoryview]) -> None:
        """All bytes of all buffers, in order. Copied when this returns: the memory may change again."""
        buffers = [buffer for buffer in buffers if len(buffer)]  # an empty one is never sent
        at = 0
        while at < len(buffers):
            sent = self._send_some(_batch(buffers, at))
            while sent:
                size = len(buffers[at])
                if sent < size:
                    buffers[at] = buffers[at][sent:]
                    break
                sent -= size
                at += 1

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        self._arm()
        try:
            return self._sock.sendmsg(buffers)
        except OSError as error:
            raise self._mapped(error) from None

    def receive(self, limit: int) -> tuple[int, bytes]:
        """One frame: (request, payload). Reads not a byte more, so bulk bytes may follow."""
        header = bytearray(HEADER.size)
        self.receive_into([memoryview(header)])
        length, request = HEADER.unpack(header)
        if length > limit:
            if header.startswith(TLS_HANDSHAKE):
                raise ProtocolError(
                    "the peer uses TLS, and this daemon does not: give all daemons of the cluster certificates "
                    "(kvpool certs node; tls_cert, tls_key, tls_ca), or none"
                )
            raise ProtocolError(
                f"the peer sent a frame of {length} bytes; the limit here is {limit}"
            )
        if self._seals is None:
            payload = bytearray(length)
            self.receive_into([memoryview(payload)])
            return request, bytes(payload)
        header.extend(bytes(length + TAG_BYTES))
        whole = memoryview(header)
        self.receive_into([whole[HEADER.size :]])
        frame, tag = whole[:-TAG_BYTES], whole[-TAG_BYTES:]
        self._seals[1].check([frame], bytes(tag))
        return request, bytes(frame[HEADER.size :])

    def receive_group(self, buffers: list[memoryview]) -> None:
        """Fill all buffers, in order, with one group of bulk bytes; what arrived is authentic when this returns.

        Raises `Declined` if it is not: clients can write into what is sent, so this says nothing against the peer.
        """
        if self._seals is None:
            self.receive_into(buffers)
            return
        tag = bytearray(TAG_BYTES)
        self.receive_into([*buffers, memoryview(tag)])
        try:
            self._seals[1].check(buffers, tag)
        except NotAuthenticated as error:
            raise Declined(f"{error}; or a client has overwritten its blocks meanwhile") from None

    def receive_into(self, buffers: list[memoryview]) -> None:
        """Fill all buffers, in order."""
        wanted = sum(map(len, buffers))
        at = 0
        while wanted:
            expected = wanted if wanted <= WAKE_BYTES + SLACK_BYTES else WAKE_BYTES
            self._wait_for(expected)
            while expected > 0:
                got = self._receive_some(_batch(buffers, at))
                if not got:
                    break  # woken early, which the kernel may do
                expected -= got
                wanted -= got
                while at < len(buffers):
                    size = len(buffers[at])
                    if got < size:
                        buffers[at] = buffers[at][got:]
                        break
                    got -= size
                    at += 1

    def _wait_for(self, nbytes: int) -> None:
        """Sleep until this many bytes can be read, or the connection has ended.

        A receiver that is woken for every segment spends as much time on falling asleep as on copying.
        """
        try:
            if nbytes != self._wake_bytes:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
                self._wake_bytes = nbytes
            ready = self._poll.poll(self.deadline.left() * 1000)
        except OSError as error:
            raise self._mapped(error) from None
        if not ready:
            raise Unavailable(f"the peer did not answer within {self.deadline.seconds:g} s")

    def wait_beside(self, fd: int) -> None:
        """Sleep until `fd` is readable. Raises as the others do, also when the peer sends anything meanwhile."""
        both = select.poll()
        both.register(fd, select.POLLIN)
        both.register(self._sock, select.POLLIN | select.POLLRDHUP)
        ready = dict(both.poll(self.deadline.left() * 1000))
        if fd in ready:
            return
        if ready:
            raise Closed("the peer disconnected, or sent something, before it was answered")
        raise Unavailable(f"there was no answer for the peer within {self.deadline.seconds:g} s")

    def _receive_some(self, buffers: Sequence[memoryview]) -> int:
        try:
            got = self._sock.recvmsg_into(buffers, 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._mapped(error) from None
        if not got:
            raise Closed("the peer closed the connection in the middle of a message")
        return got

    def _arm(self) -> None:
        """Let the next call that writes wait no longer than the deadline allows."""
        left = self.deadline.left()
        if 0.8 * self._armed <= left <= self._armed:
            return  # near enough: the reader has a deadline of its own
        self._armed = left
        seconds, micros = divmod(int(left * 1e6) + 1, 1_000_000)
        try:
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, micros)
            )
        except OSError as error:
            raise self._mapped(error) from None

    def _mapped(self, error: OSError) -> Unavailable:
        if isinstance(error, BlockingIOError):  # the kernel's time-out
            return Unavailable(f"the peer did not answer within {self.deadline.seconds:g} s")
        return Closed(f"the connection to the peer ended: {error.strerror or error}")

    def readable(self) -> bool:
        """Whether bytes, or the end of the stream, can be read. Does not wait."""
        try:
            self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def shut(self) -> None:
        """End the connection under its waiting thread. Any thread; idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more, as wanted

    def linger(self) -> None:
        """Send no more, and wait a moment for the peer to have read the last message. Never raises.

        A connection that is closed over unread bytes is reset, and sent bytes are lost with it.
        """
        said = memoryview(bytearray(LINGER_BYTES))
        self.deadline = Deadline(LINGER_S)
        try:
            self._sock.shutdown(socket.SHUT_WR)
            while said:
                self._wait_for(1)
                said = said[self._receive_some([said]) :]
        except (OSError, KvpoolError):
            pass  # it has gone, as it should, or continues to send

    def reset(self) -> None:
        """Close, and drop bytes that were sent and not yet received. Otherwise like `close`."""
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
        except OSError:
            pass  # closed already
        self.close()

    def close(self) -> None:
        """Idempotent; only by the thread that uses the stream, or after it has ended."""
        self._sock.close()


def _batch(buffers: list[memoryview], at: int) -> Sequence[memoryview]:
    """The part of the buffers from `at` on for one call."""
    first = buffers[at]
    if len(first) > CALL_BYTES:
        return [first[:CALL_BYTES]]
    end, size = at, 0
    for buffer in buffers[at : at + IOV_MAX]:
        size += len(buffer)
        if size > CALL_BYTES + SLACK_BYTES:
            break
        end += 1
    return buffers[at:end]
