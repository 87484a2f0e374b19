"""`kvpool sim`: what it prints and writes, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.simulator.traces import generate
from tests.support.traces import write_trace

SMALL = ["--limit", "60", "--prefill", "2", "--decode", "1", "--load", "0.6"]


def sim(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["sim", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


def test_it_prints_a_table_and_writes_rows_that_are_the_same_every_time(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(generate("multi-turn", 60, seed=0), trace)
    rows = []
    for name in ("one.json", "two.json"):
        path = str(tmp_path / name)
        out = sim(
            str(trace), *SMALL, "--policy", "kvpool", "--policy", "kvpool/fifo", "--json", path
        )
        assert "kvpool/fifo" in out
        assert "TPOT ms" in out
        rows.append(json.loads(Path(path).read_text())["rows"])
    assert rows[0] == rows[1]
    assert [row["policy"] for row in rows[0]] == ["kvpool", "kvpool/fifo"]
    for row in rows[0]:
        assert row["requests"] == 60
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p90"] <= row["ttft_s"]["max"]
        assert 0 < row["hit"] < 1
        assert row["within_slo"] == 1.0


def test_without_decode_engines_requests_end_with_their_first_token() -> None:
    out = sim("gen:shared-prefixes", "--limit", "40", "--decode", "0", "--policy", "random")
    assert "TPOT" not in out


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="kvpool[plots] is not installed")
    path = tmp_path / "sim.png"
    sim(
        "gen:agent",
        "--limit",
        "20",
        "--policy",
        "kvpool",
        "--policy",
        "random",
        "--plot",
        str(path),
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_objectives_are_counted_and_with_reject_kept(tmp_path: Path) -> None:
    rows = []
    for extra in ([], ["--reject"]):
        path = tmp_path / "rows.json"
        arguments = ["--limit", "80", "--prefill", "1", "--decode", "0", "--load", "3"]
        sim("gen:agent", *arguments, "--ttft-slo", "3", "--json", str(path), *extra)
        rows += json.loads(path.read_text())["rows"]
    assert rows[0]["rejected"] == 0 < rows[1]["rejected"]
    assert rows[0]["within_slo"] < 1
    assert rows[1]["ttft_s"]["p99"] < rows[0]["ttft_s"]["p99"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["/nowhere/trace.jsonl"],
        ["gen:nothing"],
        ["gen:agent", "--policy", "best"],
        ["gen:agent", "--hardware", "abacus"],
        ["gen:agent", "--prefill", "0"],
    ],
)
def test_what_cannot_be_is_said(arguments: list[str]) -> None:
    with pytest.raises((ConfigError, InvalidRequest)):
        sim(*arguments)
