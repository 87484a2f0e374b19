"""Worker half: one rank's copies between its paged KV and the pool's slots.

The engine's thread calls every method. Copies that need not end within a step run on two threads,
one for loads and one for saves, so that a request waiting for its blocks never waits behind a save;
the engine's thread collects what they finished once a step. A copy ends in one of two ways: done,
or failed with a `KvpoolError`. Anything else is a broken invariant and surfaces on the engine's
thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.engine_plugins.vllm.layout.pages import DeviceSlots, GroupPages, Index
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.plan import (
    GroupLoad,
    LoadJob,
    LookupJob,
    Opening,
    RankReport,
    SaveJob,
    StepDone,
    StepPlan,
)
from kvpool.engine_plugins.vllm.worker.attachment import Attachment
from kvpool.engine_plugins.vllm.worker.saves import Saved, Saves, joined
from kvpool.engine_plugins.vllm.worker.steps import StepTimer
from kvpool.errors import KvpoolError, LeaseLost
from kvpool.types import Namespace
from kvpool.wire.frame import NO_ROW

if TYPE_CHECKING:
    from kvpool.client import Client, Lease
    from kvpool.client.device_memory import DeviceMemory


@dataclass(frozen=True)
class LoadResults:
    """What a step reports of asynchronous loads, and of failed ones of either kind."""

    finished: set[str]
    failed_requests: set[str]
    failed_blocks: set[int]


@dataclass(frozen=True)
class RunningSaves:
    """The saves of a step that the save thread has not ended yet."""

    jobs: Sequence[SaveJob]
    given_up: threading.Event
    """Set when blocks of theirs are overwritten: what is not committed by then is not committed at all."""


LOOKUPS_MAX = 8
"""Lookups of a rank at a time: others wait their turn, and count it as waiting for blocks."""


class WorkerHalf:
    """One rank of one engine.

    make_pages: gives what the rank holds of the stored groups, for one thread's use; called once for each.
    block_errors: whether block ids are a way to say which loads failed: the engine computes from the first of
        them on, with what is before it. Else requests are named, which it computes from their beginning, and
        there are no synchronous loads.
    counters: what the worker counts in; its own unless pages count too.
    record_ready: an event behind all that the engine has queued on its device, or None on a host.
    timer: for forward passes; None where another rank of the pipeline stage measures them.
    attachment: to the daemon's device memory, taken over; None where blocks are not read there.
    verify: compare slots in the segment with their checksums before they are copied.
    reuse_wait_s: the longest that a step waits for saves of blocks that it overwrites.
    weights: a digest of the rank's weights as they are.
    pinned: whether the pool's memory may be copied from and to.
    """

    def __init__(
        self,
        client: Client,
        report: RankReport,
        make_pages: Callable[[], Sequence[GroupPages]],
        *,
        block_errors: bool,
        record_ready: Callable[[], Any],
        thread_setup: Callable[[], None] | None = None,
        counters: Counters | None = None,
        timer: StepTimer | None = None,
        attachment: Attachment | None = None,
        verify: bool = False,
        reuse_wait_s: float = 1.0,
        weights: Callable[[], str] = str,
        pinned: Callable[[], bool] = lambda: True,
    ) -> None:
        self._verify = verify
        self._reuse_wait_s = reuse_wait_s
        self._client = client
        self._attachment = attachment
        life = 0 if attachment is None else attachment.life
        self.report = replace(report, life=life, pinned=pinned())
        self._pages = make_pages()
        self._load_pages = make_pages()
        self._block_errors = block_errors
        self._weights = weights
        self._pinned = pinned
        self._record_ready = record_ready
        self._load_thread = _thread("kvpool-load", thread_setup)
        self._save_thread = _thread("kvpool-save", thread_setup)
        self._loads: dict[Future[bool], LoadJob] = {}
        self._saves: dict[Future[tuple[list[Saved], float]], RunningSaves] = {}
        self._lookup_threads: ThreadPoolExecutor | None = None
        self._thread_setup = thread_setup
        self._lookups: dict[Future[Lease | None], LookupJob] = {}
        self._leases: dict[int, Lease] = {}  # by the lookup
        self._unwanted: set[int] = set()  # lookups that were given back before they had ended
        self._chores: list[Future[None]] = []
        self._opening: Future[None] | None = None
        self._generation = 0
        self._namespace: Namespace | None = None
        self._unheard: set[int] = set()
        self._done = StepDone()
        self._failed_blocks: set[int] = set()
        self._read: list[Lease] = []
        self.counters = counters or Counters()
        self._stores = Saves(client, make_pages(), self.counters)
        self._timer = timer
        self._begun: Any = None
        self._passes: deque[tuple[int, Any, Any]] = deque()  # step, begin, end

    # --- once a step, in this order -----------------------------------------------------------

    def end_saves(self, reused: Collection[int]) -> None:
        """Have these saves read no more when this returns: the step overwrites some of their blocks.

        They are waited for. If they do not end in time, all saves are given up: the others would be as late.
        """
        reading = [
            future
            for future, running in self._saves.items()
            if any(job.job in reused for job in running.jobs)
        ]
        if reading and wait(reading, self._reuse_wait_s).not_done:
            for running in self._saves.values():
                running.given_up.set()

    def begin_step(self, plan: StepPlan) -> None:
        """The forward pass begins, unless there are synchronous loads before it."""
        if plan.reset > self.report.reset:
            # Here, since nothing changes weights during a step.
            self.report = replace(self.report, weights=self._weights(), reset=plan.reset)
            self._done.reports = [self.report]
        self._begun = self._timer.mark() if self._timer is not None and plan.measured else None

    def start_loads(self, plan: StepPlan) -> None:
        """Start the step's loads; synchronous ones have ended when this returns."""
        ready = self._record_ready() if plan.loads else None
        device = None if self._attachment is None else self._attachment.memory
        self._start_lookups(plan, device)
        for each in plan.loads:
            job = each
            if each.lookup:
                own = self._leases.get(each.lookup)
                job = replace(each, token="" if own is None else own.token)
            if not job.sync:
                future = self._load_thread.submit(self._load, job, self._load_pages, ready, device)
                self._loads[future] = job
                continue
            begun = time.monotonic()
            loaded = self._load(job, self._pages, ready, device)
            self._done.load_seconds[job.job] = time.monotonic() - begun
            if not loaded:
                self._unheard.add(job.job)
                self._failed_blocks |= job.block_ids()
                self._done.failed_loads.add(job.job)
            self._done.loads[job.job] = 1
        if any(job.sync for job in plan.loads):
            self.begin_step(plan)

    def _start_lookups(self, plan: StepPlan, device: DeviceMemory | None) -> None:
        if plan.opening is not None:
            # Ahead of the step's saves, which are begun later, in the same thread.
            self._opening = self._save_thread.submit(self._open, plan.opening)
            self._chores.append(self._opening)
        for number in plan.released:
            lease = self._leases.pop(number, None)
            if lease is not None:
                self._client.release(lease)
            elif any(job.job == number for job in self._lookups.values()):
                self._unwanted.add(number)
        if plan.lookups and self._lookup_threads is None:
            self._lookup_threads = _threads("kvpool-lookup", LOOKUPS_MAX, self._thread_setup)
        for job in plan.lookups:
            assert self._lookup_threads is not None
            self._lookups[
                self._lookup_threads.submit(self._look_up, job, device, self._opening)
            ] = job

    def start_saves(self, plan: StepPlan) -> None:
        """Start the step's saves, after its forward pass was submitted.

        From a failed synchronous load until the scheduler has heard of it, steps compute on blocks
        that hold anything: what they would save is dropped.
        """
        if self._timer is not None and self._begun is not None:
            self._passes.append((plan.measured, self._begun, self._timer.mark()))
            self._begun = None
        if plan.want_report:
            self._done.reports = [self.report]
        if plan.saves and not self._unheard:
            ready = self._record_ready()
            running = RunningSaves(plan.saves, threading.Event())
            self._saves[self._save_thread.submit(self._save, running, ready)] = running
        else:
            for job in plan.saves:
                self._done.saves[job.job] = 1
                self._done.failed_saves.add(job.job)
        self._unheard.difference_update(plan.acknowledged)

    def take_loads(self) -> LoadResults:
        """Asynchronous loads that ended, and blocks whose load failed, since the last call."""
        finished: set[str] = set()
        failed: set[str] = set()
        for future in [future for future in self._loads if future.done()]:
            job = self._loads.pop(future)
            finished.add(job.request_id)
            self._done.loads[job.job] = 1
            if not future.result():
                self._done.failed_loads.add(job.job)
                if self._block_errors:
                    self._failed_blocks |= job.block_ids()
                else:
                    failed.add(job.request_id)
        blocks, self._failed_blocks = self._failed_blocks, set()
        return LoadResults(finished, failed, blocks)

    def take_done(self) -> StepDone | None:
        """A report for the scheduler half, or None."""
        # Leases of synchronous loads, given back when no token waits for it.
        while self._read:
            self._client.release(self._read.pop())
        for future in [future for future in self._saves if future.done()]:
            jobs = self._saves.pop(future).jobs
            results, seconds = future.result()
            for job, saved in zip(jobs, results, strict=True):
                self._done.saves[job.job] = 1
                self._done.save_seconds[job.job] = seconds
                if saved is not Saved.ALL:
                    self._done.failed_saves.add(job.job)
                if saved is Saved.OUTDATED:
                    self._done.outdated.add(job.generation)
        self._collect_passes()
        self._collect_lookups()
        if self._attachment is not None:
            self._attend(self._attachment)
        if (pinned := self._pinned()) != self.report.pinned:
            self.report = replace(self.report, pinned=pinned)
            self._done.reports = [self.report]
        while self._chores and self._chores[0].done():
            self._chores.pop(0).result()
        if not self._done:
            return None
        done, self._done = self._done, StepDone()
        return done

    def _collect_lookups(self) -> None:
        for future in [future for future in self._lookups if future.done()]:
            job = self._lookups.pop(future)
            lease = future.result()
            self._done.lookups[job.job] = [0 if lease is None else lease.blocks]
            if lease is not None and job.job in self._unwanted:
                self._client.release(lease)
            elif lease is not None:
                self._leases[job.job] = lease
            self._unwanted.discard(job.job)

    def _collect_passes(self) -> None:
        """Forward passes that have ended, in their order."""
        while self._timer is not None and self._passes:
            step, begin, end = self._passes[0]
            seconds = self._timer.seconds(begin, end)
            if seconds is None:
                return
            self._passes.popleft()
            self._done.steps[step] = seconds, 1

    def _attend(self, attachment: Attachment) -> None:
        """Look after the daemon's device memory, and report anew when it is another one."""
        ended = attachment.look()
        if ended is not None:
            # Behind all loads that were begun with it. None begins any more, and synchronous ones have ended.
            self._chores.append(self._load_thread.submit(ended.close))
        if attachment.life != self.report.life:
            self.report = replace(self.report, life=attachment.life)
            self._done.reports = [self.report]

    def settle(self) -> None:
        """Wait until no copy is under way or queued any more; each has a deadline."""
        for thread in (self._load_thread, self._save_thread):
            thread.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for copies that run (each has a deadline), drop those that wait, stop the threads."""
        for thread in (self._load_thread, self._save_thread, self._lookup_threads):
            if thread is not None:
                thread.shutdown(wait=True, cancel_futures=True)
        for lease in self._leases.values():
            self._client.release(lease)
        if self._attachment is not None:
            self._attachment.close()

    # --- on the load thread, or the engine's for synchronous loads ------------------------------

    def _load(
        self, job: LoadJob, pages: Sequence[GroupPages], ready: Any, device: DeviceMemory | None
    ) -> bool:
        """Copy leased slots into the request's blocks. False: nothing of it may be used."""
        begun = time.monotonic()
        try:
            self._copy_in(job, pages, ready, device)
        except KvpoolError:
            self.counters.add(failed_loads=1)
            return False
        self.counters.add(loads=1, load_seconds=time.monotonic() - begun)
        return True

    def _copy_in(
        self, job: LoadJob, pages: Sequence[GroupPages], ready: Any, device: DeviceMemory | None
    ) -> None:
        """Copy all groups. Raises `LeaseLost` when any of the bytes may be stale.

        device: the daemon's memory that the rank was attached to when the load was begun.
        """
        wanted = [position for position, group in enumerate(job.groups) if group.block_ids]
        parts = [part.part for position in wanted for part in pages[position].parts]
        lease = self._client.join(job.token, parts=parts, device=device, verify=self._verify)
        if lease is None:
            raise LeaseLost("the lease or its device memory was lost, or the daemon is unreachable")
        try:
            lease.check()  # what is known to be gone is not even touched
            if self._verify:
                self._check_bytes(lease)
            for position in wanted:
                self._copy_group(job.groups[position], lease, pages[position], ready)
            # The copies are complete here, on accelerators too; only now do the clock, and the life of
            # the device memory's owner, say whether the slots were still ours while they ran.
            lease.check()
        finally:
            if job.sync:
                self._read.append(lease)
            else:
                self._client.release(lease)

    def _check_bytes(self, lease: Lease) -> None:
        """Raises `LeaseLost` if any slot is not what was saved. The load is lost: its blocks are computed."""
        wrong = {part: slots.wrong() for part, slots in lease.slots.items()}
        for part, indices in wrong.items():
            lease.report(part, indices)
        if any(map(len, wrong.values())):
            raise LeaseLost("some blocks in the pool's memory do not match their checksums")

    def _copy_group(self, group: GroupLoad, lease: Lease, held: GroupPages, ready: Any) -> None:
        blocks = np.asarray(group.block_ids, np.int64)
        for pages, parts in held.together():
            far: list[tuple[Index, Index]] = []
            near: list[tuple[Index, Index]] = []
            for part in parts:
                slots = lease.slots[part.part]
                skip = group.first - slots.first // group.stride
                some = slice(skip, skip + len(blocks))
                rows, own = slots.rows[some], part.rows(blocks)
                if skip < 0 or len(rows) != len(blocks):
                    raise LeaseLost("the lease does not cover the blocks that the engine needs")
                if slots.device_rows is None:
                    far.append((rows, own))
                    continue
                device_rows = slots.device_rows[some]
                there = device_rows != NO_ROW
                near.append((device_rows[there], own[there]))
                far.append((rows[~there], own[~there]))
            if near:
                on_device = DeviceSlots(slots.device_table, slots.nbytes)
                pages.from_slots(on_device, *joined(near), ready)
            if sum(len(rows) for rows, _ in far):
                pages.from_slots(slots, *joined(far), ready)
            on_it = sum(len(rows) for rows, _ in near)
            self.counters.add(
                loaded_blocks=len(blocks) * len(parts),
                loaded_bytes=len(blocks) * len(parts) * pages.nbytes,
                device_blocks=on_it,
                device_bytes=on_it * pages.nbytes,
            )

    # --- on the threads for lookups -------------------------------------------------------------

    def _look_up(
        self, job: LookupJob, device: DeviceMemory | None, opening: Future[None] | None
    ) -> Lease | None:
        """Lease what the rank reads of these blocks. None: nothing, or the daemon does not answer."""
        if opening is not None:
            opening.result()  # has a deadline
        namespace = self._namespace
        if namespace is None:
            return None
        parts = [part.part for group in self._pages for part in group.parts]
        try:
            if job.following is not None:
                self._client.follow(
                    namespace,
                    job.keys,
                    wait_s=job.following.follow_s,
                    source=job.following.source,
                    parts=parts,
                    trace=job.trace,
                )
            return self._client.acquire(
                namespace,
                job.keys,
                parts=parts,
                lease_s=job.lease_s,
                wait_s=job.wait_s,
                recompute=job.recompute,
                device=device,
                trace=job.trace,
            )
        except KvpoolError:
            self.counters.add(failed_lookups=1)
            return None

    # --- on the save thread ---------------------------------------------------------------------

    def _open(self, opening: Opening) -> None:
        """Enter the namespace with the scheduler's weights. Where that fails, so does every save."""
        left, self._namespace = self._namespace, None
        self._generation = opening.generation
        if opening.weights < 0:
            return
        try:
            self._namespace = self._client.open(opening.record, generation=opening.weights)
            if left is not None and left.digest != self._namespace.digest:
                self._client.namespaces.close(left)
        except KvpoolError:
            pass  # counted with each save

    def _save(self, running: RunningSaves, ready: Any) -> tuple[list[Saved], float]:
        """Store a step's blocks; and how many seconds that took, once they were computed."""
        if ready is not None:
            ready.synchronize()
        begun = time.monotonic()
        jobs = running.jobs
        now = [job.generation == self._generation for job in jobs]
        results = [Saved.FAILED] * len(jobs)
        if self._namespace is not None and any(now):
            some = [job for job, current in zip(jobs, now, strict=True) if current]
            given_up = running.given_up.is_set
            found = iter(self._stores.save(self._namespace, some, ready, given_up))
            results = [next(found) if current else Saved.FAILED for current in now]
        if failed := sum(result is not Saved.ALL for result in results):
            self.counters.add(failed_saves=failed)
        return results, time.monotonic() - begun


def _thread(name: str, setup: Callable[[], None] | None) -> ThreadPoolExecutor:
    return _threads(name, 1, setup)


def _threads(name: str, most: int, setup: Callable[[], None] | None) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=most, thread_name_prefix=name, initializer=setup)
