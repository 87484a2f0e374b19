"""The gateway's process: `python -m kvpool.admin FD PARENT`, started by a daemon (`kvpool.daemon.workers.gateway`).

FD is its end of the control channel, from which its settings come, and whose end is its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys

import msgspec
import uvloop

from kvpool.errors import KvpoolError, ProtocolError
from kvpool.net import raise_descriptor_limit
from kvpool.security.failed_logins import Failures
from kvpool.signals import ignore_ending
from kvpool.telemetry import logs
from kvpool.wire import frame
from kvpool.wire import worker as worker_wire

START_S = 60.0
READ_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Until the daemon ends, or closes the channel."""
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    ignore_ending()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    channel = socket.socket(fileno=fd)
    request, start = _first(channel)
    logs.setup_worker("gateway")
    raise_descriptor_limit()
    with channel, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(channel, request, start))


def _first(channel: socket.socket) -> tuple[int, worker_wire.GatewayStart]:
    """What the daemon says first."""
    channel.settimeout(START_S)
    reader = frame.FrameReader()
    frames: list[tuple[int, bytes]] = []
    while not frames:
        data = channel.recv(READ_BYTES)
        if not data:
            sys.exit(0)
        frames = reader.feed(data)
    request, payload = frames[0]
    start = worker_wire.decode_gateway(payload)
    if not isinstance(start, worker_wire.GatewayStart):
        raise ProtocolError("the first frame of a gateway's channel must be a GatewayStart")
    return request, start


async def _serve(channel: socket.socket, request: int, start: worker_wire.GatewayStart) -> None:
    from kvpool.admin.gateway import Gateway

    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    try:
        gateway = Gateway(start, lambda failures: _tell(channel, failures))
        urls = await gateway.start()
    except KvpoolError as error:
        await loop.sock_sendall(channel, frame.encode(frame.error_message(error), request))
        return
    await loop.sock_sendall(channel, frame.encode(frame.Bytes(msgspec.json.encode(urls)), request))
    try:
        # The daemon says nothing more: what can be read is the end.
        await loop.sock_recv(channel, READ_BYTES)
    finally:
        await gateway.close()


def _tell(channel: socket.socket, failures: Failures) -> None:
    """Tell the daemon of failed logins; if it does not read, these are not told."""
    framed = frame.encode(worker_wire.LoginsFailed(failures), 0)
    try:
        if channel.send(framed) < len(framed):
            channel.shutdown(socket.SHUT_RDWR)  # half a frame: the daemon starts another gateway
    except OSError:
        pass


if __name__ == "__main__":
    main()
