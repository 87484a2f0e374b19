"""Slots that peers read before their commit: whatever becomes of them, nobody else writes there meanwhile."""

import pytest

from kvpool.errors import InvalidRequest, LimitExceeded, PoolFull
from kvpool.types import PartSpec, split_keys


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in numbers]


@pytest.fixture
def pool(make_pool):
    """One slab, of four slots; two of them are being written, half is done."""
    pool = make_pool(1)
    pool.peers = pool.node.holders.own("red", "loans")
    pool.ticket, pool.rows = pool.reserve([1, 2])
    pool.node.early_reads.written(pool.holder, pool.ticket, 512)
    return pool


def open_loan(pool, *numbers, stop=512):
    token, rows = pool.node.early_reads.lease(
        pool.peers, pool.namespace.tables[0], keys(*numbers), stop
    )
    return token, list(rows.values())


def told(pool, *numbers):
    digest = pool.namespace.directory_digest
    return [tuple(run) for run in pool.node.early_reads.being_written(digest, keys(*numbers))]


def free_slots(pool) -> int:
    """How many more blocks there is room for, where nothing can go."""
    for count in range(4, 0, -1):
        ticket, rows = 0, []
        try:
            ticket, rows = pool.reserve(range(100, 100 + count))
        except PoolFull:
            continue
        pool.node.puts.abort(pool.holder, ticket)
        return len(rows)
    return 0


def test_what_is_said_to_be_written_is_told_and_lent_and_nothing_else(pool):
    first, second = pool.rows
    assert told(pool, 9, 1, 2, 9, 2) == [(1, 0, 1, 2, 512), (1, 0, 4, 1, 512)]
    assert pool.here([1, 2]) == []
    assert open_loan(pool, 2, 9)[1] == [second]
    assert open_loan(pool, 1, 2, stop=513) == ("", [])
    pool.node.early_reads.written(pool.holder, pool.ticket, 1024)
    assert open_loan(pool, 1, stop=513)[1] == [first]
    pool.node.early_reads.written(
        pool.holder, pool.ticket, 700
    )  # less than it has said: nothing new
    assert told(pool, 1) == [(1, 0, 0, 1, 1024)]


def test_reservations_side_by_side_are_told_apart(pool):
    other, _ = pool.reserve([3])
    assert told(pool, 1, 2, 3) == [(1, 0, 0, 2, 512)]
    pool.node.early_reads.written(pool.holder, other, 100)
    assert told(pool, 1, 2, 3) == [(1, 0, 0, 2, 512), (2, 0, 2, 1, 100)]
    rival = pool.node.holders.add("red", "rival")
    same, _ = pool.reserve([1], holder=rival)
    pool.node.early_reads.written(rival, same, 300)
    assert told(pool, 1) == [(1, 0, 0, 1, 512)], "who was first"
    pool.node.puts.abort(pool.holder, pool.ticket)
    assert told(pool, 1, 2, 3) == [(2, 0, 2, 1, 100)]
    pool.node.early_reads.written(rival, same, 400)
    assert told(pool, 1, 2, 3) == [(3, 0, 0, 1, 400), (2, 0, 2, 1, 100)]


@pytest.mark.parametrize("nbytes", [-1, 0, 1025])
def test_bytes_that_a_slot_does_not_have(pool, nbytes):
    with pytest.raises(InvalidRequest):
        pool.node.early_reads.written(pool.holder, pool.ticket, nbytes)
    assert told(pool, 1, 2) == [(1, 0, 0, 2, 512)]


def test_words_that_come_late_or_from_somebody_else_say_nothing(pool):
    pool.node.early_reads.written(pool.node.holders.add("red", "other"), pool.ticket, 1024)
    assert told(pool, 1) == [(1, 0, 0, 1, 512)]
    pool.node.puts.commit(pool.holder, pool.ticket, bytes(32))
    pool.node.early_reads.written(pool.holder, pool.ticket, 1024)
    assert told(pool, 1, 2) == []
    assert open_loan(pool, 1, 2) == ("", [])


@pytest.mark.parametrize("end", ["abort", "death"])
def test_slots_of_a_writer_that_gives_up_are_free_when_the_last_reader_is_done(pool, end):
    tokens = [open_loan(pool, 1, 2)[0], open_loan(pool, 2)[0]]
    assert free_slots(pool) == 2
    if end == "abort":
        pool.node.puts.abort(pool.holder, pool.ticket)
    else:
        pool.node.holders.died(pool.holder)
        pool.holder = pool.node.holders.add("red", "next")
    assert told(pool, 1, 2) == []
    for token in tokens:
        assert free_slots(pool) == 2
        pool.node.leases.release(pool.peers, token)
    assert free_slots(pool) == 4
    assert pool.bytes_used == 0


def test_blocks_that_are_read_since_before_their_commit_do_not_go(pool):
    token, _ = open_loan(pool, 1, 2)
    pool.node.puts.commit(pool.holder, pool.ticket, bytes(32))
    assert pool.here([1, 2]) == [1, 2]
    assert free_slots(pool) == 2
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1])))
    assert free_slots(pool) == 2
    pool.node.leases.release(pool.peers, token)
    assert free_slots(pool) == 4


def test_a_copy_that_came_second_stays_until_it_is_read(pool):
    other = pool.node.holders.add("red", "other")
    assert pool.put([1, 2], holder=other) == 2
    token, _ = open_loan(pool, 1)
    assert pool.node.puts.commit(pool.holder, pool.ticket, bytes(32)) == 0
    pool.node.removal.remove(pool.namespace, split_keys(pool.keys([1, 2])))
    assert free_slots(pool) == 2
    pool.node.leases.release(pool.peers, token)
    assert free_slots(pool) == 4


def test_the_end_of_an_epoch_while_it_is_read(pool):
    token, _ = open_loan(pool, 1, 2)
    old = pool.reset()
    pool.node.early_reads.written(pool.holder, pool.ticket, 1024)
    assert pool.node.early_reads.being_written(pool.namespace.directory_digest, keys(1, 2)) == []
    assert pool.node.puts.commit(pool.holder, pool.ticket, bytes(32)) == 0
    assert not old.tables[0].writing
    assert free_slots(pool) == 2
    pool.node.leases.release(pool.peers, token)
    assert free_slots(pool) == 4


def test_part_of_a_reservation_that_is_committed_before_the_rest(pool):
    token, _ = open_loan(pool, 1, 2)
    pool.node.puts.commit(pool.holder, pool.ticket, bytes(16), [0])
    assert told(pool, 1, 2) == [(1, 0, 1, 1, 512)]
    pool.node.puts.abort(pool.holder, pool.ticket)
    assert free_slots(pool) == 2
    pool.node.leases.release(pool.peers, token)
    assert free_slots(pool) == 4


def test_loans_have_a_limit(make_pool):
    pool = make_pool(1, leases_per_holder=2)
    pool.peers = pool.node.holders.own("red", "loans")
    ticket, _ = pool.reserve([1])
    pool.node.early_reads.written(pool.holder, ticket, 1)
    for _ in range(2):
        open_loan(pool, 1, stop=1)
    with pytest.raises(LimitExceeded):
        open_loan(pool, 1, stop=1)


def test_each_part_has_its_own(make_pool):
    pool = make_pool(2, parts=(PartSpec(1024), PartSpec(1024)))
    for part in (1, 0):
        ticket, _ = pool.reserve([1, 2], part=part)
        pool.node.early_reads.written(pool.holder, ticket, 10 + part)
    assert told(pool, 1, 2) == [(2, 0, 0, 2, 10), (1, 1, 0, 2, 11)]


def test_a_slab_with_slots_that_are_still_read_is_not_emptied(pool):
    token, _ = open_loan(pool, 1)
    pool.node.puts.abort(pool.holder, pool.ticket)
    pool.put([7])
    whole_slab = pool.open(b"m" * 16, (PartSpec(4096),))
    with pytest.raises(PoolFull):
        pool.reserve([8], namespace=whole_slab)
    pool.node.leases.release(pool.peers, token)
    assert len(pool.reserve([8], namespace=whole_slab)[1]) == 1
