"""The peers of a node, with what is known of them: whom to trust, to probe, to try. No I/O, no clock.

The caller tells what it sees (`Peers.started`, `finished`, `failed`, `slow`) and asks when to lose patience
(`Peers.hedge_after_s`). Times are seconds of one monotonic clock, sizes are bytes. Event loop only: nothing here
is safe to share among threads, and nothing here waits.

A peer is one life of a node, known by its incarnation. A restarted node is trusted anew, and taken for half
as fast or slow as it was: how far it is and over what it is reached has hardly changed. A peer is

    trusted ───failed──▶ suspended: not asked for 0.2 s, doubling to 10 s      ──┐ then on probation: one
       ▲ └─────slow────▶ suspected: asked only where nobody else has the block ──┤ request at a time
       └────────────────────── any request that is answered ◀────────────────────┘

so that what a dead or a stopped peer costs is one request now and then, however many want its blocks.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kvpool.placement.distance import APART, OLD_S, Distance, Network, distance_between
from kvpool.placement.peer_estimates import SMALL_BYTES, Link, PeerHealth
from kvpool.placement.records import LinkRecord
from kvpool.telemetry.cluster_stats import PeerStats

SUSPECT_S = 3.0
PROBE_S = 5.0
"""A request on probation that has not ended by then is given up for lost: another may be made."""
TRIAL_S = OLD_S
"""A source that nothing was loaded from for so long is tried once in a while: see `Peers.begin_trial`."""
STILL_APART = math.sqrt(APART)
"""Who is told apart (`APART`) stays so until it differs by less than that: otherwise it would come and go."""
APART_MAX = 16
"""Of so many peers, the most different ones."""
AGE_S = 32.0
"""The least age that is told: a power of two, so that records change seldom."""
HEDGE_TIMES = 4.0
HEDGE_S_MIN, HEDGE_S_MAX = 0.05, 0.3


class Peers:
    """All peers that this node has pulled from lately, by incarnation.

    labels: of this node. rng: spreads ties, so that a cluster's readers do not all choose the same peer.
    capacity: how many peers are remembered, and how many nodes between two lives. apart: sources that are no nodes: from them nothing is learnt
    about nodes, nor the reverse.

    Every request that `started` ends in exactly one of `finished`, `failed` and `stopped`; an end
    without a start, as after `gone`, is harmless.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        rng: random.Random,
        *,
        capacity: int = 4096,
        apart: Iterable[bytes] = (),
    ) -> None:
        self._labels = dict(labels)
        self._capacity = capacity
        self._peers: OrderedDict[bytes, PeerHealth] = OrderedDict()
        self._past: OrderedDict[tuple[str, str], PeerHealth] = OrderedDict()
        self._network = Network()
        self._apart = {incarnation: Network() for incarnation in apart}
        self.rng = rng

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, incarnation: bytes) -> PeerHealth | None:
        """To look at, not to change. None: nothing is known."""
        return self._peers.get(incarnation)

    def stranger(self, incarnation: bytes) -> PeerHealth:
        """What is assumed of a source that nothing, or nothing lately, is known of."""
        return PeerHealth(self._apart.get(incarnation, self._network))

    def met(
        self,
        incarnation: bytes,
        labels: Mapping[str, str],
        *,
        place: tuple[str, str] = ("", ""),
        same_host: bool = False,
    ) -> None:
        """A peer's labels are these. Tell again when they change; without them nobody knows how far it is.

        place: the node's name and URL. What was learnt of an incarnation that was there and is `gone` is
            half believed of this one, if it is as far away.
        """
        peer = self._known(incarnation)
        peer.distance = distance_between(self._labels, labels, same_host=same_host)
        if place != peer.place:
            peer.place = place
            past = self._past.pop(place, None)
            if past is not None and past.distance is peer.distance and not peer.measured:
                peer.inherit(past)

    def gone(self, incarnation: bytes) -> None:
        """This incarnation is dead. Idempotent."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None and peer.measured and peer.place[0]:
            self._past[peer.place] = peer
            self._past.move_to_end(peer.place)
            if len(self._past) > self._capacity:
                self._past.popitem(last=False)

    def queued(self, incarnation: bytes, nbytes: int) -> None:
        """A request for so much waits here for its turn. Says nothing about the peer; ends in `unqueued`."""
        peer = self._known(incarnation)
        peer.waiting += 1
        peer.waiting_bytes += nbytes

    def unqueued(self, incarnation: bytes, nbytes: int) -> None:
        """It has its turn, or is not wanted any more."""
        peer = self._known(incarnation)
        peer.waiting = max(0, peer.waiting - 1)
        peer.waiting_bytes = max(0, peer.waiting_bytes - nbytes) if peer.waiting else 0

    def started(self, incarnation: bytes, nbytes: int, now: float) -> None:
        """A request for so much is on its way to it."""
        peer = self._known(incarnation)
        peer.asked += 1
        peer.running += 1
        peer.inflight_bytes += nbytes
        if peer.on_probation:
            peer.probe_until = now + PROBE_S

    def finished(
        self,
        incarnation: bytes,
        nbytes: int,
        seconds: float,
        now: float,
        *,
        asked: int | None = None,
    ) -> None:
        """It answered: so much arrived in so long. asked: as `started`, when that was something else.

        That it lacked all or some of what was asked is an answer as good as any.
        """
        peer = self._known(incarnation)
        self._ended(peer, nbytes if asked is None else asked)
        peer.bytes_done += nbytes
        peer.backoff.succeeded()
        peer.suspected_until = peer.probe_until = 0.0
        peer.measure(nbytes, seconds, now)

    def failed(
        self,
        incarnation: bytes,
        now: float,
        *,
        error: object,
        asked: int | None = None,
        at_most: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """A request for `asked` bytes broke or ran into its deadline. None: one of average size.

        at_most: what had arrived in these seconds, and what may have been half there. It can only make the
            peer slower: one whose transfers all end by their deadline would never be known to be slow.
        What fails while the peer is suspended already was under way before, and tells nothing new.
        """
        peer = self._known(incarnation)
        latency_s, per_byte = peer.expected(now)
        if at_most > SMALL_BYTES and seconds > latency_s + at_most * per_byte:
            peer.measure(at_most, seconds, now, alone=True)
        if asked is None:
            asked = peer.inflight_bytes // max(1, peer.running)
        self._ended(peer, asked)
        peer.failed += 1
        peer.last_error = str(error)
        if peer.backoff.due(now):
            peer.backoff.failed(now)
            peer.probe_until = 0.0

    def stopped(self, incarnation: bytes, asked: int) -> None:
        """A request was given up by ourselves: somebody else was faster, or nobody wants it any more.

        Says nothing about the peer: when it was too slow, that is for `slow` to say.
        """
        peer = self._known(incarnation)
        self._ended(peer, asked)
        if not peer.running:
            peer.probe_until = 0.0  # nothing is under way any more that could show what it is worth

    def slow(self, incarnation: bytes, now: float) -> None:
        """A request has not been answered by `hedge_after_s`: somebody else is asked too."""
        peer = self._known(incarnation)
        peer.slow += 1
        if now >= peer.suspected_until:
            peer.suspected_until = now + SUSPECT_S
            peer.probe_until = 0.0

    def declined(self, incarnation: bytes, parts: int) -> None:
        """So many parts of blocks were not loaded from it, since they are computed sooner."""
        self._known(incarnation).declined += parts

    def begin_trial(self, incarnation: bytes, now: float) -> bool:
        """Whether a little is to be loaded from it although that is not worth it; if so, it counts as done.

        Else a source that was slow once, or is only thought to be, would never be found to be fast. That is
        so when its bandwidth was not measured for `TRIAL_S`, and no other trial begun.
        """
        peer = self._known(incarnation)
        if (
            now - max(peer.tried_at, peer.loaded_at) < TRIAL_S
            or peer.running
            or peer.suspended(now)
        ):
            return False
        peer.tried_at = now
        return True

    def to_probe(
        self, incarnations: Iterable[bytes], now: float, after_s: float, count: int
    ) -> list[bytes]:
        """Up to so many of these whose latency nobody has measured for `after_s`, the longest ago first.

        Those that are asked something just now tell by themselves, and those in back-off are left alone.
        They count as probed: see `probed` and `probe_failed`.
        """
        due: list[tuple[float, float, bytes, PeerHealth]] = []
        for incarnation in incarnations:
            peer = self._known(incarnation)
            last = max(peer.heard_at, peer.probed_at)
            if now - last >= after_s and not (peer.running or peer.suspended(now)):
                due.append((last, self.rng.random(), incarnation, peer))
        chosen = heapq.nsmallest(count, due, key=lambda one: one[:2])
        for *_, peer in chosen:
            peer.probed_at = now
        return [incarnation for _, _, incarnation, _ in chosen]

    def probed(self, incarnation: bytes, seconds: float, now: float) -> None:
        """A probe was answered after so long. Says nothing of whether its blocks can be had."""
        peer = self._known(incarnation)
        peer.probes += 1
        peer.hear(seconds, now)

    def probe_failed(self, incarnation: bytes, error: object = "") -> None:
        """A probe was not answered. Counted and noted, and no more: whom real requests reach is trusted."""
        peer = self._known(incarnation)
        peer.probe_failures += 1
        peer.last_error = str(error) or peer.last_error

    def link(self, incarnation: bytes, node: str, now: float, path: str = "") -> Link:
        """What is expected of pulling from a peer."""
        peer = self._peers.get(incarnation) or self.stranger(incarnation)
        latency_s, per_byte = peer.expected(now)
        return Link(
            node,
            incarnation.hex(),
            peer.distance,
            latency_s,
            1 / per_byte,
            now - peer.heard_at if peer.latency_s else None,
            now - peer.loaded_at if peer.measured_bytes else None,
            peer.ahead_bytes,
            path,
        )

    def links(self, now: float, before: Iterable[LinkRecord] = ()) -> tuple[LinkRecord, ...]:
        """What was measured, for others: by distance, and of the few peers that differ from others at theirs.

        A cluster whose links are alike says little, however many nodes it has. before: the last result. A peer in it
        makes room only for one that differs by `APART` more.
        """
        was_apart = {link.node for link in before if link.node}
        apart: list[tuple[float, LinkRecord]] = []
        for peer in self._peers.values():
            node = peer.place[0]
            if not node or not peer.measured_bytes or peer.network is not self._network:
                continue
            latency_s, per_byte = peer.expected(now)
            times = per_byte / self._network.assumed(peer.distance)[1]
            stays = node in was_apart
            least = STILL_APART if stays else APART
            if not 1 / least < times < least:
                told = _link(
                    *(peer.distance, latency_s, per_byte, now - peer.loaded_at),
                    *(peer.measured_bytes, node),
                )
                more = math.log(APART) if stays else 0.0
                apart.append((abs(math.log(times)) + more, told))
        nearest = [
            _link(distance, *self._network.assumed(distance), now - at, measured_bytes)
            for distance, measured_bytes, at in self._network.measured()
        ]
        most = heapq.nlargest(APART_MAX, apart, key=lambda one: one[0])
        return (*nearest, *sorted((told for _, told in most), key=lambda told: told.node))

    def distance(self, incarnation: bytes) -> Distance:
        """How far it is, by the labels of both."""
        peer = self._peers.get(incarnation)
        return Distance.UNKNOWN if peer is None else peer.distance

    def hedge_after_s(self, incarnation: bytes, nbytes: int) -> float:
        """How long to wait for this much from it before somebody else is asked as well.

        Four times the expected time, at least 50 ms, at most 300 ms more than the transfer is expected to
        take behind what is in flight already: a peer that is busy is not mistaken for a stopped one. Ask
        before `started`.
        """
        peer = self._peers.get(incarnation) or self.stranger(incarnation)
        latency_s, per_byte = peer.expected(-math.inf)  # as measured, however long ago
        transfer_s = (peer.inflight_bytes + nbytes) * per_byte
        times = HEDGE_TIMES * (latency_s + transfer_s)
        return max(HEDGE_S_MIN, min(times, HEDGE_S_MAX + transfer_s))

    def stats(self, now: float) -> list[PeerStats]:
        """One of each peer, without its node."""
        out = []
        for incarnation, peer in self._peers.items():
            latency_s, per_byte = peer.expected(now)
            out.append(
                PeerStats(
                    incarnation=incarnation.hex(),
                    distance=peer.distance.value,
                    latency_ms=latency_s * 1e3,
                    bytes_s=1 / per_byte,
                    measured=peer.measured,
                    probes=peer.probes,
                    probe_failures=peer.probe_failures,
                    inflight_bytes=peer.inflight_bytes,
                    running=peer.running,
                    waiting=peer.waiting,
                    asked=peer.asked,
                    failed=peer.failed,
                    slow=peer.slow,
                    bytes=peer.bytes_done,
                    declined=peer.declined,
                    suspended_s=max(0.0, peer.backoff.retry_at - now),
                    suspected=bool(peer.suspected_until),
                    last_error=peer.last_error,
                )
            )
        return out

    def _known(self, incarnation: bytes) -> PeerHealth:
        peer = self._peers.get(incarnation)
        if peer is None:
            peer = self._peers[incarnation] = self.stranger(incarnation)
            if len(self._peers) > self._capacity:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(incarnation)
        return peer

    @staticmethod
    def _ended(peer: PeerHealth, asked: int) -> None:
        peer.running = max(0, peer.running - 1)
        # Whatever callers disagree about, nothing is in flight when nothing runs.
        peer.inflight_bytes = max(0, peer.inflight_bytes - asked) if peer.running else 0


def _link(
    distance: Distance,
    latency_s: float,
    per_byte: float,
    age_s: float,
    measured_bytes: float,
    node: str = "",
) -> LinkRecord:
    """Rounded, so that records are short. What is worth telling anew is for who writes them."""
    return LinkRecord(
        distance.value,
        float(f"{latency_s:.2g}"),
        float(f"{1 / per_byte:.2g}"),
        2.0 ** math.ceil(math.log2(max(age_s, AGE_S))),
        1 << int(measured_bytes).bit_length() >> 1,
        node,
    )
