"""What happens in the cluster, for all who listen: one long poll a node, and rings that are bounded.

Each event has a place in this gateway's order, as it was heard. A listener that comes back names the last event that
it has seen (`NODE:NUMBER`), and hears all after it; after a restart of the gateway what was heard before is in the
nodes' journals still, in an order that may differ by what clocks do, so some of it may come twice.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.daemon_link import Daemon
from kvpool.admin.problems import Refused
from kvpool.admin.scope import sees_event
from kvpool.admin.tokens import Principal
from kvpool.errors import KvpoolError
from kvpool.wire import answers
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Event

POLL_S = 25.0
TOGETHER_MAX = 1000
RING_MAX = 20_000
RING_BYTES_MAX = 8 << 20  # of JSON; in memory it is some times as much
LISTENERS_MAX = 100
LISTENER_MAX = 2000  # events that one has not taken
OF_TOKEN_MAX = 10
NODES_LOOK_S = 2.0
RETRY_S = 1.0
OVERLAP_S = 60.0  # by which clocks may differ
LEFT_MAX = 1000  # nodes that have left, whose last event is remembered
FIRST_S = 3.0  # for the nodes' journals, when the first ones listen

Moment: TypeAlias = tuple[float, int]
"""When a node says that it happened, and the place in this gateway's order, since two may say the same."""


class Heard:
    """An event, and its place in the gateway's order."""

    __slots__ = ("data", "early", "event", "place")

    def __init__(self, place: int, event: Event, *, early: bool) -> None:
        """early: it is from before the gateway listened, so its place is by its time."""
        self.place = place
        self.event = event
        self.data = msgspec.json.encode(event)
        self.early = early

    @property
    def moment(self) -> Moment:
        return self.event.at_s, self.place

    @property
    def name(self) -> str:
        return f"{self.event.node}:{self.event.number}"


class Listener:
    """One who listens. `take` gives what there is; `lost`: more came than was taken."""

    def __init__(self, who: Principal, nodes: frozenset[str]) -> None:
        self.who = who
        self.nodes = nodes
        self.lost = False
        self._queue: deque[Heard] = deque()
        self._news = asyncio.Event()

    def wants(self, event: Event) -> bool:
        return (not self.nodes or event.node in self.nodes) and sees_event(self.who, event.details)

    def put(self, heard: Heard) -> None:
        if len(self._queue) >= LISTENER_MAX:
            self.lost = True
        else:
            self._queue.append(heard)
        self._news.set()

    async def take(self, wait_s: float) -> list[Heard]:
        """What has come; nothing within that time: an empty list."""
        if not self._queue and not self.lost:
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        found = list(self._queue)
        self._queue.clear()
        return found


class Events:
    """See the module. Event loop only. daemon: one of its own, since polls wait."""

    def __init__(self, cluster: Cluster, daemon: Daemon) -> None:
        self._cluster = cluster
        self._daemon = daemon
        self._ring: deque[Heard] = deque()
        self._nbytes = 0
        self._last = 0
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, Event] = {}
        """The last event of each node. It outlives its poll: a node that is drained and comes back is in the same life."""
        self._first: dict[str, list[Event]] | None = {}
        self._awaited: set[str] = set()
        self._came = asyncio.Event()
        self._ready = asyncio.Event()
        self._listeners: set[Listener] = set()
        self.unreachable: dict[str, str] = {}

    async def run(self) -> None:
        """Listen to all nodes, as they come and go, until cancelled."""
        try:
            while True:
                try:
                    names = (await self._cluster.view()).names()
                except KvpoolError:
                    names = []
                for node in names:
                    if node not in self._polls:
                        if self._first is not None:
                            self._awaited.add(node)
                        poll = asyncio.get_running_loop().create_task(self._poll(node))
                        self._polls[node] = poll
                for node in set(self._polls) - set(names) if names else set():
                    self._polls.pop(node).cancel()
                    self.unreachable.pop(node, None)
                    if node in self._heard:
                        # As the latest of those that have left.
                        self._heard[node] = self._heard.pop(node)
                self._forget(set(names))
                if names and self._first is not None:
                    await self._begin()
                await asyncio.sleep(NODES_LOOK_S)
        finally:
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(*self._polls.values(), return_exceptions=True)

    def _forget(self, here: set[str]) -> None:
        left = [node for node in self._heard if node not in here] if here else []
        for node in left[: max(0, len(left) - LEFT_MAX)]:
            del self._heard[node]

    async def _begin(self) -> None:
        """Put what the journals hold in the order of its times, once those that answer have."""
        try:
            async with asyncio.timeout(FIRST_S):
                while self._awaited:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            pass  # others are heard later
        early, self._first = self._first or {}, None
        merged = sorted((e for events in early.values() for e in events), key=lambda e: e.at_s)
        for event in merged:
            self._hear(event, early=True)
        self._ready.set()

    async def _poll(self, node: str) -> None:
        last = self._heard.get(node)
        wait_s, sure = 0.0, last is None
        while True:
            after = last.number if last is not None else 0
            try:
                if last is not None and not sure and not await self._same_life(node, last):
                    last, sure = None, True
                    continue
                sure = True
                told = await self._ask(node, after, TOGETHER_MAX, wait_s)
            except KvpoolError as error:
                self.unreachable[node] = str(error)
                self._is_known(node)
                await asyncio.sleep(RETRY_S)
                wait_s, sure = 0.0, False
                continue
            self.unreachable.pop(node, None)
            if told.last < after:
                last = None
                continue
            for event in told.events:
                last = self._heard[node] = event
                if self._first is None:
                    self._hear(event)
                else:
                    self._first.setdefault(node, []).append(event)
            caught_up = last is None or last.number >= told.last
            if caught_up:
                self._is_known(node)
            wait_s = POLL_S if caught_up else 0.0

    def _is_known(self, node: str) -> None:
        """What the node's journal holds has been heard, or is not to be had."""
        self._awaited.discard(node)
        self._came.set()

    async def _same_life(self, node: str, last: Event) -> bool:
        """Whether the node still knows this event; in another life its numbers have begun anew."""
        told = await self._ask(node, last.number - 1, 1, 0.0)
        return told.first > last.number or told.events[:1] == [last]

    async def _ask(self, node: str, after: int, count: int, wait_s: float) -> answers.Events:
        message = operator_wire.Events(after, count, wait_s)
        told: answers.Events = await self._daemon.get(message, node=node, wait_s=wait_s)
        return told

    def _hear(self, event: Event, *, early: bool = False) -> None:
        self._last += 1
        heard = Heard(self._last, event, early=early)
        self._ring.append(heard)
        self._nbytes += len(heard.data)
        while len(self._ring) > RING_MAX or self._nbytes > RING_BYTES_MAX:
            self._nbytes -= len(self._ring.popleft().data)
        for listener in self._listeners:
            if listener.wants(event):
                listener.put(heard)

    async def listen(
        self, who: Principal, nodes: frozenset[str], last_seen: str, replay: int
    ) -> tuple[Listener, bool]:
        """A listener, and whether all that came after `last_seen` is still known. `leave` has to follow."""
        if len(self._listeners) >= LISTENERS_MAX or (
            sum(each.who.name == who.name for each in self._listeners) >= OF_TOKEN_MAX
        ):
            raise Refused(
                429,
                "limit",
                f"too many event listeners: at most {OF_TOKEN_MAX} per token, and {LISTENERS_MAX} in all",
                {"Retry-After": "5"},
            )
        listener = Listener(who, nodes)
        await self._wait_ready()
        whole = True
        wanted = [heard for heard in self._ring if listener.wants(heard.event)]
        if last_seen:
            place = self._place_after(last_seen)
            whole = place is not None
            wanted = [heard for heard in wanted if place is None or heard.place > place]
            wanted = [heard for heard in wanted if heard.name != last_seen]
        else:
            wanted = wanted[-replay:] if replay else []
        for heard in wanted[-LISTENER_MAX:]:
            listener.put(heard)
        whole = whole and len(wanted) <= LISTENER_MAX
        self._listeners.add(listener)
        return listener, whole

    def _place_after(self, last_seen: str) -> int | None:
        """After which place what the listener has not seen begins; None: it is not known any more."""
        found = next((heard for heard in reversed(self._ring) if heard.name == last_seen), None)
        if found is None:
            return None
        if not found.early:
            return found.place
        # Before this gateway began, the order was another one's.
        at_s = found.event.at_s - OVERLAP_S
        return next(
            (h.place - 1 for h in self._ring if h.event.at_s >= at_s or not h.early), found.place
        )

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    async def _wait_ready(self) -> None:
        try:
            async with asyncio.timeout(FIRST_S + NODES_LOOK_S):
                await self._ready.wait()
        except TimeoutError:
            pass  # no node has answered: what comes later is heard all the same

    async def newest(
        self, keep: Callable[[Event], bool], most: int, before: Moment | None
    ) -> list[Heard]:
        """The last events that are to be kept, newest first by the nodes' clocks. before: only older ones."""
        await self._wait_ready()
        chosen = (
            heard
            for heard in self._ring
            if (before is None or heard.moment < before) and keep(heard.event)
        )
        return heapq.nlargest(most, chosen, key=lambda heard: heard.moment)
