"""Loads of leased blocks into the engine's own: from their order to the release of their lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.engine_plugins.vllm.plan import LoadJob, StepDone, block_key, plan_load
from kvpool.engine_plugins.vllm.scheduler.lookups import Lookups
from kvpool.engine_plugins.vllm.scheduler.request_state import RankLease, RequestState, Shared
from kvpool.engine_plugins.vllm.scheduler.saves import Saves
from kvpool.engine_plugins.vllm.scheduler.speeds import SpeedModel

if TYPE_CHECKING:
    from kvpool.client import Lease


@dataclass
class RunningLoad:
    """A load that not all ranks have ended."""

    state: RequestState
    lease: Lease | RankLease
    start: int
    """Chain index of the first block."""
    blocks: int
    sync: bool
    ranks_left: int
    suspects: set[int]
    """Of a synchronous load: the engine's blocks that hold what they should if the load succeeds, and anything if it
    fails: those that are loaded, and those that the request computes in the same step."""
    begun: float
    """When the load was ordered."""
    failed: bool = False


class Loads:
    """Orders loads, and follows them until all ranks have ended. Scheduling thread only."""

    def __init__(self, shared: Shared, lookups: Lookups, saves: Saves, speeds: SpeedModel) -> None:
        self._shared = shared
        self._lookups = lookups
        self._saves = saves
        self._speeds = speeds
        self._queued: list[LoadJob] = []
        self._acknowledged: list[int] = []
        self._running: dict[int, RunningLoad] = {}
        self._ended: list[Lease | RankLease] = []

    @property
    def running(self) -> bool:
        return bool(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    @property
    def synchronous(self) -> bool:
        """Whether the next step begins with a load."""
        return any(job.sync for job in self._queued)

    def take(self) -> tuple[list[LoadJob], list[int]]:
        """Return the loads that the next step begins, and the failed synchronous loads that were heard of."""
        queued, self._queued = self._queued, []
        acknowledged, self._acknowledged = self._acknowledged, []
        return queued, acknowledged

    def is_loading(self, state: RequestState, local: int) -> bool:
        """Whether blocks of the engine's own hit are to be loaded by another request at the start of this step.

        The engine counts them as cached already, and would let this one compute on top of them. If the load
        failed, it would not know of all who did.
        """
        for job in self._queued:
            load = self._running[job.job]
            if not job.sync or local <= load.start:
                continue
            at = load.start
            if load.state.hashes(at + 1)[at] == state.hashes(at + 1)[at]:
                return True
        return False

    def begin(self, state: RequestState, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Order the load of `tokens` of what the request's lookup has found."""
        lookup = state.lookup
        assert lookup is not None and lookup.lease is not None  # noqa: PT018  (an engine loads what a lookup promised)
        start = state.local
        end = start + tokens // self._shared.engine.hash_tokens
        job = LoadJob(
            job=next(self._shared.jobs),
            request_id=state.request.request_id,
            token=lookup.lease.token,
            sync=lookup.sync,
            groups=plan_load(self._shared.engine.rules, tables, lookup.start, start, end),
            lookup=lookup.lease.job if isinstance(lookup.lease, RankLease) else 0,
        )
        state.lookup = None
        state.served = True
        state.saved = max(state.saved, end)
        self._saves.note_loaded([*map(block_key, state.hashes(end)[start:end])])
        suspects: set[int] = set()
        if lookup.sync:
            (rule,) = self._shared.engine.rules
            suspects.update(tables[rule.group][start // rule.stride :])
        self._running[job.job] = RunningLoad(
            state,
            lookup.lease,
            start,
            end - start,
            lookup.sync,
            self._shared.engine.ranks,
            suspects,
            self._shared.clock(),
        )
        self._queued.append(job)

    def note_failed(self, done: StepDone, block_pool: Any) -> None:
        """Learn which loads have failed on ranks. block_pool: the engine's own."""
        for job in done.failed_loads & self._running.keys():
            load = self._running[job]
            state = load.state
            state.limit = load.start if state.limit is None else min(state.limit, load.start)
            state.saved = min(state.saved, load.start)
            load.failed = True
            end = len(state.request.block_hashes)
            self._saves.note_not_loaded([*map(block_key, state.hashes(end)[load.start : end])])
            if load.sync:
                # The engine computes them again for the requests that are left, but has had them in its cache since
                # it allocated them: another request would find them there if these are aborted before.
                block_pool.evict_blocks(load.suspects)
                self._acknowledged.append(job)

    def note_ended(self, done: StepDone) -> None:
        """Learn which loads have ended on ranks, and how long they took."""
        for job, ranks in done.loads.items():
            load = self._running[job]
            load.ranks_left -= ranks
            if load.ranks_left == 0:
                del self._running[job]
                self._ended.append(load.lease)
                if not load.failed:
                    copy_s = done.load_seconds.get(job, 0.0)
                    self._speeds.observe_load(
                        load.blocks, begun=load.begun, copy_s=copy_s, sync=load.sync
                    )

    def release_ended(self) -> None:
        """Give back leases of ended loads: a step later, when no first token waits for it."""
        while self._ended:
            self._lookups.release(self._ended.pop())
