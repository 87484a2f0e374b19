"""TransferQueue over kvpool's `mooncake.store`, driven by lines of JSON: no line of it is changed, and no Ray runs.

Reads requests from standard input, one a line, and writes one answer to each. What is stored under a key is a function
of the key, whose first part names the kind of value, and of a seed: so another process knows what it must read.

    {"do": "put", "keys": [...], "seed": 1}                 ->  {"meta": [...]}    for `get`
    {"do": "get", "keys": [...], "seed": 1, "meta": [...]}  ->  {"same": [...]}    whether each value is that of the seed
    {"do": "get_as", "keys": [...], "shape": [...]}         ->  {}                 as float32 tensors of that shape
    {"do": "clear", "keys": [...]}                          ->  {}
    {"do": "serve"}                                         ->  {"queue": "..."}   starts a queue's controller
    {"do": "join", "queue": "..."}                          ->  {}                 a client of that queue, for the next:
    {"do": "queue_put", "seed": 1}                          ->  {}                 rows of several fields
    {"do": "queue_get", "seed": 1}                          ->  {"same": {...}}    for each field, whether the rows are
    {"do": "queue_clear"}                                   ->  {}                 the rows that were put here

An error that TransferQueue raises is {"error": "..."}.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.engine_plugins.mooncake import install

install()

# ruff: noqa: E402 - what follows imports `mooncake.store`
import numpy as np
import ray
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import TransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.storage.clients import StorageClientFactory

CONFIG = {
    "local_hostname": "localhost",
    "metadata_server": "nobody:1",
    "master_server_address": "nobody:1",
}
ROWS = 6
PARTITION, TASK = "train", "update"


def text(random: np.random.Generator) -> str:
    return "слово " * int(random.integers(1, 400)) + random.bytes(4).hex()


def tensor(random: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape, np.float32))


KINDS: dict[str, Callable[[np.random.Generator], Any]] = {
    "float32": lambda random: tensor(random, 3, 5),
    "bfloat16": lambda random: tensor(random, 300, 300).bfloat16(),
    "int64": lambda random: torch.from_numpy(random.integers(-9, 9, 1000)),
    "bool": lambda random: tensor(random, 77) > 0,
    "scalar": lambda random: tensor(random, 1)[0],
    "empty": lambda random: tensor(random, 0, 5),
    "not contiguous": lambda random: tensor(random, 40, 30).t()[1::2],
    "of chunks": lambda random: tensor(random, 3, 400, 1000),
    "mebibyte": lambda random: tensor(random, 1 << 18),
    "text": text,
    "number": lambda random: int(random.integers(1 << 60)),
    "bytes": lambda random: random.bytes(70_000),
    "array": lambda random: random.integers(0, 255, (20, 30), np.uint8),
    "tree": lambda random: {
        "reward": float(random.random()),
        "turns": [text(random), None, {"logits": tensor(random, 2, 900)}],
    },
}


def value(key: str, seed: int) -> Any:
    return KINDS[key.partition("/")[0]](np.random.default_rng([seed, *key.encode()]))


def same(got: Any, wanted: Any) -> bool:
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor):
        return got.dtype == wanted.dtype and torch.equal(got, wanted)
    if isinstance(wanted, np.ndarray):
        return got.dtype == wanted.dtype and np.array_equal(got, wanted)
    if isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(same, got, wanted))
    return bool(got == wanted)


def rows(seed: int) -> dict[str, list[Any]]:
    """A batch as TransferQueue has it: tensors of one shape, of several, and objects."""
    random = np.random.default_rng(seed)
    return {
        "logits": [tensor(random, 4, 50) for _ in range(ROWS)],
        "response": [torch.arange(length) + seed for length in random.integers(1, 900, ROWS)],
        "reward": [tensor(random, 1) for _ in range(ROWS)],
        "prompt": [KINDS["tree"](random) if row % 2 else text(random) for row in range(ROWS)],
    }


def rows_of(field: Any) -> list[Any]:
    """Nested tensors give their rows by `unbind` alone, and objects by iteration."""
    return list(field.unbind()) if isinstance(field, torch.Tensor) else list(field)


class Process:
    """One client of the storage, and one of a queue if it was told to join."""

    def __init__(self) -> None:
        self.storage = StorageClientFactory.create("MooncakeStoreClient", dict(CONFIG))
        self.controller: Any = None
        self.queue: Any = None
        self.put_last: Any = None

    def put(self, keys: Sequence[str], seed: int) -> dict[str, Any]:
        return {"meta": self.storage.put(keys, [value(key, seed) for key in keys])}

    def get(self, keys: Sequence[str], seed: int, meta: list[Any]) -> dict[str, Any]:
        wanted = [value(key, seed) for key in keys]
        tensors = [one if isinstance(one, torch.Tensor) else None for one in wanted]
        got = self.storage.get(
            keys,
            [None if one is None else one.shape for one in tensors],
            [None if one is None else one.dtype for one in tensors],
            meta,
        )
        return {"same": list(map(same, got, wanted))}

    def get_as(self, keys: Sequence[str], shape: list[int]) -> dict[str, Any]:
        self.storage.get(keys, [shape] * len(keys), [torch.float32] * len(keys))
        return {}

    def clear(self, keys: Sequence[str]) -> dict[str, Any]:
        self.storage.clear(keys)
        return {}

    def serve(self) -> dict[str, Any]:
        # Ray runs this class in an actor; it has threads and sockets of its own.
        self.controller = TransferQueueController.__ray_metadata__.modified_class()
        packed = pickle.dumps(self.controller.get_zmq_server_info())
        return {"queue": base64.b64encode(packed).decode()}

    def join(self, queue: str) -> dict[str, Any]:
        self.queue = TransferQueueClient(
            f"client-{os.getpid()}", pickle.loads(base64.b64decode(queue))
        )
        self.queue.initialize_storage_manager("MooncakeStore", dict(CONFIG))
        return {}

    def queue_put(self, seed: int) -> dict[str, Any]:
        made = rows(seed)
        batch = TensorDict(
            {
                "logits": torch.stack(made["logits"]),
                "response": torch.nested.as_nested_tensor(made["response"], layout=torch.jagged),
                "reward": torch.stack(made["reward"]),
                "prompt": NonTensorStack(*made["prompt"]),
            },
            batch_size=ROWS,
        )
        self.put_last = self.queue.put(batch, partition_id=PARTITION)
        return {}

    def queue_get(self, seed: int) -> dict[str, Any]:
        wanted = rows(seed)
        meta = self.queue.get_meta(
            data_fields=list(wanted),
            batch_size=ROWS,
            partition_id=PARTITION,
            mode="fetch",
            task_name=TASK,
        )
        got = self.queue.get_data(meta)
        return {"same": {field: same(rows_of(got[field]), wanted[field]) for field in wanted}}

    def queue_clear(self) -> dict[str, Any]:
        self.queue.clear_samples(self.put_last)
        return {}

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
        self.storage.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # TransferQueue logs
    process = Process()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(process, request.pop("do"))(**request)
        except RuntimeError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)
    process.close()
    assert not ray.is_initialized()


if __name__ == "__main__":
    main()
