"""LMCache's real types, servers and benches over a real daemon."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    OMP_NUM_THREADS="1", LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_DISABLE_BANNER="1"
)

with warnings.catch_warnings():
    # LMCache and what it imports warn of their own deprecations as they are imported.
    warnings.simplefilter("ignore")
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L2AdapterListener
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
    from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.platform import consume_fd

    import kvpool.engine_plugins.lmcache.adapter  # noqa: F401

from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S, until

MODEL = "test/model"
SHAPE = (2, 8, 64, 32)
NBYTES = 2 * 8 * 64 * 32 * 2
_epochs = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LMCache warns of its own deprecations; they are not ours to fail on."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("default::DeprecationWarning"), append=False)


def spec(socket: str, **params: Any) -> dict[str, Any]:
    """As given to `--l2-adapter`."""
    return {
        "type": "plugin",
        "module_path": "kvpool.engine_plugins.lmcache",
        "class_name": "KvpoolL2Adapter",
        "adapter_params": {"socket": socket, "request_timeout_s": PATIENCE_S, **params},
    }


class Recorded(L2AdapterListener):
    """What the adapter tells LMCache's eviction and events."""

    def __init__(self) -> None:
        self.stored: list[tuple[Any, int]] = []
        self.accessed: list[Any] = []
        self.deleted: list[Any] = []

    def on_l2_keys_stored(self, keys: Any, sizes: Any) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: Any) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: Any) -> None:
        self.deleted += keys


class Kit:
    """LMCache's side of an adapter: keys, objects, and waits as its controllers have them.

    The bytes of an object follow from its key and layout alone, whoever stores it.
    """

    NBYTES = NBYTES
    MODEL = MODEL
    SHAPE = SHAPE
    Recorded = Recorded

    @staticmethod
    def key(number: int, **fields: Any) -> Any:
        named = {
            "chunk_hash": number.to_bytes(32, "big"),
            "model_name": MODEL,
            "kv_rank": 0x01000100,
        }
        return ObjectKey(**(named | fields))

    def keys(self, numbers: Sequence[int], **fields: Any) -> list[Any]:
        return [self.key(number, **fields) for number in numbers]

    @staticmethod
    def layout(shape: Sequence[int] = SHAPE, dtype: Any = torch.float16) -> Any:
        return MemoryLayoutDesc([torch.Size(shape)], [dtype])

    @staticmethod
    def empty(shape: Sequence[int] = SHAPE, dtype: Any = torch.float16) -> Any:
        """An object of LMCache's memory, filled with what no stored one has."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return TensorMemoryObj(
            torch.full((nbytes,), 0xEE, dtype=torch.uint8),
            MemoryObjMetadata(
                shape=torch.Size(shape),
                dtype=dtype,
                address=0,
                phy_size=nbytes,
                ref_count=1,
                fmt=MemoryFormat.KV_2LTD,
                shapes=[torch.Size(shape)],
                dtypes=[dtype],
            ),
            parent_allocator=None,
        )

    def content(self, key: Any, nbytes: int = NBYTES) -> bytes:
        named = (key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt, nbytes)
        return hashlib.shake_128(repr(named).encode()).digest(nbytes)

    def full(self, key: Any, **layout: Any) -> Any:
        made = self.empty(**layout)
        made.raw_data.copy_(
            torch.frombuffer(bytearray(self.content(key, made.get_size())), dtype=torch.uint8)
        )
        return made

    # ---- what its controllers do -----------------------------------------------------------------

    @staticmethod
    def await_result(fd: int, take: Callable[[], Any]) -> Any:
        """Poll the descriptor, consume it, ask for the result; as often as it is needed."""
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        while (found := take()) is None:
            assert poller.poll(PATIENCE_S * 1000), "no task has ended"
            consume_fd(fd)
        return found

    def store(self, adapter: Any, keys: Sequence[Any], **layout: Any) -> Any:
        """LMCache's result of storing the keys' own bytes."""
        objects = [self.full(key, **layout) for key in keys]
        task = adapter.submit_store_task(list(keys), objects)
        ended: dict[int, Any] = {}

        def take() -> Any:
            ended.update(adapter.pop_completed_store_tasks())
            return ended.get(task)

        return self.await_result(adapter.get_store_event_fd(), take)

    def look_up(
        self, adapter: Any, keys: Sequence[Any], layouts: dict[int, Any] | None = None
    ) -> list[int]:
        """Which of them are found, and locked."""
        told = {0: self.layout()} if layouts is None else layouts
        task = adapter.submit_lookup_and_lock_task(list(keys), told)
        fd = adapter.get_lookup_and_lock_event_fd()
        found = self.await_result(fd, lambda: adapter.query_lookup_and_lock_result(task))
        assert adapter.query_lookup_and_lock_result(task) is None
        assert len(found) == len(keys)
        return list(found.get_indices_list())

    def load(self, adapter: Any, keys: Sequence[Any], **layout: Any) -> list[int]:
        """Which of them are loaded; each has the right bytes, and all others what they had."""
        objects = [self.empty(**layout) for _ in keys]
        task = adapter.submit_load_task(list(keys), objects)
        loaded = self.await_result(
            adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)
        )
        assert adapter.query_load_result(task) is None
        indices = list(loaded.get_indices_list())
        for index in indices:
            made = objects[index]
            assert bytes(made.byte_array) == self.content(keys[index], made.get_size()), (
                "wrong bytes"
            )
        return indices

    def cycle(self, adapter: Any, keys: Sequence[Any]) -> list[int]:
        """Which of them LMCache gets by a lookup, a load of what was found, and an unlock."""
        found = self.look_up(adapter, keys)
        loaded = self.load(adapter, [keys[index] for index in found])
        adapter.submit_unlock([keys[index] for index in found])
        return [found[at] for at in loaded]


@pytest.fixture(scope="session", name="kit")
def kit_fixture() -> Kit:
    return Kit()


@pytest.fixture(name="spec", scope="session")
def spec_fixture() -> Callable[..., dict[str, Any]]:
    return spec


@pytest.fixture
def attach() -> Iterator[Callable[..., Any]]:
    """Adapters made as LMCache makes its plugins; closed with the test."""
    made = []

    def begin(daemon: Any, **params: Any) -> Any:
        socket = daemon if isinstance(daemon, str) else daemon.socket
        config = PluginL2AdapterConfig.from_dict(spec(socket, **params))
        made.append(create_l2_adapter_from_registry(config))
        return made[-1]

    yield begin
    for adapter in made:
        adapter.close()


@pytest.fixture(scope="module")
def shared(start_one: Any) -> Iterator[Any]:
    """One daemon for the tests of a file."""
    with start_one("--memory", "64MiB") as daemon:
        yield daemon


@pytest.fixture
def adapter(shared: Any, attach: Callable[..., Any]) -> Any:
    """On that daemon, with namespaces of its own."""
    return attach(shared, epoch=f"test-{next(_epochs)}")


class Server:
    """An `lmcache server` with the adapter."""

    def __init__(self, process: subprocess.Popen[bytes], rpc: int, http: int, log: Path) -> None:
        self.process = process
        self.rpc = f"tcp://127.0.0.1:{rpc}"
        self.http = f"http://127.0.0.1:{http}"
        self.log = log

    def ask(self, path: str, *, post: bool = False) -> Any:
        request = urllib.request.Request(self.http + path, method="POST" if post else "GET")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            return bool(self.ask("/status")["is_healthy"])
        return False

    def idle(self) -> bool:
        """Whether it has stored and loaded all that it was to."""
        manager = self.ask("/status")["storage_manager"]
        return all(
            one["in_flight_task_count"] == 0 and one["pending_keys_count"] == 0
            for one in manager["store_controllers"].values()
        )

    def clear(self) -> None:
        """Its own memory."""
        until(self.idle, "all is stored")
        self.ask("/cache/clear", post=True)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Any], Server]]:
    """Starts servers, each with the adapter at a daemon; all end with the test."""
    with contextlib.ExitStack() as stack:

        def begin(daemon: Any) -> Server:
            rpc, http = free_port(), free_port()
            log = tmp_path / f"server-{rpc}.log"
            with log.open("wb") as said:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "lmcache.cli.main", "server"),
                        *("--host", "127.0.0.1", "--port", str(rpc), "--http-port", str(http)),
                        *("--l1-size-gb", "0.1", "--chunk-size", "64", "--eviction-policy", "LRU"),
                        *("--supported-transfer-mode", "auto"),
                        *("--l2-adapter", json.dumps(spec(daemon.socket))),
                    ],
                    stdout=said,
                    stderr=said,
                    env={**os.environ, "HOME": str(tmp_path)},
                )
            stack.callback(_end, process)
            server = Server(process, rpc, http, log)
            until(server.answers, "the server is ready", seconds=3 * PATIENCE_S)
            return server

        yield begin


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
