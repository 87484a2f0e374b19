"""The control process's side of its movers: what they are told, what they ask, what they borrowed.

Event loop only. When a mover dies, what it had borrowed is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvpool import wire
from kvpool.config import DaemonConfig
from kvpool.daemon.paths import Paths
from kvpool.daemon.workers import RESTARTS_MAX, START_S, Keeper, Worker
from kvpool.errors import KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.rails import Route
from kvpool.segment import Segment
from kvpool.transfer import scheme_of

INFLIGHT_BYTES_MAX = 1 << 30  # lent to peers at a time, by one mover
OFFERS_MAX = 32  # taken up at a time, through one mover
WAITS_MAX = 64  # questions to peers that wait, at a time, by one mover


class Rules(Protocol):
    """What movers ask of the rules. Called on the event loop; quick."""

    def lend(self, request: wire.Lend) -> wire.Lent | Coroutine[Any, Any, wire.Lent]:
        """Lease what is here of these blocks until `give_back`. Raises `KvpoolError`.

        A coroutine where that takes a while; it ends by the request's deadline.
        """
        ...

    def give_back(self, token: str) -> None:
        """Nothing reads this loan any more."""
        ...

    def asked(self, question: wire.Ask) -> wire.Done:
        """How many blocks of the prefix could be lent. Raises `KvpoolError`."""
        ...

    def offered(self, offer: wire.Offer) -> Coroutine[Any, Any, wire.Bytes]:
        """Take what is wanted of the offered blocks. Ends by the offer's deadline. Raises `KvpoolError`."""
        ...

    def awaited(self, question: wire.Await) -> Coroutine[Any, Any, wire.Bytes]:
        """What is in memory of some blocks, once there is news. Raises `KvpoolError`."""
        ...

    def operated(self, order: wire.Operate) -> Coroutine[Any, Any, wire.Bytes]:
        """The answer to what an operator of another node wants. Raises `KvpoolError`."""
        ...

    def corrupt(self, report: wire.Corrupt) -> None:
        """A peer got these blocks from here, and they did not match their checksums."""
        ...


class MoverProcess(Worker):
    """One life of a mover. listen: the URLs that it serves."""

    module = "kvpool.daemon.mover"
    kind = "mover"
    decode = wire.decode_mover

    def __init__(self, movers: Movers, listen: list[str]) -> None:
        super().__init__()
        self._movers = movers
        self._listen = listen
        self._loans: set[str] = set()
        self._taking: set[asyncio.Task[None]] = set()
        self._lending: set[asyncio.Task[None]] = set()
        self._awaiting: set[asyncio.Task[None]] = set()
        self._awaited: dict[int, asyncio.Task[None]] = {}  # of these, by the mover's request
        self.urls: list[str] = []

    @property
    def lending(self) -> int:
        return len(self._loans)

    async def _prepare(self) -> None:
        config = self._movers.config
        for segment_id, segment in self._movers.segments.items():
            await self.attach(segment_id, segment)
        ready = await self._ask(
            wire.MoverStart(
                cluster=config.cluster,
                node=config.node,
                incarnation=self._movers.incarnation,
                secret=config.cluster_secret,
                listen=self._listen,
                connections_max=config.peers_max,
                inflight_bytes_max=INFLIGHT_BYTES_MAX,
                waits_max=WAITS_MAX,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                tls_ca=config.tls_ca,
                tls_crl=config.tls_crl,
                plaintext=config.plaintext,
            ),
            START_S,
        )
        self.urls = ready.listening

    def _received(self, request: int, message: Any) -> None:
        match message:
            case wire.Ask():
                self._channel.send(self._asked(message), request)
            case wire.Lend():
                self._lend(message, request)
            case wire.Offer():
                if len(self._taking) < OFFERS_MAX:
                    self._later(self._movers.source.offered(message), request, self._taking)
                else:
                    full = LimitExceeded(f"{OFFERS_MAX} offers are being taken up here already")
                    self._channel.send(wire.error_message(full), request)
            case wire.Await() | wire.Operate():
                source = self._movers.source
                work = (
                    source.awaited(message)
                    if isinstance(message, wire.Await)
                    else source.operated(message)
                )
                task = self._later(work, request, self._awaiting)
                self._awaited[request] = task
                task.add_done_callback(lambda _: self._awaited.pop(request, None))
            case wire.StopOrder():
                if message.request in self._awaited:
                    self._awaited[message.request].cancel()
            case wire.Return():
                if message.token in self._loans:
                    self._loans.remove(message.token)
                    self._movers.source.give_back(message.token)
            case wire.Corrupt():
                self._movers.source.corrupt(message)
            case _:
                super()._received(request, message)

    def _asked(self, question: wire.Ask) -> wire.Message:
        try:
            return self._movers.source.asked(question)
        except KvpoolError as error:
            return wire.error_message(error)

    def _lend(self, message: wire.Lend, request: int) -> None:
        try:
            found = self._movers.source.lend(message)
        except KvpoolError as error:
            self._channel.send(wire.error_message(error), request)
            return
        if isinstance(found, wire.Lent):
            self._lent(found, request)
        else:
            self._later(found, request, self._lending)

    def _lent(self, lent: wire.Lent, request: int) -> None:
        if lent.token:
            self._loans.add(lent.token)
        self._channel.send(lent, request)

    def _later(
        self,
        work: Coroutine[Any, Any, wire.Lent | wire.Bytes],
        request: int,
        tasks: set[asyncio.Task[None]],
    ) -> asyncio.Task[None]:
        """Send what this comes to, if the mover lives then."""
        task = self._loop.create_task(self._answer(work, request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before it begins
        return task

    async def _answer(
        self, work: Coroutine[Any, Any, wire.Lent | wire.Bytes], request: int
    ) -> None:
        try:
            answer = await work
        except KvpoolError as error:
            self._channel.send(wire.error_message(error), request)
            return
        if isinstance(answer, wire.Lent):
            self._lent(answer, request)
        else:
            self._channel.send(answer, request)

    def _bury(self) -> None:
        for token in self._loans:
            self._movers.source.give_back(token)
        self._loans.clear()
        for task in (*self._taking, *self._lending, *self._awaiting):
            task.cancel()


class Movers:
    """All movers of a daemon.

    The URLs that peers pull from are shared out among them; orders go to the one with the fewest.
    `source`: the rules. `route`: all ways to a peer, by the URL that it is known by. Both are set before `start`.
    """

    def __init__(self, config: DaemonConfig, incarnation: str, source: Rules | None = None) -> None:
        self.config = config
        self.incarnation = incarnation
        self.segments: dict[int, Segment] = {}
        self.route: Callable[[str], Route | None] = lambda _: None
        self._source = source
        self._keepers: list[Keeper[MoverProcess]] = []
        self._nixl_keeper: Keeper[MoverProcess] | None = None
        # Of each mover which of `listen`, and where that was last.
        self._listening: list[tuple[Keeper[MoverProcess], list[int], list[str]]] = []
        self._paths: Paths | None = None

    @property
    def source(self) -> Rules:
        assert self._source is not None, "set before the start"
        return self._source

    @source.setter
    def source(self, rules: Rules) -> None:
        self._source = rules

    @property
    def urls(self) -> list[str]:
        """Where peers can pull from, with the ports that were really taken, in the order of `listen`."""
        return [
            url
            for _, url in sorted(
                (index, url)
                for keeper, indices, _ in self._listening
                if keeper.worker is not None and keeper.worker.alive
                for index, url in zip(indices, keeper.worker.urls, strict=True)
            )
        ]

    @property
    def addresses(self) -> list[str]:
        """The same, with those of movers that have died and are being started again."""
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
        return any(mover.busy == 0 for mover in self._running(self._keepers))

    @property
    def paths(self) -> Paths:
        """By which way each peer is pulled from."""
        assert self._paths is not None, "start first"
        return self._paths

    async def start(self) -> None:
        """Start all of them. Raises `ConfigError` for a URL that cannot be served; then none runs."""
        count = self.config.movers
        pulls = {"tcp": self._pull_by_tcp}
        nixl = [at for at, url in enumerate(self.config.listen) if scheme_of(url) == "nixl"]
        others = [at for at in range(len(self.config.listen)) if at not in nixl]
        for number in range(count):
            keeper = self._keeper(others[number::count], RESTARTS_MAX)
            await self._start(keeper)
            self._keepers.append(keeper)
        if nixl:
            # It ends itself when a peer is lost in the middle of a read, however often that happens.
            self._nixl_keeper = self._keeper(nixl, None)
            await self._start(self._nixl_keeper)
            pulls["nixl"] = self._pull_by_nixl
        clock = asyncio.get_running_loop().time
        first = "" if self.config.pull_over == "auto" else self.config.pull_over
        rng = random.Random(self.incarnation)
        self._paths = Paths(pulls, self._ask, self.route, clock, rng, first)

    async def _start(self, keeper: Keeper[MoverProcess]) -> None:
        try:
            await keeper.start()
        except BaseException:
            await self.stop()
            raise

    def _keeper(self, indices: list[int], restarts_max: int | None) -> Keeper[MoverProcess]:
        listen = [self.config.listen[index] for index in indices]

        def began(mover: MoverProcess) -> None:
            # A later one takes the ports that this one was given, which peers know by now.
            listen[:] = mover.urls or listen

        keeper = Keeper(lambda: MoverProcess(self, listen), began, restarts_max=restarts_max)
        self._listening.append((keeper, indices, listen))
        return keeper

    async def attach_segment(self, segment_id: int, segment: Segment) -> None:
        """Have all movers map a segment, later ones too. It must stay open until `stop`."""
        self.segments[segment_id] = segment
        for mover in self._running(self._all):
            await mover.attach(segment_id, segment)

    async def pull(self, order: wire.PullBlocks) -> wire.Pulled:
        """Have blocks fetched. See `MoverProcess.order`: afterwards nothing writes to the rows.

        Raises `Unavailable` when no mover runs or the one that did it died, `LimitExceeded` when too
        much is under way, and `InvalidRequest` for an order that can never work.
        """
        return await self.paths.pull(order)

    async def _pull_by_tcp(self, order: wire.PullBlocks) -> wire.Pulled:
        return await self._pull_by(self._least_busy(), order)

    async def _pull_by_nixl(self, order: wire.PullBlocks) -> wire.Pulled:
        mover = self._nixl_keeper.worker if self._nixl_keeper is not None else None
        if mover is None or not mover.alive:
            raise Unavailable("the mover process for NIXL does not run at the moment")
        return await self._pull_by(mover, order)

    @staticmethod
    async def _pull_by(mover: MoverProcess, order: wire.PullBlocks) -> wire.Pulled:
        pulled = await mover.order(order, order.deadline_s)
        assert isinstance(pulled, wire.Pulled)
        return pulled

    async def ask(self, order: wire.AskPeer) -> wire.Done | wire.Bytes:
        """A peer's answer to a question. Raises as `pull`, and what the peer reports."""
        return await self.paths.ask(order)

    async def _ask(self, order: wire.AskPeer) -> wire.Done | wire.Bytes:
        answer = await self._least_busy().order(order, order.deadline_s)
        assert isinstance(answer, (wire.Done, wire.Bytes))
        return answer

    @property
    def _all(self) -> list[Keeper[MoverProcess]]:
        return [*self._keepers, *([self._nixl_keeper] if self._nixl_keeper is not None else [])]

    @staticmethod
    def _running(keepers: list[Keeper[MoverProcess]]) -> list[MoverProcess]:
        return [k.worker for k in keepers if k.worker is not None and k.worker.alive]

    def _least_busy(self) -> MoverProcess:
        running = self._running(self._keepers)
        if not running:
            raise Unavailable("no mover process runs at the moment")
        return min(running, key=lambda mover: mover.busy)

    def nixl_stats(self) -> dict[str, Any] | None:
        """None where this node has no NIXL."""
        return None if self._nixl_keeper is None else self.paths.nixl_stats()

    def stats(self) -> list[dict[str, Any]]:
        return [
            {
                "pid": keeper.worker.pid if keeper.worker is not None else None,
                "alive": keeper.alive,
                "restarts": keeper.restarts,
                "orders": keeper.worker.busy if keeper.worker is not None else 0,
                "loans": keeper.worker.lending if keeper.worker is not None else 0,
                "listening": keeper.worker.urls if keeper.worker is not None else [],
            }
            for keeper in self._all
        ]

    async def stop(self) -> None:
        """End all mover processes and wait for their death. Idempotent."""
        await asyncio.gather(*[keeper.stop() for keeper in self._all])
        self._keepers.clear()
        self._listening.clear()
        self._nixl_keeper = None
