"""Traffic as of engines, so that a local cluster has something to show: prompts of two models, some asked for again."""

from __future__ import annotations

import hashlib
import math
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool.errors import KvpoolError
from kvpool.types import EngineRecord, NamespaceRecord
from tests.support.local_cluster import LocalNode

MODELS = {"meta-llama/Llama-3.1-70B-Instruct": 96, "Qwen/Qwen3-32B": 40}  # blocks of a prompt
BLOCK_BYTES = 256 << 10
PROMPTS = 24  # that are asked for again and again, of each model
TURN_S = 0.25
PATIENCE_S = 1.0


@contextmanager
def traffic(nodes: Sequence[LocalNode]) -> Iterator[None]:
    """Use each node from a thread of its own, until the end."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=use, args=(node, number, stop)) for number, node in enumerate(nodes)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def key(model: int, prompt: int, block: int) -> bytes:
    return hashlib.sha256(f"{model} {prompt} {block}".encode()).digest()[:16]


def use(node: LocalNode, number: int, stop: threading.Event) -> None:
    """What the engines of one node do: read a prompt, and write what was not found of it. Some prompts more than others."""
    choose = random.Random(number)
    client = node.client(connect=True)
    spaces = []
    for model in MODELS:
        record = NamespaceRecord.simple(model, block_bytes=BLOCK_BYTES, block_tokens=16)
        spaces.append(client.open(record))
    serves = number % len(MODELS)
    url = f"http://10.20.0.{10 + number}:8000"
    client.engine.announce(spaces[serves], EngineRecord(url, model=list(MODELS)[serves]))
    data = choose.randbytes(BLOCK_BYTES)
    begun = time.monotonic()
    said = False
    while not stop.wait(TURN_S * choose.expovariate(1)):
        busy = 0.55 + 0.45 * math.sin((time.monotonic() - begun) / 35 + number)
        if choose.random() > busy:
            continue
        which = choose.choices(range(len(MODELS)), [3, 1])[0]
        blocks = list(MODELS.values())[which]
        # A prompt begins as one that was there before, and ends as none was.
        old = min(PROMPTS - 1, int(choose.expovariate(0.25)))
        shared = choose.randint(blocks // 2, blocks)
        fresh = choose.getrandbits(31) | 1 << 31
        keys = [key(which, old if n < shared else fresh, n) for n in range(blocks)]
        try:
            lease = client.acquire(spaces[which], keys, wait_s=PATIENCE_S)
            found = 0 if lease is None else lease.blocks
            if lease is not None:
                with lease:
                    for slots in lease.slots.values():
                        for at in range(len(slots)):
                            bytes(slots.view(at))
            if found < blocks:
                client.put(spaces[which], keys, [data] * blocks)
            said = False
        except KvpoolError as error:
            if not said:
                print(f"traffic of node {node.name}: {error}", file=sys.stderr)
            said = True
    client.close()
