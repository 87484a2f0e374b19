"""The lease is liveness, not permission: while etcd is away the last view holds and all goes on."""

import time

import pytest

from kvpool.errors import ClusterUnavailable
from kvpool.types import NamespaceRecord
from tests.support.proxy import BOTH, Fault, Proxy

TTL_S = 6.0  # the shortest that a busy machine keeps up
FAST = {"KVPOOL_MEMBER_TTL_S": "6"}
TURNS = 300  # of four blocks each; what all tests put fits into a node's memory, or the first would have to go


@pytest.fixture(scope="module")
def lasting(servers, shared_cluster):
    _, port = servers[0].endpoints[0].split(":")
    with Proxy(("127.0.0.1", int(port))) as proxy:
        far = f"etcd://127.0.0.1:{proxy.address[1]}"
        with shared_cluster(
            nodes=3, memory="256MiB", environ=FAST, etcd_url=lambda _: far
        ) as world:
            yield world, proxy


@pytest.fixture
def proxy(lasting):
    """Between the nodes and etcd."""
    return lasting[1]


@pytest.fixture
def world(lasting, until):
    """Three nodes on an etcd that is well before and after each test."""
    lasting, proxy = lasting
    yield lasting
    proxy.set()
    etcd = lasting.etcd
    if not etcd.members[0].alive:
        etcd.restart(0)
    etcd.members[0].resume()
    etcd.disarm()
    seats = [lasting.seat(node.name) for node in lasting.nodes]
    until(lambda: all(seat.standing == "member" for seat in seats))
    # Who is in an older epoch when etcd goes away finds nothing that others put.
    epoch = seats[0].client.clear(seats[0].ns.digest)
    until(lambda: all(epoch_at(seat) == epoch for seat in seats), "all are in the new epoch")


def epoch_at(seat) -> int:
    namespaces = seat.client.cluster()["namespaces"]
    return max(n["epoch"] for n in namespaces if n["digest"] == seat.ns.digest.hex())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed", "cut off"])
def test_while_etcd_is_away_nobody_expires_and_all_goes_on(world, proxy, numbers, until, load, how):
    a, b, c = world.seats()
    before = {seat.name: seat.incarnation for seat in (a, b, c)}
    old, fresh = numbers(30), numbers(4 * TURNS)
    a.put(old)
    until(lambda: a.announced)
    done = [0]
    missed: list[tuple[float, float]] = []  # when the read began and ended

    def of(turn: int) -> range:
        at = turn % TURNS * 4
        return fresh[at : at + 4]

    def write(turn: int) -> None:
        a.put(of(turn))
        done[0] = turn + 1
        time.sleep(0.02)

    def read(turn: int) -> None:
        turn = done[0] - 1
        if turn >= 0 and a.announced:
            began = time.monotonic()
            if b.read(of(turn), wait_s=20) != 4:
                missed.append((began, time.monotonic()))
            b.client.remove(b.ns, [n.to_bytes(16, "big") for n in of(turn)])
        time.sleep(0.02)

    def watch(turn: int) -> None:
        assert all(set(seat.members) == {"a", "b", "c"} for seat in (b, c)), "nobody expires"
        time.sleep(0.002)

    etcd = world.etcd.members[0]

    def going_on() -> None:
        now = list(going.done)
        until(lambda: all(d > n + 20 for d, n in zip(going.done, now, strict=True)), "load")

    with load(write, read, watch) as going:
        until(lambda: min(going.done) > 5)
        begun = time.monotonic()
        if how == "stopped":
            etcd.pause()
        elif how == "killed":
            etcd.kill()
        else:
            proxy.set(Fault(hold=BOTH))
        until(lambda: b.standing == c.standing == "away", "etcd is missed")
        until(lambda: time.monotonic() > begun + 3 * TTL_S, "longer than any lease")
        # An attempt that fails late is a moment in which a node cannot know.
        until(lambda: {seat.standing for seat in (a, b, c)} == {"away"})
        assert all(set(seat.members) == {"a", "b", "c"} for seat in (a, b, c))
        assert c.read(old) == 30, "pulls go on"
        going_on()
        back_at = time.monotonic()
        if how == "stopped":
            etcd.resume()
        elif how == "killed":
            world.etcd.restart(0)
        else:
            until(lambda: not world.etcd.keys(f"/kvpool/{world.name}/nodes/"), "no lease left")
            proxy.set()
        until(lambda: {s.standing for s in (a, b, c)} == {"member"}, "all are members again")
        world.until_all_see([a, b, c])
        until(lambda: a.announced, "a's blocks are listed under its new incarnation")
        well_at = time.monotonic()
        going_on()
    assert not going.failures
    # While a node joins anew, its peers and it wait for each other's word.
    others = [read for read in missed if read[1] < back_at or read[0] > well_at]
    assert not others, f"{len(others)} of {going.done[1]} reads missed"
    if how == "cut off":
        assert all(seat.incarnation != before[seat.name] for seat in (a, b, c)), "of new leases"
    for seat in (b, c):
        until(lambda one=seat: one.read(old, wait_s=2) == 30, "a's blocks, whoever it is now")
    some = numbers(10)
    c.put(some)
    until(lambda: a.read(some, wait_s=2) == 10, "what is put now is found")


def test_a_namespace_opened_while_etcd_is_away_is_shared_when_it_is_back(
    world, hybrid, numbers, until
):
    a, b, _ = world.seats()
    world.etcd.members[0].pause()
    until(lambda: a.standing == b.standing == "away")
    at_a, at_b = world.seat("a", hybrid), world.seat("b", hybrid)
    some = numbers(20)
    assert at_a.put(some) > 0
    assert at_a.read(some) == 20
    until(lambda: at_a.announced)
    assert at_b.read(some) == 20, "in its first epoch all agree without etcd"
    world.etcd.members[0].resume()
    until(
        lambda: (
            at_b.ns.digest.hex()
            in {namespace["digest"] for namespace in at_b.client.cluster()["namespaces"]}
        ),
        "the cluster knows it afterwards",
    )


def test_a_new_incarnation_is_announced_once_the_directory_lists_its_blocks(
    servers, start_cluster, numbers, until
):
    _, redis = servers
    with Proxy(("127.0.0.1", redis.port)) as proxy:
        to_redis = f"redis://127.0.0.1:{proxy.address[1]}"
        world = start_cluster(nodes=2, directory=to_redis)
        a, b = world.seats()
        some = numbers(20)
        a.put(some)
        until(lambda: a.announced)
        before = a.incarnation
        proxy.set(Fault(hold=BOTH))
        world.etcd.revoke(world.etcd.lease_of(f"/kvpool/{world.name}/nodes/a"))
        until(lambda: a.incarnation != before)
        world.until_all_see([a, b])
        assert not a.announced, "nothing is queued, and nothing is listed"
        proxy.set()
        until(lambda: a.announced)
        assert b.read(some) == 20


@pytest.mark.slow
def test_joins_and_drains_go_on_after_the_leader_of_three_etcds_was_killed(
    start_cluster, numbers, until, record_testsuite_property
):
    world = start_cluster(own_servers=True, etcd_members=3, nodes=2, memory="32MiB", environ=FAST)
    a, b = world.seats()
    some = numbers(20)
    a.put(some)
    until(lambda: a.announced)
    world.etcd.members[world.etcd.leader()].kill()
    killed = time.monotonic()
    world.add("c")
    c = world.seat("c")
    world.until_all_see([a, b, c])
    joined_s = time.monotonic() - killed
    assert c.read(some) == 20
    begun = time.monotonic()
    b.client.drain("c")
    until(lambda: "c" not in a.members, "c has left")
    drained_s = time.monotonic() - begun
    record_testsuite_property("joined_s", str(joined_s))
    record_testsuite_property("drained_s", str(drained_s))


def test_a_full_etcd_stops_no_reads_and_no_writes(world, numbers, until):
    a, b, _ = world.seats()
    before = a.incarnation, b.incarnation
    fill(world.etcd)
    some = numbers(20)
    assert a.put(some) == 20
    until(lambda: a.announced)
    assert b.read(some) == 20
    begun = time.monotonic()
    until(lambda: time.monotonic() > begun + 2 * TTL_S + 1)
    until(lambda: (a.standing, b.standing) == ("member", "member"), "of the same leases")
    assert (a.incarnation, b.incarnation) == before
    assert b.read(numbers(3), wait_s=1) == 0


def fill(etcd) -> None:
    """Raise the alarm that the database is full: from here on etcd takes no writes but keeps leases."""
    status = etcd.post("maintenance/status", {})
    member = status["header"]["member_id"]
    etcd.post("maintenance/alarm", {"action": "ACTIVATE", "memberID": member, "alarm": "NOSPACE"})


@pytest.mark.slow
def test_an_etcd_that_asks_for_passwords_all_of_a_sudden_ends_no_daemon(
    start_cluster, numbers, until
):
    """Its daemons have none: each request is refused, and the pool goes on with what it knows."""
    world = start_cluster(nodes=2, own_servers=True, environ=FAST)
    a, b = world.seats()
    before = numbers(10)
    a.put(before)
    until(lambda: a.announced)
    world.etcd.enable_auth("kv", "secret", "/kvpool/")
    # Each daemon has something to write.
    for seat in (a, b):
        with pytest.raises(ClusterUnavailable, match="give a user"):
            seat.client.drain("a")
    fresh = numbers(10)
    a.put(fresh)
    until(lambda: a.announced)
    assert b.read(before) == b.read(fresh) == 10
    late = NamespaceRecord.simple("opened meanwhile", block_bytes=4096, block_tokens=16)
    digest = a.client.open(late).digest.hex()  # it is registered later
    for seat in (a, b):
        described = seat.client.cluster()
        assert "give a user" in described["errors"]["membership"]
        assert seat.client.stats().cluster.membership_failures > 0
        assert seat.node.process.poll() is None
    token = world.etcd.post("auth/authenticate", {"name": "root", "password": "secret"})["token"]
    world.etcd.post("auth/disable", {}, token=token)
    until(
        lambda: any(n["digest"] == digest for n in b.client.cluster()["namespaces"]),
        "what waited is registered",
    )
    until(lambda: not any(seat.client.cluster()["errors"] for seat in (a, b)), "all is well")
