"""LMCache's keys and layouts as the pool's: what differs there differs here. With doubles of LMCache's values."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.lmcache.objects import (
    KnownLayouts,
    Layout,
    block_keys,
    layout_of,
    layout_of_group,
    record_of,
)
from kvpool.errors import InvalidRequest
from kvpool.types import PART_BYTES_MAX


@dataclass(frozen=True)
class Key:
    """The fields of LMCache's `ObjectKey`."""

    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


class Shape(tuple):
    __slots__ = ()

    def numel(self) -> int:
        product = 1
        for size in self:
            product *= size
        return product


@dataclass(frozen=True)
class Dtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


HALF, BRAIN, BYTE = Dtype("float16", 2), Dtype("bfloat16", 2), Dtype("uint8", 1)

keys = st.builds(
    Key,
    st.binary(max_size=40),
    st.just("model"),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.text(max_size=5),
)


@given(st.lists(keys, max_size=20))
def test_two_objects_have_the_same_block_key_only_if_they_are_the_same(found):
    names = block_keys(found)
    assert [len(name) for name in names] == [16] * len(found)
    for (key, name), (other, its) in itertools.combinations(zip(found, names, strict=True), 2):
        assert (name == its) == (key == other)


@given(keys, st.binary(min_size=1, max_size=4))
def test_a_salt_never_passes_for_the_beginning_of_a_hash(key, moved):
    salted = replace(key, cache_salt=key.cache_salt + moved.hex())
    hashed = replace(key, chunk_hash=moved.hex().encode() + key.chunk_hash)
    assert len(set(block_keys([key, salted, hashed]))) == 3


def test_a_block_key_does_not_depend_on_its_company():
    some = [Key(bytes([number]), kv_rank=number % 3) for number in range(9)]
    assert block_keys(some) == [block_keys([key])[0] for key in some]


def test_block_keys_stay_the_same_from_version_to_version():
    key = Key(bytes(range(32)), kv_rank=0x01000100, object_group_id=2, cache_salt="tenant")
    assert block_keys([key])[0].hex() == "833824c4cae3a61179d8da9739a41b2e"


def test_what_cannot_be_named_is_refused():
    with pytest.raises(InvalidRequest, match="cannot be named"):
        block_keys([Key(b"hash", kv_rank=-1)])


def described(*tensors):
    return SimpleNamespace(
        shapes=[Shape(shape) for shape, _ in tensors], dtypes=[dtype for _, dtype in tensors]
    )


def memory_object(nbytes, *tensors, many=True):
    meta = described(*tensors)
    if not many:
        meta = SimpleNamespace(shape=meta.shapes[0], dtype=meta.dtypes[0], shapes=None, dtypes=None)
    return SimpleNamespace(metadata=meta, get_size=lambda: nbytes)


def test_an_object_has_the_layout_that_a_lookup_tells_of_it():
    tensors = [((2, 4, 8), HALF), ((3,), BYTE)]
    told = layout_of_group(described(*tensors))
    assert told == layout_of(memory_object(131, *tensors)) == Layout(131, "float16[2,4,8] uint8[3]")
    one = layout_of_group(described(tensors[0]))
    assert one == layout_of(memory_object(128, tensors[0], many=False))


def test_a_description_without_tensors_tells_nothing():
    assert layout_of_group(described()) is None


def test_objects_of_one_size_but_other_types_or_shapes_are_in_other_namespaces():
    layouts = [
        layout_of_group(described(tensor))
        for tensor in [((2, 8), HALF), ((2, 8), BRAIN), ((8, 2), HALF), ((32,), BYTE)]
    ]
    assert {layout.nbytes for layout in layouts} == {32}
    digests = {record_of("model", layout, "0").digest() for layout in layouts}
    digests |= {
        record_of(*other).digest() for other in [("m", layouts[0], "0"), ("model", layouts[0], "1")]
    }
    assert len(digests) == 6


@pytest.mark.parametrize("nbytes", [0, PART_BYTES_MAX + 1])
def test_sizes_that_the_pool_cannot_store_are_refused(nbytes):
    with pytest.raises(InvalidRequest, match="another chunk size"):
        record_of("model", Layout(nbytes, "uint8[1]"), "0")


A, B, C = (Layout(number, "uint8[1]") for number in (1, 2, 3))


def test_a_lookup_looks_where_it_is_told_and_where_objects_were_seen_until_they_are_seen_there():
    known = KnownLayouts(most=2)
    assert list(known.candidates("model", 0, A)) == [A]
    assert list(known.candidates("model", 0, None)) == []
    known.add("model", 0, B)
    known.add("model", 0, C)
    assert list(known.candidates("model", 0, A)) == [A, C, B]
    assert list(known.candidates("model", 1, A)) == [A], "another group"
    assert list(known.candidates("other", 0, A)) == [A], "another model"
    known.add("model", 0, B)
    known.add("model", 0, A)
    assert list(known.candidates("model", 0, A)) == [A]
    assert list(known.candidates("model", 0, None)) == [A, B], "the oldest is forgotten"
