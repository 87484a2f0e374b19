"""A peer of the cluster that offers nonsense under the name of a node that lives: nobody dies of it."""

from typing import Any
from urllib.parse import urlsplit

import pytest

from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from kvpool.transfer.stream import Closed
from kvpool.wire import frame
from kvpool.wire import peer as peer_wire
from tests.support.local_cluster import SECRET
from tests.support.waiting import PATIENCE_S

BIG = 2**64 - 1
CHANGES: dict[str, dict[str, Any]] = {
    "right": {},
    "a key twice": {"keys": b"k" * 32},
    "half a key": {"keys": b"k" * 17},
    "no keys": {"keys": b""},
    "no parts": {"mask": b""},
    "parts that are not there": {"mask": b"\xff" * 40},
    "a far epoch": {"epoch": BIG},
    "an epoch before the first": {"epoch": -1},
    "sizes of another": {"parts": [(7, "full", 0, 1)]},
    "sizes that are none": {"parts": [(-1, "full", BIG, -7)]},
    "sizes that are far": {"parts": [(BIG, "full", BIG, BIG)]},
    "no kind": {"parts": [(4096, "\0", 0, 1)]},
    "other fields": {"fields": b"\xc1"},
    "a reason that is none": {"reason": "\0"},
    "forwarded": {"reason": "forward", "age_s": float("nan")},
    "forwarded for ever": {"reason": "forward", "age_s": float("-inf"), "hops": -(2**63)},
    "drained": {"reason": "drain", "age_s": float("inf")},
    "many replicas": {"replicas": BIG, "hops": BIG},
    "fewer than no replicas": {"replicas": -(2**63), "hops": -(2**63)},
    "a past deadline": {"deadline_s": -1.0},
    "no deadline": {"deadline_s": float("nan")},
    "another tenant": {"tenant": "\0"},
}


@pytest.fixture(scope="module")
def seats(shared_cluster):
    with shared_cluster(nodes=2, memory="16MiB") as world:
        yield world, world.seats()


@pytest.mark.parametrize("name", CHANGES)
def test_an_offer_that_is_nonsense_is_answered(seats, numbers, until, name):
    world, (a, b) = seats
    some = numbers(2)
    assert a.put(some) == 2
    right: dict[str, Any] = {
        "node": "a",
        "incarnation": a.incarnation,
        "reason": "copy",
        "tenant": "default",
        "digest": a.ns.digest,
        "epoch": 0,
        "fields": a.record.canonical(),
        "parts": [(a.record.parts[0].nbytes, "full", 0, 1)],
        "keys": b"".join(n.to_bytes(16, "big") for n in some),
        "mask": b"\1",
        "replicas": 2,
        "hops": 1,
        "age_s": 0.0,
        "deadline_s": 60.0,
    }
    before = world.node("b").pids
    us = Identity(world.name, "a", "0" * 16, ClusterSecrets.of(SECRET))
    connections = Connections(us, TransferLimits())
    host, port = urlsplit(world.node("b").url).netloc.split(":")
    stream = connections.connect(f"tcp://{host}:{port}", Deadline(PATIENCE_S), Stop())
    answer: frame.Message | None = None
    try:
        stream.deadline = Deadline(PATIENCE_S)
        stream.send(peer_wire.Offer(**(right | CHANGES[name])), 1)
        answer = peer_wire.decode_peer(stream.receive(frame.FRAME_BYTES_MAX)[1])
    except Closed:
        assert name in ("a past deadline", "no deadline"), "else there is time for an answer"
    finally:
        stream.close()
        connections.close()
    if name == "right":
        assert answer == frame.Bytes(b"\1\1")
    else:
        assert answer is None or isinstance(answer, (frame.Bytes, frame.Error))
    assert world.node("b").pids == before
    until(lambda: b.read(some) == 2)
    assert "Traceback" not in world.node("b").said
