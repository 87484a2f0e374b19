"""By which way each peer is pulled from: over NIXL or TCP, and between which network cards.

The ways to a peer come in groups of those that are as good as each other (`placement/nic_pairs.py` ranks them),
NIXL before TCP. One group is used as a rule, at first the best one. A way that fails rests, for longer and
longer, and what it did not bring is brought by the next one, over TCP at last. Now and then a pull goes by
another group, and what is clearly faster for this peer becomes the rule (as `transfer/stream_tuner.py` does with
connections). What a peer refuses it refuses by all ways. Event loop only. The bytes are moved by transfer workers, NIXL's by one of its own
(`transfer/nixl.py` says why).
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvpool.errors import ConfigError, Declined, KvpoolError, LimitExceeded, Unavailable
from kvpool.net import scheme_of
from kvpool.placement.nic_pairs import Route, Way
from kvpool.retry import backoff_s
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, PeerWays, WayStats
from kvpool.telemetry.histogram import Histogram
from kvpool.telemetry.spans import current
from kvpool.transfer.addresses import split_source
from kvpool.transfer.base import arrived_bytes
from kvpool.transfer.stream_tuner import BETTER, SAMPLES_MIN, Speeds
from kvpool.types import CHECKSUM_BYTES, BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire

NO_WAY = (ConfigError, Unavailable)
"""Errors of one address: its transport is not installed here, or the peer is not reached there."""
DEADLINE_SHARE = 0.5  # of a pull's time: the rest is for the next way, should it be needed
ATTEMPT_S, ATTEMPT_BYTES_S = 5.0, 100e6  # a path that is slower than this is not worth waiting for
REST_S, REST_S_MAX = 1.0, 60.0  # after a failure; doubling
PEERS_MAX = 1024  # of which is remembered what was learnt
TRIES_MAX = 4  # ways that one pull, or one question, goes by
LEARN_BYTES = 4 << 20  # a smaller pull tells of latency, which is alike
EXPLORE_EVERY, EXPLORE_EVERY_MAX = 16, 256  # pulls; doubling while the others are much slower
# As long as the usual group would take: what a try may cost.
EXPLORE_TIMES, EXPLORE_S_MIN = 4.0, 0.1
CARRIED_S = 10.0  # of what a way has carried half counts after this, among equals
MUCH_WORSE = 0.5
NIXL, TCP = "nixl", "tcp"

Pull = Callable[[worker_wire.PullBlocks], Awaitable[worker_wire.Pulled]]
Ask = Callable[[worker_wire.AskPeer], Awaitable[frame.Done | frame.Bytes]]
Group = tuple[str, int]
"""Scheme and rank."""
NO_GROUP: Group = ("", 0)


@dataclass(slots=True)
class WayState:
    """What is known of one way.

    source, target: the card at either end; source is empty where the machine's routes choose. place: at random,
    among equals. until: when it is used again; failures: in a row. carried: bytes asked for up to now, old ones
    counting less, as of `carried_at`.
    """

    group: Group
    source: str
    target: str
    place: float
    until: float = 0.0
    failures: int = 0
    reason: str = ""
    pulls: int = 0
    nbytes: int = 0
    carried: float = 0.0
    carried_at: float = 0.0

    def load(self, now: float) -> float:
        return self.carried * math.exp2((self.carried_at - now) / CARRIED_S)

    def carry(self, nbytes: int, now: float) -> None:
        self.carried, self.carried_at = self.load(now) + nbytes, now


@dataclass(slots=True)
class Peer:
    """What is known of the ways to one peer. No I/O.

    busy: bytes asked for by each of its cards. ours: by each of this node's, of all peers. first: the scheme
    that is to be used while it works, whatever is faster; empty: what is.
    """

    ours: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)
    incarnation: str = ""
    seen: Route | None = None
    ways: dict[str, WayState] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)  # the best one by its records first
    usual: Group = NO_GROUP
    speeds: Speeds[Group] = field(default_factory=Speeds)
    first: str = ""
    pulls: int = 0  # that could be learnt from, since one went by another group
    every: int = EXPLORE_EVERY
    turn: int = 0
    seconds: dict[str, Histogram] = field(default_factory=dict)  # of pulls, by scheme

    def see(self, route: Route, schemes: Mapping[str, object], draw: Callable[[], float]) -> None:
        """Take up a peer's present ways, those of other schemes left out: there may be none. draw: below 1, at random.

        A new life of the peer has failed at nothing yet.
        """
        if route is self.seen:
            return
        ways = {
            way.url: (scheme, way.rank) for way in route.ways if (scheme := _scheme(way)) in schemes
        }
        self.seen = route
        if route.incarnation != self.incarnation:
            self.incarnation = route.incarnation
            for state in self.ways.values():
                state.until, state.failures = 0.0, 0
        if {url: state.group for url, state in self.ways.items()} == ways:
            return
        before, self.ways = self.ways, {}
        for url, group in ways.items():
            target, source = split_source(url)
            state = before.get(url) or WayState(group, source, target, draw())
            state.group = group
            self.ways[url] = state
        best, *_ = self.groups or [self.usual]
        self.groups = sorted(
            set(ways.values()), key=lambda group: (group[0] != (self.first or NIXL), group[1])
        )
        # What was found to be faster than the best one stays the rule while it is there.
        if self.usual == best or self.usual not in self.groups:
            self._use(next(iter(self.groups), NO_GROUP))

    def _use(self, group: Group) -> None:
        self.usual, self.speeds, self.every = group, Speeds(), EXPLORE_EVERY

    def order(self, nbytes: int, now: float, *, background: bool) -> tuple[list[str], bool]:
        """By which ways to try so many bytes, one after the other; none if no way to the peer is usable from here.

        And whether the first one is only tried, since it is its turn to be compared with the usual group.
        """
        usable = [url for url, state in self.ways.items() if state.until <= now]
        usable.sort(key=lambda url: self._preference(url, now))
        group = self.usual
        if nbytes >= LEARN_BYTES and not background and self.speeds.usual:
            group = self._turn(now)
        explored = [url for url in usable if self.ways[url].group == group][:1]
        # NIXL is met over TCP: where that has failed, so would this.
        tcp = next((at for at, url in enumerate(usable) if self.ways[url].group[0] == TCP), None)
        if tcp is None:
            usable += self._least_resting(TCP)
        else:
            usable = [
                url for at, url in enumerate(usable) if at < tcp or self.ways[url].group[0] == TCP
            ]
        if not explored or group == self.usual:
            return usable[:TRIES_MAX], False
        others = [url for url in usable if url not in explored]
        if all(self.ways[url].group[0] != TCP for url in others):
            others += explored  # when its short time was all that it lacked
        return (explored + others)[:TRIES_MAX], True

    def order_questions(self, now: float) -> list[str]:
        """By which ways to ask, which is over TCP."""
        usable = [
            url for url, state in self.ways.items() if state.until <= now and state.group[0] == TCP
        ]
        usable.sort(key=lambda url: self._preference(url, now))
        return (usable or self._least_resting(TCP))[:TRIES_MAX]

    def _preference(self, url: str, now: float) -> tuple[bool, int, int, float, float]:
        """The usual group first; of equals the one with the least under way, then that did the least."""
        state = self.ways[url]
        busy = max(self.busy[state.target], self.ours[state.source] if state.source else 0)
        at = self.groups.index(state.group)
        return state.group != self.usual, at, busy, state.load(now), state.place

    def begin(self, state: WayState, nbytes: int, now: float) -> None:
        """So much is asked for by this way."""
        state.carry(nbytes, now)
        self._add(state, nbytes)

    def end(self, state: WayState, nbytes: int) -> None:
        self._add(state, -nbytes)

    def _add(self, state: WayState, nbytes: int) -> None:
        for counter, card in ((self.busy, state.target), (self.ours, state.source)):
            counter[card] += nbytes
            if not counter[card]:
                del counter[card]

    def _least_resting(self, scheme: str) -> list[str]:
        listed = [url for url, state in self.ways.items() if state.group[0] == scheme]
        return sorted(listed, key=lambda url: self.ways[url].until)[:1]

    def _turn(self, now: float) -> Group:
        """The usual group, or another one whose turn it is to be compared with it."""
        self.pulls += 1
        if self.pulls < self.every or self.first:
            return self.usual
        others = [
            group
            for group in self.groups
            if group != self.usual
            and any(s.group == group and s.until <= now for s in self.ways.values())
        ]
        if not others:
            return self.usual
        self.pulls = 0
        self.turn += 1
        return others[self.turn % len(others)]

    def learn(self, url: str, nbytes: int, seconds: float) -> None:
        """All of a pull that was not in the background came this way."""
        if nbytes < LEARN_BYTES or seconds <= 0 or url not in self.ways:
            return
        group, speed = self.ways[url].group, nbytes / seconds
        if group == self.usual:
            self.speeds.used(speed)
            return
        if self.speeds.usual and not self.first:
            self._compare(group, speed)

    def explored_in_vain(self, group: Group) -> None:
        """Another group than the usual one failed, or took far too long."""
        if group != self.usual and self.speeds.usual:
            self._compare(group, 0.0)

    def _compare(self, group: Group, speed: float) -> None:
        seen = self.speeds.tried(group, speed)
        if seen.samples < SAMPLES_MIN:
            return
        if seen.gain > BETTER:
            self._use(group)
        elif all(one.gain < MUCH_WORSE for one in self.speeds.others.values()):
            self.every = min(2 * self.every, EXPLORE_EVERY_MAX)
        else:
            self.every = EXPLORE_EVERY

    def failed(self, url: str, reason: str, now: float) -> None:
        """A way failed: it rests."""
        state = self.ways.get(url)
        if state is None or now < state.until:
            return  # what was under way when it failed before tells nothing new
        state.until = now + backoff_s(REST_S, REST_S_MAX, state.failures)
        state.failures += 1
        state.reason = reason

    def well(self, url: str) -> None:
        """A way works."""
        if (state := self.ways.get(url)) is not None:
            state.until, state.failures = 0.0, 0

    def resting(self, scheme: str, now: float) -> dict[str, str]:
        """Why, by URL."""
        return {
            url: state.reason
            for url, state in self.ways.items()
            if state.group[0] == scheme and now < state.until
        }

    def stats(self, now: float) -> PeerWays:
        """For operators."""
        return PeerWays(
            usual=self.usual[0],
            bytes_s=self.speeds.usual,
            seconds=self.seconds,
            others={
                f"{scheme} {rank}": {"bytes_s": seen.speed, "gain": seen.gain}
                for (scheme, rank), seen in self.speeds.others.items()
            },
            ways=[
                WayStats(
                    url=way,
                    transport=state.group[0],
                    pulls=state.pulls,
                    bytes=state.nbytes,
                    rests_s=max(0.0, state.until - now),
                    reason=state.reason if now < state.until else "",
                )
                for way, state in self.ways.items()
            ],
        )


@dataclass(eq=False)
class Paths:
    """Pulls and questions, each by the way that is best for its peer at the time.

    pulls: how to pull, by scheme: `tcp`, and `nixl` where this node has it. They return or raise only when
    nothing writes to an order's rows any more, so that one may follow the other. ask: how to ask, over TCP.
    route: all ways to the peer that is known by a URL; None: there is no other than that. rng: spreads readers
    over ways that are as good as each other. first: as in `Peer`.
    """

    _pulls: Mapping[str, Pull]
    _ask: Ask
    _route: Callable[[str], Route | None]
    _clock: Callable[[], float]
    _rng: random.Random
    _first: str = ""

    def __post_init__(self) -> None:
        self._ours: Counter[str] = Counter()
        self._peers: OrderedDict[str, Peer] = OrderedDict()
        self._nixl = NixlStats()
        self.changed_card = 0

    def path(self, url: str) -> str:
        """By which way a peer is pulled from at present, mostly; empty if there is none."""
        peer = self._peers.get(url)
        if peer is None:  # to look is no use of it
            peer = Peer(self._ours, first=self._first)
        peer.see(self._all_ways(url), self._pulls, self._rng.random)
        urls, _ = peer.order(0, self._clock(), background=True)
        return next(iter(urls), "")

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        """As `TransferWorkers.pull`."""
        peer = self._peer(order.url)
        started = self._clock()
        count, nbytes = order.count, order.nbytes
        urls, tried = peer.order(nbytes, started, background=order.background)
        if not urls:
            raise _no_way(order.url)
        ways = [(url, peer.ways[url]) for url in urls]  # there may be others before this has ended
        tried_s = max(EXPLORE_S_MIN, EXPLORE_TIMES * nbytes / peer.speeds.usual) if tried else 0.0
        self._note_choice(peer, ways[0][1], started)
        whole: worker_wire.Pulled | None = None
        left = list(range(count))
        for at, (url, state) in enumerate(ways):
            seconds = self._clock() - started
            if whole is not None:
                if seconds >= order.deadline_s:
                    break
                self._note_failure(ways[at - 1][1], len(left))
            part = order if whole is None else _cut(order, left, seconds)
            last = at + 1 == len(ways)
            if order.trace and (span := current()) is not None:
                span.set(path=state.group[0])
                span.count("tries", 1)
            try:
                came = await self._try(
                    peer, part, url, state, last=last, tried_s=0.0 if at else tried_s
                )
            except KvpoolError as error:
                if whole is None or set(whole.status) == {BlockStatus.LATE}:
                    raise
                return msgspec.structs.replace(whole, error=str(error))
            whole = came if whole is None else _merged(whole, left, came)
            if not came.error or came.refused:
                return whole
            if not last:
                left = [
                    i
                    for i, s in enumerate(whole.status)
                    if s in {BlockStatus.LATE, BlockStatus.MISMATCH}
                ]
                if not left:
                    return msgspec.structs.replace(whole, error="")
        assert whole is not None, "one way was tried"
        return whole

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        """As `TransferWorkers.ask`."""
        peer = self._peer(order.url)
        started = self._clock()
        ways = peer.order_questions(started)
        for at, url in enumerate(ways):
            left_s = order.deadline_s - (self._clock() - started)
            if at + 1 < len(ways):
                # A card that swallows all leaves time for the next one, but a peer may wait as it was asked to.
                asks = order.question
                waits_s = (
                    asks.wait_s if isinstance(asks, (peer_wire.Await, peer_wire.Operate)) else 0.0
                )
                left_s = min(left_s, waits_s + max(0.0, left_s - waits_s) * DEADLINE_SHARE)
            asked = msgspec.structs.replace(order, url=url, deadline_s=left_s)
            try:
                answer = await self._ask(asked)
            except Declined:
                peer.well(url)
                raise
            except NO_WAY as error:
                if not order.background:
                    peer.failed(url, str(error), self._clock())
                out_of_time = self._clock() - started >= order.deadline_s
                if at + 1 == len(ways) or out_of_time:
                    raise
            else:
                peer.well(url)
                return answer
        raise _no_way(order.url)

    def _peer(self, url: str) -> Peer:
        if url not in self._peers:
            self._forget_gone()
            self._peers[url] = Peer(self._ours, first=self._first)
        peer = self._peers[url]
        self._peers.move_to_end(url)
        peer.see(self._all_ways(url), self._pulls, self._rng.random)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        return peer

    def _forget_gone(self) -> None:
        """Those that were members and are not any more."""
        for url, peer in list(self._peers.items()):
            if peer.incarnation and self._route(url) is None:
                del self._peers[url]

    def _all_ways(self, url: str) -> Route:
        return self._route(url) or Route("", (Way(url, 0),))

    async def _try(
        self,
        peer: Peer,
        order: worker_wire.PullBlocks,
        url: str,
        state: WayState,
        *,
        last: bool,
        tried_s: float,
    ) -> worker_wire.Pulled:
        """What came by one way. `error` says why not all did; the last way may raise.

        tried_s: for so long it is only tried; 0: it is the one to use.
        """
        count, nbytes = order.count, order.nbytes
        nixl = state.group[0] == NIXL
        seconds = order.deadline_s
        if not last:
            seconds = min(seconds * DEADLINE_SHARE, ATTEMPT_S + nbytes / ATTEMPT_BYTES_S)
            seconds = min(seconds, tried_s or seconds)
        started = self._clock()

        def failed(reason: str) -> None:
            # What is slow beside others, or gives way to them, is not broken.
            late = self._clock() - started >= seconds
            if not (late and (order.background or tried_s)):
                self._failed(peer, url, reason)
            if tried_s:
                peer.explored_in_vain(state.group)

        peer.begin(state, nbytes, started)
        try:
            pulled = await self._pulls[state.group[0]](
                msgspec.structs.replace(order, url=url, deadline_s=seconds)
            )
        except KvpoolError as error:
            # What is too much for our own transfer worker for NIXL may not be for the others.
            if isinstance(error, NO_WAY) or (nixl and not isinstance(error, LimitExceeded)):
                failed(str(error))
            if last or not (nixl or isinstance(error, NO_WAY)):
                raise
            nothing = bytes([BlockStatus.LATE]) * count, bytes(CHECKSUM_BYTES * count)
            return worker_wire.Pulled(*nothing, self._clock() - started, str(error))
        finally:
            peer.end(state, nbytes)
        came = pulled.status.count(BlockStatus.PRESENT)
        came_bytes = arrived_bytes(order, pulled)
        state.pulls += 1
        state.nbytes += came_bytes
        if came and not order.background:
            peer.seconds.setdefault(state.group[0], Histogram()).add(pulled.seconds)
        if nixl:
            self._nixl.pulls += 1
            self._nixl.blocks += came
            self._nixl.bytes += came_bytes
        if pulled.refused:
            peer.well(url)
            return pulled
        error_text = pulled.error
        if nixl and not error_text and BlockStatus.MISMATCH in pulled.status:
            # The owner's copy may be broken, or this path. TCP tells: it is the owner's then as well.
            error_text = (
                f"{pulled.status.count(BlockStatus.MISMATCH)} blocks do not match their checksums"
            )
        if error_text:
            failed(error_text)
            return msgspec.structs.replace(pulled, error=error_text)
        peer.well(url)
        if not order.background:
            peer.learn(url, came_bytes, pulled.seconds)
        return pulled

    def _failed(self, peer: Peer, url: str, reason: str) -> None:
        if scheme_of(url) == NIXL:
            self._nixl.last_error = f"{url}: {reason}"
        peer.failed(url, reason, self._clock())

    def _note_choice(self, peer: Peer, way: WayState, now: float) -> None:
        """Count why a pull does not go over NIXL where the peer has it."""
        if peer.groups[0][0] == NIXL and way.group[0] != NIXL:
            rested = bool(peer.resting(NIXL, now))
            self._nixl.rested += rested
            self._nixl.slower += not rested

    def _note_failure(self, way: WayState, blocks: int) -> None:
        """Count that another way has to bring what this one did not."""
        if way.group[0] == NIXL:
            self._nixl.failed_over += 1
            self._nixl.failed_over_blocks += blocks
        else:
            self.changed_card += 1

    def stats(self) -> PathsStats:
        """Each peer by the URL that it is known by."""
        self._forget_gone()
        now = self._clock()
        return PathsStats(
            changed_card=self.changed_card,
            peers={url: peer.stats(now) for url, peer in self._peers.items()},
        )

    def nixl_stats(self) -> NixlStats:
        """Counters, with what rests now."""
        now = self._clock()
        resting = [peer.resting(NIXL, now) for peer in self._peers.values()]
        self._nixl.resting = {url: reason for one in resting for url, reason in one.items()}
        return self._nixl


def _no_way(url: str) -> Unavailable:
    return Unavailable(f"the node at {url} announces no address of a transport that this node has")


def _scheme(way: Way) -> str:
    """TCP stands for all that is not NIXL: the transfer workers tell those apart."""
    return NIXL if scheme_of(way.url) == NIXL else TCP


def _cut(
    order: worker_wire.PullBlocks, indices: Sequence[int], seconds: float
) -> worker_wire.PullBlocks:
    """The order for these blocks alone, in the time that is left."""
    parts: list[worker_wire.PartRows] = []
    left = deque(indices)  # in order
    first = 0
    for part in order.parts:
        keys, rows = split_keys(part.keys), array("I", part.rows)
        of_part = []
        while left and left[0] < first + len(rows):
            of_part.append(left.popleft() - first)
        first += len(rows)
        if of_part:
            parts.append(
                msgspec.structs.replace(
                    part,
                    keys=b"".join([keys[index] for index in of_part]),
                    rows=array("I", [rows[index] for index in of_part]).tobytes(),
                )
            )
    return msgspec.structs.replace(order, parts=parts, deadline_s=order.deadline_s - seconds)


def _merged(
    first: worker_wire.Pulled, indices: Sequence[int], second: worker_wire.Pulled
) -> worker_wire.Pulled:
    """What two attempts have brought; the second one was for these blocks."""
    status, checksums = bytearray(first.status), bytearray(first.checksums)
    for at, index in enumerate(indices):
        status[index] = second.status[at]
        checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] = second.checksums[
            at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES
        ]
    return worker_wire.Pulled(
        bytes(status),
        bytes(checksums),
        first.seconds + second.seconds,
        second.error,
        second.refused,
    )
