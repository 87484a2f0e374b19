"""Traces: read, refused with the line that is wrong, made by seed."""

import json
from pathlib import Path

import pytest

from kvpool.errors import InvalidRequest
from kvpool.simulator.traces import (
    GENERATORS,
    STEP_S,
    Entry,
    arrivals,
    generate,
    ideal_hits,
    read_trace,
    step_of,
)
from tests.support.traces import write_trace

LINE = {"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t", LINE, {**LINE, "timestamp": 6000})
    assert read_trace(path) == [Entry(3.0, 1000, 5, (1, 2)), Entry(6.0, 1000, 5, (1, 2))]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {**LINE, "hash_ids": [1]},
        {**LINE, "hash_ids": [1, 2, 3]},
        {**LINE, "input_length": 0, "hash_ids": []},
        {**LINE, "output_length": 0},
        {**LINE, "timestamp": "soon"},
        {**LINE, "hash_ids": None},
        {**LINE, "timestamp": 0},
        [],
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        read_trace(written(tmp_path / "t", LINE, wrong))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no requests"):
        read_trace(written(tmp_path / "t"))


def test_arrivals_are_within_their_steps_and_the_same_by_seed() -> None:
    entries = [Entry(10.0 + STEP_S * (n // 4), 100, 1, (n,)) for n in range(40)]
    requests = arrivals(entries, seed=7, step_s=STEP_S)
    assert [r.arrived_s for r in requests] == sorted(r.arrived_s for r in requests)
    for request in requests:
        assert isinstance(request.ident, int)
        step_s = entries[request.ident].timestamp_s - 10.0
        assert step_s <= request.arrived_s < step_s + STEP_S
    assert requests == arrivals(entries, seed=7, step_s=STEP_S)
    assert requests != arrivals(entries, seed=8, step_s=STEP_S)
    longer = arrivals(entries, seed=7, scale=2.0, step_s=STEP_S)
    assert [r.arrived_s for r in longer] == pytest.approx([2 * r.arrived_s for r in requests])


def test_exact_times_stay_as_they_are() -> None:
    exact = [Entry(when, 100, 1, (1,)) for when in (1.0, 1.25, 7.5)]
    stepped = [Entry(when, 100, 1, (1,)) for when in (0.0, 3.0, 3.0)]
    assert (step_of(exact), step_of(stepped)) == (0.0, STEP_S)
    requests = arrivals(exact, seed=7, step_s=step_of(exact))
    assert [r.arrived_s for r in requests] == [0.0, 0.25, 6.5]


@pytest.mark.parametrize("shape", GENERATORS)
def test_generated_traces_are_whole_shared_and_by_seed(shape: str, tmp_path: Path) -> None:
    entries = generate(shape, 300, seed=1)
    assert len(entries) == 300
    assert entries == generate(shape, 300, seed=1)
    assert entries != generate(shape, 300, seed=2)
    write_trace(entries, tmp_path / "t")
    again = read_trace(tmp_path / "t")
    assert [(e.tokens, e.keys) for e in again] == [(e.tokens, e.keys) for e in entries]
    hits = sum(ideal_hits(arrivals(entries, 0))) / sum(len(e.keys) for e in entries)
    assert hits > 0.3  # what they are for


def test_ideal_hits_are_of_prefixes_only() -> None:
    entries = [Entry(0.0, 1, 1, keys) for keys in ((1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 4))]
    requests = [r for e in entries for r in arrivals([e], 0)]
    assert ideal_hits(requests) == [0, 2, 0, 3]
