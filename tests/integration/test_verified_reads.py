"""Clients that compare what they read with its checksums: a stray write into shared memory is found, and costs one block."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.types import NamespaceRecord, PartKind, PartSpec
from kvpool.wire.frame import NO_ROW
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
COUNT = 12
RECORD = NamespaceRecord.simple("verified", block_bytes=NBYTES, block_tokens=16)
KEYS = [number.to_bytes(16, "big") for number in range(COUNT)]
BLOCKS = [np.random.default_rng(number).bytes(NBYTES) for number in range(COUNT)]


@pytest.fixture
def writer(daemon: Any):
    with daemon.client(connect=True) as client:
        ns = client.open(RECORD)
        client.put(ns, KEYS, BLOCKS)
        yield client, ns


def scribble(client: Client, ns: Any, *indices: int, part: int = 0) -> None:
    """A write where there should be none, as any client of the tenant can do by mistake."""
    with client.acquire(ns, KEYS) as lease:
        slots = lease.slots[part]
        for index in indices:
            slots.table[int(slots.rows[index]), 777] ^= 1


def test_a_wrong_block_is_left_out_and_dropped(daemon: Any, writer: Any, until: Any) -> None:
    client, ns = writer
    with daemon.client(connect=True) as reader:
        verified = reader.open(RECORD, verify=True)
        assert reader.get(verified, KEYS) == BLOCKS
        scribble(client, ns, 3, 7)
        assert client.get(ns, KEYS)[3] != BLOCKS[3], "who does not look does not see"
        expected = [None if at in (3, 7) else block for at, block in enumerate(BLOCKS)]
        assert reader.get(verified, KEYS) == expected
        until(lambda: not reader.contains(verified, KEYS)[[3, 7]].any())
        assert reader.contains(verified, KEYS).sum() == COUNT - 2
        assert reader.get(verified, KEYS) == expected
        assert daemon.stats().counters.corrupt_parts == 2
        assert client.put(ns, KEYS, BLOCKS) == 2, "they are put anew"
        assert reader.get(verified, KEYS) == BLOCKS
    assert "2 blocks in memory that do not match their checksums" in daemon.stderr


def test_targets_of_all_kinds(daemon: Any, writer: Any) -> None:
    client, ns = writer
    scribble(client, ns, 0)
    with daemon.client(connect=True) as reader:
        verified = reader.open(RECORD, verify=True)
        missing = b"\xff" * 16
        out = [np.zeros(NBYTES, np.uint8) for _ in range(4)]
        here = reader.get_into(verified, [KEYS[1], missing, KEYS[0], KEYS[2]], out)
        assert here.tolist() == [True, False, False, True]
        assert out[3].tobytes() == BLOCKS[2]


def test_a_lease_says_which_of_its_slots_are_wrong(daemon: Any, writer: Any, until: Any) -> None:
    client, ns = writer
    with daemon.client(connect=True, instance="engine") as reader:
        verified = reader.open(RECORD, verify=True)
        with reader.acquire(verified, KEYS) as lease:
            assert lease.slots[0].wrong().tolist() == []
            scribble(client, ns, 5, 11)
            wrong = lease.slots[0].wrong()
            assert wrong.tolist() == [5, 11]
            with daemon.client(connect=True, instance="engine") as worker:
                joined = worker.join(lease.token, verify=True)
                assert joined.slots[0].wrong().tolist() == [5, 11]
                joined.report(0, joined.slots[0].wrong())
                joined.release()
            until(lambda: reader.contains(verified, KEYS).sum() == COUNT - 2)
            lease.report(0, wrong)  # again: they are gone already
            assert lease.slots[0].table is not None
        assert reader.match(verified, KEYS) == 5


def test_parts_of_hybrid_models(daemon: Any) -> None:
    """A window's slots begin later, and each part's wrong ones are its own."""
    record = NamespaceRecord(
        {"model": "hybrid"}, (PartSpec(4096), PartSpec(8192, PartKind.WINDOW, 2))
    )
    with daemon.client(connect=True) as client:
        ns = client.open(record, verify=True)
        for part, spec in enumerate(record.parts):
            blocks = [bytes([number + 1]) * spec.nbytes for number in range(COUNT)]
            client.put(ns, KEYS, blocks, part=part)
        with client.acquire(ns, KEYS) as lease:
            slots = lease.slots[1]
            assert slots.first > 0
            assert [each.wrong().tolist() for each in lease.slots.values()] == [[], []]
            slots.table[int(slots.rows[0]), 0] ^= 1
            assert lease.slots[0].wrong().tolist() == []
            assert slots.wrong().tolist() == [0]
            lease.report(1, slots.wrong())
        assert not client.contains(ns, KEYS, part=1)[slots.first]
        assert client.contains(ns, KEYS, part=0).all()


def test_without_being_asked_the_daemon_sends_none(daemon: Any, writer: Any) -> None:
    client, ns = writer
    with client.acquire(ns, KEYS) as lease:
        slots = lease.slots[0]
        assert slots.checksums is None
        assert (slots.rows != NO_ROW).all()


def test_only_ones_own_leases(daemon: Any, writer: Any) -> None:
    """A token that another client holds, rows that are not the lease's."""
    client, ns = writer
    with daemon.client(connect=True) as other:
        named = other.open(RECORD, verify=True)
        with client.acquire(ns, KEYS[:2]) as lease, other.acquire(named, KEYS[4:6]) as own:
            stolen = other.acquire(named, KEYS[6:7])
            stolen.token = lease.token
            stolen.report(0, np.array([0]))
            own.slots[0].rows[:] = lease.slots[0].rows
            own.report(0, np.array([0, 1]))
            stolen.token = ""
        assert other.contains(named, KEYS).all()


READER = """
import numpy as np
from kvpool.errors import InvalidRequest
client = Client(SOCKET, timeout_s=60, connect=True, read_only=True)
ns = client.open(NamespaceRecord.simple("verified", block_bytes=65536, block_tokens=16))
keys = [key(number) for number in range(12)]
say(sum(block is not None for block in client.get(ns, keys)))
for refused in (lambda: client.put(ns, keys[:1], [bytes(65536)]), lambda: client.reserve(ns, keys[:1]), client.attach_device):
    try:
        refused()
    except InvalidRequest as error:
        say(error)
lease = client.acquire(ns, keys)
slots = lease.slots[0]
say(slots.table.flags.writeable)
try:
    os.pwrite(slots.fd, b"x", int(slots.offsets[0]))
except OSError as error:
    say(error.strerror)
hear()
# As a fault in a library would: past numpy's own flag.
import ctypes
ctypes.memset(slots.table.ctypes.data + int(slots.offsets[0]), 7, 1)
say("written")
"""


def test_a_reader_that_maps_read_only_cannot_damage_blocks(daemon: Any, writer: Any) -> None:
    client, ns = writer
    reader = daemon.script(READER)
    assert reader.hear() == str(COUNT)
    for _ in range(3):
        assert "read-only" in reader.hear()
    assert reader.hear() == "False"
    assert reader.hear() == "Bad file descriptor", "it is open for reading alone"
    reader.say()
    assert reader.process.wait(PATIENCE_S) == -signal.SIGSEGV
    assert client.get(ns, KEYS) == BLOCKS
