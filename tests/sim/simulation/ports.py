"""Membership and directory as they are on a bad day. The real ones are behind them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from kvpool.errors import Unavailable
from kvpool.placement.directory.base import BATCH_MAX, TIERS, Entry, Swept
from kvpool.placement.key_groups import tag_of
from kvpool.placement.membership.base import Standing
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from kvpool.placement.records import (
    INCARNATION_BYTES,
    NamespaceEntry,
    NodeRecord,
    SettingsChange,
)
from tests.sim.simulation.loop import Domain
from tests.sim.simulation.memory import Violation
from tests.support.embedded_directory import EmbeddedDirectory

if TYPE_CHECKING:
    from tests.sim.simulation.world import World

DIRECTORY_TIMEOUT_S = 0.5
OLD_MAX = 256  # answers that are remembered to be given once more


class BadDirectory:
    """One node's way to the directory that all share: calls fail, are late, are lost, come again.

    Draws what happens when a call begins, so that the order in which calls end changes nothing.
    """

    def __init__(
        self,
        world: World,
        real: EmbeddedDirectory,
        rng: random.Random,
        membership: BadMembership,
    ) -> None:
        self._world = world
        self._membership = membership
        self._real = real
        self._rng = rng
        self._old: dict[bytes, list[Entry]] = {}
        self.lost_tags: set[int] = set()  # where a publish was acknowledged, and not done

    def _drawn(self, chance: float) -> bool:
        return self._world.faults and self._rng.random() < chance

    async def _go(self, fails: float) -> None:
        """There and back. Raises `Unavailable`, at once or after the time-out."""
        away = self._world.directory_away or self._drawn(fails)
        wait_s = self._rng.uniform(0.0002, 0.002)
        if away and self._rng.random() < 0.5:
            wait_s = DIRECTORY_TIMEOUT_S
        await asyncio.sleep(wait_s)
        if away:
            raise Unavailable("the directory did not answer")

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        plan = self._world.plan
        assert len(keys) <= BATCH_MAX
        old, lies = self._drawn(plan.locate_old), self._drawn(plan.locate_lies)
        rng = random.Random(self._rng.random())
        await self._go(plan.locate_fails)
        found = await self._real.locate(digest, parts, keys)
        if old:
            found = [
                list(self._old.get(digest + key, entries))
                for key, entries in zip(keys, found, strict=True)
            ]
        elif len(self._old) < OLD_MAX:
            self._old.update(
                (digest + key, entries) for key, entries in zip(keys, found, strict=True)
            )
        if lies:
            found = [self._lie(entries, parts, rng) for entries in found]
        return found

    def _lie(self, entries: list[Entry], parts: int, rng: random.Random) -> list[Entry]:
        known = [*self._world.incarnations(), rng.randbytes(INCARNATION_BYTES)]
        mask = rng.randrange(1, 1 << parts)
        made_up = Entry(rng.choice(known), TIERS["dram"], mask)
        return rng.choice(([], [made_up], [*entries, made_up]))

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        world, plan = self._world, self._world.plan
        standing = self._membership.standing(world.now())
        if standing not in {Standing.MEMBER, Standing.AWAY}:
            raise Violation(f"{self._membership.node} publishes, and is {standing.value}")
        # Sets of keys have another order in each process; what happens must not depend on it.
        pairs = sorted(zip(keys, masks, strict=True))

        async def do(some: Sequence[tuple[bytes, int]]) -> None:
            await self._real.publish(
                digest,
                parts,
                incarnation,
                tier,
                [key for key, _ in some],
                [mask for _, mask in some],
            )

        world.note(
            f"{world.name_of(incarnation)} publishes "
            + " ".join(f"{key[:4].hex()}={mask}" for key, mask in pairs)
        )
        if self._drawn(plan.publish_late):
            # The caller hears of a time-out; what it sent is done all the same, some time, perhaps after
            # what it has sent since. Only the next refresh finds that, ten minutes later.
            world.overtaken.update((incarnation, digest + key) for key in keys)
            seconds = self._rng.uniform(0.0, 3.0)
            asyncio.get_running_loop().call_later(
                seconds,
                lambda: world.spawn(self._do_late(do, pairs)),
                context=world.outside.context,
            )
            await asyncio.sleep(DIRECTORY_TIMEOUT_S)
            raise Unavailable("the directory did not answer in time")
        lost, twice = self._drawn(plan.publish_lost), self._drawn(plan.publish_twice)
        part_done = self._rng.randrange(len(pairs) + 1)
        try:
            await self._go(plan.publish_fails)
        except Unavailable:
            if not world.directory_away:
                await do(pairs[:part_done])
            raise
        if lost and world.faults:
            self.lost_tags.update(tag_of(key) for key, _ in pairs)
            return
        await do(pairs)
        if twice:
            await do(pairs)
        life = world.nodes[self._membership.node].life
        if life is not None and world.may_die("a publication and its answer"):
            world.dies(life)
            await asyncio.sleep(0)  # cancelled

    async def _do_late(
        self,
        do: Callable[[Sequence[tuple[bytes, int]]], Awaitable[None]],
        pairs: Sequence[tuple[bytes, int]],
    ) -> None:
        if not self._world.directory_away:
            await do(pairs)

    async def marks(self) -> Sequence[bytes | None]:
        fails = self._world.plan.locate_fails
        away = self._rng.randrange(3) if self._drawn(fails) else None
        await self._go(fails)
        marks = await self._real.marks()
        # One shard of three does not answer.
        return [None if tag % 3 == away else mark for tag, mark in enumerate(marks)]

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        await self._go(self._world.plan.locate_fails)
        return await self._real.sweep(dead, cursor, count)

    async def close(self) -> None:
        """What all share stays."""


class BadMembership(StaticMembership):
    """Calls take time, and fail, done or not."""

    def __init__(
        self,
        world: World,
        cluster: StaticCluster,
        rng: random.Random,
        domain: Domain,
        *,
        protocol: int,
    ) -> None:
        super().__init__(cluster, protocol=protocol)
        self.domain = domain
        self._world = world
        self._rng = rng

    async def _before(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0005, 0.005))
        self._fail()

    async def _after(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0005, 0.005))
        self._fail()

    def _fail(self) -> None:
        if self._world.faults and self._rng.random() < self._world.plan.membership_fails / 2:
            raise Unavailable("the membership did not answer")

    async def join(self, record: NodeRecord) -> None:
        # A join that was done and not heard of ends with its lease: as if it had not been done.
        await self._before()
        await super().join(record)
        self._world.note(f"{record.node} joins as {record.incarnation[:4]}")
        self._world.joined(record)

    async def update(self, record: NodeRecord) -> None:
        await self._before()
        joined = self._record
        if joined is not None and joined.incarnation != record.incarnation:
            raise Unavailable("it is another incarnation that has joined meanwhile")
        await super().update(record)
        await self._after()

    async def register(self, entry: NamespaceEntry) -> NamespaceEntry:
        await self._before()
        known = await super().register(entry)
        await self._after()
        return known

    async def use(self, tenant: str, digest: str) -> NamespaceEntry:
        await self._before()
        entry = await super().use(tenant, digest)
        await self._after()
        return entry

    async def bump_epoch(
        self, tenant: str, digest: str, expected: int, *, fence: bool
    ) -> NamespaceEntry:
        await self._before()
        entry = await super().bump_epoch(tenant, digest, expected, fence=fence)
        self._world.note(f"epoch {entry.epoch}, fence {entry.fence}")
        life = self._world.nodes[self.node].life
        if life is not None and self._world.may_die("a new epoch and its answer"):
            self._world.dies(life)
        await self._after()
        return entry

    async def configure(self, tenant: str, digest: str, change: SettingsChange) -> NamespaceEntry:
        await self._before()
        return await super().configure(tenant, digest, change)

    async def set_drain(self, node: str, wanted: bool) -> None:
        await self._before()
        await super().set_drain(node, wanted)

    async def lead(self, chore: str) -> bool:
        await self._before()
        return await super().lead(chore)
