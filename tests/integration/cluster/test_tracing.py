"""One trace per request, through the daemons: who asks, who is looked up, who lends; as a collector gets it."""

import itertools
import time

import msgspec
import pytest

from kvpool.errors import NotAuthenticated
from kvpool.telemetry.spans import SPANS_MAX, Batch
from kvpool.wire import operator as operator_wire
from tests.integration.cluster.conftest import keys_of
from tests.support.otlp_collector import Collector
from tests.support.waiting import PATIENCE_S, until

CALLER = "00f067aa0ba902b7"
NBYTES = 32 << 10
COUNT = itertools.count(1)


@pytest.fixture(scope="module")
def collector():
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def world(shared_cluster, collector):
    with shared_cluster(
        nodes=2,
        memory="32MiB",
        ssd="64MiB",
        flags=["--no-forward"],
        environ={"KVPOOL_OTLP": collector.url},
    ) as world:
        # The processes that export are started last, and nobody waits for them.
        seats = world.seats()
        for seat in seats:
            seat.client.acquire(seat.ns, keys_of([0]), trace=context("f" * 32))

        def heard() -> bool:
            return {node_of(one) for one in collector.spans("f" * 32)} == {"a", "b"}

        until(heard, "both nodes export")
        yield world


@pytest.fixture
def trace():
    return f"{next(COUNT):032x}"


def context(trace, flags="01"):
    return f"00-{trace}-{CALLER}-{flags}"


def by_name(found):
    named = {}
    for one in found:
        named.setdefault(one.name, []).append(one)
    return named


def node_of(span):
    return span.resource["service.instance.id"]


@pytest.fixture
def spans_of(collector, until):
    """All spans of a trace, once those that are named are among them."""

    def find(trace, **counts):
        def came():
            named = by_name(collector.spans(trace))
            return all(len(named.get(f"kvpool.{n}", ())) >= c for n, c in counts.items())

        until(came, what=f"{counts} of {trace}: {collector.spans(trace)}")
        return by_name(collector.spans(trace))

    return find


@pytest.fixture
def there(world, numbers, until):
    """Blocks that node a has, and b does not."""
    a, b = world._seats[:2]
    listed = list(numbers(8))
    a.put(listed)
    until(lambda: a.announced, what="the directory knows of them")
    return a, b, listed


def test_an_acquire_from_its_request_to_the_node_that_lends(there, trace, spans_of) -> None:
    _, b, listed = there
    before = time.time_ns()
    lease = b.client.acquire(b.ns, keys_of(listed), wait_s=PATIENCE_S, trace=context(trace))
    after = time.time_ns()
    assert lease is not None and lease.blocks == 8
    lease.release()
    found = spans_of(trace, acquire=1, lookup=1, transfer=1, lend=1)
    assert found.keys() == {"kvpool.acquire", "kvpool.lookup", "kvpool.transfer", "kvpool.lend"}
    ((acquire,), (lookup,), (transfer,), (lend,)) = (
        found[f"kvpool.{name}"] for name in ("acquire", "lookup", "transfer", "lend")
    )
    assert acquire.parent == CALLER
    assert lookup.parent == transfer.parent == acquire.span
    assert lend.parent == transfer.span
    assert [node_of(one) for one in (acquire, lookup, transfer, lend)] == ["b", "b", "b", "a"]
    assert {one.service for one in (acquire, lend)} == {"kvpool-daemon"}
    # One machine, one clock. A loan ends when its bytes are on their way, which its reader does not wait for.
    assert before <= acquire.start_ns <= lookup.start_ns <= lookup.end_ns <= transfer.start_ns
    assert transfer.end_ns <= acquire.end_ns <= after
    assert transfer.start_ns <= lend.start_ns <= transfer.end_ns
    assert acquire.attributes["kvpool.blocks_asked"] == acquire.attributes["kvpool.blocks"] == 8
    assert acquire.attributes["kvpool.parts_from_peer"] == 8
    assert transfer.attributes["kvpool.node"] == "a" and transfer.attributes["kvpool.path"] == "tcp"
    for one in (transfer, lend):
        assert one.attributes["kvpool.blocks"] == 8
        assert one.attributes["kvpool.bytes"] == 8 * NBYTES
        assert one.error is None
    assert lookup.attributes["kvpool.source"] == "directory"


def test_a_pull(there, trace, spans_of) -> None:
    _, b, listed = there
    assert b.client.pull(b.ns, keys_of(listed), wait_s=PATIENCE_S, trace=context(trace)) == 8
    found = spans_of(trace, pull=1, transfer=1, lend=1)
    ((pull,), (transfer,)) = found["kvpool.pull"], found["kvpool.transfer"]
    assert (pull.parent, transfer.parent) == (CALLER, pull.span)
    assert pull.start_ns <= transfer.start_ns <= transfer.end_ns <= pull.end_ns


def test_a_follow(world, numbers, until, trace, spans_of) -> None:
    a, b = world._seats[:2]
    listed = list(numbers(6))
    a.put(listed)
    until(lambda: a.announced, what="the directory knows of them")
    followed = b.client.follow(
        b.ns, keys_of(listed), wait_s=PATIENCE_S, source="a", trace=context(trace)
    )
    assert followed == 6
    found = spans_of(trace, follow=1, transfer=1, lend=1)
    (follow,) = found["kvpool.follow"]
    assert follow.parent == CALLER and follow.attributes["kvpool.blocks"] == 6
    transfers = {one.span for one in found["kvpool.transfer"]}
    assert {one.parent for one in found["kvpool.transfer"]} == {follow.span}
    assert {one.parent for one in found["kvpool.lend"]} <= transfers


def test_what_is_here_already_takes_no_more_than_its_span(there, trace, spans_of) -> None:
    a, _, listed = there
    lease = a.client.acquire(a.ns, keys_of(listed), trace=context(trace))
    lease.release()
    found = spans_of(trace, acquire=1)
    assert found.keys() == {"kvpool.acquire"}


def test_what_there_is_not_is_in_the_trace_too(world, numbers, trace, spans_of) -> None:
    b = world._seats[1]
    assert b.client.acquire(b.ns, keys_of(numbers(3)), wait_s=1.0, trace=context(trace)) is None
    found = spans_of(trace, acquire=1, lookup=1)
    (acquire,) = found["kvpool.acquire"]
    assert acquire.attributes["kvpool.blocks"] == 0


@pytest.mark.parametrize(
    "context_of",
    [
        lambda trace: "",
        lambda trace: context(trace, "00"),
        lambda trace: context(trace)[:-1],
        lambda trace: context(trace).replace("00-", "ff-", 1),
        lambda trace: f"00-{trace}-{'0' * 16}-01",
        lambda trace: "x" * 10_000,
    ],
    ids=["none", "not sampled", "short", "version ff", "no parent", "long"],
)
def test_no_context_no_spans(there, trace, collector, context_of) -> None:
    a, b, listed = there

    def all_heard() -> str:
        """A trace; a node's spans go in order: with those of this one, all that there were before are there."""
        last = f"{next(COUNT):032x}"
        for seat in (a, b):
            seat.client.acquire(seat.ns, keys_of([0]), trace=context(last))
        until(lambda: {node_of(one) for one in collector.spans(last)} == {"a", "b"}, last)
        return last

    all_heard()  # the tests before have not waited for each of theirs
    seen = len(collector.spans())
    lease = b.client.acquire(b.ns, keys_of(listed), wait_s=PATIENCE_S, trace=context_of(trace))
    assert lease is not None and lease.blocks == 8
    lease.release()
    last = all_heard()
    assert {one.trace for one in collector.spans()[seen:]} == {last}


def test_what_is_on_a_disk_is_read_for_its_lender_or_its_owner(
    world, numbers, until, trace, spans_of
) -> None:
    a, b = world._seats[:2]
    a.client.configure(a.ns.digest, write="through")
    listed = list(numbers(4))
    a.put(listed)

    def on_disk():
        found = a.client.locate(keys_of(listed), digest=a.ns.digest)
        tiers = [[replica.tier for replica in entry.replicas] for entry in found]
        return len(tiers) == 4 and all("ssd" in each for each in tiers)

    until(on_disk, what="they are on the disk")
    a.client.evict(keys_of(listed), digest=a.ns.digest, tier="dram")
    assert a.here(listed) == 0
    until(lambda: a.announced, what="the directory knows of it")
    b.client.acquire(b.ns, keys_of(listed), wait_s=PATIENCE_S, trace=context(trace)).release()
    found = spans_of(trace, acquire=1, lend=1, read=1)
    (read,) = found["kvpool.read"]
    (lend,) = found["kvpool.lend"]
    assert (read.parent, node_of(read)) == (lend.span, "a")
    assert (read.attributes["kvpool.tier"], read.attributes["kvpool.blocks"]) == ("ssd", 4)
    assert lend.start_ns <= read.start_ns <= read.end_ns <= lend.end_ns
    a.client.evict(keys_of(listed), digest=a.ns.digest, tier="dram")
    own = f"{next(COUNT):032x}"
    a.client.acquire(a.ns, keys_of(listed), wait_s=PATIENCE_S, trace=context(own)).release()
    found = spans_of(own, acquire=1, read=1)
    ((acquire,), (read,)) = found["kvpool.acquire"], found["kvpool.read"]
    assert read.parent == acquire.span and acquire.attributes["kvpool.parts_from_ssd"] == 4


def test_spans_that_nobody_takes_are_dropped_and_counted(start_cluster, numbers, trace) -> None:
    with Collector() as away:
        away.status = 503
        world = start_cluster(nodes=1, environ={"KVPOOL_OTLP": away.url})
        seat = world.seat(world.nodes[0].name)
        listed = list(numbers(2))
        seat.put(listed)
        found = seat.client.ask_node(operator_wire.TakeSpans(0))
        # What is tried and given up meanwhile is far less than this.
        for turn in itertools.count():
            if found["dropped"] or turn == 100:
                break
            for _ in range(500):
                seat.client.acquire(seat.ns, keys_of(listed), trace=context(trace)).release()
            found = seat.client.ask_node(operator_wire.TakeSpans(0))
        assert found["dropped"] > 0 and found["left"] <= SPANS_MAX
        batch = msgspec.convert(seat.client.ask_node(operator_wire.TakeSpans(10)), Batch)
        assert [one.name for one in batch.spans] == ["kvpool.acquire"] * 10
        assert seat.read(listed) == 2


def test_without_a_collector_nothing_is_recorded(start_cluster, numbers, trace) -> None:
    token = "only-for-those-who-run-it"
    world = start_cluster(nodes=1, environ={"KVPOOL_OPERATOR_TOKEN": token})
    seat = world.seat(world.nodes[0].name, operator_token=token)
    listed = list(numbers(2))
    seat.put(listed)
    seat.client.acquire(seat.ns, keys_of(listed), trace=context(trace)).release()
    assert seat.client.ask_node(operator_wire.TakeSpans(10)) == {
        "spans": [],
        "left": 0,
        "dropped": 0,
    }
    with world.nodes[0].client() as other, pytest.raises(NotAuthenticated):
        other.ask_node(operator_wire.TakeSpans(10))
