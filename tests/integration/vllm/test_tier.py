"""The tier of vLLM's `TieringOffloadingSpec`: vLLM's real manager, its memory for offloading, and real daemons.

vLLM offloads nothing on CPUs, so no engine runs here: the tests do what its scheduler does, and what its workers would copy
into the memory for offloading they write there themselves. What a chunk has to hold follows from its key alone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import KVEventsConfig, KVTransferConfig, LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvpool.client import Client
from kvpool.engine_plugins.vllm.tier import KvpoolTier, pool_key
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.signals import send

BLOCK = 32
CHUNKS = 64
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def chain(seed: int, length: int, group: int = 0) -> list[OffloadKey]:
    """Keys of a prompt's chunks."""
    rng = np.random.default_rng(seed)
    return [make_offload_key(rng.bytes(32), group) for _ in range(length)]


def content(key: OffloadKey, nbytes: int) -> np.ndarray[Any, Any]:
    """What a chunk holds."""
    rng = np.random.default_rng(list(key))
    return np.frombuffer(rng.bytes(nbytes), np.uint8)


class Offloading:
    """An engine's scheduler as far as offloading goes, with one tier in the pool."""

    def __init__(self, spec: Any) -> None:
        self.manager = spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        assert type(self.tier) is KvpoolTier
        self._view = self.manager.primary_tier.get_kv_memoryview()
        self.nbytes = int(self._view.strides[0])
        self._requests = 0

    @property
    def jobs(self) -> Any:
        """The manager's jobs under way."""
        return self.manager._jobs

    @property
    def record(self) -> NamespaceRecord:
        """The record of the namespace that the tier puts chunks into."""
        record: NamespaceRecord = self.tier._store._transfers._record
        return record

    def memory(self) -> np.ndarray[Any, Any]:
        return np.asarray(self._view).view(np.uint8)

    def request(self, keys: Sequence[OffloadKey]) -> ReqContext:
        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * BLOCK)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def idle_after_step(self) -> bool:
        self.step()
        return not self.manager.has_pending_work()

    def settle(self) -> None:
        """Step until no job is under way."""
        until(self.idle_after_step, "all jobs have ended")

    def begin_store(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """As after a step that computed these chunks."""
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None
        memory = self.memory()
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            memory[row] = content(key, self.nbytes)
        self.manager.complete_store(prepared.keys_to_store, context)

    def store(self, keys: Sequence[OffloadKey]) -> None:
        context = self.request(keys)
        self.begin_store(context, keys)
        self.settle()
        self.manager.on_request_finished(context)

    def ask(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What is found in a step."""
        found = [self.manager.lookup(key, context) for key in keys]
        self.step()
        return found

    def look(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        """What is found at last, after as many steps as it takes."""
        found: list[LookupResult] = []

        def known() -> bool:
            found[:] = self.ask(context, keys)
            return all(each in (HIT, MISS) for each in found)

        until(known, "all chunks are there, or known not to be")
        return found

    def load(self, keys: Sequence[OffloadKey]) -> int:
        """How many of the chunks were found, from the first on; all of them must hold what they should."""
        context = self.request(keys)
        found = self.look(context, keys)
        hits = found.index(MISS) if MISS in found else len(found)
        if hits:
            rows = self.manager.prepare_load(keys[:hits], context).chunk_ids
            memory = self.memory()
            for key, row in zip(keys, rows, strict=False):
                assert (memory[row] == content(key, self.nbytes)).all()
            self.manager.complete_load(keys[:hits], context)
        self.manager.on_request_finished(context)
        return hits


def until(condition: Callable[[], Any], what: str) -> None:
    ended = threading.Event()
    for _ in range(18_000):
        if condition():
            return
        ended.wait(0.01)
    raise AssertionError(f"not within 180 s: {what}")


Start = Callable[..., Offloading]


@pytest.fixture
def start(llama: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts the scheduler side of an engine at a daemon's socket."""
    with ExitStack() as stack:

        def begin(
            socket: str,
            *,
            groups: int = 1,
            chunks: int = CHUNKS,
            chunk_blocks: int = 1,
            lora: bool = False,
            **settings: Any,
        ) -> Offloading:
            return stack.enter_context(
                offloading(llama, socket, groups, chunks, chunk_blocks, lora, settings)
            )

        yield begin


@contextmanager
def offloading(
    model: Path,
    socket: str,
    groups: int,
    chunks: int,
    chunk_blocks: int,
    lora: bool,
    settings: dict[str, Any],
) -> Iterator[Offloading]:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=64,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{at}"], spec) for at in range(groups)],
    )
    row_bytes = groups * spec.page_size_bytes
    tier = {
        "type": "KvpoolTier",
        "module_path": "kvpool.engine_plugins.vllm.tier",
        "socket": socket,
        # The defaults are for schedulers that have a core.
        "lookup_timeout_s": 30.0,
        "request_timeout_s": 30.0,
        **settings,
    }
    config = EngineArgs(
        model=str(model),
        block_size=BLOCK,
        enforce_eager=True,
        dtype="float32",
        kv_events_config=KVEventsConfig(enable_kv_cache_events=False, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": chunks * chunk_blocks * row_bytes,
                "blocks_per_chunk": chunk_blocks,
                "secondary_tiers": [tier],
            },
        ),
    ).create_engine_config()
    if lora:
        config.lora_config = LoRAConfig()
    engine = Offloading(OffloadingSpecFactory.create_spec(build_offloading_config(config, cache)))
    try:
        yield engine
    finally:
        engine.manager.shutdown()


def test_another_engine_finds_what_one_has_stored(start: Start, daemon: Any) -> None:
    one, other = start(daemon.socket), start(daemon.socket)
    keys = chain(1, 20)
    one.store(keys)
    assert other.load(keys) == 20
    assert other.load([*keys[:5], *chain(2, 3)]) == 5
    assert other.load(chain(3, 4)) == 0


def test_what_was_pushed_out_of_the_engine_comes_back(start: Start, daemon: Any) -> None:
    engine = start(daemon.socket, chunks=8)
    first, second = chain(11, 8), chain(12, 8)
    engine.store(first)
    engine.store(second)
    assert engine.load(first) == 8
    assert engine.load(second) == 8


def test_groups_of_one_hash_are_apart(start: Start, daemon: Any) -> None:
    one, other = start(daemon.socket, groups=2), start(daemon.socket, groups=2)
    keys = chain(21, 3)
    twins = [make_offload_key(key[:-4], 1) for key in keys]
    one.store([*keys, *twins[:1]])
    assert other.load([*keys, twins[0]]) == 4
    assert other.load(twins) == 1


def test_parents_are_told(start: Start, daemon: Any) -> None:
    """Else the pool could not evict a prompt from its end."""
    engine = start(daemon.socket)
    keys = chain(31, 6)
    context = engine.request(keys)
    engine.begin_store(context, keys[:2])
    engine.begin_store(context, keys[2:])
    engine.settle()
    with Client(daemon.socket) as client:
        opened = client.open(engine.record)
    listed = daemon.client.routing.prefixes(opened.digest, [pool_key(key) for key in keys])
    assert list(listed.values()) == [(6, 6)]


def test_lookups_do_not_wait(start: Start, daemon: Any) -> None:
    """While the daemon is stopped, a lookup is answered all the same."""
    engine = start(daemon.socket, lookup_timeout_s=0.3, request_timeout_s=0.3, load_wait_s=0.0)
    keys = chain(41, 3)
    engine.store(keys)
    asked = chain(42, 3)
    send(daemon.process.pid, signal.SIGSTOP)
    try:
        context = engine.request(asked)
        assert [engine.manager.lookup(key, context) for key in asked] == [RETRY] * 3
        engine.step()
        assert engine.look(context, asked) == [MISS] * 3
        engine.manager.on_request_finished(context)
        engine.store(asked)  # to nowhere
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: start_again(engine, asked), "the daemon is asked again")


def start_again(engine: Offloading, keys: Sequence[OffloadKey]) -> bool:
    context = engine.request(keys)
    found = engine.look(context, keys)
    engine.manager.on_request_finished(context)
    fresh = chain(int.from_bytes(os.urandom(4), "big"), 2)
    engine.store(fresh)
    return found == [HIT] * 3 and bool(engine.tier.present(fresh) == [True] * 2)


@pytest.fixture
def own_daemon(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with kit.run_daemon(tmp_path_factory.mktemp("d"), "64MiB") as running:
        yield running


def test_a_daemon_killed_amid_jobs(
    start: Start,
    kit: Any,
    own_daemon: Any,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(own_daemon.socket, chunks=512)
    kept = chain(51, 200)
    engine.store(kept)
    other = start(own_daemon.socket, chunks=512)
    loading = other.request(kept)
    until(
        lambda: other.ask(loading, kept) and other.jobs,
        "loads are under way",
    )
    prompts = [chain(52 + at, 40) for at in range(6)]
    for keys in prompts:
        engine.begin_store(engine.request(keys), keys)
    own_daemon.kill()
    with caplog.at_level(logging.WARNING, "kvpool.vllm"):
        engine.settle()
        other.settle()
        # Whatever arrived is whole; nothing else is said to be there.
        rows = [key for key in kept if other.manager.lookup(key, loading) is HIT]
        memory = other.memory()
        if rows:
            loaded = other.manager.prepare_load(rows, loading).chunk_ids
            for key, row in zip(rows, loaded, strict=True):
                assert (memory[row] == content(key, other.nbytes)).all()
            other.manager.complete_load(rows, loading)
        assert other.load(chain(60, 3)) == 0
        other.store(chain(61, 3))
    told = [record.getMessage() for record in caplog.records if "tier in the pool" in record.msg]
    assert 1 <= len(told) <= 4  # two engines, two causes
    with kit.run_daemon(tmp_path_factory.mktemp("e"), "64MiB", own_daemon.socket):
        again = chain(62, 5)

        def works() -> bool:
            engine.store(fresh := chain(int.from_bytes(os.urandom(4), "big"), 2))
            return engine.tier.present(fresh) == [True, True]

        until(works, "the engine uses the new daemon")
        engine.store(again)
        assert other.load(again) == 5
        assert other.load(prompts[0]) == 0  # gone with the old one


def test_two_nodes(start: Start, kit: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with kit.run_cluster(tmp_path_factory.mktemp("c"), 2) as (a, b):
        one = start(a.socket)
        keys = chain(71, 12)
        one.store(keys)
        kit.until(a.settled, "the directory knows them")
        other = start(b.socket, load_wait_s=20.0)
        assert other.load(keys) == 12
        a.kill()
        assert other.load(chain(72, 3)) == 0
        another = start(b.socket)
        assert another.load(keys) == 12  # what came to this node has stayed


def test_a_chunk_that_went_before_its_load(start: Start, daemon: Any) -> None:
    one, other = start(daemon.socket), start(daemon.socket, load_wait_s=0.0)
    keys = chain(81, 4)
    one.store(keys)
    context = other.request(keys)

    def found() -> bool:
        other.step()
        return [other.tier.lookup(key, context) for key in keys] == [HIT] * 4

    until(found, "the chunks are found")
    with Client(daemon.socket) as client:
        assert client.remove(client.open(one.record), [pool_key(keys[2])]) == 1
    assert other.look(context, keys) == [HIT, HIT, MISS, HIT]
    other.manager.on_request_finished(context)
    assert other.load(keys) == 2


def test_too_many_jobs(start: Start, daemon: Any) -> None:
    """Further ones fail at once, and are no jobs any more."""
    engine = start(daemon.socket, jobs_max=1, store_threads=1, request_timeout_s=0.3)
    send(daemon.process.pid, signal.SIGSTOP)
    try:
        for seed in range(91, 96):
            keys = chain(seed, 2)
            engine.begin_store(engine.request(keys), keys)
        engine.step()  # vLLM asked for results before most of them were submitted, and asks once a step
        engine.step()
        assert len(engine.jobs) <= 1
        engine.manager.reset_cache()  # waits for those that run
        assert not engine.jobs
    finally:
        daemon.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_reset_may_mean_other_weights(start: Start, daemon: Any, fixed: bool) -> None:
    engine = start(daemon.socket, fixed_weights=fixed)
    keys = chain(101 + fixed, 4)
    engine.store(keys)
    engine.manager.reset_cache()
    assert engine.load(keys) == (4 if fixed else 0)
    later = chain(103 + fixed, 3)
    engine.store(later)
    assert start(daemon.socket).load(later) == (3 if fixed else 0)
    engine.manager.reset_cache()
    assert engine.load(later) == (3 if fixed else 0)


def test_engines_that_differ_share_nothing(start: Start, daemon: Any) -> None:
    keys = chain(111, 3)
    start(daemon.socket).store(keys)
    assert start(daemon.socket, epoch="next").load(keys) == 0
    assert start(daemon.socket, model="another").load(keys) == 0
    assert start(daemon.socket, groups=2).load(keys) == 0
    assert start(daemon.socket, chunk_blocks=2).load(keys) == 0
    assert start(daemon.socket).load(keys) == 3


def test_a_namespace_that_is_refused(
    start: Start, daemon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Under its name the daemon knows chunks of another size."""
    engine = start(daemon.socket, epoch="refused")
    record = engine.record
    with Client(daemon.socket, connect=True) as client:
        client.open(NamespaceRecord(record.fields, (PartSpec(4096),)))
        with caplog.at_level(logging.WARNING, "kvpool.vllm"):
            for seed in (121, 122):
                engine.store(chain(seed, 2))
                assert engine.load(chain(seed + 10, 2)) == 0
    told = [one.getMessage() for one in caplog.records if "tier in the pool" in one.msg]
    assert len(told) == 1
    assert "4096" in told[0]


def test_wrong_bytes_are_found_out(start: Start, daemon: Any) -> None:
    one, other = start(daemon.socket), start(daemon.socket, verify_loads=True)
    keys = chain(131, 3)
    one.store(keys)
    with Client(daemon.socket) as client:
        lease = client.acquire_each(client.open(one.record), [pool_key(keys[1])])
        assert lease is not None
        with lease:
            lease.slots[0].table[lease.slots[0].rows[0], 7] ^= 1
    assert other.load(keys) == 1


def test_refusals(start: Start, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no setting 'sockets'"):
        start(daemon.socket, sockets=1)
    with pytest.raises(ConfigError, match="same_adapters"):
        start(daemon.socket, lora=True)
    start(daemon.socket, lora=True, same_adapters=True)
