"""Measured loads of engines that can change their role; the rule is in `roles`. No I/O, no clock."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.scheduler.decay import Decaying
from kvpool.scheduler.dispatch import Dispatch
from kvpool.scheduler.roles import Loads, RoleChange, Smoothed, role_change
from kvpool.scheduler.state import State
from kvpool.scheduler.values import Among, Engine, Request, Role


@dataclass(slots=True)
class _Kind:
    """For engines of one kind. asked: seconds of prompts that arrived."""

    asked: Decaying
    decode: Smoothed
    changed_at: float = -math.inf
    began_at: float | None = None


class Balance:
    """Not thread-safe."""

    def __init__(self, state: State, dispatch: Dispatch) -> None:
        self._state = state
        self._dispatch = dispatch
        self._rule = state.settings.roles
        self._kinds: dict[str, _Kind] = {}

    def asked(self, request: Request, size_s: float, now: float) -> None:
        """A request arrived, with this much to compute. It counts equally for all kinds that can serve it."""
        for name, share_s in self._shares(request, size_s):
            self._kind(name).asked.add(share_s, now)

    def _shares(self, request: Request, size_s: float) -> Iterator[tuple[str, float]]:
        """What of this work each kind has that can compute it."""
        names = {engine.kind for engine in self._state.computing(request)}
        for name in names:
            yield name, size_s / len(names)

    def required(self, now: float) -> dict[str, Loads]:
        """By kind: how many engines the present load would keep fully busy, in each role.

        Prompts that wait count as if they were to be computed within the averaging time.
        """
        state, found = self._state, dict[str, Loads]()
        waiting: defaultdict[str, float] = defaultdict(float)
        for item in state.queue:
            for name, share_s in self._shares(item.request, item.size_s):
                waiting[name] += share_s
        for name in {engine.kind for engine in state.fleet.engines.values()}:
            decoding = state.fleet.of(Role.DECODE, Among(frozenset((name,))))
            filled = self._filled(decoding, name) if decoding else 0.0
            late_s = waiting[name] / self._rule.smooth_s
            prefill = self._kind(name).asked.rate(now) + late_s
            found[name] = Loads(prefill, filled * len(decoding))
        return found

    def change(self, now: float) -> RoleChange | None:
        """The engine that should change its role, if any; counted as changed from now on."""
        fleet = self._state.fleet
        names = {engine.kind for engine in fleet.engines.values() if engine.flexible}
        for name in sorted(names):
            only = Among(frozenset((name,)))
            computing, decoding = fleet.of(Role.PREFILL, only), fleet.of(Role.DECODE, only)
            if not computing or not decoding:
                continue
            kind = self._kind(name)
            if kind.began_at is None:
                kind.began_at = now
            filled = self._filled(decoding, name)
            loads = Loads(kind.asked.rate(now) / len(computing), kind.decode.sample(filled, now))
            # The first window is too short a sample.
            if now - max(kind.changed_at, kind.began_at) < self._rule.dwell_s:
                continue
            engines = list({e.name: e for e in (*computing, *decoding)}.values())
            found = role_change(engines, loads, self._rule)
            if found is not None:
                kind.changed_at = now
                return found
        return None

    def _filled(self, decoding: Sequence[Engine], kind: str) -> float:
        capacity = sum(engine.capacity_tokens for engine in decoding)
        held = sum(engine.context_tokens + engine.others_tokens for engine in decoding)
        filled = (held + self._dispatch.lacking.get(kind, 0)) / capacity
        slo_s = self._state.settings.tpot_slo_s
        if slo_s == math.inf:
            return filled
        kinds = self._state.cluster.kinds
        each = [
            kinds[e.kind].decode.step_s(e.decodes, e.context_tokens) if e.decodes else 0.0
            for e in decoding
        ]
        return max(filled, sum(each) / len(each) / slo_s)

    def _kind(self, name: str) -> _Kind:
        found = self._kinds.get(name)
        if found is None:
            smooth_s = self._rule.smooth_s
            found = self._kinds[name] = _Kind(Decaying(smooth_s), Smoothed(smooth_s))
        return found
