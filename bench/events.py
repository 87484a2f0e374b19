"""What a stream of KV events costs the daemon's loop, for each block that comes or goes.

    .venv/bin/python bench/events.py [--blocks N]

The rules of a node and a publisher with one reader that does not read, in this process: blocks are put and removed, and their
changes taken and published as the daemon does. Only that is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

import numpy as np
import zmq

from kvpool.config.tables import StreamConfig
from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.event_publisher import SLICE_BLOCKS, EventPublisher, Stream
from kvpool.storage.eviction import policy_maker
from kvpool.types import KEY_BYTES, NamespaceRecord, split_keys

NBYTES = 4096
CHAIN = 32
ROUNDS = 5


def publish(publisher: EventPublisher, node: Node) -> float:
    """Seconds to take and publish what has changed."""
    begun = time.perf_counter()
    for namespace, keys in node.inventory.take_changes():
        for at in range(0, len(keys), SLICE_BLOCKS):
            publisher.look("dram", node.inventory, namespace, keys[at : at + SLICE_BLOCKS])
    return time.perf_counter() - begun


def put(node: Node, holder: Holder, namespace: NamespaceState, packed: bytes) -> None:
    for at in range(0, len(packed), CHAIN * KEY_BYTES):
        keys = split_keys(packed[at : at + CHAIN * KEY_BYTES])
        ticket = at + 1
        _, rows = node.puts.reserve(holder, namespace, 0, ticket, keys, b"")
        node.puts.commit(holder, ticket, bytes(16) * (len(rows) // 4), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32_768)
    blocks = parser.parse_args().blocks
    node = Node(make_policy=policy_maker("aged"))
    node.inventory.follow_changes()
    tenant = node.add_tenant("default", 0, 2 * blocks * NBYTES)
    holder = node.holders.add("default", "bench")
    record = NamespaceRecord.simple("bench", block_bytes=NBYTES, block_tokens=16)
    namespace = node.namespaces.open(tenant, record.digest(), record.canonical(), record.parts)
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/events"
        stream = Stream(StreamConfig("one", "bench", endpoint), "n", 0o600, 1, time.time)
        reader = context.socket(zmq.SUB)
        reader.linger = 0
        reader.subscribe(b"")
        reader.connect(endpoint)
        publisher = EventPublisher((), "n", 0o600, {}, time.time)
        publisher.streams.append(stream)
        stored, removed = [], []
        for number in range(ROUNDS):
            packed = np.random.default_rng(number).bytes(blocks * KEY_BYTES)
            put(node, holder, namespace, packed)
            stored.append(publish(publisher, node))
            assert len(stream.blocks) == blocks
            node.removal.remove(namespace, split_keys(packed))
            removed.append(publish(publisher, node))
            assert len(stream.blocks) == 0
        stream.close()
        reader.close()
    for what, seconds in (("stored", stored), ("removed", removed)):
        each = sorted(seconds)[ROUNDS // 2] / blocks * 1e6
        sys.stdout.write(f"{what}: {each:.2f} us a block, of {blocks}\n")


if __name__ == "__main__":
    main()
