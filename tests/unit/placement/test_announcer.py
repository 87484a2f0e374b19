"""The announcer against a directory that fails, delays and forgets, in virtual time."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.errors import Unavailable
from kvpool.placement.directory.announcer import LANES, RETRACTS_MAX, TRIALS, Announcer
from kvpool.placement.directory.base import BATCH_MAX, TIERS, Entry
from kvpool.placement.directory.repairs import (
    REFRESH_KEYS_S,
    REPAIRS_MAX,
    VERIFY_KEYS_S,
    WALK_KEYS,
    verify_rate,
)
from kvpool.placement.key_groups import TAGS, tag_of
from tests.support.embedded_directory import EmbeddedDirectory
from tests.support.virtual_time import virtually

DRAM = TIERS["dram"]
A, B = b"A" * 16, b"B" * 16
US, THEM = b"us" * 4, b"them" * 2
PARTS = 3
TIMEOUT_S = 1.0


def key_of(number: int) -> bytes:
    """Consecutive numbers are in consecutive groups."""
    return number.to_bytes(16, "big")


# ---- the two sides -----------------------------------------------------------------------------------


class FlakyDirectory(EmbeddedDirectory):
    """Fails for the groups in `down` after `fail_s`, and otherwise with `fail_chance`.

    What fails was done in part. Checks that the announcer keeps its limits.
    """

    def __init__(self) -> None:
        super().__init__(rng=random.Random(1))
        self.rng = random.Random(2)
        self.down: set[int] = set()
        self.fail_chance = 0.0
        self.fail_s = 0.0
        self.delay_s = 0.0
        self.tries: list[tuple[float, int]] = []
        self.sent: Counter[bytes] = Counter()
        self.under_way: list[tuple[bytes, set[bytes]]] = []
        self.looked_up = 0

    async def locate(self, digest: bytes, parts: int, keys: Sequence[bytes]) -> list[list[Entry]]:
        """Blocks of groups that are down read as absent."""
        self.looked_up += len(keys)
        found = await super().locate(digest, parts, keys)
        return [
            [] if tag_of(key) in self.down else entries
            for key, entries in zip(keys, found, strict=True)
        ]

    async def publish(
        self,
        digest: bytes,
        parts: int,
        incarnation: bytes,
        tier: int,
        keys: Sequence[bytes],
        masks: Sequence[int],
    ) -> None:
        name = digest + incarnation
        for other, theirs in self.under_way:
            assert other != name or theirs.isdisjoint(keys), "one key in two calls"
        self.under_way.append((name, set(keys)))
        assert len(self.under_way) <= LANES + TRIALS + 1
        try:
            self.tries.append((asyncio.get_running_loop().time(), len(keys)))
            self.sent.update(keys)
            done = self._how_many(keys)
            if self.delay_s:
                await asyncio.sleep(self.delay_s * self.rng.random())
            await super().publish(digest, parts, incarnation, tier, keys[:done], masks[:done])
            if done < len(keys) or self._fails():
                await asyncio.sleep(self.fail_s)
                raise Unavailable("the directory is down")
        finally:
            self.under_way.remove((name, set(keys)))

    def _how_many(self, keys: Sequence[bytes]) -> int:
        """Of a call: all, or those before the first one that fails."""
        for at, key in enumerate(keys):
            if tag_of(key) in self.down:
                return at
        return self.rng.randrange(len(keys)) if self._fails() else len(keys)

    def _fails(self) -> bool:
        return self.rng.random() < self.fail_chance

    async def marks(self) -> Sequence[bytes | None]:
        if len(self.down) == TAGS or self._fails():
            await asyncio.sleep(self.fail_s)
            raise Unavailable("the directory is down")
        marks = await super().marks()
        return [None if tag in self.down else mark for tag, mark in enumerate(marks)]

    async def of(
        self, incarnation: bytes, digest: bytes, keys: Iterable[bytes]
    ) -> dict[bytes, int]:
        """What it says that somebody has."""
        listed = list(keys)
        out = {}
        for at in range(0, len(listed), BATCH_MAX):
            some = listed[at : at + BATCH_MAX]
            for key, entries in zip(some, await self.locate(digest, PARTS, some), strict=True):
                mine = [entry for entry in entries if entry.incarnation == incarnation]
                assert len(mine) <= 1 and all(entry.tier == DRAM for entry in mine)
                if mine:
                    out[key] = mine[0].mask
        return out


class SsdDevice:
    """What is held: a log of all keys ever put, which a walk goes through, and the masks of today."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, dict[bytes, int]] = {}
        self.log: list[tuple[bytes, bytes]] = []
        self.logged: set[tuple[bytes, bytes]] = set()
        self.on_walk: Callable[[int], None] = lambda cursor: None

    def put(self, digest: bytes, keys: Iterable[bytes], mask: int = 1) -> list[bytes]:
        listed = list(keys)
        self.namespaces.setdefault(digest, {}).update(dict.fromkeys(listed, mask))
        fresh = [(digest, key) for key in listed if (digest, key) not in self.logged]
        self.log += fresh
        self.logged.update(fresh)
        return listed

    def evict(self, digest: bytes, keys: Iterable[bytes]) -> list[bytes]:
        listed = list(keys)
        for key in listed:
            self.namespaces.get(digest, {}).pop(key, None)
        return listed

    def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        held = self.namespaces.get(digest)
        return (0, []) if held is None else (PARTS, [held.get(key, 0) for key in keys])

    def walk(self, cursor: int, count: int) -> tuple[list[tuple[bytes, list[bytes]]], int | None]:
        self.on_walk(cursor)
        found: dict[bytes, list[bytes]] = {}
        for digest, key in self.log[cursor : cursor + count]:
            if key in self.namespaces.get(digest, {}):
                found.setdefault(digest, []).append(key)
        end = cursor + count
        return list(found.items()), end if end < len(self.log) else None


class Bench:
    """An announcer that runs, and its two sides."""

    def __init__(self, **settings: Any) -> None:
        self.directory = FlakyDirectory()
        self.shelf = SsdDevice()
        self.now = asyncio.get_running_loop().time
        self.announcer = Announcer(self.directory, self.shelf, clock=self.now, **settings)

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self.announcer.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task
        assert not self.directory.under_way

    def put(self, digest: bytes, keys: Iterable[bytes], mask: int = 1) -> None:
        self.announcer.changed(digest, self.shelf.put(digest, keys, mask))

    def evict(self, digest: bytes, keys: Iterable[bytes]) -> None:
        self.announcer.changed(digest, self.shelf.evict(digest, keys))

    async def until(self, holds: Callable[[], Any], seconds: float = 600.0) -> float:
        """Wait for it, and say how long it took."""
        began = self.now()
        while not holds():
            assert self.now() - began < seconds, self.announcer.stats()
            await asyncio.sleep(0.005)
        return self.now() - began

    async def settled(self, seconds: float = 600.0) -> float:
        return await self.until(lambda: self.announcer.stats().settled, seconds)

    async def right(self, incarnation: bytes = US) -> None:
        """The directory says of us what is held, of every key there ever was."""
        for digest in {digest for digest, _ in self.shelf.log}:
            keys = {key for of, key in self.shelf.log if of == digest}
            said = await self.directory.of(incarnation, digest, keys)
            assert said == self.shelf.namespaces.get(digest, {})


# ---- in quiet times ----------------------------------------------------------------------------------


def test_changes_are_published_soon_and_in_few_calls() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.put(A, map(key_of, range(1000)), 0b101)
            b.put(B, map(key_of, range(10)))
            assert await b.until(lambda: not b.announcer.stats().queued) < 0.1
            await b.right()
            assert len(b.directory.tries) <= 2 * LANES
            b.evict(A, map(key_of, range(500)))
            b.put(A, map(key_of, range(500, 600)), 0b1)
            await b.settled()
            await b.right()
            stats = b.announcer.stats()
            assert stats.withdrawn == 500 and stats.published == 1110
            assert stats.lag_s == 0 and stats.connected

    virtually(main)


def test_what_changed_several_times_before_its_turn_is_sent_once() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.put(A, [key_of(1)])
            b.evict(A, [key_of(1)])
            b.put(A, [key_of(2)])
            for mask in (1, 3, 7) * 5:
                b.put(A, [key_of(2)], mask)
            await b.settled()
            assert b.directory.sent == {key_of(1): 1, key_of(2): 1}
            await b.right()

    virtually(main)


def test_a_change_during_its_own_call_is_sent_again() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.directory.delay_s = 5.0
            b.put(A, [key_of(1)])
            await b.until(lambda: b.directory.under_way)
            b.evict(A, [key_of(1)])
            await b.settled()
            assert b.directory.sent[key_of(1)] == 2
            await b.right()

    virtually(main)


def test_lag_is_the_age_of_the_oldest_unpublished_change() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.directory.down = set(range(TAGS))
            b.put(A, map(key_of, range(100)))
            for _ in range(50):
                await asyncio.sleep(1)
                b.put(A, [key_of(random.Random(3).randrange(1000))])
            assert b.announcer.stats().lag_s == pytest.approx(50, abs=1e-6)
            assert not b.announcer.stats().connected
            b.directory.down = set()
            await b.settled()
            assert b.announcer.stats().lag_s == 0

    virtually(main)


def test_silent_until_told_who_it_is_and_again_when_told_so() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.put(A, map(key_of, range(10)))
            await asyncio.sleep(10)
            assert not b.directory.tries
            b.announcer.act_as(US)
            await b.settled()
            await b.right()
            b.announcer.act_as(None)
            tries = len(b.directory.tries)
            b.put(A, map(key_of, range(10, 20)))
            b.announcer.retract(A, PARTS, THEM, DRAM, [key_of(1)])
            await asyncio.sleep(10)
            assert len(b.directory.tries) == tries
            b.evict(A, map(key_of, range(5)))
            b.announcer.act_as(THEM)
            stats = b.announcer.stats()
            assert not stats.queued and not stats.settled, "a walk lists all that is held"
            await b.settled()
            await b.right(THEM)
            stats = b.announcer.stats()
            assert stats.published == 25
            assert stats.withdrawn == 0, "the former life's entries go with that life"

    virtually(main)


def test_the_same_incarnation_again_announces_what_was_lost_and_what_went() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(300)))
            await b.settled()
            b.announcer.act_as(None)
            b.evict(A, map(key_of, range(100)))
            lost = [key_of(i) for i in range(200, 250)]
            await b.directory.publish(A, PARTS, US, DRAM, lost, [0] * 50)
            b.announcer.act_as(US)
            await b.settled()
            await b.right()

    virtually(main)


def test_blocks_of_a_namespace_that_is_gone_are_withdrawn() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(100)))
            await b.settled()
            del b.shelf.namespaces[A]
            b.announcer.changed(A, map(key_of, range(200)))
            await b.settled()
            await b.right()
            assert b.announcer.stats().withdrawn == 200

    virtually(main)


def test_nothing_is_said_of_a_namespace_that_was_never_here() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.announcer.changed(A, map(key_of, range(200)))
            await b.settled()
            assert not b.directory.tries

    virtually(main)


def test_what_was_announced_takes_no_memory() -> None:
    class Everything(SsdDevice):
        """Holds all blocks there may be."""

        def masks(self, digest: bytes, keys: Sequence[bytes]) -> tuple[int, list[int]]:
            return PARTS, [1] * len(keys)

    class Nobody(FlakyDirectory):
        """Remembers nothing itself."""

        async def publish(self, *_: Any) -> None:
            self.tries.clear()

    async def main() -> None:
        b = Bench()
        b.directory = Nobody()
        b.announcer = Announcer(b.directory, Everything(), clock=b.now)
        async with b:
            b.announcer.act_as(US)
            await b.settled()

            async def announce(numbers: Iterable[int]) -> int:
                for first in numbers:
                    b.announcer.changed(A, map(key_of, range(first, first + 1000)))
                    await b.settled()
                return tracemalloc.get_traced_memory()[0]

            tracemalloc.start()
            try:
                before = await announce(range(0, 10_000, 1000))
                after = await announce(range(10_000, 60_000, 1000))
            finally:
                tracemalloc.stop()
            assert b.announcer.stats().published == 60_000
            assert after - before < 50_000  # a byte a key

    virtually(main)


# ---- failures ----------------------------------------------------------------------------------------


def test_while_the_directory_is_away_it_is_asked_now_and_then_and_nothing_is_lost() -> None:
    async def main() -> None:
        async with Bench(check_s=0.1) as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(20_000)))
            await b.settled()
            b.directory.down = set(range(TAGS))
            b.directory.tries.clear()
            for second in range(300):
                b.put(A, map(key_of, range(20_000 + 100 * second, 20_100 + 100 * second)))
                b.evict(A, map(key_of, range(20 * second, 20 * second + 20)))
                await asyncio.sleep(1)
            tries = b.directory.tries
            late = [keys for at, keys in tries if at > tries[0][0] + 60]
            assert len(late) <= 240 * TAGS / 2 + TAGS and max(late) <= 128
            assert b.announcer.stats().queued >= 36_000 - 1
            b.directory.down = set()
            assert await b.settled() < 0.5, "as soon as it is seen to be back"
            await b.right()

    virtually(main)


def test_a_shard_that_hangs_does_not_hold_up_the_others_for_long() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(2000)))
            await b.settled()
            b.directory.down, b.directory.fail_s = set(range(0, TAGS, 3)), TIMEOUT_S
            fine = [i for i in range(100_000) if i % TAGS not in b.directory.down]
            b.put(A, map(key_of, range(2000, 4000)))
            await asyncio.sleep(20)
            for at in range(0, 5000, 50):
                some = list(map(key_of, fine[4000 + at : 4050 + at]))
                b.put(A, [*some, key_of(TAGS * (at + 1000))])
                took = await b.until(lambda some=some: all(b.directory.sent[k] for k in some), 30)
                assert took < 0.1, "the others are published at once"
                await asyncio.sleep(0.02)
            b.directory.down = set()
            await b.settled()
            await b.right()

    virtually(main)


def test_single_failures_neither_repeat_a_walk_for_ever_nor_lose_anything() -> None:
    async def main() -> None:
        async with Bench(batch=64) as b:
            b.shelf.put(A, map(key_of, range(30_000)))
            b.directory.fail_chance = 0.02
            b.announcer.act_as(US)
            await b.settled(120)
            assert b.announcer.stats().failures > 5
            b.directory.fail_chance = 0.0
            await b.right()
            assert sum(b.directory.sent.values()) < 5 * 30_000

    virtually(main)


def test_a_full_queue_loses_neither_what_came_nor_what_went() -> None:
    async def main() -> None:
        async with Bench(queue_max=500) as b:
            b.announcer.act_as(US)
            for at in range(0, 3000, 300):
                b.put(A, map(key_of, range(at, at + 300)))
                await b.settled()
            b.directory.down = set(range(TAGS))
            for at in range(0, 1500, 100):
                b.evict(A, map(key_of, range(at, at + 100)))
                b.put(B, map(key_of, range(at, at + 100)))
            assert b.announcer.stats().queued == 3000 and not b.announcer.stats().overflows
            await asyncio.sleep(30)
            b.directory.down = set()
            await b.settled(60)
            await b.right()

    virtually(main)


def test_beyond_all_limits_what_came_is_found_and_what_went_is_withdrawn_when_met() -> None:
    async def main() -> None:
        async with Bench(queue_max=640, later_max=640) as b:
            b.announcer.act_as(US)
            for at in range(0, 3200, 640):
                b.put(A, map(key_of, range(at, at + 640)))
                await b.settled()
            b.directory.down = set(range(TAGS))
            b.evict(A, map(key_of, range(1600)))
            b.put(B, map(key_of, range(1600)))
            await asyncio.sleep(30)
            stats = b.announcer.stats()
            assert stats.overflows >= TAGS and not stats.settled
            assert stats.queued <= 2 * 640
            b.directory.down = set()
            await b.settled(60)
            held = b.shelf.namespaces
            said = await b.directory.of(US, B, held[B])
            assert said == held[B]
            said = await b.directory.of(US, A, map(key_of, range(3200)))
            wrong = said.keys() - held[A].keys()
            assert {key: said[key] for key in held[A]} == held[A] and 0 < len(wrong) <= 1600 - 640
            b.announcer.changed(A, wrong)
            await b.settled()
            await b.right()

    virtually(main)


def test_a_shard_that_is_away_for_long_takes_only_its_own_room() -> None:
    async def main() -> None:
        async with Bench(queue_max=640, later_max=640) as b:
            b.announcer.act_as(US)
            await b.settled()
            b.directory.down = set(range(0, TAGS, 2))
            number = 0
            for _ in range(50):
                keys = list(map(key_of, range(number, number + 640)))
                number += 640
                b.put(A, keys)
                fine = {key for key in keys if tag_of(key) not in b.directory.down}
                await b.until(lambda fine=fine: fine <= b.directory.sent.keys(), 5)
            assert b.announcer.stats().overflows == TAGS // 2
            b.directory.down = set()
            await b.settled()
            await b.right()

    virtually(main)


def test_what_was_cancelled_under_way_is_sent_by_the_next_run() -> None:
    async def main() -> None:
        b = Bench()
        async with b:
            b.announcer.act_as(US)
            await b.settled()
            b.directory.delay_s = 100.0
            b.put(A, map(key_of, range(100)))
            await b.until(lambda: b.directory.under_way)
        b.directory.delay_s = 0.0
        assert b.announcer.stats().queued == 100
        async with b:
            await b.settled()
            await b.right()

    virtually(main)


# ---- losses ------------------------------------------------------------------------------------------


def test_an_emptied_directory_is_filled_again_and_only_as_far_as_it_was_emptied() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(64_000)))
            await b.settled()
            for tags in (range(TAGS), range(5), [63]):
                b.directory.sent.clear()
                b.directory.lose(tags)
                await asyncio.sleep(1.1)
                assert await b.settled() < 5.0
                await b.right()
                assert sum(b.directory.sent.values()) == 1000 * len(tags)

    virtually(main)


def test_a_shard_that_is_down_from_the_start_keeps_nothing_from_the_others() -> None:
    async def main() -> None:
        async with Bench() as b:
            down = b.directory.down = {3, 4}
            b.shelf.put(A, map(key_of, range(300)))  # from before: only a walk finds them
            b.announcer.act_as(US)
            there = {key_of(n) for n in range(300) if n % TAGS not in down}
            for lost in (set(), {5, 6}):
                b.directory.lose(lost)
                until = b.now() + 30
                while (await b.directory.of(US, A, there)).keys() != there:
                    assert b.now() < until
                    await asyncio.sleep(0.1)
            b.directory.down = set()
            await b.settled()
            await b.right()

    virtually(main)


def test_losses_in_the_middle_of_a_walk_start_it_anew() -> None:
    async def main() -> None:
        async with Bench(batch=256, check_s=0.01) as b:
            b.shelf.put(A, map(key_of, range(40_000)))
            b.directory.delay_s = 0.002
            losses = iter((list(range(TAGS)), [7, 8], [9], list(range(TAGS))))

            def lose(cursor: int) -> None:
                if cursor >= 20_000:
                    b.directory.lose(next(losses, ()))

            b.shelf.on_walk = lose
            b.announcer.act_as(US)
            await b.until(lambda: next(losses, None) is None)
            await asyncio.sleep(0.1)
            await b.settled()
            await b.right()

    virtually(main)


def test_changes_go_before_repairs() -> None:
    async def main() -> None:
        async with Bench(batch=64) as b:
            b.shelf.put(A, map(key_of, range(50_000)))
            b.directory.delay_s = 0.01
            b.announcer.act_as(US)
            await b.until(lambda: len(b.directory.tries) > 20)
            b.put(B, map(key_of, range(64)))
            took = await b.until(lambda: all(b.directory.sent[key_of(i)] for i in range(64)))
            assert took < 0.1
            assert not b.announcer.stats().settled
            await b.settled()
            await b.right()

    virtually(main)


def test_a_walk_waits_for_what_it_has_found_to_be_sent() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.shelf.put(A, map(key_of, range(50_000)))
            b.directory.delay_s = 0.1
            b.announcer.act_as(US)
            highest = 0
            while not b.announcer.stats().settled:
                highest = max(highest, b.announcer.stats().repairing)
                await asyncio.sleep(0.01)
            assert REPAIRS_MAX / 2 < highest <= REPAIRS_MAX + WALK_KEYS + LANES * 1024
            await b.right()

    virtually(main)


def test_groups_that_a_walk_had_to_leave_out_are_walked_when_they_are_back() -> None:
    async def main() -> None:
        async with Bench(batch=64) as b:
            b.announcer.act_as(US)
            await b.settled()
            b.shelf.put(A, map(key_of, range(40_000)))
            b.directory.delay_s, b.directory.down = 0.01, {3, 4}
            b.announcer.act_as(US)
            whole = 40_000 // TAGS * (TAGS - 2)
            await b.until(lambda: b.announcer.stats().published >= whole, 60)
            b.directory.tries.clear()
            await asyncio.sleep(60)
            assert len(b.directory.tries) <= 2 * 31, "one try in two seconds for each of them"
            b.directory.down = set()
            await b.settled(60)
            await b.right()

    virtually(main)


def test_no_namespace_waits_for_another_one() -> None:
    async def main() -> None:
        async with Bench(batch=16) as b:
            b.announcer.act_as(US)
            await b.settled()
            b.directory.delay_s = 0.01
            b.put(A, map(key_of, range(64_000)))
            await asyncio.sleep(0.1)
            b.put(B, [key_of(70_000)])
            assert await b.until(lambda: b.directory.sent[key_of(70_000)]) < 1.0
            assert b.announcer.stats().queued > 10_000

    virtually(main)


def test_repairs_are_not_starved_by_changes() -> None:
    async def main() -> None:
        async with Bench(batch=64) as b:
            b.shelf.put(A, map(key_of, range(5000)))
            b.directory.delay_s = 0.002
            b.announcer.act_as(US)
            number = 10_000
            while not all(b.directory.sent[key_of(i)] for i in range(5000)):
                b.put(B, map(key_of, range(number, number + 4000)))  # more than can be sent
                number += 4000
                assert number < 2_000_000
                await asyncio.sleep(0.01)
            assert b.announcer.stats().queued > 4000

    virtually(main)


def test_a_loss_without_a_mark_is_found_by_looking_up() -> None:
    async def main() -> None:
        async with Bench(refresh_s=60) as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(40_000)))
            await b.settled()
            lost = [key_of(i) for i in range(100, 200)]
            await b.directory.publish(A, PARTS, US, DRAM, lost, [0] * 100)
            began, b.directory.tries[:] = b.now(), []
            await asyncio.sleep(80)
            await b.right()
            tries = [(time, keys) for time, keys in b.directory.tries if time > began]
            assert tries[0][0] > began + 50, "late"
            assert sum(keys for _, keys in tries) == 100, "and nothing that was there"

    virtually(main)


def test_while_nothing_is_missing_nothing_is_published_and_little_looked_up() -> None:
    async def main() -> None:
        async with Bench(refresh_s=60) as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(40_000)))
            await b.settled()
            b.directory.tries[:] = []
            looked_up = b.directory.looked_up
            await asyncio.sleep(1000)
            assert b.directory.tries == []
            a_second = (b.directory.looked_up - looked_up) / 1000
            assert 0.9 * VERIFY_KEYS_S < a_second < 1.1 * VERIFY_KEYS_S

    virtually(main)


def test_the_more_is_missing_the_faster_it_is_found() -> None:
    """Half of all goes without a mark: from the first sight on, no slower than a walk."""

    async def main() -> None:
        async with Bench(refresh_s=60) as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(40_000)))
            await b.settled()
            for first in range(0, 40_000, 1000):
                lost = [key_of(i) for i in range(first, first + 500)]
                await b.directory.publish(A, PARTS, US, DRAM, lost, [0] * 500)
            await asyncio.sleep(60 + 2 * 40_000 / REFRESH_KEYS_S)
            await b.right()

    virtually(main)


def test_a_shard_that_does_not_answer_has_lost_nothing() -> None:
    async def main() -> None:
        async with Bench(refresh_s=60) as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(4000)))
            await b.settled()
            b.directory.tries[:] = []
            b.directory.down = {3, 4}
            await asyncio.sleep(100)
            assert b.directory.tries == []
            b.directory.down = set()
            await asyncio.sleep(10)
            assert b.directory.tries == [], "its mark is what it was"
            await b.right()

    virtually(main)


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_rate_of_looking_up_grows_with_what_is_missing(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert VERIFY_KEYS_S <= verify_rate(low) <= verify_rate(high) <= REFRESH_KEYS_S


# ---- other nodes' entries ----------------------------------------------------------------------------


def test_wrong_hints_are_withdrawn_and_our_own_are_looked_at() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, [key_of(1), key_of(2)])
            await b.settled()
            keys = [key_of(i) for i in range(5)]
            await b.directory.publish(A, PARTS, THEM, DRAM, keys, [1] * 5)
            b.announcer.retract(A, PARTS, THEM, DRAM, keys[:3])
            b.announcer.retract(A, PARTS, US, DRAM, keys[:3])
            await b.until(lambda: b.announcer.stats().retracted == 3)
            await b.settled()
            assert await b.directory.of(THEM, A, keys) == {keys[3]: 1, keys[4]: 1}
            await b.right()

    virtually(main)


def test_what_somebody_doubts_is_withdrawn_whatever_was_withdrawn_before() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            b.put(A, map(key_of, range(20)))
            await b.settled()
            b.evict(A, map(key_of, range(10)))
            await b.settled()
            late = [key_of(n) for n in range(5)]  # a call that had timed out is carried out now
            await EmbeddedDirectory.publish(b.directory, A, PARTS, US, DRAM, late, [1] * 5)
            assert await b.directory.of(US, A, late)
            b.announcer.changed(A, [*late, key_of(15)])
            await b.settled()
            await b.right()

    virtually(main)


def test_retracts_are_bounded_and_dropped_while_the_directory_is_away() -> None:
    async def main() -> None:
        async with Bench() as b:
            b.announcer.act_as(US)
            await b.settled()
            b.announcer.retract(A, PARTS, THEM, DRAM, map(key_of, range(RETRACTS_MAX + 10)))
            assert b.announcer.stats().retracts_dropped == 10
            await b.until(lambda: b.announcer.stats().retracted == RETRACTS_MAX)
            b.directory.down = set(range(TAGS))
            b.announcer.retract(A, PARTS, THEM, DRAM, [key_of(1)])
            await b.until(lambda: b.announcer.stats().retracts_dropped == 11)

    virtually(main)


# ---- all of it ---------------------------------------------------------------------------------------

numbers = st.tuples(st.integers(0, 300), st.sampled_from([1, 3, 40, 200]))
tags = st.sets(st.integers(0, TAGS - 1), min_size=1, max_size=3) | st.just(set(range(TAGS)))
steps = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([A, B]), numbers, st.integers(1, 7)),
    st.tuples(st.just("put"), st.sampled_from([A, B]), numbers, st.integers(1, 7)),
    st.tuples(st.just("evict"), st.sampled_from([A, B]), numbers),
    st.tuples(st.just("close"), st.sampled_from([A, B])),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 0.001, 0.003, 0.2, 3.0, 40.0])),
    st.tuples(st.just("down"), tags),
    st.tuples(st.just("lose"), tags),
    st.tuples(st.just("flaky"), st.sampled_from([0.0, 0.1, 0.5])),
    st.tuples(st.just("slow"), st.sampled_from([0.0, 0.002, 0.5])),
    st.tuples(st.just("up")),
    st.tuples(st.just("act"), st.sampled_from(["nobody", "again", "anew"])),
)


@settings(max_examples=150)
@given(
    st.lists(steps, min_size=3, max_size=25),
    st.sampled_from([20, 150, 1 << 20]),
    st.sampled_from([16, 1024]),
)
@example(
    [
        ("put", A, (0, 40), 1),
        ("pass", 3.0),
        ("down", {5}),
        ("evict", A, (0, 40)),
        ("put", B, (0, 200), 2),
        ("pass", 40.0),
    ],
    20,
    16,
)
def test_when_the_faults_end_the_directory_says_what_is_held(
    steps: list[tuple[Any, ...]], queue_max: int, batch: int
) -> None:
    async def main() -> None:
        async with Bench(queue_max=queue_max, batch=batch, refresh_s=30) as b:
            lives, silent = 1, False
            b.announcer.act_as(lives.to_bytes(8, "big"))
            for what, *how in steps:
                match what:
                    case "put":
                        digest, (first, n), mask = how
                        b.put(digest, map(key_of, range(first, first + n)), mask)
                    case "evict":
                        digest, (first, n) = how
                        b.evict(digest, map(key_of, range(first, first + n)))
                    case "close":
                        b.announcer.changed(how[0], b.shelf.namespaces.pop(how[0], {}))
                    case "pass":
                        await asyncio.sleep(how[0])
                    case "down":
                        b.directory.down, b.directory.fail_s = how[0], 0.3
                    case "lose":
                        b.directory.lose(how[0])
                    case "flaky":
                        b.directory.fail_chance = how[0]
                    case "slow":
                        b.directory.delay_s = how[0]
                    case "up":
                        b.directory.down = set()
                    case "act":
                        lives += how[0] == "anew"
                        silent = how[0] == "nobody"
                        b.announcer.act_as(None if silent else lives.to_bytes(8, "big"))
            b.directory.down, b.directory.fail_chance, b.directory.delay_s = set(), 0.0, 0.0
            us = lives.to_bytes(8, "big")
            if silent:
                b.announcer.act_as(us)
            await asyncio.sleep(3.0)  # for marks to be looked at
            await b.settled()
            await b.right(us)

    virtually(main)
