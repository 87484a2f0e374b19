"""What vLLM sees: `KvpoolConnector`, a facade that hands each call to the half it belongs to.

vLLM makes one instance with role SCHEDULER in the engine core and one with role WORKER in each
rank. The halves know nothing of vLLM; what crosses between processes is wrapped here in the
classes that vLLM wants. The namespace needs what only ranks know (their layers' bytes, backends,
instruction set), so ranks report it through vLLM's handshake, or with their first step where
another connector (under `MultiConnector`) has taken the handshake for itself.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus
from vllm.version import __version__ as vllm_version

from kvpool.client import Client
from kvpool.engine_plugins import facts
from kvpool.engine_plugins.vllm.config import LoadMode, PluginConfig
from kvpool.engine_plugins.vllm.events import publisher
from kvpool.engine_plugins.vllm.layout.pages import GroupPages, HostPages, Pages
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.naming import namespace
from kvpool.engine_plugins.vllm.naming.callers import models_with
from kvpool.engine_plugins.vllm.naming.positions import rotations
from kvpool.engine_plugins.vllm.naming.weights import Loaded, projected_heads
from kvpool.engine_plugins.vllm.plan import (
    GroupRule,
    RankReport,
    StepDone,
    StepPlan,
    common_life,
    common_weights,
    several_nodes,
)
from kvpool.engine_plugins.vllm.prometheus import KvpoolPromMetrics, KvpoolStats
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.engine_plugins.vllm.scheduler.half import SchedulerHalf
from kvpool.engine_plugins.vllm.scheduler.presence import engine_record
from kvpool.engine_plugins.vllm.scheduler.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler.request_state import Engine
from kvpool.engine_plugins.vllm.worker.attachment import Attachment
from kvpool.engine_plugins.vllm.worker.device import DevicePages, PinnedSegments
from kvpool.engine_plugins.vllm.worker.half import WorkerHalf
from kvpool.engine_plugins.vllm.worker.steps import DeviceTimer, HostTimer
from kvpool.engine_plugins.vllm.worker.stored import StoredGroup, stored_groups
from kvpool.errors import ConfigError
from kvpool.types import PartKind

logger = init_logger(__name__)

WORKERS = WeakSet[WorkerHalf]()
"""The ranks of this process. An engine core that runs in it reaches them between steps."""
COMPLETED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class KvpoolHandshake(KVConnectorHandshakeMetadata):
    """Tells the scheduler what a rank's worker found."""

    report: RankReport


@dataclass
class KvpoolMetadata(KVConnectorMetadata):
    """Orders to the workers for one step."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class KvpoolWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's finished work, for the scheduler."""

    done: StepDone

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvpoolWorkerMetadata:
        self.done.merge(other.done)
        return self


def can_go_back(vllm_config: Any) -> bool:
    """Whether the engine recomputes correctly everything that it has computed on top of a failed load.

    vLLM keeps the tokens of a step that begins before the failure is known; and its second model runner continues
    at the position where the request was.
    """
    return vllm_config.max_concurrent_batches == 1 and not vllm_config.use_v2_model_runner


def check_load_mode(mode: LoadMode, *, block_errors: bool, goes_back: bool) -> None:
    """Raises `ConfigError` where loads are to be synchronous, and a failed one would do harm."""
    if mode is not LoadMode.SYNC:
        return
    if not block_errors:
        raise ConfigError(
            "load_mode sync needs a model with a single cache group, with full attention: for others vLLM "
            "cannot report a failed synchronous load. Use auto or async"
        )
    if not goes_back:
        raise ConfigError(
            "load_mode sync needs vLLM's first model runner without overlapping steps: otherwise results "
            "computed after a failed load would be returned. Use auto or async, or disable async "
            "scheduling, pipeline parallelism and the second runner"
        )


def check_interface() -> None:
    """Raises `ConfigError` if this version of vLLM lacks what kvpool needs."""
    for owner, name in ((KVConnectorBase_V1, "bind_gpu_block_pool"), (BlockPool, "unpin_blocks")):
        if not hasattr(owner, name):
            raise ConfigError(
                f"vLLM {vllm_version} has no {owner.__name__}.{name}, by which kvpool pins blocks while it saves them. "
                "Use a version of vLLM that this kvpool supports, or a newer kvpool"
            )


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks of this engine in the node's pool. Best effort: without a pool it only computes.

    The public methods are vLLM's interface, which names and counts them.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._config = PluginConfig.from_given(transfer.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        rules = namespace.group_rules(
            kv_cache_config, _hash_tokens(kv_cache_config), parallel.decode_context_parallel_size
        )
        draft_blocks = namespace.draft_blocks(rules, vllm_config.speculative_config)
        self._rules: list[GroupRule] = namespace.with_earlier_windows(rules, draft_blocks)
        namespace.check_codec(kv_cache_config, self._rules, self._config.codec)
        pickled = namespace.check_hashes(
            vllm_config.cache_config.prefix_caching_hash_algo,
            os.environ.get("PYTHONHASHSEED"),
            accept_weak=self._config.accept_weak_hashes,
        )
        # With a window, the blocks before the first failed one may never have been there.
        full = [rule.kind is PartKind.FULL for rule in self._rules]
        self._block_errors = len(kv_cache_config.kv_cache_groups) == 1 and full == [True]
        goes_back = can_go_back(vllm_config)
        check_load_mode(
            self._config.load_mode, block_errors=self._block_errors, goes_back=goes_back
        )
        check_interface()
        self._client = self._make_client(
            self._config.lookup_timeout_s
            if role == KVConnectorRole.SCHEDULER
            else self._config.request_timeout_s
        )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._segments: PinnedSegments | None = None
        self._failed_blocks: set[int] = set()
        self._reports: dict[int, RankReport] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(transfer, draft_blocks, pickled, goes_back)

    def _make_scheduler(
        self, transfer: Any, draft_blocks: int, pickled: bool, goes_back: bool
    ) -> SchedulerHalf:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        parallel = vllm_config.parallel_config
        self._facts = namespace.engine_facts(
            vllm_config,
            self._config,
            seed=os.environ.get("PYTHONHASHSEED") or kv_cache_utils.DEFAULT_NONE_HASH_SEED,
            versions=facts.versions(
                "vllm", vllm_version, pickled=pickled, any_version=self._config.any_version
            ),
            hash_tokens=_hash_tokens(kv_cache_config),
        )
        if transfer.kv_load_failure_policy != "recompute":
            logger.warning(
                'kv_load_failure_policy is "%s": a request fails if one of its blocks cannot be loaded from the '
                'pool. Set it to "recompute".',
                transfer.kv_load_failure_policy,
            )
        return SchedulerHalf(
            self._client,
            self._config,
            Engine(
                rules=self._rules,
                hash_tokens=_hash_tokens(kv_cache_config),
                blocks=kv_cache_config.num_blocks,
                ranks=parallel.world_size,
                sync_loads=self._block_errors and goes_back,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                answer_states=vllm_config.speculative_config is None,
                draft_blocks=draft_blocks,
                stages=parallel.pipeline_parallel_size,
                # The second model runner clears new blocks before it calls connectors.
                watches=not (
                    vllm_config.use_v2_model_runner and kv_cache_config.needs_kv_cache_zeroing
                ),
                events=publisher(vllm_config.kv_events_config, parallel.data_parallel_index),
                record=engine_record(
                    vllm_config,
                    self._config,
                    self._rules,
                    hash_tokens=_hash_tokens(kv_cache_config),
                    none_hash=_none_hash(vllm_config.cache_config.prefix_caching_hash_algo),
                    blocks=kv_cache_config.num_blocks,
                ),
            ),
            pulls=self._make_pulls() if transfer.is_kv_consumer else None,
            ahead=Ahead(self._make_client(self._config.request_timeout_s), self._config.lease_s),
            new_weights=lambda: uuid.uuid4().hex,
        )

    def _make_client(self, timeout_s: float, connections_max: int = 16) -> Client:
        # Where the scheduler is, rank 0 is too.
        rank = (
            0 if self._role == KVConnectorRole.SCHEDULER else self._vllm_config.parallel_config.rank
        )
        instance = str(self._kv_transfer_config.engine_id)
        return self._config.client(
            timeout_s, rank=rank, instance=instance, connections_max=connections_max
        )

    def _make_pulls(self) -> Pulls | None:
        config = self._config
        if not config.pull_wait_s:
            return None
        threads = config.pulls_max + config.follows_max
        client = self._make_client(config.request_timeout_s, connections_max=threads)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-pull")
        return Pulls(client, pool, config, time.monotonic)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save costs a later hit, nothing else."""
        return False

    # --- start-up: ranks report, the scheduler half learns the namespace --------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        device = next(iter(kv_caches.values())).device
        layers = self._vllm_config.compilation_config.static_forward_context
        # Target and draft, wherever they have layers with KV.
        models = models_with(
            [each for each in layers.values() if isinstance(each, torch.nn.Module)]
        )
        if not models:
            logger.warning(
                "the model is not found in this version of vLLM: blocks are shared only by engines with the same "
                "--max-model-len if it may matter, and by none after a reset of the caches"
            )
        loaded = Loaded(models)
        stored = stored_groups(
            self._vllm_config,
            self._kv_cache_config,
            self._config,
            self._rules,
            kv_caches,
            lambda name: layers[name].get_attn_backend().get_name(),
            projected_heads(models, layers).get,
        )
        for rule, group in zip(self._rules, stored, strict=True):
            if group.why:
                logger.warning(
                    "cache group %d is stored by rank, for engines of these ranks only: %s",
                    rule.group,
                    group.why,
                )
        report = self._report(device, stored, models, loaded)
        on_host = device.type == "cpu"
        module = torch.get_device_module(device)

        def thread_setup() -> None:
            if not on_host:
                module.set_device(device)

        segments = None
        if not on_host:
            pinning = ThreadPoolExecutor(1, "kvpool-pin", initializer=thread_setup)
            segments = PinnedSegments(device, pinning)
        counters = Counters()

        def plain_pages(rows: Sequence[torch.Tensor], step: int) -> Pages:
            if segments is None:
                return HostPages([each.numpy() for each in rows], step=step)
            return DevicePages(rows, segments)

        def make_pages() -> Sequence[GroupPages]:
            firsts = namespace.first_parts([group.share.cut for group in stored])
            return [
                group.pages(first, plain_pages, counters.add)
                for group, first in zip(stored, firsts, strict=True)
            ]

        parallel = self._vllm_config.parallel_config
        # Ranks of one pipeline stage run in step: one of them measures for all.
        first = parallel.rank % (parallel.world_size // parallel.pipeline_parallel_size) == 0

        def record_ready() -> Any:
            if on_host:
                return None
            event = module.Event()
            event.record()
            return event

        # Mapping the segment takes longer than any load, and registering it with the driver longer still: both begin
        # before the first one.
        self._client.warm(None if segments is None else segments.begin)
        attachment = None
        if self._config.attach_device and self._kv_transfer_config.is_kv_consumer:
            thread = ThreadPoolExecutor(1, "kvpool-attach", initializer=thread_setup)
            attachment = Attachment(lambda: self._client.attach_device(device), thread)
            attachment.begin()
        self._segments = segments
        self._worker = WorkerHalf(
            self._client,
            report,
            make_pages,
            block_errors=self._block_errors,
            record_ready=record_ready,
            thread_setup=thread_setup,
            counters=counters,
            timer=None if not first else HostTimer() if on_host else DeviceTimer(module),
            attachment=attachment,
            verify=self._config.verify_loads,
            weights=loaded.digest,
            pinned=lambda: segments is None or segments.ready,
            reuse_wait_s=self._config.request_timeout_s,
        )
        WORKERS.add(self._worker)

    def _report(
        self,
        device: torch.device,
        stored: Sequence[StoredGroup],
        models: Sequence[torch.nn.Module],
        loaded: Loaded,
    ) -> RankReport:
        return RankReport(
            rank=self._vllm_config.parallel_config.rank,
            device=device.type,
            layout=str(self._kv_cache_config.kv_cache_layout),
            isa=namespace.isa(device.type),
            groups=[group.layer_bytes() for group in stored],
            backends={layer.name: layer.backend for group in stored for layer in group.layers()},
            held=[group.held() for group in stored],
            weights=loaded.digest(),
            config=facts.config_digest(self._vllm_config.model_config.hf_config),
            rotations=rotations(models, self._vllm_config.model_config.dtype),
            fp8=str(current_platform.fp8_dtype()),
            place=f"{platform.node()}:{self._client.socket_path}",
        )

    def get_handshake_metadata(self) -> KvpoolHandshake | None:
        return None if self._worker is None else KvpoolHandshake(self._worker.report)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._learn([one.report for one in metadata.values() if isinstance(one, KvpoolHandshake)])

    def _learn(self, reports: Sequence[RankReport]) -> None:
        """Collect the ranks' reports; when all are there, the namespace is known.

        Later ones report the device memory that the ranks are attached to.
        """
        scheduler = self._scheduler
        assert scheduler is not None
        self._reports.update({report.rank: report for report in reports})
        ranks = self._vllm_config.parallel_config.world_size
        if len(self._reports) < ranks:
            return
        scheduler.use_device(common_life(self._reports.values()))
        scheduler.use_memory(pinned=all(report.pinned for report in self._reports.values()))
        everyone = self._sorted_reports()
        if scheduler.entered.namespace is None:
            record = namespace.record(
                self._vllm_config,
                self._kv_cache_config,
                self._config,
                self._rules,
                everyone,
                self._facts,
            )
            scheduler.set_namespace(
                partial(namespace.with_weights, record),
                common_weights(everyone, 0) or "",
                groups=[rule.group for rule in namespace.part_rules(self._rules, everyone)],
                rank_bytes=namespace.rank_bytes(self._rules, everyone),
                several_nodes=several_nodes(everyone),
            )
        entered = scheduler.entered
        entered.use_weights(common_weights(everyone, entered.last_reset))

    def _sorted_reports(self) -> list[RankReport]:
        return [self._reports[rank] for rank in sorted(self._reports)]

    # --- scheduler --------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvpoolMetadata:
        assert self._scheduler is not None
        state = scheduler_output.kv_connector_block_state
        assert state is not None, "vLLM describes a step's blocks for every connector"
        return KvpoolMetadata(
            self._scheduler.plan_step(
                scheduler_output.num_scheduled_tokens,
                state.get_block_ids,
                state.boundary_state_offloads,
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._scheduler is not None
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KvpoolWorkerMetadata):
            self._scheduler.step_done(metadata.done)
            if metadata.done.reports:
                self._learn(metadata.done.reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        completed = request.status in COMPLETED
        report = self._scheduler.request_finished(request, block_ids, completed=completed)
        return False, None if report is None else {"kvpool": msgspec.to_builtins(report)}

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_work()

    def has_pending_block_frees(self) -> bool:
        """Whether a request waits for blocks rather than taking those of another, which saves may still copy."""
        return self._scheduler is not None and self._scheduler.pins > 0

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """vLLM 0.33 asks: whether it may unmap the KV caches, between the next two calls."""
        return True

    def unregister_kv_caches(self) -> None:
        """The KV caches are unmapped next. vLLM has ended all transfers; nothing of them is registered anywhere."""
        if self._worker is not None:
            self._worker.settle()

    def restore_kv_caches(self) -> None:
        """They are mapped again, at the same addresses."""

    def reset_cache(self) -> bool | None:
        assert self._scheduler is not None
        # To sleep, vLLM may unmap the KV caches next. A core in a process of its own has made steps until all saves
        # had ended; one in the ranks' process makes none.
        for worker in WORKERS:
            worker.settle()
        return self._scheduler.reset()

    # --- worker, once a step ----------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """The step is about to overwrite blocks that requests have left."""
        if self._worker is not None and isinstance(kv_connector_metadata, KvpoolMetadata):
            self._worker.end_saves(kv_connector_metadata.plan.reused)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The first call of vLLM in a step, ahead of its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._get_connector_metadata().plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole before the step that uses them."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves start when the step's forward pass was submitted."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_saves(self._get_connector_metadata().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_loads()
        self._failed_blocks = results.failed_blocks
        return KVConnectorTransferResults(
            finished_recving=results.finished, failed_recving=results.failed_requests
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> KvpoolWorkerMetadata | None:
        done = self._worker.take_done() if self._worker is not None else None
        return None if done is None else KvpoolWorkerMetadata(done)

    # --- both -------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvpoolStats | None:
        half = self._scheduler or self._worker
        tally = half.counters.take() if half is not None else {}
        return KvpoolStats(data=tally) if tally else None

    def shutdown(self) -> None:
        if self._worker is not None:
            WORKERS.discard(self._worker)
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._segments is not None:
            self._segments.close()
        self._client.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpoolStats | None:
        return KvpoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvpoolPromMetrics:
        return KvpoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _none_hash(algorithm: str) -> bytes:
    """The start of chains of block hashes; vLLM computes it only after it has created the connector."""
    hash_of = get_hash_fn_by_name(algorithm)
    return bytes(hash_of(kv_cache_utils.resolve_none_hash_seed(hash_of)))


def _hash_tokens(kv_cache_config: Any) -> int:
    tokens = kv_cache_config.hash_block_size
    assert tokens, "the engine core resolves the hash block size before it makes connectors"
    return int(tokens)
