"""Who may take slots next where memory is full. Rules only: no I/O, no clock.

Leases, reservations and pins can hold all of a tenant's memory. Prompts that are fetched at a time hold what has
arrived for them, so that all of it may be in prompts of which none is whole. So the oldest tries first, and the others
not at all until it has; and if nothing is freed for it, the others release what they hold, and wait behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.daemon.core.blocks import NamespaceState

RETRY_S = 0.02  # between tries of the oldest
SERVED_S = 0.002  # between looks whether it has its slots
YIELD_S = 0.1  # without progress of the oldest, until the others release what they hold
GIVE_UP_S = 0.5  # without progress of the oldest, until it ends with what it has


@dataclass(eq=False, slots=True)
class RoomWaiter:
    """One request for blocks; made by `RoomQueues.enter` only.

    number: the lower, the older. wake: called when it may try, or is to yield. progress_at: when it last got
    something, or became the oldest. waits: it found no room, or others did before it. tries: it is the oldest, and
    tries again. retry_at: when it may. yields: it is to release what it holds.
    """

    queue: RoomQueue = field(repr=False)
    number: int
    wake: Callable[[], object]
    progress_at: float
    retry_at: float = 0.0
    waits: bool = False
    tries: bool = False
    yields: bool = False


@dataclass(eq=False, slots=True)
class RoomQueue:
    """The requests for memory of a tenant, or of a namespace with a quota.

    members: how many there are. waiting: those of them that wait, by number. first: the oldest when one last tried.
    """

    key: tuple[str, bytes]
    members: int = 0
    waiting: dict[int, RoomWaiter] = field(default_factory=dict)
    first: RoomWaiter | None = None

    def oldest(self) -> RoomWaiter | None:
        """Of those that wait."""
        return self.waiting[min(self.waiting)] if self.waiting else None


class RoomQueues:
    """The queues of all tenants. Not thread-safe."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, bytes], RoomQueue] = {}
        self._last = 0

    def enter(
        self, namespace: NamespaceState, now: float, wake: Callable[[], object]
    ) -> RoomWaiter:
        """A new request, the youngest. It must `leave`. Where others wait, it waits behind them."""
        self._last += 1
        key = (namespace.tenant.name, namespace.base if namespace.quota else b"")
        queue = self._queues.setdefault(key, RoomQueue(key))
        queue.members += 1
        waiter = RoomWaiter(queue, self._last, wake, now)
        if queue.waiting:
            self._wait(waiter)
        return waiter

    def leave(self, waiter: RoomWaiter) -> None:
        """It has all, or waits no longer."""
        queue = waiter.queue
        queue.members -= 1
        self._go_on(waiter)
        if not queue.members:
            del self._queues[queue.key]

    def may_try(self, waiter: RoomWaiter, now: float) -> bool:
        """Whether it may ask for slots now. One that waited tells by `served` or `refused` what came of it."""
        if not waiter.waits or waiter.tries:
            return True
        if now < waiter.retry_at or waiter.queue.oldest() is not waiter:
            return False
        self._is_first(waiter, now)
        waiter.tries = True
        return True

    def served(self, waiter: RoomWaiter) -> None:
        """It has slots for all it asked for: the next oldest may try."""
        self._go_on(waiter)

    def progressed(self, waiter: RoomWaiter, now: float) -> None:
        """Blocks have arrived for it."""
        waiter.progress_at = now

    def refused(self, waiter: RoomWaiter, now: float) -> bool:
        """It found no room; returns whether it is to wait for some."""
        self._wait(waiter)
        waiter.tries = False
        waiter.retry_at = now + RETRY_S
        if waiter.queue.oldest() is waiter:
            self._is_first(waiter, now)
            in_vain_s = now - waiter.progress_at
            if in_vain_s >= GIVE_UP_S:
                self._go_on(waiter)
                return False
            if in_vain_s >= YIELD_S:
                self._have_yielded(waiter)
        return True

    def due(self, waiter: RoomWaiter, now: float) -> float | None:
        """When to look again whether it may try, or has slots; None: when it is woken."""
        if waiter.tries:
            return now + SERVED_S
        return waiter.retry_at if waiter.queue.oldest() is waiter else None

    def retry(self, waiter: RoomWaiter) -> None:
        """Slots were freed for it: it may try as soon as it is the oldest."""
        waiter.retry_at = 0.0

    def yielded(self, waiter: RoomWaiter) -> None:
        """It has released what it held, and waits for its turn."""
        waiter.yields = False
        self._wait(waiter)

    def _is_first(self, waiter: RoomWaiter, now: float) -> None:
        if waiter.queue.first is not waiter:
            waiter.queue.first, waiter.progress_at = waiter, now

    def _have_yielded(self, oldest: RoomWaiter) -> None:
        for other in list(oldest.queue.waiting.values()):
            if other is not oldest:
                other.yields = True
                other.wake()

    def _wait(self, waiter: RoomWaiter) -> None:
        waiter.waits = True
        waiter.queue.waiting[waiter.number] = waiter

    def _go_on(self, waiter: RoomWaiter) -> None:
        if waiter.waits:
            waiter.waits = waiter.tries = waiter.yields = False
            del waiter.queue.waiting[waiter.number]
            oldest = waiter.queue.oldest()
            if oldest is not None:
                oldest.wake()
