"""The processes that move bytes between nodes: started, restarted, and given orders.

The URLs that peers pull from are shared out among them; an order goes to the one with the fewest. NIXL has one of its
own (`transfer/nixl.py` says why). Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvpool.config import DaemonConfig
from kvpool.daemon.workers.supervisor import RESTARTS_MAX, WorkerSupervisor
from kvpool.daemon.workers.transfer_proxy import Rules, TransferWorkerProxy
from kvpool.errors import Unavailable
from kvpool.memory.segment import Segment
from kvpool.placement.records import NIXL
from kvpool.telemetry.node_stats import WorkerStats
from kvpool.wire import worker as worker_wire

Supervisor = WorkerSupervisor[TransferWorkerProxy]


class TransferPool:
    """All transfer workers of a daemon."""

    def __init__(self, config: DaemonConfig, incarnation: str) -> None:
        self._config = config
        self._incarnation = incarnation
        self._segments: dict[int, Segment] = {}
        self._rules: Rules  # from `start` on
        self._supervisors: list[Supervisor] = []
        self._nixl: Supervisor | None = None
        # Of each transfer worker which of `listen`, and where that was last.
        self._listening: list[tuple[Supervisor, list[int], list[str]]] = []

    @property
    def urls(self) -> list[str]:
        """Where peers can pull from, with the ports that were really taken, in the order of `listen`."""
        return [
            url
            for _, url in sorted(
                (index, url)
                for supervisor, indices, _ in self._listening
                if supervisor.worker is not None and supervisor.worker.alive
                for index, url in zip(indices, supervisor.worker.urls, strict=True)
            )
        ]

    @property
    def addresses(self) -> list[str]:
        """The same, with those of transfer workers that have died and are being started again."""
        return [
            url
            for _, url in sorted(
                (index, url)
                for _, indices, listen in self._listening
                for index, url in zip(indices, listen, strict=True)
            )
        ]

    @property
    def idle(self) -> bool:
        """Whether a question now would wait for nothing but its answer."""
        return any(worker.busy == 0 for worker in self._running(self._supervisors))

    async def start(self, rules: Rules) -> None:
        """Start all of them. rules: answer what peers ask of this node.

        Raises `ConfigError` for a URL that cannot be served; then none runs."""
        self._rules = rules
        listen = self._config.listen
        nixl = [at for at, url in enumerate(listen) if url.startswith(NIXL)]
        others = [at for at in range(len(listen)) if at not in nixl]
        count = self._config.transfer_workers
        for number in range(count):
            supervisor = self._supervisor(others[number::count], RESTARTS_MAX)
            await self._start(supervisor)
            self._supervisors.append(supervisor)
        if nixl:
            # It ends itself when a peer is lost in the middle of a read, however often that happens.
            self._nixl = self._supervisor(nixl, None)
            await self._start(self._nixl)

    async def _start(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.start()
        except BaseException:
            await self.stop()
            raise

    def _supervisor(self, indices: list[int], restarts_max: int | None) -> Supervisor:
        listen = [self._config.listen[index] for index in indices]

        def began(worker: TransferWorkerProxy) -> None:
            # A later one takes the ports that this one was given, which peers know by now.
            listen[:] = worker.urls or listen

        supervisor = WorkerSupervisor(
            lambda: TransferWorkerProxy(
                self._config, self._incarnation, self._segments, self._rules, listen
            ),
            began,
            restarts_max=restarts_max,
        )
        self._listening.append((supervisor, indices, listen))
        return supervisor

    async def attach_segment(self, segment_id: int, segment: Segment) -> None:
        """Have all transfer workers map a segment, later ones too. It must stay open until `stop`."""
        self._segments[segment_id] = segment
        for worker in self._running(self._all):
            await worker.attach(segment_id, segment)

    async def send(self, order: worker_wire.PullBlocks | worker_wire.AskPeer) -> Any:
        """The answer to an order for the URL in it. See `Worker.order`: afterwards nothing writes to its rows.

        Raises `Unavailable` when no transfer worker runs or the one that did it died, `LimitExceeded` when too
        much is under way, and what it reports.
        """
        return await self._worker_for(order.url).order(order, order.deadline_s)

    def _worker_for(self, url: str) -> TransferWorkerProxy:
        if not url.startswith(NIXL):
            running = self._running(self._supervisors)
            if not running:
                raise Unavailable("no transfer worker is running")
            return min(running, key=lambda worker: worker.busy)
        worker = self._nixl.worker if self._nixl is not None else None
        if worker is None or not worker.alive:
            raise Unavailable("the transfer worker for NIXL is not running")
        return worker

    @property
    def _all(self) -> list[Supervisor]:
        return [*self._supervisors, *([self._nixl] if self._nixl is not None else [])]

    @staticmethod
    def _running(supervisors: list[Supervisor]) -> list[TransferWorkerProxy]:
        return [s.worker for s in supervisors if s.worker is not None and s.worker.alive]

    def stats(self) -> list[WorkerStats]:
        return [
            WorkerStats(
                pid=supervisor.worker.pid if supervisor.worker is not None else None,
                alive=supervisor.alive,
                restarts=supervisor.restarts,
                orders=supervisor.worker.busy if supervisor.worker is not None else 0,
                loans=supervisor.worker.lending if supervisor.worker is not None else 0,
                listening=supervisor.worker.urls if supervisor.worker is not None else [],
            )
            for supervisor in self._all
        ]

    async def stop(self) -> None:
        """End all transfer workers and wait for their death. Idempotent."""
        await asyncio.gather(*[supervisor.stop() for supervisor in self._all])
        self._supervisors.clear()
        self._listening.clear()
        self._nixl = None
