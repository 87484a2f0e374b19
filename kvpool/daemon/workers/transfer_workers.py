"""The control process's side of its transfer workers: what they are told, what they ask, what they borrowed.

Event loop only. When a transfer worker dies, what it had borrowed is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.config import DaemonConfig
from kvpool.daemon.workers.paths import Paths
from kvpool.daemon.workers.question_turns import QuestionTurns
from kvpool.daemon.workers.supervisor import START_S, Worker, WorkerSupervisor
from kvpool.errors import LimitExceeded, Unavailable
from kvpool.memory.segment import Segment
from kvpool.net import scheme_of
from kvpool.placement.nic_pairs import Route
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.security.failed_logins import Failures
from kvpool.tasks import Tasks
from kvpool.telemetry.cluster_stats import NixlStats, PathsStats, WorkerStats
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.faults import Faults

INFLIGHT_BYTES_MAX = 1 << 30  # lent to peers at a time, by one transfer worker
OFFERS_MAX = 32  # taken up at a time, through one transfer worker


class Rules(Protocol):
    """What transfer workers ask of the rules. Called on the event loop; quick."""

    def open_loan(
        self, request: worker_wire.OpenLoan
    ) -> worker_wire.Loan | Coroutine[Any, Any, worker_wire.Loan]:
        """Lease what is here of these blocks until `give_back`. Raises `KvpoolError`.

        A coroutine where that takes a while; it ends by the request's deadline.
        """
        ...

    def give_back(self, token: str) -> None:
        """Nothing reads this loan any more."""
        ...

    def asked(self, question: peer_wire.Ask) -> frame.Done:
        """How many blocks of the prefix could be lent. Raises `KvpoolError`."""
        ...

    def holds(self, question: peer_wire.Holds) -> frame.Bytes:
        """Which of the blocks could be lent. Raises `KvpoolError`."""
        ...

    def discarded(self, order: peer_wire.Discard) -> Coroutine[Any, Any, frame.Bytes]:
        """Remove blocks, as a client of another node wants: which there were. Raises `KvpoolError`."""
        ...

    def session_ended(self, news: peer_wire.SessionEnded) -> frame.Done:
        """End a session, as a client of another node reports. Raises `KvpoolError`."""
        ...

    def offered(self, offer: peer_wire.Offer) -> Coroutine[Any, Any, frame.Bytes]:
        """Take what is wanted of the offered blocks. Ends by the offer's deadline. Raises `KvpoolError`."""
        ...

    def answer_later(self, question: peer_wire.Await) -> Coroutine[Any, Any, frame.Bytes]:
        """What is in memory of some blocks, once there is news. Raises `KvpoolError`."""
        ...

    def operated(self, order: peer_wire.Operate) -> Coroutine[Any, Any, frame.Bytes]:
        """The answer to what an operator of another node wants. Raises `KvpoolError`."""
        ...

    def logins_failed(self, failures: Failures) -> None:
        """Peers that could not prove who they are."""
        ...

    def corrupt(self, report: peer_wire.Corrupt) -> None:
        """A peer got these blocks from here, and they did not match their checksums."""
        ...

    @property
    def faults(self) -> Faults:
        """Takes unexpected errors in answering any of these."""
        ...


class TransferWorkerProxy(Worker):
    """One life of a transfer worker. listen: the URLs that it serves."""

    module = "kvpool.daemon.workers.transfer_worker"
    kind = "transfer"
    decode = worker_wire.decode_transfer
    fills = (worker_wire.PullBlocks,)

    def __init__(self, workers: TransferWorkers, listen: list[str]) -> None:
        super().__init__(workers.segments)
        self.alone = bool(listen)  # the addresses are its own
        self._workers = workers
        self._listen = listen
        self._loans: set[str] = set()
        self._taking, self._lending, self._awaiting = Tasks(), Tasks(), Tasks()
        self._awaited: dict[
            int, asyncio.Task[None]
        ] = {}  # of these, by the transfer worker's request
        self.urls: list[str] = []

    @property
    def lending(self) -> int:
        return len(self._loans)

    async def _prepare(self) -> None:
        config = self._workers.config
        ready = await self._ask(
            worker_wire.TransferStart(
                cluster=config.cluster,
                node=config.node,
                incarnation=self._workers.incarnation,
                secret=self._workers.secrets.source.text,
                listen=self._listen,
                connections_max=config.peers_max,
                inflight_bytes_max=INFLIGHT_BYTES_MAX,
                tls_cert=config.tls_cert,
                tls_key=config.tls_key,
                tls_ca=config.tls_ca,
                tls_crl=config.tls_crl,
                plaintext=config.plaintext,
                secret_file=self._workers.secrets.source.path,
                secret_is_local=self._workers.secrets.source.local,
                secrets_before=self._workers.secrets.lines(),
            ),
            START_S,
        )
        self.urls = ready.listening

    def _received(self, request: int, message: Any) -> None:
        match message:
            case peer_wire.Ask() | peer_wire.Holds() | peer_wire.SessionEnded():
                self._channel.send(self._asked(message), request)
            case worker_wire.OpenLoan():
                self._lend(message, request)
            case peer_wire.Offer() | peer_wire.Discard():
                if len(self._taking) < OFFERS_MAX:
                    source = self._workers.source
                    taken = (
                        source.offered(message)
                        if isinstance(message, peer_wire.Offer)
                        else source.discarded(message)
                    )
                    self._later(message, taken, request, self._taking)
                else:
                    full = LimitExceeded(
                        f"{OFFERS_MAX} offers and removals are under way here already"
                    )
                    self._channel.send(frame.error_message(full), request)
            case peer_wire.Await() | peer_wire.Operate():
                source = self._workers.source
                work = (
                    source.answer_later(message)
                    if isinstance(message, peer_wire.Await)
                    else source.operated(message)
                )
                task = self._later(message, work, request, self._awaiting)
                self._awaited[request] = task
                task.add_done_callback(lambda _: self._awaited.pop(request, None))
            case worker_wire.StopOrder():
                if message.request in self._awaited:
                    self._awaited[message.request].cancel()
            case worker_wire.Return():
                if message.token in self._loans:
                    self._loans.remove(message.token)
                    self._workers.source.give_back(message.token)
            case peer_wire.Corrupt():
                self._workers.source.corrupt(message)
            case worker_wire.LoginsFailed():
                self._workers.source.logins_failed(message.failures)
            case worker_wire.RequestFailed():
                self._workers.source.faults.count(message.request)
            case _:
                super()._received(request, message)

    def _asked(
        self, question: peer_wire.Ask | peer_wire.Holds | peer_wire.SessionEnded
    ) -> frame.Message:
        source = self._workers.source
        try:
            if isinstance(question, peer_wire.Holds):
                return source.holds(question)
            if isinstance(question, peer_wire.SessionEnded):
                return source.session_ended(question)
            return source.asked(question)
        except Exception as error:  # noqa: BLE001  (it decides)
            return self._told(question, error)

    def _told(self, message: frame.Message, error: Exception) -> frame.Message:
        """Return the answer to a message that met an error. Raises it if it is unexpected and may have changed state."""
        return frame.error_message(self._workers.source.faults.answer(message, error))

    def _lend(self, message: worker_wire.OpenLoan, request: int) -> None:
        try:
            found = self._workers.source.open_loan(message)
        except Exception as error:  # noqa: BLE001  (it decides)
            self._channel.send(self._told(message, error), request)
            return
        if isinstance(found, worker_wire.Loan):
            self._lent(found, request)
        else:
            self._later(message, found, request, self._lending)

    def _lent(self, lent: worker_wire.Loan, request: int) -> None:
        if lent.token:
            self._loans.add(lent.token)
        self._channel.send(lent, request)

    def _later(
        self,
        message: frame.Message,
        work: Coroutine[Any, Any, worker_wire.Loan | frame.Bytes | frame.Done],
        request: int,
        tasks: Tasks,
    ) -> asyncio.Task[None]:
        """Send what this comes to, if the transfer worker lives then."""
        task = tasks.begin(self._answer(message, work, request))
        task.add_done_callback(lambda _: work.close())  # it may be cancelled before it begins
        return task

    async def _answer(
        self,
        message: frame.Message,
        work: Coroutine[Any, Any, worker_wire.Loan | frame.Bytes | frame.Done],
        request: int,
    ) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001  (it decides)
            self._channel.send(self._told(message, error), request)
            return
        if isinstance(answer, worker_wire.Loan):
            self._lent(answer, request)
        else:
            self._channel.send(answer, request)

    def on_worker_exit(self) -> None:
        for token in self._loans:
            self._workers.source.give_back(token)
        self._loans.clear()
        for tasks in (self._taking, self._lending, self._awaiting):
            tasks.cancel()


@dataclass(eq=False)
class TransferWorkers:
    """All transfer workers of a daemon.

    The URLs that peers pull from are shared out among them; orders go to the one with the fewest.
    route: all ways to a peer, by the URL that it is known by.
    """

    config: DaemonConfig
    incarnation: str
    secrets: ClusterSecrets
    route: Callable[[str], Route | None] = lambda _: None

    def __post_init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.source: Rules  # from `start` on
        self._keepers: list[WorkerSupervisor[TransferWorkerProxy]] = []
        self._nixl_keeper: WorkerSupervisor[TransferWorkerProxy] | None = None
        # Of each transfer worker which of `listen`, and where that was last.
        self._listening: list[
            tuple[WorkerSupervisor[TransferWorkerProxy], list[int], list[str]]
        ] = []
        self._paths: Paths | None = None
        self._question_turns = QuestionTurns(self.config.transfer_workers)

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
        return any(worker.busy == 0 for worker in self._running(self._keepers))

    @property
    def paths(self) -> Paths:
        """By which way each peer is pulled from."""
        assert self._paths is not None, "start first"
        return self._paths

    async def start(self, source: Rules) -> None:
        """Start all of them. source: answers what peers ask of this node.

        Raises `ConfigError` for a URL that cannot be served; then none runs."""
        self.source = source
        count = self.config.transfer_workers
        pulls = {"tcp": self._pull_by_tcp}
        nixl = [at for at, url in enumerate(self.config.listen) if scheme_of(url) == "nixl"]
        others = [at for at in range(len(self.config.listen)) if at not in nixl]
        for number in range(count):
            keeper = self._keeper(others[number::count])
            await self._start(keeper)
            self._keepers.append(keeper)
        if nixl:
            self._nixl_keeper = self._keeper(nixl)
            await self._start(self._nixl_keeper)
            pulls["nixl"] = self._pull_by_nixl
        clock = asyncio.get_running_loop().time
        first = "" if self.config.pull_over == "auto" else self.config.pull_over
        rng = random.Random(self.incarnation)
        self._paths = Paths(pulls, self._ask, self.route, clock, rng, first)

    async def _start(self, keeper: WorkerSupervisor[TransferWorkerProxy]) -> None:
        try:
            await keeper.start()
        except BaseException:
            await self.stop()
            raise

    def _keeper(self, indices: list[int]) -> WorkerSupervisor[TransferWorkerProxy]:
        listen = [self.config.listen[index] for index in indices]

        def began(worker: TransferWorkerProxy) -> None:
            # A later one takes the ports that this one was given, which peers know by now.
            listen[:] = worker.urls or listen

        keeper = WorkerSupervisor(lambda: TransferWorkerProxy(self, listen), began)
        self._listening.append((keeper, indices, listen))
        return keeper

    async def attach_segment(self, segment_id: int, segment: Segment) -> None:
        """Have all transfer workers map a segment, later ones too. It must stay open until `stop`."""
        self.segments[segment_id] = segment
        for worker in self._running(self._all):
            await worker.attach(segment_id, segment)

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        """Have blocks fetched. See `TransferWorkerProxy.order`: afterwards nothing writes to the rows.

        Raises `Unavailable` when no transfer worker runs or the one that did it died, `LimitExceeded` when too
        much is under way, and `InvalidRequest` for an order that can never work.
        """
        return await self.paths.pull(order)

    async def _pull_by_tcp(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        return await self._pull_by(self._least_busy(), order)

    async def _pull_by_nixl(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        worker = self._nixl_keeper.worker if self._nixl_keeper is not None else None
        if worker is None or not worker.alive:
            raise Unavailable("the transfer worker for NIXL is not running")
        return await self._pull_by(worker, order)

    @staticmethod
    async def _pull_by(
        worker: TransferWorkerProxy, order: worker_wire.PullBlocks
    ) -> worker_wire.Pulled:
        pulled = await worker.order(order, order.deadline_s)
        assert isinstance(pulled, worker_wire.Pulled)
        return pulled

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        """A peer's answer to a question. Raises as `pull`, and what the peer reports.

        Questions to one peer wait for their turn: `LimitExceeded` if it does not come in time, which says nothing
        about the peer.
        """
        return await self._question_turns.ask(order, self.paths.ask)

    async def _ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        answer = await self._least_busy().order(order, order.deadline_s)
        assert isinstance(answer, (frame.Done, frame.Bytes))
        return answer

    @property
    def _all(self) -> list[WorkerSupervisor[TransferWorkerProxy]]:
        return [*self._keepers, *([self._nixl_keeper] if self._nixl_keeper is not None else [])]

    @staticmethod
    def _running(keepers: list[WorkerSupervisor[TransferWorkerProxy]]) -> list[TransferWorkerProxy]:
        return [k.worker for k in keepers if k.worker is not None and k.worker.alive]

    def _least_busy(self) -> TransferWorkerProxy:
        running = self._running(self._keepers)
        if not running:
            raise Unavailable("no transfer worker is running")
        return min(running, key=lambda worker: worker.busy)

    def path_to(self, url: str) -> str:
        """The way by which a peer is pulled from at present, mostly."""
        return self.paths.path(url)

    def path_stats(self) -> PathsStats:
        """What is known of the ways to each peer."""
        return self.paths.stats()

    def nixl_stats(self) -> NixlStats | None:
        """None where this node has no NIXL."""
        return None if self._nixl_keeper is None else self.paths.nixl_stats()

    def stats(self) -> list[WorkerStats]:
        return [
            WorkerStats(
                pid=keeper.worker.pid if keeper.worker is not None else None,
                alive=keeper.alive,
                restarts=keeper.restarts,
                orders=keeper.worker.busy if keeper.worker is not None else 0,
                loans=keeper.worker.lending if keeper.worker is not None else 0,
                quarantined=keeper.quarantined,
                listening=keeper.worker.urls if keeper.worker is not None else [],
            )
            for keeper in self._all
        ]

    async def stop(self) -> None:
        """End all transfer workers and wait for their death. Idempotent."""
        await asyncio.gather(*[keeper.stop() for keeper in self._all])
        self._keepers.clear()
        self._listening.clear()
        self._nixl_keeper = None
