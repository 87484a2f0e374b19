"""`kvpool plan` on small workloads whose answers are known."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.planner.command import trace_of
from kvpool.planner.measured import as_measured
from kvpool.planner.workload import Workload, at_rate
from kvpool.simulator.recordings import Trace
from kvpool.simulator.shape import Shape
from kvpool.simulator.speeds import Speeds, load_hardware, load_model
from kvpool.simulator.traces import generate, ideal_hits
from tests.support.traces import write_trace

SMALL = ["--limit", "25", "--engines-max", "24", "--rate", "2"]
SHAPE = Shape(Speeds(load_hardware("a800x8"), load_model("llama-3-70b")))


def plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *SMALL, *arguments], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


def planned(path: Path, *arguments: str) -> dict[str, Any]:
    plan(*arguments, "--json", str(path))
    return dict(json.loads(path.read_text()))


def test_it_recommends_prints_and_writes_the_same_every_time(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    out = plan("--json", str(path))
    document = json.loads(path.read_text())
    assert planned(path) == document
    best = document["recommended"]
    assert best["met"]
    assert best["ttft_s"] <= 2.0
    assert best["tpot_s"] <= 0.05
    sweeps = {row["sweep"] for row in document["rows"]}
    assert sweeps >= {"aggregated", "disaggregated", "dram", "network"}
    assert "Recommended: " in out
    assert "DRAM a node" in out


def test_long_answers_need_more_that_decode_and_long_prompts_more_that_compute(
    tmp_path: Path,
) -> None:
    # Prompts go through in a moment, and answers need all of an engine's bandwidth for long.
    arguments = ["--prompt", "500", "--output", "6000", "--tpot", "0.016"]
    assert ratio(planned(tmp_path / "long", *arguments)) < 1
    arguments = ["--prompt", "30000", "--output", "50", "--rate", "0.5", "--ttft", "20"]
    assert ratio(planned(tmp_path / "short", "--limit", "12", *arguments)) > 1


def ratio(document: dict[str, Any]) -> float:
    """Of engines that compute prompts to those that decode, in the smallest plan that has both."""
    (row,) = (row for row in document["rows"] if row["sweep"] == "disaggregated")
    return float(row["prefill"] / row["decode"])


def test_where_prompts_share_nothing_there_is_no_pool(tmp_path: Path) -> None:
    # Seldom enough that no prompt is interrupted: what was computed of that would be kept in the pool.
    arguments = ["--shared", "0", "--rate", "0.2", "--limit", "15"]
    best = planned(tmp_path / "plan.json", *arguments)["recommended"]
    assert best["dram_bytes"] == best["ssd_bytes"] == 0
    assert best["hit"] == 0


def test_what_nothing_meets_is_said() -> None:
    with pytest.raises(InvalidRequest, match="2 engines do not meet the targets"):
        plan("--engines-max", "2", "--rate", "40")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ttft", "0.001"], "0.001 s are enough for 0%: allow a longer time to first token"),
        (["--tpot", "0.001"], "a token takes 0.0148 s on an idle engine"),
    ],
)
def test_what_no_number_of_engines_meets_is_said_at_once(arguments: list[str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nowhere/trace.jsonl"],
        ["--ttft", "0"],
        ["--share", "1"],
        ["--shared", "2"],
        ["--rate", "-1"],
    ],
)
def test_what_cannot_be_is_said(arguments: list[str]) -> None:
    with pytest.raises((ConfigError, InvalidRequest)):
        plan(*arguments)


def told(**more: Any) -> dict[str, Any]:
    """What a router says of one kind of engines that are as fast as the profile has it, and load half as fast."""
    speeds = SHAPE.speeds
    kind: dict[str, Any] = {
        "prefill": {"coefficients": list(speeds.coefficients), "count": 500, "error": 0.12},
        "decode": {"coefficients": list(speeds.decode_coefficients), "count": 80, "error": 0.05},
        "loads": {"peer": 1e9},
        "step_tokens": 4096,
        "block_tokens": 16,
        "block_bytes": 16 * speeds.model.kv_bytes,
        **more,
    }
    engines = [{"kind": "m@1", "capacity_tokens": tokens} for tokens in (1 << 20, 1 << 19)]
    away = [{"kind": "m@1"}, {"kind": "other", "capacity_tokens": 1}]
    return {"engines": [*engines, *away], "knowledge": {"kinds": {"m@1": kind}}}


def test_speeds_are_taken_as_a_router_has_measured_them() -> None:
    shape, said = as_measured(told(), "", SHAPE)
    assert shape.speeds.coefficients == SHAPE.speeds.coefficients
    assert shape.speeds.decode_coefficients == SHAPE.speeds.decode_coefficients
    assert shape.speeds.gpu_tokens == 1 << 19
    assert shape.speeds.hardware.network_bytes_s == 1e9
    assert shape.speeds.hardware.ssd_bytes_s == SHAPE.speeds.hardware.ssd_bytes_s
    assert shape.step_tokens == 4096
    assert "500 steps of prompts, estimates 12% off; 80 answers, 5% off; of loads: peer." in said


@pytest.mark.parametrize(
    ("more", "kind", "said"),
    [
        ({}, "x", "the router has m@1"),
        ({"prefill": {"count": 3}}, "", "has measured 3 steps of prompts of m@1: 64 are needed"),
        ({"decode": {"count": 0}}, "m@1", "has measured 0 answers"),
    ],
)
def test_a_router_that_has_measured_too_little_is_no_ground(
    more: Any, kind: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        as_measured(told(**more), kind, SHAPE)


def test_slower_engines_as_measured_need_more_of_them(tmp_path: Path) -> None:
    """Through the command, from a router that answers."""
    a, b, c = SHAPE.speeds.coefficients
    slow = {"prefill": {"coefficients": [3 * a, 3 * b, 3 * c], "count": 500, "error": 0.1}}
    found = []
    for document in (told(), told(**slow)):
        body = json.dumps(document).encode()

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self, body: bytes = body) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        with HTTPServer(("127.0.0.1", 0), Answers) as server:
            Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}"
            best = planned(tmp_path / "plan.json", "--router", url, "--ttft", "8")["recommended"]
            server.shutdown()
        found.append(best["prefill"] + best["decode"] + best["mixed"])
    assert found[1] > found[0]
    assert "Speeds are assumed: llama-3-70b on a800x8" in plan("--limit", "8")


def test_a_described_workload_is_as_described() -> None:
    entries = Workload(5.0, 8000, 200, shared=0.75).entries(2000, seed=1)
    assert entries == Workload(5.0, 8000, 200, shared=0.75).entries(2000, seed=1)
    assert len(entries) / entries[-1].timestamp_s == pytest.approx(5.0, rel=0.1)
    assert sum(e.tokens for e in entries) / 2000 == pytest.approx(8000, rel=0.1)
    assert sum(e.output_tokens for e in entries) / 2000 == pytest.approx(200, rel=0.1)
    requests = at_rate(Trace(entries), 0.0, 1)
    hits = 512 * sum(ideal_hits(requests)) / sum(r.tokens for r in requests)
    assert hits == pytest.approx(0.75, abs=0.05)


def test_a_trace_is_played_at_a_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(generate("multi-turn", 200, seed=0), trace)
    for rate in (1.0, 10.0):
        requests = at_rate(trace_of(str(trace), Workload(), 150, seed=0), rate, seed=0)
        assert len(requests) == 150
        span_s = requests[-1].arrived_s - requests[0].arrived_s
        assert 150 / span_s == pytest.approx(rate, rel=0.05)
