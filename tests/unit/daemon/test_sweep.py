"""Entries of dead incarnations go, however many there are and whatever the directory answers."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.daemon.cluster.sweep import (
    SURVEY_KEYS,
    SWEEP_KEYS,
    SWEEP_KEYS_MAX,
    Sweep,
    SweepPass,
    sweep_keys,
)
from kvpool.errors import InvalidRequest, KvpoolError, NotAuthenticated, Unavailable
from kvpool.placement.directory.base import BATCH_MAX, Swept
from kvpool.placement.directory.checks import DEAD_MAX
from kvpool.placement.directory_memory import DeadIncarnations
from kvpool.placement.membership.static import StaticCluster, StaticMembership
from tests.contract.suites.membership import record
from tests.support.embedded_directory import EmbeddedDirectory

DIGEST = b"D" * 16
DRAM = 1
TICKS_MAX = 5000
BLOCK_ENTRIES = 40


async def leader() -> StaticMembership:
    membership = StaticMembership(StaticCluster())
    await membership.start()
    await membership.join(record("a"))
    return membership


def incarnation(number: int) -> bytes:
    return number.to_bytes(8, "big")


async def fill(directory: EmbeddedDirectory, incarnations: Collection[bytes]) -> list[bytes]:
    """Each has an entry in one block, and OURS in each block; all blocks."""
    keys = [secrets.token_bytes(16) for _ in range(0, len(incarnations), BLOCK_ENTRIES)]
    for at, one in enumerate(incarnations):
        await directory.publish(DIGEST, 1, one, DRAM, [keys[at // BLOCK_ENTRIES]], [1])
    for at in range(0, len(keys), BATCH_MAX):
        some = keys[at : at + BATCH_MAX]
        await directory.publish(DIGEST, 1, OURS, DRAM, some, [1] * len(some))
    return keys


OURS = b"we live!"


async def owners(directory: EmbeddedDirectory, keys: list[bytes]) -> set[bytes]:
    found = set()
    for at in range(0, len(keys), BATCH_MAX):
        for entries in await directory.locate(DIGEST, 1, keys[at : at + BATCH_MAX]):
            found.update(entry.incarnation for entry in entries)
    return found


@pytest.mark.parametrize("known", [True, False], ids=["left the view", "were never seen"])
def test_twenty_thousand_dead_incarnations_are_all_swept(known: bool) -> None:
    """More than a call takes, and more than a node remembers."""

    async def main() -> None:
        directory, membership = EmbeddedDirectory(), await leader()
        gone = [incarnation(number) for number in range(20_000)]
        keys = await fill(directory, gone)
        dead = DeadIncarnations()
        dead.came([OURS])
        if known:
            dead.came(gone)
            dead.left(gone)
        sweep = Sweep(directory, membership, dead, lambda: 0.0)
        for tick in range(TICKS_MAX):
            dead.passed(float(tick), connected=True)
            await sweep.step()
            if await owners(directory, keys) == {OURS}:
                break
        assert await owners(directory, keys) == {OURS}
        assert sweep.dropped == len(gone)
        assert sweep.outage.failures == 0

    asyncio.run(main())


class Refuses(EmbeddedDirectory):
    """A directory that answers each sweep with an error, as long as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.error: KvpoolError | None = None

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        if self.error is not None:
            raise self.error
        return await super().sweep(dead, cursor, count)


@pytest.mark.parametrize("kind", [Unavailable, InvalidRequest, NotAuthenticated])
def test_a_directory_that_refuses_is_asked_again_and_that_is_said_once(
    kind: type[KvpoolError], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        directory, membership = Refuses(), await leader()
        keys = await fill(directory, [incarnation(1)])
        dead = DeadIncarnations()
        dead.came([OURS, incarnation(1)])
        dead.left([incarnation(1)])
        sweep = Sweep(directory, membership, dead, lambda: 0.0)
        directory.error = kind("not now")
        for _ in range(5):
            await sweep.step()
        assert sweep.outage.failures == 5
        assert sweep.outage.error == "not now"
        directory.error = None
        while incarnation(1) in dead:
            await sweep.step()
        assert sweep.outage.error == ""
        assert await owners(directory, keys) == {OURS}

    with caplog.at_level(logging.WARNING, "kvpool.daemon"):
        asyncio.run(main())
    assert [r.getMessage() for r in caplog.records if "not now" in r.getMessage()] != []
    assert len(caplog.records) == 1


def test_a_membership_that_refuses_to_say_who_leads_is_asked_again() -> None:
    class Silent(StaticMembership):
        async def lead(self, chore: str) -> bool:
            raise NotAuthenticated("no role")

    async def main() -> None:
        dead = DeadIncarnations()
        sweep = Sweep(EmbeddedDirectory(), Silent(StaticCluster()), dead, lambda: 0.0)
        await sweep.step()
        assert sweep.outage.failures == 0, "the directory is well"

    asyncio.run(main())


class Counting(EmbeddedDirectory):
    """Counts the passes and the blocks asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.asked = 0

    async def sweep(self, dead: Collection[bytes], cursor: bytes, count: int) -> Swept:
        swept = await super().sweep(dead, cursor, count)
        self.asked += count
        self.passes += not swept.cursor
        return swept


def test_one_pass_is_for_all_who_are_known_to_be_dead() -> None:
    async def main() -> None:
        directory, membership = Counting(), await leader()
        gone = [incarnation(number) for number in range(10_000)]
        keys = await fill(directory, gone)
        dead = DeadIncarnations()
        dead.came([OURS, *gone])
        dead.left(gone)
        sweep = Sweep(directory, membership, dead, lambda: 0.0)
        while not directory.passes:
            await sweep.step()
        assert await owners(directory, keys) == {OURS}

    asyncio.run(main())


def test_the_sweep_is_fast_while_it_meets_the_dead_and_slow_otherwise() -> None:
    async def main() -> None:
        directory, membership = Counting(), await leader()
        keys = [secrets.token_bytes(16) for _ in range(200_000)]
        for at in range(0, len(keys), 4000):
            half = keys[at : at + 2000]
            await directory.publish(DIGEST, 1, incarnation(1), DRAM, half, [1] * 2000)
            await directory.publish(DIGEST, 1, OURS, DRAM, keys[at + 2000 : at + 4000], [1] * 2000)
        dead = DeadIncarnations()
        dead.came([OURS, incarnation(1), incarnation(2)])
        sweep = Sweep(directory, membership, dead, lambda: 0.0)
        await sweep.step()
        assert directory.asked == SURVEY_KEYS
        dead.left([incarnation(1)])
        steps = 0
        while incarnation(1) in dead:
            await sweep.step()
            steps += 1
        assert steps < 25, (
            "two passes, and not the two hundred steps that 2,000 at a time would take"
        )
        assert await owners(directory, keys) == {OURS}
        for _ in range(5):
            await sweep.step()
        dead.left([incarnation(2)])  # of whom nothing is there
        for _ in range(5):
            await sweep.step()
        directory.asked = 0
        await sweep.step()
        assert directory.asked <= 2 * SWEEP_KEYS

    asyncio.run(main())


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_step_grows_with_the_share_of_the_dead(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert SWEEP_KEYS <= sweep_keys(low) <= sweep_keys(high) <= SWEEP_KEYS_MAX


NUMBERS = st.integers(0, 5)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["came", "left"]), NUMBERS),
            st.tuples(st.just("step"), st.booleans()),
        ),
        max_size=60,
    )
)
def test_only_whom_a_whole_pass_was_for_is_called_swept(steps: list[tuple[str, int]]) -> None:
    """Against a model: a pass is two steps, and who was not dropped in both stays dead."""
    dead = DeadIncarnations()
    sweep = SweepPass(dead)
    first: set[bytes] = set()
    for what, how in steps:
        if what == "came":
            dead.came([incarnation(how)])
        elif what == "left":
            dead.left([incarnation(how)])
        else:
            before = set(dead.oldest(len(dead)))
            wanted = set(sweep.step())
            assert not any(map(dead.lives, wanted))
            assert len(wanted) <= DEAD_MAX
            assert wanted >= before
            if not sweep.cursor:
                first = wanted
                sweep.done(b"half")
            else:
                sweep.done(b"")
                after = set(dead.oldest(len(dead)))
                assert before - after <= first & wanted
    assert not any(map(dead.lives, dead.oldest(len(dead))))
