"""Engines, as far as the pool sees them: they put, read late, hold on to leases, and die in the middle.

What a client checks it checks by itself: the bytes by their names, the memory by who uses it, the time by
its own clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.errors import (
    ClusterUnavailable,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    PoolFull,
    StaleEpoch,
    Unavailable,
    from_code,
)
from kvpool.types import KEY_BYTES, NO_PARENT, plain_parts
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from tests.sim.simulation.loop import Domain
from tests.sim.simulation.memory import Memory, Use, Violation
from tests.sim.simulation.network import wire_rows
from tests.sim.simulation.nodes import Answer, Life, Session, SimulatedNode

if TYPE_CHECKING:
    from tests.sim.simulation.namespaces import SimulatedNamespace
    from tests.sim.simulation.world import World

EXPECTED = (PoolFull, LimitExceeded, StaleEpoch, Unavailable, ClusterUnavailable)
ANSWER_S = 0.3  # beyond what a request may wait for
OTHERS_S = 3.0  # for requests that ask the membership, or the indexes of disks
PIDFD_S = 0.01


@dataclass(eq=False, slots=True)
class Reading:
    """A lease as its holder believes in it."""

    token: str
    life: Life
    uses: list[Use]
    deadline: float
    epoch: int
    keys: Sequence[bytes]
    parts: list[client_wire.LeasedPart]


class Client:
    """One process beside one node."""

    def __init__(
        self,
        world: World,
        node: SimulatedNode,
        namespace: SimulatedNamespace,
        instance: str,
        name: str,
    ) -> None:
        self.world = world
        self.node = node
        self.namespace = namespace
        self.instance = instance
        self.name = name
        self.rng = random.Random(f"{world.seed}/{name}")
        self.domain = Domain(name)
        world.domains.append(self.domain)
        self.dead = False
        self.steady = False  # it never gives up what it has begun to put
        self.waited_s = 0.0  # for the last lease
        self._session: Session | None = None
        self._number = -1
        self._generation = -1  # of its weights; -1: those of the day, not yet counted
        self._resetting = asyncio.Lock()
        self._ticket = 0
        self._granting = asyncio.Lock()
        self._uses: list[tuple[Memory, Use]] = []
        self._granted: dict[int, list[tuple[int, Use]]] = {}  # by part: slots to be filled

    # ---- life ------------------------------------------------------------------------------------------

    def die(self) -> None:
        """The process is killed. Its daemon notices a little later."""
        if self.dead:
            return
        self.dead = True
        self.world.note(f"{self.name} dies")
        self.world.loop.cancel_all(self.domain)
        for memory, use in self._uses:
            memory.end(use)
        session = self._session
        if session is not None and not session.life.dead:
            self.world.loop.call_later(
                self.rng.uniform(0.0, PIDFD_S),
                session.life.client_died,
                session,
                context=session.life.control.context,
            )

    def _memory(self, life: Life) -> Memory:
        """The segment that this client maps."""
        return life.memory_of[self.namespace.tenant]

    async def _connected(self) -> tuple[Session, int, int]:
        """A session, and in it the namespace's number, for weights of which generation."""
        life = self.node.life
        if life is None or not life.started:
            raise Unavailable(f"{self.node.name} is down")
        if self._session is None or self._session.life is not life:
            self._session = life.connect(self.namespace, self.instance, self.name)
            self._granted.clear()
            self._number = -1
        session, number, generation = self._session, self._number, self._generation
        if number < 0:
            record = self.namespace.record
            parts = plain_parts(record.parts)
            message = client_wire.OpenNamespace(
                record.digest(), record.canonical(), parts, self.world.plan.replicas, generation
            )
            answer = await self._ask(message, OTHERS_S, session)
            number, generation = self._opened(session, answer)
        return session, number, generation

    def _opened(self, session: Session, answer: Answer) -> tuple[int, int]:
        """The namespace was opened, or reset: its number, and the generation of this client's weights."""
        opened = answer.message
        assert isinstance(opened, client_wire.Opened)
        if self._session is session and opened.generation >= self._generation:
            self._number, self._generation = opened.number, opened.generation
        return opened.number, opened.generation

    def _out_of_date(self) -> None:
        """Its weights are old: it loads those of the day, or goes on for a while, and is refused."""
        self._number = -1
        if self.rng.random() < 0.7:
            self._generation = -1

    # ---- requests ----------------------------------------------------------------------------------------

    async def _ask(
        self,
        message: frame.Message,
        limit_s: float,
        session: Session,
        epoch: int | None = None,
        *,
        refusals: tuple[type[KvpoolError], ...] = (),
    ) -> Answer:
        """The daemon's answer. Raises `Unavailable` when it dies, and what it says is wrong.

        limit_s: a daemon that runs must have answered by then. epoch: see `Life.receive`. refusals: that it may answer
        with, beside those that any request may have.
        """
        world, life = self.world, session.life
        if life.dead:
            raise Unavailable(f"{life.name} is dead")
        answer: asyncio.Future[Answer] = world.loop.create_future()
        asked_at, stood_still = world.now(), life.stood_still()
        world.loop.call_later(
            self.rng.uniform(0.00002, 0.0002),
            life.receive,
            session,
            message,
            answer,
            epoch,
            context=life.control.context,
        )
        life.waited_for[answer] = None
        while not answer.done():
            taken = world.now() - asked_at - (life.stood_still() - stood_still)
            if taken > limit_s + ANSWER_S:
                raise Violation(
                    f"a {type(message).__name__} at {life.name} has no answer after {taken:.3f} s"
                )
            await asyncio.wait((answer,), timeout=limit_s + ANSWER_S - taken + 0.001)
        life.waited_for.pop(answer, None)
        found = answer.result()
        if isinstance(found.message, frame.Error):
            error = from_code(found.message.code, found.message.message)
            if not isinstance(error, (*EXPECTED, *refusals)):
                raise Violation(f"{type(message).__name__} at {life.name}: {error!r}")
            if isinstance(error, StaleEpoch):
                self._out_of_date()
            raise error
        return found

    def _check_served(self, life: Life, answer: Answer, generation: int) -> None:
        """What a client of other weights must not be given, nor what is of an ended epoch."""
        if answer.generation != generation:
            raise Violation(
                f"{self.name} has weights of generation {generation}, and is given slots of "
                f"generation {answer.generation} at {life.name}"
            )
        if answer.epoch < answer.known:
            raise Violation(
                f"{life.name} gives slots of epoch {answer.epoch}, and knew of {answer.known}"
            )

    # ---- put ---------------------------------------------------------------------------------------------

    async def put(
        self, keys: Sequence[bytes], parent: bytes, replicas: int, *, gives_up: bool = False
    ) -> None:
        """gives_up: the blocks are dropped, in the middle of a part."""
        for part, spec in enumerate(self.namespace.parts):
            chosen = keys[spec.stride - 1 :: spec.stride]
            if chosen:
                await self._put_part(part, spec.nbytes, chosen, parent, replicas, gives_up=gives_up)

    async def _put_part(
        self,
        part: int,
        nbytes: int,
        keys: Sequence[bytes],
        parent: bytes,
        replicas: int,
        *,
        gives_up: bool,
    ) -> None:
        session, number, generation = await self._connected()
        life, world, rng = session.life, self.world, self.rng
        self._ticket += 1
        ticket = self._ticket
        answer = await self._ask(
            client_wire.Reserve(
                number, [part], [ticket], b"".join(keys), b"".join(chained(keys, parent))
            ),
            0.0,
            session,
        )
        assert isinstance(answer.message, client_wire.Reserved)
        (stride,), (rows,) = answer.message.strides, answer.message.rows
        slots = [
            (index, keys[index], row)
            for index, row in enumerate(wire_rows(rows))
            if row != frame.NO_ROW
        ]
        if not slots:
            return
        self._check_served(life, answer, generation)
        put = [key for _, key, _ in slots]
        use = self._use(life, f"{self.name} puts", stride, [row for _, _, row in slots], True)
        await self._fill(self._memory(life), stride, slots, part, nbytes, answer.epoch)
        self._memory(life).end(use)
        if (rng.random() < 0.05 and not self.steady) or gives_up:
            await self._ask(client_wire.Abort([ticket]), 0.0, session)
            if gives_up:
                world.dropped.update(keys)
                await self._ask(client_wire.Dropped(number, b"".join(keys)), 0.0, session)
                world.count("puts given up")
            return
        checksums = b"".join(
            self.namespace.block(answer.epoch, key, part, nbytes)[1] for key in put
        )
        self.namespace.committing(answer.epoch, part, put)
        done = await self._ask(client_wire.Commit([ticket], [checksums], replicas), 0.0, session)
        assert isinstance(done.message, client_wire.Committed)
        (stored,) = done.message.stored
        if stored < 0:
            raise Violation(f"{life.name} does not know a reservation that it has granted")
        world.count("blocks put", stored)
        self.namespace.stored(life, answer.epoch, part, put)

    async def _fill(
        self,
        memory: Memory,
        stride: int,
        slots: Sequence[tuple[int, bytes, int]],
        part: int,
        nbytes: int,
        epoch: int,
    ) -> None:
        """Write blocks in pieces, now and later."""
        rng = self.rng
        cut = rng.randrange(nbytes + 1)
        for low, high in ((0, cut), (cut, nbytes)):
            for _, key, row in slots:
                data, _ = self.namespace.block(epoch, key, part, nbytes)
                memory.write(row * stride + low, data[low:high])
            await asyncio.sleep(rng.choice((0.0, 0.0005, 0.05)) * rng.random())

    async def put_granted(self, keys: Sequence[bytes], parent: bytes, replicas: int) -> None:
        """A small put through slots that were granted before."""
        async with self._granting:
            await self._put_granted(keys, parent, replicas)

    async def _put_granted(self, keys: Sequence[bytes], parent: bytes, replicas: int) -> None:
        session, number, _ = await self._connected()
        life, world = session.life, self.world
        part, spec = 0, self.namespace.parts[0]
        granted = self._granted.setdefault(part, [])
        if len(granted) < len(keys):
            answer = await self._ask(client_wire.Grant(number, part, len(keys)), 0.0, session)
            assert isinstance(answer.message, client_wire.Granted)
            self._take_granted(life, granted, answer.message.stride, answer.message.rows)
        count = min(len(keys), len(granted))
        if not count:
            return
        keys = keys[:count]
        slots, granted[:] = granted[:count], granted[count:]
        node = life.server.node
        opened = node.namespaces.by_number(session.holder.tenant, number)
        epoch = opened.epoch
        stride = opened.tables[part].stride
        rows = [row for row, _ in slots]
        await self._fill(
            self._memory(life),
            stride,
            list(zip(range(count), keys, rows, strict=True)),
            part,
            spec.nbytes,
            epoch,
        )
        for _, use in slots:
            self._memory(life).end(use)
        if life.dead:
            return
        checksums = b"".join(self.namespace.block(epoch, key, part, spec.nbytes)[1] for key in keys)
        more = self.rng.choice((0, 2))
        message = client_wire.Store(
            number,
            part,
            frame.pack_rows(rows),
            b"".join(keys),
            checksums,
            more,
            b"".join(chained(keys, parent)),
            replicas,
        )
        self.namespace.committing(epoch, part, keys)
        try:
            answer = await self._ask(message, 0.0, session, epoch)
        except (PoolFull, StaleEpoch):
            if not life.dead:
                await self._ask(client_wire.GiveBack(stride, frame.pack_rows(rows)), 0.0, session)
            raise
        stored = answer.message
        assert isinstance(stored, client_wire.Stored)
        self._take_granted(life, granted, stride, stored.unused + stored.fresh)
        world.count("blocks put", stored.new)
        self.namespace.stored(life, epoch, part, keys)

    def _take_granted(
        self, life: Life, granted: list[tuple[int, Use]], stride: int, rows: bytes
    ) -> None:
        granted += [
            (row, self._use(life, f"{self.name} was granted", stride, [row], True))
            for row in wire_rows(rows)
        ]

    async def give_back(self) -> None:
        async with self._granting:
            session, _, _ = await self._connected()
            for _, use in self._granted.pop(0, []):
                self._memory(session.life).end(use)
            await self._ask(client_wire.GiveBack(0, b""), 0.0, session)

    def _use(
        self,
        life: Life,
        what: str,
        stride: int,
        rows: list[int],
        writes: bool,
        until: float = float("inf"),
    ) -> Use:
        use = self._memory(life).use(
            what, stride, rows, self.world.now(), writes=writes, until=until
        )
        self._uses.append((self._memory(life), use))
        return use

    # ---- get ---------------------------------------------------------------------------------------------

    async def get(self, keys: Sequence[bytes], wait_s: float, lease_s: float) -> int:
        """Lease, read at one's leisure, release; the blocks that were leased."""
        session, number, generation = await self._connected()
        life, world = session.life, self.world
        asked_at = world.now()
        expected = self.namespace.expected(keys) if wait_s >= 0.3 else 0
        answer = await self._ask(
            client_wire.Acquire(number, b"".join(keys), [], lease_s, wait_s), wait_s, session
        )
        self.waited_s = world.now() - asked_at
        leased = answer.message
        assert isinstance(leased, client_wire.Leased)
        world.count("gets")
        world.count("blocks wanted", len(keys))
        world.count("blocks hit", leased.blocks)
        if leased.blocks < expected:
            raise Violation(
                f"{life.name} has {leased.blocks} blocks of {expected} that it must find"
            )
        if not leased.token:
            return 0
        self._check_served(life, answer, generation)
        reading = self._read(life, answer, keys, asked_at)
        if reading is not None:
            await self._finish(session, reading)
        return leased.blocks

    async def follow(self, keys: Sequence[bytes], wait_s: float, source: str) -> None:
        """Follow a prompt to its end, then read what has come of it."""
        session, number, _ = await self._connected()
        life, world = session.life, self.world
        # What others put meanwhile is looked for only when the node that is asked has no news.
        there = self.namespace.expected(keys)
        answer = await self._ask(
            client_wire.Follow(number, b"".join(keys), wait_s, source), wait_s, session
        )
        done = answer.message
        assert isinstance(done, frame.Done)
        world.count("follows")
        world.count("blocks followed", done.value)
        world.count("follows of all", done.value == len(keys))
        if done.value > self.namespace.ever(keys):
            raise Violation(
                f"{life.name} has followed {done.value} blocks, and {self.namespace.ever(keys)} were committed"
            )
        expected = min(there, self.namespace.expected(keys)) if wait_s >= 0.3 else 0
        # Where a writer has given up a block, nobody waits for those that another one has.
        expected = min(
            expected, *(at for at, key in enumerate(keys) if key in world.dropped), len(keys)
        )
        if done.value < expected:
            raise Violation(f"{life.name} has followed {done.value} blocks of {expected}")
        await self.get(keys, 0.0, 0.5)

    async def prefill(self, keys: Sequence[bytes], parent: bytes, pause_s: float) -> None:
        """Put a prompt chunk by chunk, as an engine computes it."""
        at, step = 0, max(spec.stride for spec in self.namespace.parts)
        while at < len(keys):
            end = at + step * self.rng.choice((1, 1, 2))
            await asyncio.sleep(pause_s * self.rng.random())
            gives_up = self.world.follow_rng.random() < 0.05
            await self.put(keys[at:end], keys[at - 1] if at else parent, 0, gives_up=gives_up)
            at = end

    def _read(
        self, life: Life, answer: Answer, keys: Sequence[bytes], asked_at: float
    ) -> Reading | None:
        """Believe in a lease, if it has not ended already."""
        leased = answer.message
        assert isinstance(leased, client_wire.Leased)
        deadline = asked_at + leased.lease_s
        if deadline <= self.world.now():
            return None
        cells = [(part.stride, row) for part in leased.parts for row in wire_rows(part.rows)]
        strides = {stride for stride, _ in cells}
        what = f"{self.name} reads"
        uses = [
            self._use(life, what, stride, [row for s, row in cells if s == stride], False, deadline)
            for stride in sorted(strides)
        ]
        self.world.leases_seen.append((self.namespace, life, leased.token))
        return Reading(
            leased.token, life, uses, deadline, answer.epoch, keys[: leased.blocks], leased.parts
        )

    async def _finish(self, session: Session, reading: Reading) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2))):
            await self._copy_and_check(reading)
        for sibling in self.world.siblings(self):
            if rng.random() < 0.2:
                self.world.spawn_client(sibling, sibling.join(reading.token, reading))
        if rng.random() < 0.2:
            return  # it is forgotten, and ends by its deadline
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.5)) * rng.random())
        for use in reading.uses:
            self._memory(reading.life).end(use)
        if not reading.life.dead:
            await self._ask(client_wire.Release([reading.token]), 0.0, session)

    async def _copy_and_check(self, reading: Reading) -> None:
        """Copy the blocks out, slowly at times, and use them only if the lease still lasts then."""
        world, rng = self.world, self.rng
        copied: list[tuple[bytes, int, bytes]] = []
        memory = self._memory(reading.life)
        for part in reading.parts:
            spec = self.namespace.parts[part.part]
            for at, row in enumerate(wire_rows(part.rows)):
                key = reading.keys[part.first + at * spec.stride + spec.stride - 1]
                copied.append((key, part.part, memory.read(row * part.stride, part.nbytes)))
            await asyncio.sleep(rng.choice((0.0, 0.0005, 0.02, 0.6)) * rng.random())
        if world.now() >= reading.deadline:
            world.count("late reads")
            return
        for key, number, data in copied:
            right, _ = self.namespace.block(reading.epoch, key, number, len(data))
            if data != right:
                raise Violation(
                    f"{self.name} read wrong bytes of block {key[:4].hex()}, part {number}, "
                    f"epoch {reading.epoch} at {reading.life.name}: {world.contents.recognise(data)}"
                )
        world.count("blocks read", len(copied))

    async def join(self, token: str, reading: Reading) -> None:
        """Another process of the instance reads by the same lease."""
        session, _, _ = await self._connected()
        if session.life is not reading.life:
            return
        asked_at = self.world.now()
        answer = await self._ask(client_wire.Join(token, []), 0.0, session)
        assert isinstance(answer.message, client_wire.Leased)
        if not answer.message.token:
            return
        joined = self._read(
            session.life, Answer(answer.message, reading.epoch), reading.keys, asked_at
        )
        if joined is not None:
            await self._finish(session, joined)

    # ---- the rest ----------------------------------------------------------------------------------------

    async def look(self, keys: Sequence[bytes]) -> None:
        session, number, _ = await self._connected()
        packed = b"".join(keys)
        kind = self.rng.randrange(3)
        if kind == 0:
            found = await self._ask(client_wire.Match(number, packed, []), 0.0, session)
            assert isinstance(found.message, frame.Done)
            if found.message.value > self.namespace.ever(keys):
                raise Violation(
                    f"{session.life.name} has {found.message.value} blocks, of which {self.namespace.name} "
                    f"has committed {self.namespace.ever(keys)}"
                )
        elif kind == 1:
            await self._ask(client_wire.Present([number], 0, packed, None), 0.0, session)
        else:
            await self._ask(client_wire.Pull(number, packed, 0.3), 0.3, session)

    async def trespass(self, rng: random.Random) -> None:
        """Ask for what is another tenant's, by names that can be guessed: it is as if it were not there."""
        session, _, _ = await self._connected()
        life, tenant = session.life, self.namespace.tenant
        numbers = sorted(
            {
                other._number
                for other in self.world.clients
                if other.namespace.tenant != tenant
                and other._number >= 0
                and other._session is not None
                and other._session.life is life
            }
        )
        tokens = [
            token
            for whose, at, token in self.world.leases_seen
            if whose.tenant != tenant and at is life
        ]
        kind = rng.randrange(3)
        if kind == 0 and numbers:
            keys = b"".join(rng.choice(self.namespace.chains))
            try:
                await self._ask(
                    client_wire.Match(rng.choice(numbers), keys, []),
                    0.0,
                    session,
                    refusals=(InvalidRequest,),
                )
            except InvalidRequest:
                self.world.count("other tenants' namespaces refused")
            else:
                raise Violation(f"{life.name} tells {tenant} of another tenant's namespace")
        elif kind == 1 and tokens:
            answer = await self._ask(client_wire.Join(rng.choice(tokens), []), 0.0, session)
            assert isinstance(answer.message, client_wire.Leased)
            if answer.message.token:
                raise Violation(f"{life.name} lets {tenant} join another tenant's lease")
            self.world.count("other tenants' leases refused")
        elif kind == 2 and tokens:
            # Whoever has it reads on, and nobody writes there: see `Memory`.
            await self._ask(client_wire.Release([rng.choice(tokens)]), 0.0, session)

    async def remove(self, keys: Sequence[bytes]) -> None:
        session, number, _ = await self._connected()
        await self._ask(client_wire.Remove([number], b"".join(keys)), 0.0, session)

    async def pin(self, keys: Sequence[bytes], kind: str) -> None:
        session, number, _ = await self._connected()
        await self._ask(client_wire.Pin(number, b"".join(keys), kind), OTHERS_S, session)

    async def reset(self) -> None:
        """This engine has new weights."""
        async with self._resetting:
            session, number, generation = await self._connected()
            self.world.note(f"{self.name} resets, was of generation {generation}")
            self.namespace.ended = True
            answer = await self._ask(client_wire.Reset(number, generation), OTHERS_S, session)
            self._opened(session, answer)

    async def clear(self, *, fence: bool) -> None:
        session, _, _ = await self._connected()
        self.world.note(f"{self.name} clears, fence {fence}")
        self.namespace.ended = True
        await self._ask(operator_wire.Clear(self.namespace.digest, fence), OTHERS_S, session)

    async def set_replicas(self, replicas: int) -> None:
        session, _, _ = await self._connected()
        await self._ask(operator_wire.Configure(self.namespace.digest, replicas), OTHERS_S, session)

    async def set_quotas(self, dram: float, ssd: float) -> None:
        session, _, _ = await self._connected()
        self.world.note(f"quotas are {dram:g} of memory and {ssd:g} of disks")
        message = operator_wire.Configure(self.namespace.digest, dram_quota=dram, ssd_quota=ssd)
        await self._ask(message, OTHERS_S, session)

    async def drain(self, node: str, *, wanted: bool) -> None:
        session, _, _ = await self._connected()
        self.world.note(f"{node} is {'' if wanted else 'not '}to be drained")
        view = session.life.server.daemon.cluster.view
        if node in view.nodes or node in view.drains:
            # It may have left meanwhile.
            order = operator_wire.Drain(node, wanted)
            await self._ask(order, OTHERS_S, session, refusals=(InvalidRequest,))


def prefixes(rng: random.Random, chain: Sequence[bytes], stride: int) -> Sequence[bytes]:
    """Some prefix of a chain."""
    n = rng.randint(1, len(chain))
    return chain[: max(stride, n - n % stride)]


def chained(keys: Sequence[bytes], parent: bytes) -> list[bytes]:
    """The key before each of these, which are one chain."""
    return [parent or NO_PARENT, *keys[:-1]]


def keys_of(rng: random.Random, chains: int, blocks: int) -> list[list[bytes]]:
    """Prompts; every third one begins as another one does."""
    made: list[list[bytes]] = []
    for number in range(chains):
        shared = made[rng.randrange(number)][: blocks // 2] if number % 3 == 2 else []
        fresh = [rng.randbytes(KEY_BYTES) for _ in range(blocks - len(shared))]
        made.append([*shared, *fresh])
    return made
