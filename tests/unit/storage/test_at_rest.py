"""Encrypted blocks on disks and in objects: they come back, nobody can read them, and no other bytes are taken for them."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import xxhash
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from kvpool.errors import ConfigError, ProtocolError
from kvpool.storage.at_rest import (
    SEAL_BYTES,
    TAG_BYTES,
    BlockSealer,
    EncryptionSecrets,
    ObjectSealer,
    block_name,
    place_name,
)
from kvpool.storage.codecs import BLOSC2, Blosc2, slot_bytes
from kvpool.storage.object.client import ObstoreClient
from kvpool.storage.object.packs import ENTRY, ObjectTable, PackName, parse_tail
from kvpool.storage.object.requests import ObjectLimits
from kvpool.storage.object.store import OTHER_KIND_S, GetBatch, ObjectStore, PutBatch
from kvpool.storage.ssd.pack import pack, slot_contents
from kvpool.storage.ssd.store import STAGING_BYTES, ReadBatch, SsdStore, WriteBatch
from kvpool.types import BlockStatus
from tests.support.waiting import PATIENCE_S

OLD, NEW, OTHER = b"the old secret of tests", b"the new secret of tests", b"a secret of others"
PLACE = place_name(b"N" * 16, 3)
SIZE = 32 << 20
PAGE = 4096
ABSENT, PRESENT = int(BlockStatus.ABSENT), int(BlockStatus.PRESENT)
MISMATCH = int(BlockStatus.MISMATCH)


def noise(n: int, nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), np.uint8)


def sums_of(blocks: np.ndarray) -> np.ndarray:
    digests = [xxhash.xxh3_128_digest(block.tobytes()) for block in blocks]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def keys_of(n: int) -> np.ndarray:
    return np.frombuffer(random.Random(1).randbytes(16 * n), np.uint8).reshape(n, 16)


# ---- one block ---------------------------------------------------------------------------------------


@given(st.binary(min_size=1, max_size=9000), st.binary(max_size=60), st.integers(0, 100))
def test_a_sealed_block_opens_under_its_name_alone(data: bytes, name: bytes, surplus: int) -> None:
    sealer = BlockSealer(EncryptionSecrets([OLD]), b"store")
    plain = np.frombuffer(data, np.uint8)
    slot = np.zeros(len(data) + SEAL_BYTES + surplus, np.uint8)
    assert sealer.seal(plain, name, slot) == len(data) + SEAL_BYTES
    out = np.empty_like(plain)
    assert sealer.length(slot) == len(data)
    assert sealer.open(slot, name, out)
    assert out.tobytes() == data
    assert not sealer.open(slot, name + b"x", out)
    again = BlockSealer(EncryptionSecrets([NEW, OLD]), b"store")
    assert again.open(slot, name, out), "after a restart, and a change of secrets"
    for others in (
        BlockSealer(EncryptionSecrets([OLD]), b"another store"),
        BlockSealer(EncryptionSecrets([OTHER]), b"store"),
    ):
        assert not others.open(slot, name, out)


@given(st.data())
def test_every_changed_bit_is_seen(data: st.DataObject) -> None:
    sealer = BlockSealer(EncryptionSecrets([OLD]), b"store")
    plain = noise(1, 300)[0]
    slot = np.zeros(300 + SEAL_BYTES, np.uint8)
    sealer.seal(plain, b"name", slot)
    at = data.draw(st.integers(0, len(slot) - 1))
    slot[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not sealer.open(slot, b"name", np.empty_like(plain))


def test_the_format_by_another_hand() -> None:
    """HKDF by its RFC's own formula, the header by its bytes."""

    def hmac256(key: bytes, data: bytes) -> bytes:
        made = hmac.HMAC(key, hashes.SHA256())
        made.update(data)
        return made.finalize()

    sealer = BlockSealer(EncryptionSecrets([OLD]), b"store")
    plain = noise(1, 1000)[0]
    slot = np.zeros(2000, np.uint8)
    sealer.seal(plain, b"name", slot)
    extracted = hmac256(b"store", OLD)
    first = hmac256(extracted, b"kvpool disk 1\x01")
    second = hmac256(extracted, first + b"kvpool disk 1\x02")
    sealed = slot.tobytes()
    assert sealed[12:20] == second[:8]
    assert sealed[20:32] == (1000).to_bytes(4, "little") + bytes(8)
    opened = AESGCM(first).decrypt(sealed[:12], sealed[32:1048], sealed[:32] + b"name")
    assert opened == plain.tobytes()


def test_no_nonce_comes_twice() -> None:
    secrets = EncryptionSecrets([OLD])
    seen = set()
    for _ in range(20):  # openings of one store
        sealer = BlockSealer(secrets, b"store")
        for _ in range(50):
            slot = np.zeros(10 + SEAL_BYTES, np.uint8)
            sealer.seal(np.zeros(10, np.uint8), b"", slot)
            seen.add(slot[:12].tobytes())
    assert len(seen) == 1000


def test_encryption_is_not_switched_while_running() -> None:
    for before, after in (([OLD], []), ([], [OLD])):
        with pytest.raises(ValueError, match="restart"):
            EncryptionSecrets(before).change(after)


def test_without_the_package_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[cluster\]'"):
        BlockSealer(EncryptionSecrets([OLD]), b"store")


@given(st.binary(max_size=200))
def test_what_was_never_sealed_does_not_open(data: bytes) -> None:
    sealer = BlockSealer(EncryptionSecrets([OLD]), b"store")
    slot = np.frombuffer(data, np.uint8)
    assert not sealer.open(slot, b"", np.empty(sealer.length(slot), np.uint8))


# ---- a disk ------------------------------------------------------------------------------------------


class Held:
    """Blocks in a store, in slots one behind the other."""

    def __init__(self, store: SsdStore, blocks: np.ndarray, *, packed: bool = False) -> None:
        n, self.nbytes = blocks.shape
        self.blocks, self.keys, self.sums = blocks, keys_of(n), sums_of(blocks)
        whole = store.slot_bytes(self.nbytes)
        made = pack(blocks, np.arange(n), self.nbytes) if packed else None
        self.lengths = np.full(n, whole)
        if made is not None:
            stored = slot_contents(made.stored, self.nbytes, store.seal_bytes)
            assert (stored < self.nbytes).all(), "blocks that can be packed"
            self.lengths = np.array([slot_bytes(int(one), self.nbytes) for one in stored])
        self.offsets = np.cumsum([0, *self.lengths])[:-1].astype(np.uint64)
        batch = WriteBatch(
            table=store.add_table(b"t"),
            nbytes=self.nbytes,
            offsets=self.offsets,
            keys=self.keys,
            parents=self.keys,
            depths=np.zeros(n, np.uint32),
            pins=np.zeros(n, np.uint8),
            checksums=self.sums,
            source=blocks if made is None else made.rows,
            rows=np.arange(n),
            stored=None if made is None else made.stored,
            codec=0 if made is None else BLOSC2,
            place=PLACE,
        )
        assert store.write(batch).tolist() == [PRESENT] * n

    def read(
        self, store: SsdStore, keys: np.ndarray | None = None, place: bytes = PLACE
    ) -> tuple[list[int], np.ndarray]:
        n = len(self.blocks)
        out = np.full((n + 1, self.nbytes + 64), 0xEE, np.uint8)
        rows = np.arange(n)[::-1].copy()
        keys = self.keys if keys is None else keys
        statuses = store.read(
            ReadBatch(
                *(self.nbytes, self.offsets, self.sums, out, rows, self.lengths, Blosc2()),
                keys,
                place,
            )
        )
        assert (out[n] == 0xEE).all() and (out[:, self.nbytes :] == 0xEE).all()
        return statuses.tolist(), out[rows, : self.nbytes]

    def check_right(self, store: SsdStore) -> None:
        statuses, found = self.read(store)
        assert statuses == [PRESENT] * len(self.blocks)
        assert (found == self.blocks).all()
        scrubbed = store.scrub(
            ReadBatch(
                *(self.nbytes, self.offsets, self.sums, None, None, self.lengths, Blosc2()),
                self.keys,
                PLACE,
            ),
            lambda: None,
        )
        assert scrubbed.tolist() == statuses


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def opened(folder: Path, *secrets: bytes, **options: Any) -> SsdStore:
    encryption = EncryptionSecrets(secrets) if secrets else None
    return SsdStore.open(folder, SIZE, threads=2, encryption=encryption, **options)


def entries_of(store: SsdStore) -> int:
    return sum(map(len, store.entries()))


@settings(max_examples=15)
@given(
    nbytes=st.one_of(
        st.integers(1, 70_000),
        st.sampled_from([PAGE, PAGE - SEAL_BYTES, 16 * PAGE]),
        st.integers(STAGING_BYTES - 2 * PAGE, STAGING_BYTES + 2 * PAGE),
    ),
    n=st.integers(1, 3),
    direct=st.sampled_from([False, "auto"]),
)
def test_blocks_come_back_from_an_encrypted_disk(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, n: int, direct: Any
) -> None:
    folder = tmp_path_factory.mktemp("ssd")
    store = opened(folder, OLD, direct=direct)
    held = Held(store, noise(n, nbytes, nbytes))
    held.check_right(store)
    store.close()
    store = opened(folder, NEW, OLD, direct=direct)
    assert entries_of(store) == n
    held.check_right(store)
    store.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("nbytes", [16 * PAGE, 3 * STAGING_BYTES // 2])
def test_packed_blocks_come_back_too(folder: Path, nbytes: int) -> None:
    pytest.importorskip("blosc2")
    store = opened(folder, OLD)
    blocks = noise(2, nbytes)
    blocks[:, 1::2] = 7
    held = Held(store, blocks, packed=True)
    assert (held.lengths < nbytes).all()
    held.check_right(store)
    store.close()


def test_a_block_that_is_too_long_with_its_seal_is_not_packed() -> None:
    nbytes, shorter = 16 * PAGE, 14 * PAGE
    stored = np.array([1, shorter - SEAL_BYTES, shorter - SEAL_BYTES + 1, nbytes], np.uint32)
    found = slot_contents(stored, nbytes, SEAL_BYTES).tolist()
    assert found == [1 + SEAL_BYTES, shorter, nbytes, nbytes]
    assert slot_contents(stored, nbytes, 0).tolist() == [*stored[:3], nbytes]


def test_nothing_of_the_blocks_can_be_read_from_the_files(folder: Path) -> None:
    store = opened(folder, OLD)
    text = np.frombuffer(b"private words of a prompt " * 700, np.uint8)
    Held(store, np.stack([text, text]))
    store.close()
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"private words" not in path.read_bytes(), path


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_that_others_put_there_are_not_taken(folder: Path, packed: bool) -> None:
    store = opened(folder, OLD)
    blocks = noise(4, 4 * PAGE)
    blocks[:, 1::2] = 7
    held = Held(store, blocks, packed=packed)
    other = opened(folder.parent / "other", OLD)
    theirs = Held(other, blocks, packed=packed)
    other.close()
    length = int(held.lengths[0])
    assert (held.lengths == length).all() and (theirs.offsets == held.offsets).all()
    with open(folder / "segment", "r+b") as file, open(other_path(folder), "rb") as foreign:
        whole = file.read(4 * length)
        file.seek(0)
        file.write(whole[length : 2 * length])  # block 1 in the slot of block 0
        file.seek(length + 100)
        file.write(bytes([whole[length + 100] ^ 1]))
        foreign.seek(2 * length)
        file.seek(2 * length)
        file.write(foreign.read(length))  # the same block, of another store
    # Of the other store's, the key is not known here.
    assert held.read(store)[0] == [MISMATCH, MISMATCH, ABSENT, PRESENT]
    store.close()


def other_path(folder: Path) -> Path:
    return folder.parent / "other" / "segment"


def test_the_index_cannot_give_a_block_another_name(folder: Path) -> None:
    """Who can write the disk can write its index too: its checks need no secret."""
    store = opened(folder, OLD)
    held = Held(store, noise(2, PAGE))
    assert held.read(store, held.keys[::-1])[0] == [MISMATCH] * 2
    for place in (place_name(b"N" * 16, 2), place_name(b"M" * 16, 3)):
        assert held.read(store, place=place)[0] == [MISMATCH] * 2
    held.sums = held.sums[::-1]
    assert held.read(store)[0] == [MISMATCH] * 2
    store.close()


def test_secrets_change_while_the_store_is_open(folder: Path) -> None:
    secrets = EncryptionSecrets([OLD])
    store = SsdStore.open(folder, SIZE, threads=2, encryption=secrets)
    first = Held(store, noise(2, PAGE))
    secrets.change([NEW, OLD])
    first.check_right(store)
    second = Held(store, noise(1, PAGE))  # over one of the first: as after its end
    second.check_right(store)
    secrets.change([NEW])
    second.check_right(store)
    statuses = first.read(store)[0]
    assert statuses == [PRESENT, ABSENT], "the end of a secret is no damage"
    store.close()
    for secret, left in ((OLD, 1), (NEW, 0)):
        store = opened(folder, secret)
        assert entries_of(store) == left, "what no secret in use decrypts is forgotten"
        store.close()


@pytest.mark.parametrize(("before", "after"), [((), (OLD,)), ((OLD,), ())])
def test_a_store_of_the_other_kind_starts_empty(
    folder: Path,
    before: tuple[bytes, ...],
    after: tuple[bytes, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = opened(folder, *before)
    Held(store, noise(2, PAGE))
    text = (folder / "segment").read_bytes()[:PAGE]
    store.close()
    store = opened(folder, *after)
    assert entries_of(store) == 0
    assert "it starts empty" in caplog.text
    assert (folder / "segment").read_bytes()[:PAGE] != text
    Held(store, noise(2, PAGE)).check_right(store)
    store.close()
    caplog.clear()
    store = opened(folder, *after)
    assert entries_of(store) == 2
    assert not caplog.text
    store.close()


# ---- objects -----------------------------------------------------------------------------------------

DIGEST, PART, NBYTES = b"D" * 16, 2, 1000
LIMITS = ObjectLimits(
    bytes_max=1 << 30, pack_bytes=4 * NBYTES, range_bytes=3 * NBYTES, gap_bytes=0, backoff_s=0.0
)


class Bucket:
    """Objects in memory, and stores of nodes that use them."""

    def __init__(self) -> None:
        self.objects = MemoryStore()
        self._open: list[ObjectStore] = []

    def node(
        self, *secrets: bytes, name: bytes = b"node one", limits: ObjectLimits = LIMITS
    ) -> ObjectStore:
        encryption = EncryptionSecrets(secrets) if secrets else None
        client = ObstoreClient(self.objects)
        self._open.append(ObjectStore(client, node=name, limits=limits, encryption=encryption))
        return self._open[-1]

    def close(self) -> None:
        for store in self._open:
            store.close()

    def paths(self) -> list[str]:
        return [meta["path"] for page in obstore.list(self.objects) for meta in page]

    def body(self, path: str) -> bytes:
        return obstore.get(self.objects, path).bytes().to_bytes()

    def write(self, path: str, body: bytes) -> None:
        obstore.put(self.objects, path, body)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    yield made
    made.close()


def put(store: ObjectStore, blocks: np.ndarray, part: int = PART) -> np.ndarray:
    n, nbytes = blocks.shape
    batch = PutBatch(
        ObjectTable(DIGEST, part, b"the record of a model"),
        nbytes,
        keys_of(n).tobytes(),
        bytes(16 * n),
        np.zeros(n, np.uint32),
        sums_of(blocks).tobytes(),
        blocks,
        np.arange(n, dtype=np.intp),
    )
    result = store.put(batch, timeout_s=PATIENCE_S)
    assert result.statuses.tolist() == [PRESENT] * n
    return result.locations


def get(
    store: ObjectStore,
    locations: np.ndarray,
    blocks: np.ndarray,
    *,
    keys: bytes | None = None,
    part: int = PART,
) -> list[int]:
    n, nbytes = blocks.shape
    out = np.full((n, nbytes + 30), 7, np.uint8)
    rows = np.arange(n, dtype=np.intp)
    keys = keys_of(n).tobytes() if keys is None else keys
    batch = GetBatch(DIGEST, part, nbytes, keys, locations, out, rows)
    statuses = store.get(batch, timeout_s=PATIENCE_S).tolist()
    for status, row, block in zip(statuses, out, blocks, strict=True):
        assert status != PRESENT or (row[:nbytes] == block).all()
        assert (row[nbytes:] == 7).all()
    return statuses


@settings(max_examples=30)
@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 6000), st.integers(0, 3000))
def test_blocks_come_back_from_encrypted_objects(
    nbytes: int, n: int, range_bytes: int, gap_bytes: int
) -> None:
    bucket = Bucket()
    limits = ObjectLimits(
        bytes_max=1 << 30,
        pack_bytes=8000,
        range_bytes=max(range_bytes, nbytes // 20, 1),
        gap_bytes=gap_bytes,
        backoff_s=0.0,
    )
    blocks = noise(n, nbytes)
    one, other = bucket.node(OLD, limits=limits), bucket.node(NEW, OLD, limits=limits)
    try:
        locations = put(one, blocks)
        assert get(one, locations, blocks) == [PRESENT] * n
        assert get(other, locations, blocks) == [PRESENT] * n, "of another node, later"
        tables = other.scan(timeout_s=PATIENCE_S)
        found = np.concatenate([table.locations() for table in tables])
        assert sorted(found.tolist()) == sorted(locations.tolist())
    finally:
        bucket.close()


def test_nothing_can_be_read_from_the_bucket(bucket: Bucket) -> None:
    text = np.frombuffer((b"private words of a prompt " * 100)[:NBYTES], np.uint8)
    put(bucket.node(OLD), np.stack([text] * 3))
    (path,) = bucket.paths()
    body = bucket.body(path)
    for secret in (b"private words", b"record of a model", keys_of(3)[1].tobytes()):
        assert secret not in body


def test_without_the_secret_there_is_nothing(bucket: Bucket) -> None:
    blocks = noise(3, NBYTES)
    sealed, plain = put(bucket.node(OLD), blocks), put(bucket.node(name=b"node two"), blocks)
    for secrets, readable in (((OLD,), sealed), ((OTHER,), None), ((), plain)):
        store = bucket.node(*secrets, name=b"reader 1")
        for locations in (sealed, plain):
            wanted = PRESENT if locations is readable else MISMATCH
            assert get(store, locations, blocks) == [wanted] * 3
        tables = list(store.scan(timeout_s=PATIENCE_S))
        assert len(tables) == (readable is not None)
        assert store.stats().packs_unreadable == 2 - len(tables)
    assert len(bucket.paths()) == 2, "those of others are left alone"


def test_a_buckets_writer_cannot_make_a_reader_take_other_bytes(bucket: Bucket) -> None:
    """He knows all that stands in the bucket and in the catalog, and can change both."""
    blocks = noise(4, NBYTES)
    store = bucket.node(OLD)
    locations = put(store, blocks)
    (path,) = bucket.paths()
    body = bucket.body(path)
    width = NBYTES + TAG_BYTES
    for at in random.Random(1).sample(range(4 * width), 60):
        changed = bytearray(body)
        changed[at] ^= 1 << at % 8
        bucket.write(path, bytes(changed))
        expected = [PRESENT] * 4
        expected[at // width] = MISMATCH
        assert get(store, locations, blocks) == expected
    bucket.write(path, body)
    # Another block of the same object, its checksum as well, or the object under another name.
    moved = locations[[1, 0, 2, 3]]
    assert get(store, moved, blocks) == [MISMATCH] * 2 + [PRESENT] * 2
    renamed = locations.copy()
    renamed["pack"] = np.void(b"node one" + b"R" * 8)
    bucket.write(PackName(DIGEST, PART, b"node one" + b"R" * 8).path, body)
    assert get(store, renamed, blocks) == [MISMATCH] * 4
    bucket.write(PackName(DIGEST, 1, locations["pack"][0].tobytes()).path, body)
    assert get(store, locations, blocks, part=1) == [MISMATCH] * 4
    plain = locations.copy()
    plain["codec"], plain["stored"] = 0, NBYTES
    assert get(store, plain, blocks) == [MISMATCH] * 4


def test_ones_own_packs_outlive_a_wrong_secret_for_a_while(bucket: Bucket) -> None:
    """A restart with a wrong file, or a switch by mistake, must not empty the bucket at once."""
    blocks = noise(3, NBYTES)
    sealed = put(bucket.node(OLD), blocks)
    plain = put(bucket.node(), blocks, part=1)
    for secrets in ((OTHER,), (OLD,), ()):
        store = bucket.node(*secrets)
        known = len(list(store.scan(timeout_s=PATIENCE_S, own=True)))
        assert known == (secrets != (OTHER,))
        assert store.sweep(timeout_s=PATIENCE_S)
        assert len(bucket.paths()) == 2
    assert get(bucket.node(OLD), sealed, blocks) == [PRESENT] * 3
    assert get(bucket.node(), plain, blocks, part=1) == [PRESENT] * 3
    later = ObjectStore(
        ObstoreClient(bucket.objects),
        node=b"node one",
        limits=LIMITS,
        wall=lambda: time.time() + OTHER_KIND_S + 60,
        encryption=EncryptionSecrets([OTHER]),
    )
    assert list(later.scan(timeout_s=PATIENCE_S, own=True)) == []
    assert later.sweep(timeout_s=PATIENCE_S)
    assert bucket.paths() == []
    later.close()


def test_a_table_that_others_wrote_is_not_taken(bucket: Bucket) -> None:
    store = bucket.node(OLD)
    put(store, noise(4, NBYTES))
    (path,) = bucket.paths()
    body = bucket.body(path)
    tail = body[4 * (NBYTES + TAG_BYTES) :]
    name = PackName.parse(path)
    assert name is not None
    sealer = ObjectSealer(EncryptionSecrets([OLD]))
    assert len(parse_tail(name, tail, len(body), sealer).entries) == 4
    end = len(b"the record of a model") + 4 * ENTRY.itemsize + TAG_BYTES
    for at in random.Random(1).sample(range(end), 40):
        changed = bytearray(tail)
        changed[at] ^= 4
        # The checksum of the trailer needs no secret: the forger makes it anew.
        changed[-24:-8] = xxhash.xxh3_128_digest(bytes(changed[:-24]))
        with pytest.raises(ProtocolError, match="no secret"):
            parse_tail(name, bytes(changed), len(body), sealer)


def test_objects_outlive_a_change_of_secrets(bucket: Bucket) -> None:
    secrets = EncryptionSecrets([OLD])
    blocks = noise(3, NBYTES)
    store = ObjectStore(
        ObstoreClient(bucket.objects), node=b"node one", limits=LIMITS, encryption=secrets
    )
    old = put(store, blocks)
    secrets.change([NEW, OLD])
    new = put(store, blocks, part=1)
    assert get(store, old, blocks) == [PRESENT] * 3
    assert get(bucket.node(NEW), new, blocks, part=1) == [PRESENT] * 3
    secrets.change([NEW])
    assert get(store, old, blocks) == [MISMATCH] * 3
    store.close()


def test_no_two_objects_have_a_key_in_common() -> None:
    sealer = ObjectSealer(EncryptionSecrets([OLD]))
    plain = np.zeros(64, np.uint8)
    seen = set()
    for path, offset in itertools.product(("a", "b"), (0, 80, 1 << 33)):
        out = np.zeros(80, np.uint8)
        sealer.seal(path, offset, plain, b"name", out)
        seen.add(out.tobytes())
        assert sealer.open(path, offset, out, b"name", np.empty(64, np.uint8))
    assert len(seen) == 6
    assert sealer.open_table("a", sealer.seal_table("a", b"table", b"n"), b"n") == b"table"
    assert sealer.open_table("b", sealer.seal_table("a", b"table", b"n"), b"n") is None


def test_names_differ_in_every_field() -> None:
    names = {
        block_name(place_name(digest, part), key, checksum, nbytes)
        for digest, part, key, checksum, nbytes in itertools.product(
            (b"A" * 16, b"B" * 16),
            (0, 1, 256),
            (b"k" * 16, b"l" * 16),
            (b"c" * 16, b"d" * 16),
            (1, 2),
        )
    }
    assert len(names) == 48
