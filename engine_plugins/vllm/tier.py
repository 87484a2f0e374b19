"""A tier of vLLM's `TieringOffloadingSpec` whose chunks are in the pool.

    "secondary_tiers": [{"type": "KvpoolTier", "module_path": "kvpool.engine_plugins.vllm.tier"}]

vLLM calls it on its scheduler's thread, which it never makes wait: lookups answer RETRY until a thread has asked, loads
and stores are copied by others between vLLM's memory for offloading and the pool's. Best effort: without a pool all of it
is a miss.
"""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as vllm_version

from kvpool.client import Client
from kvpool.engine_plugins import facts
from kvpool.engine_plugins.vllm.chunks import namespace as tier_namespace
from kvpool.engine_plugins.vllm.chunks.config import TierConfig
from kvpool.engine_plugins.vllm.chunks.jobs import Jobs
from kvpool.engine_plugins.vllm.chunks.store import TierStore
from kvpool.engine_plugins.vllm.config import CHANGED_TTL_S
from kvpool.engine_plugins.vllm.naming.namespace import isa, with_weights
from kvpool.engine_plugins.vllm.plan import block_key
from kvpool.types import NO_PARENT, NamespaceRecord

logger = init_logger(__name__)

Found = list[bool]
"""Of a job's keys, in their order: whether each is done."""


class _Lookups(AsyncLookupManager):
    """Asks for a step's keys on a thread of its own."""

    def __init__(self, tier: KvpoolTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Found:
        return self._tier.present(keys)


class _Chain:
    """Of one request, the keys of its chunks by group and end, for the parents of those that are stored."""

    def __init__(self) -> None:
        self._seen = 0
        self._at: dict[tuple[int, int], bytes] = {}

    def learn(self, positions: dict[OffloadKey, int]) -> None:
        """positions: the request's keys so far and where each one's tokens end; it only grows."""
        for key, end in itertools.islice(positions.items(), self._seen, None):
            self._at[get_offload_group_idx(key), end] = pool_key(key)
        self._seen = len(positions)

    def parent(self, group: int, begin: int) -> bytes:
        return self._at.get((group, begin), NO_PARENT)


class KvpoolTier(SecondaryTierManager):
    """See the module. Settings: `TierConfig`."""

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._config = config = TierConfig.from_given(settings)
        self.locality = None if config.locality is None else Locality(config.locality)
        self._vllm_config = tier_namespace.engine_config(offloading_spec)
        self._versions = facts.versions(
            "vllm",
            vllm_version,
            pickled=tier_namespace.check(
                self._vllm_config, config, os.environ.get("PYTHONHASHSEED")
            ),
            any_version=config.any_version,
        )
        groups = offloading_spec.config.groups
        self._part_of = {group.group_id: part for part, group in enumerate(groups)}
        chunk_blocks = offloading_spec.blocks_per_chunk
        self._chunk_tokens = {
            group.group_id: group.tokens_per_block * chunk_blocks for group in groups
        }
        self._rows = np.asarray(primary_kv_view).view(np.uint8)
        self._loads = Jobs[Found](config.load_threads, config.jobs_max, "kvpool-tier-load")
        self._stores = Jobs[Found](config.store_threads, config.jobs_max, "kvpool-tier-store")
        self._jobs: dict[int, TransferJob] = {}
        self._refused: list[int] = []
        self._store = TierStore(
            self._client(config.lookup_timeout_s, 1),
            self._client(config.request_timeout_s, config.load_threads + config.store_threads),
            config,
            self.block_size_bytes,
        )
        self._record = self._make_record()
        self._enter("")
        self._lookups = _Lookups(self, tier_type)

    def _client(self, timeout_s: float, connections_max: int) -> Client:
        instance = self._offloading_spec.config.engine_id
        return self._config.client(timeout_s, instance=instance, connections_max=connections_max)

    def _make_record(self) -> NamespaceRecord:
        device = current_platform.device_type
        name = "" if device == "cpu" else current_platform.get_device_name()
        return tier_namespace.record(
            self._vllm_config,
            self._offloading_spec.config,
            self._config,
            row_bytes=self.block_size_bytes,
            seed=os.environ.get("PYTHONHASHSEED") or kv_cache_utils.DEFAULT_NONE_HASH_SEED,
            versions=self._versions,
            device=[device, name or isa(device)],
            fp8=str(current_platform.fp8_dtype()),
        )

    def _enter(self, weights: str) -> None:
        """weights: a name for those that the engine has instead of those of its start; empty: these."""
        record = with_weights(self._record, weights)
        self._store.enter(record, CHANGED_TTL_S if weights else 0.0)

    # --- lookups ----------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def present(self, keys: Sequence[OffloadKey]) -> Found:
        """Which chunks are in the pool. On the lookups' thread."""
        return self._by_part(
            keys,
            lambda part, at: self._store.present(part, [pool_key(keys[index]) for index in at]),
        )

    # --- jobs -------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        context = job_metadata.req_context
        chain = context.get_state(_Chain)
        if chain is None:
            chain = _Chain()
            context.set_state(chain)
        chain.learn(context._offload_key_positions)
        keys = list(job_metadata.keys)
        parents = [self._parent(chain, key, context) for key in keys]
        self._begin(
            self._stores,
            job_metadata,
            partial(self._put, keys, job_metadata.chunk_ids.tolist(), parents),
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, rows = list(job_metadata.keys), job_metadata.chunk_ids.tolist()
        self._begin(self._loads, job_metadata, partial(self._get, keys, rows))

    def _begin(self, jobs: Jobs[Found], job: TransferJob, work: partial[Found]) -> None:
        if jobs.submit(job.job_id, work):
            self._jobs[job.job_id] = job
        else:
            self._refused.append(job.job_id)
            if job.is_promotion:
                self._lookups.mark_miss(job.keys)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        refused, self._refused = self._refused, []
        results = [JobResult(job, success=False) for job in refused]
        for number, found, seconds in [*self._loads.finished(), *self._stores.finished()]:
            results.append(self._result(self._jobs.pop(number), found, seconds))
        return results

    def _result(self, job: TransferJob, found: Found | None, seconds: float) -> JobResult:
        keys = list(job.keys)
        flags = found or [False] * len(keys)
        done = [key for key, good in zip(keys, flags, strict=True) if good]
        if job.is_promotion and len(done) < len(keys):
            # Else the scheduler would try to load them again and again.
            self._lookups.mark_miss(
                [key for key, good in zip(keys, flags, strict=True) if not good]
            )
        return JobResult(
            job.job_id,
            success=len(done) == len(keys),
            successful_keys=done,
            transfer_time=seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """vLLM resets its caches, also since its weights may be others from now on, which a tier is not told."""
        self._loads.drain()
        self._stores.drain()
        if not self._config.fixed_weights:
            self._enter(uuid.uuid4().hex)

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._loads.close()
        self._stores.close()
        self._store.close()
        del self._rows  # vLLM frees the memory next

    # --- on threads -------------------------------------------------------------------------------

    def _put(
        self, keys: Sequence[OffloadKey], rows: Sequence[int], parents: Sequence[bytes]
    ) -> Found:
        return self._by_part(
            keys,
            lambda part, at: self._store.store(
                part,
                [pool_key(keys[index]) for index in at],
                [self._rows[rows[index]] for index in at],
                b"".join([parents[index] for index in at]),
            ),
        )

    def _get(self, keys: Sequence[OffloadKey], rows: Sequence[int]) -> Found:
        return self._by_part(
            keys,
            lambda part, at: self._store.load(
                part,
                [pool_key(keys[index]) for index in at],
                [self._rows[rows[index]] for index in at],
            ),
        )

    def _by_part(self, keys: Sequence[OffloadKey], ask: Any) -> Found:
        """What `ask` answers for the keys of each part, given their places, in the order of all."""
        places: dict[int, list[int]] = {}
        for index, key in enumerate(keys):
            places.setdefault(self._part_of[get_offload_group_idx(key)], []).append(index)
        found = [False] * len(keys)
        for part, at in places.items():
            for index, good in zip(at, ask(part, at), strict=True):
                found[index] = good
        return found

    def _parent(self, chain: _Chain, key: OffloadKey, context: ReqContext) -> bytes:
        group, end = get_offload_group_idx(key), context.get_offload_key_position(key)
        return NO_PARENT if end is None else chain.parent(group, end - self._chunk_tokens[group])


def pool_key(key: OffloadKey) -> bytes:
    """The pool's key of a chunk: its group is the part's number."""
    return block_key(get_offload_block_hash(key))
