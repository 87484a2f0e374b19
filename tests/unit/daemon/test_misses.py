"""Which reads are counted as misses, and for which of their blocks."""

import random

import pytest

from kvpool.daemon.core.events import Stage
from kvpool.daemon.core.node import Node
from kvpool.daemon.features.miss_reasons import COMPARED_MAX, differing
from kvpool.daemon.features.misses import (
    PENDING_MAX,
    SETTLE_S,
    Miss,
    Misses,
    Verdict,
    first_missing,
)
from kvpool.storage.eviction import policy_maker
from kvpool.telemetry.misses import WORDS, Reason
from kvpool.types import NamespaceRecord, PartKind, PartSpec

PARTS = (PartSpec(4096),)
NEVER = Verdict(Reason.NEVER_STORED)
LATE = Verdict(Reason.LATE)


def keys_of(*numbers: int) -> list[bytes]:
    return [random.Random(number).randbytes(16) for number in numbers]


def space(*parts: PartSpec):
    node = Node(make_policy=policy_maker("lru"))
    tenant = node.add_tenant("default", 0, 64 << 20)
    record = NamespaceRecord({"model": "m"}, parts or PARTS)
    return node.namespaces.open(tenant, record.digest(), record.canonical(), record.parts)


def test_what_differs_between_two_namespaces_is_decoded_once() -> None:
    differing.cache_clear()
    ours, theirs = (NamespaceRecord({"model": name}, PARTS).canonical() for name in "ab")
    for _ in range(3):
        assert differing(ours, theirs)["model"] == ["b", "a"]
    assert differing.cache_info().misses == 1
    for number in range(COMPARED_MAX):
        differing(ours, NamespaceRecord({"model": str(number)}, PARTS).canonical())
    before = differing.cache_info().misses
    differing(ours, theirs)
    assert differing.cache_info().misses == before + 1, "not all are remembered"


class Reads:
    """A client's questions, as the daemon tells them."""

    def __init__(self) -> None:
        self.namespace = space()
        self.misses = Misses()
        self.begun = 0

    def ask(self, keys, found, stage, now, verdict=NEVER):
        self.begun += self.misses.asked(self.namespace, keys, stage) is None
        if found == len(keys):
            self.misses.found(self.namespace, keys, stage, now)
        else:
            miss = Miss(now, self.namespace, keys[found], len(keys), found, verdict)
            self.misses.missed(miss, keys, stage)

    def counted(self, now):
        self.misses.settle(now)
        return {
            reason: (each.requests, each.blocks)
            for reason, each in self.misses.of(self.namespace).items()
        }


def test_an_engine_s_three_questions_are_one_read_with_the_last_answer():
    reads, keys = Reads(), keys_of(*range(8))
    reads.ask(keys, 2, Stage.HERE, 0.0)
    reads.ask(keys, 5, Stage.PULLED, 1.0, LATE)
    reads.ask(keys, 5, Stage.HERE, 1.1, LATE)
    assert reads.begun == 1
    assert reads.counted(SETTLE_S - 0.1) == {}, "it may go on"
    assert reads.counted(SETTLE_S) == {"late": (1, 3)}


def test_what_a_pull_has_brought_was_no_miss():
    reads, keys = Reads(), keys_of(*range(8))
    reads.ask(keys, 2, Stage.HERE, 0.0)
    reads.ask(keys, 8, Stage.PULLED, 1.0)
    reads.ask(keys, 8, Stage.HERE, 1.1)
    assert reads.begun == 1
    assert reads.counted(100.0) == {}
    assert not reads.misses.waits


def test_two_who_ask_for_the_same_prompt_are_two_reads():
    reads, keys = Reads(), keys_of(*range(4))
    for turn in range(3):
        reads.ask(keys, 1, Stage.HERE, 0.1 * turn)
    for turn in range(2):
        reads.ask(keys, 1, Stage.AGAIN, 1 + 0.1 * turn)
    # The first question with a wait may be the third reader's, who asked without one.
    assert reads.begun == 4
    assert reads.counted(100.0) == {"never_stored": (4, 12)}


def test_a_read_that_comes_much_later_is_a_new_one():
    reads, keys = Reads(), keys_of(*range(4))
    reads.ask(keys, 1, Stage.HERE, 0.0)
    assert reads.counted(SETTLE_S) == {"never_stored": (1, 3)}
    reads.ask(keys, 1, Stage.PULLED, SETTLE_S + 1)
    assert reads.begun == 2
    assert reads.counted(100.0) == {"never_stored": (2, 6)}


def test_how_many_may_go_on_is_limited():
    reads = Reads()
    for number in range(PENDING_MAX + 10):
        reads.ask([number.to_bytes(16, "big")], 0, Stage.HERE, 0.0)
    assert reads.counted(0.0) == {"never_stored": (10, 10)}
    assert reads.counted(100.0) == {"never_stored": (PENDING_MAX + 10, PENDING_MAX + 10)}


def test_the_last_read_that_ended_at_a_block_is_known():
    reads, keys = Reads(), keys_of(*range(4))
    reads.ask(keys, 1, Stage.HERE, 0.0)
    reads.ask(keys, 1, Stage.HERE, 1.0, LATE)
    found = reads.misses.last(reads.namespace, keys)
    assert found is not None
    assert (found.at, found.verdict.reason) == (1.0, "late")
    reads.counted(100.0)
    assert reads.misses.last(reads.namespace, keys) == found
    assert reads.misses.last(reads.namespace, keys_of(7)) is None
    assert reads.misses.last(space(PartSpec(8192)), keys) == found, "the same fields are the same"


@pytest.mark.parametrize(
    ("parts", "there", "found", "expected"),
    [
        ([PartSpec(4096)], [[0, 1, 2]], 3, (0, 3)),
        ([PartSpec(4096), PartSpec(4096)], [[0, 1, 2, 3], [0, 1]], 2, (1, 2)),
        # Of the window, block 2 is missing: three blocks cannot be used, although all others are there.
        (
            [PartSpec(4096), PartSpec(4096, PartKind.WINDOW, 2)],
            [[0, 1, 2, 3], [0, 1, 3]],
            2,
            (1, 2),
        ),
        ([PartSpec(4096, stride=2)], [[1]], 2, (0, 3)),
    ],
)
def test_the_block_for_want_of_which_a_prefix_ends(parts, there, found, expected):
    namespace, keys = space(*parts), keys_of(*range(4))
    for table, numbers in zip(namespace.tables, there, strict=True):
        held = [keys[number] for number in numbers]
        table.blocks.add(held, held)
    table, at = first_missing(namespace.tables, keys, found)
    assert (table.part, at) == expected


def test_all_reasons_have_words():
    assert set(WORDS) == set(Reason)
