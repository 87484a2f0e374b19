"""Where blocks of several namespaces are, against a plain model, with tiers below memory and without."""

import asyncio
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.daemon.core.blocks import PartTable
from kvpool.daemon.core.requests import check_counts
from kvpool.daemon.ops.presence import AT_A_TIME, Presences
from kvpool.errors import InvalidRequest, LimitExceeded
from kvpool.types import Presence
from kvpool.wire.frame import KEYS_MAX, NAMESPACES_MAX
from tests.unit.daemon.conftest import QUARTER, Pool

NAMESPACES, KEYS = 4, 6
Where = list[dict[int, Presence]]
"""For each namespace, where the blocks of some keys are, by their numbers."""


class Below:
    """Stands in for the fetcher: it knows where blocks are, and what it was asked for."""

    def __init__(self, pool: Pool, where: Where, *, active: bool) -> None:
        self._pool = pool
        self._where = where
        self.active = active
        self.lookups = self
        self.asked: list[tuple[int, list[int]]] = []

    async def presence(self, table: PartTable, keys: Sequence[bytes], wait_s: float) -> bytes:
        number = table.namespace.number
        numbers = [int.from_bytes(key, "big") for key in keys]
        self.asked.append((number, numbers))
        await asyncio.sleep(0)
        return bytes([self._where[number].get(one, Presence.NOWHERE) for one in numbers])


def world(where: Where, *, active: bool) -> tuple[Pool, Presences, Below, list[Any]]:
    """A node whose memory has what is said to be there, in namespaces numbered from 0."""
    pool = Pool(slabs=64)
    namespaces = [pool.namespace]
    namespaces += [pool.open(bytes([n]) * 16, (QUARTER,)) for n in range(1, len(where))]
    for namespace, blocks in zip(namespaces, where, strict=True):
        in_memory = [n for n, at in blocks.items() if at == Presence.MEMORY]
        if in_memory:
            pool.put(in_memory, namespace=namespace)
    below = Below(pool, where, active=active)
    presences = Presences(pool.node, below, lambda: 0.0)  # type: ignore[arg-type]
    return pool, presences, below, namespaces


def ask(presences: Presences, namespaces: list[Any], packed: bytes, **how: Any) -> bytes:
    found = presences.in_memory(namespaces, 0, packed, **how)
    if found.whole:
        return found.data
    return asyncio.run(presences.in_each(namespaces, 0, packed, 1.0, **how))


spots = st.sampled_from([Presence.MEMORY, Presence.MEMORY, Presence.DISK, Presence.ELSEWHERE])
worlds = st.lists(st.dictionaries(st.integers(0, KEYS), spots), min_size=1, max_size=NAMESPACES)
some_keys = st.lists(st.integers(0, KEYS), max_size=2 * KEYS)


@given(where=worlds, keys=some_keys, beside=some_keys, first=st.booleans(), active=st.booleans())
def test_presence_in_several_namespaces_is_that_of_each(where, keys, beside, first, active):
    pool, presences, below, namespaces = world(where, active=active)
    found = ask(presences, namespaces, pool.keys(keys), first=first, beside=pool.keys(beside))
    assert len(found) == len(where) * len(keys) + len(beside)
    rows = [found[len(keys) * at : len(keys) * (at + 1)] for at in range(len(where))]
    besides = found[len(keys) * len(where) :]
    reachable = (
        {Presence.MEMORY, Presence.DISK, Presence.ELSEWHERE} if active else {Presence.MEMORY}
    )
    for at, key in enumerate(keys):
        real = [blocks.get(key, Presence.NOWHERE) for blocks in where]
        told = [Presence(row[at]) for row in rows]
        if first and Presence.MEMORY in real:
            before = real.index(Presence.MEMORY)
            wanted = [Presence.NOWHERE] * len(real)
            wanted[before] = Presence.MEMORY
            assert told == wanted, "in the first that has it in memory, and looked for no further"
        else:
            assert told == [one if one in reachable else Presence.NOWHERE for one in real]
    enough = any if first else all
    lacking = [key for key in keys if not enough(one.get(key) == Presence.MEMORY for one in where)]
    if active and lacking:
        assert list(besides) == [where[0].get(key, Presence.NOWHERE) for key in beside]
        wanted = [(number, lacking) for number in range(len(where))]
        assert below.asked == wanted + ([(0, beside)] if beside else [])
    else:
        there = [where[0].get(key) == Presence.MEMORY for key in beside]
        assert list(besides) == [Presence.MEMORY if one else Presence.NOWHERE for one in there]
        assert below.asked == []


def test_many_keys_are_looked_for_one_namespace_after_the_other():
    pool, presences, below, namespaces = world([{}, {7: Presence.DISK}], active=True)
    keys = list(range(AT_A_TIME))
    found = asyncio.run(presences.in_each(namespaces, 0, pool.keys(keys), 1.0))
    assert [key for key, at in enumerate(found[len(keys) :]) if at] == [7]
    assert below.asked == [(0, keys), (1, keys)]


@pytest.mark.parametrize(
    ("namespaces", "keys", "beside", "refusal"),
    [
        (0, 1, 0, InvalidRequest),
        (NAMESPACES_MAX, KEYS_MAX // NAMESPACES_MAX, 0, None),
        (NAMESPACES_MAX + 1, 0, 0, LimitExceeded),
        (2, KEYS_MAX // 2, 0, None),
        (2, KEYS_MAX // 2, 1, LimitExceeded),
        (3, KEYS_MAX // 3, KEYS_MAX % 3, None),
        (1, 0, KEYS_MAX + 1, LimitExceeded),
    ],
)
def test_a_request_has_a_limit_of_namespaces_and_of_keys_in_all(namespaces, keys, beside, refusal):
    arguments = namespaces, bytes(16 * keys), bytes(16 * beside)
    if refusal is None:
        check_counts(*arguments)
    else:
        with pytest.raises(refusal):
            check_counts(*arguments)


@pytest.mark.parametrize(("packed", "beside"), [(15, 0), (0, 17), (8, 8)])
def test_keys_and_those_beside_are_whole_each(packed, beside):
    with pytest.raises(InvalidRequest, match="whole"):
        check_counts(1, bytes(packed), bytes(beside))
