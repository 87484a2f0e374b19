"""What goes over NIXL and what over TCP, against a plain model: each block once, the failures counted."""

import asyncio
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kvpool.daemon.nixl import REST_S, REST_S_MAX, NixlPath
from kvpool.errors import KvpoolError, Unavailable
from kvpool.transfer.base import ABSENT, ARRIVED, MISMATCH, MISSING
from kvpool.wire import PullBlocks, Pulled

TCP, NIXL = "tcp://a:1", "nixl://a:2"
NBYTES = 100


def sums_of(keys: bytes, status: bytes) -> bytes:
    """Checksums that name the block: its key, where it has arrived."""
    return b"".join(
        keys[16 * i : 16 * i + 16] if s == ARRIVED else bytes(16) for i, s in enumerate(status)
    )


class Way:
    """One of the two: answers as it is told, and writes down what it was asked."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self.orders: list[PullBlocks] = []
        self.answers: dict[bytes, int] = {}  # by key; ARRIVED unless said
        self.error: KvpoolError | str = ""
        self.takes_s = 0.0

    async def pull(self, order: PullBlocks) -> Pulled:
        self.orders.append(order)
        self.clock.now += self.takes_s
        if isinstance(self.error, KvpoolError):
            raise self.error
        keys = [order.keys[at : at + 16] for at in range(0, len(order.keys), 16)]
        assert len(order.rows) == 4 * len(keys)
        status = bytes(self.answers.get(key, ARRIVED) for key in keys)
        return Pulled(status, sums_of(order.keys, status), self.takes_s, self.error)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Both:
    def __init__(self, url: str = NIXL) -> None:
        self.clock = Clock()
        self.nixl, self.tcp = Way(self.clock), Way(self.clock)
        self.path = NixlPath(self.nixl.pull, self.tcp.pull, {TCP: url}.__getitem__, self.clock)

    def pull(self, count: int = 4, deadline_s: float = 8.0) -> Pulled:
        return asyncio.run(self.path.pull(order(count, deadline_s)))


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def order(count: int, deadline_s: float = 8.0) -> PullBlocks:
    return PullBlocks(
        url=TCP,
        tenant="default",
        digest=b"d" * 16,
        part=0,
        nbytes=NBYTES,
        keys=b"".join(map(key, range(count))),
        segment=0,
        stride=NBYTES,
        rows=array("I", [7 * n + 3 for n in range(count)]).tobytes(),
        deadline_s=deadline_s,
    )


def test_a_peer_without_nixl_is_pulled_from_over_tcp() -> None:
    both = Both(url="")
    assert both.pull().status == bytes([ARRIVED]) * 4
    assert (both.nixl.orders, len(both.tcp.orders)) == ([], 1)
    assert both.path.stats()["pulls"] == both.path.stats()["failed_over"] == 0


def test_nixl_alone_where_it_works() -> None:
    both = Both()
    both.nixl.answers[key(2)] = ABSENT
    pulled = both.pull()
    assert list(pulled.status) == [ARRIVED, ARRIVED, ABSENT, ARRIVED]
    assert both.tcp.orders == []
    (asked,) = both.nixl.orders
    assert (asked.url, asked.deadline_s) == (NIXL, 4.0)
    seen = both.path.stats()
    assert (seen["pulls"], seen["blocks"], seen["bytes"]) == (1, 3, 3 * NBYTES)
    assert (seen["failed_over"], seen["last_error"], seen["resting"]) == (0, "", {})


statuses = st.lists(st.sampled_from([ABSENT, ARRIVED, MISMATCH, MISSING]), min_size=1, max_size=8)


@settings(deadline=None)
@given(
    first=statuses, second=st.data(), error=st.sampled_from(["", "it broke", Unavailable("died")])
)
def test_what_nixl_has_not_brought_right_is_asked_of_tcp_and_nothing_else(
    first: list[int], second: st.DataObject, error: KvpoolError | str
) -> None:
    both = Both()
    if not error:  # then nothing is missing
        first = [ABSENT if status == MISSING else status for status in first]
    both.nixl.answers = {key(n): status for n, status in enumerate(first)}
    both.nixl.error, both.nixl.takes_s = error, 0.5
    if isinstance(error, KvpoolError):
        first = [MISSING] * len(first)
    left = [n for n, status in enumerate(first) if status in {MISMATCH, MISSING}]
    then = {n: second.draw(st.sampled_from([ABSENT, ARRIVED, MISMATCH, MISSING])) for n in left}
    both.tcp.answers = {key(n): status for n, status in then.items()}
    pulled = both.pull(len(first))
    assert list(pulled.status) == [then.get(n, status) for n, status in enumerate(first)]
    assert pulled.checksums == sums_of(order(len(first)).keys, pulled.status)
    assert pulled.error == "", "what TCP says"
    failed = bool(error) or bool(left)
    assert len(both.tcp.orders) == bool(left)
    if left:
        (asked,) = both.tcp.orders
        assert asked.url == TCP
        assert asked.keys == b"".join(map(key, left))
        assert list(array("I", asked.rows)) == [7 * n + 3 for n in left]
        assert asked.deadline_s == 7.5
    seen = both.path.stats()
    assert (seen["failed_over"], seen["failed_over_blocks"]) == (bool(left), len(left))
    assert (NIXL in seen["resting"]) == (NIXL in seen["last_error"]) == failed


def test_a_peer_that_fails_rests_longer_and_longer_and_is_never_given_up() -> None:
    both = Both()
    both.nixl.error = Unavailable("died")
    pauses = []
    for _ in range(12):
        both.pull()  # fails
        begun, tried = both.clock.now, len(both.nixl.orders)
        while True:
            both.clock.now += REST_S / 2
            if NIXL not in both.path.stats()["resting"]:
                break
            both.pull()
        assert len(both.nixl.orders) == tried
        pauses.append(both.clock.now - begun)
    assert pauses[:4] == [REST_S, 2 * REST_S, 4 * REST_S, 8 * REST_S]
    assert pauses[-1] == REST_S_MAX
    assert len(both.nixl.orders) == 12


def test_one_success_and_all_is_forgotten() -> None:
    both = Both()
    both.nixl.error = Unavailable("died")
    for _ in range(3):
        both.pull()
        both.clock.now += REST_S_MAX
    both.nixl.error = ""
    both.pull()
    both.nixl.error = Unavailable("died")
    both.pull()
    both.pull()
    assert both.path.stats()["rested"] == 1
    both.clock.now += REST_S
    asked = len(both.nixl.orders)
    both.pull()
    assert len(both.nixl.orders) == asked + 1


def test_a_path_may_take_as_long_as_its_bytes_are_worth() -> None:
    both = Both()
    large = replace(order(4, 1000.0), nbytes=10**9, stride=10**9)
    for one in (order(4, 1000.0), large):
        asyncio.run(both.path.pull(one))
    assert [o.deadline_s for o in both.nixl.orders] == pytest.approx([5.0, 45.0], abs=0.01)


def test_no_order_goes_to_tcp_when_its_time_is_over() -> None:
    both = Both()
    both.nixl.answers[key(0)] = MISSING
    both.nixl.error, both.nixl.takes_s = "stuck", 9.0
    pulled = both.pull(deadline_s=8.0)
    assert list(pulled.status) == [MISSING, ARRIVED, ARRIVED, ARRIVED]
    assert pulled.error == "stuck"
    assert both.tcp.orders == []


def test_what_nixl_has_brought_is_kept_when_tcp_fails() -> None:
    both = Both()
    both.nixl.answers[key(0)] = MISSING
    both.nixl.error = "it broke"
    both.tcp.error = Unavailable("nobody there")
    pulled = both.pull()
    assert list(pulled.status) == [MISSING, ARRIVED, ARRIVED, ARRIVED]
    assert pulled.error == "nobody there"
