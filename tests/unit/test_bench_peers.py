"""bench/peers.py where it could flatter: what it counts, what it compares, who is left out."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

NBYTES, N, BATCHES = 4096, 4, 3


@pytest.fixture(scope="module")
def bench(repo_root: Path) -> Iterator[SimpleNamespace]:
    sys.path.insert(0, str(repo_root / "bench"))
    try:
        names = ("peers", "peers_results", "peers_worker", "harness")
        yield SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(repo_root / "bench"))


# ---- what is counted ---------------------------------------------------------------------------------

SHM, PEER, TUNED = "kvpool shm", "mooncake", "mooncake tuned"
LARGE, MIDDLE, SMALL, MANY = (1 << 20, 32), (65536, 64), (4096, 128), (65536, 512)
ONE = (65536, 1)


def full(bench: SimpleNamespace) -> Any:
    """Results in which every check has another value."""
    results = bench.peers_results.Results()
    for who, op, shape, seconds, cpu_s in (
        (SHM, "get", LARGE, 2.0, 1.0),
        (SHM, "put", LARGE, 4.0, 2.0),
        (SHM, "get", MIDDLE, 2.0, 1.0),
        (SHM, "get", SMALL, 2.0, 1.0),
        (SHM, "match", SMALL, 2.0, 1.0),
        (PEER, "get", LARGE, 12.0, 4.0),
        (TUNED, "get", LARGE, 10.0, 5.0),
        (PEER, "put", LARGE, 12.0, 8.0),
        (TUNED, "put", LARGE, 16.0, 8.0),
        (PEER, "get", MIDDLE, 14.0, 1.0),
        (PEER, "get", SMALL, 40.0, 1.0),
        (PEER, "exists", SMALL, 9.0, 1.0),
        ("kvpool tcp", "get", LARGE, 8.0, 6.0),
        ("kvpool tcp", "get", ONE, 3.0, 6.0),
        (PEER, "get", ONE, 6.0, 6.0),
        (TUNED, "get", ONE, 7.0, 6.0),
        ("kvpool tcp", "pull", LARGE, 5.0, 6.0),
        ("kvpool tcp", "pull", MANY, 8.0, 6.0),
        ("stream", "pull", LARGE, 6.0, 1.0),
        ("4 streams", "pull", LARGE, 3.0, 1.0),
        ("kvpool nixl tcp", "pull", LARGE, 4.0, 1.0),
        ("nixl tcp", "pull", LARGE, 3.0, 1.0),
        ("kvpool nixl shm", "pull", LARGE, 2.0, 1.0),
        ("nixl shm", "pull", LARGE, 1.0, 1.0),
    ):
        # The median of three; what happened once does not count, and CPU is that of all three.
        results.add(who, op, shape, [seconds, 100 * seconds], 2 * cpu_s)
        results.add(who, op, shape, [seconds / 100], cpu_s)
    return results


EXPECTED = {
    "get_1m_vs_peer": (10 / 2, 5),
    "put_1m_vs_peer": (12 / 4, 4.5),
    "get_64k_vs_peer": (14 / 2, 7),
    "get_4k_vs_peer": (40 / 2, 20),
    "tcp_vs_peer": (10 / 8, 1.15),
    "get_one_64k_vs_peer": (3 / 6, 0.8),
    "match_vs_peer": (9 / 2, 2),
    "tcp_vs_stream": (6 / 5, 1),
    "tcp_vs_stream_4": (6 / 5, 1.5),
    "tcp_64k_vs_1m": (5 / 8, 0.85),
    "nixl_vs_raw": (3 / 4, 0.9),
    "nixl_shm_vs_raw": (1 / 2, 0.65),
    "cpu_get_1m_vs_peer": (1 / 4, 1),
    "cpu_put_1m_vs_peer": (2 / 8, 1),
    "cpu_tcp_vs_peer": (6 / 4, 1),
}


def test_checks_compare_medians_with_the_better_of_the_peers(bench: SimpleNamespace) -> None:
    found = {check.name: check for check in bench.peers_results.checks(full(bench))}
    assert set(found) == set(EXPECTED)
    for name, (value, bound) in EXPECTED.items():
        assert found[name].value == pytest.approx(value), name
        low, high = found[name].at_least, found[name].at_most
        at_most = name.startswith("cpu_") or name == "get_one_64k_vs_peer"
        assert (high if at_most else low) == bound, name
        assert (low if at_most else high) is None, name


def test_checks_of_who_is_out_are_not_run(bench: SimpleNamespace) -> None:
    results = full(bench)
    results.drop(PEER, "gave wrong bytes")
    found = {check.name: check for check in bench.peers_results.checks(results)}
    assert found["get_1m_vs_peer"].value == 5  # by the other one
    assert found["get_4k_vs_peer"].value is None
    assert "mooncake: gave wrong bytes" in found["get_4k_vs_peer"].why
    results.drop(TUNED, "is not installed")
    found = {check.name: check for check in bench.peers_results.checks(results)}
    assert found["cpu_put_1m_vs_peer"].value is None
    assert not any("mooncake" in row["who"] for row in results.rows())
    results = full(bench)
    results.drop(SHM, "was killed")
    found = {check.name: check for check in bench.peers_results.checks(results)}
    assert found["match_vs_peer"].why == "kvpool shm: was killed"


def test_four_streams_count_where_the_machine_allows_them(bench: SimpleNamespace) -> None:
    results = full(bench)
    results.add("4 streams", "pull", LARGE, [5.0] * 9, 1.0)
    found = {check.name: check for check in bench.peers_results.checks(results)}
    assert found["tcp_vs_stream_4"].value is None
    assert "four plain streams make 1.20 x one" in found["tcp_vs_stream_4"].why


def test_rows_have_rates_percentiles_and_cpu_of_all_batches(bench: SimpleNamespace) -> None:
    results = bench.peers_results.Results()
    results.add("a", "get", (10**6, 10), [i / 1000 for i in range(1, 101)], 3.0)
    results.add("a", "exists", (10**6, 10), [0.5], 1e-5)
    get, exists = sorted(results.rows(), key=lambda row: row["op"], reverse=True)
    assert get["gb_s"] == pytest.approx(0.01 / 0.0505)
    assert get["p50_ms"] == pytest.approx(50.5)
    assert get["p99_ms"] == pytest.approx(100)
    assert get["cpu_s_per_gb"] == pytest.approx(3.0 / (100 * 0.01))
    assert (get["batches"], exists["keys_s"], exists["cpu_us_per_key"]) == (100, 20, 1)


def test_a_check_that_was_not_run_is_written_as_such(
    bench: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench.harness.Report(True, str(tmp_path / "report.json"))
    report.not_run("some_ratio", "the peer is not here", at_least=2)
    report.check("other_ratio", 1.0, at_most=2)
    assert report.finish() == 0
    assert "NOT RUN some_ratio" in capsys.readouterr().out
    checks = json.loads((tmp_path / "report.json").read_text())["checks"]
    assert [(check["name"], check["value"]) for check in checks] == [
        ("some_ratio", None),
        ("other_ratio", 1.0),
    ]
    text = bench.peers_results.markdown(
        [{"who": "a", "op": "get", "block_bytes": 4096, "blocks": 8, "gb_s": 2, "cpu_s_per_gb": 1}],
        checks,
        {"redis tcp": "no server"},
    )
    assert "| a | 2.00 (1.00) |" in text
    assert "| `some_ratio` | not run: the peer is not here | at least 2 |" in text
    assert "Not there: redis tcp (no server)." in text


def test_the_result_has_its_place_in_the_document(bench: SimpleNamespace, repo_root: Path) -> None:
    document = (repo_root / "docs" / "performance.md").read_text()
    changed = bench.peers_results.between_marks(document, "peers", "NEW\n")
    assert "<!-- peers: begin -->\nNEW\n<!-- peers: end -->\n" in changed
    assert bench.peers_results.between_marks(changed, "peers", "NEW\n") == changed
    with pytest.raises(ValueError, match="marks for others"):
        bench.peers_results.between_marks(document, "others", "NEW\n")


# ---- what is compared --------------------------------------------------------------------------------


def racer(bench: SimpleNamespace) -> Any:
    """One that runs a store in a dict, whose `fault` may be switched on."""

    class Dict(bench.peers_worker.Contestant):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.kept: dict[int, Any] = {}
            self.fault = ""

        def names(self, serial: int) -> int:
            return serial

        def put(self, names: int, batch: int) -> None:
            self.kept[names] = self.payload[batch].copy()

        def get(self, names: int) -> None:
            found = self.kept[names]
            if self.fault == "nothing":
                return
            self.out[:] = found[::-1] if self.fault == "swapped" else found
            if self.fault == "byte":
                self.out[-1, -1] ^= 1
            if self.fault == "other batch":
                self.out[:] = next(kept for kept in self.kept.values() if kept is not found)

        def exists(self, names: int) -> int:
            return N - (self.fault == "one missing")

        def remove(self, names: int) -> None:
            del self.kept[names]

    payload = np.random.default_rng(1).integers(0, 255, NBYTES * N * BATCHES, dtype=np.uint8)
    made = bench.peers_worker.Racer(Dict(), payload)
    made.open(NBYTES, N)
    return made


def test_a_turn_times_each_batch_and_leaves_what_is_resident(bench: SimpleNamespace) -> None:
    made = racer(bench)
    resident = dict(made.contestant.kept)
    assert len(resident) == BATCHES
    for op in ("get", "put", "exists"):
        answer = made.burst(op, 2, [])
        assert len(answer["seconds"]) == 2
        assert answer["cpu_s"] > 0
        assert made.contestant.kept.keys() == resident.keys()
    assert len(made.burst("get", 100, [])["seconds"]) == BATCHES
    assert made.verify(BATCHES) == BATCHES * N * NBYTES
    made.open(NBYTES, 2 * N)  # what was there goes
    assert len(made.contestant.kept) == 1


@pytest.mark.parametrize("fault", ["nothing", "byte", "swapped", "other batch"])
@pytest.mark.parametrize("op", ["get", "put"])
def test_wrong_bytes_end_a_turn(bench: SimpleNamespace, op: str, fault: str) -> None:
    made = racer(bench)
    made.contestant.fault = fault
    with pytest.raises(bench.peers_worker.WrongBytesError):
        made.burst(op, 1, [])
    with pytest.raises(bench.peers_worker.WrongBytesError):
        made.verify(1)


def test_a_lookup_that_misses_a_block_ends_a_turn(bench: SimpleNamespace) -> None:
    made = racer(bench)
    made.contestant.fault = "one missing"
    with pytest.raises(bench.peers_worker.WrongBytesError):
        made.burst("exists", 1, [])


def test_cpu_seconds_are_those_of_all_processes(bench: SimpleNamespace) -> None:
    us, parent = os.getpid(), os.getppid()
    cpu_seconds = bench.peers_worker.cpu_seconds
    before = cpu_seconds([us])
    sum(range(200_000))
    assert cpu_seconds([us]) > before
    assert cpu_seconds([us, parent]) >= cpu_seconds([parent]) + before


# ---- processes ---------------------------------------------------------------------------------------


@pytest.fixture
def small_payload(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.peers, "PAYLOAD_BYTES", 32 << 20)


@pytest.fixture
def payload_fd(bench: SimpleNamespace, small_payload: None) -> Iterator[int]:
    with ExitStack() as stack:
        yield bench.peers.make_payload(stack)


def entry(bench: SimpleNamespace, kind: str, **options: Any) -> Any:
    return bench.peers.Entry(kind, kind, lambda _: (options, list), sys.executable)


def test_contestants_run_in_processes_of_their_own(
    bench: SimpleNamespace, tmp_path: Path, payload_fd: int
) -> None:
    with ExitStack() as stack:
        memcpy = bench.peers.Worker(stack, entry(bench, "memcpy"), tmp_path, payload_fd)
        streams = bench.peers.Worker(stack, entry(bench, "streams", count=2), tmp_path, payload_fd)
        assert memcpy.ops == ("put", "get")
        for worker, op in ((memcpy, "put"), (memcpy, "get"), (streams, "pull")):
            worker.ask("open", 65536, 64)
            seconds, cpu_s = worker.burst(op, 3)
            assert len(seconds) == 3
            assert min(seconds) > 0
            assert cpu_s > 0


def test_a_race_names_who_is_absent_and_goes_on(
    bench: SimpleNamespace, small_payload: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = bench.peers

    def two(folder: Path) -> list[Any]:
        return [
            entry(bench, "memcpy"),
            peers.Entry("mooncake", "mooncake", peers.mooncake(folder, {})),
        ]

    monkeypatch.setattr(peers, "PEERS_PYTHON", tmp_path / "bin" / "python")
    results = bench.peers_results.Results()
    peers.race(bench.harness.Report(True, None), results, two, {(65536, 64): ("get", "put")})
    assert {(row["who"], row["op"]) for row in results.rows()} == {
        ("memcpy", "get"),
        ("memcpy", "put"),
    }
    assert list(results.absent) == ["mooncake"]
    assert "there is no .venv-peers" in results.absent["mooncake"]


def test_one_that_cannot_start_says_why(
    bench: SimpleNamespace, tmp_path: Path, payload_fd: int
) -> None:
    with ExitStack() as stack, pytest.raises(bench.peers.OutError, match="mooncake"):
        bench.peers.Worker(stack, entry(bench, "mooncake", master="none"), tmp_path, payload_fd)
    broken = bench.peers.Entry("broken", "no-such-kind", lambda _: ({}, list), sys.executable)
    with ExitStack() as stack, pytest.raises(bench.peers.OutError, match="no-such-kind"):
        bench.peers.Worker(stack, broken, tmp_path, payload_fd)
