"""Spans as they are recorded and kept: what makes a context, what belongs to what, and what goes when there are too many."""

import asyncio
import itertools
import re
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvpool.telemetry import spans
from kvpool.telemetry.spans import NAMES, Batch, Finished, Spans, child, current, parse, working_for

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{CALLER}-01"
HEX = "0123456789abcdef"


class Clock:
    """Nanoseconds, by hand."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


def numbered(size: int) -> bytes:
    return next(_numbers).to_bytes(size, "big")


_numbers = itertools.count(1)


def make(most: int = 100, *, on: bool = True) -> tuple[Spans, Clock]:
    clock = Clock()
    return Spans(clock, numbered, most=most, on=on), clock


def valid(text: str) -> bool:
    """By the words of the standard, without a pattern."""
    fields = text.split("-")
    sizes = [len(field) for field in fields[:4]]
    if sizes != [2, 32, 16, 2] or not all(c in HEX for field in fields[:4] for c in field):
        return False
    version, trace, span, _ = fields[:4]
    if version == "ff" or trace == "0" * 32 or span == "0" * 16:
        return False
    return len(fields) == 4 or version != "00"


CONTEXTS = st.one_of(
    st.text(max_size=80),
    st.builds(
        "-".join,
        st.tuples(
            st.sampled_from(["00", "01", "ff", "0g", ""]),
            st.text(HEX, min_size=31, max_size=33) | st.just("0" * 32),
            st.text(HEX, min_size=15, max_size=17) | st.just("0" * 16),
            st.text(HEX + "A", min_size=2, max_size=2),
        ),
    ),
    st.builds(lambda more: GOOD.replace("00-", "01-", 1) + more, st.text("-a1", max_size=20)),
    st.builds(
        lambda at, c: GOOD[:at] + c + GOOD[at + 1 :],
        st.integers(0, len(GOOD) - 1),
        st.characters(),
    ),
)


@given(CONTEXTS)
def test_any_context(text: str) -> None:
    ring, _ = make()
    found = parse(text)
    assert (found is not None) == (valid(text) and "\n" not in text), text
    span = ring.begin(text, spans.ACQUIRE)
    sampled = found is not None and int(text.split("-")[3], 16) % 2 == 1
    assert (span is not None) == sampled
    if span is not None:
        assert (span.trace, span.parent) == tuple(text.split("-")[1:3])
        span.end()
    assert len(ring) == sampled


def test_a_context_without_end_is_none() -> None:
    assert parse(GOOD.replace("00-", "01-", 1) + "-" + "a" * 200) is not None
    assert parse(GOOD.replace("00-", "01-", 1) + "-" + "a" * 201) is None


def test_what_a_span_becomes() -> None:
    ring, clock = make()
    span = ring.begin(GOOD, spans.PULL)
    began = clock.now
    part = span.child(spans.TRANSFER)
    part.set(node="b", blocks=3)
    part.count_above("parts_from_peer", 3)
    part.count_above("parts_from_peer", 2)
    part.end("it broke off", bytes=12)
    span.end()
    found = ring.take(10)
    assert (found.left, found.dropped, len(ring)) == (0, 0, 0)
    inner, outer = found.spans
    assert inner == Finished(
        TRACE,
        part.span,
        span.span,
        "kvpool.transfer",
        began + 1,
        began + 2,
        {"node": "b", "blocks": 3, "bytes": 12},
        "it broke off",
    )
    assert (outer.parent, outer.attributes, outer.error) == (CALLER, {"parts_from_peer": 5}, "")
    assert outer.start_ns < inner.start_ns < inner.end_ns < outer.end_ns
    assert part.traceparent == f"00-{TRACE}-{part.span}-01" != span.traceparent
    assert msgspec.json.decode(msgspec.json.encode(found), type=Batch) == found


def test_the_end_is_the_end() -> None:
    ring, _ = make()
    span = ring.begin(GOOD, spans.PULL)
    late = span.child(spans.TRANSFER)
    span.end(blocks=1)
    span.end("again", blocks=2)
    span.set(blocks=3)
    late.count_above("parts_from_peer", 1)
    assert span.child(spans.READ) is None
    late.end()
    assert [one.attributes for one in ring.take(10).spans] == [{"blocks": 1}, {}]


def test_a_clock_that_is_set_back_makes_no_negative_time() -> None:
    ring, clock = make()
    span = ring.begin(GOOD, spans.PULL)
    clock.now -= 500
    span.end()
    (found,) = ring.take(1).spans
    assert found.end_ns == found.start_ns


def test_the_oldest_go_and_are_counted() -> None:
    ring, _ = make(most=3)
    begun = [ring.begin(GOOD, spans.PULL) for _ in range(8)]
    for span in begun:
        span.end()
    first = ring.take(2)
    assert [one.span for one in first.spans] == [span.span for span in begun[5:7]]
    assert (first.left, first.dropped) == (1, 5)
    assert [one.span for one in ring.take(100).spans] == [begun[7].span]
    assert ring.take(100) == Batch([], 0, 5)
    assert ring.take(-1).spans == []


def test_what_is_said_has_limits() -> None:
    ring, _ = make()
    span = ring.begin(GOOD, spans.PULL)
    span.set(**{f"attribute_{n}": "x" * 1000 for n in range(100)})
    span.end("y" * 1000)
    (found,) = ring.take(1).spans
    assert len(found.attributes) == spans.ATTRIBUTES_MAX
    assert {len(value) for value in found.attributes.values()} == {spans.TEXT_CHARACTERS_MAX}
    assert len(found.error) == spans.TEXT_CHARACTERS_MAX


def test_where_nobody_takes_them_none_are_made() -> None:
    ring, _ = make(on=False)
    assert ring.begin(GOOD, spans.PULL) is None


def test_tasks_work_for_the_span_under_which_they_were_created() -> None:
    ring, _ = make()

    async def work() -> str:
        await asyncio.sleep(0)
        part = child(spans.TRANSFER)
        if part is None:
            return ""
        part.end()
        return part.parent

    async def run() -> list[str]:
        one, other = ring.begin(GOOD, spans.PULL), ring.begin(GOOD, spans.FOLLOW)
        with working_for(one):
            first = asyncio.create_task(work())
            with working_for(other):
                second = asyncio.create_task(work())
            assert current() is one
        assert current() is None
        third = asyncio.create_task(work())
        found = list(await asyncio.gather(first, second, third))
        one.end()
        with working_for(one):
            found.append(await asyncio.create_task(work()))
        return [{one.span: "one", other.span: "other", "": ""}[parent] for parent in found]

    assert asyncio.run(run()) == ["one", "other", "", ""]


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    assert re.fullmatch(r"kvpool\.[a-z]+", name)
    assert NAMES[name] in {spans.SERVER, spans.CLIENT, spans.INTERNAL}


def test_all_spans_are_documented(repo_root: Path) -> None:
    text = (repo_root / "docs" / "tracing.md").read_text()
    table = text.partition("## Spans")[2].partition("Attributes begin")[0]
    assert re.findall(r"^\| `(kvpool\.\w+)` \|", table, re.MULTILINE) == list(NAMES)
