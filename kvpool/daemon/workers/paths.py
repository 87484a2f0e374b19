"""By which paths each peer is pulled from, and asked, one after the other: a fixed order. No I/O, no clock.

First NIXL, then the transports of other distributions, then TCP; `pull_over = "tcp"` puts TCP first. Within a
transport the order is that of the records (`placement/nic_pairs.py` ranks pairs of network cards), and cards of the
same rank share what is pulled. A path that fails rests, for longer and longer. So does one that is much slower than
another to the same peer, unless `pull_over` says which transport to use; to know that, one large pull a minute goes
by the best of the paths that come after those in use.

`TransferWorkers` goes by these paths and tells here how it went. Event loop only.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.placement.nic_pairs import Route, Way
from kvpool.retry import backoff_s
from kvpool.telemetry.histogram import Histogram
from kvpool.telemetry.node_stats import NixlStats, PathsStats, PeerWays, WayStats
from kvpool.transfer import scheme_of
from kvpool.transfer.addresses import split_source

DEADLINE_SHARE = 0.5  # of a pull's time: the rest is for the next path, should it be needed
ATTEMPT_S, ATTEMPT_BYTES_S = 5.0, 100e6  # a path that is slower than this is not worth waiting for
REST_S, REST_S_MAX = 1.0, 60.0  # after a failure; doubling
PEERS_MAX = 1024  # that are remembered
TRIES_MAX = 4  # paths that one pull, or one question, goes by
CARRIED_S = 10.0  # of what a path has carried half counts after this, among equals
MEASURED_BYTES = 4 << 20  # a smaller pull tells of latency, which is alike
MEASURED_S = 60.0  # how long it is known how fast a path is
RECENT = 0.5  # of a new measurement
SLOW = 1 / 3  # of another path's speed
TRY_TIMES, TRY_S_MIN = 4.0, 0.1  # as long as the usual path would take: what a measurement may cost
NIXL, TCP = "nixl", "tcp"


@dataclass(slots=True)
class PeerPath:
    """One path to a peer, and how it did.

    transport: the URL's scheme. source, target: the card at either end; source is empty where the machine's routes
    choose. place: at random, among equals. until: when it is used again; failures: in a row. carried: bytes asked
    for up to now, old ones counting less, as of `carried_at`. bytes_s: of large pulls, as of `measured_at`; 0: of none.
    """

    url: str
    rank: int
    transport: str
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
    bytes_s: float = 0.0
    measured_at: float = -math.inf

    @property
    def shortcut(self) -> bool:
        """Whether TCP may do what it cannot."""
        return self.transport != TCP

    def load(self, now: float) -> float:
        """How much it carried lately."""
        return self.carried * math.exp2((self.carried_at - now) / CARRIED_S)

    def attempt_s(self, nbytes: int, left_s: float, *, last: bool) -> float:
        """How long a pull of so much may take by it, of the time that is left: all, where no other one follows."""
        if last:
            return left_s
        return min(left_s * DEADLINE_SHARE, ATTEMPT_S + nbytes / ATTEMPT_BYTES_S)

    def failed(self, reason: str, now: float) -> None:
        """It rests. What was under way when it failed before tells nothing new."""
        if now < self.until:
            return
        self.until = now + backoff_s(REST_S, REST_S_MAX, self.failures)
        self.failures += 1
        self.reason = reason

    def well(self) -> None:
        """It works."""
        self.until, self.failures = 0.0, 0


@dataclass(slots=True)
class PeerPaths:
    """All paths to one peer.

    busy: bytes under way from each of its cards. ours: to each of this node's, from all peers. first: the transport
    that comes first whatever is faster; empty: NIXL, unless it is slow.
    """

    ours: Counter[str]
    first: str
    busy: Counter[str] = field(default_factory=Counter)
    seen: Route | None = None
    incarnation: str = ""
    paths: list[PeerPath] = field(default_factory=list)  # in the order of the records
    seconds: dict[str, Histogram] = field(default_factory=dict)  # of pulls, by transport

    def see(self, route: Route, draw: Callable[[], float], *, nixl: bool) -> None:
        """These there are now. A new life of the peer has failed at nothing yet.

        draw: below 1, at random. nixl: whether this node has it.
        """
        if route is self.seen:
            return
        self.seen = route
        before = {path.url: path for path in self.paths}
        self.paths = []
        for way in route.ways:
            transport = scheme_of(way.url)
            if transport == NIXL and not nixl:
                continue
            target, source = split_source(way.url)
            path = before.get(way.url) or PeerPath(
                way.url, way.rank, transport, source, target, draw()
            )
            path.rank = way.rank
            self.paths.append(path)
            if route.incarnation != self.incarnation:
                path.well()
        self.incarnation = route.incarnation

    def for_pull(self, now: float, nbytes: int) -> tuple[list[PeerPath], float]:
        """Those to pull so many bytes by, one after the other: at least one. nbytes: 0 where speed does not matter.

        And how long the first one may take, where that is only measured; 0: it is the one to use.
        """
        paths = self._in_order(now)
        usual = paths[0]
        if nbytes < MEASURED_BYTES or not usual.bytes_s or self.first:
            return paths[:TRIES_MAX], 0.0
        rank = self._record_order(usual)
        other = next((path for path in paths if self._record_order(path) != rank), None)
        if other is None or now - other.measured_at < MEASURED_S:
            return paths[:TRIES_MAX], 0.0
        other.measured_at = now
        paths.remove(other)
        # When its short time was all that it lacked, it is the last resort again.
        again = [] if any(path.transport == TCP for path in paths) else [other]
        tried_s = max(TRY_S_MIN, TRY_TIMES * nbytes / usual.bytes_s)
        return [other, *paths[: TRIES_MAX - 1 - len(again)], *again], tried_s

    def _in_order(self, now: float) -> list[PeerPath]:
        usable = sorted(
            (path for path in self.paths if path.until <= now),
            key=lambda path: self._order(path, now),
        )
        others = [at for at, path in enumerate(usable) if path.transport != NIXL]
        if not others:
            return [*usable, *self._least_resting()]
        # NIXL is met over TCP: where that has failed, so would this.
        return [path for at, path in enumerate(usable) if at < others[0] or path.transport != NIXL]

    def for_ask(self, now: float) -> list[PeerPath]:
        """Those to ask by. NIXL moves blocks alone; the other transports' questions wait for TCP's to fail."""
        usable = [path for path in self.paths if path.until <= now and path.transport != NIXL]
        usable.sort(key=lambda path: (path.shortcut, self._order(path, now)))
        return (usable or self._least_resting())[:TRIES_MAX]

    def _record_order(self, path: PeerPath) -> tuple[int, int]:
        first = self.first or NIXL
        kind = 0 if path.transport == first else {NIXL: 1, TCP: 3}.get(path.transport, 2)
        return kind, path.rank

    def _order(self, path: PeerPath, now: float) -> tuple[tuple[int, int], int, float, float]:
        """Of equals the one with the least under way comes first, then that did the least."""
        busy = max(self.busy[path.target], self.ours[path.source] if path.source else 0)
        return self._record_order(path), busy, path.load(now), path.place

    def _least_resting(self) -> list[PeerPath]:
        listed = [path for path in self.paths if path.transport != NIXL]
        return sorted(listed, key=lambda path: path.until)[:1]

    def begin(self, path: PeerPath, nbytes: int, now: float) -> None:
        """So much is asked for by this path."""
        path.carried, path.carried_at = path.load(now) + nbytes, now
        self._add(path, nbytes)

    def end(self, path: PeerPath, nbytes: int) -> None:
        """It has ended, well or not."""
        self._add(path, -nbytes)

    def measured(self, path: PeerPath, nbytes: int, seconds: float, now: float) -> None:
        """A path is well, and so much came by it in so long, of all pulls: it rests if another one is much faster."""
        if nbytes >= MEASURED_BYTES and seconds > 0:
            bytes_s = nbytes / seconds
            known = path.bytes_s or bytes_s
            path.bytes_s, path.measured_at = known + RECENT * (bytes_s - known), now
            best = max((other.bytes_s for other in self.paths if other.until <= now), default=0.0)
            if path.bytes_s < SLOW * best and not self.first:
                path.failed(
                    f"{path.bytes_s / 1e6:.0f} MB/s, of {best / 1e6:.0f} by another path", now
                )
                return
        path.well()

    def _add(self, path: PeerPath, nbytes: int) -> None:
        for counter, card in ((self.busy, path.target), (self.ours, path.source)):
            counter[card] += nbytes
            if not counter[card]:
                del counter[card]

    def resting(self, transport: str, now: float) -> dict[str, str]:
        """Why, by URL."""
        return {
            path.url: path.reason
            for path in self.paths
            if path.transport == transport and now < path.until
        }

    def stats(self, now: float) -> PeerWays:
        """For operators."""
        return PeerWays(
            seconds=self.seconds,
            ways=[
                WayStats(
                    url=path.url,
                    transport=path.transport,
                    pulls=path.pulls,
                    bytes=path.nbytes,
                    bytes_s=path.bytes_s,
                    rests_s=max(0.0, path.until - now),
                    reason=path.reason if now < path.until else "",
                )
                for path in self.paths
            ],
        )


class Paths:
    """The paths to all peers, by the URL that each is known by.

    route: all ways to the peer that is known by a URL; None: there is no other than that. rng: spreads readers
    over paths that are as good as each other. nixl: whether this node has it. first: as in `PeerPaths`.
    """

    def __init__(
        self,
        route: Callable[[str], Route | None],
        rng: random.Random,
        *,
        nixl: bool,
        first: str = "",
    ) -> None:
        self._route = route
        self._rng = rng
        self.nixl = nixl
        self._first = first
        self._ours: Counter[str] = Counter()
        self._peers: OrderedDict[str, PeerPaths] = OrderedDict()
        self._nixl_stats = NixlStats()
        self._changed_card = 0

    def path_to(self, url: str, now: float) -> str:
        """The URL by which a peer is pulled from at present."""
        peer = self._peers.get(url)
        if peer is None:  # to look is no use of it
            peer = PeerPaths(self._ours, self._first)
        self._look(peer, url)
        paths, _ = peer.for_pull(now, 0)
        return paths[0].url

    def peer(self, url: str) -> PeerPaths:
        """The paths to one peer, as they are now."""
        if url not in self._peers:
            self._forget_gone()
            self._peers[url] = PeerPaths(self._ours, self._first)
        peer = self._peers[url]
        self._peers.move_to_end(url)
        self._look(peer, url)
        while len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        return peer

    def _look(self, peer: PeerPaths, url: str) -> None:
        route = self._route(url) or Route("", (Way(url, 0),))
        peer.see(route, self._rng.random, nixl=self.nixl)

    def _forget_gone(self) -> None:
        """Those that were members and are not any more."""
        for url, peer in list(self._peers.items()):
            if peer.incarnation and self._route(url) is None:
                del self._peers[url]

    # ---- how pulls went ------------------------------------------------------------------------------

    def chosen(self, peer: PeerPaths, path: PeerPath, now: float) -> None:
        """A pull begins by this path: whether it would have been NIXL, had that not failed."""
        if self._first != TCP and path.transport != NIXL and peer.resting(NIXL, now):
            self._nixl_stats.rested += 1

    def came(
        self, peer: PeerPaths, path: PeerPath, blocks: int, nbytes: int, seconds: float | None
    ) -> None:
        """So much came by a path. seconds: None where they tell nothing of it."""
        path.pulls += 1
        path.nbytes += nbytes
        if blocks and seconds is not None:
            peer.seconds.setdefault(path.transport, Histogram()).add(seconds)
        if path.transport == NIXL:
            self._nixl_stats.pulls += 1
            self._nixl_stats.blocks += blocks
            self._nixl_stats.bytes += nbytes

    def failed(self, path: PeerPath, reason: str, now: float) -> None:
        """A path failed: it rests."""
        if path.transport == NIXL:
            self._nixl_stats.last_error = f"{path.url}: {reason}"
        path.failed(reason, now)

    def failed_over(self, path: PeerPath, blocks: int) -> None:
        """The next path has to bring what this one did not."""
        if path.transport == NIXL:
            self._nixl_stats.failed_over += 1
            self._nixl_stats.failed_over_blocks += blocks
        else:
            self._changed_card += 1

    # ---- for operators -------------------------------------------------------------------------------

    def stats(self, now: float) -> PathsStats:
        """Each peer by the URL that it is known by."""
        self._forget_gone()
        return PathsStats(
            changed_card=self._changed_card,
            peers={url: peer.stats(now) for url, peer in self._peers.items()},
        )

    def nixl_stats(self, now: float) -> NixlStats:
        """Counters, with what rests now."""
        resting = [peer.resting(NIXL, now) for peer in self._peers.values()]
        self._nixl_stats.resting = {url: reason for one in resting for url, reason in one.items()}
        return self._nixl_stats
