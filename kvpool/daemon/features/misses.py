"""Which reads ended before the last block that they asked for, and why: counted once a prompt, whoever asks how often.

An engine asks for a prompt's blocks up to three times: for those in memory, then, not to hold up others, for a pull of
the rest, and again for what the pull brought. All three name the same keys, so that they are one read here. It is
counted when no further question can belong to it, with the answer to the last one. No I/O, no clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.daemon.core.blocks import NamespaceState, PartTable
from kvpool.daemon.core.events import Freed, Stage
from kvpool.hit_rule import first_needed
from kvpool.telemetry.memory_stats import Missed
from kvpool.telemetry.misses import Reason
from kvpool.types import PartKind

SETTLE_S = 10.0
PENDING_MAX = 4096
RECENT_MAX = 1024  # of those counted: the last ones, for whoever asks about a request


class Verdict(NamedTuple):
    """Why one block was missed. What is not known is empty, or None.

    tier: that which it left. age_s: how long before; idle_s: for how long it had been unused then. by: the namespace
    whose put took its room, in hex. where: the other namespace, in hex, or the node or disk that is lost. differs:
    facts of the other namespace, each with its value there and here.
    """

    reason: Reason
    tier: str = ""
    age_s: float | None = None
    idle_s: float | None = None
    by: str = ""
    where: str = ""
    differs: Mapping[str, Sequence[object]] | None = None


class Miss(NamedTuple):
    """A read that was counted. at: when it was asked for. found: blocks of `asked`; `key` is the one after them."""

    at: float
    namespace: NamespaceState
    key: bytes
    asked: int
    found: int
    verdict: Verdict


@dataclass(slots=True)
class _Read:
    at: float
    stage: Stage
    miss: Miss | None = None


class Misses:
    """See the module. Not thread-safe. Times are of a monotonic clock."""

    def __init__(self, counted: Callable[[Miss], object] = lambda _: None) -> None:
        """counted: is told of each read that is counted."""
        self._counted = counted
        self._reads: OrderedDict[tuple[int, bytes, int], _Read] = OrderedDict()
        self._counts: dict[int, dict[str, Missed]] = {}
        self.recent: deque[Miss] = deque(maxlen=RECENT_MAX)

    def of(self, namespace: NamespaceState) -> dict[str, Missed]:
        """Reads of a namespace in all its epochs that were counted, by reason."""
        return self._counts.get(namespace.space, {})

    @property
    def waits(self) -> bool:
        """Whether a read may go on that is not counted yet; otherwise a hit need not be told."""
        return bool(self._reads)

    def asked(self, namespace: NamespaceState, keys: Sequence[bytes], stage: Stage) -> int | None:
        """A read of these blocks begins, or goes on; returns how many it had found before, None if it is a new one.

        A read without a wait is `HERE` whenever it comes: whether it is one `AGAIN` is found here.
        """
        name = (namespace.space, keys[-1], len(keys))
        read = self._reads.get(name)
        if read is not None:
            if stage is Stage.HERE and read.stage is Stage.PULLED:
                stage = Stage.AGAIN
            if stage > read.stage:
                read.stage = stage
                return len(keys) if read.miss is None else read.miss.found
            self._end(name)
        return None

    def freed(self, event: Freed) -> None:
        """Forget the counts of a namespace that memory has forgotten."""
        if event.tier.name == "dram":
            self._counts.pop(event.namespace.space, None)

    def missed(self, miss: Miss, keys: Sequence[bytes], stage: Stage) -> None:
        """What came of the read that was told to `asked` last, with these keys."""
        name = (miss.namespace.space, keys[-1], len(keys))
        read = self._reads.get(name)
        if read is None:
            read = self._reads[name] = _Read(miss.at, stage)
            if len(self._reads) > PENDING_MAX:
                self._end(next(iter(self._reads)))
        read.miss = miss

    def found(
        self, namespace: NamespaceState, keys: Sequence[bytes], stage: Stage, now: float
    ) -> None:
        """That read found all of it. After a pull the blocks are asked for again."""
        name = (namespace.space, keys[-1], len(keys))
        read = self._reads.get(name)
        if read is not None:
            read.miss = None
        elif stage is Stage.PULLED:
            self._reads[name] = _Read(now, stage)
            if len(self._reads) > PENDING_MAX:
                self._end(next(iter(self._reads)))

    def settle(self, now: float) -> None:
        """Count the reads that have come to their end by now."""
        while self._reads:
            name, read = next(iter(self._reads.items()))
            if now - read.at < SETTLE_S:
                return
            self._end(name)

    def _end(self, name: tuple[int, bytes, int]) -> None:
        miss = self._reads.pop(name).miss
        if miss is None:
            return
        counts = self._counts.setdefault(miss.namespace.space, {})
        counted = counts.setdefault(str(miss.verdict.reason), Missed())
        counted.requests += 1
        counted.blocks += miss.asked - miss.found
        self.recent.append(miss)
        self._counted(miss)

    def last(self, namespace: NamespaceState, keys: Sequence[bytes]) -> Miss | None:
        """The last read that ended at one of these blocks. O(`RECENT_MAX`)."""
        wanted = set(keys)
        for read in reversed(self._reads.values()):
            miss = read.miss
            if miss and miss.key in wanted and miss.namespace.space == namespace.space:
                return miss
        for miss in reversed(self.recent):
            if miss.key in wanted and miss.namespace.space == namespace.space:
                return miss
        return None


def first_missing(
    tables: Sequence[PartTable], keys: Sequence[bytes], found: int
) -> tuple[PartTable, int]:
    """The part, and the index of the key, for want of which a prefix of `found` blocks was not longer.

    Of parts with windows this may be a block before its end. Some block is missing, or was when they were counted.
    """
    for end in range(found + 1, min(len(keys), found + max(t.spec.stride for t in tables)) + 1):
        for table in tables:
            spec = table.spec
            if end % spec.stride:
                continue
            # Of whole parts all blocks up to `found` are there.
            first = first_needed(spec, end)
            if spec.kind is PartKind.FULL:
                first = found // spec.stride * spec.stride + spec.stride - 1
            for at in range(first, end, spec.stride):
                if keys[at] not in table.blocks:
                    return table, at
    return tables[0], min(found, len(keys) - 1)
