"""The rules of a follow: what is missing, what is asked about, whom to ask and when."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvpool.daemon.core.masks import pack_masks, unpack_masks, width_for, width_of
from kvpool.daemon.fetch import prefix_stream_rules as following
from kvpool.daemon.fetch.prefix_stream_rules import PAUSE_S, PAUSE_S_MAX, Chain, Course
from kvpool.errors import InvalidRequest
from kvpool.placement.directory.base import Entry
from kvpool.types import PartKind, PartSpec

SPECS = (
    (PartSpec(1024),),
    (PartSpec(1024), PartSpec(1024)),
    (PartSpec(1024), PartSpec(1024, PartKind.WINDOW, 2)),
    (PartSpec(1024), PartSpec(1024, stride=2)),
    (PartSpec(1024), PartSpec(1024, PartKind.WINDOW, 1, stride=2)),
)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def is_needed(spec: PartSpec, index: int, length: int) -> bool:
    """By the words of the hit rule, for a prefix whose length suits all parts."""
    if (index + 1) % spec.stride:
        return False
    if spec.kind is not PartKind.WINDOW:
        return True
    return index + 1 > length - spec.window_blocks * spec.stride


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SPECS),
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["put", "tell", "lose"]), st.integers(0, 11), st.integers(0, 3)),
        max_size=60,
    ),
)
def test_a_chain_against_a_plain_model(make_pool, specs, n, window, steps):
    """Each part that the whole chain needs is asked for until it is told of, once, and again when it is lost."""
    pool = make_pool(slabs=60, parts=specs)
    length = n - n % max(spec.stride for spec in specs)
    wanted = {
        (part, index)
        for part, spec in enumerate(specs)
        for index in range(length)
        if is_needed(spec, index, length)
    }
    before = following.WINDOW_KEYS
    following.WINDOW_KEYS = window
    try:
        chain = Chain(pool.namespace.tables, [key(index) for index in range(n)])
        assert {
            (table.part, int.from_bytes(one, "big"))
            for table, needed in zip(chain.tables, chain.needed, strict=True)
            for one in needed
        } == wanted
        here, coming, seen = set(), set(), []

        def take_stock() -> None:
            pool.node.settle()
            while new := chain.arrived():
                seen.extend(
                    (table.part, int.from_bytes(one, "big")) for table, some in new for one in some
                )
            coming.difference_update(seen)

        for what, index, drawn in steps:
            part = drawn % len(specs)
            take_stock()
            if what == "put" and index < n and (index + 1) % specs[part].stride == 0:
                pool.put([index], part=part)
                here.add((part, index))
            take_stock()
            missing = wanted - here
            assert chain.whole == (not missing)
            asked = [int.from_bytes(one, "big") for one in chain.window]
            if not missing:
                assert not asked
                continue
            first = min(index for _, index in missing)
            assert asked == list(range(first, min(first + window, n)))
            unknown = {
                (part, number)
                for number, mask in zip(asked, chain.known(chain.window, len(specs)), strict=True)
                for part in range(len(specs))
                if not mask >> part & 1
            }
            in_window = {one for one in missing - coming if one[1] in asked}
            assert unknown == in_window
            if what == "tell" and index in asked:
                masks = [(1 << part if number == index else 0) for number in asked]
                told = {
                    (one.table.part, int.from_bytes(one.key, "big"))
                    for one in chain.told(chain.window, masks)
                }
                assert told == in_window & {(part, index)}
                coming |= told
            if what == "lose":
                lost = {one for one in coming if one[1] == index}
                chain.lost([following.Lacking(pool.namespace.tables[p], key(i)) for p, i in lost])
                coming -= lost
        assert len(seen) == len(set(seen)), "held once"
        assert set(seen) <= here & wanted
        if chain.whole:
            assert set(seen) == wanted
    finally:
        following.WINDOW_KEYS = before


def test_the_window_begins_where_the_slowest_part_is(make_pool):
    pool = make_pool(slabs=40, parts=(PartSpec(1024), PartSpec(1024)))
    chain = Chain(pool.namespace.tables, [key(n) for n in range(20)])
    pool.put(range(10))
    pool.put(range(3), part=1)
    pool.node.settle()
    chain.arrived()
    assert chain.window[0] == key(3)
    assert chain.known(chain.window, 2)[:8] == [0b01] * 7 + [0b00]


def test_too_short_for_the_stride_needs_nothing(make_pool):
    pool = make_pool(parts=(PartSpec(1024), PartSpec(1024, stride=4)))
    chain = Chain(pool.namespace.tables, [key(n) for n in range(3)])
    assert chain.whole
    assert chain.nbytes == 0


# ---- whom to ask


A, B, C = (letter * 8 for letter in (b"a", b"b", b"c"))
WINDOW = [key(n) for n in range(4)]


def everybody(_: bytes) -> bool:
    return True


def held(**holders: bytes) -> dict[bytes, list[Entry]]:
    """`_2=A`: block 2 is at A."""
    return {key(int(name[1:])): [Entry(one, 1, 1)] for name, one in holders.items()}


def test_the_node_that_was_named_is_asked_and_the_directory_left_alone():
    course = Course(5.0)
    assert course.look_at == 5.0, "once, for the beginning of the prompt"
    course.looked(WINDOW, {}, 5.0)
    assert course.choose(A, everybody, 5.0) == A
    assert course.look_at == math.inf
    course.news(A)
    assert course.choose(A, everybody, 6.0) == A
    assert course.look_at == math.inf


def test_nobody_named_or_known_is_looked_for_in_pauses_that_grow():
    course, now, pauses = Course(0.0), 0.0, []
    for _ in range(8):
        course.looked(WINDOW, {}, now)
        assert course.choose(None, everybody, now) is None
        pauses.append(course.look_at - now)
        now = course.look_at
    assert pauses[:4] == pytest.approx([2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S, 16 * PAUSE_S])
    assert pauses[-1] == pytest.approx(PAUSE_S_MAX)
    course.came(now)
    course.looked(WINDOW, {}, now)
    course.choose(None, everybody, now)
    assert course.look_at - now == pytest.approx(2 * PAUSE_S), "what came begins them anew"


def test_who_has_the_last_block_is_asked_and_others_looked_for_until_it_has_news():
    course = Course(0.0)
    course.looked(WINDOW, held(_0=A, _2=B), 0.0)
    assert course.choose(None, everybody, 0.0) == B
    assert course.look_at < 1.0, "it may be anybody who has that block"
    course.news(B)
    course.choose(None, everybody, 0.1)
    assert course.look_at == math.inf
    course.looked(WINDOW, held(_3=C), 0.2)
    assert course.choose(None, everybody, 0.2) == B, "whoever has proved it goes on"


def test_without_news_the_directory_is_asked_who_else():
    course = Course(0.0)
    course.looked(WINDOW, {}, 0.0)
    assert course.choose(A, everybody, 0.0) == A
    course.nothing(A, 1.0, early=False)
    assert course.look_at == 1.0
    assert course.ask_at <= 1.0, "it is asked again at once: it does wait"
    course.looked(WINDOW, held(_1=B), 1.0)
    assert course.choose(A, everybody, 1.0) == B
    course.news(B)
    course.nothing(B, 3.0, early=False)
    course.looked(WINDOW, {}, 3.0)
    assert course.choose(A, everybody, 3.0) in {A, B}
    course.looked(WINDOW, held(_1=A), 4.0)
    assert course.choose(A, everybody, 4.0) == A, "the directory has cleared it"


def test_one_that_answers_too_soon_or_not_at_all_is_asked_later():
    course = Course(0.0)
    course.looked(WINDOW, {}, 0.0)
    asked = []
    now = 0.0
    for turn in range(8):
        assert course.choose(A, everybody, now) == A
        if turn % 2:
            course.nothing(A, now, early=True)
        else:
            course.failed(A, now)
        assert course.look_at <= course.ask_at
        asked.append(course.ask_at - now)
        now = course.ask_at
    assert asked == sorted(asked)
    assert asked[-1] == pytest.approx(PAUSE_S_MAX)


def test_who_may_not_be_asked_is_not():
    course = Course(0.0)
    course.looked(WINDOW, held(_2=B), 0.0)
    assert course.choose(A, {B}.__contains__, 0.0) == B
    assert course.choose(A, set().__contains__, 0.0) is None
    assert course.look_at < 1.0, "so that it is noticed when somebody may be"


# ---- masks


@given(
    st.integers(1, 40).flatmap(
        lambda parts: st.tuples(
            st.just(parts), st.lists(st.integers(0, (1 << parts) - 1), min_size=1, max_size=6)
        )
    )
)
def test_masks_are_what_they_were(case):
    parts, masks = case
    width = width_for(parts)
    packed = pack_masks(masks, width)
    for at, mask in enumerate(masks):
        for part in range(8 * width):
            byte = packed[at * width + part // 8]
            assert byte >> part % 8 & 1 == mask >> part & 1
    assert width_of(bytes(16 * len(masks)), packed) == width
    assert unpack_masks(packed, width) == masks


@pytest.mark.parametrize(
    ("keys", "masks"),
    [(b"", b""), (bytes(16), b""), (bytes(15), b"1"), (bytes(32), b"123"), (bytes(16), bytes(513))],
)
def test_masks_that_do_not_fit_their_keys(keys, masks):
    with pytest.raises(InvalidRequest):
        width_of(keys, masks)
