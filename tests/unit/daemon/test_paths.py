"""What goes by which way, against plain models: each block once, the failures counted, the faster way found."""

import asyncio
import random
from array import array
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kvpool.daemon.workers.paths import (
    EXPLORE_EVERY,
    EXPLORE_EVERY_MAX,
    LEARN_BYTES,
    PEERS_MAX,
    REST_S,
    REST_S_MAX,
    TRIES_MAX,
    Paths,
)
from kvpool.errors import (
    ConfigError,
    Declined,
    InvalidRequest,
    KvpoolError,
    LimitExceeded,
    NamespaceMismatch,
    Unavailable,
)
from kvpool.placement.nic_pairs import Route, Way
from kvpool.types import BlockStatus
from kvpool.wire.frame import Done
from kvpool.wire.peer import Ask, Await
from kvpool.wire.worker import AskPeer, PartRows, PullBlocks, Pulled

TCP, NIXL = "tcp://a:1", "nixl://a:2"
NBYTES = 100


def sums_of(keys: bytes, status: bytes) -> bytes:
    """Checksums that name the block: its key, where it has arrived."""
    return b"".join(
        keys[16 * i : 16 * i + 16] if s == BlockStatus.PRESENT else bytes(16)
        for i, s in enumerate(status)
    )


class PeerTransport:
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
        wanted = keys_of(order)
        keys = [wanted[at : at + 16] for at in range(0, len(wanted), 16)]
        assert order.count == len(keys)
        status = bytes(self.answers.get(key, BlockStatus.PRESENT) for key in keys)
        return Pulled(status, sums_of(wanted, status), self.takes_s, self.error)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class AsListed(random.Random):
    """Ties stand as records list them."""

    def random(self) -> float:
        return 0.0


class Both:
    def __init__(self, *, nixl: bool = True) -> None:
        self.clock = Clock()
        self.nixl, self.tcp = PeerTransport(self.clock), PeerTransport(self.clock)
        ways = (Way(NIXL, 0), Way(TCP, 0)) if nixl else (Way(TCP, 0),)
        self.path = Paths(
            {"nixl": self.nixl.pull, "tcp": self.tcp.pull},
            nobody_asks,
            {TCP: Route("a", ways)}.get,
            self.clock,
            AsListed(),
        )

    def pull(self, count: int = 4, deadline_s: float = 8.0) -> Pulled:
        return asyncio.run(self.path.pull(order(count, deadline_s)))


async def nobody_asks(_: AskPeer) -> Done:
    raise AssertionError


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def order(count: int, deadline_s: float = 8.0, nbytes: int = NBYTES) -> PullBlocks:
    """Blocks of two parts: the first third of them, and the rest."""
    first, rows = count // 3, array("I", [7 * n + 3 for n in range(count)])
    return PullBlocks(
        url=TCP,
        tenant="default",
        digest=b"d" * 16,
        segment=0,
        parts=[
            PartRows(
                part,
                nbytes,
                nbytes,
                b"".join(map(key, numbers)),
                rows[numbers.start : numbers.stop].tobytes(),
            )
            for part, numbers in enumerate((range(first), range(first, count)))
            if numbers
        ],
        deadline_s=deadline_s,
    )


def keys_of(order: PullBlocks) -> bytes:
    return b"".join(part.keys for part in order.parts)


def rows_of(order: PullBlocks) -> list[int]:
    return list(array("I", b"".join(part.rows for part in order.parts)))


def test_a_peer_without_nixl_is_pulled_from_over_tcp() -> None:
    both = Both(nixl=False)
    assert both.pull().status == bytes([BlockStatus.PRESENT]) * 4
    assert (both.nixl.orders, len(both.tcp.orders)) == ([], 1)
    seen = both.path.nixl_stats()
    assert seen.pulls == seen.failed_over == seen.slower == seen.rested == 0


def test_nixl_alone_where_it_works() -> None:
    both = Both()
    both.nixl.answers[key(2)] = BlockStatus.ABSENT
    pulled = both.pull()
    assert list(pulled.status) == [
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
        BlockStatus.ABSENT,
        BlockStatus.PRESENT,
    ]
    assert both.tcp.orders == []
    (asked,) = both.nixl.orders
    assert (asked.url, asked.deadline_s) == (NIXL, 4.0)
    seen = both.path.nixl_stats()
    assert (seen.pulls, seen.blocks, seen.bytes) == (1, 3, 3 * NBYTES)
    assert (seen.failed_over, seen.last_error, seen.resting) == (0, "", {})


statuses = st.lists(
    st.sampled_from(
        [BlockStatus.ABSENT, BlockStatus.PRESENT, BlockStatus.MISMATCH, BlockStatus.LATE]
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(
    first=statuses, second=st.data(), error=st.sampled_from(["", "it broke", Unavailable("died")])
)
def test_what_nixl_has_not_brought_right_is_asked_of_tcp_and_nothing_else(
    first: list[int], second: st.DataObject, error: KvpoolError | str
) -> None:
    both = Both()
    if not error:  # then nothing is missing
        first = [BlockStatus.ABSENT if status == BlockStatus.LATE else status for status in first]
    both.nixl.answers = {key(n): status for n, status in enumerate(first)}
    both.nixl.error, both.nixl.takes_s = error, 0.5
    if isinstance(error, KvpoolError):
        first = [BlockStatus.LATE] * len(first)
    left = [
        n for n, status in enumerate(first) if status in {BlockStatus.MISMATCH, BlockStatus.LATE}
    ]
    then = {
        n: second.draw(
            st.sampled_from(
                [BlockStatus.ABSENT, BlockStatus.PRESENT, BlockStatus.MISMATCH, BlockStatus.LATE]
            )
        )
        for n in left
    }
    both.tcp.answers = {key(n): status for n, status in then.items()}
    pulled = both.pull(len(first))
    assert list(pulled.status) == [then.get(n, status) for n, status in enumerate(first)]
    assert pulled.checksums == sums_of(keys_of(order(len(first))), pulled.status)
    assert pulled.error == "", "what TCP says"
    failed = bool(error) or bool(left)
    assert len(both.tcp.orders) == bool(left)
    if left:
        (asked,) = both.tcp.orders
        assert asked.url == TCP
        assert keys_of(asked) == b"".join(map(key, left))
        assert rows_of(asked) == [7 * n + 3 for n in left]
        assert asked.deadline_s == 7.5
    seen = both.path.nixl_stats()
    assert (seen.failed_over, seen.failed_over_blocks) == (bool(left), len(left))
    assert (NIXL in seen.resting) == (NIXL in seen.last_error) == failed


def test_a_peer_that_fails_rests_longer_and_longer_and_is_never_given_up() -> None:
    both = Both()
    both.nixl.error = Unavailable("died")
    pauses = []
    for _ in range(12):
        both.pull()  # fails
        begun, tried = both.clock.now, len(both.nixl.orders)
        while True:
            both.clock.now += REST_S / 2
            if NIXL not in both.path.nixl_stats().resting:
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
    assert both.path.nixl_stats().rested == 1
    both.clock.now += REST_S
    asked = len(both.nixl.orders)
    both.pull()
    assert len(both.nixl.orders) == asked + 1


def test_a_path_may_take_as_long_as_its_bytes_are_worth() -> None:
    both = Both()
    large = order(4, 1000.0, 10**9)
    for one in (order(4, 1000.0), large):
        asyncio.run(both.path.pull(one))
    assert [o.deadline_s for o in both.nixl.orders] == pytest.approx([5.0, 45.0], abs=0.01)


def test_no_order_goes_to_tcp_when_its_time_is_over() -> None:
    both = Both()
    both.nixl.answers[key(0)] = BlockStatus.LATE
    both.nixl.error, both.nixl.takes_s = "stuck", 9.0
    pulled = both.pull(deadline_s=8.0)
    assert list(pulled.status) == [
        BlockStatus.LATE,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
    ]
    assert pulled.error == "stuck"
    assert both.tcp.orders == []


def test_what_nixl_has_brought_is_kept_when_tcp_fails() -> None:
    both = Both()
    both.nixl.answers[key(0)] = BlockStatus.LATE
    both.nixl.error = "it broke"
    both.tcp.error = Unavailable("nobody there")
    pulled = both.pull()
    assert list(pulled.status) == [
        BlockStatus.LATE,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
        BlockStatus.PRESENT,
    ]
    assert pulled.error == "nobody there"


# ---- several cards, and the faster way ----------------------------------------------------------------

A, B, C = "tcp://a:1", "tcp://b:1?source=10.0.0.2", "tcp://c:1"
LARGE = LEARN_BYTES


class Host:
    """A peer with several ways: each answers, in its own time, or fails."""

    def __init__(
        self,
        *ways: Way,
        schemes: tuple[str, ...] = ("nixl", "tcp"),
        rng: random.Random | None = None,
        first: str = "",
    ) -> None:
        self.clock = Clock()
        self.incarnation = "a"
        self.ways = ways
        self.orders: list[PullBlocks] = []
        self.asked: list[AskPeer] = []
        self.bytes_s: dict[str, float] = {}
        self.errors: dict[str, KvpoolError] = {}
        self.late_s: dict[str, float] = {}  # before an error
        self.refusals: dict[str, str] = {}
        self.gone = False
        self.statuses: dict[str, list[int]] = {}  # of the blocks 0, 1, …; ARRIVED unless said
        self.gate: asyncio.Event | None = None
        pulls = {"nixl": self._pull, "tcp": self._pull}
        self.paths = Paths(
            {scheme: pulls[scheme] for scheme in schemes},
            self._ask,
            self._route,
            self.clock,
            rng or AsListed(),
            first,
        )

    def _route(self, url: str) -> Route | None:
        return Route(self.incarnation, self.ways) if url == TCP and not self.gone else None

    async def _pull(self, order: PullBlocks) -> Pulled:
        self.orders.append(order)
        if self.gate is not None:
            await self.gate.wait()
        if error := self.errors.get(order.url):
            self.clock.now += self.late_s.get(order.url, 0.0)
            raise error
        keys = keys_of(order)
        numbers = [int.from_bytes(keys[i : i + 16]) for i in range(0, len(keys), 16)]
        said = self.statuses.get(order.url)
        status = bytes(BlockStatus.PRESENT if said is None else said[number] for number in numbers)
        seconds = (
            status.count(BlockStatus.PRESENT)
            * order.parts[0].nbytes
            / self.bytes_s.get(order.url, 1e9)
        )
        self.clock.now += seconds
        error_text = "broke off" if BlockStatus.LATE in status else ""
        refusal = self.refusals.get(order.url, "")
        return Pulled(status, sums_of(keys, status), seconds, refusal or error_text, bool(refusal))

    async def _ask(self, order: AskPeer) -> Done:
        self.asked.append(order)
        if error := self.errors.get(order.url):
            self.clock.now += 1.0
            raise error
        return Done(7)

    def pull(self, nbytes: int = NBYTES, count: int = 1, **settings) -> Pulled:
        return asyncio.run(self.paths.pull(replace(order(count, 800.0, nbytes), **settings)))

    def pull_often(self, times: int, nbytes: int = LARGE) -> None:
        async def pull_all() -> None:
            for _ in range(times):
                await self.paths.pull(order(1, 800.0, nbytes))

        asyncio.run(pull_all())

    def ask(self, deadline_s: float = 8.0, wait_s: float | None = None, **settings) -> int:
        question: Ask | Await = Ask("default", b"d" * 16, [], b"")
        if wait_s is not None:
            question = Await("b", "default", b"d" * 16, b"", b"", wait_s)
        return asyncio.run(self.paths.ask(AskPeer(TCP, question, deadline_s, **settings))).value

    def resting(self) -> list[str]:
        ways = self.paths.stats().peers[TCP].ways
        return [way.url for way in ways if way.rests_s]

    def went_by(self) -> list[str]:
        urls, self.orders = [order.url for order in self.orders], []
        return urls


several = st.lists(
    st.builds(Way, st.sampled_from([NIXL, A, B, C]), st.integers(0, 3)),
    min_size=1,
    unique_by=lambda way: way.url,
).filter(lambda ways: any(way.url != NIXL for way in ways))


@settings(deadline=None)
@given(several, st.data())
def test_each_block_comes_by_the_first_way_that_brings_it_and_the_order_is_that_of_the_records(
    ways: list[Way], data: st.DataObject
) -> None:
    host = Host(*ways)
    count = 4
    for way in ways:
        host.statuses[way.url] = data.draw(
            st.lists(
                st.sampled_from([BlockStatus.ABSENT, BlockStatus.PRESENT, BlockStatus.LATE]),
                min_size=count,
                max_size=count,
            )
        )
    pulled = host.pull(count=count)
    wanted = sorted(ways, key=lambda way: (way.url != NIXL, way.rank))  # stable, as `order` is
    model, asked = [BlockStatus.LATE] * count, []
    for way in wanted[:TRIES_MAX]:
        left = [number for number in range(count) if model[number] == BlockStatus.LATE]
        if not left:
            break
        asked.append((way.url, b"".join(map(key, left))))
        for number in left:
            model[number] = BlockStatus(host.statuses[way.url][number])
    assert list(pulled.status) == model
    assert [(one.url, keys_of(one)) for one in host.orders] == asked
    assert pulled.error == ("broke off" if BlockStatus.LATE in model else "")
    rows = {n: rows_of(order(count))[n] for n in range(count)}
    for one in host.orders:
        keys = keys_of(one)
        numbers = [int.from_bytes(keys[i : i + 16]) for i in range(0, len(keys), 16)]
        assert rows_of(one) == [rows[number] for number in numbers]
        assert all(
            part.part == (number >= count // 3)
            for part in one.parts
            for number in [int.from_bytes(part.keys[:16])]
        )


def test_a_card_that_failed_rests_and_is_used_again() -> None:
    host = Host(Way(A, 0), Way(B, 1))
    host.errors[A] = Unavailable("no route to host")
    assert host.pull().status == bytes([BlockStatus.PRESENT])
    assert host.went_by() == [A, B]
    host.pull()
    assert host.went_by() == [B]
    peer = host.paths.stats().peers[TCP]
    assert [(w.reason, w.rests_s > 0) for w in peer.ways] == [
        ("no route to host", True),
        ("", False),
    ]
    assert host.paths.stats().changed_card == 1
    host.errors.clear()
    host.clock.now += REST_S
    host.pull()
    assert host.went_by() == [A]


@pytest.mark.parametrize("first", ["nixl", "tcp"])
def test_an_operators_choice_holds_whatever_is_faster_and_the_other_is_for_when_it_fails(
    first: str,
) -> None:
    chosen, other = (NIXL, A) if first == "nixl" else (A, NIXL)
    host = Host(Way(A, 0), Way(NIXL, 0), first=first)
    host.bytes_s = {chosen: 1e8, other: 1e9}
    host.pull_often(10 * EXPLORE_EVERY)
    assert set(host.went_by()) == {chosen}
    assert host.paths.nixl_stats().slower == 0
    if first == "nixl":
        for _ in range(5):
            host.errors[NIXL] = Unavailable("gone")
            host.pull(LARGE)
            assert host.went_by() == [NIXL, A]
            host.errors.clear()
            host.clock.now += REST_S_MAX
            host.pull(LARGE)
            assert host.went_by() == [NIXL]


def test_many_pulls_that_break_at_once_are_one_failure() -> None:
    async def at_a_time(host: Host) -> None:
        host.gate = asyncio.Event()
        pulls = [asyncio.create_task(host.paths.pull(order(1))) for _ in range(20)]
        await asyncio.sleep(0)
        host.gate.set()
        await asyncio.gather(*pulls)

    host = Host(Way(A, 0), Way(B, 1))
    host.errors[A] = Unavailable("reset")
    asyncio.run(at_a_time(host))
    host.errors.clear()
    host.clock.now += REST_S
    host.went_by()
    host.pull()
    assert host.went_by() == [A]


def test_when_all_have_failed_the_one_that_rests_shortest_is_tried_alone() -> None:
    """Else each pull from a dead node would try every card of it."""
    host = Host(Way(A, 0), Way(B, 1))
    host.errors = {A: Unavailable("refused"), B: Unavailable("refused")}
    with pytest.raises(Unavailable):
        host.pull()
    assert host.went_by() == [A, B]
    for _ in range(3):
        with pytest.raises(Unavailable):
            host.pull()
        assert len(host.went_by()) == 1


def test_over_tcp_is_the_last_resort_even_when_it_rests() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.errors = {NIXL: Unavailable("x"), A: Unavailable("y")}
    with pytest.raises(Unavailable, match="y"):
        host.ask()
    with pytest.raises(KvpoolError):
        host.pull()
    assert host.went_by() == [NIXL, A]


def test_what_another_way_cannot_mend_is_raised_at_once_and_blames_no_way() -> None:
    for error in (NamespaceMismatch("other parts"), InvalidRequest("too many")):
        host = Host(Way(A, 0), Way(B, 1))
        host.errors[A] = error
        with pytest.raises(type(error)):
            host.pull()
        assert host.went_by() == [A]
        host.errors.clear()
        host.pull()
        assert host.went_by() == [A]


def test_an_address_of_a_transport_that_is_not_installed_rests_and_others_are_used() -> None:
    host = Host(Way(A, 0), Way(B, 0))
    host.errors[A] = ConfigError("there is no transport 'quic'")
    host.pull()
    assert host.went_by() == [A, B]
    host.ask()
    assert [order.url for order in host.asked] == [B]


def test_a_new_life_of_the_peer_has_failed_at_nothing() -> None:
    host = Host(Way(A, 0), Way(B, 1))
    host.errors[A] = Unavailable("refused")
    host.pull()
    host.errors.clear()
    host.incarnation = "b"
    host.went_by()
    host.pull()
    assert host.went_by() == [A]


def test_cards_that_are_as_good_share_what_is_pulled_at_a_time() -> None:
    async def at_a_time(host: Host) -> None:
        host.gate = asyncio.Event()
        one = order(1, nbytes=1000)
        pulls = [asyncio.create_task(host.paths.pull(one)) for _ in range(6)]
        await asyncio.sleep(0)
        assert len(host.orders) == 6, "all are under way"
        host.gate.set()
        await asyncio.gather(*pulls)

    host = Host(Way(A, 0), Way(B, 0), Way(C, 1))
    asyncio.run(at_a_time(host))
    assert sorted(host.went_by()) == [A] * 3 + [B] * 3, "never the worse one"


def test_cards_that_are_as_good_share_what_comes_one_after_the_other() -> None:
    host = Host(Way(A, 0), Way(B, 0), Way(C, 1))
    sizes = {A: 0, B: 0}
    for number in range(20):
        nbytes = 1_000_000 + 700_000 * (number % 3)
        host.pull(nbytes)
        (url,) = host.went_by()
        sizes[url] += nbytes
    assert abs(sizes[A] - sizes[B]) <= 2_400_000
    host.clock.now += 3600  # what was long ago does not have to be made up for
    host.ways = (Way(A, 0), Way(B, 0), Way("tcp://d:1", 0))
    host.pull_often(9)
    went = host.went_by()
    assert {went.count(url) for url in went} == {3}


def test_readers_begin_with_different_cards() -> None:
    ways = [Way(A, 0), Way(B, 0), Way(C, 0)]
    begun = set()
    for seed in range(20):
        host = Host(*ways, rng=random.Random(seed))
        host.pull()
        begun.update(host.went_by())
    assert begun == {A, B, C}


def test_no_card_at_either_end_is_used_twice_before_all_are_used_once() -> None:
    """Ours are two, of which both ways to each of theirs are as good as each other."""
    ends = [
        (theirs, ours) for theirs in ("tcp://x:1", "tcp://y:1") for ours in ("10.0.0.1", "10.0.0.2")
    ]
    host = Host(*(Way(f"{theirs}?source={ours}", 0) for theirs, ours in ends))

    async def at_a_time() -> list[set[str]]:
        host.gate = asyncio.Event()
        one = order(1, nbytes=1000)
        pulls = [asyncio.create_task(host.paths.pull(one)) for _ in range(2)]
        await asyncio.sleep(0)
        cards = [set(end) for end in zip(*(o.url.split("?") for o in host.orders), strict=True)]
        host.gate.set()
        await asyncio.gather(*pulls)
        return cards

    assert [len(cards) for cards in asyncio.run(at_a_time())] == [2, 2]


def test_what_a_peer_refuses_is_asked_by_no_other_way_and_no_way_rests() -> None:
    host = Host(Way(A, 0), Way(B, 1))
    host.statuses[A], host.refusals[A] = [BlockStatus.LATE], "not a member"
    pulled = host.pull()
    assert (pulled.error, list(pulled.status)) == ("not a member", [BlockStatus.LATE])
    assert host.went_by() == [A]
    assert host.resting() == []
    host.errors[A] = Declined("takes no offers")
    with pytest.raises(Declined):
        host.ask()
    assert [one.url for one in host.asked] == [A]
    assert host.resting() == []


def test_a_refusal_after_another_way_broke_off_is_what_is_said() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0), Way(B, 1))
    host.statuses = {
        NIXL: [BlockStatus.PRESENT, BlockStatus.LATE],
        A: [BlockStatus.LATE, BlockStatus.LATE],
    }
    host.refusals[A] = "not a member"
    pulled = host.pull(count=2)
    assert (list(pulled.status), pulled.error) == (
        [BlockStatus.PRESENT, BlockStatus.LATE],
        "not a member",
    )
    assert host.went_by() == [NIXL, A]
    assert host.resting() == [NIXL]


def test_what_is_too_much_for_our_own_mover_for_nixl_goes_over_tcp_and_blames_nobody() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.errors[NIXL] = LimitExceeded("4096 orders are in progress")
    assert host.pull().status == bytes([BlockStatus.PRESENT])
    assert host.went_by() == [NIXL, A]
    assert host.resting() == []


def test_what_gives_way_to_others_may_be_late_without_blame() -> None:
    for background in (False, True):
        host = Host(Way(A, 0), Way(B, 1))
        host.errors[A], host.late_s[A] = Unavailable("late"), 500.0
        assert host.pull(background=background).status == bytes([BlockStatus.PRESENT])
        assert host.went_by() == [A, B]
        assert host.resting() == ([] if background else [A])
        if background:
            host.late_s[A] = 0.0
            host.pull(background=True)
            assert host.resting() == [A], "refused at once"
        host.errors = {B: Unavailable("late"), A: Unavailable("late")}
        host.clock.now += REST_S_MAX
        with pytest.raises(Unavailable):
            host.ask(background=background)
        assert bool(host.resting()) is not background


def test_a_question_leaves_time_for_the_next_card_but_a_peer_may_wait_as_asked() -> None:
    host = Host(Way(A, 0), Way(B, 1))
    for deadline_s, wait_s, share_s in ((8.0, None, 4.0), (8.0, 6.0, 7.0), (3.0, 5.0, 3.0)):
        host.ask(deadline_s, wait_s)
        assert host.asked[-1].deadline_s == share_s
    alone = Host(Way(A, 0))
    alone.ask(8.0, 6.0)
    assert alone.asked[-1].deadline_s == 8.0


def test_members_that_have_gone_are_forgotten() -> None:
    host = Host(Way(A, 0), Way(B, 0))
    host.pull()
    assert set(host.paths.stats().peers) == {TCP}
    host.gone = True
    asyncio.run(host.paths.pull(replace(order(1), url="tcp://stranger:1")))
    assert set(host.paths.stats().peers) == {"tcp://stranger:1"}


def test_what_fails_when_it_is_tried_is_tried_less_and_less_often_for_a_short_time() -> None:
    host = Host(Way(NIXL, 0), Way(A, 1), Way(B, 1))
    host.bytes_s = {NIXL: 1e8, A: 1e8, B: 1e8}
    for url in (A, B):
        host.errors[url], host.late_s[url] = Unavailable("late"), 1.0
    host.pull_often(20 * EXPLORE_EVERY_MAX)
    tries = [at for at, one in enumerate(host.orders) if one.url != NIXL]
    assert all(host.orders[at + 1].url == NIXL for at in tries), "one of them, then the usual way"
    pauses = [after - before - 1 for before, after in pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == EXPLORE_EVERY_MAX
    given = {round(host.orders[at].deadline_s, 6) for at in tries}
    assert given == {round(4 * LARGE / 1e8, 6)}
    assert host.resting() == [], "slow is not broken"


def test_a_try_that_fails_goes_on_by_the_usual_way_and_comes_again_at_the_end() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.pull_often(EXPLORE_EVERY - 1)
    host.went_by()
    host.errors = {A: Unavailable("reset"), NIXL: Unavailable("reset")}
    for _ in range(2):
        with pytest.raises(Unavailable):
            host.pull(LARGE)
        if (went := host.went_by())[0] == A:
            break
        host.clock.now += REST_S_MAX
    assert went == [A, NIXL, A]


speeds = st.floats(1e7, 1e10)


@settings(deadline=None)
@given(speeds, speeds)
def test_the_way_that_is_clearly_faster_becomes_the_rule(nixl: float, tcp: float) -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.bytes_s = {NIXL: nixl, A: tcp}
    host.pull_often(6 * EXPLORE_EVERY)
    went = host.went_by()[-EXPLORE_EVERY + 1 :]
    usual = max(set(went), key=went.count)
    if tcp > 1.11 * nixl:
        assert usual == A
        assert host.paths.nixl_stats().slower > 0
    if tcp < 1.09 * nixl:
        assert usual == NIXL
    assert went.count(usual) >= EXPLORE_EVERY - 2
    assert host.paths.path(TCP) == usual
    assert host.paths.stats().peers[TCP].usual == ("nixl" if usual == NIXL else "tcp")


def test_what_changes_is_found_again() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    for fast, slow in ((A, NIXL), (NIXL, A), (A, NIXL)):
        host.bytes_s = {fast: 4e9, slow: 1e9}
        host.pull_often(12 * EXPLORE_EVERY)
        assert host.paths.path(TCP) == fast


def test_what_is_much_slower_is_tried_less_and_less_often() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.bytes_s = {NIXL: 1e10, A: 1e8}
    host.pull_often(20 * EXPLORE_EVERY_MAX)
    went = host.went_by()
    tries = [at for at, url in enumerate(went) if url == A]
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] == EXPLORE_EVERY
    assert set(pauses[-10:]) == {EXPLORE_EVERY_MAX}


def test_small_pulls_and_background_ones_try_nothing_and_tell_nothing() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.bytes_s = {NIXL: 1e7, A: 1e10}
    host.pull_often(10 * EXPLORE_EVERY, LARGE - 1)
    for _ in range(2 * EXPLORE_EVERY):
        host.pull(LARGE, background=True)
    assert set(host.went_by()) == {NIXL}
    assert host.paths.stats().peers[TCP].bytes_s == 0


def test_a_way_that_rests_is_not_explored_and_counts_as_no_reason_to_change_the_rule() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0))
    host.errors[NIXL] = Unavailable("died")
    for _ in range(5):
        host.pull(LARGE)
    host.errors.clear()
    host.clock.now += REST_S_MAX
    host.went_by()
    host.pull(LARGE)
    assert host.went_by() == [NIXL]


def test_questions_go_over_tcp_by_the_next_card_where_one_fails() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0), Way(B, 1))
    assert host.ask() == 7
    host.errors[A] = Unavailable("no route")
    assert host.ask() == 7
    assert host.ask() == 7
    assert [(one.url, one.deadline_s) for one in host.asked] == [
        (A, 4.0),
        (A, 4.0),
        (B, 7.0),
        (B, 8.0),
    ]
    host.errors[B] = NamespaceMismatch("other parts")
    with pytest.raises(NamespaceMismatch):
        host.ask()
    host.asked.clear()
    host.errors[B] = Unavailable("late")
    host.clock.now += REST_S
    with pytest.raises(Unavailable, match="no route"):
        host.ask(deadline_s=0.5)
    assert [one.url for one in host.asked] == [A], "no time is left for another one"


def test_a_node_without_nixl_does_not_pull_by_it_and_strangers_have_one_way() -> None:
    host = Host(Way(NIXL, 0), Way(A, 0), schemes=("tcp",))
    host.pull()
    assert host.went_by() == [A]
    asyncio.run(host.paths.pull(replace(order(1), url="tcp://stranger:1")))
    assert host.went_by() == ["tcp://stranger:1"]
    assert host.paths.path("tcp://another:1") == "tcp://another:1"


def test_peers_are_bounded() -> None:
    host = Host(Way(A, 0))

    async def pull_from_all() -> None:
        for number in range(PEERS_MAX + 10):
            await host.paths.pull(replace(order(1), url=f"tcp://x:{number}"))
            host.paths.path(f"tcp://y:{number}")

    asyncio.run(pull_from_all())
    assert len(host.paths.stats().peers) == PEERS_MAX


def test_a_better_way_that_comes_is_used_unless_another_one_was_found_to_be_faster() -> None:
    host = Host(Way(A, 0), Way(B, 1))
    host.pull()
    host.ways = (Way(NIXL, 0), *host.ways)
    host.pull()
    host.bytes_s = {A: 1e10, B: 1e8, NIXL: 1e8}
    host.pull_often(10 * EXPLORE_EVERY)
    went = host.went_by()
    assert went[:2] == [A, NIXL]
    assert host.paths.path(TCP) == A
    host.ways = (Way(NIXL, 0), Way(A, 0))
    assert host.paths.path(TCP) == A
    host.ways = (Way(NIXL, 0), Way(B, 1))
    assert host.paths.path(TCP) == NIXL


# ---- peers that cannot be reached ---------------------------------------------------------------------


def paths_to(route: Route) -> Paths:
    transport = PeerTransport(Clock())
    return Paths({"tcp": transport.pull}, nobody_asks, {TCP: route}.get, Clock(), AsListed())


@pytest.mark.parametrize("ways", [(), (Way(NIXL, 0),)], ids=["none", "of another transport"])
def test_a_peer_without_a_usable_way_is_unavailable_each_time(ways: tuple[Way, ...]) -> None:
    path = paths_to(Route("a", ways))
    for _ in range(3):
        assert path.path(TCP) == ""
        with pytest.raises(Unavailable, match="no address"):
            asyncio.run(path.pull(order(1)))
        with pytest.raises(Unavailable, match="no address"):
            asyncio.run(path.ask(AskPeer(TCP, Ask("t", bytes(16), [], key(1)), 1.0)))
    assert path.stats().peers[TCP].ways == []


def test_what_is_no_address_is_refused_the_same_way_each_time() -> None:
    path = paths_to(Route("a", (Way(TCP, 0), Way("gone", 0))))
    for _ in range(3):
        with pytest.raises(ConfigError, match="gone"):
            path.path(TCP)
        with pytest.raises(ConfigError, match="gone"):
            asyncio.run(path.pull(order(1)))


def test_a_peer_that_loses_its_ways_and_gets_others_is_reached_again() -> None:
    routes = {TCP: Route("a", (Way(TCP, 0),))}
    transport = PeerTransport(Clock())
    path = Paths({"tcp": transport.pull}, nobody_asks, routes.get, Clock(), AsListed())
    assert asyncio.run(path.pull(order(1))).status == bytes([BlockStatus.PRESENT])
    routes[TCP] = Route("a", ())
    with pytest.raises(Unavailable):
        asyncio.run(path.pull(order(1)))
    routes[TCP] = Route("a", (Way("tcp://b:1", 0),))
    assert asyncio.run(path.pull(order(1))).status == bytes([BlockStatus.PRESENT])
    assert transport.orders[-1].url == "tcp://b:1"
