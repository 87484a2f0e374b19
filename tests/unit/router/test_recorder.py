"""What a recording says of requests, and that nobody waits for its disk."""

import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvpool.router.records.recorder import (
    LINE_BYTES,
    MODEL_CHARACTERS_MAX,
    QUEUE_BYTES_MAX,
    EndedRequest,
    Recorder,
)
from kvpool.simulator.recordings import RecordedRequest, parse_line
from tests.support.waiting import PATIENCE_S, until

BLOCK = 16
ENDED = EndedRequest(
    11.0,
    13.5,
    "answered",
    "a model",
    tokens=100,
    output_tokens=7,
    keys=[1, 2, 3, 4, 5, 6],
    block_tokens=BLOCK,
    ttft_s=0.25,
    cached=48,
    priority=5,
    tenant="a tenant",
    session="a session",
    agent="an agent",
)


class Patient(Recorder):
    """What is written until the end is there, however long that takes here."""

    CLOSE_S = PATIENCE_S


class Lines:
    """Stands for the file: it keeps lines, when it may go on, and fails when told."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.waits = threading.Event()
        self.error: OSError | None = None
        self.full = False
        self.closed = False

    def write(self, line: bytes) -> bool:
        self.waits.set()
        assert self.goes_on.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        if not self.full:
            self.lines.append(line)
        return not self.full

    def close(self) -> None:
        self.closed = True


def recorder_of(file: Lines, *, seed: int = 0, block_tokens: int = BLOCK) -> Recorder:
    return Patient(
        file, block_tokens=block_tokens, random=Random(seed).randbytes, clock=lambda: 10.0
    )


def recorded(
    *requests: EndedRequest, seed: int = 0, block_tokens: int = BLOCK
) -> list[RecordedRequest]:
    file = Lines()
    made = recorder_of(file, seed=seed, block_tokens=block_tokens)
    for request in requests:
        made.add(request)
    made.close()
    assert file.closed
    assert made.counts()["written"] == len(requests) == len(file.lines)
    return list(map(parse_line, file.lines))


def test_lengths_and_times_are_as_they_were() -> None:
    (found,) = recorded(ENDED)
    assert (found.timestamp, found.duration_ms, found.ttft_ms) == (1000.0, 2500.0, 250.0)
    assert (found.input_length, found.output_length, found.cached_tokens) == (100, 7, 48)
    assert (found.model, found.outcome, found.priority) == ("a model", "answered", 5)
    assert (len(found.hash_ids), found.block_tokens) == (7, BLOCK)


def test_what_is_not_known_is_not_said() -> None:
    (found,) = recorded(EndedRequest(10.0, 10.5, "refused", ""))
    assert (found.ttft_ms, found.cached_tokens) == (None, None)
    assert (found.hash_ids, found.block_tokens, found.input_length) == ((), 0, 0)
    assert (found.tenant, found.session, found.agent) == ("", "", "")


def test_whatever_engines_say_can_be_written() -> None:
    found = recorded(replace(ENDED, output_tokens=10**30, cached=-5))[0]
    assert (found.output_length, found.cached_tokens) == (1 << 40, 0)


def test_whatever_name_a_client_gives_a_model_can_be_written() -> None:
    names = ["m\ud800x", "\udfff", "\0", "m" * 100_000]
    found = recorded(*(replace(ENDED, model=name) for name in names))
    assert [one.model for one in found] == ["m?x", "?", "\0", "m" * MODEL_CHARACTERS_MAX]


def test_names_are_hashed_and_those_of_different_tenants_differ() -> None:
    found = recorded(
        ENDED,
        replace(ENDED, agent="another"),
        replace(ENDED, session="another"),
        replace(ENDED, tenant="another"),
        replace(ENDED, session="\ud800"),
        ENDED,
    )
    assert found[0].tenant == found[1].tenant == found[2].tenant != found[3].tenant
    assert found[0].session == found[1].session
    assert len({each.session for each in found}) == 4
    assert len({each.agent for each in found}) == 5
    assert found[0] == replace_ids(found[5], found[0])
    assert not {"a tenant", "a session", "an agent"} & {found[0].tenant, found[0].session}


def replace_ids(one: RecordedRequest, other: RecordedRequest) -> RecordedRequest:
    """With the last id of the other: that of a prompt's end is never the same."""
    assert one.hash_ids[-1] != other.hash_ids[-1]
    return msgspec.structs.replace(one, hash_ids=(*one.hash_ids[:-1], other.hash_ids[-1]))


CHAINS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=6)
"""Prompts by the choice that each of their blocks is: chains of few choices share beginnings."""


def keys_of(choices: Sequence[int]) -> list[int]:
    """A key stands for its block and all before it."""
    return [hash(tuple(choices[: end + 1])) % (1 << 64) for end in range(len(choices))]


@given(CHAINS, st.integers(0, BLOCK - 1), st.sampled_from([1, 16, 17, 32, 64]))
def test_prompts_share_ids_as_they_share_blocks(
    chains: list[list[int]], rest: int, block_tokens: int
) -> None:
    every = -(-block_tokens // BLOCK)
    found = recorded(
        *(
            replace(ENDED, keys=keys_of(chain), tokens=len(chain) * BLOCK + rest)
            for chain in chains
        ),
        block_tokens=block_tokens,
    )
    ids: dict[tuple[int, ...], int] = {}
    tails: list[int] = []
    for chain, request in zip(chains, found, strict=True):
        full = len(chain) // every
        assert request.block_tokens == every * BLOCK
        assert len(request.hash_ids) == -(-request.input_length // request.block_tokens)
        for at, each in enumerate(request.hash_ids[:full], 1):
            assert ids.setdefault(tuple(chain[: at * every]), each) == each
        tails += request.hash_ids[full:]
    every_id = [*ids.values(), *tails]
    assert len(set(every_id)) == len(every_id)


def test_two_recordings_of_the_same_have_no_id_in_common() -> None:
    requests = [ENDED, replace(ENDED, keys=[1, 2, 9, 10, 11, 12], session="b")]
    one, other = (recorded(*requests, seed=seed) for seed in (1, 2))

    def ids(found: list[RecordedRequest]) -> set[object]:
        names = {name for each in found for name in (each.tenant, each.session, each.agent)}
        return {
            *names,
            *(each.recording for each in found),
            *(i for e in found for i in e.hash_ids),
        }

    assert not ids(one) & ids(other)
    assert not ids(one) & {*map(str, range(20)), *range(20)}


def test_requests_do_not_wait_for_a_slow_disk_and_what_is_too_much_is_counted() -> None:
    file = Lines()
    made = recorder_of(file)
    file.goes_on.clear()
    made.add(ENDED)
    assert file.waits.wait(PATIENCE_S)
    large = replace(ENDED, keys=list(range(100_000)), tokens=100_000 * BLOCK)
    room = QUEUE_BYTES_MAX // (LINE_BYTES + 8 * 100_000)
    for _ in range(room + 5):
        made.add(large)
    assert made.counts() == {
        "written": 0,
        "queue_full": 5,
        "write_failed": 0,
        "file_full": 0,
    }
    file.goes_on.set()
    until(lambda: made.counts()["written"] == 1 + room)
    made.add(ENDED)
    made.close()
    assert made.counts()["written"] == 2 + room


def test_what_the_disk_does_not_take_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = Lines()
    made = recorder_of(file)
    file.error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(4):
        made.add(ENDED)
    until(lambda: made.counts()["write_failed"] == 4)
    file.error = None
    made.add(ENDED)
    until(lambda: made.counts()["written"] == 1)
    file.full = True
    for _ in range(3):
        made.add(ENDED)
    made.close()
    assert made.counts()["file_full"] == 3
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    words = ["cannot be written", "written again", "is full"]
    assert [word in message for word, message in zip(words, told, strict=True)] == [True] * 3


def test_an_end_does_not_wait_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    file = Lines()
    made = recorder_of(file)
    made.CLOSE_S = 0.01
    file.goes_on.clear()
    made.add(ENDED)
    made.close()
    assert "too slow" in caplog.text and not file.closed
    file.goes_on.set()
    until(lambda: file.closed)


def test_a_request_that_waits_holds_no_keys_beyond_those_that_are_written() -> None:
    file = Lines()
    made = recorder_of(file, block_tokens=10 * BLOCK)
    file.goes_on.clear()
    made.add(ENDED)
    assert file.waits.wait(PATIENCE_S)
    made.add(replace(ENDED, keys=list(range(1000)), tokens=1000 * BLOCK))
    waiting: Any = made._queue.get_nowait()
    assert (len(waiting.keys), waiting.request.keys) == (100, ())
    file.goes_on.set()
    made.close()
