"""What a pull between two nodes costs, by what their daemons have measured. No I/O, no clock.

Each node tells what it has measured of its pulls: by distance, and of the few nodes that are faster or slower than
others at theirs (`placement.peers.Peers.links`, which lets old measurements fade). So a pull by node t from node s
takes what

1. t has measured of s, if that differs from the rest;
2. t has measured of nodes at the distance of s, if that differs from
3. what all nodes have measured at that distance: the median;
4. the assumption for that distance says, as much faster or slower as measurements at other distances are;
5. or, while no daemon has measured anything, the router's own estimate for all pulls, weighted by those assumptions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from kvpool.decoding import FINITE_MAX
from kvpool.placement.distance import APART, PRIORS, Distance, distance_between
from kvpool.placement.records import LinkRecord
from kvpool.scheduler.estimates import LoadEstimate

KNOWN_MAX = 1 << 16
"""Pairs of nodes whose link is cached; then the cache is cleared."""
ASSUMED_MAX = 64
BYTES_S_MIN, BYTES_S_MAX = 1e3, 1e13
LATENCY_S_MAX = 600.0
"""What is told beyond these is no measurement: costs stay finite."""
_WHERE = {
    Distance.HOST: "on one machine",
    Distance.RACK: "in one rack",
    Distance.ZONE: "in one zone",
    Distance.UNKNOWN: "without common labels",
    Distance.FAR: "in different zones",
}


class Link(NamedTuple):
    """A pull takes `latency_s` and `byte_s` for each byte.

    known: whose measurement this is, in words. age_s: how old it is, at most; None: it is none of a daemon.
    """

    latency_s: float
    byte_s: float
    known: str
    age_s: float | None = None

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes * self.byte_s if nbytes > 0 else 0.0


class _Node:
    """What one node has measured. near: by distance; apart: by name of the other node."""

    def __init__(self, name: str, host: str, records: Iterable[LinkRecord]) -> None:
        self.host = host
        self.near: dict[Distance, Link] = {}
        self.apart: dict[str, Link] = {}
        for record in records:
            if not _can_be(record):
                continue  # of a newer version, or nonsense
            distance = Distance(record.distance)
            known = f"measured by {name}"
            if not record.node:
                known += f" of nodes {_WHERE[distance]}"
            link = Link(record.latency_s, 1 / record.bytes_s, known, record.age_s)
            if record.node:
                self.apart[record.node] = link
            else:
                self.near[distance] = link


def _can_be(record: LinkRecord) -> bool:
    return (
        record.distance in _WHERE
        and BYTES_S_MIN <= record.bytes_s <= BYTES_S_MAX
        and 0 <= record.latency_s <= LATENCY_S_MAX
        and 0 <= record.age_s <= FINITE_MAX
    )


class Links:
    """See the module. Not thread-safe.

    differ: whether there may be two pairs with different links.
    """

    def __init__(self) -> None:
        self.differ = False
        self._labels: Mapping[str, Mapping[str, str]] = {}
        self._told: Mapping[str, tuple[str, Sequence[LinkRecord]]] = {}
        self._nodes: dict[str, _Node] = {}
        self._common: dict[Distance, Link] = {}
        self._times = 0.0  # how many times as long as assumed pulls take; 0: nothing was measured
        self._possible: Sequence[Distance] = (Distance.UNKNOWN,)
        self._known: dict[tuple[str, str], Link] = {}
        self._assumed: dict[tuple[Distance, float, float], Link] = {}

    def lie(self, labels: Mapping[str, Mapping[str, str]]) -> None:
        """These are the labels of all nodes with engines."""
        self._labels = labels
        self._look()

    def told(self, nodes: Mapping[str, tuple[str, Sequence[LinkRecord]]]) -> None:
        """What all nodes have measured now, with their hosts: instead of what was told before."""
        if nodes == self._told:
            return
        self._told = nodes
        self._nodes = {name: _Node(name, *each) for name, each in nodes.items()}
        seen: defaultdict[Distance, list[Link]] = defaultdict(list)
        for node in self._nodes.values():
            for distance, link in node.near.items():
                seen[distance].append(link)
        self._common = {
            distance: Link(
                median(link.latency_s for link in links),
                median(link.byte_s for link in links),
                f"measured by all of nodes {_WHERE[distance]}",
                max(link.age_s or 0.0 for link in links),
            )
            for distance, links in seen.items()
        }
        for node in self._nodes.values():
            node.near = {
                distance: link
                for distance, link in node.near.items()
                if not 1 / APART < link.byte_s / self._common[distance].byte_s < APART
            }
        times = [link.byte_s * PRIORS[distance].bytes_s for distance, link in self._common.items()]
        self._times = median(times) if times else 0.0
        self._look()

    def between(self, source: str, target: str, usual: LoadEstimate) -> Link:
        """Of pulls from one node to another one. usual: the router's own estimate for all pulls."""
        found = self._known.get((source, target))
        if found is not None:
            return found
        node = self._nodes.get(target)
        found = None if node is None else node.apart.get(source)
        if found is None:
            distance = self._distance(source, target)
            if not self._times:
                return self._assume(distance, usual)
            found = self._at(distance, node)
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[source, target] = found
        return found

    def fastest(self, target: str, usual: LoadEstimate) -> Link:
        """No pull to this node takes less; where links do not differ, this is every one."""
        if not self.differ:
            return self.between("", target, usual)
        found = self._known.get(("", target))
        if found is not None:
            return found
        node = self._nodes.get(target)
        if self._times:
            links = [self._at(distance, node) for distance in self._possible]
        else:
            links = [self._assume(distance, usual) for distance in self._possible]
        links += () if node is None else node.apart.values()
        found = Link(min(each.latency_s for each in links), min(each.byte_s for each in links), "")
        if self._times:
            self._known["", target] = found
        return found

    @property
    def bytes_s(self) -> float | None:
        """Of usual pulls; None: no daemon has measured any."""
        return 1 / median(link.byte_s for link in self._common.values()) if self._common else None

    def _at(self, distance: Distance, node: _Node | None) -> Link:
        """To a node from others at a distance, as measured."""
        link = None if node is None else node.near.get(distance)
        if (link := link or self._common.get(distance)) is not None:
            return link
        prior = PRIORS[distance]
        return Link(prior.latency_s, self._times / prior.bytes_s, "as measured at other distances")

    def _assume(self, distance: Distance, usual: LoadEstimate) -> Link:
        key = distance, usual.latency_s, usual.per_byte_s
        found = self._assumed.get(key)
        if found is None:
            times = PRIORS[Distance.UNKNOWN].bytes_s / PRIORS[distance].bytes_s
            known = "learned by this router, of all pulls" if usual.learned else "assumed"
            if len(self._assumed) >= ASSUMED_MAX:
                self._assumed.clear()  # most are of estimates that are no more
            self._assumed[key] = found = Link(usual.latency_s, usual.per_byte_s * times, known)
        return found

    def _distance(self, source: str, target: str) -> Distance:
        if len(self._possible) == 1:
            return self._possible[0]
        host, labels = self._host(source), self._labels
        return distance_between(
            labels.get(target, {}),
            labels.get(source, {}),
            same_host=host != "" and host == self._host(target),
        )

    def _host(self, node: str) -> str:
        known = self._nodes.get(node)
        return "" if known is None else known.host

    def _look(self) -> None:
        """Something may be different now."""
        self._known.clear()
        hosts = [node.host for node in self._nodes.values() if node.host]
        places = Counter((each.get("zone"), each.get("rack")) for each in self._labels.values())
        possible = [Distance.UNKNOWN]
        if len(set(hosts)) < len(hosts):
            possible.append(Distance.HOST)
        if any(rack and count > 1 for (_, rack), count in places.items()):
            possible.append(Distance.RACK)
        if any(zone for zone, _ in places):
            possible += (Distance.ZONE, Distance.FAR)
        self._possible = possible
        apart = any(node.near or node.apart for node in self._nodes.values())
        self.differ = apart or len(possible) > 1
