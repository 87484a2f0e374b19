"""What engines hold by their events, whatever comes first, and however engines and epochs end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import Holder, NamespaceState
from kvpool.daemon.core.events import Named
from kvpool.daemon.core.node import Node
from kvpool.daemon.tiers.engine_caches import SLICE_BLOCKS, Engines
from kvpool.errors import ConfigError, InvalidRequest, LimitExceeded
from kvpool.placement.directory.base import TIERS
from kvpool.placement.kv_events.engine_blocks import EngineBlocks
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry.memory_stats import EngineStats
from kvpool.types import PartSpec, split_keys
from kvpool.wire import client as client_wire
from tests.sim.simulation.loop import run_alone

BLOCK = PartSpec(4096)


run = partial(run_alone, steps_max=500_000)


def key(number: int) -> bytes:
    """The first half says nothing of the second, which is what events call the block."""
    return (7 * number + 1).to_bytes(8, "big") + number.to_bytes(8, "big")


def pack(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


class Stream:
    """What follows an engine, in the place of ZeroMQ: the test says what the events said."""

    def __init__(self, endpoint: str, changed: Callable[[], None], fails: str = "") -> None:
        self.endpoint, self.changed, self.fails = endpoint, changed, fails
        self.blocks = EngineBlocks()
        self.engines: dict[str, Stream] = {}
        self.ended = False

    async def run(self) -> None:
        try:
            if self.fails:
                raise ConfigError(self.fails)
            self.engines[self.endpoint] = self
            await asyncio.get_running_loop().create_future()
        finally:
            self.engines.clear()
            self.ended = True

    def stats(self) -> dict[str, Any]:
        blocks = self.blocks
        known = {"connected": True, "age_s": 1.0, "gaps": 0, "unreadable": 0, "more": "unknown"}
        return known | {
            "blocks": len(blocks),
            "complete": blocks.complete,
            "refused_blocks": blocks.refused,
        }

    def stored(self, numbers: Iterable[int], group: int = 0) -> None:
        self.blocks.stored(group, list(numbers))
        self.changed()

    def removed(self, numbers: Iterable[int], group: int = 0) -> None:
        self.blocks.removed(group, list(numbers))
        self.changed()

    def cleared(self) -> None:
        self.blocks.clear(complete=True)
        self.changed()


class Bench:
    """Engines of one node, and a directory that believes what it is told."""

    def __init__(self, parts: int = 1, *, directory: bool = True, **settings: Any) -> None:
        self.node = Node(make_policy=policy_maker("lru"))
        self.tenant = self.node.add_tenant("red", 0, 64 * 4096, 4096)
        self.namespace = self.open("a", parts)
        self.streams: dict[str, Stream] = {}
        self.fails = ""
        self.begun = 0
        self.told: dict[bytes, dict[bytes, int]] = {}
        self.news = 0
        self.directory = directory
        self.engines = Engines(
            DaemonConfig(socket="/s", **settings),
            self.node,
            (self.node.inventory,),
            self.subscribe,
            self.begin,
        )

    def subscribe(
        self, endpoint: str, replay: str, topic: str, changed: Callable[[], None]
    ) -> Stream:
        self.streams[endpoint] = Stream(endpoint, changed, self.fails)
        return self.streams[endpoint]

    def begin(self, tier: int, engines: Engines) -> None:
        assert tier == TIERS["gpu"]
        self.begun += 1
        if self.directory:
            self.engines.follow_changes(self.notify)

    def notify(self) -> None:
        self.news += 1
        asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        for namespace, keys in self.engines.take_changes():
            digest = namespace.directory_digest
            _, masks = self.engines.masks(digest, keys)
            for each, mask in zip(keys, masks or [0] * len(keys), strict=True):
                if mask:
                    self.told.setdefault(digest, {})[each] = mask
                else:
                    self.told.get(digest, {}).pop(each, None)

    def open(self, name: str, parts: int = 1) -> NamespaceState:
        base = name.encode().ljust(16, b".")
        return self.node.namespaces.open(self.tenant, base, b"{}", [BLOCK] * parts)

    def holder(self, name: str = "client") -> Holder:
        return self.node.holders.add("red", "engine", name)

    async def follow(
        self,
        port: int = 1,
        namespace: NamespaceState | None = None,
        holder: Holder | None = None,
        groups: Iterable[int] = (0,),
    ) -> tuple[Stream, Holder]:
        holder = holder or self.holder(f"client-{port}")
        endpoint = f"tcp://127.0.0.1:{port}"
        told = client_wire.FollowEvents(0, endpoint, groups=list(groups))
        assert self.engines.follow(holder, namespace or self.namespace, told)
        await asyncio.sleep(0)
        return self.streams[endpoint], holder

    def saw(self, numbers: Iterable[int], namespace: NamespaceState | None = None) -> None:
        self.engines.saw(Named(namespace or self.namespace, pack(numbers)))

    async def settle(self) -> None:
        await asyncio.sleep(1)

    def held(self, namespace: NamespaceState | None = None) -> dict[int, int]:
        """What the directory has been told, which must be what a walk finds."""
        digest = (namespace or self.namespace).directory_digest
        told = self.told.get(digest, {})
        met: dict[bytes, set[bytes]] = {}
        cursor: int | None = 0
        while cursor is not None:
            groups, cursor = self.engines.walk(cursor, 3)
            for each, keys in groups:
                met.setdefault(each, set()).update(keys)
        assert met.get(digest, set()) == set(told)
        return {int.from_bytes(each[8:], "big"): mask for each, mask in told.items()}

    def followed(self) -> list[EngineStats]:
        return self.engines.stats("red").followed


# ---- events and keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["events", "keys"])
def test_a_block_is_announced_once_event_and_key_are_there(first: str) -> None:
    async def main() -> None:
        bench = Bench()
        stream, _ = await bench.follow()
        steps = [lambda: stream.stored(range(4, 9)), lambda: bench.saw(range(6))]
        for step in steps if first == "events" else reversed(steps):
            assert bench.held() == {}
            step()
            await bench.settle()
        assert bench.held() == {4: 1, 5: 1}
        bench.saw(range(9))
        await bench.settle()
        assert bench.held() == dict.fromkeys(range(4, 9), 1)
        stream.removed([4, 7])
        await bench.settle()
        assert bench.held() == dict.fromkeys([5, 6, 8], 1)
        stream.cleared()
        await bench.settle()
        assert bench.held() == {}
        assert bench.begun == 1
        await bench.engines.close()

    run(main())


def test_the_scheduler_speaks_for_all_ranks() -> None:
    """Two ranks of three groups, in the order of the parts; the engine calls the groups 5, 0 and 5."""

    async def main() -> None:
        bench = Bench(parts=6)
        stream, _ = await bench.follow(groups=[5, 0, 5] * 2)
        bench.saw(range(10))
        stream.stored([1, 2], group=5)
        stream.stored([2, 3], group=0)
        stream.stored([4], group=1)
        await bench.settle()
        assert bench.held() == {1: 0b101101, 2: 0b111111, 3: 0b010010}
        stream.removed([2], group=5)
        await bench.settle()
        assert bench.held() == {1: 0b101101, 2: 0b010010, 3: 0b010010}
        await bench.engines.close()

    run(main())


def test_keys_are_of_the_namespace_in_which_they_were_seen() -> None:
    async def main() -> None:
        bench = Bench()
        other = bench.open("b")
        stream, _ = await bench.follow()
        stream.stored(range(4))
        bench.saw(range(4), other)
        await bench.settle()
        assert bench.held() == bench.held(other) == {}
        second, _ = await bench.follow(2, other)
        second.stored(range(2, 6))
        bench.saw(range(4), other)
        bench.saw([0])
        await bench.settle()
        assert bench.held() == {0: 1}
        assert bench.held(other) == {2: 1, 3: 1}
        await bench.engines.close()

    run(main())


def test_what_the_pool_has_is_known() -> None:
    """A daemon that is new to an engine does not wait until keys are named again."""

    async def main() -> None:
        bench = Bench()
        holder = bench.holder("writer")
        bench.node.puts.reserve(holder, bench.namespace, 0, 1, split_keys(pack(range(8))))
        bench.node.puts.commit(holder, 1, bytes(16 * 8))
        bench.node.puts.reserve(holder, bench.open("b"), 0, 2, split_keys(pack([10])))
        bench.node.puts.commit(holder, 2, bytes(16))
        stream, _ = await bench.follow()
        stream.stored(range(4, 12))
        await bench.settle()
        assert bench.held() == dict.fromkeys(range(4, 8), 1)
        await bench.engines.close()

    run(main())


def test_what_is_held_is_withdrawn_though_its_key_was_forgotten() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines.SEEN_KEYS_MAX = 4
        stream, _ = await bench.follow()
        stream.stored(range(4))
        bench.saw(range(4))
        await bench.settle()
        bench.saw(range(100, 104))
        await bench.settle()
        assert bench.held() == dict.fromkeys(range(4), 1)
        stream.removed([0, 3])
        await bench.settle()
        assert bench.held() == {1: 1, 2: 1}
        await bench.engines.close()

    run(main())


# ---- engines end ---------------------------------------------------------------------------------------


def test_a_block_is_here_while_any_engine_has_it() -> None:
    async def main() -> None:
        bench = Bench()
        one, first = await bench.follow(1)
        two, second = await bench.follow(2)
        bench.saw(range(2000))
        one.stored(range(1500))
        two.stored(range(1000, 2000))
        await bench.settle()
        assert set(bench.held()) == set(range(2000))
        assert bench.engines.subscribes(first)
        bench.engines.forget(first)
        assert not bench.engines.subscribes(first)
        await bench.settle()
        assert one.ended
        assert set(bench.held()) == set(range(1000, 2000))
        bench.engines.forget(second)
        bench.engines.forget(second)
        await bench.settle()
        assert bench.held() == {}
        assert bench.followed() == []
        assert bench.engines.stats("red").seen_keys == 0
        # Another life, of which nothing is known yet.
        three, _ = await bench.follow(1)
        three.stored([5])
        bench.saw([5, 6])
        await bench.settle()
        assert bench.held() == {5: 1}
        assert bench.begun == 1
        await bench.engines.close()
        assert three.ended

    run(main())


def test_one_engine_takes_the_place_of_another_of_the_same_client() -> None:
    async def main() -> None:
        bench = Bench()
        one, holder = await bench.follow(1)
        one.stored([1])
        bench.saw([1, 2])
        await bench.settle()
        two, _ = await bench.follow(2, holder=holder)
        two.stored([2])
        await bench.settle()
        assert bench.held() == {2: 1}
        assert one.ended
        assert not two.ended
        again, _ = await bench.follow(2, holder=holder)  # the client repeats itself
        assert again is two
        await bench.settle()
        assert bench.held() == {2: 1}
        assert not bench.engines.follow(holder, bench.namespace, client_wire.FollowEvents(0, ""))
        await bench.settle()
        assert bench.held() == {}
        assert two.ended
        await bench.engines.close()

    run(main())


def test_an_engine_that_changes_its_namespace_begins_there_with_nothing() -> None:
    async def main() -> None:
        bench = Bench()
        other = bench.open("b")
        stream, holder = await bench.follow()
        stream.stored(range(4))
        for namespace in (bench.namespace, other):
            bench.saw(range(8), namespace)
        await bench.settle()
        assert bench.held() == dict.fromkeys(range(4), 1)
        same, _ = await bench.follow(1, other, holder)
        assert same is stream
        bench.saw(range(8), other)
        await bench.settle()
        assert bench.held() == bench.held(other) == {}
        stream.stored([5])
        await bench.settle()
        assert bench.held() == {}
        assert bench.held(other) == {5: 1}
        await bench.engines.close()

    run(main())


def test_a_walk_goes_on_where_a_namespace_has_ended() -> None:
    async def main() -> None:
        bench = Bench()
        other = bench.open("b")
        holders = []
        for port, namespace in ((1, bench.namespace), (2, other)):
            stream, holder = await bench.follow(port, namespace)
            holders.append(holder)
            stream.stored(range(10))
            bench.saw(range(10), namespace)
        await bench.settle()
        (group,), cursor = bench.engines.walk(0, 4)
        assert group[0] == bench.namespace.directory_digest
        assert cursor is not None
        bench.engines.forget(holders[0])
        await bench.settle()
        met: list[bytes] = []
        while cursor is not None:
            groups, cursor = bench.engines.walk(cursor, 4)
            for digest, keys in groups:
                assert digest == other.directory_digest
                met += keys
        assert sorted(met) == sorted(map(key, range(10)))
        await bench.engines.close()

    run(main())


def test_changes_are_told_of_once_until_they_are_taken() -> None:
    async def main() -> None:
        bench = Bench()
        stream, _ = await bench.follow()
        told: list[int] = []
        bench.engines.follow_changes(lambda: told.append(1))
        bench.saw(range(9))
        for number in range(3):
            stream.stored([number])
            await bench.settle()
        assert len(told) == 1
        taken = [each for _, keys in bench.engines.take_changes() for each in keys]
        assert taken == [key(0), key(1), key(2)]
        stream.removed([1])
        await bench.settle()
        assert len(told) == 2
        await bench.engines.close()

    run(main())


def test_an_address_that_cannot_be_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        bench = Bench()
        bench.fails = "no such device"
        _, holder = await bench.follow()
        await bench.settle()
        (row,) = bench.followed()
        assert row.error == "no such device"
        told = client_wire.FollowEvents(0, "tcp://127.0.0.1:1", groups=[0])
        assert not bench.engines.follow(holder, bench.namespace, told)
        assert not row.connected
        assert "no such device" in caplog.text
        await bench.engines.close()

    run(main())


# ---- epochs --------------------------------------------------------------------------------------------


def next_epoch(bench: Bench, *, fence: bool) -> NamespaceState:
    old = bench.node.namespaces.living(bench.namespace)
    epoch = old.epoch + 1
    living = bench.node.namespaces.set_epoch(old, epoch, epoch if fence else 0)
    bench.engines.enter(living)
    return living


def test_engines_go_on_after_a_clear() -> None:
    async def main() -> None:
        bench = Bench()
        stream, holder = await bench.follow()
        bench.saw(range(1000))
        stream.stored(range(1000))
        await bench.settle()
        between = next_epoch(bench, fence=False)
        living = next_epoch(bench, fence=False)
        # Gone before its turn to be looked at has come, and new in the same moment.
        stream.removed([999])
        bench.saw([2000], living)
        stream.stored([2000])
        await bench.settle()
        assert bench.held(bench.namespace) == bench.held(between) == {}
        assert set(bench.held(living)) == {*range(999), 2000}
        assert not bench.followed()[0].outdated
        # Its client repeats itself: that takes nothing away.
        await bench.follow(1, living, holder)
        await bench.settle()
        assert set(bench.held(living)) == {*range(999), 2000}
        assert bench.engines.masks(bench.namespace.directory_digest, [key(1)]) == (0, [])
        await bench.engines.close()

    run(main())


def test_an_engine_counts_no_more_after_a_fence_until_its_own_reset() -> None:
    async def main() -> None:
        bench = Bench()
        one, first = await bench.follow(1)
        two, _ = await bench.follow(2)
        bench.saw(range(6))
        one.stored([0, 1, 2])
        two.stored([2, 3])
        await bench.settle()
        living = next_epoch(bench, fence=True)
        await bench.settle()
        assert bench.held() == bench.held(living) == {}
        assert [row.outdated for row in bench.followed()] == [True, True]
        # One that opened it before, and says so only now.
        late, _ = await bench.follow(3, bench.namespace)
        late.stored([0])
        bench.saw([0])
        await bench.settle()
        assert bench.held() == bench.held(living) == {}
        assert bench.followed()[2].outdated
        one.stored([4])  # with weights of before
        # Its reset, with an empty cache.
        same, _ = await bench.follow(1, living, first)
        assert same is one
        assert not one.ended
        bench.saw(range(6), living)
        two.stored([1])
        await bench.settle()
        assert bench.held(living) == {}
        one.stored([5])
        await bench.settle()
        assert bench.held(living) == {5: 1}
        assert {row.endpoint: row.outdated for row in bench.followed()} == {
            "tcp://127.0.0.1:1": False,
            "tcp://127.0.0.1:2": True,
            "tcp://127.0.0.1:3": True,
        }
        await bench.engines.close()

    run(main())


# ---- limits --------------------------------------------------------------------------------------------


def test_so_many_engines_and_no_more() -> None:
    async def main() -> None:
        bench = Bench(engines_max=2)
        _, holder = await bench.follow(1)
        await bench.follow(2)
        with pytest.raises(LimitExceeded, match="engines_max"):
            await bench.follow(3)
        await bench.follow(4, holder=holder)  # in the place of the first
        bench.engines.forget(holder)
        await bench.follow(3)
        assert len(bench.followed()) == 2
        await bench.engines.close()

    run(main())


def test_notes_are_bounded() -> None:
    async def main() -> None:
        bench = Bench()
        bench.engines.NOTED_BYTES_MAX = 16 * 1500
        stream, _ = await bench.follow()
        stream.stored(range(3000))
        bench.saw(range(1000))
        bench.saw(range(1000, 2000))
        bench.saw(range(2000, 2500))
        await bench.settle()
        assert set(bench.held()) == {*range(1000), *range(2000, 2500)}
        assert bench.engines.stats("red").dropped_keys == 1000
        bench.saw(range(1000, 2000))
        bench.engines.saw(Named(bench.namespace, b"no keys at all"))
        await bench.settle()
        assert set(bench.held()) == set(range(2500))
        await bench.engines.close()

    run(main())


def test_no_slice_of_the_work_is_long() -> None:
    sizes = []

    class Watched(Engines):
        def _look_again(self, space: Any, keys: Any) -> None:
            sizes.append(len(keys))
            super()._look_again(space, keys)

    async def main() -> None:
        bench = Bench()
        bench.engines.__class__ = Watched
        stream, holder = await bench.follow()
        stream.stored(range(5000))
        bench.saw(range(5000))
        await bench.settle()
        bench.engines.forget(holder)
        await bench.settle()
        assert max(sizes) == SLICE_BLOCKS
        assert sum(sizes) >= 10_000

    run(main())


def test_nothing_piles_up_where_nobody_is_told() -> None:
    async def main() -> None:
        bench = Bench(directory=False)
        stream, _ = await bench.follow()
        stream.stored(range(10))
        bench.saw(range(10))
        await bench.settle()
        assert bench.engines.take_changes() == []
        digest = bench.namespace.directory_digest
        assert bench.engines.masks(digest, [key(1), key(99)]) == (1, [1, 0])
        assert bench.engines.stats("red").known_blocks == 10
        assert bench.engines.stats("blue").followed == []
        await bench.engines.close()

    run(main())


def test_events_can_be_switched_off() -> None:
    bench = Bench()
    engines = Engines(DaemonConfig(socket="/s"), bench.node, (), None, bench.begin)
    told = client_wire.FollowEvents(0, "tcp://127.0.0.1:1", groups=[0])
    assert not engines.follow(bench.holder(), bench.namespace, told)
    assert not bench.begun
    assert engines.stats("red").followed == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "tcp://10.0.0.1:5557"},
        {"endpoint": "tcp://127.0.0.1.example.org:5557"},
        {"endpoint": "tcp://*:5557"},
        {"endpoint": "tcp://127.0.0.1:0"},
        {"endpoint": "tcp://10.0.0.1:1;127.0.0.1:5557"},
        {"endpoint": "ipc://relative"},
        {"endpoint": "ipc:///a\0b"},
        {"endpoint": "ipc:///" + "a" * 256},
        {"endpoint": "inproc://x"},
        {"replay": "tcp://192.168.0.1:5558"},
        {"topic": "t" * 257},
        {"groups": []},
        {"groups": [0, 1]},
        {"groups": [-1]},
        {"groups": [64]},
    ],
)
def test_what_cannot_be_followed_is_refused(wrong: dict[str, Any]) -> None:
    bench = Bench()
    told = {"endpoint": "tcp://127.0.0.1:5557", "groups": [0], **wrong}
    with pytest.raises(InvalidRequest):
        bench.engines.follow(bench.holder(), bench.namespace, client_wire.FollowEvents(0, **told))
    assert bench.followed() == []


# ---- all of it at once ---------------------------------------------------------------------------------

NUMBERS = st.lists(st.integers(0, 11), min_size=1, max_size=5)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.integers(0, 2), NUMBERS),
        st.tuples(st.just("removed"), st.integers(0, 2), NUMBERS),
        st.tuples(st.just("cleared"), st.integers(0, 2), st.just([])),
        st.tuples(st.just("saw"), st.integers(0, 1), NUMBERS),
        st.tuples(st.just("died"), st.integers(0, 2), st.just([])),
        st.tuples(st.just("cleared-by-operator"), st.integers(0, 1), st.just([])),
        st.tuples(st.just("reset"), st.integers(0, 2), st.just([])),
        st.tuples(st.just("settle"), st.just(0), st.just([])),
        st.tuples(st.just("turn"), st.just(0), st.just([])),
    ),
    max_size=40,
)


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_the_directory_ends_up_with_what_engines_have(
    steps: list[tuple[str, int, list[int]]],
) -> None:
    """Three engines in two namespaces. Oracle: plain sets of what each has, and of keys ever named."""

    async def main() -> None:
        bench = Bench()
        namespaces = [bench.namespace, bench.open("b")]
        of = [0, 0, 1]
        holders: list[Holder] = []
        streams: list[Stream] = []
        copies: list[dict[int, int]] = [{}, {}, {}]
        counts = [True] * 3
        seen: list[set[int]] = [set(), set()]
        every = list(namespaces)
        for port, namespace in enumerate(of, 1):
            stream, holder = await bench.follow(port, namespaces[namespace])
            streams.append(stream)
            holders.append(holder)

        def advance(namespace: int, *, fence: bool) -> None:
            old = namespaces[namespace]
            fences = bench.tenant.fences.get(old.base, 0)
            namespaces[namespace] = bench.node.namespaces.set_epoch(
                old, old.epoch + 1, old.epoch + 1 if fence else fences
            )
            bench.engines.enter(namespaces[namespace])
            every.append(namespaces[namespace])

        for kind, which, numbers in steps:
            if kind == "stored":
                for n in numbers:
                    copies[which][n] = copies[which].get(n, 0) + 1
                streams[which].stored(numbers)
            elif kind == "removed":
                for n in numbers:
                    if copies[which].get(n, 0) > 1:
                        copies[which][n] -= 1
                    else:
                        copies[which].pop(n, None)
                streams[which].removed(numbers)
            elif kind == "cleared":
                copies[which] = {}
                streams[which].cleared()
            elif kind == "saw":
                # Keys are forgotten with the last engine of a namespace.
                if any(counts[i] for i in range(3) if of[i] == which):
                    seen[which] |= set(numbers)
                bench.saw(numbers, namespaces[which])
            elif kind == "cleared-by-operator":
                advance(which, fence=False)
            elif kind == "settle":
                await bench.settle()
            elif kind == "turn":
                await asyncio.sleep(0)
            elif kind == "died":
                bench.engines.forget(holders[which])
                await bench.settle()
                copies[which] = {}
                counts[which] = False
                namespace = of[which]
                if not any(counts[i] for i in range(3) if of[i] == namespace):
                    seen[namespace] = set()
                streams[which], holders[which] = await bench.follow(
                    which + 1, namespaces[namespace]
                )
                counts[which] = True
            else:
                namespace = of[which]
                await bench.settle()
                advance(namespace, fence=True)
                for i in range(3):
                    if of[i] == namespace:
                        counts[i] = False
                await bench.settle()
                seen[namespace] = set()
                copies[which] = {}
                await bench.follow(which + 1, namespaces[namespace], holders[which])
                counts[which] = True
        await bench.settle()
        for state in every:
            expected: dict[int, int] = {}
            if state in namespaces:
                number = namespaces.index(state)
                for i in range(3):
                    if of[i] == number and counts[i]:
                        expected |= {n: 1 for n in copies[i] if n in seen[number]}
            assert bench.held(state) == expected
        await bench.engines.close()

    run(main())
