"""Block hashes beside a plain reading of how vLLM makes them; `tests/integration/vllm` asks vLLM itself."""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.placement.kv_events.engine_blocks import short_hash
from kvpool.router.hashing import (
    RUN_BLOCKS,
    Hasher,
    HashSpec,
    Item,
    chain,
    index_keys,
    none_hash,
    salt_of,
)

ENCODERS = {
    "sha256_cbor": lambda value: cbor2.dumps(value, canonical=True),
    "sha256": lambda value: pickle.dumps(value, protocol=5),
}


def plain(spec, tokens, salt=None, lora=None, items=()):
    """One block after the other, each as a tuple that is encoded whole."""
    encode = ENCODERS[spec.algorithm]
    parent, hashes = spec.none_hash, []
    size = spec.block_tokens
    for start in range(0, len(tokens) - size + 1, size):
        extra = [("lora", *lora)] if lora else []
        extra += [
            ("mm", item.identifier, item.offset - start)
            for item in items
            if item.offset < start + size and start < item.offset + item.length
        ]
        if salt and start == 0:
            extra.append(("cache_salt", salt))
        value = (parent, tuple(tokens[start : start + size]), tuple(extra) or None)
        parent = hashlib.sha256(encode(value)).digest()
        hashes.append(parent)
    return hashes


edges = st.sampled_from([0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1])
tokens = st.lists(edges | st.integers(0, 2**32 - 1), max_size=300)


def placed(each):
    """Items one behind the other, as they are in a prompt."""
    found, at = [], 0
    for name, gap, length in each:
        found.append(Item(name, at + gap, length))
        at += gap + length
    return found


items = st.lists(
    st.tuples(st.text(min_size=1, max_size=5), st.integers(0, 40), st.integers(1, 60)), max_size=4
).map(placed)


@given(
    st.sampled_from(sorted(ENCODERS)),
    st.integers(1, 40),
    tokens,
    st.none() | st.text(max_size=4),
    st.none() | st.tuples(st.text(min_size=1), st.text(min_size=1)),
    items,
)
@example("sha256_cbor", 16, list(range(16 * (RUN_BLOCKS + 1))), "s", None, [Item("i", 500, 100)])
def test_hashes_are_those_of_the_plain_reading(algorithm, size, prompt, salt, lora, images):
    spec = HashSpec(size, algorithm, none_hash(algorithm))
    found = chain(spec, prompt, salt=salt, lora=lora, multimodal=images)
    assert found == plain(spec, prompt, salt, lora, images)


def runs_of(hasher: Hasher) -> list[Any]:
    """The chains that are remembered."""
    return list(hasher._runs)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.booleans()), max_size=12))
def test_what_is_remembered_changes_nothing(asked):
    """Prompts that begin alike, through a memory too small for all of them."""
    hasher = Hasher(runs_max=3)
    spec = HashSpec(1, "sha256_cbor", none_hash("sha256_cbor"))
    for branch, length, salted in asked:
        prompt = [*range(90), *([branch] * length)]
        salt = "x" if salted else None
        assert hasher.chain(spec, prompt, salt=salt) == plain(spec, prompt, salt)
        assert len(runs_of(hasher)) <= 3


def test_what_was_asked_for_last_is_remembered():
    hasher = Hasher(runs_max=2)
    spec = HashSpec(1, "sha256_cbor", b"x")
    for token in (1, 2, 1, 3):
        hasher.chain(spec, [token])
    assert {run[2][0] for run in runs_of(hasher)} == {1, 3}


def test_a_long_salt_is_not_kept():
    hasher = Hasher()
    spec = HashSpec(1, "sha256_cbor", b"x")
    salted = [hasher.chain(spec, [1, 2], salt="x" * 100_000 + end) for end in "abb"]
    assert salted[0] != salted[1] == salted[2]
    assert len(pickle.dumps(runs_of(hasher))) < 2000
    assert len(runs_of(hasher)) == 2


def test_what_vllm_says():
    """Written down from vLLM 0.32, so that the chain is checked where it is not installed."""
    spec = HashSpec(4, "sha256_cbor", none_hash("sha256_cbor"))
    assert spec.none_hash.hex().startswith("9bd96a485ad84efd")
    found = chain(spec, [1, 24, 300, 70_000, 5, 6, 7, 8, 9], salt="salt", lora=("a", "/a"))
    assert [each.hex()[:16] for each in found] == ["c440857275bc29ed", "210f7c2b91cb0daa"]
    assert none_hash("sha256_cbor", "7").hex().startswith("20377cec9f51f6bf")


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token(token):
    spec = HashSpec(1, "sha256_cbor", b"x")
    with pytest.raises(ValueError, match="token"):
        chain(spec, [token])


def test_what_is_no_way_to_hash():
    with pytest.raises(ConfigError, match="md5"):
        HashSpec(16, "md5", b"x")
    with pytest.raises(ConfigError, match="md5"):
        none_hash("md5")
    with pytest.raises(ConfigError, match="token"):
        HashSpec(0, "sha256", b"x")


@given(st.lists(st.binary(min_size=32, max_size=32)), st.integers(0, 2**64 - 1))
def test_keys_of_the_index_are_what_events_say(hashes, salt):
    assert index_keys(hashes, salt) == [short_hash(each) ^ salt for each in hashes]


def test_models_that_hash_alike_have_other_keys():
    spec = HashSpec(16, "sha256_cbor", b"x")
    assert salt_of("a", spec) != salt_of("b", spec)
    assert salt_of("a", spec) == salt_of("a", HashSpec(16, "sha256_cbor", b"x"))
