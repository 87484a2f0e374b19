"""Nodes: the real daemon without its sockets and processes, in lives that end in several ways."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool.config import DaemonConfig, DiskConfig, TenantConfig
from kvpool.daemon.cluster.host_topology import HostTopology
from kvpool.daemon.core.blocks import Holder
from kvpool.daemon.core.events import Events, Handlers
from kvpool.daemon.server.composition import Clocks, Daemon, make_memory_rules
from kvpool.daemon.server.server import close, enter_cluster
from kvpool.errors import ConfigError, KvpoolError, StaleEpoch, Unavailable
from kvpool.placement.records import INCARNATION_BYTES
from kvpool.tasks import Tasks
from kvpool.types import DEFAULT_TENANT, split_keys
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from tests.sim.simulation.disks import Drive, DurableMedia
from tests.sim.simulation.loop import Domain
from tests.sim.simulation.memory import Memory, Violation
from tests.sim.simulation.network import PeerTransport
from tests.sim.simulation.plan import SLAB, Disks
from tests.sim.simulation.ports import BadDirectory, BadMembership

if TYPE_CHECKING:
    from tests.sim.simulation.namespaces import SimulatedNamespace
    from tests.sim.simulation.world import World

LEASE_S_MAX = 2.0
RETRY_START_S = 0.3


@dataclass(eq=False, slots=True)
class Session:
    """A client as one life of its node knows it."""

    life: Life
    holder: Holder
    namespace: SimulatedNamespace
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Answer:
    """To a request: what the daemon says, and what only a simulation can see.

    epoch, generation: of the slots in it. known: the epoch that the daemon knew of when it was asked.
    """

    message: frame.Message
    epoch: int = -1
    generation: int = -1
    known: int = -1


class Unobserved(Events):
    """Events that no feature can subscribe to."""

    def subscribe(self, feature: str, handlers: Handlers) -> None:
        pass


class SimulatedServer:
    """A daemon whose requests come as messages, not as frames, and whose transfer workers are simulated."""

    def __init__(self, life: Life, config: DaemonConfig, rng: random.Random) -> None:
        self.life = life
        self.config = config
        self._draw = rng
        self._tasks = Tasks()
        events = Events() if life.world.observed else Unobserved()
        self.node = make_memory_rules(config, self.new_incarnation(), events)
        self.daemon: Daemon[PeerTransport]

    def new_incarnation(self) -> str:
        return self._draw.randbytes(INCARNATION_BYTES).hex()

    async def start(self) -> None:
        """What `Server.run` does, but for sockets, segments and processes."""
        life, carrier = self.life, self.life.carrier
        for number, (tenant, size) in enumerate(life.world.plan.segments.items()):
            self.node.add_tenant(tenant, number, size, SLAB)
        self.daemon = Daemon(
            self.config,
            self.node,
            life.membership,
            life.directory,
            {},
            lambda _: carrier,
            HostTopology(),
            self._draw,
            Clocks(monotonic=life.world.now, wall=life.world.now),
            next_incarnation=self.new_incarnation,
        )
        carrier.source = self.daemon.peer_service
        await enter_cluster(self.daemon, carrier.addresses, self._tasks)
        disk_media = life.node.disk_media
        for device, media in zip(self.daemon.ssd.devices, disk_media, strict=True):
            drive = Drive(life, device, media, random.Random(self._draw.random()))
            life.drives.append(drive)
            self._tasks.begin(drive.run())

    async def close(self) -> None:
        await self._tasks.end()
        await close(self.daemon)
        await self.life.carrier.stop()
        assert not self.daemon.requests.faults.counts, "a request met a bug"
        assert not self.node.events.ended, "a feature met a bug"


class Life:
    """One process of a node: from its start to its end. Its memory outlives it in clients."""

    def __init__(self, node: SimulatedNode, number: int) -> None:
        world = self.world = node.world
        self.node = node
        self.name = f"{node.name}.{number}"
        self.control = Domain(self.name)
        self.worker = Domain(f"{self.name} transfer worker")
        self.disk = Domain(f"{self.name} disks")
        world.domains += [self.control, self.worker, self.disk]
        rng = random.Random(f"{world.seed}/{self.name}")
        self.memory_of = {tenant: Memory(size) for tenant, size in world.plan.segments.items()}
        self.segments = list(self.memory_of.values())  # by number
        self.carrier = PeerTransport(self, world.network)
        self.drives: list[Drive] = []
        self.membership = BadMembership(
            world,
            world.cluster,
            random.Random(rng.random()),
            self.control,
            protocol=frame.PROTOCOL_VERSION,
        )
        self.directory: BadDirectory | None = None
        if world.directory is not None:
            self.directory = BadDirectory(
                world, world.directory, random.Random(rng.random()), self.membership
            )
        self.server = self.control.context.copy().run(SimulatedServer, self, node.config, rng)
        self.waited_for: dict[asyncio.Future[Any], None] = {}
        self.started = False
        self.dead = False
        self.paused_at: float | None = None
        self.paused_s = 0.0

    @property
    def listening(self) -> bool:
        return self.started and not self.carrier.dead

    def stood_still(self) -> float:
        """For how long it has been stopped, all in all."""
        now = self.world.now()
        return self.paused_s + (now - self.paused_at if self.paused_at is not None else 0.0)

    async def start(self) -> None:
        try:
            await self.server.start()
        except (Unavailable, ConfigError) as error:
            self.world.note(f"{self.name} cannot start: {error}")
            # A supervisor starts another process.
            self.node.life = None
            self.end()
            self.world.later(RETRY_START_S, self.node.restart)
            return
        self.started = True
        self.world.note(f"{self.name} serves")

    # ---- clients ---------------------------------------------------------------------------------------

    def connect(self, namespace: SimulatedNamespace, instance: str, name: str) -> Session:
        holder = self.server.node.holders.add(namespace.tenant, instance, name)
        holder.operator = True
        return Session(self, holder, namespace)

    def receive(
        self,
        session: Session,
        message: frame.Message,
        answer: asyncio.Future[Answer],
        epoch: int | None,
    ) -> None:
        """A request comes: what `ClientConnection` does. In the control domain.

        epoch: for which the blocks of a `Store` were written. An engine that goes on in a new epoch would
        write the same bytes in it; here they differ, so that old ones are recognised, and such a
        request has come too late.
        """
        if answer.done():
            return
        if not self.started:
            answer.set_exception(Unavailable(f"{self.name} closed the connection"))
            return
        if isinstance(message, client_wire.Store) and epoch is not None:
            namespace = self.server.node.namespaces.by_number(session.holder.tenant, message.ns)
            if namespace.epoch != epoch:
                late = StaleEpoch("the epoch ended on the way")
                answer.set_result(Answer(frame.error_message(late)))
                return
        known = session.namespace.epoch_known_to(self)
        try:
            found = self.server.daemon.requests.handle(session.holder, message)
        except KvpoolError as error:
            found = frame.error_message(error)
        stores = isinstance(message, (client_wire.Commit, client_wire.Store))
        if stores and self.world.may_die("a commit and its announcement"):
            if self.world.answers_first():
                assert isinstance(found, frame.Message)
                self._reply(session, message, answer, found, known)
            self.world.dies(self)
            return
        if asyncio.iscoroutine(found):
            task = self.world.loop.create_task(found)
            task.add_done_callback(lambda task: self._later(session, message, answer, task, known))
            session.tasks.append(task)
        else:
            self._reply(session, message, answer, found, known)
        self.server.daemon.requests.settle_soon("", 1)

    def _later(
        self,
        session: Session,
        message: frame.Message,
        answer: asyncio.Future[Answer],
        task: asyncio.Task[frame.Message],
        known: int,
    ) -> None:
        if task.cancelled():
            return  # its client is dead, or the node is
        error = task.exception()
        if error is not None and not isinstance(error, KvpoolError):
            raise error
        found = task.result() if error is None else frame.error_message(error)
        self._reply(session, message, answer, found, known)

    def _reply(
        self,
        session: Session,
        message: frame.Message,
        answer: asyncio.Future[Answer],
        found: frame.Message,
        known: int,
    ) -> None:
        if answer.done():
            return
        epoch = generation = -1
        if isinstance(found, client_wire.Leased) and found.token:
            epoch, generation = self._check_lease(session, message, found)
        elif isinstance(message, client_wire.Reserve) and isinstance(found, client_wire.Reserved):
            reservation = session.holder.reservations.get(message.tickets[0])
            if reservation is not None:
                namespace = reservation.table.namespace
                epoch, generation = namespace.epoch, namespace.generation
        answer.set_result(Answer(found, epoch, generation, known))

    def _check_lease(
        self, session: Session, message: frame.Message, leased: client_wire.Leased
    ) -> tuple[int, int]:
        """Epoch and generation of what was leased: one, of the client's own, and the keys that were asked for."""
        lease = self.server.node.leases._by_token[leased.token]
        namespaces = set()
        for _, blocks in lease.parts.values():
            for block in blocks:
                namespace = block.table.namespace
                namespaces.add((namespace.epoch, namespace.generation))
                whose = namespace.tenant.name, namespace.base
                if whose != (session.namespace.tenant, session.namespace.digest):
                    raise Violation(f"{self.name} leases a block of {whose[0]} to another tenant")
                if isinstance(message, client_wire.Acquire) and block.key not in split_keys(
                    message.keys
                ):
                    raise Violation(f"{self.name} leases a block that was not asked for")
        if len(namespaces) != 1:
            raise Violation(f"{self.name} leases blocks of several epochs at once: {namespaces}")
        return namespaces.pop()

    def client_died(self, session: Session) -> None:
        """What the end of a process does, by its pidfd. In the control domain."""
        for task in session.tasks:
            task.cancel()
        self.server.node.holders.died(session.holder)

    # ---- ends --------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The process is gone, and all that was connected to it notices."""
        self.dead = True
        self.started = False
        self.carrier.die()
        for drive in self.drives:
            drive.perish()
        for domain in (self.control, self.worker, self.disk):
            if domain.paused:
                self.world.loop.resume(domain)
            self.world.loop.cancel_all(domain)
        self.world.cluster.dismiss(self.membership)
        for answer in list(self.waited_for):
            if not answer.done():
                answer.set_exception(Unavailable(f"{self.name} closed the connection"))
        self.waited_for.clear()


def make_media(disks: Disks, rng: random.Random, *, holds_on: bool) -> list[DurableMedia]:
    """Empty disks for one node, or none. holds_on: see `DurableMedia`."""
    sizes = [rng.choice((1, 1, 2)) for _ in range(min(disks.most, rng.choice((0, 1, 1, 2))))]
    return [
        DurableMedia(
            n * disks.pages, disks.page, n * disks.entries_max, disks.pace_s, holds_on=holds_on
        )
        for n in sizes
    ]


class SimulatedNode:
    """A name and an address, and who lives there at present."""

    def __init__(self, world: World, name: str, labels: dict[str, str]) -> None:
        self.world = world
        self.name = name
        self.url = f"sim://{name}"
        self.lives = 0
        self.life: Life | None = None
        self.all_lives: list[Life] = []
        self.vanished = False  # nothing there refuses connections, even
        disks = world.plan.disks
        rng = random.Random(f"{world.seed}/{name} disks")
        holds_on = world.plan.stays == "disk"
        self.disk_media = [] if disks is None else make_media(disks, rng, holds_on=holds_on)
        self.config = DaemonConfig(
            socket=f"/{name}.sock",
            node=name,
            join="etcd://simulated",
            directory="redis://simulated" if world.directory is not None else "",
            listen=(self.url,),
            labels=labels,
            lease_s_max=LEASE_S_MAX,
            memory=world.plan.segments[DEFAULT_TENANT],
            tenants=tuple(
                TenantConfig(one.name, world.plan.segments[one.name]) for one in world.plan.tenants
            ),
            ssd=tuple(
                DiskConfig(f"/disk{number}", media.size)
                for number, media in enumerate(self.disk_media)
            ),
            ssd_write="none" if disks is None else disks.write,
        )

    def start(self) -> None:
        """Begin another life."""
        assert self.life is None
        self.lives += 1
        self.vanished = False
        life = self.life = Life(self, self.lives)
        self.all_lives.append(life)
        self.world.spawn(life.start(), life.control)

    def restart(self) -> None:
        """Begin another life, if there is none."""
        if self.life is None:
            self.start()

    def crash(self, *, vanish: bool = False) -> None:
        """End it as SIGKILL does; or, with `vanish`, as a power cut does."""
        life, self.life = self.life, None
        if life is None:
            return
        self.vanished = vanish
        self.world.note(f"{life.name} crashes{' and is silent' if vanish else ''}")
        life.end()
        self.world.lease_ends(life)

    def empty_disks(self) -> None:
        """While it is down: its disks are as new."""
        assert self.life is None
        self.disk_media = [media.empty() for media in self.disk_media]

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        life = self.life
        if life is None:
            return
        if not life.started:
            self.crash()
            return
        self.world.note(f"{life.name} stops")
        life.started = False
        await self.world.in_domain(life.control, life.server.close())
        if self.life is life:
            self.life = None
            life.end()
            self.world.lease_ends(life)

    def pause(self, *, workers: bool) -> None:
        life = self.life
        if life is None or life.paused_at is not None:
            return
        self.world.note(f"{life.name} is paused{' with its transfer workers' if workers else ''}")
        life.paused_at = self.world.now()
        self.world.loop.pause(life.control)
        if workers:
            self.world.loop.pause(life.worker)
            self.world.loop.pause(life.disk)
        self.world.lease_ends(life)

    def resume(self) -> None:
        life = self.life
        if life is None or life.paused_at is None:
            return
        self.world.note(f"{life.name} goes on")
        life.paused_s += self.world.now() - life.paused_at
        life.paused_at = None
        self.world.loop.resume(life.control)
        self.world.loop.resume(life.worker)
        self.world.loop.resume(life.disk)
