"""Requirements of every directory, as tests: for kvpool's and for other distributions'.

    class TestMine(DirectoryContract):
        @asynccontextmanager
        async def views(self):
            async with server.directory() as one, server.directory() as other:
                yield one, other

        async def lose(self, directory):
            await server.empty()

Answers are compared with a plain dict that the test fills itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.errors import InvalidRequest, Unavailable
from kvpool.placement.directory.base import BATCH_MAX, TIERS, Directory, Entry
from kvpool.placement.key_groups import TAGS
from tests.contract.suites.views import TwoViews

NAMESPACE = b"namespace-digest"
OTHER = b"digest-of-another"[:16]
PARTS = 10
GPU, DRAM, SSD = TIERS["gpu"], TIERS["dram"], TIERS["ssd"]
ENTRIES_KEPT = 64  # at least so many of a block are kept


def key_of(number: int) -> bytes:
    """A block key, as scattered as real ones."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()[:16]


def keys_of(numbers: range) -> list[bytes]:
    """One key for each number."""
    return [key_of(number) for number in numbers]


def node(number: int) -> bytes:
    """An incarnation."""
    return number.to_bytes(8, "big")


Holdings = dict[tuple[bytes, bytes], dict[tuple[bytes, int], int]]
"""(digest, key): (incarnation, tier): mask"""


async def holdings(
    directory: Directory, digests: Sequence[bytes], keys: Sequence[bytes], parts: int = PARTS
) -> Holdings:
    """All entries of these keys, without keys that have none."""
    said: Holdings = {}
    for digest in digests:
        found = await directory.locate(digest, parts, keys)
        assert len(found) == len(keys)
        for key, entries in zip(keys, found, strict=True):
            if entries:
                said[digest, key] = {(e.incarnation, e.tier): e.mask for e in entries}
                assert len(said[digest, key]) == len(entries), "an owner and tier have one entry"
    return said


async def sweep_all(directory: Directory, dead: Sequence[bytes], count: int) -> tuple[int, int]:
    """(entries that went, calls it took)"""
    cursor, dropped, calls = b"", 0, 0
    while True:
        swept = await directory.sweep(dead, cursor, count)
        assert swept.seen >= swept.dropped
        cursor = swept.cursor
        dropped += swept.dropped
        calls += 1
        if not cursor:
            return dropped, calls
        assert calls < 100_000, "the sweep does not end"


KEYS = keys_of(range(6))
NODES = [node(n) for n in range(1, 4)]

publications = st.tuples(
    st.just("publish"),
    st.sampled_from([NAMESPACE, OTHER]),
    st.sampled_from(NODES),
    st.sampled_from([GPU, DRAM, SSD]),
    st.lists(
        st.tuples(st.sampled_from(KEYS), st.integers(0, 2**PARTS - 1) | st.just(0)), max_size=8
    ),
)
sweeps = st.tuples(st.just("sweep"), st.sets(st.sampled_from(NODES)), st.integers(1, 50))
losses = st.tuples(st.just("lose"))


class DirectoryContract(TwoViews[Directory]):
    """See the module, and `TwoViews`."""

    # ---- publish and locate ---------------------------------------------------------------------------

    def test_an_empty_directory_knows_nothing(self) -> None:
        async def test(one: Directory, _: Directory) -> None:
            assert await one.locate(NAMESPACE, PARTS, keys_of(range(300))) == [[]] * 300
            assert await one.locate(NAMESPACE, PARTS, []) == []
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, [], [])

        self.run(test)

    def test_what_one_publishes_another_sees_in_the_order_it_asked(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            keys = keys_of(range(200))
            masks = [1 + number % 1023 for number in range(200)]
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys, masks)
            asked = [*reversed(keys), key_of(999), keys[3], keys[3]]
            expected = [[Entry(node(1), DRAM, mask)] for mask in reversed(masks)]
            expected += [[], [Entry(node(1), DRAM, masks[3])], [Entry(node(1), DRAM, masks[3])]]
            assert await other.locate(NAMESPACE, PARTS, asked) == expected

        self.run(test)

    def test_answers_belong_to_the_caller(self) -> None:
        async def test(one: Directory, _: Directory) -> None:
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, KEYS, [1] * 6)
            found = await one.locate(NAMESPACE, PARTS, KEYS)
            found[0].clear()
            found[1].append(Entry(node(2), GPU, 1))
            assert await one.locate(NAMESPACE, PARTS, KEYS) == [[Entry(node(1), DRAM, 1)]] * 6
            assert found[2:] == [[Entry(node(1), DRAM, 1)]] * 4

        self.run(test)

    def test_a_publish_replaces_and_a_second_time_changes_nothing(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            key = [key_of(1)]
            for mask in (0b1, 0b1, 0b1000000001, 0b10, 0b10):
                await one.publish(NAMESPACE, PARTS, node(1), DRAM, key, [mask])
                found = await other.locate(NAMESPACE, PARTS, key)
                assert found == [[Entry(node(1), DRAM, mask)]]
            for _ in range(2):
                await other.publish(NAMESPACE, PARTS, node(1), DRAM, key, [0])
                assert await one.locate(NAMESPACE, PARTS, key) == [[]]

        self.run(test)

    def test_nodes_tiers_and_namespaces_do_not_touch_each_other(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            expected: Holdings = {}
            for number, digest in enumerate((NAMESPACE, OTHER)):
                for owner in (1, 2):
                    for tier in (GPU, DRAM, SSD):
                        mask = 1 + number + 2 * owner + 8 * tier
                        await one.publish(digest, PARTS, node(owner), tier, KEYS, [mask] * 6)
                        for key in KEYS:
                            expected.setdefault((digest, key), {})[node(owner), tier] = mask
            assert await holdings(other, (NAMESPACE, OTHER), KEYS) == expected
            await other.publish(OTHER, PARTS, node(2), DRAM, KEYS[:1], [0])
            del expected[OTHER, KEYS[0]][node(2), DRAM]
            assert await holdings(one, (NAMESPACE, OTHER), KEYS) == expected

        self.run(test)

    @pytest.mark.parametrize("parts", [1, 7, 8, 9, 16, 17, 64, 65, 4096])
    def test_masks_of_any_width(self, parts: int) -> None:
        async def test(one: Directory, other: Directory) -> None:
            masks = [1, 1 << (parts - 1), (1 << parts) - 1, 1 << parts // 2, 1, 1]
            await one.publish(NAMESPACE, parts, node(1), DRAM, KEYS, masks)
            await one.publish(NAMESPACE, parts, node(2), GPU, KEYS, masks[::-1])
            found = await other.locate(NAMESPACE, parts, KEYS)
            assert [[entry.mask for entry in entries] for entries in found] == [
                list(pair) for pair in zip(masks, masks[::-1], strict=True)
            ]

        self.run(test)

    def test_incarnations_and_keys_of_any_bytes(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            odd_digest = b"*?[a]{}\\\0\r\n\xff\xfe\0\0\0"
            odd = [bytes(8), b"\xff" * 8, b"\r\n$3\r\n\0\0", b"*1\r\n%{}b"]
            keys = [
                bytes(16),
                b"\xff" * 16,
                b"\r\n*1\r\n$4\r\nPING\r\n",
                b"{}[]*?\\^\x00\x01\x02\x03\n\n\n\n",
            ]
            for owner in odd:
                await one.publish(odd_digest, PARTS, owner, SSD, keys, [5] * 4)
            found = await other.locate(odd_digest, PARTS, keys)
            assert [{e.incarnation for e in entries} for entries in found] == [set(odd)] * 4
            assert (await sweep_all(other, odd[1:], 100))[0] == 12
            found = await one.locate(odd_digest, PARTS, keys)
            assert found == [[Entry(odd[0], SSD, 5)]] * 4

        self.run(test)

    def test_of_a_key_that_is_twice_in_a_batch_the_last_counts(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            first, second, third = keys_of(range(3))
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, [second], [9])
            await one.publish(
                NAMESPACE,
                PARTS,
                node(1),
                DRAM,
                [first, second, third, first, second, third],
                [1, 0, 7, 0, 2, 3],
            )
            assert await other.locate(NAMESPACE, PARTS, [first, second, third]) == [
                [],
                [Entry(node(1), DRAM, 2)],
                [Entry(node(1), DRAM, 3)],
            ]

        self.run(test)

    def test_a_full_batch(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            chance = random.Random(1)
            keys = keys_of(range(BATCH_MAX))
            masks = [chance.randrange(1 << PARTS) for _ in keys]
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys, masks)
            found = await other.locate(NAMESPACE, PARTS, keys)
            assert found == [[Entry(node(1), DRAM, mask)] if mask else [] for mask in masks]
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys, [0] * BATCH_MAX)
            assert await other.locate(NAMESPACE, PARTS, keys) == [[]] * BATCH_MAX

        self.run(test)

    def test_the_entries_of_a_block_are_bounded(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            key = [key_of(1)]
            for number in range(3 * ENTRIES_KEPT):
                await one.publish(NAMESPACE, PARTS, node(number), DRAM, key, [3])
            (entries,) = await other.locate(NAMESPACE, PARTS, key)
            assert ENTRIES_KEPT <= len(entries) < 3 * ENTRIES_KEPT
            kept = {int.from_bytes(entry.incarnation, "big") for entry in entries}
            assert kept == set(range(3 * ENTRIES_KEPT - len(entries), 3 * ENTRIES_KEPT))

        self.run(test)

    def test_many_nodes_at_once_lose_nothing(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            keys = keys_of(range(600))

            async def act(number: int) -> None:
                view = (one, other)[number % 2]
                for mask in (1, 2, 3 + number):
                    await view.publish(
                        NAMESPACE, PARTS, node(number), DRAM, keys, [mask] * len(keys)
                    )

            await asyncio.gather(*[act(number) for number in range(12)])
            expected = {node(number): 3 + number for number in range(12)}
            for entries in await one.locate(NAMESPACE, PARTS, keys):
                assert {entry.incarnation: entry.mask for entry in entries} == expected

        self.run(test)

    def test_concurrent_lookups_get_their_own_answers(self) -> None:
        async def test(one: Directory, _: Directory) -> None:
            keys = keys_of(range(1000))
            await one.publish(
                NAMESPACE, PARTS, node(1), DRAM, keys, [1 + n % 1023 for n in range(1000)]
            )

            async def ask(first: int) -> bool:
                found = await one.locate(NAMESPACE, PARTS, keys[first : first + 40])
                masks = [entries[0].mask for entries in found]
                return masks == [1 + n % 1023 for n in range(first, first + 40)]

            assert all(await asyncio.gather(*[ask(first) for first in range(0, 960, 7)]))

        self.run(test)

    def test_cancelled_calls_harm_nobody(self) -> None:
        async def test(one: Directory, _: Directory) -> None:
            keys = keys_of(range(1000))
            masks = [1 + n % 1023 for n in range(1000)]
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys, masks)

            async def given_up(turns: int, first: int) -> None:
                task = asyncio.ensure_future(one.locate(NAMESPACE, PARTS, keys[first : first + 50]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            for turns in range(12):
                await asyncio.gather(*[given_up(turns, 60 * n) for n in range(15)])
                found = await one.locate(NAMESPACE, PARTS, keys[turns : turns + 500])
                assert [entries[0].mask for entries in found] == masks[turns : turns + 500]

        self.run(test)

    # ---- what cannot work -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "change",
        [
            {"digest": b"short"},
            {"parts": 0},
            {"parts": 4097},
            {"incarnation": b"seven.."},
            {"tier": 77},
            {"keys": [b"k" * 15]},
            {"keys": [b"k" * 17]},
            {"keys": [b""]},
            {"masks": [1 << PARTS]},
            {"masks": [-1]},
            {"masks": []},
            {"keys": [b"k" * 16] * (BATCH_MAX + 1), "masks": [1] * (BATCH_MAX + 1)},
        ],
        ids=str,
    )
    def test_what_can_never_work_is_refused(self, change: dict[str, Any]) -> None:
        async def test(one: Directory, _: Directory) -> None:
            right: dict[str, Any] = {
                "digest": NAMESPACE,
                "parts": PARTS,
                "incarnation": node(1),
                "tier": DRAM,
                "keys": [key_of(1)],
                "masks": [1],
            }
            with pytest.raises(InvalidRequest):
                await one.publish(**(right | change))
            if change.keys() & {"digest", "parts", "keys"}:
                arguments = {name: (right | change)[name] for name in ("digest", "parts", "keys")}
                with pytest.raises(InvalidRequest):
                    await one.locate(**arguments)
            with pytest.raises(InvalidRequest):
                await one.sweep([b"seven.."], b"", 10)
            assert await one.locate(NAMESPACE, PARTS, [key_of(1)]) == [[]]

        self.run(test)

    # ---- marks ----------------------------------------------------------------------------------------

    def test_marks_stay_until_their_group_is_lost(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            before = list(await one.marks())
            assert len(before) == TAGS
            assert all(before)
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, KEYS, [1] * 6)
            await sweep_all(one, [node(1)], 100)
            assert list(await one.marks()) == before
            assert list(await other.marks()) == before
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, KEYS, [1] * 6)
            await self.lose(one)
            after = await other.marks()
            assert all(new and new != old for new, old in zip(after, before, strict=True))
            assert await one.locate(NAMESPACE, PARTS, KEYS) == [[]] * 6

        self.run(test)

    def test_who_finds_marks_missing_at_the_same_time_agrees(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            for turns in range(0, 60, 3):
                await self.lose(one)
                first = asyncio.ensure_future(one.marks())
                for _ in range(turns):
                    await asyncio.sleep(0)
                second = await other.marks()
                assert list(await first) == list(second) == list(await one.marks())

        self.run(test)

    # ---- sweep ----------------------------------------------------------------------------------------

    def test_a_sweep_takes_the_dead_and_nothing_else(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            keys = keys_of(range(2000))
            for number, share in ((1, keys), (2, keys[500:]), (3, keys[:100])):
                for tier in (DRAM, SSD):
                    await one.publish(
                        NAMESPACE, PARTS, node(number), tier, share, [number] * len(share)
                    )
            dropped, calls = await sweep_all(other, [node(1), node(3), node(99)], 100)
            assert dropped == 2 * (2000 + 100)
            assert calls >= 5, "it looked at more than it was told to"
            found = await one.locate(NAMESPACE, PARTS, keys)
            assert found[:500] == [[]] * 500
            assert found[500:] == [[Entry(node(2), DRAM, 2), Entry(node(2), SSD, 2)]] * 1500
            assert (await sweep_all(one, [node(1), node(3)], 4000))[0] == 0

        self.run(test)

    def test_a_sweep_tells_whose_entries_there_are(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            keys = keys_of(range(600))
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys[:500], [1] * 500)
            await one.publish(NAMESPACE, PARTS, node(2), SSD, keys[590:], [2] * 10)
            await one.publish(NAMESPACE, PARTS, node(3), DRAM, keys[:5], [1] * 5)
            await one.publish(NAMESPACE, PARTS, node(3), DRAM, keys[:5], [0] * 5)
            for dead, dropped in (([], 0), ([node(2)], 10)):
                met: set[bytes] = set()
                cursor, gone, seen = b"", 0, 0
                while True:
                    swept = await other.sweep(dead, cursor, 100)
                    cursor = swept.cursor
                    met |= swept.met
                    gone += swept.dropped
                    seen += swept.seen
                    if not cursor:
                        break
                assert (met, gone) == ({node(1), node(2)}, dropped)
                assert seen >= 510  # a block may be met twice
            assert (await one.locate(NAMESPACE, PARTS, keys[:1])) == [[Entry(node(1), DRAM, 1)]]

        self.run(test)

    def test_a_sweep_works_while_others_publish(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            keys = keys_of(range(1500))
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, keys, [1] * 1500)
            sweeping = asyncio.ensure_future(sweep_all(one, [node(1)], 50))
            for mask in range(1, 6):
                await other.publish(NAMESPACE, PARTS, node(2), DRAM, keys, [mask] * 1500)
            assert (await sweeping)[0] == 1500
            found = await one.locate(NAMESPACE, PARTS, keys)
            assert found == [[Entry(node(2), DRAM, 5)]] * 1500

        self.run(test)

    # ---- all of it ------------------------------------------------------------------------------------

    @given(operations=st.lists(publications | sweeps | losses, max_size=12))
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
        ],
    )
    def test_any_calls_in_any_order(self, operations: list[tuple[Any, ...]]) -> None:
        async def test(one: Directory, other: Directory) -> None:
            model: Holdings = {}
            for turn, operation in enumerate(operations):
                view = (one, other)[turn % 2]
                if operation[0] == "publish":
                    _, digest, owner, tier, batch = operation
                    keys, masks = [key for key, _ in batch], [mask for _, mask in batch]
                    for _ in range(1 + turn % 2):  # every other one twice
                        await view.publish(digest, PARTS, owner, tier, keys, masks)
                    for key, mask in batch:
                        model.setdefault((digest, key), {})[owner, tier] = mask
                elif operation[0] == "sweep":
                    _, dead, count = operation
                    dropped, _ = await sweep_all(view, sorted(dead), count)
                    gone = [
                        (block, owner)
                        for block, held in model.items()
                        for owner, mask in held.items()
                        if mask and owner[0] in dead
                    ]
                    assert dropped == len(gone)
                    for block, owner in gone:
                        del model[block][owner]
                else:
                    await self.lose(view)
                    model.clear()
                said = await holdings((other, one)[turn % 2], (NAMESPACE, OTHER), KEYS)
                present = {
                    block: {owner: mask for owner, mask in held.items() if mask}
                    for block, held in model.items()
                }
                assert said == {block: held for block, held in present.items() if held}

        self.run(test)

    # ---- its end --------------------------------------------------------------------------------------

    def test_closing_twice(self) -> None:
        async def test(one: Directory, other: Directory) -> None:
            await one.publish(NAMESPACE, PARTS, node(1), DRAM, KEYS, [1] * 6)
            await one.close()
            await one.close()
            assert await other.locate(NAMESPACE, PARTS, KEYS[:1]) == [[Entry(node(1), DRAM, 1)]]

        self.run(test)

    def test_closing_under_a_call(self) -> None:
        async def test(one: Directory, _: Directory) -> None:
            calls = [one.locate(NAMESPACE, PARTS, keys_of(range(2000))) for _ in range(5)]
            tasks = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0)
            await one.close()
            done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
            for answer in done:
                assert answer == [[]] * 2000 or isinstance(answer, Unavailable)

        self.run(test)
