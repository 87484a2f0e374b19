"""Prefix streams under way: requests to owners, lookups, transfers, and the leases held until they end.

The rules are in `prefix_stream_rules.py`; `fetcher.py` makes the transfers. Each stream has at most one request
under way, one lookup, and `FETCHES_MAX` batches of transfers. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.commit_waiters import CommitWaiter
from kvpool.daemon.core.masks import pack_masks, unpack_masks, width_for
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.peer_questions import ASKED_MAX
from kvpool.daemon.fetch.plan import FetchRequest, requests_for_each
from kvpool.daemon.fetch.ports import NOT_NODES, ClusterView, PeerTransport
from kvpool.daemon.fetch.prefix_stream_rules import Chain, Course, Lacking
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, ProtocolError, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.tasks import crash_if_failed
from kvpool.telemetry.cluster_stats import PrefixStreamStats
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

FOLLOWS_MAX, FOLLOWS_PER_TENANT_MAX = 64, 48
QUESTIONS_PER_PEER_MAX = 32  # waiting ones; others do not wait and are repeated instead
QUESTION_S = 1.0  # an owner answers by then, with news or without
ANSWER_S = 0.5  # for its answer to arrive, beyond that: then it is considered gone
POLL_S = 0.5  # the same for a request that does not wait
LOOK_S = 0.5
FETCHES_MAX = 8
FETCH_S = 2.0  # a batch of transfers is cancelled then, or after four times its expected time
# Of its time: for a shorter prefix, if the whole one is not possible.
LAST_SHARE, LAST_S_MAX = 0.25, 1.0
HELD_SHARE = 0.5  # of a tenant's memory: held by all streams; further ones hold nothing
KEPT_MAX = 32  # leases of one stream, before they are merged into one
LAG_DECAY = 0.8  # the factor that a measurement applies to the weight of all earlier ones


class Told(NamedTuple):
    """An owner's answer. masks: of the requested window. early: before its time was over.

    dropped: the first block of the window that will not be committed, if any.
    """

    incarnation: bytes
    window: Sequence[bytes]
    masks: Sequence[int]
    early: bool
    dropped: bytes | None


@dataclass(eq=False)
class PrefixStreams:
    """All prefix streams of this node's clients.

    name: of this node.
    """

    node: Node
    fetcher: BlockFetcher
    _transport: PeerTransport
    cluster: ClusterView
    clock: Callable[[], float]
    name: str

    def __post_init__(self) -> None:
        self._running: dict[_PrefixStream, None] = {}
        self._of_tenant: Counter[str] = Counter()  # of those that run
        self._held: Counter[str] = Counter()  # bytes, by tenant
        self._asking: Counter[bytes] = Counter()  # waiting requests, by incarnation
        self._ending: set[asyncio.Task[Any]] = set()
        self._stats = PrefixStreamStats()

    def stats(self) -> PrefixStreamStats:
        """Counters, with what is under way now."""
        self._stats.under_way, self._stats.waiters = (
            len(self._running),
            len(self.node.commit_waiters),
        )
        return self._stats

    async def follow(
        self,
        namespace: NamespaceState,
        parts: Sequence[int],
        keys: Sequence[bytes],
        wait_s: float,
        source: str = "",
    ) -> int:
        """Bring a prompt's blocks here as they are committed; returns the usable ones when all are here, or after
        `wait_s`; or sooner, when their writer has given up the next of them.

        source: the node where they are computed, if known. Ends early when it is cancelled, or the epoch ends.
        Raises `LimitExceeded` if there are too many.
        """
        if not wait_s > 0:
            raise InvalidRequest(f"wait_s = {wait_s} is not a valid number of seconds")
        tenant = namespace.tenant.name
        if len(self._running) >= FOLLOWS_MAX or self._of_tenant[tenant] >= FOLLOWS_PER_TENANT_MAX:
            raise LimitExceeded(
                f"{len(self._running)} prompts are being streamed to this node, {self._of_tenant[tenant]} of them "
                f"for tenant {tenant!r}; the limits are {FOLLOWS_MAX} per node and {FOLLOWS_PER_TENANT_MAX} per tenant"
            )
        deadline = self.clock() + wait_s
        chain = Chain(namespace.tables_of(parts), keys)
        if chain.nbytes:
            await self._run(namespace, chain, source, deadline)
        left_s = deadline - self.clock()
        if chain.uneven and not (chain.whole or namespace.retired) and left_s > 0:
            here = self.node.leases.match(namespace, parts, keys)
            await self.fetcher.pull(namespace, parts, keys, here, left_s)
        return self.node.leases.match(namespace, parts, keys)

    async def _run(
        self, namespace: NamespaceState, chain: Chain, source: str, deadline: float
    ) -> None:
        tenant = namespace.tenant
        nbytes = chain.nbytes
        holds = self._held[tenant.name] + nbytes <= tenant.allocator.size * HELD_SHARE
        self._stats.not_held += not holds
        if chain.uneven:
            wait_s = deadline - self.clock()
            deadline -= min(LAST_SHARE * wait_s, LAST_S_MAX)
        one = _PrefixStream(self, namespace, chain, source, deadline, holds=holds)
        self._running[one] = None
        self._of_tenant[tenant.name] += 1
        self._held[tenant.name] += nbytes * holds
        try:
            await one.run()
        finally:
            one.end()
            del self._running[one]
            self._of_tenant[tenant.name] -= 1
            self._held[tenant.name] -= nbytes * holds
            self._stats.ended += 1
            self._stats.whole += chain.whole

    async def close(self) -> None:
        """Wait for the remaining tasks of ended streams."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    # ---- what a follow does ----------------------------------------------------------------------------

    def call_off(self, task: asyncio.Task[Any]) -> None:
        """Nobody waits for this any more. It ends on its own, soon."""
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.add_done_callback(_expect_refusals)

    def arrived(self, blocks: int, lag_s: float | None) -> None:
        self._stats.blocks += blocks
        if lag_s is not None:
            self._stats.lag_s = (
                lag_s
                if not self._stats.lag_s
                else self._stats.lag_s * LAG_DECAY + lag_s * (1 - LAG_DECAY)
            )

    def begin_question(
        self,
        incarnation: bytes,
        namespace: NamespaceState,
        window: Sequence[bytes],
        known: Sequence[int],
        wait_s: float,
    ) -> asyncio.Task[Told]:
        """As `ask`; without waiting if this peer has the maximum of waiting requests.

        Nor with a peer on probation: the answer shows at once whether it works, and nobody else asks it before.
        """
        peer = self.fetcher.peers.get(incarnation)
        if self._asking[incarnation] >= QUESTIONS_PER_PEER_MAX or (peer and peer.on_probation):
            wait_s = 0.0
        work = self.ask(incarnation, namespace, window, known, wait_s)
        task = asyncio.get_running_loop().create_task(work)
        if wait_s:
            self._asking[incarnation] += 1
            task.add_done_callback(lambda _: self._asked(incarnation))
        return task

    def _asked(self, incarnation: bytes) -> None:
        self._asking[incarnation] -= 1
        if not self._asking[incarnation]:
            del self._asking[incarnation]

    def may_ask(self, incarnation: bytes) -> bool:
        """Whether it is known to live, and answers."""
        if incarnation not in self.cluster.living:
            return False
        peer = self.fetcher.peers.get(incarnation)
        return peer is None or not peer.suspended(self.clock())

    def named(self, source: str) -> bytes | None:
        """The incarnation of a node, as long as it lives."""
        for incarnation, other in self.cluster.living.items():
            if other.record.node == source:
                return incarnation
        return None

    async def ask(
        self,
        incarnation: bytes,
        namespace: NamespaceState,
        window: Sequence[bytes],
        known: Sequence[int],
        wait_s: float,
    ) -> Told:
        """An owner's blocks of a window that are not known here. Raises `KvpoolError`."""
        width = width_for(len(namespace.tables))
        question = peer_wire.Await(
            self.name,
            namespace.tenant.name,
            namespace.digest,
            b"".join(window),
            pack_masks(known, width),
            wait_s,
        )
        other = self.cluster.living.get(incarnation)
        if other is None:
            raise Unavailable("the node has left")
        peers = self.fetcher.peers
        asked_at = self.clock()
        self._stats.questions += 1
        peers.started(incarnation, 0, asked_at)
        try:
            order = worker_wire.AskPeer(
                other.url, question, wait_s + (ANSWER_S if wait_s else POLL_S)
            )
            answer = await self._transport.ask(order)
            if not isinstance(answer, frame.Bytes) or len(answer.data) < len(question.known):
                raise ProtocolError("the answer to an Await does not have one mask per key")
            masks = unpack_masks(answer.data[: len(question.known)], width)
            dropped = _unpack_dropped(answer.data[len(question.known) :], window)
        except LimitExceeded:
            peers.stopped(incarnation, 0)
            raise
        except KvpoolError as error:
            self._stats.questions_failed += 1
            peers.failed(incarnation, self.clock(), error=error, asked=0)
            raise
        except asyncio.CancelledError:
            peers.stopped(incarnation, 0)
            raise
        now = self.clock()
        peers.finished(incarnation, 0, 0.0, now)  # its waiting time does not measure the peer
        early = now - asked_at < wait_s or not wait_s
        return Told(incarnation, window, masks, early, dropped)

    async def look(
        self, namespace: NamespaceState, chain: Chain, window: Sequence[bytes]
    ) -> Mapping[bytes, Sequence[Entry]]:
        """Other nodes' blocks of a window: from the directory, or without one, from peers."""
        self._stats.lookups += 1
        located = dict(await self.fetcher.lookups.locate(namespace, chain.tables, window, LOOK_S))
        if self.cluster.directory is None:
            known = chain.known(window, len(namespace.tables))
            asked = [*filter(self.may_ask, self.cluster.living)][:ASKED_MAX]
            answers = await asyncio.gather(
                *(self.ask(incarnation, namespace, window, known, 0.0) for incarnation in asked),
                return_exceptions=True,
            )
            for told in answers:
                if isinstance(told, Told):
                    for key, mask in zip(window, told.masks, strict=True):
                        if mask:
                            entry = Entry(told.incarnation, TIERS["dram"], mask)
                            located[key] = [*located.get(key, ()), entry]
                elif not isinstance(told, KvpoolError):
                    raise told
        return located


@dataclass(eq=False)
class _PrefixStream:
    """One prefix stream, from its beginning to its end. `end` must follow `run`."""

    _all: PrefixStreams
    _namespace: NamespaceState
    _chain: Chain
    _source: str
    _deadline: float
    holds: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self._course = Course(self._all.clock())
        self._located: Mapping[bytes, Sequence[Entry]] = {}
        self._kept: list[str] = []
        self._question: asyncio.Task[Told] | None = None
        self._asked: bytes = b""  # the peer asked by the request under way
        self._polls = False  # the next question does not wait
        self._repeat = False  # the request under way reports missing blocks as coming
        self._look: asyncio.Task[Mapping[bytes, Sequence[Entry]]] | None = None
        self._looked = False
        self._fetches: dict[asyncio.Task[None], None] = {}
        # Blocks to fetch when a batch has ended, and their source.
        self._queue: dict[PartTable, dict[bytes, Sequence[Entry]]] = {}
        self._came = asyncio.Event()
        self._waiter: CommitWaiter | None = None

    async def run(self) -> None:
        """Until all that will come is here, the time is up, or the epoch has ended."""
        while True:
            self._take_stock()
            now = self._all.clock()
            if self._chain.ended or now >= self._deadline or self._namespace.retired:
                return
            self._begin_what_is_due(now)
            await self._wait(now)
            self._digest()

    def end(self) -> None:
        """Cancel tasks under way, and release held blocks."""
        for task in (self._question, self._look, *self._fetches):
            if task is not None:
                self._all.call_off(task)
        if self._waiter is not None:
            self._all.node.commit_waiters.remove(self._waiter)
        self._all.fetcher.leases.let_go(self._namespace.tenant.name, self._kept)

    # ---- what has come -----------------------------------------------------------------------------------

    def _take_stock(self) -> None:
        """Hold blocks that have arrived here, from any source."""
        node, chain, fetcher = self._all.node, self._chain, self._all.fetcher
        node.settle()
        arrived = chain.arrived()
        if self.holds:
            fetcher.leases.hold(dict(arrived), self._kept)
            if len(self._kept) > KEPT_MAX:
                self._regroup()
        if arrived and self._looked:
            self._course.came(self._all.clock())
            self._all.arrived(sum(len(keys) for _, keys in arrived), None)
        if self._source in {"", self._all.name}:
            self._dropped_here()

    def _dropped_here(self) -> None:
        """An engine of this node may have given up some."""
        name, window = self._namespace.directory_digest, self._chain.window
        for at in self._all.node.commit_waiters.dropped(name, window, self._all.clock()):
            self._chain.dropped(window[at])

    def _regroup(self) -> None:
        """One lease for all."""
        fetcher, fresh = self._all.fetcher, list[str]()
        if not fetcher.leases.hold(
            dict(zip(self._chain.tables, self._chain.needed, strict=True)), fresh
        ):
            fresh, self._kept = self._kept, fresh  # the old ones hold more
        fetcher.leases.let_go(self._namespace.tenant.name, self._kept)
        self._kept = fresh

    # ---- what is to be done ------------------------------------------------------------------------------

    def _begin_what_is_due(self, now: float) -> None:
        window = self._chain.window
        self._watch(window)
        while self._queue and len(self._fetches) < FETCHES_MAX:
            self._fetch()
        course = self._course
        whom = course.choose(self._named(), self._all.may_ask, now)
        repeat = self._repeat and now >= course.ask_at
        # A peer that may not be asked now is not chosen: this stream's own request may be the reason.
        other = whom is not None and whom != self._asked
        if self._question is not None and (repeat or other):
            self._all.call_off(self._question)
            self._question = None
        # The directory's entries for the beginning come first: they also show other sources.
        if self._question is None and self._looked and whom is not None and now >= course.ask_at:
            self._ask(whom, window)
        if self._look is None and now >= course.look_at:
            work = self._all.look(self._namespace, self._chain, window)
            self._look = asyncio.get_running_loop().create_task(work)

    def _named(self) -> bytes | None:
        return self._all.named(self._source) if self._source else None

    def _ask(self, whom: bytes, window: Sequence[bytes]) -> None:
        known = self._chain.known(window, len(self._namespace.tables))
        every = (1 << len(self._namespace.tables)) - 1
        if all(mask == every for mask in known):
            return  # all of the window is coming
        left_s = self._deadline - self._all.clock()
        wait_s = 0.0 if self._polls else min(QUESTION_S, left_s)
        self._polls = self._repeat = False
        self._asked = whom
        self._question = self._all.begin_question(whom, self._namespace, window, known, wait_s)

    def _watch(self, window: Sequence[bytes]) -> None:
        """Wait for commits here. Renewed when half of the watched blocks have arrived."""
        waiter, awaited = self._waiter, self._all.node.commit_waiters
        if waiter is not None and not waiter.woken:
            half = waiter.keys[len(waiter.keys) // 2 :]
            if window[0] in waiter.keys and window[0] not in half:
                return
        if waiter is not None:
            awaited.remove(waiter)
        self._came.clear()
        name = self._namespace.directory_digest
        self._waiter = awaited.add(None, name, window, self._came.set)

    def _fetch(self) -> None:
        """Start fetching all reported blocks that are not on their way."""
        queue, self._queue = self._queue, {}
        wants = requests_for_each(queue)
        now = self._all.clock()
        seconds = FETCH_S + self._all.fetcher.choices.expected_s(wants)
        work = self._bring(wants, now, min(self._deadline, now + seconds))
        self._fetches[asyncio.get_running_loop().create_task(work)] = None

    async def _bring(self, wants: Sequence[FetchRequest], began: float, deadline: float) -> None:
        wanted = {Lacking(want.table, key) for want in wants for key in want.keys}
        await self._all.fetcher.delivery.bring(wants, deadline)
        now = self._all.clock()
        lacking = {one for one in wanted if one.key not in one.table.blocks}
        if len(lacking) < len(wanted):
            self._all.arrived(0, now - began)
        if lacking:
            self._chain.lost(lacking)
            self._repeat = True
            self._course.trouble(now)

    async def _wait(self, now: float) -> None:
        """Until anything has happened, or something is due."""
        course = self._course
        due = [self._deadline]
        if self._look is None:
            due.append(course.look_at)
        if course.ask_at > now:
            due.append(course.ask_at)
        came = asyncio.get_running_loop().create_task(self._came.wait())
        try:
            tasks: list[asyncio.Task[Any]] = [came, *self._fetches]
            tasks += [task for task in (self._question, self._look) if task is not None]
            await asyncio.wait(
                tasks,
                timeout=max(0.0, min(due) - now),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            came.cancel()

    # ---- what was said -----------------------------------------------------------------------------------

    def _digest(self) -> None:
        for task in [task for task in self._fetches if task.done()]:
            del self._fetches[task]
            task.result()
        look, self._look = _take(self._look)
        if look is not None:
            self._looked_up(look.result())
        question, self._question = _take(self._question)
        if question is not None:
            self._answered(question)

    def _looked_up(self, located: Mapping[bytes, Sequence[Entry]]) -> None:
        course, now = self._course, self._all.clock()
        self._looked = True
        self._located = located
        window = self._chain.window
        masks = [0] * len(window)
        nodes: dict[bytes, list[Entry]] = {}
        for at, key in enumerate(window):
            for entry in located.get(key, ()):
                masks[at] |= entry.mask
                if entry.incarnation not in NOT_NODES:
                    nodes.setdefault(key, []).append(entry)
        self._told(window, masks, None)
        course.looked(window, nodes, now)

    def _answered(self, question: asyncio.Task[Told]) -> None:
        course, now = self._course, self._all.clock()
        error = question.exception()
        if isinstance(error, LimitExceeded):
            self._polls = True
            course.trouble(now)
        elif isinstance(error, KvpoolError):
            course.failed(self._asked, now)
        elif error is not None:
            raise error
        else:
            told = question.result()
            news = self._told(told.window, told.masks, told.incarnation)
            if told.dropped is not None and self._named() in {None, told.incarnation}:
                self._chain.dropped(told.dropped)
            if news:
                course.news(told.incarnation)
            else:
                course.nothing(told.incarnation, now, early=told.early)

    def _told(self, window: Sequence[bytes], masks: Sequence[int], owner: bytes | None) -> bool:
        """Fetch new blocks: from the peer that reported them, or another known source."""
        found = self._chain.told(window, masks)
        for table, key in found:
            entries = self._located.get(key, ())
            if owner is not None:
                entries = [Entry(owner, TIERS["dram"], 1 << table.part), *entries]
            self._queue.setdefault(table, {})[key] = entries
        return bool(found)


def _unpack_dropped(packed: bytes, window: Sequence[bytes]) -> bytes | None:
    """Return the first dropped block that an owner reports behind its masks. Raises `ProtocolError` if it is invalid."""
    if len(packed) != peer_wire.FIRST_DROPPED.size:
        raise ProtocolError(f"the answer to an Await has {len(packed)} bytes after its masks")
    (at,) = peer_wire.FIRST_DROPPED.unpack(packed)
    if at > len(window):
        raise ProtocolError(f"the answer to an Await names block {at} of {len(window)} as dropped")
    return window[at] if at < len(window) else None


def _take(
    task: asyncio.Task[Any] | None,
) -> tuple[asyncio.Task[Any] | None, asyncio.Task[Any] | None]:
    """(the task if it has ended, the task if not)."""
    return (task, None) if task is not None and task.done() else (None, task)


def _expect_refusals(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and not isinstance(task.exception(), KvpoolError):
        crash_if_failed(task)
