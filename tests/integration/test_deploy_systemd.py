"""What deploy/systemd/ forbids, daemons and routers do not do: under strace, and with the kernel's own means."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.client import Client
from kvpool.errors import ConfigError
from kvpool.types import NamespaceRecord
from tests.support.servers.etcd import free_port
from tests.support.servers.find import find_server
from tests.support.waiting import PATIENCE_S

UNITS = Path(__file__).resolve().parent.parent.parent / "deploy" / "systemd"
RECORD = NamespaceRecord.simple("model", block_bytes=65536, block_tokens=16)
KEYS = [i.to_bytes(16, "big") for i in range(1, 65)]
BLOCKS = [bytes([i]) * 65536 for i in range(1, 65)]
KVPOOL = [sys.executable, "-m", "kvpool.cli"]
# prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN), Linux 6.3: what MemoryDenyWriteExecute asks of seccomp.
MDWE = (
    "import ctypes, os, sys\n"
    "if ctypes.CDLL(None, use_errno=True).prctl(65, 1, 0, 0, 0):\n"
    "    raise SystemExit(99)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here"
)


def calls_in(group: str) -> set[str]:
    """All system calls of a set such as @system-service."""
    done = subprocess.run(
        ["systemd-analyze", "syscall-filter", "--no-pager", group],
        capture_output=True,
        text=True,
        check=True,
    )
    found: set[str] = set()
    for word in (line.strip() for line in done.stdout.splitlines()[1:]):
        if word.startswith("@"):
            found |= calls_in(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def allowed(unit: str) -> set[str]:
    """As systemd reads the lines of the filter: the first one names what is allowed, ~ takes some away."""
    found: set[str] = set()
    for line in (UNITS / unit).read_text().splitlines():
        if line.startswith("SystemCallFilter="):
            words = line.partition("=")[2]
            taken = set().union(*(calls_in(word) for word in words.lstrip("~").split()))
            found = found - taken if words.startswith("~") else found | taken
    return found | calls_in("@default")


def traced(folder: Path, command: list[str]) -> tuple[list[str], Path]:
    try:
        strace = find_server("strace")
    except ConfigError as error:
        pytest.skip(f"there is no strace: {error}")
    report = folder / "calls"
    # A table of all calls, of all its processes, when they have ended.
    return [strace, "-f", "-qq", "-c", "-U", "name", "-o", str(report), *command], report


def seen(report: Path) -> set[str]:
    lines = [line.strip() for line in report.read_text().splitlines()]
    return {line for line in lines if line.isidentifier()} - {"syscall", "total"}


def begin(command: list[str], environ: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
    )


def end(process: subprocess.Popen) -> None:
    """SIGTERM to the program itself, which strace would keep for itself."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    traced_by = Path(f"/proc/{process.pid}/comm").read_text().strip() == "strace"
    os.kill(int(children[0]) if traced_by else process.pid, signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr


def use(socket: str) -> None:
    """What an engine does, and enough of it that memory gives blocks up."""
    with Client(socket, timeout_s=PATIENCE_S, connect=True) as client:
        namespace = client.open(RECORD)
        for start in range(0, 64, 16):
            client.put(namespace, KEYS[start : start + 16], BLOCKS[start : start + 16])
        client.get(namespace, KEYS)
        client.stats()


@pytest.fixture
def serve(folder: Path) -> list[str]:
    return [
        *KVPOOL,
        *("serve", "--socket", str(folder / "s"), "--memory", "8MiB", "--listen"),
        *("tcp://127.0.0.1:0", "--ssd", f"{folder}/ssd=64MiB", "--data-dir", str(folder / "data")),
    ]


@needs_systemd
@pytest.mark.slow
def test_a_daemon_makes_no_call_that_its_unit_forbids(folder, serve, clean_environ):
    command, report = traced(folder, serve)
    process = begin(command, clean_environ(folder))
    try:
        assert " ready: " in process.stdout.readline(), process.stderr.read()
        use(str(folder / "s"))
        end(process)
    finally:
        process.kill()
    calls = seen(report)
    assert {"memfd_create", "fallocate", "sendmsg", "fdatasync"} <= calls, "it did its work"
    assert calls - allowed("kvpool.service") == set()


@needs_systemd
@pytest.mark.slow
def test_a_router_makes_no_call_that_its_unit_forbids(folder, clean_environ):
    words = ["router", "--listen", "127.0.0.1:0", "--no-daemon", "--engine", "http://127.0.0.1:1"]
    command, report = traced(folder, [*KVPOOL, *words])
    process = begin(command, clean_environ(folder))
    try:
        assert " ready: " in process.stdout.readline(), process.stderr.read()
        end(process)
    finally:
        process.kill()
    calls = seen(report)
    assert {"bind", "listen"} <= calls
    assert calls - allowed("kvpool-router.service") == set()


def test_a_daemon_needs_no_memory_that_can_be_written_and_run(folder, serve, clean_environ):
    process = begin([sys.executable, "-c", MDWE, *serve], clean_environ(folder))
    try:
        first = process.stdout.readline()
        if not first and process.wait(PATIENCE_S) == 99:
            pytest.skip("this kernel cannot forbid it (Linux 6.3)")
        assert " ready: " in first, process.stderr.read()
        use(str(folder / "s"))
        end(process)
    finally:
        process.kill()


def waiting_for_ready(path: Path) -> socket.socket:
    """What systemd listens on, as NOTIFY_SOCKET names it."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(path))
    listening.settimeout(PATIENCE_S)
    return listening


def test_systemd_is_told_when_clients_find_the_daemon(folder, serve, clean_environ):
    with waiting_for_ready(folder / "n") as systemd:
        process = begin(serve, clean_environ(folder, NOTIFY_SOCKET=str(folder / "n")))
        try:
            assert systemd.recv(100) == b"READY=1"
            use(str(folder / "s"))
            end(process)
        finally:
            process.kill()


def test_systemd_is_told_when_the_router_listens(folder, clean_environ):
    port = free_port()
    words = ["router", "--listen", f"127.0.0.1:{port}", "--no-daemon", "--engine", "http://[::1]:1"]
    with waiting_for_ready(folder / "n") as systemd:
        process = begin([*KVPOOL, *words], clean_environ(folder, NOTIFY_SOCKET=str(folder / "n")))
        try:
            assert systemd.recv(100) == b"READY=1"
            socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
            end(process)
        finally:
            process.kill()


@needs_systemd
def test_the_comparison_sees_what_is_forbidden():
    assert {"memfd_create", "sched_setaffinity", "mlock", "pidfd_open"} <= allowed("kvpool.service")
    assert not {"mount", "setuid", "bpf", "reboot", "chown"} & allowed("kvpool.service")


def test_the_configuration_of_one_node_starts_as_it_is(folder, clean_environ):
    """But for its size, its port and its folder, which root makes."""
    text = (UNITS / "kvpool.toml").read_text()
    place = f"127.0.0.1:{free_port()}"
    for written, here in (
        ("8GiB", "64MiB"),
        ("127.0.0.1:7071", place),
        ("/var/lib/kvpool", str(folder)),
    ):
        assert written in text
        text = text.replace(written, here)
    file = folder / "kvpool.toml"
    file.write_text(text)
    with subprocess.Popen(
        [*KVPOOL, "serve", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(folder) | {"KVPOOL_SOCKET": str(folder / "kvpool.sock")},
    ) as daemon:
        assert daemon.stdout is not None and daemon.stderr is not None
        ready, gateway = daemon.stdout.readline(), daemon.stdout.readline()
        daemon.send_signal(signal.SIGTERM)
        status = daemon.wait(PATIENCE_S)
        said = daemon.stderr.read()
    assert " ready: " in ready and f"http://{place}" in gateway, said
    assert (status, said) == (0, "")
