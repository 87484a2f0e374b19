"""A peer that is silent, wrong, slow or cut off: right bytes from another one, or a miss in time."""

import time
from urllib.parse import urlsplit

import pytest

from tests.support.proxy import BOTH, Fault, Proxy

IN_TIME_S = 30.0  # by which somebody else has to have delivered
SILENT = Fault(silent=True, hold=BOTH)


def asked(seat, other) -> int:
    """How many requests this node has sent to the other one."""
    peers = seat.stats.fetch.peers
    return next((p.asked for p in peers if p.incarnation == other.incarnation), 0)


@pytest.fixture(scope="module")
def cluster(shared_cluster):
    """Three nodes; what others say to a goes through a proxy."""
    target = []
    with Proxy(lambda: target[0]) as proxy:

        def advertise(name: str, url: str) -> str:
            if name != "a":
                return url
            parts = urlsplit(url)
            target.append((parts.hostname, parts.port))
            return proxy.url

        with shared_cluster(memory="64MiB", advertise=advertise) as world:
            yield proxy, world.seats()


@pytest.fixture
def behind_proxy(cluster, numbers, until):
    """The proxy, the seats, and blocks of which a has `sole` alone and b `shared` too."""
    proxy, (a, b, c) = cluster
    shared, sole, first = numbers(40), numbers(40), numbers(1)
    a.put(shared)
    a.put(sole)
    a.put(first)
    b.put(shared)
    until(lambda: a.announced and b.announced)
    yield proxy, (a, b, c), shared, sole
    proxy.set()
    for seat in (b, c):
        until(lambda one=seat: one.read(first, wait_s=1), "all is well again")


def timed_read(seat, some, wait_s: float) -> tuple[int, float]:
    begun = time.monotonic()
    found = seat.read(some, wait_s=wait_s)
    return found, time.monotonic() - begun


def forget(seat, some) -> None:
    seat.client.remove(seat.ns, [n.to_bytes(16, "big") for n in some])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(SILENT, id="accepts-and-never-answers"),
        pytest.param(Fault(hold=frozenset({"down"})), id="hears-and-is-not-heard"),
        pytest.param(Fault(hold=frozenset({"up"})), id="is-heard-and-hears-nothing"),
        pytest.param(Fault(refuse=True), id="resets-connections"),
        pytest.param(Fault(half_close="down"), id="half-closes"),
        pytest.param(Fault(flip=("down", 0), flip_every=1), id="talks-nonsense"),
        pytest.param(Fault(flip=("down", 20_000), flip_every=4096), id="sends-wrong-bytes"),
    ],
)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "known"])
def test_a_bad_peer_costs_no_wrong_read_and_little_time(behind_proxy, numbers, until, fault, warm):
    proxy, (a, b, c), shared, sole = behind_proxy
    if warm:  # there are connections, on which the fault shows in the middle
        more = numbers(5)
        a.put(more)
        until(lambda: a.announced)
        assert c.read(more) == 5
    else:
        proxy.cut()
    proxy.set(fault)
    found, seconds = timed_read(c, shared, wait_s=IN_TIME_S)
    assert found == 40, "the other replica has them all"
    assert seconds < IN_TIME_S
    found, seconds = timed_read(c, sole, wait_s=1.0)
    assert found == 0
    assert seconds < IN_TIME_S

    for _ in range(20):
        forget(c, shared)
        found, seconds = timed_read(c, shared, wait_s=IN_TIME_S)
        assert (found, seconds < IN_TIME_S) == (40, True)
    before = asked(c, a)
    for _ in range(100):
        assert c.read(sole[:4], wait_s=0.05) == 0
    assert asked(c, a) - before <= 50, "it is asked now and then, not each time"
    assert (a.read(sole), b.read(shared), a.read(shared)) == (40, 40, 40), "others notice nothing"

    proxy.set()
    until(lambda: c.read(sole, wait_s=1) == 40, "it is trusted again once it is well")


def test_wrong_bytes_are_counted_and_cost_their_owner_nothing(behind_proxy, until):
    proxy, (a, _, c), _, sole = behind_proxy
    proxy.set(Fault(flip=("down", 20_000), flip_every=16 << 10))
    assert c.read(sole, wait_s=2) == 0
    until(lambda: c.counter("checksum_mismatches") > 0 or c.read(sole, wait_s=2) > 0)
    assert c.counter("checksum_mismatches") > 0
    assert a.get(sole) == 40, "it looked for itself, and they are right"
    proxy.set()
    until(lambda: c.read(sole, wait_s=1) == 40)


def test_a_slow_network_is_slow_and_nothing_else(behind_proxy):
    proxy, (_, _, c), shared, sole = behind_proxy
    proxy.set(Fault(delay_s=0.2))
    assert c.read(sole) == 40
    assert c.read(shared) == 40


def test_a_cut_between_nodes_is_misses_there_and_nothing_elsewhere(behind_proxy, numbers, until):
    """a cannot be reached by its peers; it reaches them, etcd and Redis."""
    proxy, (a, b, c), shared, sole = behind_proxy
    proxy.set(SILENT)
    theirs = numbers(10)
    b.put(theirs)
    until(lambda: b.announced)
    for seat in (b, c):
        found, seconds = timed_read(seat, sole, wait_s=1.0)
        assert (found, seconds < IN_TIME_S) == (0, True)
        assert seat.read(shared, wait_s=IN_TIME_S) == 40
        assert set(seat.members) == {"a", "b", "c"}, "etcd knows that it lives"
    assert a.read(theirs) == 10, "the cut is one way"
    assert c.read(theirs) == 10
    new = numbers(10)
    assert a.put(new) == 10
    proxy.set()
    for seat in (b, c):
        until(lambda one=seat: one.read(sole, wait_s=1) == 40, "healed")
        until(lambda one=seat: one.read(new, wait_s=1) == 10)
