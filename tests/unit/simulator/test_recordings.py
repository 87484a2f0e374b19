"""Recordings of a router: their lines, and what of them is replayed."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.simulator.bound import service_s
from kvpool.simulator.command import requests_of
from kvpool.simulator.recordings import (
    ID_MAX,
    LINE_BYTES_MAX,
    MARKER,
    TOKENS_MAX,
    RecordedRequest,
    Trace,
    line_of,
    load_trace,
    parse_line,
    read_recording,
)
from kvpool.simulator.shape import Shape
from kvpool.simulator.speeds import Speeds, load_hardware, load_model
from kvpool.simulator.traces import Entry, generate, ideal_hits, read_trace
from tests.support.traces import write_trace

SPEEDS = Speeds(load_hardware("a800x8"), load_model("llama-3-70b"))
COUNTS = st.integers(0, TOKENS_MAX)
MS = st.floats(0, 1e15)
NAMES = st.text("0123456789abcdef", max_size=32)


@st.composite
def recorded(draw: st.DrawFn) -> RecordedRequest:
    block_tokens = draw(st.integers(1, 4096))
    hash_ids = draw(st.lists(st.integers(0, ID_MAX), max_size=20))
    most = len(hash_ids) * block_tokens
    least = most - block_tokens + 1 if hash_ids else 0
    return RecordedRequest(
        version=1,
        recording=draw(NAMES),
        timestamp=draw(MS),
        input_length=draw(st.integers(least, most) if hash_ids else COUNTS),
        output_length=draw(COUNTS),
        hash_ids=tuple(hash_ids),
        block_tokens=block_tokens,
        model=draw(st.text(max_size=40)),
        outcome=draw(st.sampled_from(["answered", "client_left"])),
        duration_ms=draw(MS),
        ttft_ms=draw(st.none() | MS),
        cached_tokens=draw(st.none() | COUNTS),
        priority=draw(st.integers(-100, 100)),
        tenant=draw(NAMES),
        session=draw(NAMES),
        agent=draw(NAMES),
    )


@given(recorded())
def test_a_line_comes_back_as_it_was(request: RecordedRequest) -> None:
    line = line_of(request)
    assert line.startswith(MARKER)
    assert line.index(b"\n") == len(line) - 1
    assert parse_line(line) == request


@given(recorded(), st.data())
def test_a_part_of_a_line_is_no_line(request: RecordedRequest, data: st.DataObject) -> None:
    whole = line_of(request)[:-1]
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        parse_line(whole[:cut])


LINE: dict[str, Any] = {
    "kvpool_trace": 1,
    "recording": "aa",
    "timestamp": 10.5,
    "input_length": 100,
    "output_length": 7,
    "hash_ids": [11, 12],
    "block_tokens": 64,
    "model": "m",
    "outcome": "answered",
    "duration_ms": 30.0,
}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(LINE | line) + "\n" for line in lines))
    return path


def test_what_is_replayed_is_in_the_order_of_arrival(tmp_path: Path) -> None:
    later = {"timestamp": 2000.25, "hash_ids": [11, 13], "session": "s", "agent": "g"}
    path = written(tmp_path / "t", later | {"tenant": "t", "priority": 3}, {})
    found = load_trace(path)
    assert found.entries == [
        Entry(0.0105, 100, 7, (11, 12)),
        Entry(2.00025, 100, 7, (11, 13), "s", "g", "t", 3),
    ]
    assert (found.block_tokens, found.step_s, found.said) == (64, 0.0, "")
    first, second = found.requests(seed=0)
    assert second.arrived_s - first.arrived_s == pytest.approx(1.98975)
    assert (second.session, second.tenant, second.priority) == ("s", "t", 3)
    assert (first.session, first.tenant) == (12, "")
    assert ideal_hits([first, second]) == [0, 1]


def test_times_are_exact_even_if_all_are_multiples_of_three_seconds(tmp_path: Path) -> None:
    path = written(tmp_path / "t", {"timestamp": 0}, {"timestamp": 3000})
    requests = load_trace(path).requests(seed=5)
    assert [request.arrived_s for request in requests] == [0.0, 3.0]


def test_what_cannot_be_replayed_is_left_out_and_told(tmp_path: Path) -> None:
    path = written(
        tmp_path / "t",
        {"hash_ids": [], "block_tokens": 0},
        {"output_length": 0, "outcome": "rejected"},
        {"input_length": 0, "output_length": 0, "hash_ids": [], "outcome": "refused"},
        {"output_length": 3, "outcome": "client_left"},
        {"model": "other"},
    )
    found = read_recording(path)
    assert [entry.output_tokens for entry in found.entries] == [3, 7]
    assert (found.without_hashes, found.without_answer) == (1, 2)
    assert "left out of 5 requests: 1 without block hashes, 2 without an answer" in found.said
    assert "2 models are simulated as one: m, other" in found.said
    with pytest.raises(InvalidRequest, match="1 without block hashes"):
        load_trace(written(tmp_path / "none", {"hash_ids": []}))


@pytest.mark.parametrize("ending", [b'{"kvpool', b'{"kvpool_trace":1,"recording":"aa","tim', b"{"])
def test_the_end_that_a_crash_has_cut_off_is_left_out(tmp_path: Path, ending: bytes) -> None:
    path = written(tmp_path / "t", {}, {})
    path.write_bytes(path.read_bytes() + ending)
    assert len(load_trace(path).entries) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (b"garbage", "line 2"),
        (b"", "line 2"),
        (b"\xff\xfe", "line 2"),
        (b"[" * 10_000, "line 2"),
        (json.dumps(LINE | {"recording": "bb"}).encode(), "another recording"),
        (json.dumps(LINE | {"hash_ids": [1]}).encode(), "need 2 hash_ids"),
        (json.dumps(LINE | {"hash_ids": [1, 2, 3]}).encode(), "need 2 hash_ids"),
        (json.dumps(LINE | {"block_tokens": 0}).encode(), "line 2"),
        (
            json.dumps(LINE | {"block_tokens": 32, "hash_ids": [1, 2, 3, 4]}).encode(),
            "blocks of 32",
        ),
        (json.dumps(LINE | {"timestamp": -1}).encode(), "timestamp"),
        (json.dumps(LINE | {"timestamp": 1e300}).encode(), "timestamp"),
        (json.dumps(LINE | {"output_length": 1.5}).encode(), "output_length"),
        (json.dumps(LINE | {"hash_ids": [1, 1 << 63]}).encode(), "hash_ids"),
        (json.dumps(LINE | {"kvpool_trace": 2}).encode(), "line 2"),
        (json.dumps({"timestamp": 1, "input_length": 1}).encode(), "line 2"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, wrong: bytes, said: str) -> None:
    path = written(tmp_path / "t", {})
    path.write_bytes(path.read_bytes() + wrong + b"\n" + path.read_bytes())
    with pytest.raises(InvalidRequest, match=r"line 2: ") as caught:
        load_trace(path)
    assert said in str(caught.value)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "t", {})
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + LINE_BYTES_MAX + 1)
    with pytest.raises(InvalidRequest, match="line 2: it has more than"):
        load_trace(path)


def test_other_traces_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_trace(generate("agent", 50, seed=1), path)
    found = load_trace(path)
    assert found.entries == read_trace(path)
    assert (found.block_tokens, found.said) == (512, "")
    with pytest.raises(InvalidRequest, match="line 1"):
        load_trace(written(tmp_path / "u", {"kvpool_trace": None}))


def test_programs_that_read_mooncakes_format_can_read_it(tmp_path: Path) -> None:
    path = written(tmp_path / "t", {"session": "s"}, {"timestamp": 11})
    assert read_trace(path, block_tokens=64) == [
        Entry(0.0105, 100, 7, (11, 12)),
        Entry(0.011, 100, 7, (11, 12)),
    ]


def simulated(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Forty requests that begin alike, a second apart, and two that cannot be replayed."""
    lines: list[Any] = [
        {
            "timestamp": 1000.0 * number,
            "input_length": 6400,
            "hash_ids": [*range(90), *range(1000 * number, 1000 * number + 10)],
        }
        for number in range(1, 41)
    ]
    return written(tmp_path / "recording", *lines, {"output_length": 0}, {"hash_ids": []})


def test_it_is_simulated_in_its_own_blocks(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    out = simulated("sim", str(recording), "--prefill", "1", "--decode", "1", "--json", str(path))
    assert "left out of 42 requests: 1 without block hashes, 1 without an answer" in out
    document = msgspec.json.decode(path.read_bytes())
    assert document["left_out"] == {"without_hashes": 1, "without_answer": 1}
    (row,) = document["rows"]
    assert row["requests"] == 40
    # One engine, a second for each: 39 find the 90 blocks that the first has computed.
    assert row["hit"] == pytest.approx(39 * 90 / (40 * 100))
    assert 39 <= row["seconds"] < 45
    # What is not found is computed: ten blocks of 64 tokens.
    assert row["ttft_s"]["p50"] >= service_s(SPEEDS, 6400, 90, 2048, 64)


def test_its_load_is_counted_in_its_own_blocks(recording: Path) -> None:
    trace = load_trace(recording)
    shape = Shape(SPEEDS, prefill=2, block_tokens=trace.block_tokens)
    requests = requests_of(trace, shape, load=0.5)
    cold, warm = (service_s(SPEEDS, 6400, cached, 2048, 64) for cached in (0, 90))
    span_s = requests[-1].arrived_s - requests[0].arrived_s
    assert span_s == pytest.approx((cold + 39 * warm) / (2 * 0.5))
    one = Trace(trace.entries[:1], trace.block_tokens)
    with pytest.raises(InvalidRequest, match="different times"):
        requests_of(one, shape, load=0.5)


def test_it_is_planned_for(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    out = simulated(
        *("plan", str(recording), "--limit", "30", "--engines-max", "4", "--json", str(path))
    )
    assert "1 without block hashes" in out
    best = msgspec.json.decode(path.read_bytes())["recommended"]
    assert best["met"]
    assert best["hit"] == pytest.approx(29 * 90 / (30 * 100))
    unique_tokens = 64 * (90 + 30 * 10)
    assert best["dram_bytes"] <= unique_tokens * SPEEDS.model.kv_bytes
    warm_s = service_s(SPEEDS, 6400, 90, 2048, 64)
    with pytest.raises(InvalidRequest, match="on an idle engine"):
        simulated("plan", str(recording), "--limit", "30", "--ttft", str(0.9 * warm_s))
