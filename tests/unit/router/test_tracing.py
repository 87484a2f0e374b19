"""Trace context as the W3C has it, and request ids that are fit for headers."""

import random
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.router.http.tracing import request_id, trace_of

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADER = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
bytes_of = random.Random(0).randbytes


def test_engines_are_told_of_the_clients_span() -> None:
    """There is none in between that anybody could look up."""
    trace = trace_of(GOOD, "vendor=1", bytes_of)
    for _ in range(2):
        assert trace.headers(bytes_of) == {"traceparent": GOOD, "tracestate": "vendor=1"}


def test_without_one_each_call_has_its_own_in_the_same_trace() -> None:
    trace = trace_of("", "", bytes_of)
    first, second = (trace.headers(bytes_of)["traceparent"] for _ in range(2))
    assert HEADER.fullmatch(first) and HEADER.fullmatch(second)
    assert first[:36] == second[:36] and first != second


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + "-more",
        GOOD.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        GOOD.replace("b7", "zz"),
    ],
)
def test_what_is_not_valid_begins_anew_and_drops_the_state(header: str) -> None:
    trace = trace_of(header, "vendor=1", bytes_of)
    headers = trace.headers(bytes_of)
    assert HEADER.fullmatch(headers["traceparent"])
    assert "0af7651916cd43dd8448eb211c80319c" not in headers["traceparent"]
    assert "tracestate" not in headers


def test_a_later_version_may_have_more() -> None:
    trace = trace_of(GOOD.replace("00-", "01-", 1) + "-more", "", bytes_of)
    assert trace.trace == "0af7651916cd43dd8448eb211c80319c"


@given(st.text(max_size=200), st.text(max_size=700))
def test_any_headers(parent: str, state: str) -> None:
    for name, value in trace_of(parent, state, bytes_of).headers(bytes_of).items():
        assert name in {"traceparent", "tracestate"}
        assert value.isprintable() and len(value) <= 512


@given(st.text(max_size=200))
def test_any_request_id(given_id: str) -> None:
    found = request_id(given_id, bytes_of)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=@-]{1,128}", found)
    assert found == given_id or len(found) == 32


def test_a_request_id_that_is_fit_stays() -> None:
    assert request_id("req-1/a:b", bytes_of) == "req-1/a:b"
    assert request_id("a" * 129, bytes_of) != "a" * 129
    assert request_id("two\nlines", bytes_of) != "two\nlines"


def test_identifiers_of_zeros_are_none() -> None:
    given_bytes = iter([bytes(16), b"\x01" * 16, bytes(8), b"\x02" * 8])
    trace = trace_of("", "", lambda _: next(given_bytes))
    assert (
        trace.headers(lambda _: next(given_bytes))["traceparent"] == f"00-{'01' * 16}-{'02' * 8}-00"
    )
