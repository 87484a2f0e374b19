"""Codecs of a tier: what goes in comes out, and what is no encoding is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.storage.codecs import (
    BLOSC2,
    CHECK_BYTES,
    RAW,
    Blosc2,
    Codec,
    Encoded,
    Raw,
    slot_bytes,
    slot_classes,
)

blosc2 = pytest.importorskip("blosc2")
GUARD = 64
BLOCK = 1 << 18


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32, as bytes."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def kv(nbytes: int, seed: int = 0) -> np.ndarray:
    """What KV looks like: normal around zero, each channel with a scale of its own."""
    random = np.random.default_rng(seed)
    scales = np.exp(random.normal(0, 1, 128))
    return bf16((random.standard_normal((-(-nbytes // 256), 128)) * scales).reshape(-1))[:nbytes]


def noise(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def encode(codec: Codec, raw: np.ndarray) -> tuple[Encoded, np.ndarray]:
    """What is stored; nothing behind `len(raw)` may be touched, nor what is read."""
    buffer = np.full(raw.size + GUARD, 0xA5, np.uint8)
    before = raw.copy()
    encoded = codec.encode(raw, buffer[: raw.size])
    assert np.array_equal(raw, before)
    assert (buffer[raw.size :] == 0xA5).all()
    return encoded, buffer[: encoded.stored].copy()


def decode(codec: Codec, stored: np.ndarray, nbytes: int) -> np.ndarray | None:
    """The raw bytes; nothing around them may be touched, whatever was stored."""
    buffer = np.full(GUARD + nbytes + GUARD, 0xA5, np.uint8)
    good = codec.decode(stored, buffer[GUARD : GUARD + nbytes])
    assert (buffer[:GUARD] == 0xA5).all() and (buffer[GUARD + nbytes :] == 0xA5).all()
    return buffer[GUARD : GUARD + nbytes] if good else None


def codec_of(encoded: Encoded) -> Codec:
    """Chosen by what the index would know, not by what wrote the block."""
    codecs: dict[int, Codec] = {RAW: Raw(), BLOSC2: Blosc2(1)}
    return codecs[encoded.codec]


def forged(chunk: bytes) -> np.ndarray:
    """Anything at all behind a check that is right."""
    check = xxhash.xxh3_64_intdigest(chunk).to_bytes(CHECK_BYTES, "little")
    return np.frombuffer(check + chunk, np.uint8)


# --- round trips


@settings(max_examples=200, deadline=None)
@given(
    nbytes=st.integers(1, 40_000),
    block_bytes_max=st.sampled_from([1 << 13, 1 << 20]),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    make=st.sampled_from([kv, noise, lambda n, s: np.full(n, s, np.uint8)]),
    seed=st.integers(0, 255),
    name=st.sampled_from(["none", "blosc2"]),
)
def test_what_goes_in_comes_out(
    nbytes: int, block_bytes_max: int, item_bytes: int, make: Any, seed: int, name: str
) -> None:
    """Parts of several of the library's blocks too, and lengths that no element divides."""
    codec: Any = Raw() if name == "none" else Blosc2(item_bytes)
    raw = make(nbytes, seed)
    codec.BLOCK_BYTES_MAX = block_bytes_max
    encoded, stored = encode(codec, raw)
    assert (encoded.stored == nbytes) == (encoded.codec == RAW)
    back = decode(codec_of(encoded), stored, nbytes)
    assert back is not None and np.array_equal(back, raw)


def test_kv_gets_smaller_and_only_by_the_right_element_size() -> None:
    raw = kv(BLOCK)
    right, _ = encode(Blosc2(2), raw)
    assert right.codec == BLOSC2
    # Sign and exponent are half of the bytes and hold about 3 bits of information: near 11 of 16.
    assert 0.66 < right.stored / BLOCK < 0.75
    assert slot_bytes(right.stored, BLOCK) == BLOCK * 6 // 8
    assert encode(Blosc2(1), raw)[0].stored > right.stored * 1.1


def test_what_saves_no_slot_is_stored_as_it_is() -> None:
    """Also where a few bytes would be saved: they would buy nothing and cost each read."""
    mostly = noise(BLOCK)
    mostly[: BLOCK // 16] = 0
    compressed = len(blosc2.compress2(mostly, typesize=1, nthreads=1))
    assert BLOCK * 7 // 8 < compressed < BLOCK
    for raw in (noise(BLOCK), mostly, np.zeros(4096, np.uint8)):
        encoded, stored = encode(Blosc2(1), raw)
        assert encoded == Encoded(raw.size, RAW)
        assert np.array_equal(stored, raw)


def test_what_is_stored_fits_the_chunk_format() -> None:
    """Read by the library alone: the layout in the docstring is what is on the disk."""
    raw = kv(BLOCK)
    _, stored = encode(Blosc2(2), raw)
    chunk = stored[CHECK_BYTES:].tobytes()
    assert stored[:CHECK_BYTES].tobytes() == xxhash.xxh3_64_digest(chunk)[::-1]
    assert blosc2.decompress2(chunk) == raw.tobytes()
    assert chunk[3] == 2  # typesize, so that a decoder needs no setting


@given(behind=st.integers(0, 5000), cut=st.integers(0, 5000))
def test_what_lies_in_a_slot_says_its_length(behind: int, cut: int) -> None:
    _, stored = encode(Blosc2(2), kv(32 << 10))
    slot = np.concatenate([stored, noise(behind)])
    assert Blosc2().length(slot) == stored.size
    # A slot that ends before that holds no such thing; a raw one is full.
    shorter = stored[: min(cut, stored.size - 1)]
    assert Blosc2().length(shorter) == 0
    assert Raw().length(slot) == slot.size


@pytest.mark.parametrize("said", [-1, -(1 << 31), 0, 31, 33, 100, (1 << 31) - 1])
def test_a_length_that_cannot_be_is_none(said: int) -> None:
    slot = np.zeros(64, np.uint8)
    slot[20:24].view("<i4")[0] = said
    assert Blosc2().length(slot) == (8 + said if said == 33 else 0)


def test_equal_blocks_are_stored_equally() -> None:
    raw = kv(BLOCK)
    assert np.array_equal(encode(Blosc2(2), raw)[1], encode(Blosc2(2), raw)[1])


# --- what is no encoding


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rot_is_refused_before_the_decoder_sees_it(data: st.DataObject) -> None:
    raw = kv(32 << 10)
    encoded, stored = encode(Blosc2(2), raw)
    assert encoded.codec == BLOSC2
    how = data.draw(st.sampled_from(["flip", "cut", "more", "noise"]))
    if how == "flip":
        at = data.draw(st.integers(0, stored.size * 8 - 1))
        stored[at // 8] ^= 1 << at % 8
    elif how == "cut":
        stored = stored[: data.draw(st.integers(0, stored.size - 1))]
    elif how == "more":
        stored = np.concatenate([stored, noise(data.draw(st.integers(1, 99)))])
    else:
        stored = noise(data.draw(st.integers(0, 9999)))
    called: list[Any] = []
    codec = Blosc2(2)
    codec._decompress = lambda *arguments, **options: called.append(arguments)
    assert decode(codec, stored, raw.size) is None
    assert not called


@pytest.mark.parametrize("size", [0, 1, 7, 8, 39, 40])
def test_stored_bytes_too_short_for_a_header(size: int) -> None:
    assert decode(Blosc2(2), np.zeros(size, np.uint8), 4096) is None
    if size >= CHECK_BYTES:
        assert decode(Blosc2(2), forged(bytes(size - CHECK_BYTES)), 4096) is None


@pytest.mark.parametrize("nbytes", [BLOCK - 1, BLOCK + 1, 1, 2 * BLOCK])
def test_a_block_of_another_length_is_refused(nbytes: int) -> None:
    _, stored = encode(Blosc2(2), kv(BLOCK))
    assert decode(Blosc2(2), stored, nbytes) is None
    assert decode(Raw(), noise(BLOCK), nbytes) is None


@pytest.mark.parametrize("change", [-1, 1])
def test_a_chunk_that_says_another_length_is_refused(change: int) -> None:
    """Behind a right check, and though the library would take the longer one."""
    raw = kv(BLOCK)
    _, stored = encode(Blosc2(2), raw)
    chunk = stored[CHECK_BYTES:].tobytes()
    chunk = chunk + b"\0" if change > 0 else chunk[:-1]
    assert decode(Blosc2(2), forged(chunk), raw.size) is None


FUZZ = """
import json, sys
import numpy as np, xxhash
from kvpool.storage.codecs import Blosc2

GUARD, nbytes = 1 << 16, 1 << 15
random = np.random.default_rng(int(sys.argv[1]))
raw = (random.standard_normal(nbytes // 2).astype("f4").view("u4") >> 16).astype("u2").view("u1")
codec = Blosc2(2)
out = np.empty(nbytes, np.uint8)
good = out[: codec.encode(raw, out).stored].copy()
table = np.full(2 * GUARD + nbytes, 0xA5, np.uint8)
refused = 0
for _ in range(int(sys.argv[2])):
    chunk = good[8:].copy()
    for _ in range(random.integers(1, 4)):
        # Half of the damage goes to the header and the table of streams behind it.
        end = 200 if random.integers(2) else chunk.size
        chunk[random.integers(end)] = random.integers(256)
    # The two sizes that `decode` compares are put right again, so that it goes on.
    chunk[4:8], chunk[12:16] = good[12:16], good[20:24]
    check = xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little")
    stored = np.concatenate([np.frombuffer(check, np.uint8), chunk])
    refused += not codec.decode(stored, table[GUARD : GUARD + nbytes])
    assert (table[:GUARD] == 0xA5).all() and (table[GUARD + nbytes :] == 0xA5).all()
print(json.dumps(refused))
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_forged_chunk_does_no_harm(seed: int) -> None:
    """Behind a right check anything may stand: the library must not write where it should not.

    In a process of its own, whose death would be the finding.
    """
    run = subprocess.run(
        [sys.executable, "-c", FUZZ, str(seed), "1500"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, (run.returncode, run.stderr[-2000:])
    assert json.loads(run.stdout) > 100


# --- slots


@given(nbytes=st.integers(1, 1 << 30), data=st.data())
def test_a_slot_is_the_smallest_class_that_holds_the_bytes(
    nbytes: int, data: st.DataObject
) -> None:
    stored = data.draw(st.integers(1, nbytes))
    classes = [math.ceil(k * nbytes / 8 / 4096) * 4096 for k in range(1, 9)]
    assert slot_bytes(stored, nbytes) == min(each for each in classes if each >= stored)
    assert slot_classes(nbytes) == tuple(sorted(set(classes)))
    assert slot_bytes(nbytes, nbytes) == -(-nbytes // 4096) * 4096


@pytest.mark.parametrize(
    ("stored", "nbytes", "slot"),
    [
        (1, 1, 4096),
        (4096, 4096, 4096),
        (3800, 10000, 4096),
        (4097, 10000, 8192),
        (1, 1 << 20, 1 << 17),
        ((1 << 17) + 1, 1 << 20, 1 << 18),
        (1 << 20, 1 << 20, 1 << 20),
    ],
)
def test_slots_by_hand(stored: int, nbytes: int, slot: int) -> None:
    assert slot_bytes(stored, nbytes) == slot


@pytest.mark.parametrize(("stored", "nbytes"), [(0, 10), (11, 10)])
def test_no_slot_for_lengths_that_cannot_be(stored: int, nbytes: int) -> None:
    with pytest.raises(AssertionError):
        slot_bytes(stored, nbytes)


# --- threads, and where the package is missing


def test_calls_start_no_threads_and_may_run_side_by_side() -> None:
    codec = Blosc2(2)
    encode(codec, kv(BLOCK))
    before = len(os.listdir("/proc/self/task"))
    blocks = [kv(BLOCK, seed) for seed in range(8)]
    wrong: list[int] = []
    most: list[int] = []

    def work(mine: list[np.ndarray]) -> None:
        for raw in mine:
            encoded, stored = encode(codec, raw)
            back = decode(codec, stored, raw.size)
            most.append(len(os.listdir("/proc/self/task")))
            if back is None or not np.array_equal(back, raw):
                wrong.append(encoded.stored)

    threads = [threading.Thread(target=work, args=(blocks[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(most) == len(blocks)
    assert max(most) <= before + len(threads)


def test_the_interpreter_lock_is_given_up() -> None:
    Blosc2(2)
    assert blosc2.set_releasegil(True) is True


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)
    with pytest.raises(ConfigError, match="pip install"):
        Blosc2(2)


@pytest.mark.parametrize("item_bytes", [0, 3, 16])
def test_element_sizes_that_cannot_be(item_bytes: int) -> None:
    with pytest.raises(ConfigError, match=f"elements of {item_bytes} bytes"):
        Blosc2(item_bytes)
