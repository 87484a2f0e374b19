"""The known engines, and which of them may get which requests. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Sequence

from kvpool.errors import InvalidRequest
from kvpool.scheduler.values import Among, Engine, Request, Role, place

GROUPS_MAX = 1024
"""Sets of kinds and names whose engines are cached; then the cache is cleared."""
ALL = Among()


class Fleet:
    """Engines join, leave, drain and change their role. Not thread-safe."""

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self.engines: dict[str, Engine] = {}
        self._resting: set[str] = set()
        self._weights: dict[str, float] = {}  # below 1
        self._groups: dict[tuple[Role, Among], list[Engine]] = {}
        self.pairs_differ = False
        """Whether the choice of a prompt's engine matters for its answer: one may decode as well,
        their namespaces differ, or only some have a pool. (Links may differ, too.)
        """
        for engine in engines:
            self.join(engine)

    def join(self, engine: Engine) -> None:
        """Raises `InvalidRequest` if the name exists."""
        if engine.name in self.engines:
            raise InvalidRequest(f"an engine {engine.name} already exists")
        self.engines[engine.name] = engine
        self._changed()

    def leave(self, name: str) -> Engine | None:
        engine = self.engines.pop(name, None)
        self._resting.discard(name)
        self._weights.pop(name, None)
        self._changed()
        return engine

    def rest(self, name: str, *, resting: bool) -> None:
        """A draining engine gets no new requests. Raises `KeyError` if it is unknown."""
        name = self.engines[name].name
        if resting:
            self._resting.add(name)
        else:
            self._resting.discard(name)
        self._changed()

    def weigh(self, name: str, weight: float) -> None:
        """The share of its possible requests that an engine gets, from 0 to 1. Raises `KeyError` if it is
        unknown.
        """
        name = self.engines[name].name
        self._weights.pop(name, None)
        if weight < 1:
            self._weights[name] = weight

    def set_role(self, name: str, role: Role) -> None:
        """Raises `KeyError` if it is unknown."""
        self.engines[name].role = role
        self._changed()

    def computing(self, request: Request, avoid: Collection[str] = ()) -> Sequence[Engine]:
        """Those that may compute it, without engines to avoid, unless there are no others."""
        return _without(self.of(Role.PREFILL, request.among), self._passed_over(request, avoid))

    def decoding(self, request: Request, avoid: Collection[str] = ()) -> Sequence[Engine]:
        """The same for decoding it."""
        return _without(self.of(Role.DECODE, request.among), self._passed_over(request, avoid))

    def _passed_over(self, request: Request, avoid: Collection[str]) -> Collection[str]:
        """Engines to avoid, and those whose weight excludes this request: the same for every call."""
        if not self._weights:
            return avoid
        left_out = (n for n, weight in self._weights.items() if _share(request, n) >= weight)
        return {*avoid, *left_out}

    def of(self, role: Role, among: Among = ALL) -> list[Engine]:
        """All of these in this role that are not draining. Do not modify."""
        found = self._groups.get((role, among))
        if found is None:
            if len(self._groups) >= GROUPS_MAX:
                self._groups.clear()
            found = self._groups[role, among] = [
                engine
                for engine in self.engines.values()
                if role in engine.role and among.has(engine) and engine.name not in self._resting
            ]
        return found

    def _changed(self) -> None:
        self._groups.clear()
        computing, decoding = self.of(Role.PREFILL), self.of(Role.DECODE)
        places = {place(engine) for engine in computing}
        shared = {engine.namespace if engine.tiers else None for engine in computing}
        self.pairs_differ = len(shared) > 1 or any(place(engine) in places for engine in decoding)


def _share(request: Request, name: str) -> float:
    """From 0 to below 1, evenly over requests, different for each engine."""
    return zlib.crc32(f"{request.ident}\0{name}".encode()) / 2**32


def _without(engines: list[Engine], avoid: Collection[str]) -> Sequence[Engine]:
    if not avoid:
        return engines
    return [engine for engine in engines if engine.name not in avoid] or engines
