"""The pool's contents, as far as requested: written to the prefix index as reported.

Each node has two holders: its memory, and its memory with its disks. A lookup of a prompt returns how
much of it each node has, and that updates all its keys, until the next lookup: present ones are added, and
absent ones removed. Keys that were not looked up for a long time are forgotten.

No I/O, no clock of its own. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvpool.router.upstream.specs import EngineSpec, pool_holders
from kvpool.scheduler.index import PrefixIndex

KEYS_MAX = 1 << 20
"""Keys of one namespace; some 300 bytes each, and as much again for each node that has it."""

RECENT = 4
"""A key that is reported again keeps its place in the order, unless one in this many of all keys was reported
since. That is cheap.
"""

Holders = tuple[str, ...]
_Entry = tuple[Holders, int]
"""The holders of a key, and the time of its place in the order. Keys of one answer share it."""


@dataclass(eq=False, repr=False, slots=True)
class PoolView:
    """For one namespace. See the module.

    namespace: its digest. nodes, namespaces: of each holder, kept up to date for the scheduler.
    """

    _index: PrefixIndex
    _namespace: bytes
    _nodes: dict[str, str]
    _namespaces: dict[str, str]
    _keys_max: int = KEYS_MAX
    _keys: dict[int, _Entry] = field(default_factory=dict, init=False)
    """Roughly in the order of their lookups."""
    _turn: int = field(default=0, init=False)
    """How many keys were put at the end."""
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    """Keys of each holder that the index has."""
    _kept: set[str] = field(default_factory=set, init=False)
    """Nodes."""

    def __len__(self) -> int:
        return len(self._keys)

    def keep(self, nodes: set[str]) -> None:
        """Engines use these nodes: the index has their holders, even empty ones."""
        self._kept = nodes
        for node in nodes:
            for holder in self._holders(node):
                self._begin(holder, node)
        self._tidy()

    def close(self) -> None:
        """The namespace is no longer used: remove its holders from the index."""
        for holder in self._counts:
            self._end(holder)
        self._counts.clear()
        self._keys.clear()

    def told(self, keys: Sequence[int], lengths: Mapping[str, tuple[int, ...]]) -> None:
        """Each node has this much of this prefix: a length for each of its holders. O(keys + holders)."""
        reach = sorted(
            (min(length, len(keys)), holder)
            for node, each in lengths.items()
            for holder, length in zip(self._holders(node), each, strict=True)
            if length > 0
        )
        for node in lengths:
            for holder in self._holders(node):
                self._begin(holder, node)
        known, turn = self._keys, self._turn
        recent = turn - self._keys_max // RECENT
        changed: dict[tuple[Holders, Holders], list[int]] = {}
        ends = [0, *sorted({end for end, _ in reach}), len(keys)]
        for start, end in pairwise(ends):
            having = tuple(holder for length, holder in reach if length > start)
            new: _Entry = (having, turn)
            good = new
            for key in keys[start:end]:
                entry = known.get(key)
                had: Holders = ()
                if entry is not None:
                    if entry is good:
                        continue
                    had, at = entry
                    if had == having and at >= recent:
                        good = entry
                        continue
                    del known[key]
                if had != having:
                    changed.setdefault((had, having), []).append(key)
                if having:
                    known[key] = new
                    self._turn += 1
        for (had, having), some in changed.items():
            self._change(some, had, having)
        if len(known) > self._keys_max:
            self._forget(len(known) - self._keys_max)
        self._tidy()

    def _forget(self, count: int) -> None:
        oldest = iter(self._keys)
        groups: dict[Holders, list[int]] = {}
        for key in [next(oldest) for _ in range(count)]:
            groups.setdefault(self._keys.pop(key)[0], []).append(key)
        for had, keys in groups.items():
            self._change(keys, had, ())

    def _change(self, keys: list[int], had: Holders, having: Holders) -> None:
        for holder in _without(having, had):
            self._counts[holder] += len(keys)
            self._index.add(holder, keys)
        for holder in _without(had, having):
            self._counts[holder] -= len(keys)
            self._index.discard(holder, keys)

    def _begin(self, holder: str, node: str) -> None:
        if holder not in self._counts:
            self._counts[holder] = 0
            self._nodes[holder] = node
            self._namespaces[holder] = name = self._namespace.hex()
            self._index.join(holder, pool=True, namespace=name)

    def _holders(self, node: str) -> Holders:
        return pool_holders(node, self._namespace)

    def _end(self, holder: str) -> None:
        del self._nodes[holder], self._namespaces[holder]
        self._index.leave(holder)

    def _tidy(self) -> None:
        """Unknown holders are ignored: nodes come and go."""
        for holder in [holder for holder, count in self._counts.items() if not count]:
            if self._nodes[holder] not in self._kept:
                del self._counts[holder]
                self._end(holder)


@dataclass(eq=False, repr=False, slots=True)
class PoolViews:
    """One `PoolView` for each namespace that engines use. nodes, namespaces: of each holder; kept up to date."""

    _index: PrefixIndex
    _nodes: dict[str, str]
    _namespaces: dict[str, str]
    _views: dict[bytes, PoolView] = field(default_factory=dict, init=False)

    def get(self, namespace: bytes) -> PoolView | None:
        """None: no engine uses it, or no longer."""
        return self._views.get(namespace)

    def told(
        self, namespace: bytes, keys: Sequence[int], lengths: Mapping[str, tuple[int, ...]]
    ) -> None:
        """As `PoolView.told`. Ignored if no engine uses the namespace, or no longer."""
        if (view := self._views.get(namespace)) is not None:
            view.told(keys, lengths)

    def keep(self, specs: Iterable[EngineSpec]) -> None:
        """Set the index's holders to exactly: the nodes of these engines, and others with their namespaces' blocks."""
        wanted: dict[bytes, set[str]] = {}
        for spec in specs:
            nodes = wanted.setdefault(spec.namespace, set())
            if spec.node:
                nodes.add(spec.node)
        for namespace in self._views.keys() - wanted.keys():
            self._views.pop(namespace).close()
        for namespace, nodes in wanted.items():
            if namespace not in self._views:
                self._views[namespace] = PoolView(
                    self._index, namespace, self._nodes, self._namespaces
                )
            self._views[namespace].keep(nodes)

    def stats(self) -> dict[str, int]:
        """Keys in the index, and those of them that the pool reported."""
        return {
            "indexed_keys": len(self._index),
            "pool_keys": sum(len(view) for view in self._views.values()),
        }


def _without(some: Holders, others: Iterable[str]) -> list[str]:
    return [holder for holder in some if holder not in others]
