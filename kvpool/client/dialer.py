"""Opening a connection to the daemon: which socket, and as whom. Internal to `kvpool.client`."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from functools import partial

from kvpool.client.connection import timeval
from kvpool.errors import ProtocolError, Unavailable
from kvpool.memory.peer_process import check_owner
from kvpool.wire import client as client_wire
from kvpool.wire import frame


@dataclass(eq=False)
class Dialer:
    """Dials, and says who the client is. Thread-safe.

    operator_socket: dialled first, where this process can open it.
    """

    socket_path: str
    operator_socket: str | None
    tenant: str
    token: str | None
    instance: str
    operator_token: str
    client_id: str = field(default_factory=partial(secrets.token_hex, 16))

    def introduce(
        self, sock: socket.socket, timeout_s: float, *, device: bool
    ) -> tuple[bytes, list[int]]:
        """The daemon's answer, and the descriptors that came with it. Raises `OSError`, and `NotAuthenticated` for
        somebody else who listens there.
        """
        limit = timeval(timeout_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._dial(sock)
        hello = client_wire.Hello(
            frame.PROTOCOL_VERSION,
            self.tenant,
            self.instance,
            self.client_id,
            self.token,
            self.operator_token,
            device,
        )
        try:
            sock.sendall(frame.encode(hello, 1))
        except BrokenPipeError:
            pass  # refused; the reason can be read
        data, fds, _, _ = socket.recv_fds(sock, frame.HELLO_BYTES_MAX, 2)
        for fd in fds:
            os.set_inheritable(fd, False)  # `recv_fds` drops the flag that would set it
        return data, fds

    def _dial(self, sock: socket.socket) -> None:
        """An operator's connection goes to the operators' socket, where this process can open one."""
        if self.operator_socket is not None:
            try:
                sock.connect(self.operator_socket)
            except (FileNotFoundError, ConnectionRefusedError, PermissionError):
                pass  # the caller may be no operator: the daemon says so when it matters
            else:
                check_owner(sock, self.operator_socket)
                return
        sock.connect(self.socket_path)
        check_owner(sock, self.socket_path)


def welcome_of(data: bytes, fds: list[int]) -> client_wire.Welcome:
    """The daemon's first answer. Raises its error, `Unavailable` or `ProtocolError`."""
    frames = frame.FrameReader(frame.HELLO_BYTES_MAX).feed(data)
    if not frames:
        raise Unavailable("the daemon closed the connection before its Welcome")
    welcome = client_wire.decode_daemon(frames[0][1])
    if type(welcome) is frame.Error:
        frame.raise_error(welcome)
    if type(welcome) is client_wire.Welcome:
        frame.agree(welcome.version, welcome.version, "the daemon")
    if type(welcome) is not client_wire.Welcome or len(fds) != 1 + bool(welcome.device):
        raise ProtocolError("the daemon's first answer is not a Welcome with a segment")
    return welcome
