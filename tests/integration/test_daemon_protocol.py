"""What no client of ours says: the daemon refuses it, says why, and goes on."""

import contextlib
import json
import os
import secrets
import struct
import tempfile
from hashlib import sha256
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvpool.decoding import WrongValue
from kvpool.errors import ProtocolError
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from tests.support.waiting import PATIENCE_S

RECORD = NamespaceRecord.simple("protocol", block_bytes=4096, block_tokens=16)
PARTS = [(4096, "full", 0, 1)]
KEY = b"k" * 16
SUM = b"s" * 16


def open_message(
    fields: dict | None = None, parts: list | None = None
) -> client_wire.OpenNamespace:
    text = json.dumps({"model": "raw"} if fields is None else fields).encode()
    return client_wire.OpenNamespace(
        sha256(text).digest()[:16], text, PARTS if parts is None else parts
    )


def surplus(message: frame.Message, payload: bytes) -> bytes:
    """A frame of the message with one more field, as a newer version may append."""
    framed = frame.encode(message, 1)[frame.HEADER.size :]
    assert framed[0] & 0xF0 == 0x90, "an array of at most 15 fields"
    longer = bytes([framed[0] + 1]) + framed[1:] + payload
    return frame.HEADER.pack(len(longer), 1) + longer


def reserve(number: int, ticket: int, key: bytes) -> client_wire.Reserve:
    return client_wire.Reserve(number, [0], [ticket], key, bytes(len(key)))


def store(number: int, rows: bytes) -> client_wire.Store:
    return client_wire.Store(number, 0, rows, KEY + SUM, SUM * 2, 0, bytes(32))


HELLO = client_wire.Hello(frame.PROTOCOL_VERSION, "default", "i", "c" * 8)
NESTED = b"\x91" * 2000 + b"\xc0"


@contextlib.contextmanager
def disk():
    """Flags for one, so that there is something that blocks could be brought from."""
    with tempfile.TemporaryDirectory(prefix="kvpool-disk-") as folder:
        yield "--ssd", f"{folder}/disk=16MiB"


@pytest.fixture(scope="module")
def daemon(start_one):
    """One for all tests of this file: whatever one of them says, it serves the next."""
    with disk() as options, start_one("--memory", "32MiB", *options) as daemon:
        yield daemon
        assert daemon.stop() == 0
        of_disks = ("takes long to open", "is on the root file system")
        told = [
            line
            for line in daemon.stderr.splitlines()
            if not any(each in line for each in of_disks)
        ]
        assert not told, "nothing that a client says is worth a line"


@pytest.fixture
def apart(start_one):
    """One for a test that leaves slots taken until its process, which is ours, ends."""
    with disk() as options, start_one("--memory", "32MiB", *options) as daemon:
        yield daemon


@pytest.fixture
def met(daemon):
    """A connection that is past its Hello, and the number of a fresh namespace."""
    with daemon.raw() as raw:
        assert isinstance(raw.hello(), client_wire.Welcome)
        yield raw, raw.ask(open_message({"fresh": secrets.token_hex()})).number


@pytest.fixture(autouse=True)
def goes_on(daemon):
    """Whatever a test says, others are served, by the same process."""
    yield
    assert daemon.process.poll() is None, daemon.stderr
    with daemon.client(connect=True) as client:
        ns = client.open(RECORD)
        client.remove(ns, [KEY])
        assert client.put(ns, [KEY], b"x" * 4096) == 1
        assert client.get(ns, [KEY]) == [b"x" * 4096]


# ---- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        struct.pack("<II", frame.FRAME_BYTES_MAX + 1, 1),
        struct.pack("<II", frame.HELLO_BYTES_MAX + 1, 1),
        struct.pack("<II", 0, 1),
        struct.pack("<II", 1, 1) + b"\xc1",
        struct.pack("<II", 2, 1) + b"\x91\x63",
        b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n",
        frame.encode(client_wire.Stats(), 1),
        frame.encode(frame.Done(1), 1),
        frame.encode(client_wire.Hello(1, "default", "i", "c" * 8), 1) * 2,
        surplus(HELLO, NESTED),
        frame.encode(HELLO, 1).replace(b"default", b"\xff" * 7),
    ],
    ids=[
        "ff",
        "too-long",
        "too-long-for-a-hello",
        "empty",
        "not-msgpack",
        "unknown-type",
        "http",
        "no-hello",
        "an-answer",
        "two-at-once",
        "nested",
        "no-text",
    ],
)
def test_first_words(daemon, data):
    raw = daemon.raw()
    raw.sock.sendall(data)
    _, answer = raw.receive()
    assert isinstance(answer, frame.Error)
    assert answer.code == "protocol"
    assert raw.ended()


def test_other_version(daemon):
    raw = daemon.raw()
    answer = raw.hello(version=2, oldest=2)
    assert answer == frame.Error(
        "protocol",
        "the client speaks protocol 2 and none below 2, this side 1 and none below 1: install the same version of "
        "kvpool on both sides",
    )
    assert raw.ended()


@pytest.mark.parametrize("client", ["", "c" * 65])
def test_client_ids_have_a_size(daemon, client):
    assert daemon.raw().hello(client=client).code == "invalid"


def test_cut_off_in_the_hello(daemon, until):
    before = daemon.stats().refused_connections
    raw = daemon.raw()
    raw.sock.sendall(b"\x10\x00\x00\x00\x01")
    raw.sock.close()
    until(lambda: daemon.stats().refused_connections == before + 1)


def test_a_connection_that_never_says_hello_is_closed(daemon):
    raw = daemon.raw()
    raw.sock.settimeout(PATIENCE_S)
    assert raw.ended()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        struct.pack("<II", frame.FRAME_BYTES_MAX + 1, 1),
        struct.pack("<II", 0, 1),
        frame.encode(client_wire.Hello(1, "default", "i", "c"), 1),
        surplus(client_wire.Stats(), NESTED),
    ],
    ids=["ff", "too-long", "empty", "hello-again", "nested"],
)
def test_later_words(met, data):
    raw, _ = met
    raw.sock.sendall(data)
    request, answer = raw.receive()
    assert request == 0
    assert answer.code == "protocol"
    assert raw.ended()


@pytest.mark.parametrize(
    "message",
    [
        client_wire.Welcome(1, "n", "i", 0, 1),
        client_wire.Prefixes(b"d" * 16, KEY, float("nan")),
        client_wire.Pull(0, KEY, float("inf")),
        client_wire.Acquire(0, KEY, [], float("-inf")),
        client_wire.Match(-1, KEY, []),
        client_wire.Commit("x", [b""]),
        client_wire.WhyMissing(b"", KEY),
        client_wire.WhyMissing(b"d" * 15, KEY, "another"),
        client_wire.Release(["token"] * 5000),
        client_wire.Abort([1] * 5000),
    ],
    ids=[
        "an-answer",
        "nan",
        "infinite",
        "before-all-time",
        "negative-namespace",
        "wrong-type",
        "no-digest",
        "short-digest",
        "too-many-tokens",
        "too-many-tickets",
    ],
)
def test_a_wrong_value_is_that_requests_fault_alone(met, message):
    raw, number = met
    assert raw.ask(message).code == "invalid"
    assert raw.ask(client_wire.Present([number], 0, KEY, None)) == frame.Bytes(b"\0")


def test_a_type_of_message_that_there_is_not(met):
    raw, number = met
    raw.sock.sendall(struct.pack("<II", 2, 7) + b"\x91\x63")
    request, answer = raw.receive()
    assert (request, answer.code) == (7, "invalid")
    assert raw.ask(client_wire.Present([number], 0, KEY, None)) == frame.Bytes(b"\0")


def test_a_frame_byte_by_byte_and_many_at_once(met):
    raw, number = met
    framed = frame.encode(client_wire.Present([number], 0, KEY, None), 5)
    for at in range(len(framed)):
        raw.sock.sendall(framed[at : at + 1])
    assert raw.receive() == (5, frame.Bytes(b"\0"))
    raw.sock.sendall(
        b"".join(
            frame.encode(client_wire.Present([number], 0, KEY, None), n) for n in range(1, 500)
        )
    )
    assert [raw.receive()[0] for _ in range(1, 500)] == list(range(1, 500))


def test_requests_that_want_no_answer_get_none(met):
    raw, number = met
    raw.sock.sendall(frame.encode(client_wire.Present([number], 0, KEY, None), 0))
    raw.sock.sendall(frame.encode(client_wire.Present([99], 0, KEY, None), 0))
    assert raw.ask(client_wire.Present([number], 0, KEY, None)) == frame.Bytes(b"\0")


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_values_of_the_right_types(apart, data):
    """Requests with whatever is in them: an answer or an error, never the end of the daemon."""
    number = st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1))
    keys = st.one_of(
        st.binary(max_size=40), st.integers(0, 5).map(lambda n: b"".join([KEY, SUM] * n))
    )
    parts = st.lists(number, max_size=4)
    seconds = st.one_of(st.floats(-1e300, 1e300), st.floats(0, 1))
    texts = st.text(max_size=20)
    part = st.tuples(number, st.sampled_from(["full", "window", "x"]), number, number)
    message = data.draw(
        st.one_of(
            st.builds(client_wire.Commit, parts, st.lists(keys, max_size=3), number),
            st.builds(client_wire.Abort, parts),
            st.builds(
                client_wire.Reserve,
                *(number, parts, parts, keys, keys),
                st.lists(st.tuples(texts, number), max_size=3),
            ),
            st.builds(client_wire.Acquire, number, keys, parts, seconds, seconds, st.booleans()),
            st.builds(client_wire.Join, texts, parts),
            st.builds(client_wire.Release, st.lists(texts, max_size=3)),
            st.builds(client_wire.Match, number, keys, parts),
            st.builds(client_wire.Remove, parts, keys, st.floats(-1e300, 0.01), keys),
            st.builds(
                client_wire.Present,
                *(parts, number, keys, st.none() | st.floats(-1e300, 0.01), st.booleans(), keys),
            ),
            st.builds(
                client_wire.Pin, number, keys, st.one_of(texts, st.just("soft"), st.just("hard"))
            ),
            st.builds(client_wire.Pull, number, keys, seconds),
            st.builds(client_wire.Follow, number, keys, st.floats(-1e300, 0.01), texts, parts),
            st.builds(client_wire.Grant, number, number, number),
            st.builds(
                client_wire.Store, number, number, st.binary(max_size=12), keys, keys, number, keys
            ),
            st.builds(client_wire.GiveBack, number, st.binary(max_size=12)),
            st.builds(open_message, st.dictionaries(texts, texts, max_size=2), st.just(PARTS)),
            st.builds(open_message, st.just({"a": 1}), st.lists(part, max_size=3)),
        )
    )
    raw = FUZZED.get(apart.pid)
    if raw is None:
        raw = FUZZED[apart.pid] = apart.raw()
        assert isinstance(raw.hello(), client_wire.Welcome)
        raw.ask(open_message())
    request = raw.send(message)
    answered, answer = raw.receive()
    try:
        client_wire.decode_client(frame.encode(message, request)[frame.HEADER.size :])
    except ProtocolError:
        assert (answered, answer.code) == (request, "invalid")
        return
    assert answered == request
    assert not isinstance(answer, frame.Error) or answer.code in {
        "invalid",
        "limit",
        "namespace_mismatch",
        "pool_full",
        "unknown_namespace",
        "unknown_reservation",
    }


FUZZED: dict = {}


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    payload=st.one_of(
        st.binary(max_size=200), st.integers(0, 127).map(lambda n: bytes([0x90 + n % 16, n]))
    )
)
def test_garbage_after_the_hello(daemon, payload):
    raw = daemon.raw()
    assert isinstance(raw.hello(), client_wire.Welcome)
    raw.sock.sendall(struct.pack("<II", len(payload), 9) + payload)
    try:
        message = client_wire.decode_client(payload)
    except WrongValue:
        assert raw.receive()[1].code == "invalid"
    except ProtocolError:
        assert raw.receive()[1].code == "protocol"
        assert raw.ended()
    else:
        assert isinstance(message, frame.Message)
    raw.sock.close()


# ---- what is asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda n, keys: client_wire.Reserve(n, [0], [1], keys, keys),
        lambda n, keys: client_wire.Acquire(n, keys, [], 1.0),
        lambda n, keys: client_wire.Match(n, keys, []),
        lambda n, keys: client_wire.Present([n], 0, keys, None),
        lambda n, keys: client_wire.Remove([n], keys),
        lambda n, keys: client_wire.Pin(n, keys, "soft"),
    ],
)
@pytest.mark.parametrize("keys", [b"k", b"k" * 15, b"k" * 17, b"k" * 47])
def test_keys_of_the_wrong_size(met, make, keys):
    raw, number = met
    answer = raw.ask(make(number, keys))
    assert answer.code == "invalid"
    assert "16" in answer.message


@pytest.mark.parametrize("parts", [[], [0, 0], [0, 1], [98], [98, 99], [-1], [0, -1]])
@pytest.mark.parametrize("scattered", [False, True])
def test_parts_that_there_are_not_are_brought_from_nowhere(met, parts, scattered):
    raw, number = met
    answer = raw.ask(client_wire.Acquire(number, KEY, parts, 1.0, wait_s=0.5, scattered=scattered))
    if parts or scattered:
        assert answer.code == "invalid"
    else:
        assert answer.token == ""


def test_too_many_keys(met):
    raw, number = met
    answer = raw.ask(client_wire.Match(number, KEY * (frame.KEYS_MAX + 1), []))
    assert answer.code == "limit"
    assert str(frame.KEYS_MAX) in answer.message
    assert raw.ask(client_wire.Match(number, KEY * frame.KEYS_MAX, [])).value == 0


def test_one_namespace_of_several_that_is_not_open_refuses_them_all(met):
    raw, number = met
    raw.ask(reserve(number, 1, KEY))
    raw.ask(client_wire.Commit([1], [SUM]))
    for namespaces in ([number, 2**62], [2**40, number]):
        assert raw.ask(client_wire.Remove(namespaces, KEY)).code == "unknown_namespace"
        assert raw.ask(client_wire.Present(namespaces, 0, KEY, 0.0)).code == "unknown_namespace"
    assert raw.ask(client_wire.Remove([], KEY)).code == "invalid"
    assert raw.ask(client_wire.Present([], 0, KEY, 0.0)).code == "invalid"
    assert raw.ask(client_wire.Present([number, number], 0, KEY, 0.0)).data == b"\3\3"
    assert raw.ask(client_wire.Remove([number, number], KEY, 0.0, KEY)).data[0] == 1


def test_a_namespace_that_is_not_open(met):
    raw, number = met
    for other in (number + 1, 2**40, 2**62):
        assert raw.ask(client_wire.Match(other, KEY, [])).code == "unknown_namespace"


def test_other_sizes_under_the_same_digest(met):
    raw, _ = met
    assert isinstance(raw.ask(open_message()), client_wire.Opened)
    answer = raw.ask(open_message(parts=[(8192, "full", 0, 1)]))
    assert answer.code == "namespace_mismatch"
    assert "4096" in answer.message
    assert "8192" in answer.message
    assert raw.ask(open_message(parts=[*PARTS, *PARTS])).code == "namespace_mismatch"


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(0, "full", 0, 1)],
        [(-1, "full", 0, 1)],
        [(1 << 40, "full", 0, 1)],
        [(33 << 20, "full", 0, 1)],
        [(4096, "half", 0, 1)],
        [(4096, "full", 3, 1)],
        [(4096, "window", 0, 1)],
        [(4096, "full", 0, 0)],
        PARTS * 4097,
    ],
)
def test_parts_that_make_no_sense(met, parts):
    raw, _ = met
    assert raw.ask(open_message({"fresh": 1}, parts)).code == "invalid"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b"\xff{}",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"a": ' * 5_000 + b"1" + b"}" * 5_000,
        b'{"a": ' * 100 + b"1" + b"}" * 100,
        b"[" * 60_000,
        b'{"a": "' + b"x" * 70_000 + b'"}',
    ],
)
def test_records_that_are_none(met, text):
    raw, _ = met
    answer = raw.ask(client_wire.OpenNamespace(sha256(text).digest()[:16], text, PARTS))
    assert answer.code == "invalid"
    assert isinstance(raw.ask(client_wire.Stats()), frame.Bytes)


def test_wrong_digest(met):
    raw, _ = met
    answer = raw.ask(client_wire.OpenNamespace(b"d" * 16, b"{}", PARTS))
    assert answer.code == "invalid"
    assert "digest" in answer.message


# ---- reservations ------------------------------------------------------------------------------------


def test_commit_of_what_was_never_reserved(met):
    raw, _ = met
    assert raw.ask(client_wire.Commit([1], [SUM])).stored == [-1]


def test_commit_twice(met):
    raw, number = met
    assert isinstance(raw.ask(reserve(number, 7, KEY)), client_wire.Reserved)
    assert raw.ask(client_wire.Commit([7], [SUM])).stored == [1]
    assert raw.ask(client_wire.Commit([7], [SUM])).stored == [-1]
    assert raw.ask(client_wire.Match(number, KEY, [])) == frame.Done(1)


def test_commit_after_abort(met):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    raw.ask(client_wire.Abort([7, 8, 7]))
    assert raw.ask(client_wire.Commit([7], [SUM])).stored == [-1]
    assert raw.ask(client_wire.Match(number, KEY, [])) == frame.Done(0)


@pytest.mark.parametrize("sums", [b"", b"s", SUM * 2, b"s" * 15])
def test_commit_with_checksums_that_do_not_fit(met, sums):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    assert raw.ask(client_wire.Commit([7], [sums])).code == "invalid"
    assert raw.ask(client_wire.Commit([7], [SUM])).stored == [1], "the reservation was left alone"


def test_a_ticket_in_use(met):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    assert raw.ask(reserve(number, 7, b"j" * 16)).code == "invalid"


def test_another_client_commits_or_aborts(daemon, met):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    other = daemon.raw()
    other.hello()
    assert other.ask(client_wire.Commit([7], [SUM])).stored == [-1]
    other.ask(client_wire.Abort([7]))
    assert raw.ask(client_wire.Commit([7], [SUM])).stored == [1]


def test_another_connection_of_the_same_client_may_commit(daemon):
    one, two = daemon.raw(), daemon.raw()
    for raw in (one, two):
        assert isinstance(raw.hello(client="same" * 8), client_wire.Welcome)
    number = one.ask(open_message()).number
    one.ask(reserve(number, 7, KEY))
    assert two.ask(client_wire.Commit([7], [SUM])).stored == [1]


def test_another_instance_with_the_same_client_id_is_refused(daemon):
    daemon.raw().hello(client="ours" * 8, instance="one")
    assert daemon.raw().hello(client="ours" * 8, instance="two").code == "not_authenticated"


def test_another_process_with_the_same_client_id_is_refused(daemon):
    thief = daemon.script(
        """
client = Client(SOCKET, timeout_s=60, instance="test")
client._connections.dialer.client_id = hear()
try:
    client.match(client.open(RECORD), [key(1)])
except Exception as error:
    say(type(error).__name__)
"""
    )
    owner = daemon.raw()
    owner.hello(client="mine" * 8)
    thief.say("mine" * 8)
    assert thief.hear() == "NotAuthenticated"


def test_granted_slots_are_their_owner_s(daemon, met):
    raw, number = met
    granted = raw.ask(client_wire.Grant(number, 0, 2))
    assert len(granted.rows) == 8
    other = daemon.raw()
    other.hello()
    stolen = other.ask(store(number, granted.rows))
    assert stolen.code == "unknown_reservation"
    other.ask(client_wire.GiveBack(granted.stride, granted.rows))
    twice = granted.rows[:4] * 2
    assert raw.ask(store(number, twice)).code == "unknown_reservation"
    assert raw.ask(store(number, granted.rows)).new == 2
    assert raw.ask(store(number, granted.rows)).code == "unknown_reservation"


# ---- leases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_s", [0.0, -1.0, -1e300])
def test_leases_that_make_no_sense(met, lease_s):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    raw.ask(client_wire.Commit([7], [SUM]))
    assert raw.ask(client_wire.Acquire(number, KEY, [], lease_s)).code == "invalid"


@pytest.mark.parametrize("lease_s", [1e300, 1e9])
def test_leases_are_capped(met, lease_s):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    raw.ask(client_wire.Commit([7], [SUM]))
    leased = raw.ask(client_wire.Acquire(number, KEY, [], lease_s))
    assert 59 < leased.lease_s <= 60.1


def test_a_short_lease_ends_in_time_though_a_long_one_was_first(daemon, met, until):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    raw.ask(client_wire.Commit([7], [SUM]))
    before = daemon.stats().leases
    raw.ask(client_wire.Acquire(number, KEY, [], 60.0))
    raw.ask(client_wire.Acquire(number, KEY, [], 0.05))
    until(lambda: daemon.stats().leases == before + 1)


def test_join_with_parts_that_are_not_there_holds_nothing(daemon, met):
    raw, number = met
    raw.ask(reserve(number, 7, KEY))
    raw.ask(client_wire.Commit([7], [SUM]))
    before = daemon.stats().leases
    token = raw.ask(client_wire.Acquire(number, KEY, [], 60.0)).token
    mate = daemon.raw()
    mate.hello()
    assert mate.ask(client_wire.Join(token, [1])).code == "invalid"
    assert mate.ask(client_wire.Join(token, [0, 0])).code == "invalid"
    assert daemon.stats().leases == before + 1
    raw.ask(client_wire.Release([token]))
    assert daemon.stats().leases == before


# ---- greed ---------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def test_a_client_that_never_reads_its_answers(daemon, met):
    """It is made to wait; the daemon's memory stays small, and others are served."""
    raw, _ = met
    for n in range(64):
        raw.ask(open_message({"n": n, "text": "x" * 8192}))
    assert len(raw.ask(client_wire.Stats()).data) > 512 << 10
    before = resident_bytes(daemon.pid)
    greedy = daemon.raw()
    greedy.hello()
    greedy.sock.setblocking(False)
    flood = b"".join(frame.encode(client_wire.Stats(), n) for n in range(1, 20_000))
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < len(flood):
            sent += greedy.sock.send(flood[sent:])
    with daemon.client() as client:
        for _ in range(20):
            assert client.stats().connections >= 3
    assert resident_bytes(daemon.pid) - before < 64 << 20
    # Whoever reads at last gets all answers, in order.
    greedy.sock.settimeout(PATIENCE_S)
    for n in range(1, 30):
        request, answer = greedy.receive()
        assert request == n
        assert isinstance(answer, frame.Bytes)


def test_a_client_that_asks_for_all_at_once_gets_all(met):
    """More answers than are written in one go come in turns, in order."""
    raw, number = met
    raw.sock.settimeout(60)
    for n in range(16):
        raw.ask(open_message({"n": n, "text": "x" * 8192}))
    raw.sock.sendall(b"".join(frame.encode(client_wire.Stats(), n) for n in range(1, 200)))
    assert [raw.receive()[0] for _ in range(1, 200)] == list(range(1, 200))
    assert raw.ask(client_wire.Match(number, KEY, [])) == frame.Done(0)


def test_many_clients_come_and_go(daemon):
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    clients, granted = daemon.stats().clients, daemon.space().granted_bytes
    with daemon.client(connect=True):
        before = len(list(descriptors.iterdir()))
        for n in range(100):
            with daemon.client(connect=True) as other:
                other.put(other.open(RECORD), [n.to_bytes(16, "big")], os.urandom(4096))
    stats = daemon.stats()
    assert stats.clients <= clients + 1
    assert len(list(descriptors.iterdir())) <= before + 4
    assert daemon.space().granted_bytes == granted
