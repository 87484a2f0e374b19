"""The backend behind SGLang's HiCache controller, with its real threads and host pools."""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvpool.client import Client
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.signals import send

seeds = itertools.count(1)
PAGES = 5


@pytest.fixture
def config(kit: ModuleType, daemon: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """An epoch of its own: what other tests have stored is not found."""
    found: dict[str, Any] = kit.backend_config(daemon.socket, epoch=request.node.name)
    del found["prefetch_threshold"]  # SGLang's, taken out before
    return found


def pools(rig: ModuleType, kind: str, layout: str) -> tuple[Any, Any]:
    made: dict[str, Callable[[], tuple[Any, Any]]] = {
        "mha": lambda: rig.mha(layout),
        "mha-unequal": lambda: rig.mha(layout, dim=32, v_dim=16),
        "mla": lambda: rig.mla(layout),
    }
    return made[kind]()


LAYOUTS = {
    "mha": ("page_first", "page_first_direct", "page_head", "layer_first"),
    "mla": ("page_first", "page_first_direct", "layer_first"),
    "mha-unequal": ("page_first", "page_first_direct"),
}


@pytest.mark.parametrize(
    ("kind", "layout", "interface"),
    [
        (kind, layout, interface)
        for kind, layouts in LAYOUTS.items()
        for layout in layouts
        for interface in (1, 0)
        if interface or kind != "mha-unequal"  # of whose pages SGLang makes no tensors
    ],
)
def test_pages_come_back_byte_for_byte(
    rig: ModuleType, config: dict[str, Any], kind: str, layout: str, interface: int
) -> None:
    config["interface_v1"] = interface
    tokens = rig.tokens_of(next(seeds), PAGES)
    writer = pools(rig, kind, layout)
    host = writer[1]
    host.alloc(3 * rig.PAGE)  # so that pages of both sides have other numbers
    with rig.controller(writer, config) as control:
        indices, stored = rig.back_up(control, tokens, host)
        assert stored == len(tokens)
        wanted = [rig.page_bytes(host, int(first)) for first in indices[:: rig.PAGE]]

    device, host = pools(rig, kind, layout)
    with rig.controller((device, host), config) as control:
        found = rig.prefetch(control, tokens, host)
        assert (found.hit, found.loaded) == (len(tokens), len(tokens))
        got = [rig.page_bytes(host, int(first)) for first in found.indices[:: rig.PAGE]]
        assert got == wanted

        # What is beyond the stored pages is a miss; so is all of another prompt.
        longer = tokens + rig.tokens_of(next(seeds), 2)
        assert rig.prefetch(control, longer, host).hit == len(tokens)
        assert rig.prefetch(control, rig.tokens_of(next(seeds), 2), host).hit == 0


def record_of(backend: Any) -> NamespaceRecord:
    """Of the namespace of the pages."""
    record: NamespaceRecord = backend._held["kv"].store.record
    return record


def test_a_block_is_the_pieces_of_its_page_in_order(
    rig: ModuleType, config: dict[str, Any], daemon: Any
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        indices, _ = rig.back_up(control, tokens, host)
        record = record_of(control.storage_backend)
        hashes = rig.hashes_of(tokens)
    with Client(daemon.socket) as client:
        blocks = client.get(client.open(record), [bytes.fromhex(each)[-16:] for each in hashes])
    assert blocks == [rig.page_bytes(host, int(first)) for first in indices[:: rig.PAGE]]


def test_only_what_is_stored_is_read(rig: ModuleType, config: dict[str, Any]) -> None:
    tokens = rig.tokens_of(next(seeds), 4)
    hashes = rig.hashes_of(tokens)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        backend = control.storage_backend
        indices = host.alloc(len(tokens))
        pages = indices.reshape(4, rig.PAGE)
        some = pages[[0, 1, 3]].reshape(-1)
        assert backend.batch_set_v1([hashes[0], hashes[1], hashes[3]], some) == [True] * 3
        assert backend.batch_exists(hashes) == 2
        assert backend.exists(hashes[3]) and not backend.exists(hashes[2])
        target = host.alloc(len(tokens))
        untouched = rig.page_bytes(host, int(target[2 * rig.PAGE]))
        assert backend.batch_get_v1(hashes, target) == [True, True, False, True]
        assert rig.page_bytes(host, int(target[2 * rig.PAGE])) == untouched
        assert backend.batch_exists([]) == 0
        assert backend.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_bad_requests_are_misses(rig: ModuleType, config: dict[str, Any]) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    hashes = rig.hashes_of(tokens)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        backend = control.storage_backend
        right = host.alloc(2 * rig.PAGE)
        assert backend.batch_set_v1(hashes, right) == [True, True]
        before = host.kv_buffer.view(torch.uint8).clone()
        wrong = {
            "too few": right[: rig.PAGE],
            "too many": torch.cat([right, right[: rig.PAGE]]),
            "not at the beginning of a page": right + 1,
            "not in order": right.flip(0),
            "beyond the pool": right + host.size,
            "below it": right - int(right[0]) - rig.PAGE,
            "none": None,
        }
        for what, indices in wrong.items():
            assert backend.batch_get_v1(hashes, indices) == [False, False], what
            assert backend.batch_set_v1(hashes, indices) == [False, False], what
        assert torch.equal(host.kv_buffer.view(torch.uint8), before)
        # Names that are no hashes are pages like others.
        names = ["a", "g" * 64]
        assert backend.batch_exists(names) == 0
        assert backend.batch_set_v1(names, right) == [True, True]
        assert backend.batch_exists(names) == 2


def test_ranks_have_shares_of_their_own(rig: ModuleType, config: dict[str, Any]) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    wanted = []
    for rank in (0, 1):
        device, host = rig.mha("page_first", heads=1)
        with rig.controller((device, host), config, tp_rank=rank, tp_size=2) as control:
            assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 0
            indices, _ = rig.back_up(control, tokens, host)
            wanted.append([rig.page_bytes(host, int(each)) for each in indices[:: rig.PAGE]])
    for rank in (0, 1):
        device, host = rig.mha("page_first", heads=1)
        with rig.controller((device, host), config, tp_rank=rank, tp_size=2) as control:
            found = rig.prefetch(control, tokens, host)
            got = [rig.page_bytes(host, int(each)) for each in found.indices[:: rig.PAGE]]
            assert got == wanted[rank]
    others = [{"tp_size": 1}, {"tp_size": 2, "pp_size": 2, "pp_rank": 1}]
    for which in others:
        device, host = rig.mha("page_first", heads=1)
        with rig.controller((device, host), config, **which) as control:
            assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 0


def test_latent_attention_is_stored_once(
    rig: ModuleType, config: dict[str, Any], daemon: Any
) -> None:
    tokens = rig.tokens_of(next(seeds), 3)
    committed = daemon.counters().committed
    wanted = []
    for rank in (1, 0):
        device, host = rig.mla("page_first")
        with rig.controller((device, host), config, tp_rank=rank, tp_size=2) as control:
            indices, _ = rig.back_up(control, tokens, host)
            assert (
                control.storage_backend.batch_set_v1(rig.hashes_of(tokens), indices) == [True] * 3
            )
            wanted = [rig.page_bytes(host, int(each)) for each in indices[:: rig.PAGE]]
        assert daemon.counters().committed == committed + (3 if rank == 0 else 0)
    for rank, size in ((1, 2), (0, 1)):
        device, host = rig.mla("page_first")
        with rig.controller((device, host), config, tp_rank=rank, tp_size=size) as control:
            found = rig.prefetch(control, tokens, host)
            assert found.loaded == len(tokens)
            got = [rig.page_bytes(host, int(each)) for each in found.indices[:: rig.PAGE]]
            assert got == wanted


def test_other_facts_are_another_namespace(rig: ModuleType, config: dict[str, Any]) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        rig.back_up(control, tokens, host)
    same = rig.mha("page_first")
    others: list[tuple[tuple[Any, Any], dict[str, Any], str]] = [
        (same, config, "another-model"),
        (same, config | {"model": "another"}, "m"),
        (same, config | {"revision": "another"}, "m"),
        (same, config | {"epoch": "another"}, "m"),
        (same, config | {"interface_v1": 0}, "m"),
        (rig.mha("page_first_direct"), config, "m"),
        (rig.mha("page_first", heads=4, dim=16), config, "m"),
    ]
    for made, extra, model in others:
        with rig.controller(made, extra, model=model) as control:
            assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 0, (extra, model)
    with rig.controller(same, config) as control:
        assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 2


def test_adapters_and_salts_have_pages_of_their_own(
    rig: ModuleType, config: dict[str, Any]
) -> None:
    """SGLang's hashes say which; the backend leaves them as they are."""
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        rig.back_up(control, RadixKey(tokens, extra_key="an-adapter"), host)
        for key, hit in (
            (RadixKey(tokens, extra_key="an-adapter"), len(tokens)),
            (RadixKey(tokens, extra_key="another"), 0),
            (RadixKey(tokens, extra_key="an-adapter", cache_salt="a-salt"), 0),
            (RadixKey(tokens), 0),
        ):
            assert rig.prefetch(control, key, host).hit == hit


def test_an_engine_starts_without_a_daemon_and_uses_it_later(
    rig: ModuleType, kit: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvpool")
    socket = str(tmp_path / "s")
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with ExitStack() as stack:
        control = stack.enter_context(rig.controller((device, host), kit.backend_config(socket)))
        for _ in range(3):
            assert rig.prefetch(control, tokens, host).hit == 0
            assert rig.back_up(control, tokens, host)[1] == 0
        assert caplog.text.count("is not used") == 1 and socket in caplog.text
        stack.enter_context(kit.run_daemon(tmp_path))
        kit.until(lambda: rig.back_up(control, tokens, host)[1], "pages are stored")
        assert rig.prefetch(control, tokens, host).loaded == len(tokens)
        assert caplog.text.count("is used again") == 1


def test_a_daemon_that_hangs_or_dies_is_a_miss(
    rig: ModuleType, kit: ModuleType, tmp_path: Path
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    hashes = rig.hashes_of(tokens)
    device, host = rig.mha("page_first")
    with (
        kit.run_daemon(tmp_path) as daemon,
        rig.controller((device, host), kit.backend_config(daemon.socket, timeout_s=1.0)) as control,
    ):
        backend = control.storage_backend
        indices = rig.back_up(control, tokens, host)[0]
        kit.until(lambda: all(backend.batch_set_v1(hashes, indices)), "the pages are stored")
        kit.until(lambda: backend.batch_exists(hashes) == 2, "the pages are there")
        send(daemon.process.pid, signal.SIGSTOP)
        try:
            assert backend.batch_exists(hashes) == 0
            assert backend.batch_get_v1(hashes, indices) == [False, False]
            assert backend.batch_set_v1(hashes, indices) == [False, False]
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        kit.until(lambda: backend.batch_get_v1(hashes, indices) == [True, True], "it is used again")
        daemon.kill()
        assert backend.batch_get_v1(hashes, indices) == [False, False]
        assert backend.batch_exists(hashes) == 0
        assert not backend.clear()


def test_a_refused_namespace_is_a_miss(
    rig: ModuleType, config: dict[str, Any], daemon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config | {"epoch": "probe"}) as control:
        fields = dict(record_of(control.storage_backend).fields)
    fields["epoch"] = config["epoch"]
    with Client(daemon.socket) as client:
        client.open(NamespaceRecord(fields, (PartSpec(nbytes=64),)))
        with rig.controller((device, host), config) as control:
            assert rig.back_up(control, tokens, host)[1] == 0
            assert rig.prefetch(control, tokens, host).hit == 0
    assert caplog.text.count("is not used") == 1 and "64 bytes" in caplog.text


def test_pages_without_space_are_told(
    rig: ModuleType, kit: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Leases hold all of a small pool: what is not stored is reported, and missing."""
    device, host = rig.mha("page_first", heads=8, dim=128)
    tokens = rig.tokens_of(next(seeds), 20)
    with (
        kit.run_daemon(tmp_path, "16MiB") as daemon,
        rig.controller((device, host), kit.backend_config(daemon.socket)) as control,
        Client(daemon.socket) as client,
    ):
        filler = client.open(NamespaceRecord.simple("x", block_bytes=1 << 20, block_tokens=1))
        held = []
        for index in range(20):
            key = index.to_bytes(16, "big")
            if client.put_each(filler, key, bytes(1 << 20)).all():
                held.append(client.acquire_each(filler, key, lease_s=60.0))
        backend, hashes = control.storage_backend, rig.hashes_of(tokens)
        told = backend.batch_set_v1(hashes, host.alloc(len(tokens)))
        assert not all(told)
        backend.batch_exists(hashes)
        backend.batch_set_v1(hashes, host.alloc(len(tokens)))
        assert caplog.text.count("has no space") == 1
        there = [backend.exists(each) for each in hashes]
        assert all(found for found, stored in zip(there, told, strict=True) if stored)


def test_damaged_pages_are_misses_where_they_are_verified(
    rig: ModuleType, config: dict[str, Any], daemon: Any
) -> None:
    tokens = rig.tokens_of(next(seeds), 3)
    hashes = rig.hashes_of(tokens)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config | {"verify": True}) as control:
        backend = control.storage_backend
        indices = rig.back_up(control, tokens, host)[0]
        with Client(daemon.socket) as client:
            namespace = client.open(record_of(backend))
            with client.acquire_each(namespace, bytes.fromhex(hashes[1])[-16:]) as lease:
                slots = lease.slots[0]
                slots.table[int(slots.rows[0]), 100] ^= 1
        assert backend.batch_get_v1(hashes, indices) == [True, False, True]


def test_clear_empties_the_namespaces_of_the_engine(
    rig: ModuleType, config: dict[str, Any]
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    device, host = rig.mha("page_first")
    with (
        rig.controller((device, host), config) as control,
        rig.controller(rig.mha("page_first"), config | {"epoch": "other"}) as other,
    ):
        for each in (control, other):
            rig.back_up(each, tokens, host)
        assert control.storage_backend.clear()
        assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 0
        assert other.storage_backend.batch_exists(rig.hashes_of(tokens)) == 2
        assert rig.back_up(control, tokens, host)[1] == len(tokens)
        assert control.storage_backend.batch_exists(rig.hashes_of(tokens)) == 2


def test_random_failures_and_delays_of_sglangs_own_injector(
    rig: ModuleType, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.4")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    device, host = rig.mha("page_first")
    loaded = stored = 0
    with rig.controller((device, host), config) as control:
        for _ in range(20):
            tokens = rig.tokens_of(next(seeds), 3)
            indices, done = rig.back_up(control, tokens, host)
            found = rig.prefetch(control, tokens, host)
            assert found.hit <= done and found.loaded <= found.hit
            for page in range(found.loaded // rig.PAGE):
                at = page * rig.PAGE
                assert rig.page_bytes(host, int(found.indices[at])) == rig.page_bytes(
                    host, int(indices[at])
                )
            stored, loaded = stored + done, loaded + found.loaded
            host.free(indices)
            if len(found.indices):
                host.free(found.indices)
    assert stored and loaded


@contextmanager
def attached(rig: ModuleType, made: tuple[Any, Any], config: dict[str, Any]) -> Iterator[Any]:
    with rig.controller(made, config) as control:
        yield control


def test_settings_and_layouts_that_cannot_work_are_refused_at_the_start(
    rig: ModuleType, config: dict[str, Any]
) -> None:
    made = rig.mha("page_first")
    for wrong, what in (
        ({"sockett": "x"}, "sockett"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"verify": 1}, "verify"),
    ):
        with pytest.raises(ConfigError, match=what), attached(rig, made, config | wrong):
            pass
    made = rig.mha("page_first", dim=32, v_dim=16)
    with (
        pytest.raises(ConfigError, match="interface_v1"),
        attached(rig, made, config | {"interface_v1": 0}),
    ):
        pass


def test_metrics_tell_pages_and_speeds(rig: ModuleType, config: dict[str, Any]) -> None:
    tokens = rig.tokens_of(next(seeds), 3)
    device, host = rig.mha("page_first")
    with rig.controller((device, host), config) as control:
        backend = control.storage_backend
        assert backend.get_stats() is None
        backend._storage.enable_storage_metrics = True
        rig.back_up(control, tokens, host)
        rig.prefetch(control, tokens, host)
        stats = backend.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
        assert stats.backup_bandwidth[0] > 0 and stats.prefetch_bandwidth[0] > 0
        assert backend.get_stats().backup_pgs == []
