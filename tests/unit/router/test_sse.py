"""Streams pass byte for byte, in whole events, however they were cut."""

import itertools
import json
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.router.http.sse import (
    EVENT_BYTES_MAX,
    EventStream,
    EventTooLong,
    NoEvent,
    cached_tokens,
    error_event,
    is_json,
    usage_of,
    with_cached,
)

TEXT = st.text(max_size=20)


def events_of(texts: list[str], end: str = "\n\n") -> bytes:
    return "".join(f"data: {json.dumps({'text': text})}{end}" for text in texts).encode()


@given(st.lists(TEXT, max_size=8), st.booleans(), st.lists(st.integers(0, 400), max_size=12))
def test_whatever_the_cuts_the_bytes_are_the_same_and_events_are_whole(
    texts: list[str], finished: bool, cuts: list[int]
) -> None:
    data = events_of(texts) + (b"data: [DONE]\n\n" if finished else b"")
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    stream = EventStream()
    out = []
    for start, end in itertools.pairwise(edges):
        piece = stream.feed(data[start:end])
        assert not piece or piece.endswith(b"\n\n")
        out.append(piece)
    assert b"".join(out) == data
    assert stream.done == finished
    assert stream.events == len(texts) + finished


@given(st.lists(TEXT, min_size=1, max_size=5), st.integers(1, 30))
def test_an_event_that_is_cut_off_is_not_passed_on(texts: list[str], missing: int) -> None:
    whole = events_of(texts)
    last = events_of(["the last one, which is cut somewhere"])
    stream = EventStream()
    assert stream.feed(whole + last[:-missing]) == whole
    assert not stream.done


def test_usage_says_of_no_more_cached_tokens_than_there_were():
    usage = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"audio":0, "cached_tokens": 8},"x":1}}'
    assert with_cached(usage, 3) == usage.replace(b"8}", b"3}")
    assert with_cached(usage, 30) == usage, "an engine that had to compute more says less"
    named = (
        b'event: e\ndata: {"response":{"usage":{"input_tokens_details":{"cached_tokens":8}}}}\n\n'
    )
    assert with_cached(named, 0) == named.replace(b":8}", b":0}")
    quoted = json.dumps({"text": usage.decode()}).encode()
    assert with_cached(quoted, 0) == quoted, "what an answer quotes stays as it is"


def test_events_that_end_with_carriage_returns() -> None:
    data = events_of(["a", "b"], "\r\n\r\n")
    stream = EventStream()
    assert stream.feed(data[:-2]) + stream.feed(data[-2:]) == data
    assert stream.events == 2


def test_done_in_a_text_is_no_end() -> None:
    stream = EventStream()
    stream.feed(events_of(["data: [DONE]", "[DONE]"]))
    assert not stream.done


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("message_stop", True),
        ("response.completed", True),
        ("response.failed", True),
        ("error", True),
        ("content_block_delta", False),
        ("response.output_text.delta", False),
    ],
)
def test_streams_with_named_events_end_with_one_of_these(name: str, last: bool, end: str) -> None:
    lines = end[: len(end) // 2]
    events = [f'event: {one}{lines}data: {{"n":1}}{end}'.encode() for one in ("delta", name)]
    for data in (events, [b"".join(events)]):
        stream = EventStream()
        for piece in data:
            assert stream.feed(piece) == piece
        assert stream.done == last
    stream = EventStream()
    stream.feed(f'event: delta{lines}data: {{"text":"event: {name}"}}{end}'.encode())
    assert not stream.done


def test_an_event_without_end_is_refused() -> None:
    stream = EventStream()
    piece = b"data: ".ljust(EVENT_BYTES_MAX // 8, b"x")
    for _ in range(8):
        assert stream.feed(piece) == b""
    with pytest.raises(EventTooLong):
        stream.feed(b"data: xxxxxxx")


@pytest.mark.parametrize("garbage", [b"\0\xff", b"<html>no</html>", b"text", b'{"id":"x"}'])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_what_is_no_event_is_refused_wherever_it_comes(garbage: bytes, end: str) -> None:
    good, wrong = events_of(["a", "b"], end), garbage + end.encode()
    for data in ([wrong], [good, wrong], [good, wrong[:3], wrong[3:]]):
        stream = EventStream()
        with pytest.raises(NoEvent, match=re.escape(repr(garbage)[2:6])):
            list(map(stream.feed, data))
    stream = EventStream()
    with pytest.raises(NoEvent):
        stream.feed(events_of(["a"]) + garbage + b"\n\n" + events_of(["b"]))


@pytest.mark.parametrize("line", [b": comment", b"id: 7", b"retry: 10", b"", b"event: x\ndata: y"])
def test_lines_of_events_that_are_no_data_pass(line: bytes) -> None:
    data = events_of(["a"]) + line + b"\n\n" + events_of(["b"])
    stream = EventStream()
    assert stream.feed(data) == data


@pytest.mark.parametrize("line", [b": comment", b"retry: 10", b"", b": one\n: two", b"event: x"])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
def test_what_has_no_data_is_dropped_before_the_first_event(
    line: bytes, end: bytes, together: bool
) -> None:
    """And is none: it begins no answer, and is no token."""
    stream = EventStream()
    for _ in range(3):
        assert stream.feed(line + end) == b""
        assert (stream.events, stream.done, stream.waiting) == (0, False, 0)
    named = b"id: 7" + end[: len(end) // 2] + b"event: x" + end[: len(end) // 2]
    event = named + events_of(["a"], end.decode())
    data = [3 * (line + end) + event] if together else [line + end, event]
    assert b"".join(map(stream.feed, data)) == event
    assert (stream.events, stream.waiting) == (1, 0)
    assert stream.feed(line + end) == line + end
    assert stream.events == 1


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("last", [b"data: [DONE]", b'event: message_stop\ndata: {"n":1}'])
def test_a_comment_behind_the_end_changes_nothing_of_it(last: bytes, end: bytes) -> None:
    for comment in (b": bye" + end, b": good" + end + b": bye" + end):
        for data in ([last + end + comment], [last + end, comment]):
            stream = EventStream()
            assert b"".join(map(stream.feed, data)) == last + end + comment
            assert stream.done and stream.events == 1


@pytest.mark.parametrize(
    ("event", "failed"),
    [
        (b'data: {"error": {"message": "x"}}', True),
        (b'data:{"error":"x"}', True),
        (b'data: { "error" : {}}', True),
        (b'data: {"error": null, "text": "a"}', False),
        (b'event: error\ndata: {"type":"error"}', True),
        (b'event: response.failed\ndata: {"n":1}', True),
        (b'data: {"text": "data: {\\"error\\""}', False),
        (b'data: {"text": "\\nevent: error"}', False),
        (b'event: errors_none\ndata: {"text": "event: error"}', False),
    ],
)
@pytest.mark.parametrize("before", [b"", b'data: {"text": "a"}\n\n', b": comment\n\n"])
def test_an_error_among_the_events_is_seen(event: bytes, failed: bool, before: bytes) -> None:
    stream = EventStream()
    forwarded = b"" if before.startswith(b":") else before
    assert stream.feed(before + event + b"\n\n") == forwarded + event + b"\n\n"
    assert stream.failed is failed
    stream.feed(events_of(["a"]))
    assert stream.failed is failed


def test_an_event_in_very_many_pieces_costs_no_more_than_its_length() -> None:
    """Only what is new is searched. Counted, not timed."""

    class Counting(bytearray):
        searched = 0

        def rfind(self, mark: bytes, start: int = 0) -> int:  # type: ignore[override]
            Counting.searched += len(self) - start
            return super().rfind(mark, start)

    stream = EventStream()
    stream._rest = Counting()
    pieces = 5000
    for _ in range(pieces):
        assert stream.feed(b"data:xxx") == b""
    assert stream.waiting == 8 * pieces
    assert 0 < Counting.searched <= pieces * 2 * (8 + 3)
    assert len(stream.feed(b"\n\n")) == 8 * pieces + 2
    assert stream.waiting == 0


@pytest.mark.parametrize("data", [b"{}", b"[]", b"7", b'{"usage": 7}'])
def test_what_is_json_without_usage(data: bytes) -> None:
    assert is_json(data)
    assert usage_of(data) == {}


@pytest.mark.parametrize("data", [b"", b"<html>", b"{", b'{"a":1', b"{}{}", b"\0"])
def test_what_is_no_json(data: bytes) -> None:
    assert not is_json(data)


@pytest.mark.parametrize("together", [True, False])
def test_usage_is_in_the_last_event_before_the_end(together: bool) -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    said = b"data: " + json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
    pieces = [said + b"\n\n", b"data: [DONE]\n\n"]
    stream = EventStream()
    stream.feed(events_of(["x"]))
    for piece in [b"".join(pieces)] if together else pieces:
        stream.feed(piece)
    assert stream.usage == usage
    assert cached_tokens(stream.usage) == 4


@pytest.mark.parametrize("data", [b'{"usage":{"a":"\xff"}}', b'{"usage":{"a":' + b"[" * 100_000])
def test_usage_that_cannot_be_read(data: bytes) -> None:
    assert usage_of(data) == {}


@given(st.binary(max_size=50))
def test_usage_of_anything(data: bytes) -> None:
    assert isinstance(usage_of(data), dict)


def test_usage_that_is_not_told() -> None:
    assert usage_of(b'{"id": "x", "usage": null}') == {}
    assert cached_tokens({}) is None
    assert cached_tokens({"prompt_tokens_details": None}) is None


def test_an_error_is_an_event_of_its_own() -> None:
    stream = EventStream()
    event = error_event(b'{"error":{"message":"x"}}')
    assert stream.feed(event) == event
    assert stream.failed
