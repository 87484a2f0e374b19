"""An engine's stream, with all that can happen to it: against a publisher that knows what is true."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.placement.kv_events.engine_blocks import EngineBlocks, short_hash
from kvpool.placement.kv_events.stream import (
    END,
    FUTILE_MAX,
    HASHES_MAX,
    PAYLOAD_BYTES_MAX,
    WAITING_MAX,
    Batch,
    Follower,
    read_batch,
)
from tests.support.memory import longest

pack = msgspec.msgpack.encode
HASHES = range(6)


def stored(hashes: list[Any], group: int = 0, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": 99}
    event |= {"token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU"}
    return event | {"lora_name": None, "group_idx": group} | more


def removed(hashes: list[Any], group: int = 0, **more: Any) -> dict[str, Any]:
    event = {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}
    return event | {"group_idx": group} | more


CLEARED = {"type": "AllBlocksCleared"}


def message(seq: int, at: float, events: list[Any]) -> list[bytes]:
    return [b"topic", seq.to_bytes(8, "big"), pack([at, events, 0])]


def batch(seq: int, events: list[Any], at: float | None = None) -> Batch:
    read = read_batch(message(seq, seq + 1.0 if at is None else at, events))
    assert read is not None
    return read


def told(follower: Follower) -> set[int]:
    """Which hashes are held in any group, once all is told."""
    while follower.work(1):
        pass
    keys = [bytes(8) + each.to_bytes(8, "big") for each in range(100)]
    return {each for each, mask in enumerate(follower.blocks.masks(keys)) if mask}


def replay(follower: Follower, batches: list[Batch]) -> None:
    for each in batches:
        follower.replayed(each)
    follower.replay_ended()


class Publisher:
    """An engine and its publisher: what it holds, what it sends, what it keeps for replays."""

    def __init__(self, keeps: int) -> None:
        self.keeps = keeps
        self.time = 0.0
        self.wire: list[list[bytes] | None] = []  # None: the connection is lost
        self.restart()
        self.wire.clear()

    def restart(self) -> None:
        self.held: Counter[int] = Counter()
        self.seq = 0
        self.buffer: deque[list[bytes]] = deque(maxlen=self.keeps)
        self.wire.append(None)

    def step(self, changes: list[tuple[str, int]]) -> None:
        events: list[Any] = []
        for kind, each in changes:
            if kind == "store":
                self.held[each] += 1
                events.append(stored([each]))
            elif kind == "evict" and self.held[each]:
                self.held[each] -= 1
                events.append(removed([each]))
            elif kind == "clear":
                self.held.clear()
                events.append(CLEARED)
        self.time += 1.0
        sent = message(self.seq, self.time, events)
        self.seq += 1
        self.wire.append(sent)
        self.buffer.append(sent)

    def answer(self, start: int) -> list[list[bytes]]:
        return [each for each in self.buffer if int.from_bytes(each[1], "big") >= start]

    @property
    def truth(self) -> set[int]:
        return {each for each in HASHES if self.held[each]}


class Network:
    """Between a publisher and a follower: one replay at a time."""

    def __init__(self, keeps: int, *, can_replay: bool) -> None:
        self.publisher = Publisher(keeps)
        self.follower = Follower(EngineBlocks(), can_replay=can_replay)
        self.replay: list[list[bytes]] | None = None

    def deliver(self, sent: list[bytes] | None) -> None:
        if sent is None:
            self.follower.disconnected()
        else:
            read = read_batch(sent)
            assert read is not None
            self.follower.heard(read)

    def act(self, kind: str, detail: Any) -> None:
        wire, follower = self.publisher.wire, self.follower
        if kind == "step":
            self.publisher.step(detail)
        elif kind == "restart":
            self.publisher.restart()
        elif kind == "deliver":
            for sent in wire[:detail]:
                self.deliver(sent)
            del wire[:detail]
        elif kind == "lose" and wire and wire[0] is not None:
            del wire[0]
        elif kind == "twice" and wire:
            self.deliver(wire[0])
        elif kind == "swap" and len(wire) > 1 and None not in wire[:2]:
            wire[:2] = wire[1::-1]
        elif kind == "early" and None in wire:
            # The loss of a connection may be seen before the last that came over it.
            wire.remove(None)
            self.deliver(None)
            lost = detail % 2
            del wire[: lost * len(wire)]
        elif kind == "serve" and self.replay is None and follower.wanted is not None:
            self.replay = self.publisher.answer(follower.wanted)
        elif kind == "bring" and self.replay is not None:
            for sent in self.replay[:detail]:
                read = read_batch(sent)
                assert read is not None
                follower.replayed(read)
            del self.replay[:detail]
            if not self.replay:
                self.replay = None
                follower.replay_ended()
        elif kind == "cut" and self.replay is not None:
            self.replay = None
            follower.replay_failed()
        elif kind == "work":
            follower.work(detail)
        elif kind == "check":
            follower.check()

    def settle(self) -> None:
        """Everything arrives, and every question is answered."""
        for _ in range(100):
            self.act("deliver", len(self.publisher.wire))
            if self.follower.wanted is None:
                return
            self.act("serve", None)
            self.act("bring", 1000)
        raise AssertionError("it never comes to an end")


change = st.one_of(
    st.tuples(st.sampled_from(["store", "store", "evict"]), st.sampled_from(HASHES)),
    st.tuples(st.just("clear"), st.just(0)),
)
step = st.tuples(st.just("step"), st.lists(change, max_size=3))
deliver = st.tuples(st.just("deliver"), st.integers(1, 3))
work = st.tuples(st.just("work"), st.integers(1, 3))
harmless = [
    step,
    step,
    deliver,
    work,
    st.tuples(st.sampled_from(["serve", "check", "restart"]), st.none()),
    st.tuples(st.sampled_from(["bring", "early"]), st.integers(1, 4)),
]
losses = st.tuples(st.sampled_from(["lose", "twice", "swap"]), st.none())
anything = st.lists(st.one_of(*harmless, losses), max_size=60)
with_failures = st.lists(
    st.one_of(*harmless, losses, st.tuples(st.just("cut"), st.none())), max_size=60
)


@settings(max_examples=500)
@example([("serve", None), ("step", [("store", 0)]), ("restart", None), ("step", []), ("step", [])])
@example(
    [
        *(("step", []), ("restart", None), ("serve", None), ("bring", 1), ("early", 2)),
        *(("serve", None), ("step", [("store", 0)]), ("step", [])),
    ]
)
@example(
    [
        *(
            ("step", []),
            ("restart", None),
            ("serve", None),
            ("bring", 1),
            ("early", 2),
            ("deliver", 1),
        ),
        *(("serve", None), ("step", [("store", 0)]), ("step", []), ("lose", None)),
    ]
)
@given(anything)
def test_with_replays_of_all_nothing_is_ever_missing(program: list[tuple[str, Any]]) -> None:
    """Whatever is lost, doubled, exchanged or restarted: in the end it is what the engine holds."""
    network = Network(1000, can_replay=True)
    for kind, detail in program:
        network.act(kind, detail)
    network.settle()
    network.follower.check()
    network.settle()
    assert told(network.follower) == network.publisher.truth
    assert network.follower.blocks.complete
    assert network.follower.stats()["next"] == network.publisher.seq


@settings(max_examples=500)
@given(with_failures, st.integers(1, 4))
def test_what_is_lost_for_good_makes_it_hold_less_never_more(
    program: list[tuple[str, Any]], keeps: int
) -> None:
    network = Network(keeps, can_replay=True)
    for kind, detail in program:
        network.act(kind, detail)
    network.settle()
    network.follower.check()
    network.settle()
    held = told(network.follower)
    assert held <= network.publisher.truth
    if network.follower.blocks.complete:
        assert held == network.publisher.truth


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            step, step, deliver, work, st.tuples(st.sampled_from(["lose", "restart"]), st.none())
        ),
        max_size=40,
    )
)
def test_without_replays_gaps_are_seen_when_the_next_batch_comes(
    program: list[tuple[str, Any]],
) -> None:
    network = Network(0, can_replay=False)
    for kind, detail in program:
        network.act(kind, detail)
    network.publisher.step([])
    network.settle()
    held = told(network.follower)
    assert held <= network.publisher.truth
    if network.follower.blocks.complete:
        assert held == network.publisher.truth
    if not any(kind in {"lose", "restart"} for kind, _ in program):
        assert network.follower.blocks.complete


# ---- single rules --------------------------------------------------------------------------------------


def synced(batches: list[Batch]) -> Follower:
    """A follower that knows this life from its beginning."""
    follower = Follower(EngineBlocks(), can_replay=True)
    assert follower.wanted == 0
    replay(follower, batches)
    assert follower.wanted is None
    return follower


def test_a_gap_is_filled_from_the_last_batch_on() -> None:
    follower = synced([batch(0, [stored([1])])])
    follower.heard(batch(3, [stored([4])]))
    assert follower.wanted == 0
    assert told(follower) == {1}
    replay(follower, [batch(i, [stored([i + 1])]) for i in range(3)])
    assert follower.wanted is None
    assert told(follower) == {1, 2, 3, 4}
    assert follower.gaps == 0


def test_a_restart_that_nobody_saw_is_found_by_its_time() -> None:
    follower = synced([batch(0, [stored([1])])])
    again = [batch(i, [stored([i + 5])], at=18.0 + i) for i in range(3)]
    follower.heard(again[2])
    replay(follower, again)
    assert follower.wanted == 0
    replay(follower, again)
    assert follower.wanted is None
    assert told(follower) == {5, 6, 7}
    assert follower.blocks.complete


def test_a_restart_with_fewer_batches_is_found_by_their_lack() -> None:
    follower = synced([batch(i, [stored([i])]) for i in range(4)])
    follower.disconnected()
    assert follower.wanted == 3
    replay(follower, [])
    assert follower.wanted == 0
    replay(follower, [batch(0, [stored([9])], at=20.0)])
    assert told(follower) == {9}


def test_what_an_earlier_life_had_sent_is_ignored() -> None:
    follower = synced([batch(0, [stored([1])], at=20.0)])
    follower.heard(batch(1, [stored([2])], at=10.0))
    assert told(follower) == {1}
    assert follower.wanted is None


def test_a_gap_that_fell_out_of_the_buffer_makes_it_incomplete() -> None:
    follower = synced([batch(0, [stored([1])])])
    assert told(follower) == {1}
    assert follower.blocks.complete
    follower.heard(batch(9, [stored([9])]))
    replay(follower, [batch(8, [stored([8])]), batch(9, [stored([9])])])
    assert told(follower) == {8, 9}
    assert not follower.blocks.complete
    assert follower.gaps == 1
    follower.heard(batch(10, [CLEARED, stored([3])]))
    assert told(follower) == {3}
    assert follower.blocks.complete


def test_replays_that_fail_are_given_up() -> None:
    follower = synced([batch(0, [stored([1])])])
    follower.heard(batch(5, [stored([5])]))
    follower.heard(batch(6, [stored([6])]))
    for _ in range(FUTILE_MAX):
        assert follower.wanted == 0
        follower.replay_failed()
    assert follower.wanted is None
    assert told(follower) == {5, 6}
    assert not follower.blocks.complete
    follower.heard(batch(7, [stored([7])]))
    assert told(follower) == {5, 6, 7}


def test_a_routine_question_that_fails_changes_nothing() -> None:
    follower = synced([batch(0, [stored([1])])])
    for _ in range(10):
        follower.check()
        assert follower.wanted == 0
        follower.replay_failed()
        assert follower.wanted is None
    assert told(follower) == {1}
    assert follower.blocks.complete


def test_a_buffer_that_begins_behind_the_last_batch_proves_nothing() -> None:
    """It may be of another life, which has come as far."""
    follower = synced([batch(0, [stored([1])]), batch(1, [])])
    follower.heard(batch(4, []))
    replay(follower, [batch(i, [stored([i])]) for i in (2, 3, 4)])
    assert told(follower) == {2, 3, 4}
    assert not follower.blocks.complete


def test_a_connection_that_is_lost_during_a_replay_is_another_question() -> None:
    follower = synced([batch(0, [stored([1])])])
    follower.check()
    follower.disconnected()
    replay(follower, [batch(0, [stored([1])])])
    assert follower.wanted == 0
    replay(follower, [])
    assert follower.wanted == 0
    replay(follower, [batch(0, [stored([2])], at=20.0)])
    assert told(follower) == {2}


def test_a_first_question_that_fails_is_asked_again() -> None:
    follower = Follower(EngineBlocks(), can_replay=True)
    follower.replay_failed()
    assert follower.wanted == 0
    replay(follower, [batch(0, [stored([1])])])
    assert told(follower) == {1}


def test_what_an_earlier_life_had_sent_does_not_wait_for_a_gap() -> None:
    follower = Follower(EngineBlocks(), can_replay=True)
    follower.heard(batch(50, [stored([1])], at=10.0))
    replay(follower, [batch(0, [stored([2])], at=20.0)])
    assert follower.wanted is None
    assert told(follower) == {2}


def test_a_batch_that_was_told_in_part_is_let_go_of_with_the_rest() -> None:
    follower = Follower(EngineBlocks(), can_replay=False)
    follower.heard(batch(0, [stored([1]), stored([2]), stored([3])]))
    assert follower.work(3)
    follower.heard(batch(5, [stored([4]), stored([5]), stored([6])]))
    assert told(follower) == {4, 5, 6}


def test_an_engine_that_is_gone_holds_nothing() -> None:
    follower = synced([batch(0, [stored([1])])])
    follower.gone()
    assert told(follower) == set()
    assert not follower.blocks.complete
    replay(follower, [batch(0, [stored([2])], at=20.0)])
    assert told(follower) == {2}
    assert follower.blocks.complete


def test_what_waits_for_a_replay_has_a_limit() -> None:
    follower = Follower(EngineBlocks(), can_replay=True)
    for seq in range(2 * WAITING_MAX):
        follower.heard(batch(seq, [stored([seq % 50])]))
    assert longest(follower) == WAITING_MAX
    replay(follower, [batch(0, [])])
    assert follower.wanted is None
    assert follower.stats()["next"] == WAITING_MAX  # the rest is missed when the next one comes
    follower.heard(batch(2 * WAITING_MAX, []))
    assert follower.wanted == WAITING_MAX - 1


def test_work_is_cut_into_slices() -> None:
    events = [stored([i]) for i in range(50)]
    follower = synced([batch(0, [*events, stored([*range(50, 90)])])])
    held = 0
    while follower.work(8):
        assert len(follower.blocks) - held <= 8
        held = len(follower.blocks)
    assert len(follower.blocks) == 90


# ---- messages ------------------------------------------------------------------------------------------


def test_the_end_of_a_replay() -> None:
    assert read_batch([b"", END, b""]) is None


@pytest.mark.parametrize(
    "frames", [[], [b"", b"1" * 8], [b"", b"1" * 7, b""], [b"", b"", b""], [b""] * 4]
)
def test_foreign_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="KV events"):
        read_batch(frames)


@given(st.binary(max_size=40))
def test_payloads_that_cannot_be_read_clear(payload: bytes) -> None:
    """All bytes are a batch that counts, or make the blocks forgotten; nothing is raised."""
    follower = synced([batch(0, [stored([1])])])
    read = read_batch([b"", (1).to_bytes(8, "big"), payload])
    assert read is not None
    follower.check()
    replay(follower, [batch(0, [stored([1])]), read])
    held = told(follower)
    if follower.unreadable:
        assert held == set()
        assert not follower.blocks.complete


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        pack({"ts": 1}),
        pack(["now", []]),
        pack([1.0, [[1]]]),
        pack([1.0, [{"kind": "BlockStored"}]]),
        pack([1.0, [stored(["text"])]]),
        pack([1.0, [stored([b"short"])]]),
        pack([1.0, [stored([bytes(65)])]]),
        pack([1.0, [stored([1.5])]]),
        pack([1.0, [stored([1], group_idx="0")]]),
        pack([1.0, [stored([1] * (HASHES_MAX + 1))]]),
        pack([1.0, [["BlockStored", [1], None, [], 16, None]]]),  # an earlier format
        pack([1.0, [], bytes(PAYLOAD_BYTES_MAX)]),
        b"\x92\x01\x91\x81\xa4type\xa2\xff\xfe",  # a type that is no text
        b"\x92\x01\x91\x82\xa4type\xabBlockStored\xa5other" + b"\x91" * 3000 + b"\xc0",
        b"\x93\x01\x90" + b"\x91" * 3000 + b"\xc0",
        pack([float("nan"), [CLEARED]]),
        pack([float("inf"), [CLEARED]]),
    ],
)
def test_malformed_batches_are_counted_and_clear(payload: bytes) -> None:
    follower = synced([batch(0, [stored([1])])])
    read = read_batch([b"", (1).to_bytes(8, "big"), payload])
    assert read is not None
    follower.check()
    replay(follower, [batch(0, [stored([1])]), read, batch(2, [stored([2])])])
    assert told(follower) == {2}
    assert follower.unreadable == 1
    assert not follower.blocks.complete


def test_what_other_versions_add_is_left_aside() -> None:
    events = [
        stored([1], lookahead_token_ids=[1], anything={"a": [None]}),
        {"type": "BlockMoved", "block_hashes": "?"},
        {"type": "BlockStored", "block_hashes": [2]},
        stored([3], medium=None, group_idx=None),
    ]
    follower = synced([])
    read = read_batch([b"", bytes(8), pack([1.0, events, 0, "more", None])])
    assert read is not None
    follower.heard(read)
    assert told(follower) == {1, 2, 3}
    assert follower.unreadable == 0


def test_other_media_do_not_count() -> None:
    events = [
        stored([1]),
        stored([1, 2], medium="CPU"),
        stored([3], medium="STORAGE"),
        removed([1], medium="CPU"),
    ]
    follower = synced([batch(0, events)])
    assert told(follower) == {1}


def test_hashes_come_as_numbers_or_as_bytes() -> None:
    whole = bytes(range(100, 132))
    follower = synced([batch(0, [stored([whole, short_hash(whole) ^ 1])])])
    told(follower)
    assert follower.blocks.masks([whole[16:], whole[16:-1] + bytes([whole[-1] ^ 1])]) == [1, 1]


def test_reports_of_reuse_are_no_copies() -> None:
    events = [
        stored([1, 2, 3], parent_block_hash=None),
        stored([1, 2], parent_block_hash=None),  # a hit, as some requests have it reported
        removed([1]),
        stored([2]),  # computed once more, behind something else
        removed([2]),
    ]
    assert told(synced([batch(0, events)])) == {2, 3}
    events = [stored([1], 0), stored([1], 1, parent_block_hash=None), removed([1], 0)]
    assert told(synced([batch(0, events)])) == {1}


@given(st.integers(1, 40), st.integers(1, 40))
def test_large_events_are_told_in_slices(count: int, limit: int) -> None:
    follower = synced([batch(0, [stored([*range(count)]), removed([*range(0, count, 2)])])])
    while follower.work(limit):
        assert len(follower.blocks) <= count
    assert told(follower) == set(range(1, count, 2))


def test_groups_are_kept_apart() -> None:
    key = bytes(15) + b"\1"
    follower = synced([batch(0, [stored([1], 0), stored([1], 2), removed([1], 0)])])
    told(follower)
    assert follower.blocks.masks([key]) == [0b100]
