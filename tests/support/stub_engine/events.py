"""Publishes KV events as vLLM does: batches on a stream, and a second socket that repeats them when asked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

KEPT = 10_000
END = b"\xff" * 8


class EventPublisher:
    """Binds `endpoint`, and `replay` if that is given. Addresses as ZeroMQ has them; port 0 is none.

    `publish` is for one thread; another one, of its own, repeats. `close` ends both sockets.
    """

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._seq = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._pub = self._bind(zmq.PUB, endpoint)
        self._thread: threading.Thread | None = None
        if replay:
            router = self._bind(zmq.ROUTER, replay)
            self._thread = threading.Thread(target=self._repeat, args=(router,), daemon=True)
            self._thread.start()

    def _bind(self, kind: zmq.SocketType, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        return socket

    def publish(
        self, events: Sequence[dict[str, object]], *, lost: bool = False, forgotten: bool = False
    ) -> None:
        """One batch. lost: nobody hears it, though a replay repeats it; forgotten: not even that."""
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        seq, self._seq = self._seq, self._seq + 1
        if not forgotten:
            self._kept.append((seq, payload))
        if not (lost or forgotten):
            self._pub.send_multipart((self._topic, seq.to_bytes(8, "big"), payload))

    def close(self) -> None:
        self._pub.close()
        # Ends the other thread's wait; it closes its socket itself.
        self._context.term()
        if self._thread is not None:
            self._thread.join()

    def _repeat(self, router: zmq.Socket[bytes]) -> None:
        try:
            while True:
                client, _, start = router.recv_multipart()
                first = int.from_bytes(start, "big")
                for seq, payload in list(self._kept):
                    if seq >= first:
                        number = seq.to_bytes(8, "big")
                        router.send_multipart((client, b"", self._topic, number, payload))
                router.send_multipart((client, b"", b"", END, b""))
        except zmq.ContextTerminated:
            router.close()
