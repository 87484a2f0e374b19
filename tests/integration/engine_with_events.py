"""An engine, as far as others see it: a client of the pool that publishes KV events. Obeys standard input.

`engine_with_events.py SOCKET ENDPOINT`: one command a line, answered by a line when it is done.

    stored N...  removed N...  cleared     events of its cache
    match N...                             name keys to the daemon
    reset                                  as with new weights: its cache is emptied first
    stop                                   have the daemon follow no more; the process lives on
"""

import sys
import threading
import time
from collections import deque

import msgspec
import zmq

from kvpool.client import Client
from kvpool.types import NamespaceRecord

RECORD = NamespaceRecord.simple("cluster", block_bytes=32 << 10, block_tokens=16)


def say(answer: object) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Publisher:
    """What vLLM has: a publisher, and another socket on which it repeats."""

    def __init__(self, endpoint: str) -> None:
        context = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(f"{endpoint}.replay")
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=1000)
        threading.Thread(target=self._repeat, daemon=True).start()

    def publish(self, event: dict[str, object]) -> None:
        payload = msgspec.msgpack.encode([time.time(), [event], 0])
        seq = self._sent[-1][0] + 1 if self._sent else 0
        self._sent.append((seq, payload))
        self._pub.send_multipart((b"kv", seq.to_bytes(8, "big"), payload))

    def _repeat(self) -> None:
        while True:
            client, _, start = self._router.recv_multipart()
            for seq, payload in list(self._sent):
                if seq >= int.from_bytes(start, "big"):
                    number = seq.to_bytes(8, "big")
                    self._router.send_multipart((client, b"", b"kv", number, payload))
            self._router.send_multipart((client, b"", b"", b"\xff" * 8, b""))


def main() -> None:
    socket, endpoint = sys.argv[1:]
    publisher = Publisher(endpoint)
    client = Client(socket, timeout_s=10.0)
    ns = client.open(RECORD)
    where = {"replay": f"{endpoint}.replay", "topic": "kv", "groups": [0]}
    say(client.follow_events(ns, endpoint, **where))
    for line in sys.stdin:
        command, *words = line.split()
        numbers = [int(word) for word in words]
        answer = "done"
        if command == "match":
            answer = str(client.match(ns, [key(number) for number in numbers]))
        elif command == "reset":
            publisher.publish({"type": "AllBlocksCleared"})
            client.reset(ns)
        elif command == "stop":
            answer = str(client.follow_events(ns, ""))
        elif command == "cleared":
            publisher.publish({"type": "AllBlocksCleared"})
        else:
            kind = {"stored": "BlockStored", "removed": "BlockRemoved"}[command]
            event = {"type": kind, "block_hashes": numbers, "medium": "GPU", "group_idx": 0}
            publisher.publish(event | {"parent_block_hash": 1} if command == "stored" else event)
        say(answer)


if __name__ == "__main__":
    main()
