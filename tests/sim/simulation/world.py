"""One seed: a cluster, what its clients do, what goes wrong, and what must be true all along and in the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import math
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.daemon.core.blocks import PIN_NONE, Tenant
from kvpool.daemon.core.node import Node
from kvpool.errors import KvpoolError
from kvpool.placement.directory.base import TIERS
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.records import NodeRecord, NodeState
from kvpool.types import DEFAULT_TENANT
from tests.sim.simulation import scale
from tests.sim.simulation.clients import Client, keys_of
from tests.sim.simulation.disks import offsets, unsettled
from tests.sim.simulation.loop import START_S, Domain, Stuck, VirtualLoop
from tests.sim.simulation.members import Members, entries_of
from tests.sim.simulation.memory import Contents, Violation
from tests.sim.simulation.namespaces import SimulatedNamespace
from tests.sim.simulation.nemesis import TTL_S, Nemesis
from tests.sim.simulation.network import Network
from tests.sim.simulation.nodes import LEASE_S_MAX, Life, SimulatedNode
from tests.sim.simulation.plan import MODEST_BLOCKS, MODEST_CHAINS, Plan
from tests.sim.simulation.ports import BadMembership
from tests.sim.simulation.stays import WhatStays
from tests.support.embedded_directory import EmbeddedDirectory

STEPS_MAX = 3_000_000  # fifty nodes take more than one million
EVENTS_KEPT = 60
POLL_S = 0.25
QUOTAS = (0, 0.2, 0.5, 0.8)
SETTLE_S = 60.0  # for everything to be as it should, once nothing goes wrong any more
FORGET_S = 2.5  # until negative memory is forgotten
TRESPASS = 0.1  # of a client's requests, where there are several tenants: for what is another's
SCRUB_BLOCKS = 7  # in one step
READ_FROM_DISK = 4  # prefixes that are read after a restart
READ_S = 1.0  # the promise for a reader with another replica


@dataclass(frozen=True, slots=True)
class Result:
    """How a seed went. failure: empty if all promises held. digest: of the whole trace."""

    seed: int
    failure: str
    digest: str
    events: tuple[str, ...]
    counts: dict[str, int]
    steps: int
    plan: Plan

    def __str__(self) -> str:
        tail = "\n".join(self.events)
        return (
            f"seed {self.seed}: {self.failure or 'all promises held'}\n{self.plan}\n"
            f"last events:\n{tail}\n"
            f"replay with: python -m tests.sim.simulation {self.seed}"
        )


class World:
    """Everything that there is in a seed. `run` lives it from beginning to end."""

    def __init__(
        self,
        seed: int,
        plan: Plan,
        tell: Callable[[str], None] | None = None,
        *,
        observed: bool = True,
    ) -> None:
        """observed: see `run_seed`."""
        self.seed = seed
        self.observed = observed
        self.rng = random.Random(seed)
        self.plan = plan
        # Abstract are the methods that nothing here asks a loop for.
        self.loop = VirtualLoop(steps_max=STEPS_MAX)  # type: ignore[abstract]
        self.faults = True
        self.directory_away = False
        self.beside_what_stays = False  # a fault that does not end is there: see `WhatStays`
        self.overtaken: set[tuple[bytes, bytes]] = set()  # what the directory says of it is unknown
        self.failure = ""
        self.domains: list[Domain] = []
        self.outside = self._domain("outside")
        self.counts: Counter[str] = Counter()
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._tell = tell
        self._digest = hashlib.sha256()
        self._names: dict[str, str] = {}
        self.contents = Contents()
        self.network = Network(self, random.Random(f"{seed}/network"))
        self._news = random.Random(f"{seed}/news")
        self.cluster = StaticCluster("simulated", deliver=self._deliver)
        self.directory = (
            EmbeddedDirectory(rng=random.Random(f"{seed}/marks")) if self.plan.directory else None
        )
        self.nodes: dict[str, SimulatedNode] = {}
        for number in range(self.plan.nodes):
            name = f"n{number}"
            labels = {"zone": f"z{number % 3}", "rack": f"r{number}"} if self.plan.zones else {}
            self.nodes[name] = SimulatedNode(self, name, labels)
        self.clients: list[Client] = []
        self._client_count = 0
        self._healed_at = 0.0
        self._client_tasks: list[asyncio.Task[None]] = []
        self.dropped: set[bytes] = set()  # blocks that a writer has given up
        # By tenant, part, key: what somebody found to be other bytes than it should be.
        self.reported: set[tuple[str, int, bytes]] = set()
        # The last ones: whose, where, and their tokens.
        self.leases_seen: deque[tuple[SimulatedNamespace, Life, str]] = deque(maxlen=50)
        self.follow_rng = random.Random(f"{seed}/follows")
        self._disturbed: set[str] = set()  # tenants of which something was removed on purpose
        self._repaired = (
            False  # a node was lost after the last fault: all copies were looked at again
        )
        self.chains = keys_of(self.rng, self.plan.chains, self.plan.blocks)
        self.namespaces = self._make_namespaces()
        self._trespasses = random.Random(f"{seed}/trespasses")
        self._deaths = random.Random(f"{seed}/deaths")
        self.members = Members(self)

    def _make_namespaces(self) -> list[SimulatedNamespace]:
        """All of all tenants: with the same keys, and of each tenant with the same fields."""
        plan, made = self.plan, []
        for tenant, count, modest in (
            (DEFAULT_TENANT, plan.namespaces, False),
            *((one.name, one.namespaces, one.modest) for one in plan.tenants),
        ):
            chains = self.chains
            if modest:
                chains = [chain[:MODEST_BLOCKS] for chain in self.chains[:MODEST_CHAINS]]
            made += [
                SimulatedNamespace(self, tenant, plan.record(number), chains, modest=modest)
                for number in range(count)
            ]
        return made

    # ---- what all of it uses -----------------------------------------------------------------------------

    def now(self) -> float:
        return self.loop.time()

    def _domain(self, name: str) -> Domain:
        domain = Domain(name)
        self.domains.append(domain)
        return domain

    def note(self, what: str) -> None:
        """An event of the trace."""
        line = f"{self.now() - START_S:9.4f} {what}"
        self._digest.update(line.encode())
        self.events.append(line)
        if self._tell is not None:
            self._tell(line)

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] += n

    def joined(self, record: NodeRecord) -> None:
        self._names[record.incarnation] = f"{record.node}/{record.incarnation[:4]}"

    def name_of(self, incarnation: bytes) -> str:
        return self._names.get(incarnation.hex(), "somebody")

    def incarnations(self) -> list[bytes]:
        """All that ever joined, in order."""
        return [bytes.fromhex(incarnation) for incarnation in self._names]

    def spawn(
        self, work: Coroutine[Any, Any, Any], domain: Domain | None = None
    ) -> asyncio.Task[Any]:
        """Run something in a domain, or in none that ever stops; what it raises breaks the run."""
        task = self.loop.create_task(work, context=(domain or self.outside).context)
        task.add_done_callback(_check)
        return task

    def later(self, seconds: float, what: Callable[[], object]) -> None:
        self.loop.call_later(seconds, what, context=self.outside.context)

    async def in_domain(self, domain: Domain, work: Coroutine[Any, Any, Any]) -> None:
        """Have something done there, and wait for it."""
        task = self.loop.create_task(work, context=domain.context)
        await asyncio.wait((task,))
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def spawn_client(self, client: Client, work: Coroutine[Any, Any, Any]) -> None:
        """In the client's domain. That a node is down, full, or in another epoch is no failure."""
        if client.dead:
            work.close()
            return

        async def guarded() -> None:
            try:
                await work
            except KvpoolError as error:
                self.count(f"refused: {error.code}")

        task = self.loop.create_task(guarded(), context=client.domain.context)
        task.add_done_callback(_check)
        self._client_tasks.append(task)

    def siblings(self, client: Client) -> list[Client]:
        """Other processes of its engine instance."""
        return [
            other
            for other in self.clients
            if other is not client
            and (other.instance, other.namespace) == (client.instance, client.namespace)
            and not other.dead
        ]

    def disturbed(self, tenant: str) -> bool:
        """Whether something of this tenant was removed on purpose, or may not be given up."""
        return tenant in self._disturbed

    # ---- deaths in the worst of moments ---------------------------------------------------------------

    def may_die(self, between: str) -> bool:
        """Whether somebody is to die here."""
        if not (self.faults and self.plan.dies) or self._deaths.random() >= self.plan.dies:
            return False
        self.note(f"a death between {between}")
        self.count(f"deaths between {between}")
        return True

    def answers_first(self) -> bool:
        return self._deaths.random() < 0.5

    def dies(self, life: Life) -> None:
        """A node dies now, and is started again after a while."""
        if life.node.life is life:
            life.node.crash(vanish=self._deaths.random() < 0.5)
            self.later(self._deaths.choice((0.1, 0.5, 2.0)), life.node.restart)

    def dies_of_a_loan(self, borrower: Life, lender: Life) -> None:
        """One of those two, or only its transfer worker."""
        life = self._deaths.choice((borrower, lender))
        if self._deaths.random() < 0.5:
            self.dies(life)
        elif life.started:
            self.note(f"the transfer worker of {life.name} dies")
            life.carrier.restart()

    # ---- membership ----------------------------------------------------------------------------------------

    def _deliver(self, member: StaticMembership, tell: Callable[[], None]) -> None:
        assert isinstance(member, BadMembership)
        if self.faults and self._news.random() < self.plan.news_lost:
            return
        late_s = self.plan.news_late_s if self.faults else 0.02
        delay = self._news.uniform(0.001, late_s)
        self.loop.call_later(delay, tell, context=member.domain.context)

    def lease_ends(self, life: Life) -> None:
        """A life has become silent: its lease ends, unless it is heard of again before."""
        cluster = getattr(life.server, "cluster", None)
        if cluster is None:
            return
        incarnation = cluster.incarnation

        def expire() -> None:
            held = self.cluster.view.nodes.get(life.node.name)
            silent = life.dead or life.paused_at is not None
            if held is not None and held.incarnation == incarnation and silent:
                self.note(f"the lease of {life.name} ends")
                self.cluster.expire(life.node.name)

        self.later(TTL_S, expire)

    # ---- running -------------------------------------------------------------------------------------------

    def run(self) -> Result:
        main = self._main()
        try:
            with _quiet_logs(), scale.scaled(scale.constants(self.plan)):
                self.loop.run(main, self.outside)
                self._look_for_breakage()
                if not self.failure:
                    self.loop.finish(self.domains)
                    self._look_for_breakage()
        except (Violation, Stuck) as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
        finally:
            self._abandon(main)
        return Result(
            self.seed,
            self.failure,
            self._digest.hexdigest(),
            tuple(self.events),
            dict(self.counts),
            self.loop.steps,
            self.plan,
        )

    def _look_for_breakage(self) -> None:
        for context in self.loop.broken:
            error = context.get("exception")
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, Violation):
                self.failure = f"Violation: {error}"
            elif error is not None:
                lines = traceback.format_exception(error)
                self.failure = f"{context.get('message')}\n{''.join(lines[-12:])}"
            else:
                self.failure = str(context.get("message"))
            return

    def _abandon(self, main: Coroutine[Any, Any, Any]) -> None:
        """After a failure: let nothing run on, and nothing complain that it did not."""
        self.loop.broken.clear()
        with _quiet_logs(), contextlib.suppress(Stuck, Violation):
            self.loop.finish(self.domains)
        main.close()

    async def _main(self) -> None:
        self.members.come()
        for node in self.nodes.values():
            node.start()
        for node in self.nodes.values():
            for namespace in self.namespaces:
                for number in (0, 1, 0):
                    self.new_client(node, namespace, f"{node.name} engine{number}")
        await asyncio.sleep(0.5)
        nemesis = self.spawn(Nemesis(self).work()) if self.plan.actions else None
        for _ in range(self.plan.operations):
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.gap_s))
            self._operate()
        if nemesis is not None:
            nemesis.cancel()
        self.members.settle()
        self._heal()
        await self.all_answered()
        for name in self.nodes:
            self.cluster.drain(name, wanted=False)
        await self.until(self._unsettled)
        self.note("settled")
        if self.plan.disks is not None:
            await self._scrub()
            await self.until(self._unsettled)
        if self.plan.stays:
            await WhatStays(self).live_through()
            self._healed_at = self.now()
            await self.until(self._unsettled)
        await self._read_everywhere()
        await self.until(self._unsettled)
        await self._lose_an_owner()
        await self.until(self._unsettled)
        if self.plan.disks is not None:
            await self._restart_on_disks()
        await self._empty()
        for node in self.nodes.values():
            await node.stop()

    # ---- what clients do -----------------------------------------------------------------------------------

    def new_client(
        self, node: SimulatedNode, namespace: SimulatedNamespace, instance: str
    ) -> Client:
        self._client_count += 1
        name = f"c{self._client_count}@{node.name}"
        client = Client(self, node, namespace, instance, name)
        self.clients.append(client)
        return client

    def _operate(self) -> None:
        rng, plan = self.rng, self.plan
        if plan.follow and self.follow_rng.random() < plan.follow:
            self._follow_a_prompt(self.follow_rng)
            return
        at = rng.randrange(len(self.clients))
        client = self.clients[at]
        if rng.random() < plan.client_dies:
            client.die()
            self.clients.remove(client)
            self.new_client(client.node, client.namespace, client.instance)
            return
        if plan.tenants and self._trespasses.random() < TRESPASS:
            self.spawn_client(client, client.trespass(self._trespasses))
            return
        self.spawn_client(client, self.draw_work(client))

    def _follow_a_prompt(self, rng: random.Random) -> None:
        """An engine computes a prompt, perhaps, while another one's node follows it."""
        chain: Sequence[bytes] = rng.choice(self.chains)
        follower, engine = rng.choice(self.clients), rng.choice(self.clients)
        if follower.namespace is not engine.namespace:
            engine = rng.choice(
                [one for one in self.clients if one.namespace is follower.namespace]
            )
        if chain not in follower.namespace.chains:
            chain = rng.choice(follower.namespace.chains)
        keys = chain[: 2 * rng.randint(1, max(1, len(chain) // 2))]
        if rng.random() < 0.7:
            pause_s = rng.choice((0.001, 0.02, 0.2))
            self.spawn_client(engine, engine.prefill(keys, b"", pause_s))
        named = engine.node.name
        source = rng.choice(("", named, named, rng.choice([*self.nodes, "nobody"])))
        wait_s = rng.choice((0.05, 0.3, 1.0, 1.0, 3.0))
        self.spawn_client(follower, follower.follow(keys, wait_s, source))

    def draw_work(self, client: Client) -> Coroutine[Any, Any, Any]:
        rng, plan = self.rng, self.plan
        # Some prompts are much more popular than others.
        chains = client.namespace.chains
        chain = chains[int(len(chains) * rng.random() ** 2)]
        even = len(chain) // 2 * 2
        low, high = sorted(rng.choices(range(0, even + 1, 2), k=2))
        keys = chain[low:high] or chain[:2]
        parent = chain[low - 1] if low and chain[low:high] else b""
        rare = rng.random()
        for chance, work in (
            (plan.reset, client.reset),
            (plan.reset / 2, lambda: client.clear(fence=rng.random() < 0.5)),
            (plan.remove, lambda: client.remove(keys)),
            (plan.pin, lambda: client.pin(keys, rng.choice(("soft", "hard", "none")))),
            (plan.quota, lambda: client.set_quotas(rng.choice(QUOTAS), rng.choice(QUOTAS))),
            (plan.delete, client.namespace.delete),
        ):
            if rare < chance:
                self._disturbed.add(client.namespace.tenant)
                return work()
            rare -= chance
        replicas_wanted = rng.choice((0, 0, 0, 2)) if plan.replicas == 1 else 0
        kind = rng.random()
        if kind < 0.35:
            return client.put(keys, parent, replicas_wanted)
        if kind < 0.45:
            return client.put_granted(keys, parent, replicas_wanted)
        if kind < 0.47:
            return client.give_back()
        if kind < 0.9:
            wait_s = rng.choice((0.0, 0.05, 0.3, 1.0))
            return client.get(chain[:high] or chain, wait_s, rng.choice((0.05, 0.5, 1.0, 5.0)))
        return client.look(chain)

    # ---- the end of all faults -----------------------------------------------------------------------------

    def lose(self, tags: Iterable[int] | None) -> None:
        """The directory's server comes back without these groups of keys, or without any."""
        if self.directory is not None:
            self.note(f"the directory loses {'all' if tags is None else list(tags)}")
            self.directory.lose(tags)

    def _heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.note("all faults end")
        self.faults = False
        self.directory_away = False
        self.network.cuts.clear()
        self.network.mute.clear()
        self.cluster.come_back()
        self._healed_at = self.now()
        for node in self.nodes.values():
            for media in node.disk_media:
                media.troubles.clear()
                media.bad_pages.clear()
                media.moving.set()
            node.resume()
            node.restart()
        lost = {
            tag
            for node in self.nodes.values()
            for life in node.all_lives
            if life.directory is not None
            for tag in life.directory.lost_tags
        }
        if lost:
            self.lose(sorted(lost))  # the replica that took over lacked these: other marks

    # ---- what must be true -----------------------------------------------------------------------------------

    async def all_answered(self) -> None:
        """Every call has ended, or does so within what it may take."""
        limit = self.now() + 2 * LEASE_S_MAX + 10.0
        while left := [task for task in self._client_tasks if not task.done()]:
            if self.now() > limit:
                raise Violation(f"{len(left)} calls of clients have not ended: {left[0]!r}")
            await asyncio.wait(left, timeout=POLL_S)

    async def until(self, unsettled: Callable[[], str]) -> None:
        limit = self.now() + SETTLE_S
        while what := unsettled():
            if self.now() > limit:
                raise Violation(f"{SETTLE_S:g} s after the last fault {what}")
            await asyncio.sleep(POLL_S)

    def lives(self) -> list[Life]:
        """All that should serve now."""
        return [node.life for node in self.nodes.values() if node.life is not None]

    def _unsettled(self) -> str:
        """What is not yet as it has to be; empty when all is."""
        now, lives = self.now(), self.lives()
        if now - self._healed_at < FORGET_S:
            return "nothing was forgotten yet"
        for life in lives:
            if not life.started:
                return f"{life.name} does not serve"
            cluster = life.server.daemon.cluster
            if cluster.state is not NodeState.SERVING:
                return f"{life.name} is {cluster.state}"
            if len(cluster.living) != len(lives) - 1 + len(self.members):
                return f"{life.name} knows of {len(cluster.living)} others"
            for incarnation in cluster.living:
                peer = life.server.daemon.fetcher.peers.get(incarnation)
                if peer is not None and (peer.suspended(now) or peer.suspected(now)):
                    return f"{life.name} avoids {self.name_of(incarnation)}"
            if life.server.daemon.fetcher.stats().transfers:
                return f"{life.name} has transfers under way"  # from before, stalled until they end
            stats = life.server.daemon.replication.stats()
            if stats.wanted or stats.repairing:
                return f"{life.name} makes copies"
            for namespace in self.namespaces:
                epoch, known = namespace.epoch(), namespace.epoch_known_to(life)
                if known != epoch:
                    return f"{life.name} is in epoch {known} of {epoch} of {namespace.name}"
                if epoch > self.cluster.view.clock.first_epoch and not namespace.ended:
                    raise Violation(
                        f"an epoch of {namespace.name} ended, and nobody asked for that"
                    )
                lost = namespace.lost_by(life)
                if lost:
                    raise Violation(f"{life.name} has lost {lost}, for which there is room")
            if life.server.node.ended_epochs:
                return f"{life.name} keeps blocks of ended epochs"
        return (
            self._over_a_quota(lives)
            or self._disks_are_at_work(lives)
            or self._directory_is_wrong(lives)
            or self._last_copy_is_spare(lives)
            or self._lacks_copies(lives)
            or self.members.remembered()
        )

    def _over_a_quota(self, lives: Sequence[Life]) -> str:
        """Whether a node holds more than it may, and could do with less."""
        for life in lives:
            for rules in (life.server.node, *life.server.daemon.ssd.rules()):
                rules.settle()
                for tenant in rules.tenants.values():
                    for namespace in tenant.namespaces.values():
                        pinned = sum(table.hard_bytes for table in namespace.tables)
                        if namespace.quota:
                            self.count("quotas seen")
                        if namespace.held_bytes > max(namespace.quota or math.inf, pinned):
                            return f"{life.name} holds more than a quota"
        return ""

    def _disks_are_at_work(self, lives: Sequence[Life]) -> str:
        for life in lives:
            below = life.server.daemon.ssd
            for one, media in zip(below.devices, life.node.disk_media, strict=True):
                what = unsettled(one, media)
                if what:
                    return f"{life.name}{one.path} {what}"
            demotion = below._demotion
            if demotion.queued or demotion.under_way:
                return f"{life.name} has blocks to write down"
        return ""

    def _last_copy_is_spare(self, lives: Sequence[Life]) -> str:
        """Whether a node would give up the cluster's only copy of something as if others kept theirs."""
        if self.directory is None or self.overtaken:
            return ""
        holders: dict[tuple[int, bytes], list[tuple[Life, bool]]] = {}
        for life in lives:
            for tenant in life.server.node.tenants.values():
                for namespace in tenant.namespaces.values():
                    for table in namespace.tables:
                        for block in table.blocks.values():
                            name = namespace.directory_digest + block.key
                            copy = (life, block.secondary and block.pin == PIN_NONE)
                            holders.setdefault((table.part, name), []).append(copy)
            for name, mask in self._held_below(life).items():
                for part in range(len(self.plan.parts)):
                    if mask >> part & 1:
                        holders.setdefault((part, name), []).append((life, False))
        for (part, name), found in holders.items():
            if all(secondary for _, secondary in found):
                self.count("blocks that every holder takes for another's")
                if len(found) == 1:
                    return (
                        f"{found[0][0].name} takes its last copy of {name[16:20].hex()}, {part} for "
                        "a spare"
                    )
        return ""

    def _lacks_copies(self, lives: Sequence[Life]) -> str:
        """Whether there are fewer copies of a block than wanted, though there is room and time for them."""
        if (
            not (self.plan.roomy and self._repaired and self.directory is not None)
            or self.overtaken
        ):
            return ""
        wanted = min(self.plan.replicas, len(lives))
        copies: Counter[bytes] = Counter()
        for life in lives:
            copies.update(self._held(life).keys() | self._held_below(life).keys())
        for name, n in copies.items():
            if n < wanted:
                return f"there are {n} copies of block {name[16:20].hex()}, not {wanted}"
        return ""

    def _directory_is_wrong(self, lives: Sequence[Life]) -> str:
        """Whether it says of anybody what is not so."""
        if self.directory is None:
            return ""
        told: dict[tuple[bytes, int], dict[bytes, int]] = {}
        for name, entries in entries_of(self.directory):
            for incarnation, tier, mask in entries:
                told.setdefault((incarnation, tier), {})[name] = mask
        for life in lives:
            cluster = life.server.daemon.cluster
            for tier_name, held in (
                ("dram", self._held(life)),
                ("ssd", self._held_below(life)),
            ):
                said = told.get((cluster.own, TIERS[tier_name]), {})
                wrong = sorted(
                    (name, mask)
                    for name, mask in held.items() ^ said.items()
                    if (cluster.own, name) not in self.overtaken
                )
                if wrong:
                    name = wrong[0][0]
                    return (
                        f"the directory says of {life.name} {said.get(name, 0)} in {tier_name} for "
                        f"block {name[16:20].hex()}, it holds {held.get(name, 0)} "
                        f"({len(wrong)} such differences)"
                    )
            for announcer in cluster.announcing.announcers.values():
                if not announcer.stats().settled:
                    return f"{life.name} has something to announce"
        return ""

    @classmethod
    def _held(cls, life: Life) -> dict[bytes, int]:
        """By namespace in the directory and key: the parts that can be found in a node's memory."""
        return cls._blocks_of(life.server.node)

    @classmethod
    def _held_below(cls, life: Life) -> dict[bytes, int]:
        """The same of its disks."""
        held: dict[bytes, int] = {}
        for one in life.server.daemon.ssd.devices:
            for name, mask in cls._blocks_of(one.rules).items():
                held[name] = held.get(name, 0) | mask
        return held

    @staticmethod
    def _blocks_of(node: Node) -> dict[bytes, int]:
        node.settle()
        held: dict[bytes, int] = {}
        for tenant in node.tenants.values():  # a disk that does not serve has none
            for namespace in tenant.namespaces.values():
                for table in namespace.tables:
                    for key in table.blocks:
                        name = namespace.directory_digest + key
                        held[name] = held.get(name, 0) | 1 << table.part
        return held

    @staticmethod
    def parts_at(namespace: SimulatedNamespace, lives: Iterable[Life]) -> list[set[bytes]]:
        """The keys of each part that these nodes have in memory, taken together."""
        return namespace.held(life.server.node for life in lives)

    def _prompts(self) -> Iterator[tuple[SimulatedNamespace, Sequence[bytes]]]:
        for namespace in self.namespaces:
            for chain in namespace.chains:
                yield namespace, chain

    async def _read_everywhere(self) -> None:
        """What any node holds is found from every other one."""
        for life in self.lives():
            for namespace in self.namespaces:
                for _ in range(3):
                    await self._read_somewhere(life, namespace, self.rng.choice(namespace.chains))

    async def _read_somewhere(
        self, life: Life, namespace: SimulatedNamespace, chain: Sequence[bytes]
    ) -> None:
        if self.plan.disks is not None:
            # What readers before this one have forgotten is much of such a small memory.
            await self.until(lambda: self.leased_by_others(life))
        before = self.findable(life, namespace, chain)
        reader = self.new_client(life.node, namespace, f"{life.node.name} reader")
        found = await self._get(reader, chain)
        after = self.findable(life, namespace, chain)
        # Room for what is pulled is made by evicting other blocks, of this chain perhaps.
        if found < min(before, after):
            raise Violation(
                f"{life.name} finds {found} blocks of a prefix of which {before} were in the cluster "
                f"and {after} still are"
            )
        self.count("prefixes read in the end", found)

    @staticmethod
    def leased_by_others(life: Life) -> str:
        life.server.node.settle()
        count = life.server.node.leases.count
        return f"{life.name} has {count} leases" if count else ""

    def findable(
        self,
        reader: Life,
        namespace: SimulatedNamespace,
        chain: Sequence[bytes],
        among: Sequence[Life] = (),
    ) -> int:
        """What a reader must be able to get, as far as it can be known who has what.

        among: only these; default: all. Without a directory peers tell of whole prefixes only.
        """
        lives = among or self.lives()
        if self.directory is None:
            return max(namespace.usable(chain, self.parts_at(namespace, [life])) for life in lives)
        unsure = {name[16:] for _, name in self.overtaken}
        there = self.parts_at(namespace, lives)
        for keys, own in zip(there, self.parts_at(namespace, [reader]), strict=True):
            keys.difference_update(unsure - own)
        return namespace.usable(chain, there)

    async def _lose_an_owner(self) -> None:
        """A node dies; who reads at that moment what another one has as well must not notice."""
        unsure = {name[16:] for _, name in self.overtaken}
        for namespace, chain in self._prompts():
            if not unsure.isdisjoint(chain):
                continue
            lives = self.lives()
            whole = [
                life
                for life in lives
                if namespace.usable(chain[:2], self.parts_at(namespace, [life])) == len(chain[:2])
            ]
            without = [life for life in lives if life not in whole]
            if len(whole) < 2 or not without:
                continue
            kind = self.rng.randrange(3)
            victim = whole[self.rng.randrange(len(whole))]
            reader = without[self.rng.randrange(len(without))]
            if kind == 2:
                victim.node.pause(workers=True)
            else:
                victim.node.crash(vanish=kind == 1)
            await self._read_beside_the_dead(reader, namespace, chain[:2])
            self.count("owners lost")
            self._repaired = kind != 2
            victim.node.resume()
            victim.node.restart()
            return

    async def _read_beside_the_dead(
        self, life: Life, namespace: SimulatedNamespace, keys: Sequence[bytes]
    ) -> None:
        client = self.new_client(life.node, namespace, f"{life.node.name} reader")
        found, seconds = 0, 0.0

        async def read() -> None:
            nonlocal found, seconds
            found = await client.get(keys, 3 * READ_S, 0.5)
            seconds = client.waited_s

        await self.in_domain(client.domain, read())
        if found < len(keys) or seconds > READ_S:
            raise Violation(
                f"{life.name} has {found} blocks of {len(keys)} after {seconds:.3f} s, and a living "
                f"node has a copy of each"
            )

    async def _scrub(self) -> None:
        """What bits have turned in is found: a copy that is broken costs whoever wants it one miss."""
        for life in self.lives():
            await self.in_domain(life.control, self._scrub_one(life))
            for one, media in zip(
                life.server.daemon.ssd.devices, life.node.disk_media, strict=True
            ):
                if not all(media.is_right(block) for block in offsets(one)):
                    raise Violation(f"{life.name}{one.path} has broken blocks after a scrub")

    async def _scrub_one(self, life: Life) -> None:
        cursor: int | None = 0
        while cursor is not None:
            _, bad, cursor = await life.server.daemon.ssd.scrub(cursor, SCRUB_BLOCKS)
            self.count("broken blocks found by a scrub", bad)

    async def _restart_on_disks(self) -> None:
        """A node that crashes has on its disks what was there."""
        chosen = [life.node for life in self.lives() if self._held_below(life)]
        if not chosen:
            return
        node = self.rng.choice(chosen)
        node.crash()
        node.restart()
        await self.until(self._unsettled)
        (life,) = (life for life in self.lives() if life.node is node)
        read = 0
        for namespace, chain in self._prompts():
            await self.until(lambda: self.leased_by_others(life))
            before = namespace.usable(chain, self._parts_below(namespace, life))
            if not before or read == READ_FROM_DISK:
                continue
            read += 1
            # Each of another instance: many that join each other's leases would never come to an end.
            client = self.new_client(node, namespace, f"{node.name} reader {read} of its disks")
            found = await self._get(client, chain)
            after = namespace.usable(chain, self._parts_below(namespace, life))
            if found < min(before, after):
                raise Violation(
                    f"{life.name} finds {found} blocks of a prefix of which {before} were on its "
                    f"disks and {after} still are"
                )
            self.count("prefixes read from disks", found)

    @staticmethod
    def _parts_below(namespace: SimulatedNamespace, life: Life) -> list[set[bytes]]:
        """The keys of each part that are on a node's disks."""
        return namespace.held(one.rules for one in life.server.daemon.ssd.devices)

    async def _get(self, client: Client, chain: Sequence[bytes]) -> int:
        found = 0

        async def read() -> None:
            nonlocal found
            found = await client.get(chain, READ_S, 0.5)

        await self.in_domain(client.domain, read())
        return found

    async def _empty(self) -> None:
        """Once clients are gone, all that is in use are blocks."""
        for client in self.clients:
            client.die()
        await self.until(self._in_use)

    def _in_use(self) -> str:
        for life in self.lives():
            node = life.server.node
            node.settle()
            if node.commit_waiters or life.server.daemon.streams.stats().under_way:
                return f"{life.name} has follows of nobody"
            for tenant in node.tenants.values():
                used = self.used_by_nobody(node, tenant)
                if used:
                    return f"{life.name} has {used}"
        return ""

    @staticmethod
    def used_by_nobody(node: Node, tenant: Tenant) -> str:
        tables = [
            table
            for epochs in tenant.epochs.values()
            for namespace in epochs
            for table in namespace.tables
        ]
        blocks = sum(table.stride * (len(table.blocks) + len(table.garbage)) for table in tables)
        if any(table.reserved for table in tables):
            return "reservations of nobody"
        if node.leases.count or tenant.granted_bytes:
            return f"{node.leases.count} leases and grants of nobody"
        if tenant.allocator.bytes_used != blocks:
            return f"{tenant.allocator.bytes_used} bytes in use, and blocks of {blocks}"
        return ""


def _check(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error  # for the loop, which ends the run


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Nodes in trouble say so; here that is what they are for."""
    logger = logging.getLogger("kvpool")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def plan_of(
    seed: int,
    *,
    disks: bool = True,
    quotas: bool = False,
    follow: bool = True,
    bad_media: bool = True,
    limits: bool = True,
    more: bool = True,
) -> Plan:
    """What a seed is about, without living it. The arguments: see `run_seed`."""
    plan = Plan.draw(random.Random(f"{seed}/plan"), disks=disks)
    if follow:
        plan = plan.with_follows(random.Random(f"{seed}/follow"))
    if bad_media:
        plan = plan.with_bad_media(random.Random(f"{seed}/media"))
    if limits:
        plan = plan.with_limits(random.Random(f"{seed}/limits"))
    if more:
        for name, add in (
            ("threads", Plan.with_few_threads),
            ("tenants", Plan.with_tenants),
            ("stays", Plan.with_what_stays),
            ("deaths", Plan.with_deaths),
            ("many", Plan.with_many),
            ("deletions", Plan.with_deletions),
        ):
            plan = add(plan, random.Random(f"{seed}/{name}"))
    return plan.with_quotas() if quotas else plan


def run_seed(
    seed: int,
    tell: Callable[[str], None] | None = None,
    *,
    disks: bool = True,
    quotas: bool = False,
    follow: bool = True,
    bad_media: bool = True,
    limits: bool = True,
    more: bool = True,
    observed: bool = True,
) -> Result:
    """Live one seed from beginning to end.

    tell: hears every event. disks: see `Plan.draw`. quotas: with quotas of the namespace, too. follow: False:
    nobody follows prompts, where two of five seeds have some who do; all else is then as if there were none.
    bad_media: False: no disk lies, or has bad places, where a quarter of the seeds have such. limits: False: all of
    a daemon's limits are as ever, where half of the seeds have lower ones. more: False: one tenant, nothing that goes
    wrong for good, nobody who dies where that is worst, and few nodes. observed: False: no feature subscribes to the
    events of a daemon.
    """
    plan = plan_of(
        seed,
        disks=disks,
        quotas=quotas,
        follow=follow,
        bad_media=bad_media,
        limits=limits,
        more=more,
    )
    gc.disable()
    try:
        with scale.scaled(scale.ALWAYS):
            return World(seed, plan, tell, observed=observed).run()
    finally:
        gc.enable()
