"""What is put comes back, whatever it was held in: checked against a plain dict."""

import array
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from kvpool.errors import InvalidRequest, LimitExceeded, NamespaceMismatch, PoolFull
from kvpool.types import NamespaceRecord, PartSpec
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def daemon(start_one):
    with start_one("--memory", "96MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon):
    with daemon.client(connect=True) as client:
        yield client


def fresh_keys(n: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(n)]


def namespace(client, nbytes: int):
    return client.open(NamespaceRecord.simple("roundtrip", block_bytes=nbytes, block_tokens=nbytes))


def contiguous(data: bytes, n: int) -> dict:
    """The same bytes, in everything that holds bytes in one piece."""
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    held = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "part of a memoryview": memoryview(b"<" + data + b">")[1:-1],
        "array.array": array.array("B", data),
        "ctypes": (ctypes.c_char * len(data)).from_buffer_copy(data),
        "mmap": mapped,
        "numpy": np.frombuffer(data, np.uint8),
        "numpy, 2-d": np.frombuffer(data, np.uint8).reshape(n, -1),
        "list of bytes": [
            data[i::1][: len(data) // n] for i in range(0, len(data), len(data) // n)
        ],
    }
    if len(data) % 4 == 0:
        held["numpy, float32"] = np.frombuffer(data, np.float32)
    return held


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 1000, 4096, 5000, 65536, 100_001])
@pytest.mark.parametrize("n", [1, 7])
def test_what_holds_bytes_in_one_piece(client, nbytes, n):
    ns = namespace(client, nbytes)
    data = os.urandom(n * nbytes)
    expected = [data[i * nbytes : (i + 1) * nbytes] for i in range(n)]
    for name, source in contiguous(data, n).items():
        keys = fresh_keys(n)
        assert client.put(ns, keys, source) == n, name
        assert client.get(ns, keys) == expected, name
        client.remove(ns, keys)


@pytest.mark.parametrize("nbytes", [3, 4096, 5000, 65536])
def test_pieces_are_gathered(client, nbytes):
    """Also more of them than one system call takes."""
    ns = namespace(client, nbytes)
    data = [os.urandom(nbytes) for _ in range(3)]
    for size in {1, 2, 7, nbytes // 2, nbytes} - {0}:
        blocks = [
            [memoryview(block)[at : at + size] for at in range(0, nbytes, size)] for block in data
        ]
        keys = fresh_keys(3)
        assert client.put(ns, keys, blocks) == 3
        assert client.get(ns, keys) == data
        client.remove(ns, keys)


def test_pieces_of_a_paged_cache(client):
    """The shape that engines have: per block, a page of each layer's tensor."""
    layers = [np.random.default_rng(n).integers(0, 256, (20, 1536), np.uint8) for n in range(4)]
    ns = namespace(client, 4 * 1536)
    pages = [3, 19, 0, 7]
    keys = fresh_keys(4)
    assert client.put(ns, keys, [[layer[page] for layer in layers] for page in pages]) == 4
    assert client.get(ns, keys) == [
        b"".join(layer[page].tobytes() for layer in layers) for page in pages
    ]


@pytest.mark.torch
def test_torch_tensors(client):
    torch = pytest.importorskip("torch")
    ns = namespace(client, 4096)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64):
        source = torch.randint(0, 100, (5, 4096 // dtype.itemsize)).to(dtype)
        expected = [row.view(torch.uint8).numpy().tobytes() for row in source]
        for blocks in (
            source,
            source.reshape(-1),
            list(source),
            [list(row.chunk(2)) for row in source],
        ):
            keys = fresh_keys(5)
            assert client.put(ns, keys, blocks) == 5
            out = torch.zeros_like(source)
            assert client.get_into(ns, keys, out).all()
            assert torch.equal(out, source)
            assert client.get(ns, keys) == expected
    with pytest.raises(InvalidRequest, match="not contiguous"):
        client.put(ns, fresh_keys(2), torch.zeros(4096, 2, dtype=torch.uint8).T)
    with pytest.raises(InvalidRequest, match="meta"):
        client.put(ns, fresh_keys(1), torch.zeros(4096, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize(
    "blocks",
    [
        np.zeros((4096, 2), np.uint8).T,
        np.zeros(16384, np.uint8)[::2],
        memoryview(bytes(16384))[::2],
        memoryview(np.zeros((2, 4096), np.uint8, order="F")),
        np.zeros(8192, object),
        bytes(8191),
        bytes(8193),
        b"",
        [bytes(4096)],
        [bytes(4096), bytes(4095)],
        [[bytes(4096)], [bytes(4000), bytes(95)]],
        [bytes(4096), "x" * 4096],
        [bytes(4096), None],
        [bytes(4096), [None]],
        "x" * 8192,
        None,
        12,
        {1: 2},
    ],
)
def test_what_cannot_be_put_is_refused_and_nothing_stored(client, blocks):
    ns = namespace(client, 4096)
    keys = fresh_keys(2)
    with pytest.raises(InvalidRequest):
        client.put(ns, keys, blocks)
    assert not client.contains(ns, keys).any()


@pytest.mark.parametrize(
    "out",
    [
        bytes(8192),
        bytearray(8191),
        bytearray(8193),
        np.zeros((4096, 2), np.uint8).T,
        [bytearray(4096)],
        [bytearray(4096), bytearray(4095)],
        [bytearray(4096), bytes(4096)],
        memoryview(bytes(8192)),
        None,
    ],
)
def test_destinations_that_cannot_be_used(client, out):
    ns = namespace(client, 4096)
    keys = fresh_keys(2)
    client.put(ns, keys, bytes(8192))
    with pytest.raises(InvalidRequest):
        client.get_into(ns, keys, out)


@pytest.mark.parametrize("nbytes", [1, 1000, 4096, 65536])
def test_get_into_all_that_is_writable(client, nbytes):
    ns = namespace(client, nbytes)
    n = 5
    data = os.urandom(n * nbytes)
    keys = fresh_keys(n)
    client.put(ns, keys, data)
    wide = np.zeros((n, nbytes + 3), np.uint8)
    for out in (
        bytearray(n * nbytes),
        memoryview(bytearray(n * nbytes)),
        mmap.mmap(-1, n * nbytes),
        np.zeros((n, nbytes), np.uint8),
        [bytearray(nbytes) for _ in range(n)],
        tuple(np.zeros(nbytes, np.uint8) for _ in range(n)),
    ):
        assert client.get_into(ns, keys, out).tolist() == [True] * n
        got = b"".join(map(bytes, out)) if isinstance(out, (list, tuple)) else bytes(out)
        assert got == data
    assert client.get_into(ns, keys, list(wide[:, 1:-2])).all()
    assert wide[:, 1:-2].tobytes() == data
    assert not wide[:, 0].any()
    assert not wide[:, -2:].any()


def test_some_are_there_and_some_are_not(client):
    ns = namespace(client, 4096)
    data = np.frombuffer(os.urandom(8 * 4096), np.uint8).reshape(8, 4096)
    keys = fresh_keys(8)
    here = [0, 1, 4, 7]
    assert client.put(ns, [keys[i] for i in here], data[here]) == 4
    assert client.contains(ns, keys).tolist() == [i in here for i in range(8)]
    assert client.match(ns, keys) == 2
    assert client.get(ns, keys) == [data[i].tobytes() if i in here else None for i in range(8)]
    for out in (
        np.full((8, 4096), 255, np.uint8),
        [np.full(4096, 255, np.uint8) for _ in range(8)],
    ):
        assert client.get_into(ns, keys, out).tolist() == [i in here for i in range(8)]
        for i in here:
            assert out[i].tobytes() == data[i].tobytes()
    # The others are stored, and only they; those that are there keep their bytes.
    assert client.put(ns, keys, data) == 4
    assert client.get(ns, keys) == [row.tobytes() for row in data]
    assert client.put(ns, keys, np.zeros_like(data)) == 0
    assert client.get(ns, keys) == [row.tobytes() for row in data]


@pytest.mark.parametrize("nbytes", [100, 4096, 1 << 20])
def test_one_key_several_times_in_one_put(client, nbytes):
    ns = namespace(client, nbytes)
    a, b = fresh_keys(2)
    blocks = [bytes([1]) * nbytes, bytes([2]) * nbytes]
    keys = [a, b, a, a, b] * 2
    assert client.put(ns, keys, [blocks[key == b] for key in keys]) == 2
    assert client.get(ns, keys) == [blocks[key == b] for key in keys]
    assert client.remove(ns, [a, b]) == 2


def test_a_put_keeps_no_hold_of_its_buffers(client):
    """Also one that ends early: what it was given may be resized at once."""
    ns = namespace(client, 1 << 20)
    keys = fresh_keys(16)
    for _ in range(2):  # the second time all are there, and no checksum is waited for
        data = bytearray(16 << 20)
        client.put(ns, keys, data)
        data.clear()
    client.remove(ns, keys)


def test_a_block_larger_than_all_that_was_put_so_far(client):
    ns = namespace(client, 4 << 20)
    data = os.urandom(3 * (4 << 20))
    keys = fresh_keys(3)
    assert client.put(ns, keys, data) == 3
    assert b"".join(client.get(ns, keys)) == data


def test_4096_keys(client):
    ns = namespace(client, 256)
    data = os.urandom(4096 * 256)
    keys = fresh_keys(4096)
    assert client.put(ns, keys, data) == 4096
    assert client.match(ns, keys) == 4096
    out = bytearray(len(data))
    assert client.get_into(ns, b"".join(keys), out).all()
    assert out == data
    assert client.remove(ns, keys) == 4096


def test_no_keys_at_all(client):
    ns = namespace(client, 4096)
    assert client.put(ns, [], b"") == 0
    assert client.put(ns, [], []) == 0
    assert client.get(ns, b"") == []
    assert client.get_into(ns, [], bytearray()).tolist() == []
    assert client.match(ns, []) == 0
    assert client.contains(ns, []).tolist() == []
    assert client.remove(ns, []) == 0
    assert client.pin(ns, []) == 0
    assert client.acquire(ns, []) is None
    with pytest.raises(InvalidRequest):
        client.reserve(ns, [])


@pytest.mark.parametrize("keys", [b"k" * 15, [b"k" * 15], [b"k" * 16, b"k" * 17], [b"k" * 32]])
def test_keys_of_the_wrong_size(client, keys):
    ns = namespace(client, 1)
    for ask in (
        lambda: client.put(ns, keys, b"x"),
        lambda: client.get(ns, keys),
        lambda: client.match(ns, keys),
        lambda: client.contains(ns, keys),
        lambda: client.remove(ns, keys),
        lambda: client.acquire(ns, keys),
        lambda: client.reserve(ns, keys),
    ):
        with pytest.raises(InvalidRequest):
            ask()


@pytest.mark.parametrize("part", [1, -1, 2**40])
def test_parts_that_do_not_exist(client, part):
    ns = namespace(client, 16)
    [key] = fresh_keys(1)
    for ask in (
        lambda: client.put(ns, [key], b"x" * 16, part=part),
        lambda: client.get(ns, [key], part=part),
        lambda: client.get_into(ns, [key], bytearray(16), part=part),
        lambda: client.contains(ns, [key], part=part),
        lambda: client.reserve(ns, [key], part=part),
        lambda: client.acquire(ns, [key], parts=[part]),
        lambda: client.match(ns, [key], parts=[part]),
    ):
        with pytest.raises(InvalidRequest):
            ask()


def test_parts_are_kept_apart(client):
    ns = client.open(NamespaceRecord({"model": "parts"}, (PartSpec(100), PartSpec(5000))))
    keys = fresh_keys(3)
    client.put(ns, keys, b"a" * 300)
    assert client.match(ns, keys) == 0, "a block is usable with all its parts"
    assert client.match(ns, keys, parts=[0]) == 3
    client.put(ns, keys[:2], b"b" * 10_000, part=1)
    assert client.match(ns, keys) == 2
    assert client.get(ns, keys) == [b"a" * 100] * 3
    assert client.get(ns, keys, part=1) == [b"b" * 5000] * 2 + [None]
    with client.acquire(ns, keys) as lease:
        assert lease.blocks == 2
        assert {part: len(slots) for part, slots in lease.slots.items()} == {0: 2, 1: 2}
        assert lease.slots[1].view(1) == b"b" * 5000
    assert client.remove(ns, keys) == 3
    assert client.get(ns, keys, part=1) == [None] * 3


def test_two_who_disagree_about_sizes(client, daemon):
    one = NamespaceRecord({"model": "same"}, (PartSpec(100),))
    client.open(one)
    with daemon.client() as other, pytest.raises(NamespaceMismatch, match="100"):
        other.open(NamespaceRecord({"model": "same"}, (PartSpec(200),)))


def test_reserve_write_commit(client):
    ns = namespace(client, 5000)
    keys = fresh_keys(4)
    client.put(ns, keys[1:2], b"1" * 5000)
    with client.reserve(ns, keys) as reservation:
        assert reservation.missing.tolist() == [0, 2, 3]
        assert reservation.refused == 0
        for index, slot in zip(reservation.missing, range(len(reservation.slots)), strict=True):
            reservation.slots.view(slot)[:] = b"%d" % index * 5000
        assert client.match(ns, keys) == 0, "nothing is readable before its commit"
        assert client.commit(reservation) == 3
    assert client.get(ns, keys) == [b"%d" % index * 5000 for index in range(4)]


def test_a_hint_waits_for_no_connection(client, daemon, until):
    ns, keys = namespace(client, 4096), fresh_keys(2)
    with (
        daemon.client(connections_max=1, timeout_s=PATIENCE_S) as busy,
        ThreadPoolExecutor(1) as pool,
    ):
        space = namespace(busy, 4096)
        following = pool.submit(busy.follow, space, keys[1:], wait_s=20.0)
        until(lambda: client.stats().prefix_streams.under_way)
        busy.dropped(space, keys[:1])
        assert not following.done()
        client.put(ns, keys[1:], bytes(4096))
        assert following.result() == 1


def test_what_is_not_committed_is_not_there(client, until):
    ns = namespace(client, 5000)
    keys = fresh_keys(4)
    used = client.stats().tenants["default"].space.bytes_used
    with client.reserve(ns, keys):
        assert client.stats().tenants["default"].space.bytes_used > used
    assert client.match(ns, keys) == 0
    assert client.stats().tenants["default"].space.bytes_used == used


def test_more_than_fits_is_told_and_the_first_are_there(client):
    ns = namespace(client, 1 << 20)
    keys = fresh_keys(200)
    with pytest.raises(PoolFull, match="of 200"):
        client.put(ns, keys, np.zeros((200, 1 << 20), np.uint8))
    there = client.match(ns, keys)
    assert 0 < there < 200
    assert client.contains(ns, keys).tolist() == [True] * there + [False] * (200 - there)
    client.remove(ns, keys)


def test_a_refused_put_is_counted_once(client):
    ns = namespace(client, 1 << 20)
    before = client.stats().counters.refused_full
    with client.reserve(ns, fresh_keys(200)) as all_there_is:
        assert len(all_there_is.missing) < 200
        with pytest.raises((PoolFull, LimitExceeded)):
            client.reserve(ns, fresh_keys(1))
    assert client.stats().counters.refused_full == before + 1


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
        HealthCheck.too_slow,
    ],
)
@given(data=st.data())
def test_any_shapes(client, data):
    """A few puts and gets of keys that overlap, against a dict."""
    nbytes = data.draw(
        st.one_of(st.integers(1, 200), st.integers(4000, 4200), st.integers(60_000, 70_000))
    )
    ns = namespace(client, nbytes)
    pool = fresh_keys(12)
    model: dict[bytes, bytes] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        keys = data.draw(st.lists(st.sampled_from(pool), max_size=12))
        blocks = [key[:1] * (nbytes - 1) + bytes([at]) for at, key in enumerate(keys)]
        form = data.draw(st.sampled_from(["whole", "list", "pieces"]))
        if form == "whole":
            source: object = b"".join(blocks)
        elif form == "list":
            source = blocks
        else:
            cut = data.draw(st.integers(0, nbytes))
            source = [[block[:cut], block[cut:]] for block in blocks]
        new = 0
        for key, block in zip(keys, blocks, strict=True):
            new += key not in model
            model.setdefault(key, block)
        assert client.put(ns, keys, source) == new
        asked = data.draw(st.lists(st.sampled_from(pool), max_size=12))
        assert client.get(ns, asked) == [model.get(key) for key in asked]
        assert client.contains(ns, asked).tolist() == [key in model for key in asked]
    gone = data.draw(st.lists(st.sampled_from(pool), unique=True))
    assert client.remove(ns, gone) == len(model.keys() & set(gone))
    assert client.get(ns, pool) == [None if key in gone else model.get(key) for key in pool]
    client.remove(ns, pool)


def test_namespaces_that_are_closed_make_room_for_others(start_one):
    """More than a tenant may have, as of an engine whose weights change all day."""
    with start_one("--memory", "32MiB") as daemon, daemon.client(connect=True) as client:
        for number in range(1100):
            ns = client.open(NamespaceRecord({"weights": number}, (PartSpec(64),)))
            client.namespaces.close(ns)
        # One that was closed may be used as before.
        assert client.put(ns, bytes(16), bytes(64)) == 1
        assert client.match(ns, bytes(16)) == 1
        others = iter(range(1100, 2200))
        with pytest.raises(LimitExceeded):
            all(
                client.open(NamespaceRecord({"weights": other}, (PartSpec(64),)))
                for other in others
            )
