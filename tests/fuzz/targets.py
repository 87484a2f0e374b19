"""What is fuzzed: everything that decodes bytes of a client, a peer, an engine, etcd, Redis, object storage, a disk, or
a browser. A target takes the bytes, and raises nothing but kvpool's own errors.
"""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from msgspec import inspect
from xxhash import xxh3_128_digest

from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.problems import Refused
from kvpool.admin.routing import parse_body
from kvpool.daemon.core.requests import parse_parts
from kvpool.errors import KvpoolError
from kvpool.placement.directory import redis as redis_directory
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.kv_events import stream as kv_events
from kvpool.placement.kv_events.engine_blocks import EngineBlocks
from kvpool.placement.membership.etcd_mirror import Mirror, Paths
from kvpool.placement.records import ClusterConfig, encode_record
from kvpool.router import api
from kvpool.router.http import bodies, sse
from kvpool.security.cluster_secrets import ClusterSecrets
from kvpool.storage.object import packs
from kvpool.telemetry import node_stats, spans
from kvpool.transfer import handshake
from kvpool.transfer.base import Deadline, Identity, Outcome, Stop, TransferLimits, cut
from kvpool.transfer.handshake import admit, greet
from kvpool.transfer.memory import Memory
from kvpool.transfer.priority import Priority
from kvpool.transfer.requester import Refused as PeerRefused
from kvpool.transfer.requester import fetch
from kvpool.transfer.responder import Budgets, Conversation
from kvpool.transfer.stream import Closed, Stream
from kvpool.types import CHECKSUM_BYTES
from kvpool.wire import client, frame, jobs, operator, peer, storage, worker
from tests.contract.suites.membership import entry, record
from tests.contract.suites.transport import DIGEST, SEGMENT
from tests.fuzz.mutation import mutate, mutate_frames
from tests.support import rest
from tests.support.fetches import fetch_of

EXPECTED = (KvpoolError, Refused, bodies.BadRequest, PeerRefused)
US = Identity("kvpool", "n", "0" * 16, ClusterSecrets.of("a secret for fuzzing only"))
NBYTES, COUNT = 64, 4
PACK = packs.PackName(DIGEST, 0, bytes(16))


class Target(NamedTuple):
    """take: what is done with an input. seeds: inputs that are right. choices: their first bytes that only select.
    frames: how many frames they begin with; -1: they are frames.
    """

    take: Callable[[bytes], object]
    seeds: list[bytes]
    choices: int = 0
    frames: int = 0

    def mutated(self, data: bytes, rng: random.Random) -> bytes:
        """Another input, near this one."""
        if self.frames:
            return mutate_frames(data, rng, self.frames)
        return mutate(data, rng, self.choices)


# ---- messages -----------------------------------------------------------------------------------------------


def sample(kind: inspect.Type, rng: random.Random) -> Any:
    """A value of this type."""
    match kind:
        case inspect.StructType():
            return kind.cls(**{each.name: sample(each.type, rng) for each in kind.fields})
        case inspect.Metadata():
            return sample(kind.type, rng)
        case inspect.UnionType():
            return sample(rng.choice(kind.types), rng)
        case inspect.ListType():
            least = kind.min_length or 0
            return [sample(kind.item_type, rng) for _ in range(least + rng.randrange(3))]
        case inspect.VarTupleType():
            return tuple(sample(kind.item_type, rng) for _ in range(rng.randrange(3)))
        case inspect.TupleType():
            return tuple(sample(each, rng) for each in kind.item_types)
        case inspect.DictType():
            return {sample(kind.key_type, rng): sample(kind.value_type, rng)}
        case inspect.LiteralType():
            return rng.choice(kind.values)
        case inspect.EnumType():
            return rng.choice(list(kind.cls))
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return rng.choice([each for each in (0, 1, 7, 4096) if in_bounds(kind, each)])
        case inspect.FloatType():
            return rng.choice([each for each in (0.0, 0.5, 30.0) if in_bounds(kind, each)])
        case inspect.StrType():
            texts = ("default", "n", "", "0" * 32)
            fits = re.compile(kind.pattern or "").search
            least = kind.min_length or 0
            return rng.choice([each for each in texts if len(each) >= least and fits(each)])
        case inspect.BytesType():
            least, most = kind.min_length or 0, 64 if kind.max_length is None else kind.max_length
            some = (b"", DIGEST, bytes(16), bytes(32))
            return rng.choice([each for each in some if least <= len(each) <= most])
        case _:
            return None


def in_bounds(kind: inspect.IntType | inspect.FloatType, number: float) -> bool:
    """Whether a number is within a type's bounds."""
    return (
        (kind.ge is None or number >= kind.ge)
        and (kind.gt is None or number > kind.gt)
        and (kind.le is None or number <= kind.le)
        and (kind.lt is None or number < kind.lt)
    )


def messages(union: Any) -> list[bytes]:
    """Some of each message of a union."""
    rng = random.Random(0)
    kinds = union.__args__ if hasattr(union, "__args__") else (union,)
    return [
        msgspec.msgpack.encode(sample(inspect.type_info(kind), rng))
        for kind in kinds
        for _ in range(2)
    ]


def framed(payloads: list[bytes]) -> list[bytes]:
    return [frame.HEADER.pack(len(each), 1) + each for each in payloads]


def take_frames(data: bytes) -> None:
    """As they come: cut and merged. The first byte says where."""
    reader = frame.FrameReader(1 << 12)
    size = data[0] + 1 if data else 1
    for at in range(1, len(data), size):
        for _, payload in reader.feed(data[at : at + size]):
            client.decode_client(payload)


# ---- peers --------------------------------------------------------------------------------------------------


class Scripted(Stream):
    """A connection from which these bytes come, and into which anything goes."""

    def __init__(self, data: bytes, *, peer_node: str | None = None) -> None:
        self.deadline = Deadline(60)
        self._left = memoryview(data)
        self.peer_node = peer_node
        self.binding = b""

    @property
    def at_end(self) -> bool:
        """Whether all bytes were taken."""
        return not self._left

    def send_buffers(self, buffers: list[memoryview]) -> None:
        pass

    def receive_into(self, buffers: list[memoryview]) -> None:
        for buffer in buffers:
            if len(buffer) > len(self._left):
                raise Closed("there is no more")
            buffer[:] = self._left[: len(buffer)]
            self._left = self._left[len(buffer) :]

    def wait_beside(self, fd: int) -> None:
        pass


REACHED: Counter[str] = Counter()
"""How often what lies behind the first checks was reached, for tests."""
NONCE = b"n" * 32


def take_greeting(data: bytes) -> None:
    with patch.object(handshake, "os", SimpleNamespace(urandom=lambda _: NONCE)):
        admit(Scripted(data), US, lambda: REACHED.update(["admitted"]))


def take_challenge(data: bytes) -> None:
    with patch.object(handshake, "os", SimpleNamespace(urandom=lambda _: NONCE)):
        greet(Scripted(data), US)
    REACHED.update(["greeted"])


def handshakes() -> tuple[list[bytes], list[bytes]]:
    """What the two ends of a right handshake send, of which one is `US` with nonces that are known."""
    hello = peer.PeerHello(frame.PROTOCOL_VERSION, US.cluster, "n", NONCE)
    bare = peer.PeerChallenge(frame.PROTOCOL_VERSION, US.node, US.incarnation, NONCE, b"")
    said, (secret,) = handshake._said(hello, bare, b""), US.secrets.current()
    digests = [
        handshake._digest(secret, role, said) for role in (handshake.LISTENS, handshake.CONNECTS)
    ]
    challenge = msgspec.structs.replace(bare, proof=digests[0], more=(bytes(32),))
    connects = frame.encode(hello, 1) + frame.encode(peer.PeerProof(digests[1]), 2)
    listens = frame.encode(challenge, 1) + frame.encode(frame.Done(), 2)
    refused = frame.encode(frame.error_message(KvpoolError("no")), 1)
    return [connects], [listens, refused]


class Lends:
    """A `Source` that has nothing, or a wrong answer."""

    def open_loan(self, request: worker.OpenLoan) -> worker.Loan:
        REACHED.update(["loan"])
        count = sum(len(part.keys) for part in request.parts) // 16
        strides = [NBYTES] * len(request.parts)
        return worker.Loan(
            "", SEGMENT, strides, array("I", [0] * count).tobytes(), bytes(16 * count)
        )

    def give_back(self, token: str) -> None:
        pass

    def asked(self, question: Any) -> Any:
        REACHED.update([type(question).__name__])
        return frame.Done(1)

    def answer_later(self, question: Any) -> Any:
        REACHED.update([type(question).__name__])
        return SimpleNamespace(
            fileno=lambda: 0, result=lambda: frame.Bytes(b""), close=lambda: None
        )

    def logins_failed(self, failures: Any) -> None:
        pass

    def request_failed(self, name: str) -> None:
        raise AssertionError(name)

    def corrupt(self, report: Any) -> None:
        REACHED.update(["Corrupt"])


def peer_requests() -> list[bytes]:
    """What a peer asks rightly, in an order in which all is answered."""
    keys, request = bytes(32), msgspec.msgpack.encode(operator.Locate(bytes(16)))
    made: list[Any] = [
        peer.Ask("default", DIGEST, [0], keys),
        *(
            fetch_of(DIGEST, NBYTES, keys, 5.0),
            peer.Corrupt("default", DIGEST, 0, keys),
        )
        * 3,
        peer.Fetch(
            "default", DIGEST, [peer.PartKeys(part, NBYTES, keys) for part in range(3)], 5.0
        ),
        peer.Corrupt("default", DIGEST, 2, keys),
        sample_of(peer.Offer, node="n", deadline_s=5.0),
        sample_of(peer.Await, node="n", wait_s=1.0),
        sample_of(peer.Operate, node="n", wait_s=1.0, request=request),
    ]
    return [msgspec.msgpack.encode(each) for each in made]


def sample_of(kind: Any, **fields: Any) -> Any:
    """A message with these fields."""
    return msgspec.structs.replace(sample(inspect.type_info(kind), random.Random(1)), **fields)


def memory() -> Memory:
    found = Memory()
    found.attach(SEGMENT, bytearray(NBYTES * 64))
    return found


def take_requests(data: bytes) -> None:
    stream = Scripted(data, peer_node="n")
    stream.binding = b"TLS"  # as over a connection whose bytes are authentic
    limits = TransferLimits(inflight_bytes_max=1 << 20, fetch_bytes_max=1 << 20)
    source: Any = Lends()
    conversation = Conversation(stream, memory(), source, limits, Budgets.of(1 << 20), Priority())
    while not stream.at_end:
        stream.deadline = Deadline(60)
        conversation.answer(*conversation.hear())


def take_answer(data: bytes) -> None:
    keys = b"".join(number.to_bytes(16, "little") for number in range(COUNT))
    rows = array("I", range(COUNT)).tobytes()
    parts = [worker.PartRows(part, NBYTES, NBYTES, keys, rows) for part in range(2)]
    order = worker.PullBlocks("tcp://h:1", "default", DIGEST, SEGMENT, parts, 60.0)
    stream = Scripted(data)
    runs = next(cut(order, 1 << 30))
    fetch(stream, order, runs, memory(), Outcome(2 * COUNT), Stop(), Priority())


# ---- servers and storage ------------------------------------------------------------------------------------

_PATHS = Paths("c")
_KEYS = (
    _PATHS.config,
    _PATHS.node("n"),
    _PATHS.incarnation("0" * 16),
    _PATHS.namespace("t", "00" * 16),
    _PATHS.drain("n"),
    _PATHS.root + b"x/y",
    _PATHS.root,
)


def take_record(data: bytes) -> None:
    """A record of etcd under one of the cluster's keys; the first byte says which."""
    mirror = Mirror(_PATHS)
    key = _KEYS[data[0] % len(_KEYS)] if data else _KEYS[0]
    kv = rpc.KeyValue(key=key, value=data[1:], mod_revision=1)
    mirror.reset([kv], 1, 0.0)
    mirror.changed([rpc.Event(type=rpc.Event.PUT, kv=kv)], 2, 1.0)
    _ = mirror.view


def records() -> list[bytes]:
    config = ClusterConfig("c", secret_proof="0" * 64, other_proofs=("1" * 64,))
    made = (
        (0, config),
        (1, record("n", incarnation="0" * 16)),
        (3, entry()),
        (3, entry(epoch=5, fence=5)),
    )
    return [bytes([number]) + encode_record(each) for number, each in made]


def take_events(data: bytes) -> None:
    follower = kv_events.Follower(EngineBlocks(1 << 10), can_replay=False)
    batch = kv_events.read_batch([b"", bytes(8), data])
    if batch is not None:
        follower.heard(batch)
        while follower.work(64):
            pass


def event_batches() -> list[bytes]:
    stored = {"type": "BlockStored", "block_hashes": [1, bytes(32)], "medium": "GPU"}
    removed = {"type": "BlockRemoved", "block_hashes": [1]}
    encode = msgspec.msgpack.encode
    return [
        encode([1.0, [stored, removed, {"type": "AllBlocksCleared"}]]),
        encode([1.0, [{"type": "Other", "x": 1}, {**stored, "group_idx": 1}]]),
    ]


def take_entries(data: bytes) -> None:
    """Of a block in the directory; the first byte: of how many parts."""
    redis_directory._entries(data[1:], data[0] % 64 + 1 if data else 1)
    redis_directory._owners_in(data[1:])


def take_fields(data: bytes) -> None:
    """Of a namespace that a client opens."""
    parse_parts(hashlib.sha256(data).digest()[:16], data, [(4096, "full", 0, 1)])


def take_tail(data: bytes) -> None:
    """The end of a pack, with the checksum that fits: whoever writes the bucket computes it."""
    magic = packs._MAGIC
    at = len(data) - CHECKSUM_BYTES - len(magic)
    if at > 0:
        data = data[:at] + xxh3_128_digest(data[:at]) + magic
    size = int.from_bytes(data[-packs.TRAILER_BYTES :][16:24], "little") + len(data)
    packs.parse_tail(PACK, data, size)


def pack_tails() -> list[bytes]:
    entries = np.zeros(3, packs.ENTRY)
    _, body = packs.build(
        PACK, b"record", NBYTES, entries, np.zeros((3, NBYTES), np.uint8), np.arange(3)
    )
    return [body[3 * NBYTES :].tobytes()]


# ---- people -------------------------------------------------------------------------------------------------

_ROUTES = [route for route in (*rest.TYPED, *rest.FORWARDED) if route.body is not None]


def take_body(data: bytes) -> None:
    """Of each route that takes one; the first byte says which."""
    parse_body(_ROUTES[data[0] % len(_ROUTES)] if data else _ROUTES[0], data[1:])


def bodies_of_routes() -> list[bytes]:
    rng = random.Random(2)
    return [
        bytes([number]) + msgspec.json.encode(sample(inspect.type_info(route.body), rng))
        for number, route in enumerate(_ROUTES)
        if route.body is not None
    ]


def take_cursor(data: bytes) -> None:
    """Of each kind of list; refused if it is of none."""
    refused: list[Refused] = []
    kinds = (tuple[str], tuple[int, str], tuple[str, int, int])
    for kind in kinds:
        try:
            unpack_cursor(data.decode("latin1"), kind)
        except Refused as error:
            refused.append(error)
    if len(refused) == len(kinds):
        raise refused[0]


def take_completion(data: bytes) -> None:
    for kind in bodies.Kind:
        body = bodies.parse(kind, data, ["m"])
        bodies.limited(body, 5)
        bodies.prompt_only(body)


def take_intent(data: bytes) -> None:
    """What a client of the router wants, and the request in it, as far as it is known without engines."""
    said, kind = api.parse_intent(data)
    bodies.limited(bodies.parse(kind, bytes(said.request), ["m"]), 5)


def take_answer_stream(data: bytes) -> None:
    stream = sse.EventStream()
    for at in range(0, len(data), 37):
        stream.feed(data[at : at + 37])
    _ = stream.usage


COMPLETION = msgspec.json.encode(
    {
        "model": "m",
        "prompt": "hello",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
        "priority": 1,
        "n": 1,
        "stream": True,
    }
)
INTENTS = [
    msgspec.json.encode({"request": msgspec.Raw(COMPLETION), **said})
    for said in (
        {"intent": "keep", "for_s": 900, "nodes": ["node-a", "b.c_d"], "dry_run": True},
        {"intent": "pin", "hard": True, "path": "/v1/messages"},
        {"intent": "drop"},
    )
]
CHUNK = b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n'


def all_targets() -> Iterator[tuple[str, Target]]:
    peers = messages(peer.PeerMessage)
    for name, module, union in (
        ("client", client.decode_client, client.ClientMessage),
        ("daemon", client.decode_daemon, client.DaemonMessage),
        ("peer", peer.decode_peer, peer.PeerMessage),
        ("transfer", worker.decode_transfer, worker.TransferMessage),
        ("device", worker.decode_device, worker.DeviceMessage),
        ("gateway", worker.decode_gateway, worker.GatewayMessage),
        ("disk", storage.decode_disk, storage.DiskMessage),
        ("object", storage.decode_object, storage.ObjectMessage),
    ):
        yield name, Target(module, messages(union))
    yield "frames", Target(take_frames, [b"\7" + b"".join(framed(messages(operator.Locate)))])
    connects, listens = handshakes()
    requests = framed(peers)
    yield "handshake_listens", Target(take_greeting, [*connects * 8, *requests], frames=-1)
    yield "handshake_connects", Target(take_challenge, [*listens * 8, *requests], frames=-1)
    asked = framed(peer_requests())
    yield "peer_requests", Target(take_requests, [*asked, b"".join(asked), *requests], frames=-1)
    fetched = msgspec.msgpack.encode(peer.Fetched(b"\1" * 2 * COUNT, bytes(32 * COUNT)))
    whole = frame.HEADER.pack(len(fetched), 1) + fetched + bytes(2 * NBYTES * COUNT)
    yield "peer_answers", Target(take_answer, [*[whole] * 8, *requests], frames=1)
    yield "etcd", Target(take_record, records(), 1)
    yield "kv_events", Target(take_events, event_batches())
    yield "pack", Target(take_tail, pack_tails())
    yield "redis", Target(take_entries, [b"\1\1\0" + bytes(8) + b"\1\1"])
    yield "fields", Target(take_fields, [b'{"model":"m","dtype":"bf16"}'])
    yield "job", Target(jobs.parse_job, [b'{"kind":"evict","keys":["' + b"0" * 32 + b'"]}'])
    yield "stats", Target(node_stats.decode, [msgspec.json.encode(sample(inspect.type_info(node_stats.NodeStats), random.Random(3)))])  # fmt: skip
    yield "trace", Target(lambda data: spans.parse(data.decode("latin1")), [b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"])  # fmt: skip
    yield "rest", Target(take_body, bodies_of_routes(), 1)
    yield "cursor", Target(take_cursor, [pack_cursor("a").encode(), pack_cursor(1, "a").encode()])
    yield "completion", Target(take_completion, [COMPLETION])
    yield "intent", Target(take_intent, INTENTS)
    yield "answer_stream", Target(take_answer_stream, [CHUNK * 3 + b"data: [DONE]\n\n"])


TARGETS: dict[str, Target] = dict(all_targets())


def run(name: str, data: bytes) -> None:
    """One input. Raises what it must not raise."""
    try:
        TARGETS[name].take(data)
    except EXPECTED:
        pass
