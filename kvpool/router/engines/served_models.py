"""Which engines serve a model, and what they accept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.router.upstream.specs import EngineSpec


@dataclass(frozen=True, slots=True)
class _Serving:
    """Engines that serve a model. longest: as `ServedModels.longest`; kinds, names: as `ServedModels.among`."""

    engines: Sequence[EngineSpec]
    longest: int
    kinds: frozenset[str]
    names: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Models:
    """What these engines serve. names: of the models, in the engines' order. asked: of those that were asked for."""

    engines: tuple[EngineSpec, ...]
    names: Mapping[str, None]
    asked: dict[str, _Serving] = field(default_factory=dict)


NOBODY = _Serving((), 0, frozenset(), None)


class ServedModels:
    """The models that all known engines serve; also of unreachable engines. Event loop only.

    engines: the known engines by name.
    """

    def __init__(self, engines: Callable[[], Mapping[str, EngineSpec]]) -> None:
        self._engines = engines
        self._models = _models_of(())

    def names(self) -> tuple[str, ...]:
        """All models, adapters included."""
        return tuple(self._now().names)

    def lengths(self) -> dict[str, int]:
        """Each model with the longest prompt and answer that an engine accepts; 0: not known."""
        return {model: self.longest(model) for model in self.names()}

    def parent(self, model: str) -> str | None:
        """The model that an adapter is for; None: it is no adapter."""
        of = (spec.model for spec in self.engines(model) if model in spec.adapters)
        return next(of, None)

    def longest(self, model: str) -> int:
        """Tokens of the longest prompt and answer that one of its engines accepts; 0: not known."""
        return self._serving(model).longest

    def _serving(self, model: str) -> _Serving:
        models = self._now()
        found = models.asked.get(model)
        if found is None:
            if model not in models.names:
                return NOBODY
            found = models.asked[model] = _serving_of(model, models.engines)
        return found

    def _now(self) -> _Models:
        """Made anew when an engine has changed: each request asks, and engines are many."""
        engines = tuple(self._engines().values())
        if engines != self._models.engines:  # looks into those only that are other objects
            self._models = _models_of(engines)
        return self._models

    def engines(self, model: str) -> Sequence[EngineSpec]:
        """Return the engines that serve a model."""
        return self._serving(model).engines

    def among(self, model: str) -> tuple[frozenset[str], frozenset[str] | None]:
        """The kinds of engines that serve it, and their names, if not all of these kinds do."""
        serving = self._serving(model)
        return serving.kinds, serving.names


def _models_of(engines: tuple[EngineSpec, ...]) -> _Models:
    names = {name: None for spec in engines for name in (spec.model, *spec.models) if name}
    return _Models(engines, names)


def _serving_of(model: str, engines: Sequence[EngineSpec]) -> _Serving:
    serving = [s for s in engines if model == s.model or model in s.models]
    kinds = frozenset(spec.kind for spec in serving)
    alike = sum(spec.kind in kinds for spec in engines)
    names = frozenset(spec.name for spec in serving)
    longest = max(spec.max_len for spec in serving)
    return _Serving(serving, longest, kinds, None if alike == len(serving) else names)
