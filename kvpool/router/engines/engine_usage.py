"""What engines report of their memory: so requests that did not come through this router count, too.

A server's `/metrics` says for each rank which share of its memory running requests use. What exceeds the router's own
reservations there is others'. Own requests may be counted by one and not yet, or no longer, by the other; so the most
that was reserved while the report was made is taken off, and only what two reports in a row show counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import EngineFailed, Upstream

if TYPE_CHECKING:
    from kvpool.scheduler.values import Engine

log = logging.getLogger("kvpool.router")

PATH = "/metrics"
BYTES_MAX = 4 << 20
EVERY_S = 2.0
"""Making the report costs the server some milliseconds."""
SILENT_S = 60.0
"""The pause for a server that has no such report."""
RANKS_MAX = 4096
_USAGE = re.compile(rb"\nvllm:kv_cache_usage_perc\{([^\n}]*)\} (\S{1,32})")
_RANK = re.compile(rb'(?:^|,)engine="(\d{1,4})"')


def usages(report: bytes) -> tuple[float, ...]:
    """The share of its memory that each rank of the server uses for running requests, in the order of their numbers.

    These are numbers in the whole, where a server counts its own ranks from 0. Empty: it does not say.
    """
    found: dict[int, float] = {}
    for labels, value in islice(_USAGE.findall(b"\n" + report), RANKS_MAX):
        rank = _RANK.search(labels)
        try:
            share = float(value)
        except ValueError:
            return ()
        if rank is None or not 0 <= share <= 1:
            return ()
        found[int(rank[1])] = share
    return tuple(found[rank] for rank in sorted(found))


class OthersTokens:
    """The rule, for one engine. No I/O."""

    def __init__(self) -> None:
        self._last = 0

    def told(self, used_tokens: float, own_tokens: int) -> int:
        """What others use, by this report and the one before. own_tokens: the most that was reserved meanwhile."""
        now = max(0, int(used_tokens) - own_tokens)
        known, self._last = min(self._last, now), now
        return known

    def silent(self) -> int:
        """There was no report: nothing is known."""
        self._last = 0
        return 0


@dataclass(eq=False, repr=False, slots=True)
class EngineUsage:
    """Looks at servers' reports, one look at a time for each server. Event loop only.

    engine: the scheduler's, by name; None: it gets no requests. others: told what others use of an engine's memory.
    """

    _upstream: Upstream
    _engine: Callable[[str], Engine | None]
    _others: Callable[[str, int], None]
    _within_s: float
    _clock: Callable[[], float]
    _due: dict[str, float] = field(default_factory=dict, init=False)
    """By name of a server's first engine."""
    _rules: dict[str, OthersTokens] = field(default_factory=dict, init=False)
    """By name."""

    async def look(self, ranks: Sequence[EngineSpec]) -> None:
        """At the server of these engines, if it is time."""
        first = ranks[0].name
        if self._clock() < self._due.get(first, 0.0):
            return
        before = self._own(ranks)
        try:
            report = await self._upstream.get(ranks[0], PATH, self._within_s, BYTES_MAX)
            found = usages(report)
        except EngineFailed as error:
            log.debug("the memory of engine %s is not known: %s", ranks[0].name, error)
            found = ()
        self._due[first] = self._clock() + (EVERY_S if found else SILENT_S)
        after = self._own(ranks)
        for spec in ranks:
            if spec.name not in after:
                continue
            own = max(before.get(spec.name, 0), after[spec.name])
            rule = self._rules.setdefault(spec.name, OthersTokens())
            number = spec.rank or 0
            if number < len(found):
                self._others(spec.name, rule.told(found[number] * spec.capacity_tokens, own))
            else:
                self._others(spec.name, rule.silent())

    def forget(self, name: str) -> None:
        """It has left."""
        self._rules.pop(name, None)
        self._due.pop(name, None)

    def _own(self, ranks: Sequence[EngineSpec]) -> Mapping[str, int]:
        """Reserved there, and sent there to be computed. What is reserved and not yet sent makes it too much."""
        engines = [(spec.name, self._engine(spec.name)) for spec in ranks]
        return {name: e.context_tokens + e.queued_tokens for name, e in engines if e is not None}
