"""Requests to an object store: bounded in number, time and retries, and few while the store fails.

One thread runs an event loop for all of them; callers are threads that wait. A request past its deadline
is cancelled and its connection closed, so a hanging store holds no thread, however often it
is used.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from kvpool.errors import ConfigError, Unavailable
from kvpool.retry import Breaker, BreakerRule, backoff_s
from kvpool.storage.object.client import Fault, StoreFault
from kvpool.storage.object.packs import PACK_BYTES_MAX

T = TypeVar("T")
TagT = TypeVar("TagT")

Clock = Callable[[], float]
Attempt = Callable[[], Awaitable[T]]
Job = tuple[TagT, Attempt[T], int]
"""The caller's name for it, the request, and how many bytes it moves."""

LATE_COUNTS_S = 0.2
"""With less time than this, a request that misses the caller's deadline does not count as a failure of the store."""

STOP_LOOK_S = 0.05
"""How often a caller that may be stopped checks for it."""

GRACE_S = 2.0
"""The loop cancels late requests, so that the breaker counts them; callers wait this much longer for that."""

JOIN_S = 10.0


@dataclass(frozen=True, slots=True)
class ObjectLimits:
    """Limits of an object store.

    bytes_max: of all packs that this node wrote.
    pack_bytes: a pack has about this many bytes of blocks; a larger block has one of its own. In memory there is
        one such buffer for each of the `uploads` of a call to `put`.
    dead_share_max: a pack is deleted when more than this share of it is dead.
    range_bytes: the most that one request reads; `gap_bytes`: unwanted bytes that it may read between blocks.
    reads, uploads: requests of one call at a time. requests_max: of all calls.
    attempt_s, connect_s: limits of one attempt, and of connecting in it; to move bytes it may take
        longer, as long as `bytes_s_min` allows.
    retries: attempts after the first, each after a random wait of up to `backoff_s`, doubled each time,
        never above `backoff_s_max`.
    failures_max: after this many in a row the store is suspended for about `suspend_s`, doubled each time,
        never above `suspend_s_max`.
    """

    bytes_max: int
    pack_bytes: int = 16 << 20
    dead_share_max: float = 0.5
    range_bytes: int = 8 << 20
    gap_bytes: int = 256 << 10
    reads: int = 8
    uploads: int = 2
    requests_max: int = 32
    attempt_s: float = 10.0
    connect_s: float = 3.0
    bytes_s_min: float = 4e6
    retries: int = 3
    backoff_s: float = 0.1
    backoff_s_max: float = 2.0
    failures_max: int = 5
    suspend_s: float = 1.0
    suspend_s_max: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_zero = field.name in ("retries", "gap_bytes", "backoff_s", "backoff_s_max")
            if value < 0 or (value == 0 and not least_is_zero):
                raise ConfigError(f"{field.name} of the object tier is {value}: too small")
        if self.dead_share_max > 1:
            raise ConfigError("dead_share_max of the object tier is a share: at most 1")
        if self.pack_bytes > PACK_BYTES_MAX // 2:
            raise ConfigError(f"pack_bytes of the object tier is at most {PACK_BYTES_MAX // 2}")


class Requests:
    """See the module. All methods but `close` are for any thread; `close` once, when none is in use.

    clock: monotonic seconds, which deadlines are in. rng: for jitter, used by the loop's thread alone.
    """

    def __init__(self, limits: ObjectLimits, clock: Clock, rng: random.Random) -> None:
        self._limits = limits
        self._clock = clock
        self._rng = rng
        self._breaker = Breaker(
            BreakerRule(limits.failures_max, limits.suspend_s, limits.suspend_s_max)
        )
        self._permits = asyncio.Semaphore(limits.requests_max)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvpool-remote", daemon=True
        )
        self._thread.start()
        # Changed by the loop's thread alone, read by any.
        self.attempts = 0
        self.faults = dict.fromkeys(Fault, 0)
        self.last_fault = ""

    @property
    def suspended_s(self) -> float:
        return max(0.0, self._breaker.retry_at - self._clock())

    @property
    def suspensions(self) -> int:
        return self._breaker.opened

    def one(self, attempt: Attempt[T], deadline: float) -> T:
        """The result of one request. Raises `StoreFault`."""
        for _, result in self.run([(None, attempt, 0)], deadline, 1):
            if isinstance(result, StoreFault):
                raise result
            return result
        raise StoreFault(Fault.LATE)

    def run(
        self,
        jobs: Iterable[Job[TagT, T]],
        deadline: float,
        window: int,
        stopped: Callable[[], bool] | None = None,
    ) -> Iterator[tuple[TagT, T | StoreFault]]:
        """Requests, `window` of them at a time, with their results as they come.

        Jobs are drawn as they can be started. Unfinished ones at the deadline are cancelled and late;
        those not started by then are not in the results. Once `stopped` returns True, which is checked
        every `STOP_LOOK_S`, the rest is cancelled at once and not in the results either.
        """
        ended: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        running: dict[Future[T], TagT] = {}
        waiting = iter(jobs)
        try:
            while True:
                while len(running) < window and self._clock() < deadline:
                    try:
                        tag, attempt, nbytes = next(waiting)
                    except StopIteration:
                        break
                    begun = self._submit(self._request(attempt, nbytes, deadline))
                    running[begun] = tag
                    begun.add_done_callback(ended.put)
                if not running:
                    return
                future = self._next(ended, deadline, stopped)
                if future is None:
                    return
                tag = running.pop(future)
                try:
                    result: T | StoreFault = future.result()
                except StoreFault as fault:
                    result = fault
                except CancelledError:
                    raise Unavailable("the object store was closed") from None
                yield tag, result
        finally:
            for left in running:
                left.cancel()

    def _next(
        self,
        ended: queue.SimpleQueue[Future[T]],
        deadline: float,
        stopped: Callable[[], bool] | None,
    ) -> Future[T] | None:
        """The next request that has ended; None when it is no longer waited for."""
        while stopped is None or not stopped():
            left_s = max(0.0, deadline - self._clock()) + GRACE_S
            try:
                return ended.get(timeout=left_s if stopped is None else min(left_s, STOP_LOOK_S))
            except queue.Empty:
                if stopped is None or left_s <= STOP_LOOK_S:
                    return None
        return None

    def close(self) -> None:
        """Cancels running requests and ends the thread."""
        if not self._thread.is_alive():
            return
        self._submit(self._cancel_all()).result(JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            coroutine.close()
            raise Unavailable("the object store is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @staticmethod
    async def _cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()

    async def _request(self, attempt: Attempt[T], nbytes: int, deadline: float) -> T:
        """One request with its retries."""
        limits = self._limits
        last: StoreFault | None = None
        for tried in range(limits.retries + 1):
            try:
                return await self._attempt(attempt, nbytes, deadline)
            except StoreFault as fault:
                if last is not None and fault.fault is Fault.SUSPENDED:
                    # A sent request may have arrived: "suspended" means that nothing was sent.
                    raise last from None
                last = fault
                wait_s = backoff_s(limits.backoff_s, limits.backoff_s_max, tried)
                wait_s *= self._rng.random()
                left_s = deadline - self._clock()
                if not fault.fault.retryable or tried == limits.retries or wait_s >= left_s:
                    raise
            await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, attempt: Attempt[T], nbytes: int, deadline: float) -> T:
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._permits.acquire()
        except TimeoutError:
            raise StoreFault(Fault.LATE) from None
        try:
            started = self._clock()
            if not self._breaker.allows(started):
                self.faults[Fault.SUSPENDED] += 1
                raise StoreFault(Fault.SUSPENDED)
            usual_s = self._limits.attempt_s + nbytes / self._limits.bytes_s_min
            return await self._watched(attempt, min(usual_s, deadline - started))
        finally:
            self._permits.release()

    async def _watched(self, attempt: Attempt[T], allowed_s: float) -> T:
        """One attempt that the breaker allowed; its end is reported to the breaker, whatever it is."""
        self.attempts += 1
        breaker = self._breaker
        told = False
        try:
            try:
                async with asyncio.timeout(max(0.0, allowed_s)):
                    result = await attempt()
            except TimeoutError:
                raise StoreFault(Fault.LATE) from None
            breaker.succeeded()
            told = True
            return result
        except StoreFault as fault:
            self.faults[fault.fault] += 1
            if fault.fault.answered:
                breaker.succeeded()
                told = True
            elif fault.fault is not Fault.LATE or allowed_s >= LATE_COUNTS_S:
                self.last_fault = str(fault)
                breaker.failed(
                    self._clock(),
                    for_certain=fault.fault is Fault.DENIED,
                    stretch=self._rng.uniform(0.5, 1.0),
                )
                told = True
            raise
        finally:
            if not told:
                breaker.abandoned()
