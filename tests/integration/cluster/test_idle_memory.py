"""Many nodes' memory works as one: what does not fit here is kept where there is room."""

import time

import pytest

MEMORY = 16 << 20
BLOCK = 32 << 10
ONE_NODE = MEMORY // BLOCK  # blocks
SHARE = 2.5  # the working set, of one node's memory; three nodes hold it


def fill(seat, some, before=lambda: None) -> None:
    """Put in steps, each of which succeeds; `before` is called ahead of each."""
    listed = list(some)
    for at in range(0, len(listed), 8):
        before()
        assert seat.put(listed[at : at + 8]) == 8


def at_a_pace(seat, until):
    """Waits until the next put would evict nothing but what others keep: forwarding keeps up."""

    def room() -> bool:
        tenant = seat.stats.tenants["default"]
        free = MEMORY - tenant.space.bytes_used + tenant.secondary_bytes
        return free >= 2 * 8 * BLOCK

    return lambda: until(room, "others take what does not fit")


def hits(seat, some) -> int:
    """Blocks found when each chain of 8 is read through this node."""
    listed = list(some)
    return sum(seat.read(listed[at : at + 8]) for at in range(0, len(listed), 8))


@pytest.fixture
def seats(start_cluster):
    return start_cluster(nodes=3, memory="16MiB").seats()


@pytest.mark.slow
def test_a_working_set_of_two_and_a_half_nodes_hits_as_in_one_memory(
    seats, numbers, until, record_testsuite_property
):
    a, b, c = seats
    some = numbers(int(ONE_NODE * SHARE) // 8 * 8)
    fill(a, some, at_a_pace(a, until))
    until(lambda: a.announced and b.announced and c.announced)
    found = [hits(a, some) for _ in range(3)]
    record_testsuite_property("hits_of_one_node", str([n / ONE_NODE for n in found]))
    assert b.here(some) > 0
    assert c.here(some) > 0
    assert min(found) > 1.8 * ONE_NODE, f"{found} of {len(some)}; one node holds {ONE_NODE}"


def test_puts_that_forwarding_cannot_keep_up_with_never_fail(seats, numbers, until):
    a, b, c = seats
    some = numbers(int(ONE_NODE * SHARE) // 8 * 8)
    fill(a, some)
    until(lambda: a.announced and b.announced and c.announced)
    assert hits(a, some) > 0.85 * ONE_NODE, "what one node holds alone"


def test_what_was_forwarded_outlives_the_node_that_it_came_from(start_cluster, numbers, until):
    world = start_cluster(nodes=2, memory="16MiB")
    a, b = world.seats()
    count = ONE_NODE + ONE_NODE // 2
    some = numbers(count)
    fill(a, some, at_a_pace(a, until))
    until(lambda: a.stats.replication.forwarded_blocks >= ONE_NODE // 2 - 64)
    until(lambda: a.announced and b.announced)
    kept = b.here(some)
    assert kept >= ONE_NODE // 2 - 64
    assert hits(a, some) > count - 64
    world.node("a").kill()
    assert b.get(some) >= kept


def test_nothing_is_forwarded_where_that_is_switched_off(start_cluster, numbers):
    world = start_cluster(nodes=2, memory="16MiB", environ={"KVPOOL_FORWARD": "false"})
    a, b = world.seats()
    fill(a, numbers(ONE_NODE * 2))
    assert a.counter("forwarded_blocks") == 0
    assert b.stats.tenants["default"].blocks == 0


def test_full_nodes_do_not_pass_their_blocks_to_and_fro(start_cluster, numbers, until):
    world = start_cluster(nodes=2, memory="16MiB")
    a, b = world.seats()
    for seat in (a, b):
        fill(seat, numbers(ONE_NODE))
    until(lambda: a.announced and b.announced)
    seen = [(-1, 0.0)]  # how many blocks were forwarded, since when

    def forwarded_nothing_for_a_second() -> bool:
        now, count = time.monotonic(), sum(seat.counter("forwarded_blocks") for seat in (a, b))
        if count != seen[-1][0]:
            seen.append((count, now))
        return now - seen[-1][1] > 1

    until(forwarded_nothing_for_a_second, "nothing is offered any more")
    assert seen[-1][0] <= 2 * ONE_NODE
