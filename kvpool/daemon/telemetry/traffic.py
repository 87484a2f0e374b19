"""What was asked of a node and what came of it, counted once a request or transfer, never once a block.

Plain counts since the daemon started, for `kvpool.admin.metrics`. A tenant's own lie with the tenant; what names no
tenant is in `Delivered`. Event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvpool.telemetry.histogram import RATIOS, Histogram

PEERS_MAX = 256  # that are counted by name; those that were asked longest ago are counted together
OTHERS = "others"


@dataclass(slots=True)
class Asked:
    """Blocks that clients asked for in so many requests, and got.

    fetched: of those that they got, after a wait for other tiers and nodes. nbytes: of what was leased to them,
    in memory. Whoever counts a request that waited for nothing, which is the hot path, adds to the fields itself.
    """

    requests: int = 0
    asked: int = 0
    got: int = 0
    fetched: int = 0
    nbytes: int = 0

    def waited(self, asked: int, got: int, here: int) -> None:
        """A request of which it got, or could have got, so much without its wait."""
        self.requests += 1
        self.asked += asked
        self.got += got
        self.fetched += max(0, got - here)

    def stats(self) -> dict[str, int]:
        """Blocks by what became of them. here: could be used at once. missed: could not be used."""
        return {
            "requests": self.requests,
            "local": self.got - self.fetched,
            "fetched": self.fetched,
            "missed": self.asked - self.got,
        }


@dataclass(slots=True)
class Loads:
    """Parts of blocks that somebody was said to have and was asked for, by what became of them.

    nbytes: of those that came. absent: it had them no more. mismatched: their checksum was another one. cancelled:
    a rival was faster, or nobody wanted them any more.
    """

    loaded: int = 0
    absent: int = 0
    mismatched: int = 0
    failed: int = 0
    cancelled: int = 0
    nbytes: int = 0

    def add(self, other: Loads) -> None:
        self.loaded += other.loaded
        self.absent += other.absent
        self.mismatched += other.mismatched
        self.failed += other.failed
        self.cancelled += other.cancelled
        self.nbytes += other.nbytes


@dataclass(slots=True)
class Traffic:
    """What clients of one tenant have put, asked for and got.

    put_parts, put_bytes: new ones. matches, reads, pulls: the requests of these names. device_read_bytes: leased to
    clients in spare device memory. loads: into memory, by the tier they came from.
    """

    put_parts: int = 0
    put_bytes: int = 0
    matches: Asked = field(default_factory=Asked)
    reads: Asked = field(default_factory=Asked)
    pulls: Asked = field(default_factory=Asked)
    device_read_bytes: int = 0
    loads: dict[str, Loads] = field(default_factory=dict)

    def loaded(self, tier: str, loads: Loads) -> None:
        self.loads.setdefault(tier, Loads()).add(loads)

    def stats(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "put_parts": self.put_parts,
            "put_bytes": self.put_bytes,
            "matches": self.matches.stats(),
            "reads": self.reads.stats(),
            "pulls": self.pulls.stats(),
            "read_bytes": self.reads.nbytes,
            "device_read_bytes": self.device_read_bytes,
            "loads": msgspec.to_builtins(self.loads),
        }


class Delivered:
    """What other tiers and nodes have delivered: how much, how fast, and how well that was foreseen."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Loads] = OrderedDict()
        self._seconds: dict[str, Histogram] = {}
        self._ratios: dict[str, Histogram] = {}
        self._expected_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self.waits = Histogram()

    def delivered(self, node: str, loads: Loads) -> None:
        """A transfer from another node has ended."""
        known = self._peers.get(node)
        if known is None:
            known = self._peers[node] = Loads()
            while len(self._peers) > PEERS_MAX:
                oldest = next(name for name in self._peers if name != OTHERS)
                gone = self._peers.pop(oldest)
                self._peers.setdefault(OTHERS, Loads()).add(gone)
        self._peers.move_to_end(node)
        known.add(loads)

    def took(self, tier: str, seconds: float) -> None:
        """A transfer that fetched something took so long."""
        self._seconds.setdefault(tier, Histogram()).add(seconds)

    def foreseen(self, tier: str, expected_s: float, seen_s: float) -> None:
        """A transfer that fetched all it was to bring was expected to take so long, and took so long."""
        if expected_s > 0 and seen_s > 0:
            self._ratios.setdefault(tier, Histogram(RATIOS)).add(seen_s / expected_s)
            self._expected_s[tier] = self._expected_s.get(tier, 0.0) + expected_s
            self._seen_s[tier] = self._seen_s.get(tier, 0.0) + seen_s

    def stats(self) -> dict[str, Any]:
        """Plain values. waits: seconds that reads waited for other tiers and nodes."""
        return {
            "peers": {name: msgspec.to_builtins(loads) for name, loads in self._peers.items()},
            "seconds": {tier: seen.stats() for tier, seen in self._seconds.items()},
            "ratios": {tier: seen.stats() for tier, seen in self._ratios.items()},
            "expected_s": dict(self._expected_s),
            "seen_s": dict(self._seen_s),
            "waits": self.waits.stats(),
        }
