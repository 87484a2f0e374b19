"""What is wanted for blocks of a prompt or of a session, at a daemon with a disk: the answers, and what becomes of it."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from kvpool.client import OperatorClient
from kvpool.errors import InvalidRequest
from kvpool.types import Intent, NamespaceRecord, Outcome

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("intents", block_bytes=NBYTES, block_tokens=16)
MEMORY = 64  # blocks
QUARTER = MEMORY // 4
LONG_S = 3600.0


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


class Engine:
    def __init__(self, client: OperatorClient) -> None:
        self.client = client
        self.ns = client.open(RECORD, write="through")

    def put(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        for at in range(0, len(numbers), 8):
            keys = keys_of(numbers[at : at + 8])
            blocks = [np.frombuffer(key * (NBYTES // 16), np.uint8) for key in keys]
            assert self.client.put(self.ns, keys, blocks) == len(keys)

    def here(self, numbers: Iterable[int]) -> set[int]:
        numbers = list(numbers)
        found = self.client.contains(self.ns, keys_of(numbers))
        return {number for number, there in zip(numbers, found, strict=True) if there}

    def on_disk(self) -> int:
        return sum(disk.blocks for disk in self.client.stats().tiers.ssd)

    def intend(self, intent: Intent, numbers: Iterable[int] = (), **more):
        return self.client.intents.declare(self.ns, intent, keys_of(numbers), **more)

    def turn(self, session: str, numbers: Iterable[int], **more) -> None:
        self.client.sessions.turn(self.ns, session, keys_of(numbers), **more)

    @property
    def counters(self):
        return self.client.stats().counters


@pytest.fixture
def engine(start, folder) -> Iterator[Engine]:
    ssd = f"{folder / 'disk'}=64MiB"
    daemon = start("--memory", "4MiB", "--ssd", ssd, "--ssd-write", "through")
    with daemon.client(connect=True) as client:
        yield Engine(client)


@pytest.fixture
def written(engine, until) -> Engine:
    """Blocks 0 to 39 are in memory and on disk."""
    engine.put(range(40))
    until(lambda: engine.on_disk() == 40)
    return engine


def ask(engine: Engine, **more):
    return engine.client.ask_node(**more)


# ---- pins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [True, False])
def test_pins_beyond_the_quota_are_clipped_to_the_beginning_of_a_prompt(written, hard):
    fit = QUARTER if hard else MEMORY // 2
    for dry_run in (True, False):
        answer = written.intend(Intent.PIN, range(40), hard=hard, dry_run=dry_run)
        assert answer.outcome is Outcome.CLIPPED
        assert (answer.blocks, answer.nbytes) == (fit, fit * NBYTES)
        assert (answer.asked, answer.missing) == (40, 0)
        assert answer.limit_bytes == fit * NBYTES
        assert "quota" in answer.reason
    again = written.intend(Intent.PIN, [100, 101, *range(20, 40)], hard=hard)
    assert again.missing == 2
    assert again.outcome is (Outcome.REFUSED if hard else Outcome.CLIPPED)
    assert written.intend(Intent.UNPIN, range(40)).outcome is Outcome.ACCEPTED
    answer = written.intend(Intent.PIN, range(30, 40), hard=hard)
    assert (answer.outcome, answer.blocks, answer.limit_bytes) == (Outcome.ACCEPTED, 10, None)


def test_what_is_pinned_hard_is_still_there_after_anything(written):
    written.intend(Intent.PIN, range(40), hard=True)
    written.put(range(1000, 1200))
    assert written.here(range(40)) == set(range(QUARTER))


def test_blocks_that_nobody_has_are_missing(engine):
    for intent in Intent:
        answer = engine.intend(intent, range(3), for_s=1.0 if intent is Intent.KEEP else 0.0)
        assert (answer.outcome, answer.blocks, answer.missing) == (Outcome.MISSING, 0, 3)
        assert answer.reason


def test_intents_that_make_no_sense_are_refused_as_requests(written):
    wrong = (
        {"intent": "borrow"},
        {"intent": Intent.KEEP},
        {"intent": Intent.PIN, "for_s": 1.0},
        {"intent": Intent.DROP, "hard": True},
        {"intent": Intent.PIN, "session": "both"},
        {"intent": Intent.PIN, "numbers": ()},
    )
    for one in wrong:
        with pytest.raises(InvalidRequest):
            written.intend(**{"numbers": range(3), **one})


# ---- for a time ----------------------------------------------------------------------------------------


def test_what_is_kept_stays_for_its_time_and_within_its_share(written, until):
    answer = written.intend(Intent.KEEP, range(40), for_s=LONG_S)
    assert (answer.outcome, answer.blocks) == (Outcome.CLIPPED, QUARTER)
    assert answer.limit_bytes == QUARTER * NBYTES
    again = written.intend(Intent.KEEP, range(QUARTER), for_s=LONG_S)
    assert (again.outcome, again.blocks) == (Outcome.ACCEPTED, QUARTER)
    assert written.intend(Intent.KEEP, range(30, 40), for_s=1.0).outcome is Outcome.REFUSED
    written.put(range(1000, 1200))
    assert written.here(range(40)) == set(range(QUARTER))


def test_the_time_ends_by_itself(written, until):
    written.intend(Intent.KEEP, range(8), for_s=0.2)
    written.intend(Intent.KEEP, range(8, 12), for_s=0.2)
    written.intend(Intent.PIN, range(8, 10))  # in its place
    written.intend(Intent.KEEP, range(10, 12), for_s=LONG_S)  # longer
    until(lambda: written.client.stats().tenants["default"].soft_pinned_bytes == 4 * NBYTES)
    written.put(range(1000, 1200))
    assert written.here(range(40)) == {8, 9, 10, 11}


def test_a_restart_ends_it(written, start, folder, until):
    """Though a block is written to a disk while it is kept."""
    written.put(range(100, 104))
    written.intend(Intent.KEEP, range(100, 104), for_s=LONG_S)
    until(lambda: written.on_disk() == 44)
    answer = written.intend(Intent.PIN, range(100, 104), hard=True, dry_run=True)
    assert answer.blocks == 4
    shown = ask(written, message=_show(written, range(100, 104)))
    pins = {(one.tier, one.pin) for one in shown}
    assert pins == {("dram", "soft"), ("ssd", "none")}


def _show(engine: Engine, numbers: Iterable[int]):
    from kvpool.wire.operator import ShowBlocks

    return ShowBlocks(engine.ns.digest, b"".join(keys_of(numbers)))


# ---- what goes -----------------------------------------------------------------------------------------


def test_what_is_expendable_goes_first_the_end_of_the_prompt_before_its_beginning(written, until):
    written.put(range(100, 124))
    some = [*range(40), *range(100, 124)]
    written.put(range(200, 204))  # from now on each put needs the places of others
    until(lambda: written.on_disk() == 68)  # none is being written any more
    before = written.here(some)
    answer = written.intend(Intent.EXPEND, range(100, 108))
    assert (answer.outcome, answer.blocks, answer.nbytes) == (Outcome.ACCEPTED, 8, 8 * NBYTES)
    written.put(range(300, 304))
    gone = before - written.here(some)
    assert gone == set(range(108 - len(gone), 108))
    assert 4 <= len(gone) <= 8, "slots are granted ahead"


def test_what_is_pinned_is_not_expendable(written):
    written.intend(Intent.PIN, range(4))
    assert written.intend(Intent.EXPEND, range(4)).outcome is Outcome.REFUSED
    answer = written.intend(Intent.EXPEND, range(8))
    assert (answer.outcome, answer.blocks) == (Outcome.CLIPPED, 4)


def test_what_is_dropped_is_gone_from_memory_and_disk(written):
    written.intend(Intent.PIN, [3], hard=True)
    assert written.intend(Intent.DROP, range(8), dry_run=True).blocks == 7
    assert len(written.here(range(8))) == 8
    answer = written.intend(Intent.DROP, range(8))
    assert (answer.outcome, answer.blocks) == (Outcome.CLIPPED, 7)
    assert "pinned" in answer.reason
    assert written.here(range(8)) == {3}
    assert written.client.pull(written.ns, keys_of(range(8)), wait_s=0.2) == 0
    assert written.intend(Intent.DROP, [0, 1]).outcome is Outcome.MISSING


# ---- ahead ---------------------------------------------------------------------------------------------


def test_a_prompt_is_brought_into_memory_that_is_free(written, until):
    written.client.evict(tier="dram")
    assert written.intend(Intent.PREFETCH, range(40), dry_run=True).blocks == 40
    answer = written.intend(Intent.PREFETCH, range(50))
    assert (answer.outcome, answer.blocks, answer.missing) == (Outcome.ACCEPTED, 40, 10)
    until(lambda: len(written.here(range(40))) == 40)
    until(lambda: written.counters.prefetched == 40)
    here = written.intend(Intent.PREFETCH, range(40))
    assert (here.outcome, here.blocks, here.nbytes) == (Outcome.ACCEPTED, 40, 0)


def test_nothing_that_is_in_use_makes_room_for_what_nobody_waits_for(written, until):
    written.client.evict(tier="dram")
    written.put(range(100, 100 + MEMORY))
    until(lambda: written.on_disk() == 40 + MEMORY)
    before = written.counters
    answer = written.intend(Intent.PREFETCH, range(40))
    assert (answer.outcome, answer.blocks, answer.limit_bytes) == (Outcome.REFUSED, 0, 0)
    before = written.counters
    assert written.intend(Intent.EXPEND, range(150, 158)).blocks == 8
    answer = written.intend(Intent.PREFETCH, range(40))
    assert (answer.outcome, answer.blocks) == (Outcome.CLIPPED, 8)
    assert answer.limit_bytes == 8 * NBYTES
    until(lambda: len(written.here(range(40))) == 8)
    assert written.here(range(40)) == set(range(8))
    after = written.counters
    assert after.evicted - before.evicted == 8
    assert after.evicted_expendable - before.evicted_expendable == 8


# ---- by session ----------------------------------------------------------------------------------------


def test_an_intent_for_a_session_is_for_the_prompts_of_all_its_agents(written):
    written.turn("one", range(10))
    written.turn("one", [*range(5), *range(20, 25)], agent="helper")
    answer = written.intend(Intent.PIN, session="one")
    assert (answer.outcome, answer.blocks, answer.asked) == (Outcome.ACCEPTED, 15, 15)
    nobody = written.intend(Intent.PIN, session="nobody")
    assert (nobody.outcome, nobody.asked) == (Outcome.MISSING, 0)
    assert "nobody" in nobody.reason


@pytest.mark.parametrize("more", [{"hard": True}, {"for_s": LONG_S}], ids=["pin", "keep"])
def test_a_dry_run_for_several_agents_promises_what_is_then_done(written, more):
    intent = Intent.KEEP if "for_s" in more else Intent.PIN
    written.turn("one", range(QUARTER - 4))
    written.turn("one", range(20, 20 + QUARTER - 4), agent="helper")
    foreseen = written.intend(intent, session="one", dry_run=True, **more)
    assert foreseen.outcome is Outcome.CLIPPED
    assert (foreseen.blocks, foreseen.limit_bytes) == (QUARTER, 4 * NBYTES)
    assert foreseen == written.intend(intent, session="one", **more)


def test_a_dry_run_promises_the_same_memory_to_one_agent_only(written, until):
    written.put(range(100, 140))
    until(lambda: written.on_disk() == 80)
    written.client.evict(tier="dram")
    written.turn("one", range(40))
    written.turn("one", range(100, 140), agent="helper")
    answer = written.intend(Intent.PREFETCH, session="one", dry_run=True)
    assert (answer.outcome, answer.blocks, answer.asked) == (Outcome.CLIPPED, MEMORY, 80)


def test_what_other_sessions_use_too_is_not_dropped_with_one(written):
    written.turn("one", range(10))
    written.turn("other", [*range(4), *range(20, 25)])
    answer = written.intend(Intent.DROP, session="one")
    assert (answer.outcome, answer.blocks, answer.asked) == (Outcome.CLIPPED, 6, 10)
    assert "other sessions" in answer.reason
    assert written.here(range(10)) == set(range(4))
