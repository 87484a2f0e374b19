"""Requests of routers that schedule as one, while engines fail and leaders come and go: each ends right or clearly,
and nobody's books have anything of it in the end. Messages pass through their encoding.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvpool.router.config import RouterConfig
from kvpool.router.group.leader import LedRouter
from kvpool.router.group.messages import (
    Blamed,
    Computed,
    Failed,
    Message,
    Reaches,
    Served,
    decode,
    encode,
)
from kvpool.router.http.bodies import BadRequest
from kvpool.router.upstream.specs import EngineSpec
from kvpool.scheduler.settings import Settings
from kvpool.scheduler.values import Role
from tests.support.scripted_engines import (
    ERROR,
    FAULTS,
    Bench,
    Client,
    ScriptedUpstream,
    answer_to,
    engine,
)
from tests.support.virtual_time import virtually
from tests.support.waiting import until_async

PREFILL, DECODE = Role.PREFILL, Role.DECODE
SHAPES = [
    (engine("a"), engine("b")),
    (engine("p", PREFILL), engine("q", PREFILL), engine("d", DECODE), engine("e", DECODE)),
    (
        engine("p", PREFILL),
        engine("d", DECODE, follows_max=2),
        engine("e", DECODE, follows_max=2),
        engine("a"),
    ),
]
ROUTERS = 3
CONFIG: dict[str, Any] = {
    "stall_s": 0.02,
    "client_stall_s": 0.5,
    "deadline_s": 1.0,
    "probe_s": 50.0,
    "backoff_s": 50.0,
    "backoff_s_max": 50.0,
    "failures_max": 1000,
}


class Wire:
    """A member's connection to its leader, in memory: a `Leader`."""

    def __init__(self, member: Bench, leader: Bench, name: str) -> None:
        self.alive = True
        self.ident = name
        self._member = member
        self._led = LedRouter(name, leader.books, self._down)

    def send(self, message: Message) -> None:
        if self.alive:
            asyncio.get_running_loop().call_soon(self._up, encode([message]))

    def _up(self, data: bytes) -> None:
        for message in decode(data):
            if self.alive:
                self._led.heard(message)

    def _down(self, message: Message) -> None:
        if self.alive:
            asyncio.get_running_loop().call_soon(self._told, encode([message]))

    def _told(self, data: bytes) -> None:
        for message in decode(data):
            if self.alive:
                self._member.shared.heard(self, message)

    def cut(self) -> None:
        self.alive = False
        self._led.close()


class Routers:
    """The first one leads."""

    def __init__(self, members: Sequence[Bench]) -> None:
        self.members = list(members)
        self.wires: dict[int, Wire] = {}
        self.count = 0
        self.asked: dict[int, list[asyncio.Task[None]]] = {id(each): [] for each in members}
        self.connect()

    def connect(self) -> None:
        """Everybody follows the first one."""
        for member in self.members[1:]:
            self.wires[id(member)] = self.wire(member)
            member.shared.follow(self.wires[id(member)])

    def wire(self, member: Bench) -> Wire:
        self.count += 1
        return Wire(member, self.members[0], f"{self.count}")

    async def lead_dies(self) -> None:
        """With the requests that it was asked for."""
        dead = self.members.pop(0)
        for task in self.asked[id(dead)]:
            task.cancel()
        await asyncio.gather(*self.asked[id(dead)], return_exceptions=True)
        old = dict(self.wires)
        for wire in old.values():
            wire.cut()
        self.members[0].shared.follow(None)
        self.connect()

    async def lead_retires(self) -> None:
        """It ends its own requests."""
        retired, old = self.members.pop(0), dict(self.wires)
        self.members[0].shared.follow(None, leaving=old[id(self.members[0])])
        for member in self.members[1:]:
            wire = self.wire(member)
            self.wires[id(member)] = wire
            member.shared.follow(wire, leaving=old[id(member)])
        await asyncio.gather(*self.asked[id(retired)], return_exceptions=True)
        for wire in old.values():
            wire.cut()

    async def one_is_cut_off(self) -> None:
        """For a moment it schedules itself."""
        member = self.members[-1]
        if member is not self.members[0]:
            self.wires[id(member)].cut()
            member.shared.follow(None)
            await asyncio.sleep(0)
            self.wires[id(member)] = wire = self.wire(member)
            member.shared.follow(wire)


async def rejection(work: Awaitable[None]) -> BadRequest | None:
    try:
        await work
    except BadRequest as error:
        return error
    return None


async def one(bench: Bench, body: dict[str, Any]) -> None:
    client = Client()
    if (rejected := await rejection(bench.serving.serve(bench.incoming(body), client))) is not None:
        assert rejected.status in {502, 503, 504}, rejected
        assert not client.begun
        return
    assert client.ended
    if client.status in {400, 500}:
        assert client.data == (ERROR if client.status == 500 else b'{"error":"no"}')
    elif client.data != answer_to(body):
        assert body["stream"]
        before = client.data[: client.data.index(b'data: {"error"')]
        assert answer_to(body).startswith(before)


CHANGES = ("lead_dies", "lead_retires", "one_is_cut_off")


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    faults=st.lists(
        st.lists(st.sampled_from(["", "", *FAULTS]), max_size=4), min_size=4, max_size=4
    ),
    wanted=st.lists(
        st.tuples(st.booleans(), st.integers(0, 100), st.integers(0, ROUTERS - 1)),
        min_size=1,
        max_size=8,
    ),
    changes=st.lists(
        st.tuples(st.sampled_from(CHANGES), st.integers(0, 30)), min_size=1, max_size=4
    ),
    segment_s=st.sampled_from([0.0, 0.001]),
)
def test_each_request_ends_right_or_clearly(
    shape: tuple[EngineSpec, ...],
    faults: list[list[str]],
    wanted: list[tuple[bool, int, int]],
    changes: list[tuple[str, int]],
    segment_s: float,
) -> None:
    async def main() -> None:
        upstream = ScriptedUpstream()
        upstream.faults = {s.name: deque(f) for s, f in zip(shape, faults, strict=False)}
        rule = Settings(retries_max=2, segment_s=segment_s)
        async with AsyncExitStack() as stack:
            members = [
                await stack.enter_async_context(
                    Bench(shape, RouterConfig(**CONFIG), rule, upstream)
                )
                for _ in range(ROUTERS)
            ]
            routers = Routers(members)
            tasks = []
            for seed, (streams, length, member) in enumerate(wanted):
                body = {"prompt": "x" * length, "stream": streams, "seed": seed}
                task = asyncio.create_task(one(members[member], body))
                routers.asked[id(members[member])].append(task)
                tasks.append(task)
            for change, after in changes:
                for _ in range(after):
                    await asyncio.sleep(0)
                if len(routers.members) > 1:
                    await getattr(routers, change)()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                    raise outcome
            for _ in range(4):  # the last messages
                await asyncio.sleep(0)
            assert [bench.left() for bench in routers.members] == [{}] * len(routers.members)

    virtually(main)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("held", "calls"), [("p", 1), ("d", 4)])
def test_what_engines_compute_when_the_leader_dies_is_not_computed_again(
    held: str, calls: int, stream: bool
) -> None:
    async def main() -> None:
        upstream = ScriptedUpstream()
        shape = engine("p", PREFILL), engine("d", DECODE)
        async with AsyncExitStack() as stack:
            members = [
                await stack.enter_async_context(
                    Bench(shape, RouterConfig(**CONFIG), Settings(), upstream)
                )
                for _ in range(ROUTERS)
            ]
            routers = Routers(members)
            upstream.hold[held] = asyncio.Event()
            body = {"prompt": "x" * 90, "stream": stream}
            tasks = [asyncio.create_task(one(member, body)) for member in members[1:]]
            await until_async(lambda: len(upstream.seen) >= calls)
            await routers.lead_dies()
            upstream.hold[held].set()
            await asyncio.gather(*tasks)
            assert sorted(seen.engine for seen in upstream.seen) == ["d", "d", "p", "p"]
            new = routers.members[0].scheduler
            assert not new.waiting and not new.parked

    virtually(main)


async def three(
    stack: AsyncExitStack, upstream: ScriptedUpstream, *shape: EngineSpec, **settings: Any
) -> Routers:
    patient = {"stall_s": 20.0, "deadline_s": 20.0}
    config = RouterConfig(**CONFIG | patient | settings)
    members = [
        await stack.enter_async_context(Bench(shape, config, Settings(), upstream))
        for _ in range(ROUTERS)
    ]
    return Routers(members)


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ({"user": "u" * 9000}, {}),
        ({"max_tokens": 1 << 70}, {}),
        ({}, {"session": "\udcff"}),
        ({}, {"session": "s" * 9000}),
    ],
)
def test_no_client_can_say_what_another_router_does_not_take(
    body: dict[str, Any], more: dict[str, Any]
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            routers = await three(stack, ScriptedUpstream(), engine("a"))
            member, client = routers.members[1], Client()
            asked = {"prompt": "x" * 90} | body
            await member.serving.serve(member.incoming(asked, **more), client)
            assert client.data == answer_to(asked)

    virtually(main)


def test_a_leader_orders_what_the_other_router_reaches() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            upstream = ScriptedUpstream()
            routers = await three(stack, upstream, *map(engine, "abcd"))
            member = routers.members[1]
            for name in "abc":
                member.health.remove(name)
            routers.wires[id(member)].send(Reaches(["d"]))
            for seed in range(12):
                await one(member, {"prompt": "x" * 90, "stream": True, "seed": seed})
            assert {seen.engine for seen in upstream.seen} == {"d"}

    virtually(main)


@pytest.mark.parametrize("names", ["a", "ab"])
@pytest.mark.parametrize("decodes", [False, True])
def test_an_engines_error_is_asked_of_another_one_if_a_leader_has_one(
    names: str, decodes: bool
) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            upstream = ScriptedUpstream()
            shape = [engine(name, DECODE if decodes else Role.BOTH) for name in names]
            routers = await three(stack, upstream, *shape, *[engine("p", PREFILL)] * decodes)
            upstream.faults = {name: deque(["error"] * 9) for name in names}
            member, client = routers.members[1], Client()
            await member.serving.serve(member.incoming({"prompt": "x" * 90}), client)
            assert (client.status, client.data) == (500, ERROR)
            assert sorted(s.engine for s in upstream.seen if s.engine != "p") == list(names)
            upstream.faults["a"].clear()
            await one(member, {"prompt": "x" * 90, "stream": True})
            assert all(row["state"] == "serving" for row in routers.members[0].roster.engines())

    virtually(main)


def test_what_serves_other_routers_is_not_blamed_for_single_failures() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            routers = await three(stack, ScriptedUpstream(), engine("a"), failures_max=2)
            leader, member = routers.members[:2]
            wire = routers.wires[id(member)]
            member.roster.served = lambda name: wire.send(Served(name))
            member.roster.blamed = lambda *blamed: wire.send(Blamed(*blamed))
            for number in range(5):
                member.roster.blame(["a"], number)
                await one(member, {"prompt": "x", "stream": True})
                for _ in range(20):  # messages
                    await asyncio.sleep(0)
                assert leader.health.breakers["a"].passes
            leader.health.failed("a", 100)
            for _ in range(3):
                wire.send(Blamed("a", 100))
                await asyncio.sleep(0)
            assert leader.health.breakers["a"].passes, "it is one request"
            wire.send(Blamed("a", 101))
            await until_async(lambda: not leader.health.breakers["a"].passes)

    virtually(main)


@pytest.mark.parametrize("report", ["failed", "computed"])
def test_a_report_of_an_order_that_is_void_concerns_no_other(report: str) -> None:
    """Its engine has left and joined while the report was under way, and has a new order."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            upstream = ScriptedUpstream()
            shape = engine("a")
            routers = await three(stack, upstream, shape)
            leader, member = routers.members[:2]
            wire = routers.wires[id(member)]
            upstream.hold["a"] = asyncio.Event()
            body = {"prompt": "x" * 90, "stream": True}
            task = asyncio.create_task(one(member, body))
            await until_async(lambda: len(upstream.seen) == 1)
            leader.health.remove("a")
            leader.health.add(shape)
            await until_async(lambda: len(upstream.seen) == 2)
            (number,) = member.shared._entries
            assert isinstance(number, int)
            for order in (1, 3):
                if report == "failed":
                    wire.send(Failed(number, "a", False, False, order))
                else:
                    wire.send(Computed(number, "a", False, None, False, None, order))
            for _ in range(20):  # messages
                await asyncio.sleep(0)
            assert leader.scheduler.engines["a"].prefills == 1
            assert len(upstream.seen) == 2
            upstream.hold["a"].set()
            await task
            assert len(upstream.seen) == 2

    virtually(main)


@pytest.mark.parametrize("lost_by", ["the leader that dies", "the next leader"])
def test_a_stream_has_no_second_answer_after_a_takeover(lost_by: str) -> None:
    """Its engine has left at the one router, and answers the other."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            upstream = ScriptedUpstream()
            shape = engine("p", PREFILL), engine("d", DECODE), engine("e", DECODE)
            routers = await three(stack, upstream, *shape)
            leader, member, third = routers.members
            client, body = Client(), {"prompt": "x" * 90, "stream": True}
            client.hold = asyncio.Event()
            task = asyncio.create_task(member.serving.serve(member.incoming(body), client))
            await until_async(lambda: client.begun)
            (seen,) = upstream.open
            if lost_by == "the next leader":
                routers.members = [leader, third, member]
                third.health.remove(seen.engine)
            else:
                leader.health.remove(seen.engine)
            await asyncio.sleep(0)
            await routers.lead_dies()
            await until_async(lambda: not routers.members[0].orders._polls)
            for _ in range(20):  # messages
                await asyncio.sleep(0)
            client.hold.set()
            await task
            assert client.data == answer_to(body)
            assert len(upstream.seen) == 2

    virtually(main)
