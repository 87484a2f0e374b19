"""What SGLang sees: `KvpoolHiCache`, a storage backend of HiCache.

SGLang makes one in each rank's scheduler process and calls it from three threads: one asks what is there, one
reads, one writes, up to 128 pages a call. It hands out pages of its host pools by their indices, and the pool's bytes
are copied straight into them and out of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult
from sglang.version import __version__ as sglang_version

from kvpool.engine_plugins.sglang import facts, hits
from kvpool.engine_plugins.sglang.config import BackendConfig
from kvpool.engine_plugins.sglang.pages import HostPages, Numbers
from kvpool.engine_plugins.sglang.store import PageStore, Transfers
from kvpool.errors import ConfigError, InvalidRequest

logger = logging.getLogger(__name__)

TRAILING_PAGES = "trailing_pages"
ALL_PAGES = "all_pages"


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A host pool and where its pages are stored. store: None for a pool without memory of its own.

    pages: None where SGLang hands over tensors in place of pages.
    """

    store: PageStore | None
    pages: HostPages | None


class KvpoolHiCache(HiCacheStorage):
    """Pages of this engine's host pools in the node's pool. Best effort: without it they are computed."""

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        """Raises `ConfigError` for settings that are wrong. Does not wait for the daemon."""
        self._storage = storage_config
        self._config = BackendConfig.from_given(getattr(storage_config, "extra_config", None))
        self._arguments, model_config = _server_arguments()
        # Half of a call's time is for its request, the other half for pages of disks and other nodes.
        self._request_s = self._config.timeout_s / 2
        self._client = self._config.client(self._request_s, rank=storage_config.tp_rank)
        self._facts = facts.engine_facts(
            self._config, storage_config, self._arguments, model_config, sglang_version
        )
        self._transfers = Transfers()
        self._held: dict[str, Held] = {}

    # --- start-up ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises `ConfigError` for a pool whose pages cannot be stored, with the reason."""
        super().register_mem_pool_host(mem_pool_host)
        self._held[facts.KV] = self._hold(mem_pool_host, facts.KV, pages=self._config.interface_v1)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises as `register_mem_pool_host`."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != facts.KV:
            self._held[name] = self._hold(host_pool, name, pages=True)

    def _hold(self, pool: Any, name: str, *, pages: bool) -> Held:
        if name == facts.KV and getattr(pool, "kv_buffer", None) is None:
            return Held(None, None)  # it hands out numbers only, the KV is in the pools beside it
        if pages:
            found = HostPages(pool)
            pieces = [piece.shape[1] for piece in found.pieces]
        else:
            found = None
            try:
                page = pool.get_dummy_flat_data_page()
            except NotImplementedError as error:
                raise ConfigError(
                    f"{type(pool).__name__} makes no tensors of its pages ({error}): set interface_v1 to 1"
                ) from error
            pieces = [page.numel() * page.element_size()]
        record = facts.record_of(
            self._facts,
            self._config,
            self._storage,
            self._arguments,
            pool,
            name,
            pages=pages,
            pieces=pieces,
        )
        replicated = facts.is_replicated(self._storage, pool, name)
        logger.info(
            "kvpool stores pool %s: pages of %d tokens, %d bytes, in namespace %s",
            name,
            pool.page_size,
            sum(pieces),
            record.digest().hex(),
        )
        store = PageStore(
            self._client,
            record,
            name,
            self._transfers,
            writes=not replicated or facts.is_writer(self._storage),
            verify=self._config.verify,
            request_s=self._request_s,
        )
        return Held(store, found)

    # --- what is there ----------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        store = self._held[facts.KV].store
        return len(keys) if store is None else hits.run(store.present(keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        kv_pages = self.batch_exists(keys)
        found = {facts.KV: kv_pages} if kv_pages else {}
        lengths = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            policy = _text(transfer.hit_policy)
            if policy not in (ALL_PAGES, TRAILING_PAGES):
                continue  # a second form of the same pages, that no prefix needs
            name = _text(transfer.name)
            held = self._held.get(name)
            if held is None or held.store is None:
                usable: list[int] = []
            elif policy == ALL_PAGES:
                usable = hits.lengths_of_all(held.store.present(keys[:kv_pages]))
            else:
                present = held.store.present(keys[:kv_pages])
                usable = hits.lengths_of_trailing(present, len(transfer.keys or ()))
            if usable:
                found[name] = usable[-1]
            lengths.intersection_update(usable)
        restorable = sorted(lengths)
        return PoolTransferResult(
            kv_hit_pages=restorable[-1] if restorable else 0,
            extra_pool_hit_pages=found,
            restorable_prefix_pages=restorable,
        )

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    # --- pages of host pools ----------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._get_pages(facts.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None)
        return self._set_pages(facts.KV, keys, host_indices, before[-1] if before else None)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {
            each.name: self._get_pages(_text(each.name), each.keys or [], each.host_indices)
            for each in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        before = getattr(extra_info, "prefix_keys", None)
        return {
            each.name: self._set_pages(
                _text(each.name), each.keys or [], each.host_indices, before[-1] if before else None
            )
            for each in transfers
        }

    def _get_pages(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        held = self._held.get(name)
        if held is not None and held.store is None:
            return [True] * len(keys)
        numbers = self._numbers(name, held, keys, host_indices)
        if held is None or held.store is None or held.pages is None or numbers is None:
            return [False] * len(keys)
        limit_s = self._config.limit_s(len(keys) * held.pages.tokens)
        return held.store.read(keys, held.pages, numbers, limit_s)

    def _set_pages(
        self, name: str, keys: Sequence[str], host_indices: Any, before: str | None
    ) -> list[bool]:
        held = self._held.get(name)
        if held is not None and held.store is None:
            return [True] * len(keys)
        numbers = self._numbers(name, held, keys, host_indices)
        if held is None or held.store is None or held.pages is None or numbers is None:
            return [False] * len(keys)
        return held.store.write(keys, held.pages.views(numbers), before)

    def _numbers(
        self, name: str, held: Held | None, keys: Sequence[str], host_indices: Any
    ) -> Numbers | None:
        """Of the pages; None, and a line in the log, where they are not to be had."""
        if held is None or held.pages is None or host_indices is None:
            logger.error("no pages of pool %s to read or write", name)
            return None
        try:
            return held.pages.numbers(host_indices, len(keys))
        except InvalidRequest as error:
            logger.error("pool %s: %s", name, error)  # noqa: TRY400 - the message says it
            return None

    # --- tensors, where interface_v1 is not set ---------------------------------------------------

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        store = self._tensors()
        targets = list(target_locations or [None] * len(keys))
        targets = [
            torch.empty(store.nbytes, dtype=torch.uint8) if each is None else each
            for each in targets
        ]
        tokens = len(keys) * int(self.mem_pool_host.page_size)
        here = store.read_into(keys, targets, self._config.limit_s(tokens))
        return [each if found else None for each, found in zip(targets, here, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        blocks = [each.contiguous() for each in values]
        return all(self._tensors().write(keys, blocks))

    def _tensors(self) -> PageStore:
        store = self._held[facts.KV].store
        if store is None or self._config.interface_v1:
            raise ConfigError(
                "tensors are exchanged without interface_v1 only, and by models with one KV pool"
            )
        return store

    # --- the rest ---------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Empty this engine's namespaces, for the whole cluster. Whether all were emptied."""
        stores = [held.store for held in self._held.values() if held.store is not None]
        emptied = [store.clear() for store in stores]
        return all(emptied)

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics`, where it wants them."""
        if not getattr(self._storage, "enable_storage_metrics", False):
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        read, wrote = self._transfers.take()
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in read],
            prefetch_bandwidth=[speed for _, speed in read],
            backup_pgs=[pages for pages, _ in wrote],
            backup_bandwidth=[speed for _, speed in wrote],
        )

    def close(self) -> None:
        """Close the connections. What SGLang has not read or written by then is a miss."""
        self._client.close()


def _text(name: Any) -> str:
    """Of an enum's member, or the text itself."""
    return str(getattr(name, "value", name))


def _server_arguments() -> tuple[Any, Any]:
    """Return SGLang's `ServerArgs` and `ModelConfig`; None and None if there are none in this process."""
    from sglang.srt.runtime_context import get_server_args, process_model_config

    try:
        return get_server_args(), process_model_config()
    except ValueError:
        return None, None
