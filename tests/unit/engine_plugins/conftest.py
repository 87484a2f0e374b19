"""A pool in one process, with the client's interface: what the plugin's halves are tested against.

It keeps the rules that the plugin relies on (hit rules of parts, leases with deadlines, present
blocks are not written again) and nothing else.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from types import ModuleType
from typing import Any, Self

import numpy as np
import pytest

from kvpool.errors import (
    ClusterUnavailable,
    KvpoolError,
    LeaseLost,
    PoolFull,
    StaleEpoch,
    Unavailable,
)
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import (
    KEY_BYTES,
    NO_PARENT,
    EngineRecord,
    Namespace,
    NamespaceRecord,
    PartKind,
    Recompute,
    pack_keys,
)
from kvpool.wire.frame import NO_ROW
from tests.support.stats import node_stats


class FakeDevice:
    """The daemon's device memory, in one life. `rows`: what is in it."""

    def __init__(self, life: int, stride: int = 1 << 16) -> None:
        self.life = life
        self.alive = True
        self.closed = False
        self.array = np.zeros((256, stride), np.uint8)
        self.rows: dict[tuple[bytes, int, bytes], int] = {}

    def close(self) -> None:
        self.closed = True


class FakeSlots:
    def __init__(self, table: np.ndarray, rows: Sequence[int], nbytes: int, first: int) -> None:
        self.table, self.nbytes, self.first = table, nbytes, first
        self.rows = np.asarray(rows, np.int64)
        self.device_rows: np.ndarray | None = None
        self.device_table: np.ndarray | None = None
        self.damaged: list[int] = []
        self.checksums: np.ndarray | None = np.zeros((len(rows), 16), np.uint8)

    def wrong(self) -> np.ndarray:
        if self.checksums is None:
            raise Unavailable("the fake daemon is older")
        return np.array(self.damaged, np.int64)


class FakeLease:
    def __init__(
        self, pool: FakePool, token: str, blocks: int, slots: dict[int, FakeSlots]
    ) -> None:
        self.pool, self.token, self.blocks, self.slots = pool, token, blocks, slots
        self.deadline = pool.clock() + 10.0
        self.device: FakeDevice | None = None
        self.reports: list[tuple[int, list[int]]] = []

    def report(self, part: int, wrong: np.ndarray) -> None:
        if len(wrong):
            self.reports.append((part, wrong.tolist()))

    @property
    def life(self) -> int:
        return 0 if self.device is None else self.device.life

    def check(self) -> None:
        if self.device is not None and not self.device.alive:
            raise LeaseLost("the fake device is dead")
        if self.pool.clock() > self.deadline or self.token not in self.pool.leases:
            raise LeaseLost(self.token)


class FakeReservation:
    def __init__(self, pool: FakePool, slots: FakeSlots, missing: list[int], names: list) -> None:
        self.pool, self.slots, self.names = pool, slots, names
        self.missing = np.asarray(missing, np.int64)
        self.refused = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def abort(self) -> None:
        return None


class FakeNamespaces:
    def __init__(self, pool: FakePool) -> None:
        self.pool = pool

    def close(self, ns: Namespace) -> None:
        self.pool.closed.append(ns.digest)

    def generation(self, ns: Namespace) -> int:
        return -1 if self.pool.silent else self.pool.generations[ns.digest]


class FakePool:
    """The daemon and its client in one. `writes` logs every block part that was stored."""

    def __init__(self, rows: int = 4096, stride: int = 1 << 16) -> None:
        self.table = np.zeros((rows, stride), np.uint8)
        self.rows: dict[tuple[bytes, int, bytes], int] = {}
        self.namespaces = FakeNamespaces(self)
        self.engine = self.sessions = self
        self.leases: dict[str, FakeLease] = {}
        self.holds: dict[str, int] = {}
        self.writes: list[tuple[int, bytes]] = []
        self.parents: dict[tuple[int, bytes], bytes | None] = {}
        self.exchanges: list[tuple[tuple[int, ...], int]] = []
        self.acquires = self.matches = 0
        self.away = False
        self.full = False
        self.outdated = False
        self.others = 0
        self.elsewhere: set[tuple[bytes, bytes]] = set()
        self.pulls: list[float] = []
        self.prices: list[Recompute | None] = []
        self.follows: list[tuple[float, str]] = []
        self.given_up: list[bytes] = []
        self.ended: list[tuple[str, str]] = []
        self.labelled: list[tuple[str, int]] = []
        self.turns: list[tuple[str, list[bytes], dict[str, Any]]] = []
        self.opened: list[NamespaceRecord] = []
        self.closed: list[bytes] = []
        self.ttls: dict[bytes, float] = {}  # by namespace, of the last opening
        self.present: dict[bytes, int] = {}  # generations of weights, by namespace
        self.generations: dict[bytes, int] = {}
        self.silent = False
        self.followed: list[tuple[bytes, str, str, str, list[int]]] = []
        self.announced: list[tuple[bytes, EngineRecord | None]] = []
        self.device: FakeDevice | None = None
        self.lives: list[int] = []  # of the device, that were acquired and pulled with
        self.clock: Callable[[], float] = time.monotonic
        self._tokens = itertools.count()
        self._lock = threading.Lock()

    def open(
        self, record: NamespaceRecord, *, generation: int = -1, ttl_s: float = 0.0
    ) -> Namespace:
        self.opened.append(record)
        self.ttls[record.digest()] = ttl_s
        ns = Namespace(record, record.digest())
        present = self.present.setdefault(ns.digest, 0)
        self.generations[ns.digest] = present if generation < 0 else generation
        return ns

    def follow_events(
        self, ns: Namespace, endpoint: str, *, replay: str, topic: str, groups: Sequence[int]
    ) -> bool:
        if self.away:
            raise ClusterUnavailable("the fake cluster is away")
        self.followed.append((ns.digest, endpoint, replay, topic, list(groups)))
        return bool(endpoint)

    def announce(self, ns: Namespace, engine: EngineRecord | None) -> bool:
        if self.away:
            raise ClusterUnavailable("the fake cluster is away")
        self.announced.append((ns.digest, engine))
        return True

    def dropped(self, ns: Namespace, keys: bytes) -> None:
        assert self.opened
        self.given_up += [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def turn(self, ns: Namespace, session: str, keys: bytes, **told: Any) -> None:
        assert self.opened
        self.turns.append((session, _split(keys), told))

    def end_request(self, ns: Namespace, request: str, *, session: str = "") -> None:
        assert self.opened
        self.ended.append((request, session))

    def stats(self) -> NodeStats:
        return node_stats(sources=bool(self.others))

    def lift(self, ns: Namespace, part: int, keys: Any) -> None:
        """Move what is in memory to the device."""
        assert self.device is not None
        for key in _split(keys):
            name = (ns.digest, part, key)
            above = self.device.rows[name] = len(self.device.rows)
            row = self.rows.pop(name)
            self.device.array[above] = self.table[row]
            self.table[row] = 0xEE
            self.rows[b"lifted", above, key] = row  # its number is used up

    def _direct(self, life: int) -> FakeDevice | None:
        self.lives.append(life)
        return self.device if self.device is not None and life == self.device.life else None

    def pull(
        self,
        ns: Namespace,
        keys: Any,
        *,
        wait_s: float,
        recompute: Recompute | None = None,
        life: int = 0,
        trace: str = "",
    ) -> int:
        """Everything that is elsewhere comes at once; nothing when away."""
        self.pulls.append(wait_s)
        self.prices.append(recompute)
        if self.away:
            raise Unavailable("the fake daemon is away")
        split = _split(keys)
        for key in split:
            if (ns.digest, key) in self.elsewhere:
                for part in range(len(ns.parts)):
                    self.rows.setdefault((ns.digest, part, key), len(self.rows))
        return self._usable(ns, split, self._direct(life))

    def follow(
        self, ns: Namespace, keys: Any, *, wait_s: float, source: str = "", trace: str = ""
    ) -> int:
        """As `pull`: what an engine elsewhere has computed by the time that the test lets this run."""
        self.follows.append((wait_s, source))
        blocks = self.pull(ns, keys, wait_s=wait_s)
        self.pulls.pop()
        self.prices.pop()
        return blocks

    def _has(self, ns: Namespace, part: int, key: bytes, device: FakeDevice | None = None) -> bool:
        name = (ns.digest, part, key)
        return name in self.rows or (device is not None and name in device.rows)

    def match(self, ns: Namespace, keys: Any, *, parts: Sequence[int]) -> int:
        """Of parts of kind full."""
        assert parts
        self.matches += 1
        if self.away:
            return 0
        there = [all((ns.digest, part, key) in self.rows for part in parts) for key in _split(keys)]
        return [*there, False].index(False)

    def _usable(
        self,
        ns: Namespace,
        keys: list[bytes],
        device: FakeDevice | None,
        parts: Sequence[int] | None = None,
    ) -> int:
        chosen = parts or range(len(ns.parts))

        def needed(part: int, end: int) -> list[int]:
            spec = ns.parts[part]
            own = list(range(spec.stride - 1, end, spec.stride))
            return own[-spec.window_blocks :] if spec.kind is PartKind.WINDOW else own

        for end in range(len(keys), 0, -1):
            if all(end % spec.stride == 0 for spec in ns.parts) and all(
                self._has(ns, part, keys[index], device)
                for part in chosen
                for index in needed(part, end)
            ):
                return end
        return 0

    def acquire(
        self,
        ns: Namespace,
        keys: Any,
        *,
        life: int = 0,
        parts: Sequence[int] | None = None,
        **_: Any,
    ) -> FakeLease | None:
        self.acquires += 1
        split = _split(keys)
        device = self._direct(life)
        blocks = 0 if self.away else self._usable(ns, split, device, parts)
        if not blocks:
            return None
        slots, near = {}, False
        for part, spec in enumerate(ns.parts):
            if parts and part not in parts:
                continue
            own = list(range(spec.stride - 1, blocks, spec.stride))
            if spec.kind is PartKind.WINDOW:
                own = own[-spec.window_blocks :]
            names = [(ns.digest, part, split[index]) for index in own]
            above = {} if device is None else device.rows
            rows = [NO_ROW if name in above else self.rows[name] for name in names]
            slots[part] = FakeSlots(self.table, rows, spec.nbytes, own[0] - spec.stride + 1)
            if device is not None and NO_ROW in rows:
                near = True
                slots[part].device_rows = np.array([above.get(name, NO_ROW) for name in names])
                slots[part].device_table = device.array
        token = f"lease-{next(self._tokens)}"
        self.leases[token] = FakeLease(self, token, blocks, slots)
        self.leases[token].device = device if near else None
        self.holds[token] = 1
        return self.leases[token]

    def join(
        self,
        token: str,
        *,
        parts: Sequence[int] | None = None,
        device: FakeDevice | None = None,
        verify: bool = False,
    ) -> FakeLease | None:
        if self.away or token not in self.leases:
            return None
        life = self.leases[token].life
        if life and (device is None or device.life != life):
            return None
        self.holds[token] += 1
        return self.leases[token]

    def release(self, lease: FakeLease) -> None:
        self.holds[lease.token] -= 1
        if not self.holds[lease.token]:
            del self.holds[lease.token], self.leases[lease.token]

    def reserve(
        self,
        ns: Namespace,
        keys: Any,
        *,
        part: int = 0,
        parent: bytes | None = None,
        request: str = "",
    ) -> FakeReservation:
        if self.away:
            raise Unavailable("the fake daemon is away")
        if self.full:
            raise PoolFull("the fake pool is full")
        if self.outdated:
            raise StaleEpoch("the fake namespace was reset")
        split = _split(keys)
        self.parents.update(zip([(part, key) for key in split], [parent, *split], strict=False))
        with self._lock:  # ranks save on threads of their own
            missing = [index for index, key in enumerate(split) if not self._has(ns, part, key)]
            names = [(ns.digest, part, split[index]) for index in missing]
            rows = range(len(self.rows), len(self.rows) + len(missing))
            self.rows.update(zip(names, rows, strict=True))
        slots = FakeSlots(self.table, list(rows), ns.parts[part].nbytes, 0)
        return FakeReservation(self, slots, missing, names)

    def reserve_parts(
        self,
        ns: Namespace,
        keys: Any,
        parts: Sequence[int],
        parents: Any,
        *,
        requests: Sequence[tuple[str, int]] = (),
    ) -> list[FakeReservation]:
        self.labelled += requests
        split, before = _split(keys), _split(parents)
        self.exchanges.append((tuple(parts), len(split)))
        reserved = []
        for part in parts:
            try:
                reserved.append(self.reserve(ns, keys, part=part))
            except PoolFull:
                nothing = FakeSlots(self.table, [], ns.parts[part].nbytes, 0)
                reserved.append(FakeReservation(self, nothing, [], []))
                reserved[-1].refused = len(split)
            known = [None if parent == NO_PARENT else parent for parent in before]
            self.parents.update(zip([(part, key) for key in split], known, strict=True))
        if all(each.refused for each in reserved) and not any(each.names for each in reserved):
            raise PoolFull("the fake pool is full")
        return reserved

    def commit_parts(self, reservations: Sequence[FakeReservation]) -> list[int]:
        return [self.commit(reservation) for reservation in reservations]

    def commit(self, reservation: FakeReservation, checksums: bytes | None = None) -> int:
        self.writes += [(part, key) for _, part, key in reservation.names]
        return len(reservation.names)

    def close(self) -> None:
        return None


def _split(keys: Any) -> list[bytes]:
    packed = pack_keys(keys)
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


class ByHand(Executor):
    """Threads that do nothing until they are told to."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: work(*arguments, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not cancel_futures:
            self.run()
        for future, _ in self.waiting:
            future.cancel()
        self.waiting.clear()

    def run(self) -> None:
        """What was submitted, in order."""
        while self.waiting:
            self.run_one()

    def run_one(self) -> None:
        future, work = self.waiting.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except (KvpoolError, AssertionError) as error:
                future.set_exception(error)


class FakeBlock:
    """block_hash: names the content, where the engine caches it."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None


class FakeBlockPool:
    """The engine's own pool, as far as pins go."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [FakeBlock(block_id) for block_id in range(blocks)]
        self.evicted: set[int] = set()
        self.watchers: dict[int, Callable[[FakeBlock], None]] = {}

    def cache(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.blocks[number].block_hash = b"content"

    def reuse(self, numbers: Iterable[int]) -> None:
        """Hand free blocks out, or reset them."""
        for number in numbers:
            block = self.blocks[number]
            assert block.ref_cnt == 0, "it is in use"
            block.block_hash = None
            if (watcher := self.watchers.pop(number, None)) is not None:
                watcher(block)

    def unpin_blocks(self, blocks: Iterable[FakeBlock], on_reuse: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.watchers[block.block_id] = on_reuse

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    def get_num_free_blocks(self) -> int:
        return len(self.blocks) - 1 - self.pinned

    @property
    def held(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt > 0}

    @property
    def pinned(self) -> int:
        return len(self.held)


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def block_pool() -> FakeBlockPool:
    return FakeBlockPool(1000)


@pytest.fixture
def threads() -> ByHand:
    return ByHand()


@pytest.fixture(scope="session")
def pool_types() -> ModuleType:
    """This module, for tests that make a pool for each example."""
    return sys.modules[__name__]
