"""By which pairs of network cards one node pulls from another. No I/O.

A node says of each address that it listens on at which NUMA node its card is, and on which rail or in which
network (`TransportRecord`). Cards of one rail reach each other without crossing to another switch, so a pair
on the same rail comes first, or in the same network where there are no rails; among such pairs the one
whose cards are near the memory at both ends. A pair that seems unfit stays a last resort: networks are
routed more often than labels say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from kvpool.net import is_loopback
from kvpool.placement.records import NIXL, NodeRecord, TransportRecord

WAYS_MAX = 16
TOGETHER, NOT_KNOWN, APART = 0, 1, 2


class Way(NamedTuple):
    """One way to a node.

    url: where it is reached; tcp://HOST:PORT?source=ADDRESS where a connection is to come from that address.
    rank: ways of a smaller one are better as far as records say, those of the same one as good as each other.
    """

    url: str
    rank: int


class Route(NamedTuple):
    """All ways to one life of a node, the best ones first. incarnation: empty where that is not known."""

    incarnation: str
    ways: tuple[Way, ...]


class Card(NamedTuple):
    """A network card of this node. address: what connections from it are bound to; the rest as in a record."""

    address: str
    numa: int = -1
    rail: str = ""
    net: str = ""


def route(
    cards: Sequence[Card],
    numa: int,
    node: NodeRecord,
    *,
    host: str = "",
    bind_source: bool = False,
) -> Route:
    """How to pull from a node. Its URLs for NIXL come first, since UCX chooses cards by itself.

    cards, numa: of this node, and where its memory is. host: this machine; what another one calls loopback is
        not the node there. bind_source: connections are bound to our card's address; else this machine's
        routes choose that, and of each pair only the other end counts.
    """
    ranked: list[_Pair] = []
    listed = _reachable(node, host)
    nixl = [Way(other.url, 0) for other in listed if other.url.startswith(NIXL)][: WAYS_MAX - 1]
    others = [other for other in listed if not other.url.startswith(NIXL)]
    for number, other in enumerate(others[:WAYS_MAX]):
        pairs = [(_rank(card, numa, other, node.numa), card.address) for card in cards]
        if bind_source:
            for rank, address in pairs:
                if address:
                    way = Way(f"{other.url}?source={address}", rank)
                    ranked.append(_Pair(way, number, address))
        if not (bind_source and any(address for _, address in pairs)):
            rank = min(pairs)[0] if pairs else _rank(Card(""), -1, other, node.numa)
            ranked.append(_Pair(Way(other.url, rank), number, ""))
    best: dict[str, _Pair] = {}
    for pair in sorted(ranked, key=lambda pair: (pair.way.rank, pair.number)):
        best.setdefault(pair.way.url, pair)  # several of our cards may have one address
    ways = _spread(list(best.values()), WAYS_MAX - len(nixl))
    return Route(node.incarnation, (*nixl, *ways))


class _Pair(NamedTuple):
    """number: of the other node's card, as it lists them. source: the address of ours."""

    way: Way
    number: int
    source: str


def _spread(pairs: list[_Pair], count: int) -> list[Way]:
    """The first ones. Of those as good as each other, each card at either end comes once before any twice."""
    left = list(pairs)
    ways: list[Way] = []
    theirs: Counter[int] = Counter()
    ours: Counter[str] = Counter()
    rank = -1
    while left and len(ways) < count:
        if left[0].way.rank != rank:
            rank = left[0].way.rank
            theirs.clear()
            ours.clear()
        equals = [pair for pair in left if pair.way.rank == rank]
        chosen = min(equals, key=lambda pair: (theirs[pair.number], ours[pair.source]))
        left.remove(chosen)
        theirs[chosen.number] += 1
        ours[chosen.source] += 1
        ways.append(chosen.way)
    return ways


def _reachable(node: NodeRecord, host: str) -> list[TransportRecord]:
    """Those that are not loopback on another machine; all, should none be left to ask at."""
    if not host or not node.host or host == node.host:
        return list(node.transports)
    found = [one for one in node.transports if not _is_loopback(one.url)]
    return found if any(not one.url.startswith(NIXL) for one in found) else list(node.transports)


def _is_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:  # no URL
        return False


def _rank(card: Card, numa: int, other: TransportRecord, other_numa: int) -> int:
    """Of a pair of cards, given where the memory is at both ends."""
    return 3 * _fit(card, other) + _is_far(card.numa, numa) + _is_far(other.numa, other_numa)


def _fit(card: Card, other: TransportRecord) -> int:
    """Whether two cards are on the same rail; where one of them is on none, in the same network."""
    if card.rail and other.rail:
        return TOGETHER if card.rail == other.rail else APART
    if card.net and other.net:
        return TOGETHER if card.net == other.net else APART
    return NOT_KNOWN


def _is_far(card_numa: int, memory_numa: int) -> int:
    """Whether the memory is certainly elsewhere. What is not known is taken for near."""
    return int(card_numa >= 0 and memory_numa >= 0 and card_numa != memory_numa)
