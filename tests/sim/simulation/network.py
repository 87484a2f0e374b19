"""Transfer workers and the wires between them: transfers that take time, break half-way, and write late.

What a transfer worker promises is kept, and nothing more: rows are written at any time until `pull` has returned
or its cancellation was acknowledged; a loan is read until it is given back.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from xxhash import xxh3_128_digest

from kvpool.daemon.workers.question_turns import QuestionTurns
from kvpool.daemon.workers.transfer_workers import Rules
from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.membership.base import Standing
from kvpool.telemetry.cluster_stats import PathsStats, WorkerStats
from kvpool.types import CHECKSUM_BYTES, BlockStatus, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.sim.simulation import scale
from tests.sim.simulation.memory import Memory, Use, Violation
from tests.sim.simulation.threads import Threads

if TYPE_CHECKING:
    from tests.sim.simulation.nodes import Life
    from tests.sim.simulation.world import World

ABSENT, PRESENT, MISMATCH, MISSING = range(4)  # `Pulled.status`
RIVAL_S_MIN = 0.05  # no peer is given up for slow sooner
RIVALS_MAX = 2
T = TypeVar("T")

LATE_S = 0.001  # for an answer that waits for nothing but its time


class Network:
    """Who reaches whom, and how long that takes."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.cuts: set[frozenset[str]] = set()
        self.mute: set[str] = set()  # they accept, and never answer

    def latency(self) -> float:
        slow = self.world.faults and self.rng.random() < self.world.plan.slow_message
        return self.rng.uniform(0.05, 0.6) if slow else self.rng.uniform(0.0001, 0.001)

    def drawn(self, chance: float) -> bool:
        return self.world.faults and self.rng.random() < chance

    async def reach(self, me: str, url: str, deadline: float) -> Life:
        """The peer that listens at `url`, after the time that takes. Raises `Unavailable`."""
        world, plan = self.world, self.world.plan
        latency = self.latency()
        stalled, broken = self.drawn(plan.stall_message), self.drawn(plan.lose_message)
        await sleep_until(world.now() + latency, deadline)
        node = world.nodes.get(url.removeprefix("sim://"))
        if node is None:
            raise Unavailable(
                f"{url} refuses connections"
            )  # a member of which there is nothing more
        life = node.life
        if stalled or node.name in self.mute or frozenset((me, node.name)) in self.cuts:
            await sleep_until(deadline + 1.0, deadline)
        if life is None or not life.listening:
            if node.vanished:
                await sleep_until(deadline + 1.0, deadline)
            raise Unavailable(f"{url} refuses connections")
        if broken:
            raise Unavailable(f"the connection to {url} was reset")
        return life


async def sleep_until(when: float, deadline: float) -> None:
    """Raises `Unavailable` at the deadline if that comes first."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, min(when, deadline) - loop.time()))
    if when > deadline:
        raise Unavailable("not finished within its time")


class PeerTransport:
    """The transfer workers of one life of a node, as its control process sees them: `PeerTransport`, and `TransferWorkers`."""

    def __init__(self, life: Life, network: Network) -> None:
        self.life = life
        self.network = network
        self.world = network.world
        self.source: Rules
        self.dead = False
        self.generation = 0  # of transfer workers
        self._threads = Threads(scale.transfer_threads(self.world.plan.limits))
        questions, waits = scale.question_limits(self.world.plan.limits)
        self._questions = QuestionTurns(questions=questions, waits=waits)
        self._loans: dict[str, tuple[Memory, list[Use]]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        # (tenant, digest, part, key) → when its transfers began
        self._under_way: dict[tuple[str, bytes, int, bytes], list[tuple[float, bool]]] = {}

    @property
    def urls(self) -> list[str]:
        return [self.life.node.url]

    @property
    def addresses(self) -> list[str]:
        return self.urls

    @property
    def idle(self) -> bool:
        return not self._running

    def path_to(self, url: str) -> str:
        return url

    def path_stats(self) -> PathsStats:
        return PathsStats()

    def nixl_stats(self) -> None:
        return None

    def stats(self) -> list[WorkerStats]:
        return [WorkerStats(None, True, 0, len(self._running), len(self._loans), [])]

    async def stop(self) -> None:
        self.die()

    # ---- control's orders --------------------------------------------------------------------------

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        """As `TransferWorkers.pull`: when this ends, however it does, nothing writes to the rows any more."""
        self._check_alive()
        blocks = [
            Wanted(part, key, row)
            for part in order.parts
            for key, row in zip(split_keys(part.keys), wire_rows(part.rows), strict=True)
        ]
        name = f"transfer to {self.life.name}"
        memory = self.life.segments[order.segment]
        if memory is not self.life.memory_of[order.tenant]:
            raise Violation(f"{self.life.name} fetches for {order.tenant} into another's segment")
        now = self.world.now()
        uses = [
            memory.use(name, part.stride, wire_rows(part.rows), now, writes=True)
            for part in order.parts
        ]
        self._count(order, blocks)
        transfer = Transfer(self, order, blocks)
        try:
            pulled = await self._order(transfer.run, transfer.wind_down)
            assert isinstance(pulled, worker_wire.Pulled)
            return pulled
        finally:
            for use in uses:
                memory.end(use)
            for part, key, _ in blocks:
                name_of = order.tenant, order.digest, part.part, key
                times = self._under_way[name_of]
                times.remove((transfer.ordered, order.background))
                if not times:
                    del self._under_way[name_of]

    def _count(self, order: worker_wire.PullBlocks, blocks: Sequence[Wanted]) -> None:
        """Nothing is fetched twice at a time, except from a second peer when the first is slow, and
        beside a copy in the background, which may take its time."""
        now = self.world.now()
        self.world.count("transfers")
        for part, key, _ in blocks:
            name = order.tenant, order.digest, part.part, key
            times = self._under_way.setdefault(name, [])
            ahead = [began for began, background in times if order.background or not background]
            if len(times) >= RIVALS_MAX or (ahead and now - ahead[-1] < RIVAL_S_MIN - 1e-6):
                raise Violation(
                    f"{self.life.name} fetches {key[:4].hex()} part {part.part} at {now}, "
                    f"and has since {times} already"
                )
            times.append((now, order.background))

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        return await self._questions.ask(order, self._send)

    async def _send(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        self._check_alive()
        deadline = self.world.now() + order.deadline_s
        answer = await self._order(lambda: self._ask(order, deadline))
        assert isinstance(answer, (frame.Done, frame.Bytes))
        return answer

    async def _in_a_thread(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Control orders none too many, unless there are fewer threads than it knows of."""
        threads = self._threads
        self.world.count("orders that waited for a thread", not threads.free)
        async with threads.one():
            return await work()

    async def _order(
        self,
        work: Callable[[], Coroutine[Any, Any, Any]],
        wind_down: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Any:
        """Run it in the transfer worker; a cancellation is passed on, and its acknowledgement waited for."""
        loop = self.world.loop
        enough = "threads_beyond" not in self.world.plan.limits
        if enough and len(self._running) >= self._threads.count:
            raise Violation(f"{self.life.name} orders more of its transfer worker than it can do")
        task = loop.create_task(self._in_a_thread(work), context=self.life.worker.context)
        self._running.add(task)
        waited_for: list[asyncio.Task[Any]] = [task]
        cancelled: asyncio.CancelledError | None = None
        while left := [work for work in waited_for if not work.done()]:
            try:
                await asyncio.wait(left)
            except asyncio.CancelledError as error:
                if cancelled is None:
                    cancelled = error
                    if wind_down is not None:
                        ack = loop.create_task(wind_down(), context=self.life.worker.context)
                        waited_for.append(ack)
                    task.cancel()
        self._running.discard(task)
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # seen
            raise cancelled
        if task.cancelled():
            raise Unavailable("the transfer worker ended")
        return task.result()

    def _check_alive(self) -> None:
        if self.dead:
            raise Unavailable("no transfer worker is running")

    def die(self) -> None:
        """The whole node ends."""
        self.dead = True
        self.restart()

    def restart(self) -> None:
        """The transfer worker is killed: it reads and writes nothing any more, what it borrowed goes back.

        Unless the node is dead as well, another one is there at once.
        """
        self.generation += 1
        self._threads = Threads(self._threads.count)
        for task in self.life.worker.tasks:
            task.cancel()
        for token, (memory, uses) in self._loans.items():
            for use in uses:
                memory.end(use)
            self._to_control(self.source.give_back, token)
        self._loans.clear()

    # ---- what peers want -----------------------------------------------------------------------------

    def _to_control(self, callback: Callable[..., object], *args: Any) -> None:
        """A message over the control channel."""
        loop, rng = self.world.loop, self.network.rng
        loop.call_later(
            rng.uniform(0.00002, 0.0002), callback, *args, context=self.life.control.context
        )

    def open_loan(
        self, request: worker_wire.OpenLoan, answer: asyncio.Future[worker_wire.Loan]
    ) -> None:
        """Ask control, and tell the peer. A loan that nobody waits for any more goes back."""

        generation = self.generation

        def asked() -> None:
            try:
                found = self.source.open_loan(request)
            except KvpoolError as error:
                failed(error)
                return
            if isinstance(found, worker_wire.Loan):
                open_loan(found)
            else:  # some of it has to be read from a disk first
                self.world.loop.create_task(found).add_done_callback(fetched)

        def failed(error: KvpoolError) -> None:
            if not answer.done():
                answer.set_exception(error)

        def fetched(task: asyncio.Task[worker_wire.Loan]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if isinstance(error, KvpoolError):
                failed(error)
            else:
                open_loan(task.result())

        def open_loan(lent: worker_wire.Loan) -> None:
            standing = self.life.membership.standing(self.world.now())
            if standing not in {Standing.MEMBER, Standing.AWAY}:
                raise Violation(f"{self.life.name} serves a peer, and is {standing.value}")
            if not lent.token:
                pass
            elif answer.done() or self.generation != generation:
                self.source.give_back(lent.token)
                return
            else:
                memory = self.life.segments[lent.segment]
                if memory is not self.life.memory_of[request.tenant]:
                    raise Violation(f"{self.life.name} lends {request.tenant} another's segment")
                uses, rows = [], deque(wire_rows(lent.rows))
                for part, stride in zip(request.parts, lent.strides, strict=True):
                    of_part = [rows.popleft() for _ in split_keys(part.keys)]
                    here = [row for row in of_part if row != frame.NO_ROW]
                    uses.append(
                        memory.use(
                            f"loan of {self.life.name}",
                            stride,
                            here,
                            self.world.now(),
                            writes=False,
                        )
                    )
                self._loans[lent.token] = memory, uses
            if not answer.done():
                answer.set_result(lent)

        self._to_control(asked)

    def give_back(self, token: str) -> None:
        memory, uses = self._loans.pop(token, (None, []))
        if memory is not None:
            for use in uses:
                memory.end(use)
            self._to_control(self.source.give_back, token)

    def asked(
        self,
        question: peer_wire.Question | peer_wire.LongQuestion,
        answer: asyncio.Future[frame.Done | frame.Bytes],
    ) -> None:
        def settle(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or answer.done():
                return
            error = task.exception()
            if error is None:
                answer.set_result(task.result())
            elif isinstance(error, KvpoolError):
                answer.set_exception(error)
            else:
                raise error

        def ask() -> None:
            if isinstance(question, (peer_wire.Offer, peer_wire.Discard)):
                taking: Coroutine[Any, Any, Any] = (
                    self._take(question)
                    if isinstance(question, peer_wire.Offer)
                    else self.source.discarded(question)
                )
                self.world.loop.create_task(taking).add_done_callback(settle)
                return
            if isinstance(question, peer_wire.LongQuestion):
                work = (
                    self._await(question)
                    if isinstance(question, peer_wire.Await)
                    else self.source.operated(question)
                )
                task = self.world.loop.create_task(work)
                task.add_done_callback(settle)
                # Its connection ended: so does the question.
                answer.add_done_callback(lambda _: task.cancel())
                return
            done: frame.Done | frame.Bytes
            try:
                if isinstance(question, peer_wire.Holds):
                    done = self.source.holds(question)
                elif isinstance(question, peer_wire.SessionEnded):
                    done = self.source.session_ended(question)
                else:
                    done = self.source.asked(question)
            except KvpoolError as error:
                if not answer.done():
                    answer.set_exception(error)
                return
            if not answer.done():
                answer.set_result(done)

        self._to_control(ask)

    async def _take(self, offer: peer_wire.Offer) -> frame.Bytes:
        """Take up an offer. What is said to be here is relied on: it is here, and not as a spare copy."""
        taken = await self.source.offered(offer)
        if not any(taken.data):
            return taken  # a node that drains need not know the namespace
        node = self.life.server.node
        mask = int.from_bytes(offer.mask, "little")
        namespace = node.tenants[offer.tenant].epochs[offer.digest][-1]
        for key, here in zip(split_keys(offer.keys), taken.data, strict=True):
            for table in namespace.tables if here else ():
                block = table.blocks.get(key)
                if mask >> table.part & 1 and (block is None or block.secondary):
                    raise Violation(f"{self.life.name} takes {key[:4].hex()}, and does not keep it")
        return taken

    async def _await(self, question: peer_wire.Await) -> frame.Bytes:
        """Answer what was asked, by the time that was given, and with nothing that is not so."""
        began, stood_still = self.world.now(), self.life.stood_still()
        answer = await self.source.answer_later(question)
        standing = self.life.membership.standing(self.world.now())
        if standing not in {Standing.MEMBER, Standing.AWAY}:
            raise Violation(f"{self.life.name} answers a peer, and is {standing.value}")
        taken = self.world.now() - began - (self.life.stood_still() - stood_still)
        if taken > question.wait_s + LATE_S:
            raise Violation(
                f"{self.life.name} answers a question of {question.wait_s} s in {taken}"
            )
        tables = {
            table.part: table
            for epochs in self.life.server.node.tenants[question.tenant].epochs.values()
            for namespace in epochs
            if namespace.digest == question.digest
            for table in namespace.tables
        }
        keys = split_keys(question.keys)
        masks, behind = answer.data[: len(keys)], answer.data[len(keys) :]
        for key, mask in zip(keys, masks, strict=True):
            for part, table in tables.items():
                if mask >> part & 1 and key not in table.blocks:
                    raise Violation(f"{self.life.name} tells of {key[:4].hex()}, and has it not")
        (at,) = peer_wire.FIRST_DROPPED.unpack(behind)
        if at < len(keys) and keys[at] not in self.world.dropped:
            raise Violation(f"{self.life.name} says that {keys[at][:4].hex()} was given up")
        return answer

    def report(self, report: peer_wire.Corrupt) -> None:
        keys = split_keys(report.keys)
        self.world.reported.update((report.tenant, report.part, key) for key in keys)
        self._to_control(self.source.corrupt, report)

    # ---- questions -------------------------------------------------------------------------------------

    async def _ask(self, order: worker_wire.AskPeer, deadline: float) -> frame.Done | frame.Bytes:
        network = self.network
        peer = await network.reach(self.life.node.name, order.url, deadline)
        twice = network.drawn(self.world.plan.twice_message)
        answer: asyncio.Future[frame.Done | frame.Bytes] = self.world.loop.create_future()
        peer.carrier.asked(order.question, answer)
        if twice:
            nobody: asyncio.Future[frame.Done | frame.Bytes] = self.world.loop.create_future()
            nobody.cancel()
            peer.carrier.asked(order.question, nobody)
        await self.answer_of(peer, answer, deadline)
        if network.drawn(self.world.plan.lose_message):
            raise Unavailable("the answer was lost with its connection")
        await sleep_until(self.world.now() + network.latency(), deadline)
        return answer.result()

    async def answer_of(self, peer: Life, answer: asyncio.Future[Any], deadline: float) -> None:
        """Wait for a peer's answer; until it dies, or it is late: `Unavailable`."""
        peer.waited_for[answer] = None
        try:
            await asyncio.wait((answer,), timeout=max(0.0, deadline - self.world.now()))
            if not answer.done():
                raise Unavailable("the peer did not answer in time")
        finally:
            peer.waited_for.pop(answer, None)
            if not answer.done():
                answer.cancel()
            elif not answer.cancelled():
                answer.exception()  # seen


def wire_rows(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("I"))


class Wanted(NamedTuple):
    """A block of an order, and the row that is reserved for it."""

    part: worker_wire.PartRows
    key: bytes
    row: int


class Transfer:
    """One pull: a loan at the peer, bytes in pieces, checks. In the domain of the puller's transfer worker."""

    def __init__(
        self,
        carrier: PeerTransport,
        order: worker_wire.PullBlocks,
        blocks: Sequence[Wanted],
    ) -> None:
        self.carrier = carrier
        self.order = order
        self.blocks = blocks
        self.ordered = carrier.world.now()
        self.began = 0.0  # in a thread
        self.status = bytearray([BlockStatus.LATE]) * len(blocks)
        self.checksums = bytearray(CHECKSUM_BYTES * len(blocks))
        self._generation = carrier.generation
        self._late: list[tuple[int, bytes]] = []  # what the network may still bring, and where to

    async def run(self) -> worker_wire.Pulled:
        carrier, order = self.carrier, self.order
        world, network = carrier.world, carrier.network
        deadline = self.ordered + order.deadline_s
        self.began = world.now()
        error = ""
        try:
            peer = await network.reach(carrier.life.node.name, order.url, deadline)
            await self._borrow(peer, deadline)
        except KvpoolError as failure:
            error = str(failure) or failure.code
        world.note(
            f"{carrier.life.name} pulled {' '.join(block.key[:4].hex() for block in self.blocks)} from "
            f"{order.url}: {self.status.hex()[1::2]} {error}"
        )
        return worker_wire.Pulled(
            bytes(self.status), bytes(self.checksums), world.now() - self.began, error
        )

    async def _borrow(self, peer: Life, deadline: float) -> None:
        carrier, order = self.carrier, self.order
        world, network = carrier.world, carrier.network
        request = worker_wire.OpenLoan(
            order.tenant,
            order.digest,
            [peer_wire.PartKeys(part.part, part.nbytes, part.keys) for part in order.parts],
            deadline - world.now(),
            order.trace,
        )
        if network.drawn(world.plan.twice_message):
            nobody: asyncio.Future[worker_wire.Loan] = world.loop.create_future()
            nobody.cancel()
            peer.carrier.open_loan(request, nobody)
        answer: asyncio.Future[worker_wire.Loan] = world.loop.create_future()
        peer.carrier.open_loan(request, answer)
        try:
            await carrier.answer_of(peer, answer, deadline)
            lent = answer.result()
            if lent.token and world.may_die("a loan and its return"):
                world.dies_of_a_loan(carrier.life, peer)
                await asyncio.sleep(0)
            strides = [part.stride for part in order.parts]
            if lent.rows and lent.strides != strides and lent.token:
                raise Violation(f"a loan of strides {lent.strides} for an order of {strides}")
            await self._copy(peer, lent, deadline)
        finally:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                token = answer.result().token
                if carrier.dead and carrier.life.node.vanished:
                    # Nobody tells the lender, until its time is over.
                    wait_s = max(0.0, deadline - world.now())
                    context = peer.worker.context
                    world.loop.call_later(wait_s, peer.carrier.give_back, token, context=context)
                else:
                    peer.carrier.give_back(token)

    async def _copy(self, peer: Life, lent: worker_wire.Loan, deadline: float) -> None:
        """Take the bytes in two groups of blocks, each in two pieces; each piece may be the last."""
        network, world = self.carrier.network, self.carrier.world
        generation = peer.carrier.generation
        memory = self.carrier.life.segments[self.order.segment]
        lender = peer.segments[lent.segment]
        at: list[tuple[int, int, bytes]] = []
        checksums = iter(split_keys(lent.checksums))
        for index, row in enumerate(wire_rows(lent.rows)):
            if row == frame.NO_ROW:
                self.status[index] = BlockStatus.ABSENT
            else:
                at.append((index, row * self.blocks[index].part.stride, next(checksums)))
        wrong = []
        middle = network.rng.randrange(len(at) + 1)
        for group in (at[:middle], at[middle:]):
            if not group:
                continue
            cut = network.rng.random()
            flip = network.drawn(world.plan.flip_bit)
            for first in (True, False):
                pieces = []
                for index, a, _ in group:
                    nbytes = self.blocks[index].part.nbytes
                    middle = int(cut * nbytes)
                    low, high = (0, middle) if first else (middle, nbytes)
                    pieces.append((self._place(index) + low, lender.read(a + low, high - low)))
                self._late = pieces
                await self._arrive(peer, generation, deadline)
                for offset, data in pieces:
                    memory.write(offset, data)
                self._late = []
            if flip:
                self._flip(network.rng.choice(group)[0])
            for index, _, checksum in group:
                mine = memory.read(self._place(index), self.blocks[index].part.nbytes)
                digest = xxh3_128_digest(mine)
                if digest == checksum:
                    self.status[index] = PRESENT
                    self.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] = digest
                else:
                    self.status[index] = BlockStatus.MISMATCH
                    wrong.append(self.blocks[index])
        if wrong and network.rng.random() < 0.5:
            # The owner looks for itself; now and then it finds its own copy broken as well.
            order = self.order
            for number in dict.fromkeys(block.part.part for block in wrong):
                keys = [block.key for block in wrong if block.part.part == number]
                peer.carrier.report(
                    peer_wire.Corrupt(order.tenant, order.digest, number, b"".join(keys))
                )

    def _place(self, index: int) -> int:
        """Where in this node's memory a block belongs."""
        block = self.blocks[index]
        return block.row * block.part.stride

    async def _arrive(self, peer: Life, generation: int, deadline: float) -> None:
        network, plan = self.carrier.network, self.carrier.world.plan
        stalled, broken = (
            network.drawn(plan.stall_message / 2),
            network.drawn(plan.lose_message / 2),
        )
        when = self.carrier.world.now() + network.latency()
        cut = frozenset((self.carrier.life.node.name, peer.node.name)) in network.cuts
        if stalled or cut or peer.node.name in network.mute or peer.worker.paused:
            when = deadline + 1.0
        await sleep_until(when, deadline)
        if broken or peer.carrier.generation != generation:
            raise Unavailable("the connection ended in the middle of a transfer")

    def _flip(self, index: int) -> None:
        rng, memory = self.carrier.network.rng, self.carrier.life.segments[self.order.segment]
        at = self._place(index) + rng.randrange(self.blocks[index].part.nbytes)
        memory.data[at] ^= 1 << rng.randrange(8)
        self.carrier.world.count("bits flipped")

    async def wind_down(self) -> None:
        """Cancelled: what is on its way still arrives, and only then is that acknowledged."""
        if not self.began:
            return  # no thread has taken it
        network, late = self.carrier.network, self._late
        if network.drawn(0.5):
            await asyncio.sleep(network.rng.uniform(0.0, 0.3))
            if self.carrier.generation == self._generation:
                self.carrier.world.count("late writes", len(late))
                for offset, data in late:
                    self.carrier.life.segments[self.order.segment].write(offset, data)
