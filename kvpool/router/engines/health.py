"""Which engines get requests: periodic probes, one for all ranks of a server, and a breaker for each engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpool.retry import BreakerRule
from kvpool.router.config import RouterConfig
from kvpool.router.engines.breaker import EngineBreaker
from kvpool.router.upstream.specs import EngineSpec
from kvpool.router.upstream.upstream import EngineFailed, Exhausted, Upstream

log = logging.getLogger("kvpool.router")

HEALTH_PATH = "/health"
HEALTH_BYTES_MAX = 1 << 16


@dataclass(slots=True, eq=False)
class Patient:
    """A probed engine. missed: that it gets no requests was said in the log."""

    spec: EngineSpec
    breaker: EngineBreaker
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    missed: bool = False

    @property
    def standing(self) -> tuple[bool, bool]:
        """Whether it is alive, and whether it gets requests."""
        return self.breaker.alive, self.breaker.passes


@dataclass(slots=True, eq=False)
class _Server:
    """One URL, and the engines there. turned: a breaker has changed, and with it the time of the next probe."""

    patients: list[Patient] = field(default_factory=list)
    turned: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def probe_at(self) -> float:
        return min(patient.breaker.probe_at for patient in self.patients)


@dataclass(eq=False, repr=False, slots=True)
class Health:
    """Watches engines from `add` to `remove`, each server in a task. up, down: called when an engine is found alive, and
    when it is found dead. turned: called when an engine that is alive gets requests again, or none for a while. look:
    called after each successful probe of a server, with its engines that are alive.

    For one event loop; callbacks are called in it.
    """

    _upstream: Upstream
    _config: RouterConfig
    _clock: Callable[[], float]
    _up: Callable[[EngineSpec], None]
    _down: Callable[[EngineSpec], None]
    _turned: Callable[[EngineSpec], None]
    _look: Callable[[Sequence[EngineSpec]], Awaitable[None]] | None = None
    _patients: dict[str, Patient] = field(default_factory=dict, init=False)
    _servers: dict[str, _Server] = field(default_factory=dict, init=False)
    """By URL."""

    @property
    def breakers(self) -> Mapping[str, EngineBreaker]:
        return {name: patient.breaker for name, patient in self._patients.items()}

    def passing(self) -> list[EngineSpec]:
        """Those that get requests."""
        return [p.spec for p in self._patients.values() if p.breaker.passes]

    def spec(self, name: str) -> EngineSpec | None:
        """The spec of an engine that is alive."""
        patient = self._patients.get(name)
        return patient.spec if patient is not None and patient.breaker.alive else None

    def add(self, spec: EngineSpec) -> None:
        """A new engine. It gets requests after its first successful probe."""
        config = self._config
        rule = BreakerRule(config.failures_max, config.backoff_s, config.backoff_s_max)
        patient = Patient(spec, EngineBreaker(rule, self._clock()))
        self._patients[spec.name] = patient
        server = self._servers.setdefault(spec.url, _Server())
        server.patients.append(patient)
        server.turned.set()
        if server.task is None:
            server.task = asyncio.create_task(self._watch(server), name=f"health of {spec.url}")

    def change(self, spec: EngineSpec) -> None:
        """The same engine, with changed properties."""
        patient = self._patients[spec.name]
        if patient.breaker.alive:
            self._down(patient.spec)
        patient.spec = spec
        if patient.breaker.alive:
            self._up(spec)

    def remove(self, name: str) -> None:
        """It is removed."""
        patient = self._patients.pop(name)
        server = self._servers[patient.spec.url]
        server.patients.remove(patient)
        if not server.patients:
            del self._servers[patient.spec.url]
            assert server.task is not None, "it is watched from its beginning"
            server.task.cancel()
        if patient.breaker.alive:
            self._down(patient.spec)

    def succeeded(self, name: str) -> None:
        """An engine has served a request. Ignored if it was removed."""
        if (patient := self._patients.get(name)) is not None:
            patient.breaker.succeeded()

    def failed(self, name: str, request: Hashable) -> None:
        """A request failed by this engine's fault. Ignored if it was removed. request: as `EngineBreaker.failed` has it."""
        patient = self._patients.get(name)
        if patient is None:
            return
        before = patient.standing
        patient.breaker.failed(request, self._clock())
        self._turn(patient, before)

    async def first_probes(self, within_s: float) -> None:
        """Until each was probed once, or the time is over."""
        waits = [asyncio.ensure_future(p.probed.wait()) for p in self._patients.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=within_s)
            for wait in late:
                wait.cancel()

    async def close(self) -> None:
        """Stop watching."""
        tasks = [s.task for s in self._servers.values() if s.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, server: _Server) -> None:
        while True:
            server.turned.clear()
            wait_s = server.probe_at - self._clock()
            if wait_s > 0:
                try:
                    async with asyncio.timeout(wait_s):
                        await server.turned.wait()
                except TimeoutError:
                    pass
                continue
            # A dead engine waits for its own time: its pause is longer each time it fails.
            now = self._clock()
            probed = [p for p in server.patients if p.breaker.alive or p.breaker.probe_at <= now]
            try:
                error = await self._probe(probed[0].spec)
            except Exhausted as exhausted:
                log.warning("probe: %s", exhausted)  # it says nothing about the engine
                for patient in probed:
                    patient.breaker.probe_at = self._clock() + self._config.probe_s
                continue
            for patient in probed:
                if patient in server.patients:
                    self._probed(patient, error)
            well = [patient.spec for patient in server.patients if patient.breaker.alive]
            if self._look is not None and error is None and well:
                await self._look(well)

    async def _probe(self, spec: EngineSpec) -> EngineFailed | None:
        try:
            await self._upstream.get(
                spec, HEALTH_PATH, self._config.probe_timeout_s, HEALTH_BYTES_MAX
            )
        except EngineFailed as error:
            return error
        return None

    def _probed(self, patient: Patient, error: EngineFailed | None) -> None:
        before = patient.standing
        was_alive, _ = before
        patient.breaker.probed(error is None, self._clock(), self._config.probe_s)
        if error is not None and was_alive:
            log.warning("probe: %s", error)
        elif error is not None and not patient.probed.is_set():
            # Said once: the router is ready without it, and nothing else would tell why.
            name = patient.spec.name
            log.warning(
                "engine %s receives no requests before it answers: %s",
                name,
                error,
                extra={"engine": name},
            )
            patient.missed = True
        self._turn(patient, before)
        patient.probed.set()

    def _turn(self, patient: Patient, before: tuple[bool, bool]) -> None:
        """Report a change of its standing, if any."""
        if patient.standing == before:
            return
        self._servers[patient.spec.url].turned.set()
        was_alive, passed = before
        alive, passes = patient.standing
        if passes != passed:
            self._log_turn(patient, passes)
        if alive == was_alive:
            self._turned(patient.spec)
        elif alive:
            self._up(patient.spec)
        else:
            self._down(patient.spec)

    def _log_turn(self, patient: Patient, passes: bool) -> None:
        name = patient.spec.name
        if passes:
            level = logging.WARNING if patient.missed else logging.INFO
            patient.missed = False
            log.log(level, "engine %s receives requests", name, extra={"engine": name})
        else:
            patient.missed = True
            log.warning(
                "engine %s receives no requests until its next probe", name, extra={"engine": name}
            )
