"""Models with several pools: windows and states beside the KV, each with pages of its own."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

if TYPE_CHECKING:
    import torch

seeds = itertools.count(1)
KV, SWA, MAMBA, DRAFT = PoolName.KV, PoolName.SWA, PoolName.MAMBA, PoolName.DRAFT


@pytest.fixture
def config(kit: ModuleType, daemon: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = kit.backend_config(daemon.socket, epoch=request.node.name)
    del found["prefetch_threshold"]
    return found


def entries(rig: ModuleType) -> dict[PoolName, tuple[Any, Any]]:
    return {KV: rig.mha("page_first"), SWA: rig.mha("page_first", heads=1), MAMBA: rig.mamba()}


def listed(made: dict[PoolName, tuple[Any, Any]]) -> list[tuple[PoolName, Any, Any]]:
    return [(name, device, host) for name, (device, host) in made.items()]


def trailing(name: PoolName, keys: list[str], indices: torch.Tensor | None) -> PoolTransfer:
    return PoolTransfer(
        name=name, host_indices=indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def test_windows_and_states_come_back_with_their_prefix(
    rig: ModuleType, config: dict[str, Any]
) -> None:
    window, pages = 2, 5
    tokens = rig.tokens_of(next(seeds), pages)
    hashes = rig.hashes_of(tokens)
    made = entries(rig)
    with rig.hybrid(listed(made), config) as control:
        states = made[MAMBA][1].alloc(1)
        seen = made[SWA][1].alloc(window * rig.PAGE)
        transfers = [
            trailing(SWA, hashes[-window:], seen),
            trailing(MAMBA, hashes[-1:], states),
        ]
        _, stored = rig.back_up(control, tokens, made[KV][1], transfers)
        assert stored == len(tokens)
        wanted = [rig.page_bytes(made[SWA][1], int(each)) for each in seen[:: rig.PAGE]]
        state = rig.state_bytes(made[MAMBA][1], int(states[0]))

    other = entries(rig)
    with rig.hybrid(listed(other), config) as control:
        seen = other[SWA][1].alloc(window * rig.PAGE)
        states = other[MAMBA][1].alloc(1)
        transfers = [
            trailing(SWA, hashes[-window:], seen),
            trailing(MAMBA, hashes[-1:], states),
        ]
        # The prompt goes on; its prefix with a state is found.
        longer = tokens + rig.tokens_of(next(seeds), 2)
        found = rig.prefetch(control, longer, other[KV][1], transfers)
        assert (found.hit, found.loaded) == (len(tokens), len(tokens))
        assert (found.pools["swa"], found.pools["mamba"]) == (window, 1)
        got = [rig.page_bytes(other[SWA][1], int(each)) for each in seen[:: rig.PAGE]]
        assert got == wanted
        assert rig.state_bytes(other[MAMBA][1], int(states[0])) == state

        # A prefix that ends before the state has none.
        shorter = tokens[: 4 * rig.PAGE]
        transfers = [trailing(MAMBA, rig.hashes_of(shorter)[-1:], other[MAMBA][1].alloc(1))]
        assert rig.prefetch(control, shorter, other[KV][1], transfers).hit == 0


@pytest.mark.parametrize("seed", range(12))
def test_restorable_prefixes_are_those_of_sglangs_own_backend(
    rig: ModuleType, config: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """The same pages are stored in SGLang's file backend, whose answer is the oracle."""
    draw = random.Random(seed)
    pages = 7
    tokens = rig.tokens_of(next(seeds), pages)
    hashes = rig.hashes_of(tokens)
    made = entries(rig) | {DRAFT: rig.mha("page_first", heads=1)}
    with rig.hybrid(listed(made), config) as control:
        backend = control.storage_backend
        control.storage_config.extra_config["file_storage_path"] = str(tmp_path)
        oracle = HiCacheFile(control.storage_config)
        for name, (_, host) in made.items():
            oracle.register_mem_host_pool_v2(host, name)
        some = [
            PoolTransfer(name=SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=hashes[:2]),
            PoolTransfer(name=MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=hashes[:1]),
            PoolTransfer(name=DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES),
        ]
        for name, (_, host) in made.items():
            size = host.page_size
            kept = [page for page in range(pages) if draw.random() < (0.95 if name == KV else 0.8)]
            if not kept:
                continue
            transfer = PoolTransfer(
                name=name,
                keys=[hashes[page] for page in kept],
                host_indices=host.alloc(len(kept) * size),
            )
            for each in (backend, oracle):
                assert all(each.batch_set_v2([transfer])[name])
        for count in range(len(some) + 1):
            for chosen in itertools.combinations(some, count):
                ours = backend.batch_exists_v2(hashes, list(chosen))
                theirs = oracle.batch_exists_v2(hashes, list(chosen))
                assert ours.kv_hit_pages == theirs.kv_hit_pages
                assert ours.restorable_prefix_pages == theirs.restorable_prefix_pages
                # SGLang's stops at the first pool with which nothing is left.
                shared = theirs.extra_pool_hit_pages.items()
                assert dict(shared) == {name: ours.extra_pool_hit_pages[name] for name, _ in shared}


def test_unknown_pools_and_wrong_indices_are_misses(
    rig: ModuleType, config: dict[str, Any]
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    hashes = rig.hashes_of(tokens)
    made = entries(rig)
    with rig.hybrid(listed(made), config) as control:
        backend = control.storage_backend
        right = made[MAMBA][1].alloc(2)
        wrong = [
            PoolTransfer(name=PoolName.INDEXER, keys=hashes, host_indices=right),
            PoolTransfer(name=MAMBA, keys=hashes, host_indices=right[:1]),
            PoolTransfer(name=MAMBA, keys=hashes, host_indices=None),
            PoolTransfer(name=SWA, keys=hashes, host_indices=right),
        ]
        for each in wrong:
            assert backend.batch_set_v2([each]) == {each.name: [False, False]}
            assert backend.batch_get_v2([each]) == {each.name: [False, False]}
        assert backend.batch_get_v2([PoolTransfer(name=MAMBA)]) == {MAMBA: []}
        rig.back_up(control, tokens, made[KV][1])
        unknown = PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert backend.batch_exists_v2(hashes, [unknown]).kv_hit_pages == 0
        assert backend.batch_exists_v2(hashes, None).kv_hit_pages == 2


def test_a_kv_pool_without_memory_is_always_there(rig: ModuleType, config: dict[str, Any]) -> None:
    """Of models whose KV is all in side pools: the first pool only hands out numbers."""
    tokens = rig.tokens_of(next(seeds), 3)
    hashes = rig.hashes_of(tokens)
    device, side = rig.mha("page_first")
    with rig.hybrid(
        [(KV, device, LogicalHostPool(side.size, rig.PAGE)), (SWA, None, side)], config
    ) as control:
        backend = control.storage_backend
        indices = side.alloc(2 * rig.PAGE)
        assert backend.batch_set_v1(hashes[:2], indices) == [True, True]
        assert backend.batch_get_v1(hashes[:2], indices) == [True, True]
        stored = PoolTransfer(name=SWA, keys=hashes[:2], host_indices=indices)
        assert backend.batch_set_v2([stored]) == {SWA: [True, True]}
        wanted = PoolTransfer(name=SWA, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert backend.batch_exists_v2(hashes, [wanted]).kv_hit_pages == 2


def test_states_are_stored_by_each_rank_beside_latent_attention(
    rig: ModuleType, config: dict[str, Any], daemon: Any
) -> None:
    tokens = rig.tokens_of(next(seeds), 2)
    hashes = rig.hashes_of(tokens)
    states = {}
    for rank in (0, 1):
        before = daemon.counters().committed
        made = {KV: rig.mla("page_first"), MAMBA: rig.mamba()}
        with rig.hybrid(listed(made), config, tp_rank=rank, tp_size=2) as control:
            slot = made[MAMBA][1].alloc(1)
            rig.back_up(control, tokens, made[KV][1], [trailing(MAMBA, hashes[-1:], slot)])
            states[rank] = rig.state_bytes(made[MAMBA][1], int(slot[0]))
        assert daemon.counters().committed - before == (3 if rank == 0 else 1)
    for rank in (0, 1):
        made = {KV: rig.mla("page_first"), MAMBA: rig.mamba()}
        with rig.hybrid(listed(made), config, tp_rank=rank, tp_size=2) as control:
            slot = made[MAMBA][1].alloc(1)
            transfers = [trailing(MAMBA, hashes[-1:], slot)]
            assert rig.prefetch(control, tokens, made[KV][1], transfers).loaded == len(tokens)
            assert rig.state_bytes(made[MAMBA][1], int(slot[0])) == states[rank]
