"""Starting, refusing to start, stopping, dying: `kvpool serve` as an operator meets it."""

import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.client import Client
from kvpool.errors import Unavailable
from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

MIB = 1 << 20
RECORD = NamespaceRecord.simple("life", block_bytes=4096, block_tokens=16)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_it_says_that_it_is_ready_and_where(daemon):
    assert "32 MiB" in daemon.ready
    assert daemon.socket in daemon.ready
    assert daemon.ready.count("\n") == 1


def test_it_needs_no_configuration_at_all(start, folder, clean_environ):
    environ = clean_environ(folder)
    # All but the memory: a quarter of what is free is not a test's to take.
    environ["KVPOOL_MEMORY"] = "16MiB"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpool.cli", "serve"],
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    try:
        line = process.stdout.readline()
        path = folder / "kvpool" / "kvpool.sock"
        assert f"socket {path}" in line
        with Client(str(path), timeout_s=PATIENCE_S, connect=True) as client:
            ns = client.open(RECORD)
            assert client.put(ns, [key(1)], b"x" * 4096) == 1
            assert client.get(ns, [key(1)]) == [b"x" * 4096]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        status = subprocess.run(
            [sys.executable, "-m", "kvpool.cli", "status"],
            env=environ,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "16 MiB" in status.stdout.replace("16.0", "16")
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_clean_end(daemon, client, until, number):
    ns = client.open(RECORD)
    client.put(ns, [key(1)], b"x" * 4096)
    family = daemon.family()
    assert len(family) > 1, "a daemon has transfer workers"
    daemon.signal(number)
    assert daemon.wait_end() == 0
    assert not Path(daemon.socket).exists()
    until(lambda: not any(daemon.alive(pid) for pid in family), what="a process is left")
    assert daemon.stderr == "", "not a word, warnings of descriptors left open included"
    assert client.match(ns, [key(1)]) == 0


def test_a_daemon_of_nohup_goes_on_after_its_terminal(start, until):
    daemon = start(program=("nohup", sys.executable, "-m"))
    daemon.signal(signal.SIGHUP)
    with daemon.client() as client:
        assert client.put(client.open(RECORD), [key(1)], b"x" * 4096) == 1
    assert daemon.stop() == 0


def test_a_second_hangup_lets_blocks_go_to_the_disk(start, folder):
    """The shell and the kernel both send one when a terminal closes. A second SIGTERM would not wait."""
    ssd = f"{folder / 'ssd'}=64MiB"
    daemon = start("--ssd", ssd)
    with daemon.client() as client:
        client.put(client.open(RECORD), [key(i) for i in range(512)], [b"x" * 4096] * 512)
    daemon.signal(signal.SIGHUP)
    daemon.signal(signal.SIGHUP)
    assert daemon.wait_end() == 0
    with start("--ssd", ssd).client() as client:
        ns = client.open(RECORD)
        lease = client.acquire(ns, [key(i) for i in range(512)], wait_s=PATIENCE_S)
        assert lease is not None and lease.blocks == 512


def test_clean_end_with_connections_in_every_state(daemon):
    silent = daemon.raw()
    half = daemon.raw()
    half.sock.sendall(b"\x10\x00")
    met = daemon.raw()
    met.hello()
    met.sock.sendall(b"\x10\x00\x00\x00\x01")
    assert daemon.stop() == 0
    assert daemon.stderr == ""
    assert silent.ended()
    assert half.ended()
    assert met.ended()


def test_end_when_somebody_has_removed_the_socket(daemon):
    Path(daemon.socket).unlink()
    assert daemon.stop() == 0
    assert daemon.stderr == ""


def test_transfer_workers_end_with_a_killed_daemon(daemon, until):
    family = daemon.family()
    daemon.kill()
    until(lambda: not any(daemon.alive(pid) for pid in family), what="a transfer worker is left")


def test_a_second_daemon_on_the_socket_is_refused(daemon, start, client):
    ns = client.open(RECORD)
    client.put(ns, [key(1)], b"x" * 4096)
    second = start("--socket", daemon.socket, ready=False, name="second")
    assert second.wait_end() == 1
    assert second.stderr.startswith("kvpool: another kvpool daemon")
    assert str(daemon.pid) in second.stderr
    assert daemon.socket in second.stderr
    assert second.stderr.count("\n") == 1
    assert client.match(ns, [key(1)]) == 1, "the first one goes on"


def test_a_second_daemon_on_the_data_directory_is_refused(start, folder):
    data = str(folder / "data")
    first = start("--data-dir", data)
    second = start("--data-dir", data, ready=False, name="second")
    assert second.wait_end() == 1
    assert "data directory" in second.stderr
    assert str(first.pid) in second.stderr
    assert second.stderr.count("\n") == 1
    assert not Path(second.socket).exists()
    assert first.stop() == 0
    start("--data-dir", data, name="third")


def test_the_socket_of_a_killed_daemon_is_taken_over(daemon, start):
    daemon.kill()
    assert Path(daemon.socket).exists()
    second = start("--socket", daemon.socket, name="second")
    with Client(daemon.socket, timeout_s=PATIENCE_S, connect=True) as client:
        assert client.incarnation
    assert second.stop() == 0


def test_a_plain_file_in_the_socket_s_place_is_left_alone(start, folder):
    (folder / "node").mkdir()
    file = folder / "node" / "kvpool.sock"
    file.write_text("precious")
    daemon = start(ready=False)
    assert daemon.wait_end() == 1
    assert str(file) in daemon.stderr
    assert daemon.stderr.count("\n") == 1
    assert file.read_text() == "precious"


def test_a_folder_that_cannot_be_made(start, folder):
    (folder / "file").write_text("")
    daemon = start("--socket", str(folder / "file" / "kvpool.sock"), ready=False)
    assert daemon.wait_end() == 1
    assert "cannot use the socket path" in daemon.stderr
    assert daemon.stderr.count("\n") == 1


def test_a_segment_larger_than_memory(daemon, client, start):
    second = start("--memory", "1024TiB", ready=False, name="second")
    assert second.wait_end() == 1
    assert "does not fit" in second.stderr
    assert "--memory" in second.stderr
    assert second.stderr.count("\n") == 1
    ns = client.open(RECORD)
    assert client.put(ns, [key(1)], b"x" * 4096) == 1, "a running daemon goes on"


def test_no_room_in_the_memory_file_system(daemon, client, folder, clean_environ):
    """For real: a limit on file sizes is one way in which the kernel says no."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * MIB, 16 * MIB))

    second = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "serve", "--memory", "64MiB"],
        preexec_fn=limit,
        env=clean_environ(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert second.returncode == 1
    assert "no room for a DRAM segment of 64 MiB" in second.stderr
    assert "--memory" in second.stderr
    assert second.stderr.count("\n") == 1
    assert client.put(client.open(RECORD), [key(1)], b"x" * 4096) == 1


@pytest.mark.parametrize("memory", ["0", "-1", "many", "150%", "1000"])
def test_memory_that_makes_no_sense(start, memory):
    daemon = start(f"--memory={memory}", "--memory", memory, ready=False)
    assert daemon.wait_end() == 1
    assert daemon.stderr.startswith("kvpool: ")
    assert daemon.stderr.count("\n") == 1


def test_a_transfer_worker_that_dies_is_replaced(daemon, client, until):
    [worker] = daemon.family()[1:]
    os.kill(worker, signal.SIGKILL)
    until(lambda: [m.alive and m.pid != worker for m in client.stats().transfer_workers] == [True])
    assert client.put(client.open(RECORD), [key(1)], b"x" * 4096) == 1


def test_idle_costs(daemon, client, until):
    """Under 1 % of a core, and under 120 MB besides the segments."""
    ns = client.open(RECORD)
    client.put(ns, [key(n) for n in range(256)], os.urandom(256 * 4096))
    ticks = os.sysconf("SC_CLK_TCK")

    def seconds_used() -> float:
        total = 0
        for pid in daemon.family():
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(words[11]) + int(words[12])
        return total / ticks

    def share() -> float:
        begin, used = time.monotonic(), seconds_used()
        time.sleep(3.0)  # the thing that is measured
        return (seconds_used() - used) / (time.monotonic() - begin)

    until(lambda: share() < 0.01, "so little in three seconds")

    private = 0
    for pid in daemon.family():
        fields = {}
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, *_ = line.split()
            fields[name.rstrip(":")] = int(value) * 1024
        private += fields["Rss"]
        # The segment is counted as shared memory of whoever has touched it.
        status = Path(f"/proc/{pid}/status").read_text()
        shmem = next(line for line in status.splitlines() if line.startswith("RssShmem:"))
        private -= int(shmem.split()[1]) * 1024
    assert private < 120_000_000


def test_more_connections_than_may_be(start, until):
    """More connections than `clients_max`: a clear refusal, and the others go on."""
    daemon = start(config='memory = "16MiB"\nclients_max = 4\n')
    held = [daemon.raw() for _ in range(4)]
    for one in held:
        one.hello()
    extra = daemon.raw()
    assert "clients_max" in extra.receive()[1].message
    assert extra.ended()
    with daemon.client(timeout_s=1.0) as client:
        ns = client.open(RECORD)
        assert client.match(ns, [key(1)]) == 0, "a daemon that takes no more is a miss"
    with daemon.client() as operator:
        stats = operator.inspect()
        assert stats.connections == 5, "an operator is let in all the same"
        assert stats.refused_connections >= 1
        held[0].sock.close()
        until(lambda: operator.inspect().connections == 4)
    with daemon.client(timeout_s=PATIENCE_S) as client:
        client.open(RECORD)
        assert client.put(client.open(RECORD), [key(1)], [bytes(4096)]) == 1, (
            "the place is given away"
        )


def test_out_of_descriptors(daemon, until):
    """No spinning while there are none, and service as soon as there are some again."""
    most = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) + 4
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (most, most))
    held = [daemon.raw() for _ in range(12)]

    def seconds_used() -> float:
        words = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    before = seconds_used()
    time.sleep(1.0)  # the thing that is measured
    assert seconds_used() - before < 0.3
    for raw in held:
        raw.sock.close()

    def served() -> bool:
        with daemon.client(timeout_s=1.0) as client:
            ns = client.open(RECORD)
            try:
                return client.put(ns, [key(1)], b"x" * 4096) >= 0
            except Unavailable:
                return False

    until(served)
    assert daemon.stats().refused_connections > 0
