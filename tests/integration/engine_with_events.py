"""An engine, as far as others see it: a client of the pool that publishes KV events. Obeys standard input.

`engine_with_events.py SOCKET ENDPOINT`: one command a line, answered by a line when it is done.

    stored N...  removed N...  cleared     events of its cache
    match N...                             name keys to the daemon
    reset                                  as with new weights: its cache is emptied first
    stop                                   have the daemon follow no more; the process lives on
"""

import sys

from kvpool.client import Client
from kvpool.types import NamespaceRecord
from tests.support.stub_engine.events import EventPublisher
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("cluster", block_bytes=32 << 10, block_tokens=16)


def say(answer: object) -> None:
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def main() -> None:
    socket, endpoint = sys.argv[1:]
    publisher = EventPublisher(endpoint, f"{endpoint}.replay", "kv")
    client = Client(socket, timeout_s=PATIENCE_S)
    ns = client.open(RECORD)
    where = {"replay": f"{endpoint}.replay", "topic": "kv", "groups": [0]}
    say(client.engine.follow_events(ns, endpoint, **where))
    for line in sys.stdin:
        command, *words = line.split()
        numbers = [int(word) for word in words]
        answer = "done"
        if command == "match":
            answer = str(client.match(ns, [key(number) for number in numbers]))
        elif command == "reset":
            publisher.publish([{"type": "AllBlocksCleared"}])
            client.namespaces.reset(ns)
        elif command == "stop":
            answer = str(client.engine.follow_events(ns, ""))
        elif command == "cleared":
            publisher.publish([{"type": "AllBlocksCleared"}])
        else:
            kind = {"stored": "BlockStored", "removed": "BlockRemoved"}[command]
            event = {"type": kind, "block_hashes": numbers, "medium": "GPU", "group_idx": 0}
            publisher.publish([event | {"parent_block_hash": 1} if command == "stored" else event])
        say(answer)


if __name__ == "__main__":
    main()
