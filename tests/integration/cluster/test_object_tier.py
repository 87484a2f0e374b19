"""Object storage below a cluster: what one node wrote others find, and what ails the store nobody suffers from.

A real S3 protocol server (moto's), behind a proxy that fails in the ways that stores fail.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import S3Store

from tests.support.s3 import NOTHING, Answer, every
from tests.support.waiting import PATIENCE_S

NBYTES = 32 << 10
MEMORY_BLOCKS = 128  # of each node here
SHORT_S = 1.0


def keys_of(numbers):
    return [number.to_bytes(16, "big") for number in numbers]


def block(number):
    return np.random.default_rng([0, 0, number]).bytes(NBYTES)


@pytest.fixture
def world(start_cluster, proxy):
    """Two nodes with little memory that share a bucket."""
    return start_cluster(
        nodes=2,
        memory=f"{MEMORY_BLOCKS * NBYTES >> 20}MiB",
        flags=["--no-forward", "--object-store", f"s3://{proxy.bucket}/some"],
        environ={**proxy.environ, "KVPOOL_MEMBER_TTL_S": "5"},
    )


@pytest.fixture
def stored(world, numbers, until):
    """(a seat at each node, blocks that `a` has written to object storage, and `b` has not)"""
    a, b = world.seats()
    return a, b, store(a, list(numbers(MEMORY_BLOCKS - 8)), until)


def store(seat, listed, until):
    """Fill a node's memory with blocks that are read again; those that are in object storage then."""
    seat.put(listed)
    for number in listed:
        assert seat.get([number]) == 1
    until(lambda: len(kept(seat, listed)) >= 8, "the coldest are written")
    return kept(seat, listed)


def kept(seat, listed):
    """Which of the blocks are in object storage, by the catalog."""
    found = seat.client.locate(keys_of(listed), digest=seat.ns.digest)
    there = {
        entry.key for entry in found if any(replica.tier == "object" for replica in entry.replicas)
    }
    return [
        number for number, key in zip(listed, keys_of(listed), strict=True) if key.hex() in there
    ]


def in_memory_of(seat, node, listed):
    """Which of the blocks a node has in memory, by the directory."""
    found = seat.client.locate(keys_of(listed), digest=seat.ns.digest)
    there = {
        entry.key
        for entry in found
        if any((each.node, each.tier) == (node, "dram") for each in entry.replicas)
    }
    return {
        number for number, key in zip(listed, keys_of(listed), strict=True) if key.hex() in there
    }


def fetch(seat, listed, wait_s=PATIENCE_S):
    """How many of them a reader gets that waits; each is whole and right."""
    came = seat.client.get(seat.ns, keys_of(listed), wait_s=wait_s)
    for number, data in zip(listed, came, strict=True):
        assert data is None or data == block(number), f"block {number} is wrong"
    return sum(data is not None for data in came)


def tier(seat):
    (found,) = seat.stats.tiers.object
    return found


def found_failing(seat, listed):
    """Whether the node knows that the store fails. It learns that from reads which come as far as the store."""
    assert fetch(seat, listed, SHORT_S) == 0
    return tier(seat).state == "failing"


def objects(proxy):
    """The objects in the bucket, by the server's own word."""
    bucket = S3Store(
        proxy.bucket,
        endpoint=f"http://{proxy.target[0]}:{proxy.target[1]}",
        access_key_id="any",
        secret_access_key="any",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    return bucket, [found["path"] for page in obstore.list(bucket) for found in page]


def bereave(world, b, until):
    """Node `a` is dead, and `b` knows."""
    world.node("a").kill()
    until(lambda: "a" not in b.members)


def test_the_blocks_of_a_node_that_was_killed_come_from_object_storage(world, stored, until):
    _, b, listed = stored
    bereave(world, b, until)
    assert b.match(listed) == 0
    assert fetch(b, listed) == len(listed)
    assert tier(b).read_blocks == len(listed)
    sources = {peer.node: peer.bytes for peer in b.stats.fetch.peers}
    assert sources["object storage"] == len(listed) * NBYTES


def test_a_prefix_is_leased_across_memory_and_object_storage(world, stored, until, numbers):
    _, b, listed = stored
    fresh = list(numbers(4))
    bereave(world, b, until)
    b.put(fresh)
    assert b.read([*listed, *fresh], PATIENCE_S) == len(listed) + 4


def test_a_living_peer_is_asked_before_object_storage(stored, until):
    _, b, listed = stored
    until(lambda: in_memory_of(b, "a", listed) == set(listed), "the catalog was faster")
    assert fetch(b, listed) == len(listed)
    assert tier(b).read_blocks <= b.stats.fetch.hedges, "only instead of a peer that is late"


def test_faults_are_misses_in_time_and_the_node_serves_on(world, stored, until, proxy, numbers):
    _, b, listed = stored
    bereave(world, b, until)
    silence = threading.Event()
    for number, answer in enumerate(
        (Answer(status=500), Answer(status=403), Answer(cut=1000), Answer(hold=silence))
    ):
        proxy.rule = every("GET", answer)
        some = listed[2 * number : 2 * number + 2]
        begun = time.monotonic()
        assert fetch(b, some, SHORT_S) == 0
        assert time.monotonic() - begun < PATIENCE_S, "by its deadline, on a busy machine too"
        until(lambda some=some: found_failing(b, some))
        assert tier(b).error
        fresh = list(numbers(4))
        assert b.put(fresh) == 4 and b.read(fresh) == 4
        if answer.hold is not None:
            answer.hold.set()
        proxy.rule = lambda *_: NOTHING
        until(lambda: tier(b).state == "serving")
        until(lambda some=some: fetch(b, some) == 2, "nothing was lost for good")


def test_wrong_bytes_and_missing_objects_are_misses_and_not_found_again(
    world, stored, until, proxy
):
    _, b, listed = stored
    bereave(world, b, until)
    wrong, missing = listed[:2], listed[2:]
    proxy.rule = every("GET", Answer(flip=17))
    assert fetch(b, wrong) < 2, "a bit of one block was turned over, or of both"
    assert tier(b).mismatches >= 1
    proxy.rule = lambda *_: NOTHING
    bucket, paths = objects(proxy)
    obstore.delete(bucket, paths)
    assert fetch(b, missing) == 0
    assert tier(b).stale_blocks == len(missing)
    until(lambda: kept(b, missing) == [])
    assert tier(b).state == "serving", "the store did nothing wrong"


def test_a_store_that_went_and_came_back(world, stored, until, proxy, numbers):
    _, b, listed = stored
    bereave(world, b, until)
    proxy.go_down()
    until(lambda: found_failing(b, listed))
    fresh = list(numbers(4))
    assert b.put(fresh) == 4 and b.read(fresh) == 4
    proxy.come_up()
    until(lambda: tier(b).state == "serving")
    until(lambda: fetch(b, listed) == len(listed))


def test_a_store_process_that_dies_is_started_again(world, stored, until):
    _, b, listed = stored
    bereave(world, b, until)
    (pid,) = [
        child
        for child in world.node("b").pids
        if b"kvpool.daemon.workers.object_worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    os.kill(pid, signal.SIGKILL)
    until(lambda: tier(b).restarts == 1 and tier(b).state == "serving")
    assert fetch(b, listed) == len(listed)


def test_a_catalog_that_was_lost_is_filled_by_a_scan(world, stored, until, proxy):
    _, b, listed = stored
    bereave(world, b, until)
    looked = threading.Event()
    proxy.rule = every("GET", Answer(hold=looked))  # the scan begins within two seconds
    world.redis.flush()
    assert kept(b, listed) == []
    looked.set()
    proxy.rule = lambda *_: NOTHING
    until(
        lambda: kept(b, listed) == listed,
        "whoever leads the chore lists all objects, a minute after the last time",
        seconds=2 * PATIENCE_S,
    )
    assert fetch(b, listed) == len(listed)


def test_objects_of_an_ended_epoch_are_deleted(stored, until, proxy):
    a, _, listed = stored
    assert objects(proxy)[1]
    a.client.namespaces.reset(a.ns)
    assert fetch(a, listed, SHORT_S) == 0
    until(lambda: not objects(proxy)[1])
