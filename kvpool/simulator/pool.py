"""The blocks of all simulated nodes: where they are, and how they move from there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvpool.scheduler.estimates import KindEstimates
from kvpool.scheduler.index import PrefixIndex
from kvpool.simulator.events import Timeline
from kvpool.simulator.links import Link, Network
from kvpool.simulator.node import Node
from kvpool.simulator.shape import Shape

LATENCY_S = {"dram": 0.0001, "ssd": 0.0005, "peer": 0.001}
SOURCES_MAX = 4
"""From how many nodes one prompt's blocks are pulled, at most."""


@dataclass(slots=True)
class Load:
    """One source's part of what is loaded for a prompt: blocks `first` to `end` of its chain.

    source, target: the other node and this one, for pulls.
    """

    first: int
    end: int
    kind: str
    nbytes: int
    links: tuple[Link, ...]
    source: Node | None = None
    target: Node | None = None


class Pool:
    """The nodes, by name. index: is told of their blocks, with a delay. estimates: of loads, which are measured.

    held: which nodes can be pulled from, as bits, by block.
    """

    def __init__(
        self, shape: Shape, timeline: Timeline, index: PrefixIndex, estimates: KindEstimates
    ) -> None:
        self._shape = shape
        self._timeline = timeline
        self._index = index
        self._estimates = estimates
        self._network = Network(timeline)
        self.held: dict[Hashable, int] = {}
        self._slow = {pair: Link(bytes_s) for pair, bytes_s in shape.slow.items()}
        self._by_bit: dict[int, Node] = {}
        self.nodes: dict[str, Node] = {}

    def add(self, name: str, dram: int, ssd: int) -> Node:
        """A new node, with so many blocks of memory and disks."""
        node = Node(name, len(self.nodes), self._shape, dram, ssd)
        self.nodes[name] = self._by_bit[node.bit] = node
        return node

    def send(self, source: Node, target: Node, nbytes: int, arrived: Callable[[], None]) -> None:
        """Move bytes from one node to another, and note how long that took."""
        began_at = self._timeline.now

        def done() -> None:
            self._pulled(source, target, nbytes, began_at)
            arrived()

        self._network.start(nbytes, self._between(source, target), done)

    def _between(self, source: Node, target: Node) -> list[Link]:
        slow = self._slow.get((source.name, target.name))
        return [source.out, target.into, *([] if slow is None else [slow])]

    def _pulled(self, source: Node, target: Node, nbytes: int, began_at: float) -> None:
        """The target's daemon has seen how long it took."""
        peers, now = target.peers, self._timeline.now
        if peers.get(source.incarnation) is None:
            peers.met(source.incarnation, source.labels, place=(source.name, ""))
        peers.finished(source.incarnation, nbytes, now - began_at, now)

    def sources(self, node: Node, keys: Sequence[Hashable], have: int) -> list[Load]:
        """What could be loaded of the prefix behind `have` blocks, run by run, from whom."""
        loads: list[Load] = []
        end = node.local(keys, have)
        if end > have:
            loads.append(self._local(node, keys, have, end))
        while self._shape.shared and len(loads) <= SOURCES_MAX and end < len(keys):
            first, holders = end, ~node.bit
            while end < len(keys) and (still := holders & self.held.get(keys[end], 0)):
                holders = still
                end += 1
            if end == first:
                break
            source = self._least_busy(holders)
            nbytes = (end - first) * self._shape.block_bytes
            links = [*self._between(source, node), node.host]
            if any(key not in source.dram.held for key in keys[first:end]):
                links.append(source.disk)
            loads.append(Load(first, end, "peer", nbytes, tuple(links), source, node))
        return loads

    def _local(self, node: Node, keys: Sequence[Hashable], first: int, end: int) -> Load:
        """What this node has itself. What is on disk is slower than the rest, and alone counts then."""
        on_disk = sum(key not in node.dram.held for key in keys[first:end])
        if on_disk:
            nbytes = on_disk * self._shape.block_bytes
            return Load(first, end, "ssd", nbytes, (node.disk, node.host))
        return Load(first, end, "dram", (end - first) * self._shape.block_bytes, (node.host,))

    def _least_busy(self, holders: int) -> Node:
        best: Node | None = None
        while holders:
            bit = holders & -holders
            holders ^= bit
            node = self._by_bit[bit]
            if best is None or len(node.out.transfers) < len(best.out.transfers):
                best = node
        assert best is not None
        return best

    def start(self, load: Load, arrived: Callable[[Load], None]) -> None:
        now = self._timeline.now
        ahead = max(link.bytes_ahead(now) for link in load.links)

        def done() -> None:
            self._estimates.loads[load.kind].observe(load.nbytes, ahead, self._timeline.now - now)
            if load.source is not None and load.target is not None:
                self._pulled(load.source, load.target, load.nbytes, now)
            arrived(load)

        begins = now + LATENCY_S[load.kind]
        self._timeline.at(begins, self._network.start, load.nbytes, load.links, done)

    def to_gpu(self, node: Node, keys: Sequence[Hashable], depth: int) -> None:
        new, evicted = node.gpu.put(keys, depth)
        self._tell(f"gpu:{node.name}", new, [key for key, _ in evicted])

    def put(self, node: Node, keys: Sequence[Hashable], depth: int, *, copy: bool) -> None:
        new, evicted = node.dram.put(keys, depth, copy=copy)
        self._tell(f"dram:{node.name}", new, [key for key, _ in evicted])
        held = self.held
        for key in new:
            held[key] = held.get(key, 0) | node.bit
        gone = [key for key, _ in evicted]
        if node.ssd.capacity:
            gone = self._demote(node, evicted)
        for key in gone:
            left = held[key] & ~node.bit
            if left:
                held[key] = left
            else:
                del held[key]

    def _demote(self, node: Node, evicted: list[tuple[Hashable, int]]) -> list[Hashable]:
        """What memory gives up goes to the disks; what is gone from the node then."""
        moved: dict[Hashable, None] = {}  # in order, each once
        for key, depth in reversed(evicted):
            new, out = node.ssd.put([key], depth)
            victims = [victim for victim, _ in out]
            self._tell(f"ssd:{node.name}", new, victims)
            moved.update(dict.fromkeys((key, *victims)))
        return [key for key in moved if key not in node.dram.held and key not in node.ssd.held]

    def _tell(self, holder: str, new: Sequence[Hashable], gone: Sequence[Hashable]) -> None:
        if new or gone:
            at = self._timeline.now + self._shape.lag_s
            self._timeline.at(at, self._hear, holder, new, gone)

    def _hear(self, holder: str, new: Sequence[Hashable], gone: Sequence[Hashable]) -> None:
        self._index.discard(holder, gone)
        self._index.add(holder, new)
