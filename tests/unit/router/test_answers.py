"""The comparison of answers, which the page of them rests on: it sees what is not the same, and only that."""

import json
from typing import Any

import pytest

from tests.support.answers import Answer, Case, differences, unstated

ROUTERS = {"x-kvpool-request-id": "a"}
JSON = {"content-type": "application/json"}
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
GOOD = {
    "id": "cmpl-1",
    "created": 5,
    "choices": [{"index": 0, "text": "so"}],
    "usage": {"total": 3},
}


def answer(value: Any, status: int = 200, **headers: str) -> Answer:
    return Answer(status, {**JSON, **headers}, json.dumps(value).encode())


def stream(*events: Any, names: str = "") -> Answer:
    lines = [f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in events]
    return Answer(200, STREAM, "".join(names + line for line in lines).encode())


def through(one: Answer) -> Answer:
    return Answer(one.status, {**one.headers, **ROUTERS}, one.body)


def text(said: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": said, **more}]}


def test_ids_and_times_are_compared_by_their_form() -> None:
    other = through(answer({**GOOD, "id": "cmpl-2", "created": 9}))
    assert not differences(answer(GOOD), other)
    for wrong in ({**GOOD, "id": "chatcmpl-2"}, {**GOOD, "id": 5}, {**GOOD, "created": None}):
        assert len(differences(answer(GOOD), through(answer(wrong)))) == 1


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (answer(GOOD, 201), "status"),
        (answer(GOOD, vary="x"), "header vary"),
        (answer({**GOOD, "usage": {"total": 4}}), "body.usage.total"),
        (answer({**GOOD, "usage": {}}), "body.usage"),
        (answer({**GOOD, "more": None}), "body.more"),
        (answer({**GOOD, "choices": []}), "body.choices"),
        (answer({**GOOD, "choices": [{"index": 0, "text": "no"}]}), "body.choices[0].text"),
    ],
)
def test_what_is_not_the_same_is_seen(other: Answer, field: str) -> None:
    assert field in differences(answer(GOOD), through(other))


def test_a_router_that_does_not_say_which_request_it_was_is_seen() -> None:
    with pytest.raises(AssertionError):
        differences(answer(GOOD), answer(GOOD))


def test_how_a_stream_is_cut_into_events_does_not_matter() -> None:
    one = stream(text("a"), text("b"), text("x", 1), text("c", finish="length"), "[DONE]")
    other = stream(text("x", 1), text("ab"), text("c", finish="length"), "[DONE]")
    assert not differences(one, through(other))
    for wrong in (
        stream(text("x", 1), text("ab"), text("d", finish="length"), "[DONE]"),
        stream(text("x", 1), text("abc", finish="length")),
        stream(text("ax", 1), text("bc", finish="length"), "[DONE]"),
        stream(text("x", 1), text("abc"), "[DONE]"),
        stream(text("x", 1), text("abc", finish="length"), "[DONE]", names="event: x\n"),
    ):
        assert differences(one, through(wrong))


def test_events_with_names_are_joined_in_their_order() -> None:
    def said(*deltas: dict[str, Any]) -> Answer:
        return stream({"type": "start"}, *deltas, {"type": "stop"})

    one = said(
        {"type": "delta", "index": 0, "delta": "a"}, {"type": "delta", "index": 0, "delta": "b"}
    )
    assert not differences(one, through(said({"type": "delta", "index": 0, "delta": "ab"})))
    apart = {"type": "delta", "index": 0, "delta": "a"}, {"type": "delta", "index": 1, "delta": "b"}
    assert differences(one, through(said(*apart)))


def test_a_difference_is_stated_or_wrong_and_a_statement_is_needed_or_wrong() -> None:
    case = Case("", "/", differs={"body.usage*": "", "status": ""})
    assert unstated(case, {"body.usage.total": 1, "status": 2}) == ([], [])
    assert unstated(case, {"body.text": 1, "status": 2}) == (["body.text"], ["body.usage*"])
