"""Several parts of blocks of several prompts, reserved and committed in one exchange each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvpool.client import Client, OperatorClient
from kvpool.client.slots import Reservation
from kvpool.errors import (
    InvalidRequest,
    LimitExceeded,
    StaleEpoch,
    UnknownReservation,
)
from kvpool.types import KEY_BYTES, NO_PARENT, Namespace, NamespaceRecord, PartSpec
from kvpool.wire import operator as operator_wire

PART_BYTES = (4096, 8192, 4096)
PARTS = range(len(PART_BYTES))


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


ONE, OTHER = [key(100 + n) for n in range(3)], [key(200 + n) for n in range(2)]
KEYS = [*ONE, *OTHER]
PARENTS = [NO_PARENT, *ONE[:-1], key(199), OTHER[0]]


@pytest.fixture
def client(start_one: Any) -> Iterator[OperatorClient]:
    with start_one("--memory", "8MiB") as daemon, daemon.client(connect=True) as client:
        yield client


@pytest.fixture
def ns(client: Client) -> Namespace:
    parts = tuple(PartSpec(nbytes=nbytes) for nbytes in PART_BYTES)
    return client.open(NamespaceRecord(fields={"model": "m"}, parts=parts))


def contents(part: int, block: bytes) -> Any:
    """The bytes of a part of a block."""
    draw = np.random.default_rng([part, *block])
    return draw.integers(0, 256, PART_BYTES[part], np.uint8)


def fill(reservations: list[Reservation], keys: list[bytes]) -> None:
    for part, reservation in zip(PARTS, reservations, strict=True):
        slots = reservation.slots
        for row, at in zip(slots.rows, reservation.missing, strict=True):
            slots.table[row, : slots.nbytes] = contents(part, keys[at])


def test_blocks_of_two_prompts_are_stored_in_all_parts(client: Client, ns: Namespace) -> None:
    reservations = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
    assert [len(each.missing) for each in reservations] == [5, 5, 5]
    assert client.match(ns, ONE) == 0
    fill(reservations, KEYS)
    assert client.commit_parts(reservations) == [5, 5, 5]
    assert client.match(ns, ONE) == 3
    assert client.match(ns, OTHER) == 2
    for part in PARTS:
        found = client.get(ns, KEYS, part=part)
        assert found == [contents(part, block).tobytes() for block in KEYS]


def test_only_what_is_missing_is_reserved(client: Client, ns: Namespace) -> None:
    client.put(ns, [KEYS[1]], [contents(1, KEYS[1]).tobytes()], part=1)
    reservations = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
    assert [each.missing.tolist() for each in reservations] == [
        [0, 1, 2, 3, 4],
        [0, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    fill(reservations, KEYS)
    assert client.commit_parts(reservations) == [5, 4, 5]
    # All are there: nothing to write, and nothing to say.
    again = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
    assert [len(each.missing) for each in again] == [0, 0, 0]
    assert client.commit_parts(again) == [0, 0, 0]


def test_a_part_without_space_is_refused_whole(client: Client, ns: Namespace) -> None:
    many = [key(1000 + n) for n in range(2046)]
    with client.reserve(ns, many, part=0) as held:
        assert not held.refused
        reservations = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
        assert [each.refused for each in reservations] == [3, 5, 5]
        assert [len(each.missing) for each in reservations] == [2, 0, 0]
        with pytest.raises(LimitExceeded, match="commit or abort first"):
            client.reserve_parts(ns, ONE, PARTS, PARENTS[: len(ONE)])
        for each in reservations:
            each.abort()


def test_what_cannot_be_reserved_leaves_nothing_behind(
    client: OperatorClient, ns: Namespace
) -> None:
    before = client.stats().counters
    with pytest.raises(InvalidRequest, match="there is no part 3"):
        client.reserve_parts(ns, KEYS, [0, 1, 2, 3], PARENTS)
    after = client.stats().counters
    assert after.reserved - before.reserved == after.aborted - before.aborted == 3 * len(KEYS)
    with pytest.raises(InvalidRequest, match="5 keys with 4 parents"):
        client.reserve_parts(ns, KEYS, PARTS, PARENTS[1:])
    with pytest.raises(InvalidRequest, match="at least one"):
        client.reserve_parts(ns, KEYS, [], PARENTS)
    many = [key(n) for n in range(1 << 15)]
    with pytest.raises(LimitExceeded, match="the limit is 65536 together"):
        client.reserve_parts(ns, many, PARTS, many)


@pytest.mark.parametrize(
    ("requests", "error", "said"),
    [
        ([("", 1)] * 1_000_000, LimitExceeded, "1000000 labels of requests; the limit is 4096"),
        ([("a", 0)], InvalidRequest, "'a' has 0 of 5 keys"),
        ([("a", -1)], InvalidRequest, "'a' has -1 of 5 keys"),
        ([("a", 3), ("b", 3)], InvalidRequest, "'b' has 3 of 5 keys"),
        ([("a\n", 3)], InvalidRequest, "must be at most 256 printable characters"),
    ],
    ids=["many", "none", "negative", "more-than-keys", "unprintable"],
)
def test_labels_that_make_no_sense_reserve_nothing(
    client: OperatorClient, ns: Namespace, requests: Any, error: Any, said: str
) -> None:
    before = client.stats().counters.reserved
    with pytest.raises(error, match=said):
        client.reserve_parts(ns, KEYS, PARTS, PARENTS, requests=requests)
    assert client.stats().counters.reserved == before


def booked(client: OperatorClient, request: str) -> Any:
    """The receipt of a request."""
    node = client.stats().node
    found = client.ask_node(operator_wire.ListReceipts(0.0, 1e12, 100), node=node)["receipts"]
    (receipt,) = [each for each in found if each["request"] == request]
    return receipt


def test_labels_get_the_blocks_that_they_stored_themselves(
    client: OperatorClient, ns: Namespace
) -> None:
    """And not those that somebody else stored between."""
    (reserved,) = client.reserve_parts(
        ns, KEYS, [0], PARENTS, requests=[("first", 2), ("", 1), ("last", 2)]
    )
    client.put(ns, KEYS[:2], bytes(2 * PART_BYTES[0]), part=0)
    assert client.commit_parts([reserved]) == [3]
    assert booked(client, "last")["written"]["blocks"] == 2
    with pytest.raises(ValueError, match="not enough values"):
        booked(client, "first")


def test_what_is_refused_in_all_parts_counts_once_a_request(
    client: OperatorClient, ns: Namespace
) -> None:
    many = [key(1000 + n) for n in range(2100)]

    def account() -> tuple[int, int]:
        refused = client.stats().tenants["default"].traffic.account.refused.values()
        return sum(each.requests for each in refused), sum(each.parts for each in refused)

    with client.reserve(ns, many, part=0) as held:
        assert account() == (0, held.refused)  # of one request, which stores the rest
        with pytest.raises(InvalidRequest, match="there is no part 3"):
            client.reserve_parts(ns, KEYS, [3, 3], PARENTS, requests=[("wrong", 5)])
        (invalid,) = booked(client, "wrong")["refused"].values()
        assert (invalid["requests"], invalid["parts"]) == (1, 10)
        with pytest.raises(LimitExceeded):
            client.reserve_parts(ns, KEYS, [0, 0], PARENTS, requests=[("A", 3), ("B", 2)])
        for request, count in ("A", 3), ("B", 2):
            (refused,) = booked(client, request)["refused"].values()
            assert (refused["requests"], refused["parts"]) == (1, 2 * count)
        assert account() == (3, held.refused + 20)


def test_puts_that_are_refused_with_their_grant_count(
    client: OperatorClient, ns: Namespace
) -> None:
    client.clear(ns.digest, fence=True)
    for number in range(3):
        with pytest.raises(StaleEpoch):
            client.put(ns, [key(number)], bytes(PART_BYTES[0]), part=0)
    refused = client.stats().tenants["default"].traffic.account.refused
    assert {why: (each.requests, each.parts) for why, each in refused.items()} == {"epoch": (3, 3)}


def test_one_that_was_settled_before_does_not_keep_the_others(
    client: Client, ns: Namespace
) -> None:
    first, second, third = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
    fill([first, second, third], KEYS)
    client.commit(second)
    with pytest.raises(UnknownReservation, match="1 of 3"):
        client.commit_parts([first, second, third])
    assert client.match(ns, ONE) == 3


def test_what_the_daemon_refuses_to_commit_can_be_given_back(
    client: OperatorClient, ns: Namespace
) -> None:
    before = client.stats().counters.aborted
    reservations = client.reserve_parts(ns, KEYS, PARTS, PARENTS)
    with (
        patch("kvpool.client.slots.row_checksums", lambda *_: b"too short"),
        pytest.raises(InvalidRequest, match="bytes of checksums"),
    ):
        client.commit_parts(reservations)
    for reservation in reservations:
        reservation.abort()
    assert client.stats().counters.aborted - before == 3 * len(KEYS)
