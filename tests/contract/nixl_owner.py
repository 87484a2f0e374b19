"""An owner that drives UCX for some loans, and does nothing for those who read the others: run by tests.

Its memory can be read over UCX's tcp lane only while it drives UCX. Its argument has a 1 or a 0 for each loan;
after these it does nothing. Writes its URL; ends with its stdin.
"""

import contextlib
import mmap
import socket
import sys
import threading
from collections.abc import Iterator

from kvpool.errors import Unavailable
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity
from kvpool.transfer.handshake import admit
from kvpool.transfer.memory import Memory
from kvpool.transfer.nixl_agent import Agent
from kvpool.transfer.stream import Stream
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from tests.contract.suites.transport import SECRET

NBYTES = 1 << 20


def serve(listener: socket.socket, agent: Agent, driven: Iterator[str]) -> None:
    while True:
        sock, _ = listener.accept()
        try:
            converse(Stream(sock, Deadline(60)), agent, driven)
        except Unavailable:
            pass  # the reader has left


def converse(stream: Stream, agent: Agent, driven: Iterator[str]) -> None:
    admit(stream, Identity("test", "owner", "1", ClusterSecrets.of(SECRET)))
    while True:
        request, payload = stream.receive(1 << 20)
        message = peer_wire.decode_peer(payload)
        if isinstance(message, peer_wire.Corrupt):
            continue
        count = sum(len(part.keys) // 16 for part in message.parts)
        rows = b"".join(row.to_bytes(4, "little") for row in range(count))
        where = (rows, agent.place(0, Deadline(60)), NBYTES, agent.name, 1)
        with agent.serving() if next(driven, "0") == "1" else contextlib.nullcontext():
            stream.send(peer_wire.Readable(b"\1" * count, bytes(16 * count), *where), request)
            while not isinstance(message, peer_wire.Taken):
                request, payload = stream.receive(1 << 20)
                message = peer_wire.decode_peer(payload)
                if isinstance(message, peer_wire.Describe):
                    stream.send(frame.Bytes(agent.describe(Deadline(60))), request)


memory = Memory()
memory.attach(0, mmap.mmap(-1, 64 * NBYTES))
owner = Agent("owner", memory)
owner.start(loopback=True)
server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(server, owner, iter(sys.argv[1])), daemon=True).start()
sys.stdout.write(f"nixl://127.0.0.1:{server.getsockname()[1]}\n")
sys.stdout.flush()
sys.stdin.read()
