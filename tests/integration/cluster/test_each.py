"""Blocks that are no chain, on two nodes, with a directory and without: where they are, leases on them, their removal."""

import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvpool.client import NO_ROW, Client, OperatorClient, Presence
from kvpool.errors import ClusterUnavailable, InvalidRequest, LimitExceeded
from kvpool.types import NO_PARENT, Namespace, NamespaceRecord, PartSpec
from kvpool.wire import operator as operator_wire
from tests.support.client_inside import numbers_of
from tests.support.waiting import PATIENCE_S, until

SIZES = 8192, 512
PAST_ONE_EXCHANGE = (
    4200  # blocks of part 0: more than 32 MiB, which a put does not copy before it asks
)
RECORD = NamespaceRecord({"model": "each"}, tuple(map(PartSpec, SIZES)))
OTHERS = [NamespaceRecord({"model": f"each {n}"}, (PartSpec(SIZES[1]),)) for n in range(2)]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [key(number) for number in numbers]


def block(number: int, part: int = 0) -> bytes:
    return np.random.default_rng([number, part]).bytes(SIZES[part])


def put(client: Client, numbers: Sequence[int], part: int = 0) -> list[bool]:
    ns = client.open(RECORD)
    return client.put_each(
        ns, keys_of(numbers), [block(n, part) for n in numbers], part=part
    ).tolist()


def presence(client: Client, numbers: Sequence[int], part: int = 0) -> list[Presence]:
    found = client.present(client.open(RECORD), keys_of(numbers), part=part, wait_s=PATIENCE_S)
    return [Presence(one) for one in found.tolist()]


@pytest.fixture(params=["directory", "peers"])
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Client, Client]]:
    """Clients at two nodes; the second one finds what the first one has."""
    if request.param == "directory":
        world = request.getfixturevalue("start_cluster")(nodes=2)
        a, b = (seat.client for seat in world.seats())
    else:
        start = request.getfixturevalue("start")
        first = start("--listen", "tcp://127.0.0.1:0", name="a")
        url = first.ready.rsplit("peers at ", 1)[1].strip()
        a, b = first.client(connect=True), start("--peer", url, name="b").client(connect=True)
    yield a, b
    a.close()
    b.close()


def known(client: Client, numbers: Sequence[int], part: int = 0) -> None:
    """Until a node knows that another one has these: the directory is told in batches."""
    until(
        lambda: all(presence(client, numbers, part)), f"somebody has {len(numbers)} of part {part}"
    )


def test_presence_tells_memory_from_elsewhere_and_from_nowhere_for_each_key_and_part(two):
    a, b = two
    assert put(a, [1, 2, 3, 7]) == [True] * 4
    assert put(a, [2], part=1) == [True]
    assert put(b, [9, 3]) == [True] * 2
    known(b, [1, 2, 7])
    known(b, [2], part=1)
    here, there, no = Presence.MEMORY, Presence.ELSEWHERE, Presence.NOWHERE
    assert presence(b, [7, 8, 9, 3, 2, 1]) == [there, no, here, here, there, there]
    assert presence(b, [1, 2, 9], part=1) == [no, there, no]
    ns = b.open(RECORD)
    assert b.present(ns, keys_of([7, 9]), wait_s=0.0).tolist() == [no, here], "nobody was asked"
    assert b.present(ns, []).tolist() == []


def test_scattered_leases_bring_what_is_elsewhere(two):
    a, b = two
    put(a, [1, 5, 6])
    put(b, [3])
    known(b, [1, 5, 6])
    ns = b.open(RECORD)
    wanted = [5, 4, 3, 1]
    with b.acquire_each(ns, keys_of(wanted)) as lease:
        assert lease.blocks == 1
        assert (lease.slots[0].rows == NO_ROW).tolist() == [True, True, False, True]
    with b.acquire_each(ns, keys_of(wanted), wait_s=PATIENCE_S) as lease:
        slots = lease.slots[0]
        assert lease.blocks == 3
        assert (slots.rows == NO_ROW).tolist() == [False, True, False, False]
        for at, number in enumerate(wanted):
            if number != 4:
                assert bytes(slots.view(at)) == block(number)
    assert b.acquire_each(ns, keys_of([44, 45])) is None


def test_blocks_are_scattered_over_many_buffers(two):
    a, b = two
    put(a, [1, 2])
    known(b, [1, 2])
    ns = b.open(RECORD)
    pieces = [np.zeros(n, np.uint8) for n in (1000, 7000, 192)]
    many = [np.zeros(8, np.uint8) for _ in range(1024)]  # more than one system call takes
    whole = bytearray(SIZES[0])
    out = [pieces, whole, many, whole]
    got = b.get_into(ns, keys_of([1, 4, 2, 5]), out, wait_s=PATIENCE_S)
    assert got.tolist() == [True, False, True, False]
    assert b"".join(map(bytes, pieces)) == block(1)
    assert b"".join(map(bytes, many)) == block(2)
    verified = b.open(RECORD, verify=True)
    assert b.get_into(verified, keys_of([1]), [pieces]).tolist() == [True]
    with pytest.raises(InvalidRequest):
        b.get_into(ns, keys_of([1]), [pieces[:2]])


def test_a_removal_reaches_the_other_node_and_nothing_comes_back(two):
    a, b = two
    put(a, range(600))
    known(b, range(600))
    ns = b.open(RECORD)
    assert b.get_into(
        ns, keys_of(range(300)), np.empty((300, SIZES[0]), np.uint8), wait_s=PATIENCE_S
    ).all()
    gone = keys_of([*range(100, 500), 7777])
    assert b.remove(ns, gone, others_s=PATIENCE_S) == 400
    assert not a.contains(a.open(RECORD), gone).any()
    until(lambda: not b.present(ns, gone, wait_s=PATIENCE_S).any(), "the directory has heard of it")
    out = np.empty((len(gone), SIZES[0]), np.uint8)
    assert not b.get_into(ns, gone, out, wait_s=PATIENCE_S).any()
    assert a.contains(a.open(RECORD), keys_of(range(100))).all(), "the others stay"


def put_in(client: Client, record: NamespaceRecord, numbers: Sequence[int]) -> None:
    blocks = [block(n, 1) for n in numbers]
    assert client.put_each(client.open(record), keys_of(numbers), blocks).all()


def opened(client: Client) -> list[Namespace]:
    return [client.open(record) for record in OTHERS]


def test_presence_in_several_namespaces_at_a_time(two):
    a, b = two
    put_in(a, OTHERS[0], [1, 2])
    put_in(a, OTHERS[1], [3, 4])
    put_in(b, OTHERS[1], [2, 5])
    here, there, no = Presence.MEMORY, Presence.ELSEWHERE, Presence.NOWHERE
    until(
        lambda: (
            b.present_in(opened(b), keys_of([1, 2, 3, 4]), wait_s=PATIENCE_S)[0]
            == [bytes([there, there, no, no]), bytes([no, here, there, there])]
        ),
        "what the other node has is known",
    )
    wanted = keys_of([1, 2, 3, 5, 9])
    rows, beside = b.present_in(
        opened(b), wanted, beside=keys_of([2, 9, 1]), first=True, wait_s=PATIENCE_S
    )
    assert rows == [bytes([there, no, no, no, no]), bytes([no, here, there, here, no])]
    assert list(beside) == [there, no, there]
    rows, _ = b.present_in(opened(b), wanted, wait_s=PATIENCE_S)
    assert list(rows[0]) == [there, there, no, no, no], "without `first` each is asked for all"
    rows, beside = b.present_in(
        opened(b), keys_of([2, 5]), first=True, beside=keys_of([1]), wait_s=PATIENCE_S
    )
    assert rows == [bytes(2), bytes([here] * 2)]
    assert list(beside) == [no], "nobody was asked for the keys, and so for those beside"
    assert b.present_in([], wanted, beside=key(1)) == ([], bytes(1))
    assert b.present_in(opened(b), []) == ([b"", b""], b"")


def test_a_removal_from_several_namespaces_reaches_the_other_node(two):
    a, b = two
    put_in(a, OTHERS[0], [1, 2, 7])
    put_in(a, OTHERS[1], [2, 3])
    put_in(b, OTHERS[1], [4, 7])
    until(
        lambda: b.present_in(opened(b), key(7), wait_s=PATIENCE_S)[0][0][0] > 0,
        "what the other node has is known",
    )
    gone, beside = b.remove_each(
        opened(b), keys_of([1, 2, 3, 4, 9]), beside=keys_of([7, 9]), others_s=PATIENCE_S
    )
    assert gone == bytes([1, 1, 1, 1, 0]), "wherever each of them was"
    assert len(beside) == 2

    def seen() -> list[bool]:
        """Others are asked for a short time only."""
        _, beside = b.remove_each(
            opened(b), keys_of([9]), beside=keys_of([7, 9]), others_s=PATIENCE_S
        )
        return [bool(one) for one in beside]

    until(lambda: seen() == [True, False], "what stays is known, too")
    for client in (a, b):
        for ns in opened(client):
            assert not client.contains(ns, keys_of([1, 2, 3, 4])).any()
    assert a.contains(opened(a)[0], key(7))[0]
    assert b.contains(opened(b)[1], key(7))[0], "those beside stay"
    assert b.remove_each(opened(b), keys_of([7, 7])) == (bytes([1, 1]), b""), "from this node"
    assert a.contains(opened(a)[0], key(7))[0]
    assert b.remove(opened(b)[0], keys_of([7, 7]), others_s=PATIENCE_S) == 1, "one block"


def test_a_namespace_that_was_forgotten_is_opened_again_for_a_request_of_several(start):
    client = start("--memory", "64MiB").client(connect=True)
    put_in(client, OTHERS[0], [1])
    numbers = numbers_of(client)
    namespaces = opened(client)
    numbers[namespaces[1].digest] = 2**31
    rows, _ = client.present_in(namespaces, keys_of([1, 2]))
    assert rows == [bytes([Presence.MEMORY, 0]), bytes(2)]
    numbers[namespaces[1].digest] = 2**31
    assert client.remove_each(namespaces, keys_of([1, 2]))[0] == bytes([1, 0])
    client.close()


def test_a_request_about_several_namespaces_has_limits(start):
    client = start("--memory", "64MiB").client(connect=True)
    namespaces = opened(client)
    put_in(client, OTHERS[0], [1])
    for ask in (client.present_in, client.remove_each):
        with pytest.raises(LimitExceeded, match="namespaces"):
            ask(namespaces * 9, key(1))
        with pytest.raises(LimitExceeded, match="65536"):
            ask(namespaces, key(1) * (1 << 15), beside=key(1))
    assert client.contains(namespaces[0], key(1))[0], "nothing of a refused request is done"
    client.close()


def test_a_cleared_namespace_is_empty_everywhere_and_its_clients_go_on(start_cluster):
    a, b = (seat.client for seat in start_cluster(nodes=2).seats())
    put(a, [1, 2])
    put(b, [3])
    known(b, [1])
    assert b.namespaces.clear(b.open(RECORD)) > 0
    until(lambda: not any(presence(a, [1, 2, 3])), "the other node has heard of it")
    assert not any(presence(b, [1, 2, 3]))
    until(lambda: put(a, [1]) == [True] and all(presence(a, [1])), "it stores again")
    assert put(b, [2]) == [True]
    assert b.get(b.open(RECORD), key(2)) == [block(2)]


def test_a_node_that_does_not_remove_is_named(start_cluster):
    world = start_cluster(nodes=2)
    a, b = world.seats(RECORD)
    put(a.client, [1])
    known(b.client, [1])
    ns = b.client.open(RECORD)
    a.node.signal(signal.SIGSTOP)
    try:
        with pytest.raises(ClusterUnavailable, match=a.name):
            b.client.remove(ns, keys_of([1]), others_s=0.5)
    finally:
        a.node.signal(signal.SIGCONT)
    until(lambda: b.client.remove(ns, keys_of([1]), others_s=PATIENCE_S) == 1, "it is removed")
    assert not a.client.contains(a.client.open(RECORD), key(1))[0]


def test_what_finds_no_space_is_told_key_by_key(start):
    one = start("--memory", "8MiB").client(connect=True)
    ns = one.open(RECORD)
    assert put(one, [1, 2, 1500]) == [True] * 3
    assert one.pin(ns, keys_of([1, 2, 1500]), "hard") == 3
    numbers = range(1, 1600)
    stored = put(one, numbers)
    assert stored == one.contains(ns, keys_of(numbers)).tolist()
    assert any(stored)
    held = one.acquire_each(
        ns, keys_of([n for n, here in zip(numbers, stored, strict=True) if here])
    )
    assert held is not None
    fresh = put(one, [2, 5000, 5001, 1500])
    assert fresh == [True, False, False, True], "leases hold all space, and two are there"
    held.release()
    assert put(one, [5000, 5001]) == [True, True]
    one.close()


def parents_at(client: OperatorClient, ns: Namespace, numbers: Sequence[int]) -> list[str]:
    """The keys before these blocks, as operators see them."""
    shown = client.ask_node(operator_wire.ShowBlocks(ns.digest, b"".join(keys_of(numbers))))
    parents = {one.key: one.parent for one in shown}
    return [parents[one.hex()] for one in keys_of(numbers)]


def test_independent_blocks_have_no_parents(start):
    client = start("--memory", "64MiB").client(connect=True)
    ns = client.open(RECORD)
    put(client, [1, 2])
    chained = keys_of([3, 4, 5])
    parents = [NO_PARENT, key(3), key(1)]
    blocks = [block(n) for n in (3, 4, 5)]
    assert client.put_each(ns, chained, blocks, parents=parents).all()
    with pytest.raises(InvalidRequest):
        client.put_each(ns, chained, blocks, parents=parents[:2])
    parent_of = parents_at(client, ns, range(1, 6))
    assert parent_of == ["", "", "", key(3).hex(), key(1).hex()]
    client.put(ns, keys_of([20, 21]), [block(n) for n in (20, 21)], parent=key(1))
    assert parents_at(client, ns, [20, 21]) == [key(1).hex(), key(20).hex()]
    many = list(range(100, 100 + PAST_ONE_EXCHANGE))
    assert all(put(client, many)), "asked before they are copied"
    assert set(parents_at(client, ns, many[:64])) == {""}
    client.close()
