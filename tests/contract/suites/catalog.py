"""Requirements of every catalog, as tests: see `tests.contract.suites.directory` for how to use a suite.

Answers are compared with a plain dict that the test fills itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest
from kvpool.placement.catalog.base import LOCATION_BYTES, PACK, Catalog
from kvpool.placement.directory.base import BATCH_MAX
from tests.contract.suites.views import TwoViews

NAMESPACE = b"namespace-digest"
OTHER = b"digest-of-another"[:16]
LONG_S = 1000.0
PATIENCE_S = 60.0


def key_of(number: int) -> bytes:
    """A block key, as scattered as real ones."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:16]


def location_of(number: int, pack: int) -> bytes:
    """Some place in an object."""
    name = hashlib.sha256(b"pack" + bytes([pack])).digest()[:16]
    return bytes([1, 0]) + name + hashlib.sha512(bytes([number])).digest()[: LOCATION_BYTES - 18]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        for _ in itertools.count():
            if await condition():
                return
            await asyncio.sleep(0.005)


def pack_of(location: bytes) -> bytes:
    """The pack that a location lies in."""
    return location[PACK]


KEYS = [key_of(number) for number in range(6)]
_batches = st.dictionaries(st.sampled_from(KEYS), st.tuples(st.integers(0, 9), st.integers(0, 2)))
_tables = st.tuples(st.sampled_from([NAMESPACE, OTHER]), st.sampled_from([0, 1, 4095]))
_calls: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.sampled_from(["add", "drop"]), _tables, _batches),
    st.tuples(st.just("lose"), _tables, st.just({})),
)


class CatalogContract(TwoViews[Catalog]):
    """See `TwoViews`, and `DirectoryContract` for an example."""

    def test_an_empty_catalog_knows_nothing(self) -> None:
        async def test(one: Catalog, _: Catalog) -> None:
            assert await one.find(NAMESPACE, 0, KEYS) == [None] * 6
            assert await one.find(NAMESPACE, 0, []) == []
            await one.add(NAMESPACE, 0, [], [], LONG_S)
            await one.drop(NAMESPACE, 0, [], [])
            assert not await one.complete()

        self.run(test)

    def test_what_one_adds_another_finds_in_the_order_it_asked(self) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            keys = [key_of(number) for number in range(BATCH_MAX)]
            locations = [location_of(number % 256, number % 7) for number in range(BATCH_MAX)]
            await one.add(NAMESPACE, 3, keys, locations, LONG_S)
            asked = [*reversed(keys[1:]), key_of(BATCH_MAX)]
            assert await other.find(NAMESPACE, 3, asked) == [*reversed(locations[1:]), None]

        self.run(test)

    def test_an_object_that_went_takes_only_what_was_in_it(self) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            old = [location_of(number, 1) for number in range(6)]
            new = location_of(0, 2)
            await one.add(NAMESPACE, 0, KEYS, old, LONG_S)
            await other.add(NAMESPACE, 0, KEYS[:1], [new], LONG_S)
            await one.drop(NAMESPACE, 0, KEYS[:3], [pack_of(old[0])] * 3)
            assert await other.find(NAMESPACE, 0, KEYS) == [new, None, None, *old[3:]]

        self.run(test)

    def test_entries_end_with_their_time(self) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            await one.add(NAMESPACE, 0, KEYS[:1], [location_of(1, 1)], 0.05)
            await one.add(NAMESPACE, 0, KEYS[1:2], [location_of(2, 1)], 0.05)
            await one.add(NAMESPACE, 0, KEYS[1:2], [location_of(2, 1)], LONG_S)

            async def ended() -> bool:
                return await other.find(NAMESPACE, 0, KEYS[:1]) == [None]

            await until(ended)
            assert await other.find(NAMESPACE, 0, KEYS[:2]) == [None, location_of(2, 1)]

        self.run(test)

    def test_it_is_complete_until_its_time_is_over_or_something_is_lost(self) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            await one.completed(LONG_S)
            assert await other.complete()
            await self.lose(one)
            assert not await one.complete()
            await other.completed(0.05)

            async def ended() -> bool:
                return not await one.complete()

            await until(ended)

        self.run(test)

    @given(calls=st.lists(_calls, max_size=12))
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
        ],
    )
    def test_any_calls_in_any_order(self, calls: list[tuple[Any, ...]]) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            model: dict[tuple[bytes, int, bytes], bytes] = {}
            for turn, (call, (digest, part), batch) in enumerate(calls):
                view = (one, other)[turn % 2]
                keys = list(batch)
                locations = [location_of(*where) for where in batch.values()]
                for _ in range(1 + turn % 2):  # every other one twice
                    if call == "add":
                        await view.add(digest, part, keys, locations, LONG_S)
                    elif call == "drop":
                        await view.drop(digest, part, keys, [*map(pack_of, locations)])
                    else:
                        await self.lose(view)
                for key, location in zip(keys, locations, strict=True):
                    name = digest, part, key
                    if call == "add":
                        model[name] = location
                    elif name in model and pack_of(model[name]) == pack_of(location):
                        del model[name]
                if call == "lose":
                    model.clear()
                for space, at in ((NAMESPACE, 0), (NAMESPACE, 4095), (OTHER, 1), (digest, part)):
                    found = await (other, one)[turn % 2].find(space, at, KEYS)
                    assert found == [model.get((space, at, key)) for key in KEYS]

        self.run(test)

    def test_what_can_never_work(self) -> None:
        async def test(one: Catalog, _: Catalog) -> None:
            right = location_of(1, 1)
            wrong: list[Callable[[], Awaitable[Any]]] = [
                lambda: one.find(NAMESPACE[:8], 0, KEYS),
                lambda: one.find(NAMESPACE, -1, KEYS),
                lambda: one.find(NAMESPACE, 4096, KEYS),
                lambda: one.find(NAMESPACE, 0, [b"short"]),
                lambda: one.find(NAMESPACE, 0, [key_of(1)] * (BATCH_MAX + 1)),
                lambda: one.add(NAMESPACE, 0, KEYS[:1], [], LONG_S),
                lambda: one.add(NAMESPACE, 0, KEYS[:1], [right[:-1]], LONG_S),
                lambda: one.add(NAMESPACE, 0, KEYS[:1], [right], 0.0),
                lambda: one.drop(NAMESPACE, 0, KEYS[:1], [right]),
                lambda: one.completed(-1.0),
            ]
            for call in wrong:
                with pytest.raises(InvalidRequest):
                    await call()
            assert await one.find(NAMESPACE, 0, KEYS) == [None] * 6

        self.run(test)

    def test_closing_twice(self) -> None:
        async def test(one: Catalog, other: Catalog) -> None:
            await one.add(NAMESPACE, 0, KEYS[:1], [location_of(1, 1)], LONG_S)
            await one.close()
            await one.close()
            assert await other.find(NAMESPACE, 0, KEYS[:1]) == [location_of(1, 1)]

        self.run(test)
