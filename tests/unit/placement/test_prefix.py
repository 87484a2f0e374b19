"""The hit rule against its definition, tried length by length."""

from __future__ import annotations

from collections.abc import Container, Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvpool.hit_rule import first_needed, needed, usable
from kvpool.placement.directory.base import Entry
from kvpool.placement.prefix_lookup import somewhere
from kvpool.types import PartKind, PartSpec

KEYS = [bytes([i]) * 16 for i in range(14)]
NODES = [bytes([i]) * 8 for i in range(4)]


def suits(spec: PartSpec, has: Container[bytes], prefix: Sequence[bytes]) -> bool:
    """The definition, for one part and one length."""
    if len(prefix) % spec.stride:
        return False
    slots = [key for i, key in enumerate(prefix, 1) if i % spec.stride == 0]
    if spec.kind is PartKind.WINDOW:
        slots = slots[-spec.window_blocks :]
    return all(key in has for key in slots)


def longest(
    specs: Sequence[PartSpec], held: Sequence[Container[bytes]], keys: Sequence[bytes]
) -> int:
    lengths = range(len(keys), 0, -1)
    pairs = list(zip(specs, held, strict=True))
    return next((n for n in lengths if all(suits(s, h, keys[:n]) for s, h in pairs)), 0)


specs_of = st.builds(
    lambda window, stride: (
        PartSpec(64, PartKind.WINDOW, window, stride)
        if window
        else PartSpec(64, PartKind.FULL, 0, stride)
    ),
    st.sampled_from([0, 0, 1, 2, 3, 20]),
    st.sampled_from([1, 1, 2, 3]),
)
# Mostly present, so that long prefixes and short gaps both come up; keys may repeat in a chain.
chains = st.one_of(
    st.integers(0, len(KEYS)).map(lambda n: KEYS[:n]), st.lists(st.sampled_from(KEYS), max_size=8)
)
holdings = st.one_of(
    st.sets(st.sampled_from(KEYS)),
    st.sets(st.sampled_from(KEYS), max_size=3).map(lambda gone: set(KEYS) - gone),
)


@given(st.lists(st.tuples(specs_of, holdings), max_size=4), chains)
def test_the_longest_usable_prefix_is_the_longest_by_definition(
    parts: list[tuple[PartSpec, set[bytes]]], keys: list[bytes]
) -> None:
    specs = [spec for spec, _ in parts]
    held = [has for _, has in parts]
    assert usable(specs, held, keys) == longest(specs, held, keys)


@given(specs_of, st.integers(1, 14))
def test_what_a_part_needs_suffices_and_nothing_of_it_can_be_spared(spec: PartSpec, n: int) -> None:
    keys = KEYS[: n - n % spec.stride]
    wanted = list(needed(spec, keys))
    assert suits(spec, set(wanted), keys)
    for spared in wanted:
        assert not suits(spec, set(wanted) - {spared}, keys)
    if wanted:
        assert keys[first_needed(spec, len(keys))] == wanted[0]


entries_of = st.lists(
    st.builds(Entry, st.sampled_from(NODES), st.integers(0, 3), st.integers(0, 15)), max_size=4
)


@given(
    st.lists(st.integers(0, 3), unique=True, min_size=1),
    st.lists(entries_of, min_size=len(KEYS), max_size=len(KEYS)),
    st.lists(st.sets(st.sampled_from(KEYS)), min_size=4, max_size=4),
    st.sets(st.sampled_from(NODES)),
)
def test_a_key_is_somewhere_if_it_is_here_or_a_living_node_has_that_part(
    parts: list[int], entries: list[list[Entry]], here: list[set[bytes]], living: set[bytes]
) -> None:
    local = [here[part] for part in parts]
    found = somewhere(parts, local, KEYS, entries, living.__contains__)
    for part, has, there in zip(parts, local, found, strict=True):
        assert there == {
            key
            for key, known in zip(KEYS, entries, strict=True)
            if key in has or any(e.incarnation in living and e.mask >> part & 1 for e in known)
        }


def test_parts_beyond_the_word_size_are_told_apart() -> None:
    entries = [[Entry(NODES[0], 1, 1 << 200)], [Entry(NODES[0], 1, 1 << 201)]]
    found = somewhere([200, 201], [(), ()], KEYS[:2], entries, lambda _: True)
    assert found == [{KEYS[0]}, {KEYS[1]}]
