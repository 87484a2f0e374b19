"""Leaving on purpose: nothing new comes, what only this node has goes elsewhere, leases end, it leaves."""

import pytest

from kvpool.errors import InvalidRequest, PoolFull, Unavailable
from kvpool.placement.records import NodeState


def left(seat, name: str) -> bool:
    return name not in seat.members


def test_what_only_a_drained_node_had_is_read_from_others_after_it_is_stopped(
    start_cluster, numbers, until
):
    world = start_cluster(nodes=3, memory="32MiB")
    a, b, c = world.seats()
    sole, shared = numbers(200), numbers(50)
    for at in range(0, 200, 50):
        a.put(sole[at : at + 50])
    a.put(shared)
    b.put(shared)
    until(lambda: a.announced and b.announced)
    c.client.drain("a")
    until(lambda: left(c, "a"), "it has left")
    progress = a.client.cluster()
    assert progress["state"] == "gone"
    world.node("a").stop()
    until(lambda: b.announced and c.announced)
    assert b.read(sole) == 200
    assert c.read(shared) == 50
    assert b.counter("taken_blocks") + c.counter("taken_blocks") == 200, (
        "sole copies, and no others"
    )


def test_a_draining_node_takes_nothing_new_and_reads_go_on(start_cluster, numbers, until):
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    some = numbers(50)
    a.put(some)
    until(lambda: a.announced)
    keys = [n.to_bytes(16, "big") for n in some]
    lease = a.client.acquire(a.ns, keys, lease_s=60)
    b.client.drain("a")
    until(lambda: b.members["a"]["state"] == NodeState.DRAINING)
    with pytest.raises(PoolFull, match="--cancel"):
        a.put(numbers(3))
    new = [n.to_bytes(16, "big") for n in numbers(2)]
    with pytest.raises(PoolFull, match="--cancel"):
        a.client.reserve_parts(a.ns, new, [0, 0], new, requests=[("a", 1), ("b", 1)])
    with pytest.raises(InvalidRequest, match="length <= 4096"):
        a.client.reserve_parts(a.ns, new, [0] * 1_000_000, new)
    refused = a.client.stats().tenants["default"].traffic.account.refused
    assert {why: (each.requests, each.parts) for why, each in refused.items()} == {
        "draining": (1 + 2, 3 + 2 * 2)
    }
    assert a.read(some) == 50
    until(lambda: (b.members["a"]["drain"] or {}).get("phase") == "waiting", "for the lease")
    progress = b.members["a"]["drain"]
    assert (progress["copied"], progress["failed"], progress["leases"]) == (50, 0, 1)
    assert progress["blocks"] == progress["blocks_total"] == 50
    assert progress["copied_bytes"] >= 50 * (32 << 10)
    assert not left(b, "a")
    assert [bytes(lease.slots[0].view(i)) for i in range(3)], "still there"
    lease.release()
    until(lambda: left(b, "a"), "the lease has ended")
    assert b.read(some) == 50


def test_a_drain_that_is_called_off_leaves_a_node_like_any_other(start_cluster, numbers, until):
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    some, more = numbers(20), numbers(20)
    a.put(some)
    until(lambda: a.announced)
    lease = a.client.acquire(a.ns, [n.to_bytes(16, "big") for n in some], lease_s=60)
    before = a.incarnation
    b.client.drain("a")
    until(lambda: (b.members["a"]["drain"] or {}).get("phase") == "waiting")
    b.client.drain("a", wanted=False)
    until(lambda: b.members["a"]["state"] == NodeState.SERVING)
    assert a.incarnation == before, "it never left"
    assert b.members["a"]["drain"] is None
    lease.release()
    assert a.put(more) == 20
    until(lambda: a.announced)
    assert b.read(more) == 20


def test_a_node_that_has_left_comes_back_when_its_drain_is_called_off(
    start_cluster, numbers, until
):
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    some, more = numbers(20), numbers(20)
    a.put(some)
    until(lambda: a.announced)
    before = a.incarnation
    b.client.drain("a")
    until(lambda: left(b, "a"))
    assert a.read(some) == 20, "its own clients read on"
    b.client.drain("a", wanted=False)
    until(lambda: not left(b, "a"))
    until(lambda: a.incarnation == b.members.get("a", {}).get("incarnation") != before)
    assert a.put(more) == 20
    until(lambda: b.read(more, wait_s=1) == 20)


def test_the_last_node_leaves_and_says_what_found_no_place(start_cluster, numbers, until):
    world = start_cluster(nodes=1, memory="32MiB")
    a = world.seat("a")
    some = numbers(30)
    a.put(some)
    until(lambda: a.announced)
    lease = a.client.acquire(a.ns, [n.to_bytes(16, "big") for n in some], lease_s=60)
    a.client.drain("a")
    until(lambda: (a.members["a"]["drain"] or {}).get("phase") == "waiting")
    progress = a.members["a"]["drain"]
    assert (progress["copied"], progress["failed"]) == (0, 30)
    lease.release()
    until(lambda: a.client.cluster()["state"] == "gone")
    assert a.read(some) == 30
    with pytest.raises(PoolFull):
        a.put(numbers(1))


def test_a_node_is_drained_while_another_reads_from_it(start_cluster, numbers, until, load):
    world = start_cluster(nodes=3, memory="32MiB")
    a, b, c = world.seats()
    some = list(numbers(600))
    for at in range(0, 600, 50):
        a.put(some[at : at + 50])
    until(lambda: a.announced)
    hits = []

    def read(turn: int) -> None:
        hits.append(b.read(some[turn * 2 % 600 : turn * 2 % 600 + 2]))

    with load(read) as going:
        until(lambda: going.done[0] > 10)
        c.client.drain("a")
        until(lambda: left(c, "a"))
        until(lambda: going.done[0] > 300, "all was read once")
    assert not going.failures
    assert set(hits) == {2}, "what was asked of it while it left was found there or elsewhere"
    until(lambda: b.announced and c.announced)
    assert c.read(some) == 600


@pytest.mark.slow
def test_a_rolling_restart_of_all_nodes_under_load_costs_no_wrong_read_and_no_write_elsewhere(
    start_cluster, numbers, until, load
):
    world = start_cluster(nodes=3, memory="128MiB")
    seats = {seat.name: seat for seat in world.seats()}
    a = seats["a"]
    kept = list(numbers(150))
    for at in range(0, 150, 50):
        a.put(kept[at : at + 50])
    until(lambda: a.announced)
    leaving: list[str] = []
    failed = []
    hits, asked = [0], [0]

    def reader(name: str):
        def read(turn: int) -> None:
            one = kept[turn * 7 % 140 : turn * 7 % 140 + 8]
            found = seats[name].read(one, wait_s=2)
            if name not in leaving:
                asked[0] += 1
                hits[0] += found == 8

        return read

    def writer(name: str):
        fresh = numbers(1 << 16)

        def write(turn: int) -> None:
            before = list(leaving)
            try:
                seats[name].put(fresh[turn * 2 % 400 : turn * 2 % 400 + 2])
            except (PoolFull, Unavailable) as error:
                if name not in before and name not in leaving:
                    failed.append((name, error))

        return write

    with load(*(make(name) for name in "abc" for make in (reader, writer))) as going:
        for name in "abc":
            until(lambda: min(going.done) > 3)
            other = "b" if name == "a" else "a"
            leaving.append(name)
            seats[other].client.drain(name)
            until(lambda n=name, o=other: left(seats[o], n), f"{name} has left")
            world.node(name).restart()
            until(lambda n=name: all(n in seat.members for o, seat in seats.items() if o != n))
            until(lambda n=name: seats[n].client.warm(), "its clients have found it again")
            leaving.remove(name)
            enough = [done + 5 for done in going.done]
            until(lambda e=enough: all(d >= n for d, n in zip(going.done, e, strict=True)))
    assert not failed
    assert hits[0] > 0.8 * asked[0], f"{hits[0]} of {asked[0]}"
    for seat in seats.values():
        until(lambda one=seat: one.announced)
    for seat in seats.values():
        assert seat.read(kept, wait_s=20) == 150, "what was there before all restarts"


def on_disk_only(seat, some, until) -> None:
    """Have all of the blocks on the node's disk, and none in memory. At the pace of the disk."""
    for at in range(0, len(some), 50):
        written = seat.stats.tiers.ssd[0].written_blocks + len(some[at : at + 50])
        seat.put(some[at : at + 50])
        until(
            lambda written=written: seat.stats.tiers.ssd[0].written_blocks == written,
            "written through",
        )
    seat.client.evict(tier="dram")
    assert seat.here(some) == 0
    until(lambda: seat.announced)


def test_what_is_only_on_a_drained_nodes_disk_goes_elsewhere_too(start_cluster, numbers, until):
    """A little at a time, by way of memory."""
    world = start_cluster(
        nodes=2, memory="8MiB", ssd="64MiB", environ={"KVPOOL_SSD_WRITE": "through"}
    )
    a, b = world.seats()
    sole, shared = numbers(100), numbers(20)
    on_disk_only(a, [*sole, *shared], until)
    b.put(shared)
    until(lambda: b.announced)
    b.client.drain("a")
    until(lambda: left(b, "a"), "it has left")
    progress = a.client.cluster()
    assert progress["state"] == "gone"
    assert b.counter("taken_blocks") == 100, "sole copies, and no others"
    world.node("a").stop()
    until(lambda: b.stats.tiers.queued_writes == 0)
    assert b.read(sole) == 100


def test_a_drain_does_not_wait_for_disks_longer_than_it_may(start_cluster, numbers, until):
    world = start_cluster(
        nodes=2,
        memory="8MiB",
        ssd="64MiB",
        environ={"KVPOOL_SSD_WRITE": "through", "KVPOOL_SSD_DRAIN_S": "0"},
    )
    a, b = world.seats()
    some = numbers(50)
    on_disk_only(a, some, until)
    a.put(numbers(1))
    until(lambda: a.stats.tiers.ssd[0].written_blocks == 51)
    b.client.drain("a")
    until(lambda: left(b, "a"))
    # Others have seen that for a second only.
    last = a.stats.cluster.drain
    assert (last.phase, last.copied, last.failed, last.left) == ("done", 1, 0, 50)
    assert last.blocks + last.left == last.blocks_total == 52
    assert b.counter("taken_blocks") == 1
