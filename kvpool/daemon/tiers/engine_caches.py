"""The blocks in this node's engines' own caches, from their KV events: tier `gpu`.

An engine's plugin names the address of its events (`kvpool.wire.client.FollowEvents`), valid until the client's
process ends. Events name blocks by 8 bytes and contain no namespace: the namespace is the one that the
plugin named, and the key behind 8 bytes is known once a client has requested or stored it, or the pool
had it already. So a block is announced as soon as both have arrived, the event and the key, in any order.

A block is here if any engine of its namespace has it, and it is a hint: nothing is leased or read by it. With
several ranks, the scheduler's events stand for all of them: a group of the engine's cache is all parts of
that group. An engine with weights of another epoch is ignored.

Except for the notes of requests (`saw`), all is done by one task, a few hundred blocks at a time. Event loop
only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.events import Named
from kvpool.daemon.core.node import Node
from kvpool.daemon.core.requests import check_events
from kvpool.daemon.shares import Shares
from kvpool.errors import ConfigError
from kvpool.placement.directory.announcement_queue import Held
from kvpool.placement.directory.base import TIERS
from kvpool.placement.kv_events.engine_blocks import EngineBlocks, SeenKeys, short_hash
from kvpool.tasks import Tasks, crash_if_failed
from kvpool.telemetry.memory_stats import EnginesStats, EngineStats
from kvpool.types import KEY_BYTES
from kvpool.wire import client as client_wire

if TYPE_CHECKING:
    from kvpool.placement.kv_events.subscriber import EngineFeed, EventSubscriber

log = logging.getLogger("kvpool.daemon")

SLICE_BLOCKS = 256  # handled before other tasks have their turn
LINGER_S = 0.002  # keys that are seen together are handled together
FORMER_MAX = 8  # epochs that have ended and whose entries are being withdrawn
WALK_ROWS = 1 << 40  # cursors of one namespace

Subscribe = Callable[[str, str, str, Callable[[], None]], "EventSubscriber"]
"""(endpoint, replay endpoint or empty, topic, callback for news) → the subscriber."""


def zmq_subscribe(clock: Callable[[], float]) -> Subscribe:
    """Return how engines' events are followed."""
    from kvpool.placement.kv_events.subscriber import EngineSource, EventSubscriber

    def subscribe(
        endpoint: str, replay: str, topic: str, changed: Callable[[], None]
    ) -> EventSubscriber:
        source = EngineSource(endpoint, endpoint, replay or None, topic)
        return EventSubscriber([source], clock=clock, changed=lambda _: changed())

    return subscribe


class _Engine:
    """One followed engine.

    opened: the namespace as its client opened it. space: None while its weights are not of the epoch.
    groups: bit of a group in the events → mask of its parts.
    """

    def __init__(
        self, holder: Holder, told: client_wire.FollowEvents, opened: NamespaceState
    ) -> None:
        self.holder = holder
        self.endpoint = told.endpoint
        self.source = (told.endpoint, told.replay, told.topic)
        self.told = tuple(told.groups)
        self.opened = opened
        self.groups: dict[int, int] = {}
        for part, group in enumerate(told.groups):
            self.groups[1 << group] = self.groups.get(1 << group, 0) | 1 << part
        self.space: _Space | None = None
        self.subscriber: EventSubscriber | None = None
        self.task: asyncio.Task[None] | None = None
        self.error = ""

    @property
    def feed(self) -> EngineFeed | None:
        return None if self.subscriber is None else self.subscriber.engines.get(self.endpoint)

    @property
    def blocks(self) -> EngineBlocks | None:
        feed = self.feed
        return None if feed is None else feed.blocks

    def stats(self) -> EngineStats:
        stats = EngineStats(
            endpoint=self.endpoint,
            namespace=self.opened.base.hex(),
            outdated=self.space is None,
            error=self.error,
        )
        if self.feed is not None:
            known = self.feed.stats()
            for name in known.keys() & set(stats.__struct_fields__):
                setattr(stats, name, known[name])
        return stats


class _Space:
    """A namespace with engines: its known keys, and those that engines hold.

    number: grows from one to the next. namespace: its living epoch. former: ended epochs, in which
    blocks were announced. swept: the next row to check again, because an engine or an epoch has ended,
    or an engine has missed events; None: not needed.
    """

    def __init__(
        self, number: int, namespace: NamespaceState, seeding: Iterator[None], seen_max: int
    ) -> None:
        self.number = number
        self.namespace = namespace
        self.former: list[NamespaceState] = []
        self.engines: list[_Engine] = []
        self.seen = SeenKeys(seen_max)
        self.seeding: Iterator[None] | None = seeding
        self.swept: int | None = None
        # A held key keeps its row, so that a walk visits it. `SeenKeys` may have forgotten it.
        self.rows: list[bytes | None] = []
        self.free: list[int] = []
        self.held: dict[int, int] = {}  # row, by the event's block hash

    def masks(self, keys: Sequence[bytes]) -> list[int]:
        """The parts of each key that any engine holds."""
        return self._masks_of([short_hash(key) for key in keys])

    def _masks_of(self, hashes: Sequence[int]) -> list[int]:
        masks = [0] * len(hashes)
        for engine in self.engines:
            blocks = engine.blocks
            if blocks is None or not len(blocks):
                continue
            found = blocks.masks_of(hashes)
            for bit, parts in engine.groups.items():
                masks = [m | parts if f & bit else m for m, f in zip(masks, found, strict=True)]
        return masks

    def keys_of(self, hashes: Sequence[int]) -> dict[int, bytes]:
        """The known keys of event hashes, by hash."""
        keys = {}
        for short, seen in zip(hashes, self.seen.keys_of(hashes), strict=True):
            row = self.held.get(short)
            key = seen if row is None else self.rows[row]
            if key is not None:
                keys[short] = key
        return keys

    def look_again(self, keys: dict[int, bytes]) -> list[bytes]:
        """Update which of these, by their hashes, are held now; returns those to announce."""
        told = []
        for (short, key), mask in zip(keys.items(), self._masks_of(list(keys)), strict=True):
            row = self.held.get(short)
            if row is None:
                if not mask:
                    continue
                self._hold(short, key)
            elif not mask:
                self.rows[row] = None
                self.free.append(row)
                del self.held[short]
            told.append(key)
        return told

    def _hold(self, short: int, key: bytes) -> None:
        if self.free:
            row = self.free.pop()
            self.rows[row] = key
        else:
            row = len(self.rows)
            self.rows.append(key)
        self.held[short] = row


@dataclass(eq=False)
class Engines:
    """See the module. `Holdings` of tier gpu for `Cluster`.

    begin: called when the first engine is followed. tiers: the pool's, walked for keys when a
    namespace gets its first engine. subscribe: None if engines' events are not followed.
    """

    NOTED_BYTES_MAX = 4 << 20
    """Keys named by requests and not handled yet, at most."""
    SEEN_KEYS_MAX = 1 << 19
    """Of one namespace; some 200 bytes each."""

    _config: DaemonConfig
    _node: Node
    _tiers: Sequence[Held]
    _subscribe: Subscribe | None
    _announce: Callable[[int, Engines], None]

    def __post_init__(self) -> None:
        self._shares = Shares([tenant.name for tenant in self._config.all_tenants()])
        self._engines: dict[int, _Engine] = {}  # by id() of their holder
        self._spaces: dict[NamespaceState, _Space] = {}  # by living epoch, in the order of numbers
        self._by_digest: dict[bytes, _Space] = {}
        self._next_space = 0
        self._noted: deque[tuple[_Space, bytes]] = deque()
        self._noted_bytes = 0
        self._noted_at = 0  # bytes of the first one that are done
        self._dirty: dict[_Engine, None] = {}
        self._awake = asyncio.Event()
        self._tasks = Tasks()
        self._ending: set[asyncio.Task[None]] = set()
        self._begun = False
        self._following = False
        self._notify: Callable[[], object] = lambda: None
        self._changes: list[tuple[NamespaceState, Sequence[bytes]]] = []
        self.dropped_keys = 0

    # ---- engines come and go -----------------------------------------------------------------------

    def follow(
        self, holder: Holder, namespace: NamespaceState, told: client_wire.FollowEvents
    ) -> bool:
        """A client announces its engine's events; returns whether they are followed now.

        Raises `InvalidRequest` for addresses that cannot be followed, `LimitExceeded` for one too many.
        """
        if not told.endpoint:
            self.forget(holder)
            return False
        check_events(told, len(namespace.parts))
        if self._subscribe is None:
            return False
        engine = _Engine(holder, told, namespace)
        known = self._engines.get(id(holder))
        if known is not None and known.source == engine.source:
            here = known.opened if known.space is None else known.space.namespace
            if here is namespace and known.told == engine.told:
                return not known.error
            self._drop(known)
            engine.subscriber, engine.task = known.subscriber, known.task
            # Engines clear their caches before they change namespaces, and report it a little later.
            if (blocks := engine.blocks) is not None:
                blocks.clear(complete=False)
        else:
            self.forget(holder)
        used = Counter(each.holder.tenant.name for each in self._engines.values())
        self._shares.check(
            used,
            holder.tenant.name,
            self._config.engines_max,
            "engines are followed",
            "engines_max",
        )
        self._engines[id(holder)] = engine
        self._join(engine)
        if not self._begun:
            self._begun = True
            self._announce(TIERS["gpu"], self)
            self._tasks.begin(self._run())
        if engine.task is None:
            self._start(engine, self._subscribe)
        return True

    def _start(self, engine: _Engine, subscribe: Subscribe) -> None:
        # Identified by holder: an engine that changes its namespace keeps its subscriber.
        key = id(engine.holder)

        def changed() -> None:
            if (now := self._engines.get(key)) is not None:
                self._dirty[now] = None
                self._awake.set()

        engine.subscriber = subscriber = subscribe(*engine.source, changed)

        async def run() -> None:
            try:
                await subscriber.run()
            except* ConfigError as group:
                error = str(group.exceptions[0])
                log.warning("%s", error)
                now = self._engines.get(key)
                if now is not None and now.subscriber is subscriber:
                    now.error = error
                    self._leave(now)

        engine.task = asyncio.get_running_loop().create_task(run())
        engine.task.add_done_callback(crash_if_failed)

    def subscribes(self, holder: Holder) -> bool:
        """Whether an engine of this client is followed."""
        return id(holder) in self._engines

    def forget(self, holder: Holder) -> None:
        """The client or its engine has ended: its blocks are withdrawn."""
        engine = self._engines.get(id(holder))
        if engine is None:
            return
        self._drop(engine)
        if engine.task is not None:
            self._ending.add(engine.task)
            engine.task.add_done_callback(self._ending.discard)
            engine.task.cancel()

    def _drop(self, engine: _Engine) -> None:
        del self._engines[id(engine.holder)]
        self._dirty.pop(engine, None)
        self._leave(engine)

    async def close(self) -> None:
        """Stop following all engines."""
        for engine in list(self._engines.values()):
            self.forget(engine.holder)
        await self._tasks.end()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _join(self, engine: _Engine) -> None:
        namespace = engine.opened
        if namespace.retired:
            return
        space = self._spaces.get(namespace)
        if space is None:
            space = _Space(self._next_space, namespace, iter(()), self.SEEN_KEYS_MAX)
            space.seeding = self._seed(space)
            self._next_space += 1
            self._spaces[namespace] = space
            self._by_digest[namespace.directory_digest] = space
        space.engines.append(engine)
        engine.space = space
        self._awake.set()

    def _leave(self, engine: _Engine) -> None:
        space, engine.space = engine.space, None
        if space is not None:
            space.engines.remove(engine)
            space.swept = 0
            self._awake.set()

    def enter(self, living: NamespaceState) -> None:
        """A namespace is in a new epoch. Engines that continue in it keep their blocks."""
        for space in self._spaces.values():
            was = space.namespace
            if was.tenant is living.tenant and was.base == living.base:
                break
        else:
            return
        for engine in list(space.engines):
            if self._node.namespaces.by_number(living.tenant, engine.opened.number) is not living:
                self._leave(engine)
        space.former = [*space.former, was][-FORMER_MAX:]
        space.namespace = living
        space.swept = 0
        spaces = [space if one is space else one for one in self._spaces.values()]
        self._spaces = {one.namespace: one for one in spaces}
        self._by_digest = {one.namespace.directory_digest: one for one in spaces}
        self._awake.set()

    # ---- what requests leave behind ----------------------------------------------------------------

    def saw(self, event: Named) -> None:
        """Note keys that a client has named. They are only queued, and dropped when too many wait."""
        space, packed = self._spaces.get(event.namespace), event.packed
        if space is None or len(packed) % KEY_BYTES:
            return
        if self._noted_bytes + len(packed) > self.NOTED_BYTES_MAX:
            self.dropped_keys += len(packed) // KEY_BYTES
            return
        self._noted.append((space, packed))
        self._noted_bytes += len(packed)
        self._awake.set()

    # ---- a few hundred blocks at a time ------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self._step():
                await asyncio.sleep(0)
            else:
                self._awake.clear()
                await self._awake.wait()
                await asyncio.sleep(LINGER_S)

    def _step(self) -> bool:
        """Do some pending work; returns whether there was any."""
        if self._dirty:
            self._take_events(next(iter(self._dirty)))
            return True
        if self._noted:
            self._take_note()
            return True
        for space in self._spaces.values():
            if space.swept is not None:
                self._sweep(space, space.swept)
                return True
        for space in self._spaces.values():
            if space.seeding is not None:
                if next(space.seeding, self) is self:
                    space.seeding = None
                return True
        return False

    def _take_events(self, engine: _Engine) -> None:
        blocks, space = engine.blocks, engine.space
        if blocks is None or not blocks.has_changes:
            del self._dirty[engine]
            return
        changes = blocks.take_changes(SLICE_BLOCKS)
        if space is None:
            return
        if changes.reset:
            space.swept = 0
        self._look_again(space, space.keys_of(changes.hashes))

    def _take_note(self) -> None:
        space, packed = self._noted[0]
        start = self._noted_at
        stop = min(len(packed), start + SLICE_BLOCKS * KEY_BYTES)
        self._learn(space, packed[start:stop])
        self._noted_at = stop
        if stop == len(packed):
            self._noted.popleft()
            self._noted_bytes -= len(packed)
            self._noted_at = 0

    def _seed(self, space: _Space) -> Iterator[None]:
        """Learn the pool's keys of a namespace."""
        for tier in self._tiers:
            cursor: int | None = 0
            while cursor is not None:
                groups, cursor = tier.walk(cursor, SLICE_BLOCKS)
                for digest, keys in groups:
                    if digest == space.namespace.directory_digest:
                        self._learn(space, b"".join(keys))
                yield

    def _sweep(self, space: _Space, first: int) -> None:
        """Check held blocks again, and withdraw announcements in ended epochs."""
        rows = space.rows[first : first + SLICE_BLOCKS]
        self._look_again(space, {short_hash(key): key for key in rows if key is not None})
        if first + len(rows) < len(space.rows):
            space.swept = first + len(rows)
            return
        space.swept = None
        space.former = []
        if not space.engines:
            del self._spaces[space.namespace]
            del self._by_digest[space.namespace.directory_digest]

    def _learn(self, space: _Space, packed: bytes) -> None:
        new = space.seen.add(packed)
        if new:
            self._look_again(space, new)

    def _look_again(self, space: _Space, keys: dict[int, bytes]) -> None:
        told = space.look_again(keys)
        if not told or not self._following:
            return
        first = not self._changes
        self._changes += [(namespace, told) for namespace in (*space.former, space.namespace)]
        if first:
            self._notify()

    # ---- for the directory -------------------------------------------------------------------------

    def follow_changes(self, changed: Callable[[], object]) -> None:
        """See `Inventory.follow_changes`."""
        self._notify, self._following = changed, True

    def take_changes(self) -> list[tuple[NamespaceState, Sequence[bytes]]]:
        """See `Inventory.take_changes`."""
        changes, self._changes = self._changes, []
        return changes

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """See `Inventory.masks`: what is in any engine's cache."""
        space = self._by_digest.get(digest)
        if space is None:
            return 0, []
        return len(space.namespace.tables), space.masks(keys)

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        """See `Inventory.walk`: one namespace after the other."""
        number, first = divmod(cursor, WALK_ROWS)
        later = [space for space in self._spaces.values() if space.number >= number]
        if not later:
            return [], None
        space = later[0]
        if space.number > number:
            first = 0
        rows = space.rows[first : first + count]
        groups = [(space.namespace.directory_digest, [key for key in rows if key is not None])]
        if first + len(rows) < len(space.rows):
            return groups, space.number * WALK_ROWS + first + len(rows)
        return groups, later[1].number * WALK_ROWS if len(later) > 1 else None

    # ---- the operator's view -----------------------------------------------------------------------

    def stats(self, tenant: str) -> EnginesStats:
        """The engines of one tenant."""
        spaces = [one for one in self._spaces.values() if one.namespace.tenant.name == tenant]
        return EnginesStats(
            seen_keys=sum(len(space.seen) for space in spaces),
            known_blocks=sum(len(space.held) for space in spaces),
            dropped_keys=self.dropped_keys,
            followed=[
                engine.stats()
                for engine in self._engines.values()
                if engine.holder.tenant.name == tenant
            ],
        )
