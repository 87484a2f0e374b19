"""The remote store over the S3 protocol: moto's server on loopback, with a proxy in between that fails."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import obstore
import pytest
import xxhash
from obstore.store import from_url

from kvpool.errors import ConfigError, Unavailable
from kvpool.storage.object.packs import LOCATION, ObjectTable, PackName, pack_size
from kvpool.storage.object.requests import ObjectLimits
from kvpool.storage.object.store import GetBatch, ObjectStore, PutBatch, PutResult
from kvpool.types import BlockStatus
from tests.support.s3 import NOTHING, Answer, Proxy, every, nth
from tests.support.waiting import PATIENCE_S, until

NODE, OTHER = b"node one", b"node two"
DIGEST = bytes(range(16))
NBYTES = 10_000
LIMITS = ObjectLimits(
    bytes_max=1 << 30,
    pack_bytes=4 * NBYTES,
    range_bytes=2 * NBYTES,
    gap_bytes=NBYTES // 2,
    backoff_s=0.0,
    failures_max=1000,
)


def opened(proxy: Proxy, node: bytes = NODE, limits: ObjectLimits = LIMITS) -> ObjectStore:
    return ObjectStore.open(
        f"s3://{proxy.bucket}/some/prefix",
        node=node,
        limits=limits,
        options=options(proxy),
        client_options={"allow_http": True},
    )


def options(proxy: Proxy) -> dict[str, str]:
    return {
        "endpoint": proxy.url,
        "access_key_id": "AKIDEXAMPLE",
        "secret_access_key": "secret",
        "region": "us-east-1",
    }


@pytest.fixture
def remote(proxy: Proxy) -> Iterator[ObjectStore]:
    with opened(proxy) as made:
        yield made


def content(name: int) -> np.ndarray:
    return np.random.default_rng(name).integers(0, 256, NBYTES, dtype=np.uint8)


def key(name: int) -> bytes:
    return name.to_bytes(16)


def put(remote: ObjectStore, names: list[int], timeout_s: float = PATIENCE_S) -> PutResult:
    source = np.zeros((len(names), NBYTES), np.uint8)
    for row, name in enumerate(names):
        source[row] = content(name)
    batch = PutBatch(
        table=ObjectTable(DIGEST, 2, b"the record"),
        nbytes=NBYTES,
        keys=b"".join(map(key, names)),
        parents=bytes(16 * len(names)),
        depths=np.arange(len(names), dtype=np.uint32),
        checksums=b"".join(xxhash.xxh3_128_digest(row.tobytes()) for row in source),
        source=source,
        rows=np.arange(len(names), dtype=np.intp),
    )
    return remote.put(batch, timeout_s=timeout_s)


def get(
    remote: ObjectStore, locations: np.ndarray, names: list[int], timeout_s: float = PATIENCE_S
) -> list[int]:
    """The statuses. Whatever is said to be right is."""
    destination = np.zeros((len(names), NBYTES + 64), np.uint8)
    rows = np.arange(len(names), dtype=np.intp)
    batch = GetBatch(DIGEST, 2, NBYTES, b"".join(map(key, names)), locations, destination, rows)
    statuses = remote.get(batch, timeout_s=timeout_s).tolist()
    for status, row, name in zip(statuses, destination, names, strict=True):
        if status == BlockStatus.PRESENT:
            assert (row[:NBYTES] == content(name)).all()
    return statuses


def test_blocks_go_and_come_and_are_found_again(proxy: Proxy, remote: ObjectStore) -> None:
    remote.check(timeout_s=PATIENCE_S)
    names = list(range(10))
    stored = put(remote, names)
    assert stored.statuses.tolist() == [BlockStatus.PRESENT] * 10
    assert get(remote, stored.locations, names) == [BlockStatus.PRESENT] * 10
    # Five pairs of neighbours, and nothing more was read than they are.
    reads = [ranged for verb, _, ranged in proxy.asked if verb == "GET" and ranged]
    assert len(reads) == 5 and f"bytes=0-{2 * NBYTES - 1}" in reads
    with opened(proxy, OTHER) as other:
        tables = list(other.scan(timeout_s=PATIENCE_S))
        assert b"".join(sorted(table.keys for table in tables)) == b"".join(map(key, names))
        assert {table.record for table in tables} == {b"the record"}
        assert get(other, stored.locations, names) == [BlockStatus.PRESENT] * 10
        assert other.usage().packs == 0
        assert len(list(other.scan(DIGEST, 2, timeout_s=PATIENCE_S))) == 3
        assert not list(other.scan(DIGEST, 1, timeout_s=PATIENCE_S))
    remote.forget(DIGEST, 2, stored.locations[:4], timeout_s=PATIENCE_S)
    assert (
        get(remote, stored.locations, names) == [BlockStatus.ABSENT] * 4 + [BlockStatus.PRESENT] * 6
    )
    assert remote.clear(DIGEST, timeout_s=PATIENCE_S) == 2
    assert get(remote, stored.locations, names) == [BlockStatus.ABSENT] * 10


def test_a_scan_reads_tables_and_no_blocks(proxy: Proxy, remote: ObjectStore) -> None:
    limits = ObjectLimits(bytes_max=1 << 30, pack_bytes=40 * NBYTES)
    with opened(proxy, OTHER, limits) as other:
        put(other, list(range(40)))
    proxy.asked.clear()
    assert [len(table.entries) for table in remote.scan(timeout_s=PATIENCE_S)] == [40]
    size = pack_size(NBYTES, 40, b"the record")
    reads = [ranged for verb, _, ranged in proxy.asked if verb == "GET" and ranged]
    assert reads == [f"bytes={size - 65536}-{size - 1}"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_what_fails_now_and_then_is_tried_again(
    proxy: Proxy, remote: ObjectStore, status: int
) -> None:
    names = list(range(4))
    proxy.rule = nth("PUT", {1, 2}, Answer(status=status))
    stored = put(remote, names)
    assert stored.statuses.tolist() == [BlockStatus.PRESENT] * 4
    proxy.rule = nth("GET", {1, 2, 4}, Answer(status=status))
    assert get(remote, stored.locations, names) == [BlockStatus.PRESENT] * 4
    proxy.rule = nth("GET", {1, 3}, Answer(status=status))
    assert len(list(remote.scan(timeout_s=PATIENCE_S))) == 1
    proxy.rule = nth("POST", {1}, Answer(status=status))
    remote.forget(DIGEST, 2, stored.locations, timeout_s=PATIENCE_S)
    assert remote.usage().bytes == 0
    assert remote.stats().faults["busy"] == 8


@pytest.mark.parametrize("status", [500, 503])
def test_what_always_fails_ends_after_its_retries(
    proxy: Proxy, remote: ObjectStore, status: int
) -> None:
    stored = put(remote, [1, 2])
    proxy.asked.clear()
    proxy.rule = every("GET", Answer(status=status))
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.FAILED] * 2
    assert len(proxy.asked) == 1 + LIMITS.retries
    with pytest.raises(Unavailable):
        list(remote.scan(timeout_s=PATIENCE_S))
    proxy.rule = every("PUT", Answer(status=status))
    assert put(remote, [3]).statuses.tolist() == [BlockStatus.FAILED]


def test_a_store_that_throttles_is_left_alone_for_a_while(
    proxy: Proxy, remote: ObjectStore
) -> None:
    stored = put(remote, [1])
    limits = ObjectLimits(
        bytes_max=1 << 30, failures_max=3, backoff_s=0.0, suspend_s=1000.0, suspend_s_max=1000.0
    )
    with opened(proxy, OTHER, limits) as other:
        proxy.asked.clear()
        proxy.rule = every("GET", Answer(status=503))
        for _ in range(10):
            assert get(other, stored.locations, [1]) == [BlockStatus.FAILED]
        assert len(proxy.asked) == 3
        stats = other.stats()
        assert stats.suspensions == 1 and 0 < stats.suspended_s <= 1000
        assert "503" in stats.last_fault


def test_refused_credentials_make_no_storm(proxy: Proxy, remote: ObjectStore) -> None:
    stored = put(remote, [1, 2, 3])
    proxy.rule = lambda verb, path: Answer(status=403)
    with opened(proxy, OTHER) as other:
        proxy.asked.clear()
        with pytest.raises(ConfigError, match=r"credentials.*403"):
            other.check(timeout_s=PATIENCE_S)
        for _ in range(5):
            assert get(other, stored.locations[:1], [1]) == [BlockStatus.FAILED]
            assert put(other, [4]).statuses.tolist() == [BlockStatus.FAILED]
        assert len(proxy.asked) == 1
        assert other.usage().bytes == 0


def test_a_bucket_that_is_not_there_is_named_as_a_setting(proxy: Proxy) -> None:
    proxy.bucket = "no-such-bucket"
    with opened(proxy) as remote:
        with pytest.raises(ConfigError, match="404"):
            remote.check(timeout_s=PATIENCE_S)
        assert put(remote, [1]).statuses.tolist() == [BlockStatus.FAILED]
        assert remote.usage().bytes == 0
        locations = np.zeros(1, LOCATION)
        locations["version"], locations["stored"], locations["nbytes"] = 1, NBYTES, NBYTES
        assert get(remote, locations, [1]) == [BlockStatus.FAILED], "that is no stale location"


def test_an_object_that_went_is_a_miss_without_retries(proxy: Proxy, remote: ObjectStore) -> None:
    with opened(proxy, OTHER) as other:
        stored = put(other, [1, 2])
        other.forget(DIGEST, 2, stored.locations, timeout_s=PATIENCE_S)
    proxy.asked.clear()
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.ABSENT] * 2
    assert proxy.verbs() == ["GET"]
    assert remote.stats().suspensions == 0


def test_an_answer_that_breaks_off_is_no_block(proxy: Proxy, remote: ObjectStore) -> None:
    stored = put(remote, [1, 2])
    proxy.rule = nth("GET", {1, 2}, Answer(cut=NBYTES + 1))
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.PRESENT] * 2
    proxy.rule = every("GET", Answer(cut=NBYTES + 1))
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.FAILED] * 2
    assert remote.stats().faults["unreachable"] == 2 + 1 + LIMITS.retries


def test_wrong_bytes_are_no_block(proxy: Proxy, remote: ObjectStore) -> None:
    stored = put(remote, [1, 2])
    proxy.rule = every("GET", Answer(flip=NBYTES + 17))
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.PRESENT, BlockStatus.MISMATCH]
    # The same for what a scan reads: the tail begins with the blocks of so small a pack.
    proxy.rule = lambda verb, path: (
        Answer(flip=2 * NBYTES + 11) if verb == "GET" and "list-type" not in path else NOTHING
    )
    with opened(proxy, OTHER) as other:
        assert list(other.scan(timeout_s=PATIENCE_S)) == []
        assert other.stats().packs_unreadable == 1


def test_an_object_that_is_shorter_than_its_locations_say(
    proxy: Proxy, remote: ObjectStore
) -> None:
    stored = put(remote, [1, 2])
    name = PackName(DIGEST, 2, stored.locations[0]["pack"].tobytes())
    settings: dict[str, Any] = {"client_options": {"allow_http": True}, **options(proxy)}
    raw = from_url(f"s3://{proxy.bucket}/some/prefix", **settings)
    obstore.put(raw, name.path, content(1).tobytes())
    proxy.asked.clear()
    assert get(remote, stored.locations[1:], [2]) == [BlockStatus.MISMATCH]
    assert len(proxy.asked) == 1


def test_a_store_that_hangs_costs_the_deadline_and_holds_no_thread(
    proxy: Proxy, remote: ObjectStore
) -> None:
    stored = put(remote, list(range(8)))
    release = threading.Event()
    proxy.rule = every("GET", Answer(hold=release))
    mine = {thread.name for thread in threading.enumerate() if "Thread-" not in thread.name}
    for _ in range(8):
        assert (
            get(remote, stored.locations, list(range(8)), timeout_s=0.05)
            == [BlockStatus.FAILED] * 8
        )
    assert {thread.name for thread in threading.enumerate() if "Thread-" not in thread.name} == mine
    release.set()
    proxy.rule = lambda verb, path: NOTHING
    assert get(remote, stored.locations, list(range(8))) == [BlockStatus.PRESENT] * 8


def test_one_slow_pack_does_not_hold_up_the_others(proxy: Proxy, remote: ObjectStore) -> None:
    stored = put(remote, list(range(8)))
    others: list[str] = []
    asked = threading.Event()
    slow = stored.locations[0]["pack"].tobytes().hex()

    def rule(verb: str, path: str) -> Answer:
        if slow in path:
            return Answer(hold=asked)
        others.append(path)
        if len(others) == 2:
            asked.set()
        return NOTHING

    proxy.rule = rule
    # The first pack comes only once both requests for the second one were made.
    assert get(remote, stored.locations, list(range(8))) == [BlockStatus.PRESENT] * 8


def test_a_slow_attempt_is_given_up_for_another(proxy: Proxy, remote: ObjectStore) -> None:
    stored = put(remote, [1])
    release = threading.Event()
    limits = ObjectLimits(bytes_max=1 << 30, attempt_s=1.0, backoff_s=0.0, failures_max=1000)
    proxy.rule = nth("GET", {1}, Answer(hold=release))
    with opened(proxy, OTHER, limits) as other:
        assert get(other, stored.locations, [1]) == [BlockStatus.PRESENT]
        assert other.stats().faults["late"] + other.stats().faults["unreachable"] >= 1
    release.set()


def test_an_upload_whose_answer_is_lost_is_not_two(proxy: Proxy, remote: ObjectStore) -> None:
    proxy.rule = nth("PUT", {1}, Answer(deaf=True, after_server=True))
    stored = put(remote, [1, 2])
    assert stored.statuses.tolist() == [BlockStatus.PRESENT] * 2
    assert proxy.verbs().count("PUT") == 2
    assert len(list(remote.scan(timeout_s=PATIENCE_S))) == 1
    assert get(remote, stored.locations, [1, 2]) == [BlockStatus.PRESENT] * 2


def test_an_upload_that_is_given_up_leaves_nothing(proxy: Proxy, remote: ObjectStore) -> None:
    proxy.rule = every("PUT", Answer(deaf=True, after_server=True))
    assert put(remote, [1, 2]).statuses.tolist() == [BlockStatus.FAILED] * 2
    proxy.rule = lambda verb, path: NOTHING
    assert remote.usage().bytes_doomed > 0
    assert remote.sweep(timeout_s=PATIENCE_S)
    assert not list(remote.scan(timeout_s=PATIENCE_S))
    assert remote.usage().bytes == 0


def test_an_endpoint_that_is_down_at_first_and_later(proxy: Proxy) -> None:
    limits = ObjectLimits(
        bytes_max=1 << 30,
        backoff_s=0.0,
        retries=1,
        failures_max=4,
        suspend_s=0.02,
        suspend_s_max=0.02,
    )
    proxy.rule = lambda verb, path: Answer(deaf=True)
    with opened(proxy, limits=limits) as remote:
        with pytest.raises(Unavailable, match="cannot be reached"):
            remote.check(timeout_s=PATIENCE_S)
        assert put(remote, [1]).statuses.tolist() == [BlockStatus.FAILED]
        proxy.rule = lambda verb, path: NOTHING
        stored = until_done(remote, [1])
        proxy.rule = lambda verb, path: Answer(deaf=True)
        assert get(remote, stored.locations, [1]) == [BlockStatus.FAILED]
        proxy.rule = lambda verb, path: NOTHING
        assert until_done(remote, [2]).statuses.tolist() == [BlockStatus.PRESENT]
        assert get(remote, stored.locations, [1]) == [BlockStatus.PRESENT]


def until_done(remote: ObjectStore, names: list[int]) -> PutResult:
    """Puts until the store is trusted again."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        stored = put(remote, names)
        if stored.statuses.tolist() == [BlockStatus.PRESENT] * len(names):
            return stored
    raise AssertionError("it stayed suspended")


def test_nobody_listens() -> None:
    with Proxy(("127.0.0.1", 1)) as gone:
        gone.bucket = "bucket"
    with opened(gone) as remote:
        with pytest.raises(Unavailable, match="cannot be reached"):
            remote.check(timeout_s=PATIENCE_S)
        assert put(remote, [1]).statuses.tolist() == [BlockStatus.FAILED]


def test_a_metadata_service_is_asked_only_when_told_to(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    settings = {
        "node": NODE,
        "limits": LIMITS,
        "options": {
            "endpoint": proxy.url,
            "metadata_endpoint": proxy.url,
            "region": "us-east-1",
        },
        "client_options": {"allow_http": True},
    }
    with pytest.raises(ConfigError, match="no credentials"):
        ObjectStore.open(f"s3://{proxy.bucket}", **settings)
    assert not proxy.asked
    proxy.rule = lambda verb, path: Answer(status=404)
    with ObjectStore.open(f"s3://{proxy.bucket}", instance_credentials=True, **settings) as remote:
        # It has none: that is a wrong setting, and no statement about any block.
        locations = np.zeros(1, LOCATION)
        locations["version"], locations["stored"], locations["nbytes"] = 1, NBYTES, NBYTES
        assert get(remote, locations, [1]) == [BlockStatus.FAILED]
        with pytest.raises(ConfigError):
            remote.check(timeout_s=PATIENCE_S)
    assert proxy.asked and all(path.startswith("/latest/") for _, path, _ in proxy.asked)


def test_random_faults_cost_hits_and_never_bytes(proxy: Proxy) -> None:
    rng = random.Random(7)
    answers = [NOTHING] * 6 + [
        Answer(status=500),
        Answer(status=503),
        Answer(cut=777),
        Answer(flip=5000),
        Answer(deaf=True),
        Answer(deaf=True, after_server=True),
    ]
    proxy.rule = lambda verb, path: rng.choice(answers)
    known: dict[int, bytes] = {}
    limits = ObjectLimits(
        bytes_max=8 * pack_size(NBYTES, 4, b"the record"),
        pack_bytes=4 * NBYTES,
        range_bytes=2 * NBYTES,
        gap_bytes=0,
        retries=1,
        backoff_s=0.0,
        failures_max=1000,
    )
    got = 0
    with opened(proxy, limits=limits) as remote:
        for turn in range(30):
            names = list(range(6 * turn, 6 * turn + 6))
            stored = put(remote, names)
            for name, status, location in zip(
                names, stored.statuses, stored.locations, strict=True
            ):
                if status == BlockStatus.PRESENT:
                    known[name] = location.tobytes()
            wanted = rng.sample(sorted(known), min(8, len(known)))
            locations = np.frombuffer(b"".join(known[name] for name in wanted), LOCATION)
            got += get(remote, locations, wanted).count(BlockStatus.PRESENT)
            assert remote.usage().bytes <= limits.bytes_max
        proxy.rule = lambda verb, path: NOTHING
        assert remote.sweep(timeout_s=PATIENCE_S)
        before = remote.usage()
        found = list(remote.scan(timeout_s=PATIENCE_S))
        assert len(found) == before.packs == remote.usage().packs
    assert got > 20


WRITER = """
import sys
sys.path.insert(0, {folder!r})
from test_object_s3 import OTHER, Proxy, opened, put
proxy = Proxy(("127.0.0.1", 1))
proxy.server = type("Server", (), {{"server_port": {port}}})
proxy.bucket = {bucket!r}
with opened(proxy, OTHER) as remote:
    turn = 0
    while True:
        names = list(range(8 * turn, 8 * turn + 8))
        stored = put(remote, names)
        assert stored.statuses.tolist() == [1] * 8
        for name, location in zip(names, stored.locations):
            print(name, location.tobytes().hex())
        sys.stdout.flush()
        turn += 1
"""


def test_what_a_killed_node_had_been_told_is_there_is_there(
    proxy: Proxy, remote: ObjectStore
) -> None:
    folder = __file__.rsplit("/", 1)[0]
    script = WRITER.format(folder=folder, port=proxy.server.server_port, bucket=proxy.bucket)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as child:
        lines = [child.stdout.readline() for _ in range(30)]
        child.kill()
        lines += child.stdout.readlines()
    told = {}
    for line in lines:
        name, _, location = line.strip().partition(" ")
        if len(location) == 2 * LOCATION.itemsize:
            told[int(name)] = bytes.fromhex(location)
    assert len(told) >= 30
    locations = np.frombuffer(b"".join(told.values()), LOCATION)
    assert get(remote, locations, list(told)) == [BlockStatus.PRESENT] * len(told)
    until(lambda: len(proxy.answered) == len(proxy.asked), "its last request has ended too")
    tables = list(remote.scan(timeout_s=PATIENCE_S))
    found = {location.tobytes() for table in tables for location in table.locations()}
    assert set(told.values()) <= found
    assert remote.stats().packs_unreadable == 0
    # The node comes back under its name, and owns what it wrote.
    with opened(proxy, OTHER) as again:
        assert len(list(again.scan(timeout_s=PATIENCE_S))) == again.usage().packs == len(tables)
