"""Follows between nodes that share one clock, which is a number: who is asked how often, and when blocks come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.daemon.cluster.peer_service import AWAIT_S_MAX, PeerService
from kvpool.daemon.core.blocks import directory_digest
from kvpool.daemon.core.limits import Limits
from kvpool.daemon.core.node import Node
from kvpool.daemon.fetch import prefix_stream as follows
from kvpool.daemon.fetch.fetcher import BlockFetcher
from kvpool.daemon.fetch.ports import LivingNode
from kvpool.daemon.fetch.prefix_stream import PrefixStreams
from kvpool.errors import InvalidRequest, KvpoolError, LimitExceeded, Unavailable
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peers import Peers
from kvpool.storage.eviction import policy_maker
from kvpool.types import PartKind, PartSpec, split_keys
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from tests.contract.suites.memory_tier import MemoryTier, SharedMemoryTier
from tests.sim.simulation.loop import run_alone

NBYTES = 1024
BASE = b"n" * 16
FULL = (PartSpec(NBYTES),)
HYBRID = (PartSpec(NBYTES), PartSpec(NBYTES, PartKind.WINDOW, 2))
RTT_S = 0.001

run = partial(run_alone, steps_max=500_000)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def packed(numbers: Iterable[int]) -> bytes:
    return b"".join(map(key, numbers))


def told(masks: bytes) -> bytes:
    """The answer with these masks, of one byte each, when no block was given up."""
    return masks + peer_wire.FIRST_DROPPED.pack(len(masks))


def mask_of(numbers: Iterable[int], question: peer_wire.Await) -> bytes:
    there = set(map(key, numbers))
    return bytes(key in there for key in wire_keys(question))


async def promoted(*_: Any) -> None:
    """No block is in a tier below memory."""


def wire_keys(question: peer_wire.Await) -> list[bytes]:
    return [question.keys[at : at + 16] for at in range(0, len(question.keys), 16)]


class ObjectUsage:
    """A node's rules, with one namespace and an engine."""

    def __init__(self, rows: int, parts: tuple[PartSpec, ...], **limits: Any) -> None:
        self.node = Node(make_policy=policy_maker("lru"), limits=Limits(**limits))
        self.tenant = self.node.add_tenant("red", 0, rows * NBYTES, 4 * NBYTES)
        self.holder = self.node.holders.add("red", "engine")
        self.namespace = self.node.namespaces.open(self.tenant, BASE, b"{}", parts)
        self._tickets = 0

    def put(self, numbers: Sequence[int], parts: Sequence[int] = ()) -> None:
        for part in parts or range(len(self.namespace.tables)):
            self._tickets += 1
            keys = packed(numbers)
            self.node.puts.reserve(
                self.holder, self.namespace, part, self._tickets, split_keys(keys)
            )
            rows = len(self.holder.reservations[self._tickets].rows)
            self.node.puts.commit(self.holder, self._tickets, bytes(16) * rows)
        self.node.settle()

    def drop(self, numbers: Sequence[int]) -> None:
        name, now = self.namespace.directory_digest, asyncio.get_running_loop().time()
        self.node.commit_waiters.drop(name, split_keys(packed(numbers)), now)

    def here(self, part: int = 0) -> list[int]:
        self.node.settle()
        return sorted(int.from_bytes(one, "big") for one in self.namespace.tables[part].blocks)


class Owner(ObjectUsage):
    """Another node, whose rules answer as those of a real one; or as a test wants it.

    answer: instead of the rules'. pull_s: for each transfer. asked: every question, and when.
    """

    def __init__(self, world: World, name: str, parts: tuple[PartSpec, ...], **limits: Any) -> None:
        super().__init__(400, parts, **limits)
        self.world = world
        self.name = name
        self.answer: Any = None
        self.pull_s = RTT_S
        self.hangs = asyncio.Event()  # set: it has been stopped
        self.asked: list[tuple[float, peer_wire.Await]] = []
        self.waiting = 0
        self.most_waiting = 0
        nothing: Any = SimpleNamespace(lies_below=lambda *_: False)
        self.serves = True
        self.lender = PeerService(
            self.node, nothing, promoted, world.clock, stores=lambda: self.serves
        )

    async def ask(self, question: peer_wire.Await) -> frame.Bytes:
        self.asked.append((self.world.clock(), question))
        self.waiting += 1
        self.most_waiting = max(self.waiting, self.most_waiting)
        try:
            if self.answer is not None:
                return await self.answer(question)
            return await self.lender.answer_later(question)
        finally:
            self.waiting -= 1


class World:
    """A node that follows, and owners: the ports of `BlockFetcher` and `PrefixStreams`."""

    def __init__(
        self,
        *,
        rows: int = 400,
        parts: tuple[PartSpec, ...] = FULL,
        directory: bool = True,
    ) -> None:
        self.clock = asyncio.get_running_loop().time
        self.parts = parts
        self.owners: dict[bytes, Owner] = {}
        self.living: dict[bytes, LivingNode] = {}
        self.directory: Any = self if directory else None
        self.told: dict[bytes, set[bytes]] = {}  # by the directory: block → incarnations
        self.looks: list[float] = []
        self.pulls = 0
        self.peers = Peers({}, random.Random(5))
        self.books = ObjectUsage(rows, parts)
        nothing, objects = MemoryTier({}, 0), SharedMemoryTier({}, 0)
        self.fetcher = BlockFetcher(
            self.books.node, self, self, [nothing], objects, self.peers, self.clock
        )
        self.follows = PrefixStreams(self.books.node, self.fetcher, self, self, self.clock, "me")

    def owner(self, name: str, **limits: Any) -> Owner:
        owner = Owner(self, name, self.parts, **limits)
        incarnation = name.encode() * 8
        self.owners[incarnation] = owner
        record: Any = SimpleNamespace(node=name)
        self.living[incarnation] = LivingNode(record, name)
        return owner

    def tell(self, owner: Owner, numbers: Iterable[int]) -> None:
        """The directory hears of it."""
        for number in numbers:
            self.told.setdefault(key(number), set()).add(owner.name.encode() * 8)

    async def follow(self, n: int, wait_s: float = 10.0, source: str = "") -> int:
        return await self.follows.follow(
            self.books.namespace, [], split_keys(packed(range(n))), wait_s, source
        )

    @property
    def leases(self) -> int:
        return self.books.node.leases.count

    async def until_here(self, n: int) -> float:
        """When the first n blocks are here."""
        while self.books.here()[:n] != list(range(n)):  # noqa: ASYNC110  # no event of ours is set
            await asyncio.sleep(0.0005)
        return self.clock()

    # ---- the ports

    def met(self, *_: Any) -> None:
        """An entry of somebody who does not live."""

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        self.looks.append(self.clock())
        await asyncio.sleep(RTT_S)
        mask = (1 << parts) - 1
        return [
            [Entry(one, TIERS["dram"], mask) for one in sorted(self.told.get(key, ()))]
            for key in keys
        ]

    def _at(self, url: str) -> Owner:
        return next(owner for owner in self.owners.values() if owner.name == url)

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes:
        owner, question = self._at(order.url), order.question
        assert isinstance(question, peer_wire.Await)
        try:
            async with asyncio.timeout(order.deadline_s):
                await asyncio.sleep(RTT_S)
                if owner.hangs.is_set():
                    await asyncio.sleep(1000)
                return await owner.ask(question)
        except TimeoutError:
            raise Unavailable("the peer did not answer in time") from None

    async def pull(self, order: worker_wire.PullBlocks) -> worker_wire.Pulled:
        owner = self._at(order.url)
        self.pulls += 1
        try:
            async with asyncio.timeout(order.deadline_s):
                await asyncio.sleep(owner.pull_s)
                if owner.hangs.is_set():
                    await asyncio.sleep(1000)
        except TimeoutError:
            count = order.count
            return worker_wire.Pulled(
                b"\3" * count, bytes(16 * count), order.deadline_s, "not in time"
            )
        owner.node.settle()
        status = bytes(
            part.keys[at : at + 16] in owner.namespace.tables[part.part].blocks
            for part in order.parts
            for at in range(0, len(part.keys), 16)
        )
        return worker_wire.Pulled(status, bytes(16 * len(status)), owner.pull_s)


def scenario(test: Any) -> Any:
    """Run a coroutine function in virtual time."""

    def run_it() -> None:
        run(test())

    run_it.__name__ = test.__name__
    run_it.__doc__ = test.__doc__
    return run_it


async def let_go() -> None:
    """What has arrived is kept for a few turns of the loop, for those who wait for it."""
    for _ in range(4):
        await asyncio.sleep(0)


async def gathered(world: World, work: Coroutine[Any, Any, int]) -> int:
    """Its result, once it has let go of everything."""
    found = await work
    await world.follows.close()
    await let_go()
    assert world.leases == 0
    assert len(world.books.node.commit_waiters) == 0
    assert world.follows.stats().under_way == 0
    return found


def begin(world: World, *args: Any, **settings: Any) -> asyncio.Task[int]:
    work = gathered(world, world.follow(*args, **settings))
    return asyncio.get_running_loop().create_task(work)


@scenario
async def test_each_block_is_here_a_moment_after_its_commit() -> None:
    world = World()
    owner = world.owner("a")
    following = begin(world, 10, source="a")
    for n in range(10):
        await asyncio.sleep(0.7)
        owner.put([n])
        committed = world.clock()
        assert await world.until_here(n + 1) - committed < 5 * RTT_S
    assert await following == 10
    assert owner.most_waiting == 1, "one question at a time"
    assert len(owner.asked) <= 12
    assert len(world.looks) <= 2, "nobody else is looked for"


@scenario
async def test_a_prompt_that_nobody_knows_of_yet() -> None:
    """No node is named: the directory is asked in short pauses at first, then in longer ones."""
    world = World()
    owner = world.owner("a")
    following = begin(world, 4)
    await asyncio.sleep(5.0)
    assert 25 <= len(world.looks) <= 40
    assert not owner.asked
    for n in range(4):
        owner.put([n])
        world.tell(owner, [n])
        await asyncio.sleep(0.5)
    assert world.books.here() == [0, 1, 2, 3]
    assert await following == 4


@scenario
async def test_transfers_overlap_with_the_next_question() -> None:
    world = World()
    owner = world.owner("a")
    owner.pull_s = 1.0
    began = world.clock()
    following = begin(world, 6, source="a")
    for n in range(6):
        await asyncio.sleep(0.1)
        owner.put([n])
    assert await following == 6
    assert world.clock() - began < 1.8


@scenario
async def test_many_small_commits_become_few_transfers() -> None:
    world = World()
    owner = world.owner("a")
    owner.pull_s = 0.5
    following = begin(world, 200, source="a")
    for n in range(200):
        await asyncio.sleep(0.002)
        owner.put([n])
    assert await following == 200
    assert world.pulls <= 3 * follows.FETCHES_MAX


@scenario
async def test_a_prompt_is_held_by_few_leases_however_it_came() -> None:
    world = World(rows=500)
    owner = world.owner("a")
    following = begin(world, 200, source="a")
    most = 0
    for n in range(199):
        owner.put([n])
        await world.until_here(n + 1)
        most = max(most, world.leases)
    assert 1 < most <= follows.KEPT_MAX + 1
    await asyncio.sleep(RTT_S)
    world.books.put(range(1000, 1600))
    assert world.books.here()[:199] == list(range(199)), "and all of it"
    owner.put([199])
    assert await following == 200


@scenario
async def test_an_owner_that_tells_of_what_it_does_not_have_is_asked_now_and_then() -> None:
    world = World()
    liar = world.owner("a")

    async def lie(question: peer_wire.Await) -> frame.Bytes:
        return frame.Bytes(told(b"\1" * len(question.known)))

    liar.answer = lie
    began = world.clock()
    assert await begin(world, 5, wait_s=6.0, source="a") == 0
    assert world.clock() - began == pytest.approx(6.0)
    assert len(liar.asked) < 60
    assert world.pulls < 20, "what it was found to lack is remembered for a while"


@pytest.mark.parametrize("kind", ["at once", "refuses", "wrong masks", "limit"])
def test_an_owner_that_does_not_wait_is_asked_now_and_then(kind: str) -> None:
    async def main() -> None:
        world = World()
        owner = world.owner("a")

        async def answer(question: peer_wire.Await) -> frame.Bytes:
            if kind == "refuses":
                raise Unavailable("no member")
            if kind == "limit" and question.wait_s:
                raise LimitExceeded("too many")
            if kind == "limit":
                return frame.Bytes(told(mask_of(owner.here(), question)))
            return frame.Bytes(told(bytes(len(question.known) + (kind == "wrong masks"))))

        owner.answer = answer
        following = begin(world, 5, wait_s=4.0, source="a")
        await asyncio.sleep(3.0)
        owner.put(range(5))
        found = await following
        assert found == (5 if kind == "limit" else 0)
        assert len(owner.asked) < 45

    run(main())


@scenario
async def test_an_owner_that_is_silent_is_given_up_and_another_one_found() -> None:
    world = World()
    first, second = world.owner("a"), world.owner("b")
    following = begin(world, 6, source="a")
    first.put([0, 1])
    await world.until_here(2)
    first.hangs.set()
    lost_at = world.clock()
    second.put(range(4))
    world.tell(second, range(4))
    assert await world.until_here(4) - lost_at < 2.0
    second.put([4, 5])
    put_at = world.clock()
    assert await world.until_here(6) - put_at < 5 * RTT_S, "now it is asked"
    assert await following == 6


@scenario
async def test_a_transfer_that_hangs_is_given_up_too() -> None:
    """Nobody else had the block when it began."""
    world = World()
    first, second = world.owner("a"), world.owner("b")
    first.pull_s = 1000.0
    first.put([0])
    following = begin(world, 3, wait_s=20.0, source="a")
    await asyncio.sleep(0.5)
    first.hangs.set()
    second.put(range(3))
    world.tell(second, range(3))
    began = world.clock()
    assert await following == 3
    assert world.clock() - began < 6.0


@scenario
async def test_an_owner_that_has_gone_and_come_back_as_another_incarnation() -> None:
    world = World()
    first = world.owner("a")
    following = begin(world, 4, source="a")
    first.put([0, 1])
    await world.until_here(2)
    world.living.clear()
    world.owners.clear()
    await asyncio.sleep(1.0)
    again = Owner(world, "a", FULL)
    world.owners[b"A" * 8] = again
    record: Any = SimpleNamespace(node="a")
    world.living[b"A" * 8] = LivingNode(record, "a")
    again.put([2, 3])
    assert await following == 4


@scenario
async def test_without_a_directory_peers_are_asked() -> None:
    world = World(directory=False)
    world.owner("a")
    second = world.owner("b")
    second.put([0])
    following = begin(world, 3)
    await world.until_here(1)
    second.put([1, 2])
    assert await following == 3


@scenario
async def test_a_node_that_is_alone_waits_for_its_own_engines() -> None:
    world = World(directory=False)
    following = begin(world, 3)
    for n in range(3):
        await asyncio.sleep(0.3)
        assert not following.done()
        world.books.put([n])
    put_at = world.clock()
    assert await following == 3
    assert world.clock() == put_at, "not at the next look"


@scenario
async def test_it_ends_at_its_deadline_with_what_has_come() -> None:
    world = World()
    owner = world.owner("a")
    owner.put([0, 1, 3])
    began = world.clock()
    assert await begin(world, 5, wait_s=3.0, source="a") == 2
    assert world.clock() - began == pytest.approx(3.0)
    assert world.books.here() == [0, 1, 3]


@scenario
async def test_it_does_not_wait_for_what_its_writer_has_given_up() -> None:
    """But for what comes before that, although it is committed later, and is on its way for long."""
    world = World()
    owner = world.owner("a")
    following = begin(world, 10, wait_s=60.0, source="a")
    owner.put([0, 1])
    await world.until_here(2)
    owner.drop([6, 5])
    owner.put([8])
    await asyncio.sleep(3.0)
    assert not following.done()
    owner.pull_s = 0.5
    owner.put([2, 3])
    await asyncio.sleep(0.1)
    put_at = world.clock()
    owner.put([4])
    assert await following == 5
    assert world.clock() - put_at < owner.pull_s + 5 * RTT_S
    assert world.follows.stats().whole == 0


@scenario
async def test_a_block_that_is_given_up_while_nobody_asks_for_it() -> None:
    """All that is missing is on its way then: it was asked for a moment later."""
    world = World()
    owner = world.owner("a")
    owner.pull_s = follows.QUESTION_S / 2
    following = begin(world, 2, wait_s=60.0, source="a")
    await asyncio.sleep(0.1)
    owner.put([0])
    await asyncio.sleep(5 * RTT_S)
    owner.drop([1])
    dropped_at = world.clock()
    assert await following == 1
    assert world.clock() - dropped_at < follows.QUESTION_S


@scenario
async def test_a_block_that_is_given_up_although_all_of_it_is_here() -> None:
    """Another engine committed it: it is no news, as often as it is asked for."""
    world = World(parts=HYBRID)
    owner = world.owner("a")
    owner.put([1])
    owner.drop([1])
    now = world.clock()
    asked = question([1, 2], b"\3\0", wait_s=0.5)
    assert (await ask(owner, asked)).data == told(b"\3\0")
    assert world.clock() == pytest.approx(now + 0.5)


@pytest.mark.parametrize("here", [True, False])
def test_a_rank_commits_its_part_of_a_block_that_another_has_given_up(here: bool) -> None:
    """Its commit does not bring the other's part: who asks afterwards need not wait for it."""

    async def main() -> None:
        world = World(parts=(PartSpec(NBYTES), PartSpec(NBYTES)))
        owner = world.books if here else world.owner("a")
        owner.put([0])
        owner.drop([1])
        owner.put([1, 2], parts=[0])
        began = world.clock()
        assert await begin(world, 3, wait_s=60.0, source="" if here else "a") == 1
        assert world.clock() - began < 1.0

        owner.put([1], parts=[1])
        following = begin(world, 3, wait_s=60.0, source="" if here else "a")
        await asyncio.sleep(0.1)
        assert not following.done(), "all of that one is here by now"
        owner.put([2], parts=[1])
        assert await following == 3

    run(main())


@pytest.mark.parametrize("source", ["", "me"])
def test_what_this_nodes_own_engine_has_given_up(source: str) -> None:
    async def main() -> None:
        world = World()
        following = begin(world, 3, wait_s=60.0, source=source)
        await asyncio.sleep(0.5)
        world.books.put([0, 2])
        world.books.drop([1])
        dropped_at = world.clock()
        assert await following == 1
        assert world.clock() == dropped_at

    run(main())


@scenario
async def test_what_another_node_gives_up_still_comes_from_the_one_that_computes_it() -> None:
    world = World()
    owner, other = world.owner("a"), world.owner("b")
    following = begin(world, 3, wait_s=60.0, source="a")
    world.books.drop([2])
    other.drop([2])
    other.put([0, 1])
    world.tell(other, [0, 1])
    await asyncio.sleep(2.5)
    world.books.drop([2])
    await asyncio.sleep(0.5)
    owner.put(range(3))
    assert await following == 3


@scenario
async def test_an_owner_that_names_as_dropped_what_was_not_asked_for() -> None:
    world = World()
    liar = world.owner("a")

    async def lie(question: peer_wire.Await) -> frame.Bytes:
        return frame.Bytes(bytes(len(question.known)) + peer_wire.FIRST_DROPPED.pack(4))

    liar.answer = lie
    assert await begin(world, 3, wait_s=2.0, source="a") == 0
    assert world.follows.stats().questions_failed > 0


@scenario
async def test_windows_are_those_of_the_whole_prompt_and_in_the_end_those_of_what_there_is() -> (
    None
):
    world = World(parts=HYBRID)
    owner = world.owner("a")
    following = begin(world, 10, wait_s=4.0, source="a")
    owner.put(range(6))
    world.tell(owner, range(6))
    await world.until_here(6)
    await asyncio.sleep(2.0)
    assert world.books.here(1) == []
    assert await following == 6
    assert world.books.here(1) == [4, 5]


@scenario
async def test_parts_that_ranks_commit_at_different_times() -> None:
    world = World(parts=(PartSpec(NBYTES), PartSpec(NBYTES)))
    owner = world.owner("a")
    following = begin(world, 4, source="a")
    owner.put(range(4), [1])
    await asyncio.sleep(0.2)
    assert (world.books.here(0), world.books.here(1)) == ([], [0, 1, 2, 3])
    owner.put(range(4), [0])
    assert await following == 4


@scenario
async def test_what_came_stays_until_the_last_has() -> None:
    """Other blocks take up all the memory meanwhile."""
    world = World(rows=40)
    owner = world.owner("a")
    following = begin(world, 12, source="a")
    for at in range(0, 9, 3):
        owner.put(range(at, at + 3))
        await world.until_here(at + 3)
        await asyncio.sleep(RTT_S)
        for n in range(1000 + at * 100, 1000 + at * 100 + 60):
            world.books.put([n])
        assert world.books.here()[: at + 3] == list(range(at + 3))
    owner.put(range(9, 12))
    assert await following == 12


@scenario
async def test_a_prompt_that_is_too_much_to_be_held_holds_nothing() -> None:
    world = World(rows=40)
    owner = world.owner("a")
    following = begin(world, 30, wait_s=1.0, source="a")
    owner.put(range(10))
    await world.until_here(10)
    await let_go()
    assert world.leases == 0
    assert await following == 10
    assert world.follows.stats().not_held == 1


@scenario
async def test_cancelled_it_leaves_nothing_behind() -> None:
    world = World()
    owner = world.owner("a")
    owner.put([0])
    task = asyncio.get_running_loop().create_task(world.follow(5, source="a"))
    await world.until_here(1)
    await asyncio.sleep(0.2)
    assert (owner.waiting, len(owner.node.commit_waiters), world.leases) == (1, 1, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.follows.close()
    assert (owner.waiting, len(owner.node.commit_waiters), world.leases) == (0, 0, 0)
    assert len(world.books.node.commit_waiters) == 0


@scenario
async def test_an_epoch_that_ends_ends_it() -> None:
    world = World()
    world.owner("a")
    following = begin(world, 5, source="a")
    await asyncio.sleep(0.5)
    began = world.clock()
    world.books.node.namespaces.set_epoch(world.books.namespace, 1, 1)
    assert await following == 0
    assert world.clock() == began


@scenario
async def test_so_many_at_a_time_and_what_is_no_time() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    most = follows.FOLLOWS_PER_TENANT_MAX  # all are of one
    tasks = [loop.create_task(world.follow(2, wait_s=1.0)) for _ in range(most)]
    await asyncio.sleep(0.1)
    with pytest.raises(LimitExceeded, match=f"{most} of them"):
        await world.follow(2)
    assert await asyncio.gather(*tasks) == [0] * most
    assert await world.follow(2, wait_s=0.1) == 0
    for wait_s in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidRequest):
            await world.follow(2, wait_s=wait_s)


@scenario
async def test_questions_that_wait_are_so_many_for_each_peer() -> None:
    world = World()
    owner = world.owner("a", waiters_per_peer_max=100)
    tasks = [begin_one(world, first) for first in range(0, 400, 10)]
    await asyncio.sleep(0.5)
    assert len(owner.node.commit_waiters) == follows.QUESTIONS_PER_PEER_MAX
    owner.put(range(0, 400, 10))
    assert await asyncio.gather(*tasks) == [1] * 40


def begin_one(world: World, number: int) -> asyncio.Task[int]:
    work = world.follows.follow(world.books.namespace, [], split_keys(packed([number])), 5.0, "a")
    return asyncio.get_running_loop().create_task(work)


@scenario
async def test_two_follows_of_a_prompt_bring_it_once() -> None:
    world = World()
    owner = world.owner("a")
    both = [asyncio.create_task(world.follow(6, source="a")) for _ in range(2)]
    await asyncio.sleep(0.1)
    owner.put(range(6))
    assert await asyncio.gather(*both) == [6, 6]
    assert world.pulls == 1


@pytest.mark.parametrize("behind", [b"x", bytes(5), bytes(28), bytes(32)])
def test_an_answer_of_what_cannot_be_is_none(behind: bytes) -> None:
    @scenario
    async def run_it() -> None:
        world = World()
        owner = world.owner("a")

        async def answer(asked: peer_wire.Await) -> frame.Bytes:
            return frame.Bytes(bytes(len(asked.known)) + behind)

        owner.answer = answer
        assert await begin(world, 4, wait_s=1.0, source="a") == 0
        stats = world.follows.stats()
        assert stats.questions_failed == stats.questions > 0

    run_it()


# ---- the owner's half


def question(numbers: Sequence[int], known: bytes = b"", wait_s: float = 2.0) -> peer_wire.Await:
    digest = ObjectUsage(4, FULL).namespace.digest
    return peer_wire.Await(
        "peer", "red", digest, packed(numbers), known or bytes(len(numbers)), wait_s
    )


def ask(owner: Owner, wanted: peer_wire.Await) -> asyncio.Task[frame.Bytes]:
    return asyncio.get_running_loop().create_task(owner.lender.answer_later(wanted))


@scenario
async def test_news_is_told_at_once_and_what_is_known_is_no_news() -> None:
    world = World()
    owner, now = world.owner("a"), world.clock()
    owner.put([2])
    assert (await ask(owner, question([1, 2, 3]))).data == told(b"\0\1\0")
    assert world.clock() == now
    answer = ask(owner, question([1, 2, 3], b"\0\1\0"))
    await asyncio.sleep(0.5)
    owner.put([9])
    await asyncio.sleep(0.1)
    assert not answer.done(), "nobody asked for that"
    owner.put([3, 1])
    assert (await answer).data == told(b"\1\1\1"), "all of a batch in one answer"
    assert (await ask(owner, question([1], b"\1", wait_s=1.5))).data == told(b"\1")
    assert world.clock() == pytest.approx(now + 0.6 + 1.5)


@scenario
async def test_a_namespace_that_is_opened_while_a_peer_waits() -> None:
    world = World()
    owner = world.owner("a")
    other = b"o" * 16
    wanted = peer_wire.Await("peer", "red", other, packed([1]), b"\0", 2.0)
    answer = ask(owner, wanted)
    await asyncio.sleep(0.1)
    owner.namespace = owner.node.namespaces.open(owner.tenant, other, b"{}", FULL)
    assert owner.namespace.directory_digest == directory_digest("red", other)
    owner.put([1])
    assert (await answer).data == told(b"\1")


@scenario
async def test_where_nothing_new_can_come_nobody_waits() -> None:
    world = World()
    owner, now = world.owner("a"), world.clock()
    waiting = ask(owner, question([1, 2]))
    await asyncio.sleep(0.1)
    owner.serves = False
    owner.node.commit_waiters.end_peers()
    assert (await waiting).data == told(b"\0\0")
    assert (await ask(owner, question([1, 2]))).data == told(b"\0\0")
    owner.serves = True
    waiting = ask(owner, question([1, 2]))
    await asyncio.sleep(0.1)
    owner.node.namespaces.set_epoch(owner.namespace, 1, 1)
    assert (await waiting).data == told(b"\0\0")
    assert (await ask(owner, question([1, 2]))).data == told(b"\0\0")
    assert world.clock() == pytest.approx(now + 0.2)


@scenario
async def test_limits_and_what_is_no_question() -> None:
    world = World()
    owner = world.owner("a", waiters_max=3, waiters_per_peer_max=2)
    two = [ask(owner, question([1])) for _ in range(2)]
    await asyncio.sleep(0.1)
    with pytest.raises(LimitExceeded, match="node peer"):
        await ask(owner, question([1]))
    assert (await ask(owner, question([1], wait_s=0.0))).data == told(b"\0"), "does not wait"
    for one in two:
        one.cancel()
    await asyncio.gather(*two, return_exceptions=True)
    assert len(owner.node.commit_waiters) == 0
    began = world.clock()
    for wait_s in (-1.0, float("nan")):
        assert (await ask(owner, question([1], wait_s=wait_s))).data == told(b"\0")
    assert world.clock() == began
    await ask(owner, question([1], wait_s=1e9))
    assert world.clock() - began == pytest.approx(AWAIT_S_MAX)
    for wrong in (question([]), question([1], b"\0" * 1000), question(range(2000))):
        with pytest.raises(KvpoolError):
            await ask(owner, wrong)


@scenario
async def test_a_node_that_is_no_member_any_more_answers_nothing() -> None:
    world = World()
    owner = world.owner("a")
    member = True
    nothing: Any = SimpleNamespace()
    lender = PeerService(owner.node, nothing, promoted, world.clock, may_serve=lambda: member)
    waiting = asyncio.get_running_loop().create_task(lender.answer_later(question([1])))
    await asyncio.sleep(0.1)
    member = False
    owner.put([1])
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await lender.answer_later(question([1]))
