"""LMCache's L2 adapter interface, carried out through `kvpool.client`: a translation, with no rules of its own.

What the pool cannot do is a miss for lookups and loads, and a failure for stores: an unreachable daemon, a refused
namespace, no space. The cause is logged once, until it works again. Every task ends: requests to the daemon have
deadlines, and queues are bounded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch  # noqa: F401  # lmcache_native needs its libraries loaded
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvpool.client import NO_ROW, Lease
from kvpool.engine_plugins.lmcache.holds import Holds
from kvpool.engine_plugins.lmcache.objects import (
    KnownLayouts,
    Layout,
    block_keys,
    layout_of,
    layout_of_group,
    record_of,
)
from kvpool.engine_plugins.lmcache.settings import Settings
from kvpool.engine_plugins.lmcache.tasks import Tasks
from kvpool.engine_plugins.lmcache.troubles import Troubles
from kvpool.engine_plugins.settings import PoolSettings
from kvpool.errors import ConfigError, InvalidRequest, KvpoolError, PoolFull, Unavailable
from kvpool.types import Namespace

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

log = logging.getLogger("kvpool.lmcache")

LOCKS_MAX = 1 << 20
NAMESPACES_MAX = 256
KEYS_MAX = 16_384
"""In one request to the daemon."""
STORE_BYTES_MAX = 256 << 20
"""In one request to the daemon, unless one object is larger."""


class KvpoolL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params`, in the form in which LMCache has configurations read."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KvpoolL2AdapterConfig:
        """Raises `ValueError`, as LMCache expects."""
        try:
            return cls(Settings.from_given(d))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @classmethod
    def help(cls) -> str:
        """What the parameters are."""
        return f"{PoolSettings.__doc__}\n{Settings.__doc__}"


class KvpoolL2Adapter(L2AdapterInterface):
    """Keeps LMCache's objects in the pool. Thread-safe, as its base class requires.

    A locked object is under a lease of `lease_s`, within which a load copies it into LMCache's memory. Locks of
    requests that LMCache gave up end with their leases.
    """

    def __init__(
        self, config: KvpoolL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        """l1_memory_desc: not needed, since objects bring their buffers.

        Raises the daemon's refusal, such as that of a token. A daemon that cannot be reached is not an error.
        """
        super().__init__()
        self._settings = settings = config.settings
        self._troubles = Troubles(log)
        connections = 3 * settings.workers + 2
        self._client = settings.client(settings.request_timeout_s, connections_max=connections)
        try:
            reached = self._client.warm()
        except KvpoolError:
            self._client.close()
            raise
        if not reached:
            log.warning("%s: nothing is stored or found until one does", self._unreachable())
        self._namespaces: dict[tuple[str, Layout], Namespace] = {}
        self._layouts = KnownLayouts()
        self._lock = Lock()  # of these two
        self._holds: Holds[ObjectKey, Lease] = Holds(LOCKS_MAX)
        self._notifiers = [create_event_notifier() for _ in range(3)]

        def tasks(name: str, notifier: Any) -> Tasks[Any]:
            return Tasks(f"lmcache-{name}", settings.workers, settings.tasks_max, notifier)

        self._stores: Tasks[L2StoreResult] = tasks("store", self._notifiers[0])
        self._lookups: Tasks[Bitmap] = tasks("lookup", self._notifiers[1])
        self._loads: Tasks[Bitmap] = tasks("load", self._notifiers[2])

    # ---- event descriptors ---------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """See the base class, as for all methods here that say nothing else."""
        return int(self._notifiers[0].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[1].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[2].fileno())

    # ---- storing -------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._stores.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> L2StoreResult:
        layouts = [layout_of(each) for each in objects]
        stored: list[int] = []
        for model, layout, indices in _alike(range(len(keys)), keys, layouts.__getitem__):
            with self._troubles.noted(f"objects of {model} are not stored"):
                ns = self._namespace(model, layout)
                for some in _batches(indices, max(1, STORE_BYTES_MAX // layout.nbytes)):
                    if self._stores.closing:
                        break
                    there = self._client.put_each(
                        ns,
                        block_keys(keys[index] for index in some),
                        [_host_bytes(objects[index]) for index in some],
                        replicas=self._settings.replicas,
                    )
                    stored += [index for index, ok in zip(some, there, strict=True) if ok]
                    if not there.all():
                        raise PoolFull("leases, reservations or hard pins hold the pool's memory")
        self._learn(keys, layouts, stored)
        sizes = [layouts[index].nbytes for index in stored]
        if stored:
            self._notify_keys_stored([keys[index] for index in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    # ---- looking up ----------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._lookups.submit(
            lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys))
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        ended = self._holds.unlock(keys)
        if ended:
            # In a thread, since it may have to connect. Left undone, the leases end by themselves.
            self._loads.submit_aside(lambda: _release(ended))

    def _look_up(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> Bitmap:
        found = Bitmap(len(keys))
        until = time.monotonic() + self._settings.wait_s
        candidates = self._candidates(keys, group_layout_descs)
        missing = list(range(len(keys)))
        for turn in range(max(map(len, candidates), default=0)):
            asked = [index for index in missing if turn < len(candidates[index])]

            def layout_of_turn(index: int, turn: int = turn) -> Layout:
                return candidates[index][turn]

            for model, layout, indices in _alike(asked, keys, layout_of_turn):
                with self._troubles.noted(f"objects of {model} are not looked up"):
                    for lease, here in self._leases(model, layout, keys, indices, until):
                        locks = [(keys[index], slot) for index, slot in here]
                        if self._holds.add(lease, layout, locks):
                            found.batched_set([index for index, _ in here])
                        else:
                            lease.release()
            missing = [index for index in asked if not found.test(index)]
        return found

    def _candidates(
        self, keys: Sequence[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> list[Sequence[Layout]]:
        """For each key, in which layouts to look for it, the likeliest first."""
        told = {group: layout_of_group(each) for group, each in group_layout_descs.items()}
        by_group: dict[tuple[str, int], Sequence[Layout]] = {}
        found = []
        with self._lock:
            for key in keys:
                group = (key.model_name, key.object_group_id)
                if group not in by_group:
                    layout = told.get(key.object_group_id)
                    by_group[group] = self._layouts.candidates(*group, layout)
                found.append(by_group[group])
        return found

    def _leases(
        self,
        model: str,
        layout: Layout,
        keys: Sequence[ObjectKey],
        indices: Sequence[int],
        until: float,
    ) -> Iterator[tuple[Lease, list[tuple[int, int]]]]:
        """Leases on those of the chosen objects that are there, with their indices and their slots in the lease.

        until: how long to wait for those that are not in memory here.
        """
        ns = self._namespace(model, layout)
        for some in _batches(indices, KEYS_MAX):
            lease = self._client.acquire_each(
                ns,
                block_keys(keys[index] for index in some),
                lease_s=self._settings.lease_s,
                wait_s=max(0.0, until - time.monotonic()),
            )
            if lease is not None:
                slots = np.flatnonzero(lease.slots[0].rows != NO_ROW).tolist()
                yield lease, [(some[slot], slot) for slot in slots]
            elif not self._client.available:
                raise self._unreachable()

    # ---- loading -------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Bitmap:
        layouts = [layout_of(each) for each in objects]
        loaded = self._load_locked(keys, objects, layouts)
        done = set(loaded)
        # What was not locked, or is not any more: the lease has ended, or the lookup was refused its locks.
        rest = [index for index in range(len(keys)) if index not in done]
        for model, layout, indices in _alike(rest, keys, layouts.__getitem__):
            with self._troubles.noted(_not_loaded(model)):
                for lease, here in self._leases(model, layout, keys, indices, 0.0):
                    with lease:
                        loaded += self._copy_out(lease, here, objects)
        found = Bitmap(len(keys))
        found.batched_set(loaded)
        if loaded:
            self._learn(keys, layouts, loaded)
            for model in {keys[index].model_name for index in loaded}:
                self._troubles.clear(_not_loaded(model))
            self._notify_keys_accessed([keys[index] for index in loaded])
        return found

    def _load_locked(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], layouts: Sequence[Layout]
    ) -> list[int]:
        """Which of the objects were copied from their locks in time."""
        held = []
        by_lease: dict[int, tuple[Lease, list[tuple[int, int]]]] = {}
        for index, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
            lock = self._holds.use(key, layout)
            if lock is not None:
                held.append(lock)
                lease = lock.hold.lease
                by_lease.setdefault(id(lease), (lease, []))[1].append((index, lock.index))
        loaded = []
        try:
            for lease, wanted in by_lease.values():
                with self._troubles.noted("locked objects are not loaded"):
                    loaded += self._copy_out(lease, wanted, objects)
        finally:
            _release(self._holds.done(held))
        return loaded

    def _copy_out(
        self, lease: Lease, wanted: Iterable[tuple[int, int]], objects: Sequence[MemoryObj]
    ) -> list[int]:
        """Copy objects, given by index and slot, out of a lease: which of them are right.

        Raises `InvalidRequest` where LMCache's memory cannot be written.
        """
        slots = lease.slots[0]
        table, rows, nbytes = slots.table, slots.rows.tolist(), slots.nbytes
        copied = []
        for index, slot in wanted:
            if self._loads.closing:
                return []
            np.copyto(_host_bytes(objects[index], writable=True), table[rows[slot], :nbytes])
            copied.append(index)
        # Asked after the copies: slots of a lease that has ended may be others' by now.
        return copied if lease.valid else []

    def _learn(
        self, keys: Sequence[ObjectKey], layouts: Sequence[Layout], indices: Iterable[int]
    ) -> None:
        """Objects of these layouts are there."""
        seen = {(keys[i].model_name, keys[i].object_group_id, layouts[i]) for i in indices}
        with self._lock:
            for model, group, layout in seen:
                self._layouts.add(model, group, layout)

    # ---- keys ----------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects from all nodes, of whichever layout that is known here. Readers finish."""
        candidates = self._candidates(keys, {})
        deleted: dict[int, int] = {}
        for turn in range(max(map(len, candidates), default=0)):
            asked = [index for index in range(len(keys)) if turn < len(candidates[index])]

            def layout_of_turn(index: int, turn: int = turn) -> Layout:
                return candidates[index][turn]

            for model, layout, indices in _alike(asked, keys, layout_of_turn):
                with self._troubles.noted(f"objects of {model} are not deleted"):
                    ns = self._namespace(model, layout)
                    for some in _batches(indices, KEYS_MAX):
                        names = block_keys(keys[index] for index in some)
                        there = self._client.present(ns, names)
                        self._client.remove(ns, names, others_s=self._settings.request_timeout_s)
                        for index, where in zip(some, there, strict=True):
                            if where:
                                deleted[index] = layout.nbytes
        if deleted:
            self._notify_keys_deleted([keys[index] for index in deleted], list(deleted.values()))

    def get_usage(self) -> AdapterUsage:
        """What this server's models have in the memory of this node, as the daemon says.

        Bytes of a salt are not known: the pool has its own quotas, by tenant and namespace.
        """
        with self._lock:
            digests = [ns.digest.hex() for ns in self._namespaces.values()]
        used = 0
        with self._troubles.noted("how much is stored is not known"):
            tenant = self._client.stats().tenants.get(self._settings.tenant)
            if tenant is not None:
                held = tenant.namespaces
                used = sum(held[digest].held_bytes for digest in digests if digest in held)
        return AdapterUsage(total_bytes_used=used, total_capacity_bytes=0)

    # ---- life ----------------------------------------------------------------------------------------

    def report_status(self) -> dict[str, Any]:
        """It is healthy while its threads run: without a daemon, it misses."""
        kinds = {"store": self._stores, "lookup": self._lookups, "load": self._loads}
        return {
            "is_healthy": all(tasks.alive for tasks in kinds.values()),
            "type": type(self).__name__,
            "socket": self._client.socket_path,
            "daemon_available": self._client.available and bool(self._client.incarnation),
            "troubles": len(self._troubles),
            "locks": len(self._holds),
            "tasks_waiting": {kind: len(tasks) for kind, tasks in kinds.items()},
            "tasks_refused": {kind: tasks.refused for kind, tasks in kinds.items()},
        }

    def close(self) -> None:
        """Returns once nothing touches LMCache's memory any more: after the requests in progress. Idempotent."""
        kinds = (self._stores, self._lookups, self._loads)
        for tasks in kinds:
            tasks.stop()
        for tasks in kinds:
            tasks.close()
        _release(self._holds.end())
        self._client.close()
        for notifier in self._notifiers:
            notifier.close()

    # ---- inside --------------------------------------------------------------------------------------

    def _namespace(self, model: str, layout: Layout) -> Namespace:
        """Opened once. Raises `NamespaceMismatch`, `InvalidRequest`."""
        with self._lock:
            ns = self._namespaces.pop((model, layout), None)
            if ns is not None:
                self._namespaces[model, layout] = ns  # as the latest one
                return ns
        ns = self._client.open(record_of(model, layout, self._settings.epoch))
        closed = None
        with self._lock:
            self._namespaces[model, layout] = ns
            if len(self._namespaces) > NAMESPACES_MAX:
                closed = self._namespaces.pop(next(iter(self._namespaces)))
        if closed is not None:
            self._client.namespaces.close(closed)
        return ns

    def _unreachable(self) -> Unavailable:
        return Unavailable(f"no daemon answers at {self._client.socket_path}")


def _alike(
    indices: Iterable[int], keys: Sequence[ObjectKey], layout: Callable[[int], Layout]
) -> list[tuple[str, Layout, list[int]]]:
    """The indices by model and layout, in their order."""
    found: dict[tuple[str, Layout], list[int]] = {}
    for index in indices:
        found.setdefault((keys[index].model_name, layout(index)), []).append(index)
    return [(model, each, chosen) for (model, each), chosen in found.items()]


def _not_loaded(model: str) -> str:
    return f"objects of {model} are not loaded"


def _batches(indices: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(indices), most):
        yield indices[start : start + most]


def _host_bytes(memory_object: MemoryObj, *, writable: bool = False) -> npt.NDArray[np.uint8]:
    """An object's bytes, not copied. Raises `InvalidRequest` where they are not in host memory."""
    try:
        flat = np.frombuffer(memory_object.byte_array, dtype=np.uint8)
    except NotImplementedError as error:
        raise InvalidRequest(f"LMCache keeps its objects outside host memory: {error}") from None
    if writable and not flat.flags.writeable:
        raise InvalidRequest(f"a {type(memory_object).__name__} cannot be written")
    return flat


def _release(leases: Iterable[Lease]) -> None:
    for lease in leases:
        lease.release()
