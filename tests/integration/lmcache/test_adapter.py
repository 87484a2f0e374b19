"""The adapter by LMCache's contract, on one node."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, TensorMemoryObj

from kvpool.engine_plugins.lmcache.objects import block_keys, layout_of_group, record_of
from kvpool.errors import NotAuthenticated
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.waiting import until

Attach = Callable[..., Any]


def bad_luck(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the adapter has warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "kvpool.lmcache" and record.levelno >= logging.WARNING
    ]


def test_stored_objects_are_found_scattered_and_loaded(kit: Any, adapter: Any) -> None:
    keys = kit.keys(range(9))
    stored = [keys[number] for number in (1, 2, 5, 8)]
    assert kit.look_up(adapter, keys) == []
    result = kit.store(adapter, stored)
    assert result.is_successful() and result.bytes_transferred() == 4 * kit.NBYTES
    assert kit.cycle(adapter, keys) == [1, 2, 5, 8]
    assert kit.load(adapter, keys) == [1, 2, 5, 8], "a lock is not needed to load"


def test_another_server_of_the_node_finds_them(kit: Any, shared: Any, attach: Attach) -> None:
    one, other, epoch = (attach(shared, epoch=epoch) for epoch in ("here", "here", "there"))
    keys = kit.keys(range(4))
    kit.store(one, keys)
    assert kit.cycle(other, keys) == [0, 1, 2, 3]
    assert kit.cycle(epoch, keys) == [], "of other weights"


def test_objects_whose_keys_differ_in_any_field_are_others(kit: Any, adapter: Any) -> None:
    keys = [
        kit.key(1),
        kit.key(1, chunk_hash=b"\x01"),
        kit.key(1, kv_rank=0x02010201),
        kit.key(1, object_group_id=1),
        kit.key(1, cache_salt="salt"),
        kit.key(1, cache_salt="other"),
    ]
    layouts = {group: kit.layout() for group in (0, 1)}
    kit.store(adapter, keys[::2])
    assert kit.look_up(adapter, keys, layouts) == [0, 2, 4]
    kit.store(adapter, keys)
    assert kit.load(adapter, keys) == list(range(6))
    assert kit.look_up(adapter, [kit.key(1, model_name="test/other")]) == []


def test_objects_of_one_size_and_other_types_are_never_taken_for_each_other(
    kit: Any, adapter: Any
) -> None:
    keys = kit.keys(range(3))
    kit.store(adapter, keys)
    assert kit.look_up(adapter, keys, {0: kit.layout(dtype=torch.float16)}) == [0, 1, 2]
    assert kit.load(adapter, keys, dtype=torch.bfloat16) == []
    kit.store(adapter, keys, dtype=torch.bfloat16)
    assert kit.look_up(adapter, keys, {0: kit.layout(dtype=torch.bfloat16)}) == [0, 1, 2]
    assert kit.load(adapter, keys, dtype=torch.bfloat16) == [0, 1, 2]


def test_layouts_that_lookups_are_not_told_are_learnt(
    kit: Any, shared: Any, attach: Attach
) -> None:
    """LMCache's converters (`serde`) store other objects than lookups are told of."""
    keys, converted = kit.keys(range(3)), (kit.NBYTES // 2 + 7,)
    one = attach(shared, epoch="learnt")
    kit.store(one, keys, shape=converted, dtype=torch.uint8)
    for layouts in ({0: kit.layout()}, {}, {0: kit.layout((0,))}):
        assert kit.look_up(one, keys, layouts) == [0, 1, 2]
        assert kit.load(one, keys, shape=converted, dtype=torch.uint8) == [0, 1, 2]
    other = attach(shared, epoch="learnt")
    assert kit.look_up(other, keys) == [], "it has seen none of them yet"
    assert kit.load(other, keys[:1], shape=converted, dtype=torch.uint8) == [0]
    assert kit.look_up(other, keys) == [0, 1, 2]


def test_each_task_ends_with_an_event_of_its_kind_alone(kit: Any, adapter: Any) -> None:
    fds = [
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    ]
    assert len(set(fds)) == 3

    def signalled() -> list[int]:
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(60_000)]
        for fd in ready:
            os.eventfd_read(fd)
        return ready

    key, made = kit.key(1), kit.full(kit.key(1))
    adapter.submit_store_task([key], [made])
    assert signalled() == fds[:1]
    adapter.submit_lookup_and_lock_task([key], {0: kit.layout()})
    assert signalled() == fds[1:2]
    adapter.submit_load_task([key], [made])
    assert signalled() == fds[2:]


def test_a_locked_object_outlives_stores_that_need_its_place(
    kit: Any, start: Any, attach: Attach
) -> None:
    daemon = start("--memory", "16MiB")
    adapter = attach(daemon, lease_s=600.0)
    first = kit.keys(range(8))

    def fill(number: int) -> None:
        for batch in range(10):
            begin = number + 40 * batch
            assert kit.store(adapter, kit.keys(range(begin, begin + 40))).is_successful()

    kit.store(adapter, first)
    assert kit.look_up(adapter, first) == list(range(8))
    fill(1000)
    assert daemon.stats().counters.evicted > 0
    assert kit.load(adapter, first) == list(range(8))
    adapter.submit_unlock(first)
    until(lambda: daemon.stats().leases == 0, "the lease is released")
    fill(2000)
    assert kit.cycle(adapter, first) == []


def test_what_finds_no_space_fails_the_store_and_is_said_once(
    kit: Any, start: Any, attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = attach(start("--memory", "16MiB"), lease_s=600.0)
    adapter.register_listener(heard := kit.Recorded())
    keys = kit.keys(range(150))
    kit.store(adapter, keys)
    locked = kit.look_up(adapter, keys)
    assert locked == list(range(150))
    heard.stored.clear()
    for first in (1000, 2000):
        result = kit.store(adapter, kit.keys(range(first, first + 150)))
        assert not result.is_successful()
    assert 0 < len(heard.stored) < 300
    some = [key for key, _ in heard.stored][-10:]
    assert kit.load(adapter, some) == list(range(10))
    assert [text.partition(":")[0] for text in bad_luck(caplog)] == [
        f"objects of {kit.MODEL} are not stored"
    ]
    adapter.submit_unlock([keys[index] for index in locked])
    until(lambda: kit.store(adapter, kit.keys([5000])).is_successful(), "there is space again")


def leases_at_rest(shared: Any) -> int:
    """None, once those of the test before have ended with its adapter."""
    until(lambda: not shared.stats().leases, "nobody holds anything")
    return 0


def test_locks_are_counted(kit: Any, shared: Any, adapter: Any) -> None:
    keys = kit.keys([1, 2, 1])
    kit.store(adapter, keys)
    before = leases_at_rest(shared)
    assert kit.look_up(adapter, keys) == [0, 1, 2]
    assert kit.look_up(adapter, keys[:1]) == [0]
    assert shared.stats().leases == before + 2
    adapter.submit_unlock(keys)
    until(lambda: shared.stats().leases == before + 1, "the first request is over")
    adapter.submit_unlock(keys[:1])
    until(lambda: shared.stats().leases == before, "so is the other one")
    adapter.submit_unlock(keys)  # once too often


def test_a_load_after_the_lease_has_ended_is_right_or_a_miss(
    kit: Any, shared: Any, attach: Attach
) -> None:
    hasty = attach(shared, epoch="hasty", lease_s=0.01)
    keys = kit.keys(range(4))
    kit.store(hasty, keys)
    before = leases_at_rest(shared)
    assert kit.look_up(hasty, keys) == [0, 1, 2, 3]
    until(lambda: shared.stats().leases == before, "the lease has ended")
    hasty.delete(keys[1:3])
    # Each load has a lease as short as that, in which a busy machine may not come to copy.
    until(lambda: kit.load(hasty, keys) == [0, 3], "the rest is loaded")


def test_deleted_objects_are_gone_and_told_of_once(kit: Any, adapter: Any) -> None:
    adapter.register_listener(heard := kit.Recorded())
    keys = kit.keys(range(4))
    kit.store(adapter, keys[:3])
    assert heard.stored == [(key, kit.NBYTES) for key in keys[:3]]
    kit.load(adapter, keys)
    assert heard.accessed == keys[:3]
    adapter.delete(keys[1:])
    assert heard.deleted == keys[1:3]
    adapter.delete(keys[1:])
    assert heard.deleted == keys[1:3]
    assert kit.cycle(adapter, keys) == [0]
    with pytest.raises(NotImplementedError):
        adapter.list_l2_keys()


def test_usage_is_what_the_pool_holds(kit: Any, adapter: Any) -> None:
    assert adapter.get_usage().total_bytes_used == 0
    keys = kit.keys(range(4))
    for _ in range(2):
        kit.store(adapter, keys)
    assert adapter.get_usage().total_bytes_used == 4 * kit.NBYTES
    adapter.delete(keys[:3])
    usage = adapter.get_usage()
    assert usage.total_bytes_used == kit.NBYTES
    assert usage.usage_fraction == -1.0, "LMCache is not to evict for the pool"


def test_status(kit: Any, adapter: Any) -> None:
    keys = kit.keys(range(3))
    kit.store(adapter, keys)
    kit.look_up(adapter, keys)
    status = adapter.report_status()
    assert status["is_healthy"] and status["daemon_available"] and status["locks"] == 3
    assert status["tasks_waiting"] == {"store": 0, "lookup": 0, "load": 0}


def test_a_namespace_that_the_pool_knows_otherwise_is_a_miss(
    kit: Any, shared: Any, adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    record = record_of(kit.MODEL, layout_of_group(kit.layout()), adapter._settings.epoch)
    with shared.client() as client:
        other = NamespaceRecord(record.fields, (PartSpec(kit.NBYTES * 2),))
        ns = client.open(other)
        keys = kit.keys(range(2))
        client.put(ns, block_keys(keys), bytes(4 * kit.NBYTES))
        for _ in range(2):
            assert not kit.store(adapter, keys).is_successful()
            assert kit.look_up(adapter, keys) == []
            assert kit.load(adapter, keys) == []
    said = bad_luck(caplog)
    assert len(said) == 3 and len({text.partition(":")[0] for text in said}) == 3
    assert all("sizes" in text or "bytes" in text for text in said)


def test_objects_outside_host_memory_are_refused_not_stored(
    kit: Any, adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Elsewhere(TensorMemoryObj):
        @property
        def byte_array(self) -> memoryview:
            raise NotImplementedError("its bytes are in a file")

    made = kit.full(kit.key(1))
    made.__class__ = Elsewhere
    task = adapter.submit_store_task([kit.key(1)], [made])
    take = adapter.pop_completed_store_tasks
    done = kit.await_result(adapter.get_store_event_fd(), lambda: take() or None)
    assert not done[task].is_successful()
    assert "outside host memory" in bad_luck(caplog)[0]


def test_buffers_that_cannot_be_written_are_a_miss(kit: Any, adapter: Any) -> None:
    frozen = BytesBufferMemoryObj(kit.content(kit.key(1)))
    task = adapter.submit_store_task([kit.key(1)], [frozen])
    take = adapter.pop_completed_store_tasks
    assert kit.await_result(adapter.get_store_event_fd(), lambda: take() or None)[task] > 0
    load = adapter.submit_load_task([kit.key(1)], [frozen])
    fd = adapter.get_load_event_fd()
    assert kit.await_result(fd, lambda: adapter.query_load_result(load)).popcount() == 0


def test_a_token_that_the_daemon_refuses_ends_the_start(start: Any, attach: Attach) -> None:
    daemon = start(
        config='[tenants.lm]\nmemory = "16MiB"\ntoken = "right-token-of-the-tenant-00001"\n'
    )
    with pytest.raises(NotAuthenticated):
        attach(daemon, tenant="lm", token="wrong")
    attach(daemon, tenant="lm", token="right-token-of-the-tenant-00001")


def test_settings_that_do_not_exist_are_refused_as_lmcache_expects(
    shared: Any, attach: Attach
) -> None:
    with pytest.raises(ValueError, match="no setting 'nonsense'"):
        attach(shared, nonsense=1)


def test_many_requests_at_a_time_get_their_own_bytes(kit: Any, adapter: Any) -> None:
    """Stores, lookups, loads, unlocks and deletes from several threads, as LMCache's two controllers and more."""
    stored: dict[int, Any] = {}

    def result(take: Callable[[int], Any], task: int) -> Any:
        """The controllers share one descriptor; threads here would take each other's events."""
        return until(lambda: [found] if (found := take(task)) is not None else None, "a result")[0]

    def work(seed: int) -> int:
        gets = 0
        for turn in range(12):
            keys = kit.keys(range((seed + turn) % 7, (seed + turn) % 7 + 12))
            store = adapter.submit_store_task(keys, [kit.full(key) for key in keys])
            lookup = adapter.submit_lookup_and_lock_task(keys, {0: kit.layout()})
            found = result(adapter.query_lookup_and_lock_result, lookup)
            chosen = [keys[index] for index in found.get_indices_list()]
            targets = [kit.empty() for _ in chosen]
            load = adapter.submit_load_task(chosen, targets)
            loaded = result(adapter.query_load_result, load)
            for index in loaded.get_indices_list():
                assert bytes(targets[index].byte_array) == kit.content(chosen[index])
                gets += 1
            adapter.submit_unlock(chosen)
            if turn % 5 == seed:
                adapter.delete(keys[:2])

            def ended(task: int = store) -> bool:
                stored.update(adapter.pop_completed_store_tasks())
                return task in stored

            until(ended, "the store")
        return gets

    with ThreadPoolExecutor(4) as threads:
        gets = sum(threads.map(work, range(4)))
    assert gets
    assert adapter.report_status()["locks"] == 0


def test_the_end_leaves_no_thread_descriptor_or_lease(
    kit: Any, shared: Any, attach: Attach
) -> None:
    before = set(threading.enumerate()), leases_at_rest(shared)
    adapter = attach(shared, epoch="end")
    keys = kit.keys(range(4))
    kit.store(adapter, keys)
    kit.look_up(adapter, keys)
    big = kit.keys(range(1000, 1300))
    for _ in range(5):
        adapter.submit_store_task(big, [kit.full(key) for key in big])
        adapter.submit_lookup_and_lock_task(big, {0: kit.layout()})
    fds = [adapter.get_store_event_fd(), adapter.get_load_event_fd()]
    adapter.close()
    adapter.close()
    until(lambda: shared.stats().leases == before[1], "its leases are released")
    until(lambda: set(threading.enumerate()) <= before[0], "its threads have ended")
    assert adapter.get_store_event_fd() == -1 and fds[0] >= 0
