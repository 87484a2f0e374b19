"""Requirements of every membership, as tests: for kvpool's and for other distributions'.

    class TestMine(MembershipContract):
        @pytest.fixture
        def backend(self) -> Iterator[Backend]: ...

Members' views are compared with a plain model of the commands that the test gave.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
import pytest

from kvpool.errors import ConfigError, InvalidRequest, NamespaceMismatch, Unavailable
from kvpool.placement.membership.admission import GENERATIONS_APART, NOTE_HOURS
from kvpool.placement.membership.base import Membership, Standing
from kvpool.placement.records import (
    NamespaceClock,
    NamespaceEntry,
    NamespaceSettings,
    NodeRecord,
    NodeState,
    SettingsChange,
    TierRecord,
    TransportRecord,
    new_incarnation,
)
from kvpool.telemetry.cluster_stats import DrainProgress

PATIENCE_S = 60.0  # for what should happen within a few seconds; the machine may be busy


Secrets = Callable[[], tuple[bytes, ...]]


class Backend(Protocol):
    """One new cluster, and its faults."""

    def member(self, *, secrets: Secrets = tuple, protocol: int = 1) -> Membership:
        """One more member of it, not started. The caller closes it."""
        ...

    async def expire(self, node: str) -> None:
        """End a node's lease without its knowledge, as if it had been silent."""
        ...

    async def go_away(self) -> None:
        """Become unreachable for all members, keeping everything."""
        ...

    async def come_back(self) -> None: ...


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Poll until the condition holds; an AssertionError if it takes too long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what or condition}"
        await asyncio.sleep(0.005)


def record(node: str, port: int = 0, **changes: object) -> NodeRecord:
    """A serving node with an address of its own; port 0: one made from its name."""
    url = f"tcp://10.0.0.1:{port or 1024 + sum(node.encode())}"
    made = NodeRecord(
        node=node,
        incarnation=new_incarnation(),
        state=NodeState.SERVING,
        transports=(TransportRecord(url, "metadata"),),
        tiers=(TierRecord("dram", 1000, 10),),
        labels={"zone": "a"},
        version="1.2",
        protocol=1,
    )
    return msgspec.structs.replace(made, **changes)


def entry(digest: str = "00" * 16, tenant: str = "t", **changes: object) -> NamespaceEntry:
    """A namespace's entry."""
    parts = ((4096, "full", 0, 1), (512, "window", 3, 2))
    made = NamespaceEntry(tenant, digest, '{"model":"m"}', parts)
    return msgspec.structs.replace(made, **changes)


def standing(member: Membership) -> Standing:
    """A member's standing now."""
    return member.standing(time.monotonic())


class MembershipContract:
    """Subclasses give the fixture `backend`; `run` may be another event loop's."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        raise NotImplementedError

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        asyncio.run(main)

    @asynccontextmanager
    async def _members(self, backend: Backend, count: int) -> AsyncIterator[list[Membership]]:
        """Started members, closed at the end."""
        members = [backend.member() for _ in range(count)]
        try:
            for member in members:
                await member.start()
            yield members
        finally:
            for member in members:
                await member.close()

    # ---- nodes ----------------------------------------------------------------------------------------

    def test_a_node_is_seen_from_its_join_to_its_leave(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                assert standing(a) is Standing.OUT
                first = record("a")
                await a.join(first)
                assert a.view.nodes == {"a": first}
                assert standing(a) is Standing.MEMBER
                assert standing(b) is Standing.OUT
                await until(lambda: b.view.nodes == {"a": first})
                await b.join(second := record("b"))
                both = {"a": first, "b": second}
                await until(lambda: a.view.nodes == b.view.nodes == both)

                drained = msgspec.structs.replace(
                    first, state=NodeState.DRAINING, drain=DrainProgress("waiting", leases=2)
                )
                await a.update(drained)
                assert a.view.nodes["a"] == drained
                await until(lambda: b.view.nodes["a"] == drained)

                async with self._members(backend, 1) as (late,):
                    assert late.view.nodes == {"a": drained, "b": second}

                await a.leave()
                assert standing(a) is Standing.OUT
                await until(lambda: a.view.nodes == b.view.nodes == {"b": second})
                await a.leave()
                await a.join(third := record("a"))
                await until(lambda: b.view.nodes == {"a": third, "b": second})
            async with self._members(backend, 1) as (later,):
                assert later.view.nodes == {}, "close ends the lease"

        self.run(main())

    def test_use_of_tiers_is_seen_in_the_end(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                made = record("a")
                await a.join(made)
                for used in (100, 200, 300, 900):
                    made = msgspec.structs.replace(made, tiers=(TierRecord("dram", 1000, used),))
                    await a.update(made)
                await until(lambda: b.view.nodes.get("a") == made)

        self.run(main())

    def test_an_update_that_changes_nothing_tells_nobody(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                await a.join(made := record("a"))
                await until(lambda: "a" in b.view.nodes)
                revision = b.view.revision
                await a.update(msgspec.structs.replace(made))
                await b.set_drain("x", wanted=True)  # comes after it
                await until(lambda: b.view.drains == {"x"})
                assert b.view.revision == revision + 1

        self.run(main())

    def test_views_do_not_change_and_watchers_see_the_new_one(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                seen: list[tuple[int, set[str]]] = []
                b.watch(lambda: seen.append((b.view.revision, set(b.view.nodes))))
                before = b.view
                await a.join(record("a"))
                await until(lambda: "a" in b.view.nodes)
                await a.leave()
                await until(lambda: not b.view.nodes)
                assert dict(before.nodes) == {}
                assert [names for _, names in seen] == [{"a"}, set()]
                assert before.revision < seen[0][0] < seen[1][0]

        self.run(main())

    def test_a_lost_lease_is_told_once_and_ends_in_a_new_incarnation(
        self, backend: Backend
    ) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                told: list[Standing] = []
                a.on_lost(lambda: told.append(standing(a)))
                await a.join(first := record("a"))
                await b.join(record("b"))
                await until(lambda: set(a.view.nodes) == set(b.view.nodes) == {"a", "b"})
                await backend.expire("a")
                await until(lambda: told)
                await until(lambda: set(b.view.nodes) == {"b"})
                assert standing(a) is Standing.LOST
                assert standing(b) is Standing.MEMBER
                with pytest.raises(Unavailable):
                    await a.update(msgspec.structs.replace(first, version="2"))
                assert not await a.lead("chore")

                await a.join(second := record("a"))
                assert standing(a) is Standing.MEMBER
                await until(lambda: b.view.nodes.get("a") == second)
                assert told == [Standing.LOST]

        self.run(main())

    # ---- clashes --------------------------------------------------------------------------------------

    def test_a_living_nodes_name_is_not_given_twice(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                await a.join(first := record("same", 1111))
                with pytest.raises(ConfigError) as caught:
                    await b.join(record("same", 2222))
                for word in ("same", first.incarnation, "10.0.0.1:1111", "--node"):
                    assert word in str(caught.value)
                assert (standing(a), standing(b)) == (Standing.MEMBER, Standing.OUT)
                assert a.view.nodes == {"same": first}
                await b.join(other := record("other", 2222))
                await until(lambda: a.view.nodes == {"same": first, "other": other})

        self.run(main())

    def test_who_holds_the_address_replaces_the_dead_owner_at_once(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 3) as (a, b, c):
                lost: list[bool] = []
                a.on_lost(lambda: lost.append(True))
                await a.join(record("same", 1111))
                await b.join(second := record("same", 1111))
                assert b.view.nodes == {"same": second}
                await until(lambda: c.view.nodes == {"same": second})
                await until(lambda: lost)
                assert standing(a) is Standing.LOST
                assert standing(b) is Standing.MEMBER
                await a.leave()  # takes nothing of the new owner's
                await b.update(changed := msgspec.structs.replace(second, version="3"))
                await until(lambda: c.view.nodes == {"same": changed})

        self.run(main())

    def test_an_incarnation_is_not_given_twice(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                await a.join(first := record("a"))
                with pytest.raises(
                    ConfigError, match=rf"{first.incarnation}.*'b'.*'a'.*two daemons"
                ):
                    await b.join(record("b", incarnation=first.incarnation))
                assert a.view.nodes == {"a": first}
                assert standing(b) is Standing.OUT

        self.run(main())

    def test_another_secret_is_refused_at_the_door(self, backend: Backend) -> None:
        async def main() -> None:
            first = backend.member(secrets=lambda: (b"one",))
            second = backend.member(secrets=lambda: (b"two",))
            third = backend.member(secrets=lambda: (b"one",))
            try:
                await first.start()
                with pytest.raises(ConfigError, match="secret"):
                    await second.start()
                await third.start()
                config = third.view.config
                assert config is not None
                assert b"one".hex() not in config.secret_proof
            finally:
                for member in (first, second, third):
                    await member.close()

        self.run(main())

    def test_a_secret_is_replaced_on_one_node_after_the_other(self, backend: Backend) -> None:
        async def main() -> None:
            first = backend.member(secrets=lambda: (b"old",))
            changed = backend.member(secrets=lambda: (b"new", b"old"))
            late = backend.member(secrets=lambda: (b"old",))
            last = backend.member(secrets=lambda: (b"new",))
            turned = backend.member(secrets=lambda: (b"old", b"new"))
            try:
                await first.start()
                assert first.view.config is not None
                before = first.view.config.proofs
                await changed.start()
                await changed.join(made := record("changed"))
                await until(lambda: getattr(first.view.config, "proofs", before) != before)
                await late.start()  # started again before it was given the new one
                await last.start()  # and one after the old one has ended
                await turned.start()  # by another order: nobody writes the record again and again
                await turned.join(record("turned"))
                now = first.view.config.proofs
                assert len(now) == 2
                await changed.update(record("changed", incarnation=made.incarnation, labels={}))
                assert first.view.config.proofs == now
            finally:
                for member in (first, changed, late, last, turned):
                    await member.close()

        self.run(main())

    def test_a_cluster_without_a_secret_refuses_nodes_with_one(self, backend: Backend) -> None:
        async def main() -> None:
            first, other = backend.member(), backend.member()
            stranger = backend.member(secrets=lambda: (b"a secret of its own",))
            try:
                await first.start()
                await other.start()
                with pytest.raises(ConfigError, match="secret"):
                    await stranger.start()
            finally:
                for member in (first, other, stranger):
                    await member.close()

        self.run(main())

    # ---- namespaces, drains, chores -------------------------------------------------------------------

    def test_namespaces_are_agreed_on(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                wanted = entry(fields="x" * (64 << 10))
                assert await a.register(wanted) == wanted
                assert a.view.namespaces == {("t", wanted.digest): wanted}
                other_wish = msgspec.structs.replace(wanted, settings=NamespaceSettings(replicas=9))
                assert await b.register(other_wish) == wanted
                await until(lambda: b.view.namespaces == {("t", wanted.digest): wanted})
                with pytest.raises(NamespaceMismatch):
                    await b.register(entry(parts=((1, "full", 0, 1),)))

                other = entry(tenant="u", epoch=0)
                assert await b.register(other) == other
                bumped = await b.bump_epoch("t", wanted.digest, 0, fence=False)
                assert (bumped.epoch, bumped.fence) == (1, 0)
                await until(lambda: a.view.namespaces.get(("t", wanted.digest)) == bumped)
                assert await a.register(wanted) == bumped
                assert a.view.namespaces[("u", other.digest)] == other

                again = await a.bump_epoch("t", wanted.digest, 0, fence=True)
                assert again == bumped, "the epoch was not the expected one"
                fenced = await a.bump_epoch("t", wanted.digest, 1, fence=True)
                assert (fenced.epoch, fenced.fence, fenced.generation) == (2, 2, 1)
                changes = SettingsChange(replicas=3, ttl_s=60.0), SettingsChange(write="none")
                for change in changes:
                    last = await b.configure("t", wanted.digest, change)
                kept = NamespaceSettings(replicas=3, write="none", ttl_s=60.0)
                assert last == msgspec.structs.replace(fenced, settings=kept)
                await until(lambda: a.view.namespaces.get(("t", wanted.digest)) == last)
                assert await b.configure("t", wanted.digest, SettingsChange()) == last
                with pytest.raises(InvalidRequest):
                    await a.bump_epoch("t", "ff" * 16, 0, fence=False)
                with pytest.raises(InvalidRequest):
                    await a.configure("nobody", wanted.digest, SettingsChange(replicas=2))

        self.run(main())

    def test_of_many_resets_at_a_time_one_does(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 3) as members:
                wanted = entry()
                await members[0].register(wanted)
                calls = [m.bump_epoch("t", wanted.digest, 0, fence=True) for m in members * 3]
                for change in (SettingsChange(replicas=2), SettingsChange(ssd_codec="blosc2")):
                    calls += [m.configure("t", wanted.digest, change) for m in members]
                for found in (await asyncio.gather(*calls))[:9]:
                    assert found.epoch == 1
                both = NamespaceSettings(replicas=2, ssd_codec="blosc2")
                last = msgspec.structs.replace(
                    wanted, epoch=1, fence=1, generation=1, settings=both
                )
                for member in members:
                    where = ("t", wanted.digest)
                    await until(lambda m=member, w=where: m.view.namespaces.get(w) == last)  # type: ignore[misc]

        self.run(main())

    def test_a_namespace_that_was_deleted_begins_after_its_former_epochs(
        self, backend: Backend
    ) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                there = await a.register(entry("11" * 16))
                await a.register(entry())
                for expected in range(3):
                    last = await a.bump_epoch("t", entry().digest, expected, fence=expected == 1)
                assert (last.epoch, last.fence, last.generation) == (3, 2, 1)
                later = 1 + GENERATIONS_APART
                assert not await b.delete_unused("t", "ff" * 16, 0), "there is none"

                await asyncio.gather(a.count_hour(0), b.count_hour(0))
                await until(lambda: a.view.clock == b.view.clock == NamespaceClock(1))
                await b.count_hour(0)
                assert b.view.clock.hours == 1, "it had been counted"
                await b.use("t", last.digest)
                await until(lambda: a.view.namespaces["t", last.digest].used == 1)
                assert not await a.delete_unused("t", last.digest, 0), "it was used since"
                assert await a.delete_unused("t", last.digest, 1)
                assert ("t", last.digest) not in a.view.namespaces
                await until(lambda: b.view.clock == a.view.clock == NamespaceClock(1, 4, later))
                assert a.view.namespaces == b.view.namespaces == {("t", there.digest): there}
                assert not await b.delete_unused("t", last.digest, 1), "once is enough"
                for wrong in (
                    b.use("t", last.digest),
                    b.bump_epoch("t", last.digest, 3, fence=False),
                ):
                    with pytest.raises(InvalidRequest):
                        await wrong

                # Known to a node that was away, in the epoch and with the weights of that time.
                again = await b.register(entry(epoch=3, fence=2, generation=1))
                assert again == entry(epoch=4, fence=4, generation=later, used=1)
                new = await a.register(entry("22" * 16))
                assert new == entry("22" * 16, epoch=4, fence=4, generation=later, used=1)
                assert await b.register(entry("11" * 16)) == there, "others stay as they are"
                await until(lambda: a.view.namespaces == b.view.namespaces)
                assert len(a.view.namespaces) == 3

        self.run(main())

    def test_whoever_registers_a_namespace_again_after_a_day_uses_it(
        self, backend: Backend
    ) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                await a.register(entry())
                for hour in range(NOTE_HOURS - 1):
                    await a.count_hour(hour)
                assert (await a.register(entry())).used == 0, "not each time"
                await a.count_hour(NOTE_HOURS - 1)
                await until(lambda: b.view.clock.hours == NOTE_HOURS)
                assert (await b.register(entry())).used == NOTE_HOURS
                assert not await a.delete_unused("t", entry().digest, 0)

        self.run(main())

    def test_a_namespace_is_used_or_deleted_but_not_both(self, backend: Backend) -> None:
        """Whichever comes first: it is used and stays, or it begins anew."""

        async def main() -> None:
            async with self._members(backend, 3) as members:
                a, b, c = members
                deleted = 0
                for hour in range(8):
                    before = await a.register(entry())
                    await a.count_hour(hour)
                    await until(lambda h=hour: all(m.view.clock.hours > h for m in members))  # type: ignore[misc]
                    used, gone, stored = await asyncio.gather(
                        b.use("t", before.digest),
                        a.delete_unused("t", before.digest, before.used),
                        c.register(entry()),
                        return_exceptions=True,
                    )
                    assert isinstance(gone, bool), gone
                    assert isinstance(stored, NamespaceEntry), stored
                    deleted += gone
                    if gone:
                        assert a.view.clock.first_epoch > before.epoch
                        assert stored == before or stored.epoch > before.epoch
                        if isinstance(used, NamespaceEntry):
                            assert stored.epoch > before.epoch, "the new one was used"
                        else:
                            assert isinstance(used, InvalidRequest), used
                    else:
                        assert isinstance(used, NamespaceEntry), used
                        assert stored.epoch == before.epoch
                    assert a.view.clock.first_epoch >= deleted

        self.run(main())

    def test_drains_are_wished_for_and_end_with_a_restart(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                await a.join(record("a"))
                for _ in range(2):
                    await b.set_drain("a", wanted=True)
                    assert b.view.drains == {"a"}
                await until(lambda: a.view.drains == {"a"})
                await backend.expire("a")
                await until(lambda: standing(a) is Standing.LOST)
                await a.join(record("a"))
                async with self._members(backend, 1) as (fresh,):
                    assert fresh.view.drains == {"a"}, "only a restart ends it, not a lost lease"
                for _ in range(2):
                    await a.set_drain("a", wanted=False)
                    assert a.view.drains == frozenset()
                await until(lambda: b.view.drains == frozenset())
                await b.set_drain("a", wanted=True)
                await until(lambda: a.view.drains == {"a"})
                await a.close()
                async with self._members(backend, 1) as (restarted,):
                    assert restarted.view.drains == {"a"}
                    await restarted.join(record("a"))
                    assert restarted.view.drains == frozenset()
                    await until(lambda: b.view.drains == frozenset())

        self.run(main())

    def test_a_chore_has_one_leader_and_then_the_next(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 4) as (a, b, c, outsider):
                nodes = {"a": a, "b": b, "c": c}
                for name, member in nodes.items():
                    await member.join(record(name))

                async def leaders(chore: str) -> list[str]:
                    said = await asyncio.gather(*[m.lead(chore) for m in nodes.values()])
                    return [name for name, leads in zip(nodes, said, strict=True) if leads]

                first = await leaders("sweep")
                assert len(first) == 1
                assert await leaders("sweep") == first, "and it stays so"
                assert not await outsider.lead("sweep")
                assert not await outsider.lead("other"), "only members lead"
                await backend.expire(first[0])
                await until(lambda: standing(nodes[first[0]]) is Standing.LOST)
                second: list[str] = []
                deadline = time.monotonic() + PATIENCE_S
                while not second and time.monotonic() < deadline:
                    second = await leaders("sweep")
                    await asyncio.sleep(0.05)
                assert len(second) == 1
                assert second != first

        self.run(main())

    # ---- the backend is away --------------------------------------------------------------------------

    def test_while_the_backend_is_away_the_view_holds(self, backend: Backend) -> None:
        async def main() -> None:
            async with self._members(backend, 2) as (a, b):
                lost: list[str] = []
                a.on_lost(lambda: lost.append("a"))
                b.on_lost(lambda: lost.append("b"))
                await a.join(first := record("a"))
                await b.join(second := record("b"))
                known = await a.register(entry())
                both = {"a": first, "b": second}
                await until(lambda: a.view.nodes == b.view.nodes == both)
                await until(lambda: b.view.namespaces)

                await backend.go_away()
                await until(lambda: standing(a) is standing(b) is Standing.AWAY)
                assert a.view.nodes == b.view.nodes == both
                refused = await asyncio.gather(
                    a.set_drain("b", wanted=True),
                    b.bump_epoch("t", known.digest, 0, fence=False),
                    b.configure("t", known.digest, SettingsChange(replicas=2)),
                    a.update(msgspec.structs.replace(first, version="2")),
                    a.register(entry("11" * 16)),
                    return_exceptions=True,
                )
                assert [type(error) for error in refused] == [Unavailable] * 5
                assert not await a.lead("chore")
                assert await b.register(known) == known, "what is known goes on"
                assert lost == []
                assert a.view.nodes == b.view.nodes == both

                await backend.come_back()
                await until(lambda: standing(a) is not Standing.AWAY)
                await until(lambda: standing(b) is not Standing.AWAY)
                for member, name in ((a, "a"), (b, "b")):
                    if standing(member) is Standing.LOST:
                        await member.join(record(name))
                await a.set_drain("b", wanted=True)
                await until(lambda: b.view.drains == {"b"})
                # If they were lost and have joined anew, each hears of the other a moment later.
                await until(lambda: set(a.view.nodes) == set(b.view.nodes) == {"a", "b"})

        self.run(main())

    # ---- anything in any order ------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(3))
    def test_all_views_come_to_agree_with_a_plain_model(self, backend: Backend, seed: int) -> None:
        """Random commands, one after the other, through random members."""

        async def main() -> None:
            async with self._members(backend, 3) as members:
                model = Model(random.Random(seed), members)
                for _ in range(8):
                    for _ in range(10):
                        await model.step()
                    for member in members:
                        await until(lambda m=member: model.agrees(m))  # type: ignore[misc]

        self.run(main())


class Model:
    """The expected state of a cluster after the commands; random, through random members."""

    def __init__(self, rng: random.Random, members: Sequence[Membership]) -> None:
        self.nodes: dict[str, NodeRecord] = {}
        self.namespaces: dict[tuple[str, str], NamespaceEntry] = {}
        self.drains: set[str] = set()
        self.clock = NamespaceClock()
        self._rng = rng
        self._members = dict(zip("abcdefgh", members, strict=False))
        self._never_joined = set(self._members)

    def agrees(self, member: Membership) -> bool:
        view = member.view
        return (
            view.nodes == self.nodes
            and view.namespaces == self.namespaces
            and view.drains == self.drains
            and view.clock == self.clock
        )

    async def step(self) -> None:
        commands = [self._join, self._update, self._leave, self._drain]
        commands += [self._register, self._bump, self._configure]
        await self._rng.choice([*commands, self._hour, self._use, self._delete])()

    def _any(self) -> tuple[str, Membership]:
        return self._rng.choice(list(self._members.items()))

    async def _join(self) -> None:
        name, member = self._any()
        if name in self.nodes:
            return
        self.nodes[name] = record(name)
        await member.join(self.nodes[name])
        if name in self._never_joined:
            self._never_joined.discard(name)
            self.drains.discard(name)

    async def _update(self) -> None:
        name, member = self._any()
        if name in self.nodes:
            version = str(self._rng.random())
            self.nodes[name] = msgspec.structs.replace(self.nodes[name], version=version)
            await member.update(self.nodes[name])

    async def _leave(self) -> None:
        name, member = self._any()
        self.nodes.pop(name, None)
        await member.leave()

    async def _drain(self) -> None:
        _, member = self._any()
        node, wanted = self._rng.choice(list(self._members)), self._rng.random() < 0.5
        (self.drains.add if wanted else self.drains.discard)(node)
        await member.set_drain(node, wanted=wanted)

    async def _register(self) -> None:
        _, member = self._any()
        wanted = entry(self._rng.choice(["00", "11"]) * 16)
        clock = self.clock
        new = msgspec.structs.replace(wanted, used=clock.hours)
        if clock.first_epoch:
            new = msgspec.structs.replace(
                new,
                epoch=clock.first_epoch,
                fence=clock.first_epoch,
                generation=clock.first_generation,
            )
        stored = self.namespaces.setdefault(("t", wanted.digest), new)
        assert await member.register(wanted) == stored

    async def _bump(self) -> None:
        _, member = self._any()
        if not self.namespaces:
            return
        key, old = self._rng.choice(list(self.namespaces.items()))
        expected, fence = self._rng.choice([0, 1, 2]), self._rng.random() < 0.5
        if old.epoch == expected:
            at = expected + 1
            self.namespaces[key] = msgspec.structs.replace(
                old,
                epoch=at,
                fence=at if fence else old.fence,
                generation=old.generation + fence,
            )
        assert await member.bump_epoch(*key, expected, fence=fence) == self.namespaces[key]

    async def _hour(self) -> None:
        _, member = self._any()
        hours = self._rng.randint(max(0, self.clock.hours - 1), self.clock.hours)
        if hours == self.clock.hours:
            self.clock = msgspec.structs.replace(self.clock, hours=hours + 1)
        await member.count_hour(hours)

    async def _use(self) -> None:
        _, member = self._any()
        if not self.namespaces:
            return
        key, old = self._rng.choice(list(self.namespaces.items()))
        await until(lambda: member.view.clock == self.clock)
        self.namespaces[key] = msgspec.structs.replace(old, used=self.clock.hours)
        await member.use(*key)

    async def _delete(self) -> None:
        _, member = self._any()
        if not self.namespaces:
            return
        key, old = self._rng.choice(list(self.namespaces.items()))
        used = self._rng.randint(max(0, old.used - 1), old.used)
        if used >= old.used:
            del self.namespaces[key]
            self.clock = msgspec.structs.replace(
                self.clock,
                first_epoch=max(self.clock.first_epoch, old.epoch + 1),
                first_generation=max(
                    self.clock.first_generation, old.generation + GENERATIONS_APART
                ),
            )
        assert await member.delete_unused(*key, used) == (used >= old.used)

    async def _configure(self) -> None:
        _, member = self._any()
        if not self.namespaces:
            return
        key, old = self._rng.choice(list(self.namespaces.items()))
        name, value = self._rng.choice(
            [("replicas", 2), ("replicas", 3), ("write", "back"), ("ttl_s", 9.5), ("ssd_codec", "")]
        )
        kept = msgspec.structs.replace(old.settings, **{name: value})
        self.namespaces[key] = msgspec.structs.replace(old, settings=kept)
        change = msgspec.convert({name: value}, SettingsChange)
        assert await member.configure(*key, change) == self.namespaces[key]
