"""Streams pass byte for byte, in whole events, however they were cut."""

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.router import sse
from kvpool.router.sse import EventStream, EventTooLong, cached_tokens, error_event, usage_of

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


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    stream = EventStream()
    for _ in range(7):
        assert stream.feed(b"data: xxxxxxx") == b""
    with pytest.raises(EventTooLong):
        stream.feed(b"data: xxxxxxx")


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
    assert stream.failed_at_once(event)
    assert not stream.failed_at_once(events_of(["x"]))
