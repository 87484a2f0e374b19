"""kvpool beside what a user would take instead: one run, one machine, in turns, warm, medians.

    .venv/bin/python bench/peers.py [--quick] [--json FILE] [--docs]

kvpool       shm: one node, put, get, `contains` and `match`. tcp: acquired from another node's daemon, copied
             out, released; `pull` is the same without the copy out; two nodes on etcd and Redis. nixl: the same
             over NIXL
mooncake     Mooncake Store, non-CUDA wheel: master, a process that holds the segment, and the caller's,
             which reads and writes over its TCP transport, zero copy. Once as it comes and once with more
             connections and larger slices (`TUNED`): checks take the better of the two, each time
redis        redis-py with hiredis: pipelined SET and GET over a unix socket and over TCP, one EXISTS
nixl         raw NIXL between two processes: READ and WRITE, over UCX's TCP lane and its shared memory
stream       plain TCP connections, one and four; memcpy: numpy, one call a batch

Each is a process of its own (`peers_worker.py`), all move the same bytes, and what was read is compared. CPU
seconds are those of all processes that take part. Who gives back a wrong byte, or ends, is out, and is named
with the reason; so is who cannot be had here. Checks that need them are then "not run".

Beside FILE come FILE.md and FILE.png. `--docs` puts both into docs/performance.md.

The peers live in .venv-peers, which scripts/peers-venv makes on the first run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from engines import ENDS_WITH_PARENT
from harness import REPO, START_S, Daemon, Report, daemon, seconds
from peers_results import (
    ASKS,
    KIB,
    LARGE,
    MIB,
    MIDDLE,
    MIDDLE_MANY,
    MIDDLE_ONE,
    SMALL,
    Check,
    Results,
    Shape,
    between_marks,
    checks,
    markdown,
    size,
)

from kvpool.client import OperatorClient
from tests.support.servers.etcd import Etcd, free_port
from tests.support.servers.find import find_server
from tests.support.servers.redis import Redis

HERE = Path(__file__).resolve().parent
PEERS_PYTHON = REPO / ".venv-peers" / "bin" / "python"
DOCUMENT = REPO / "docs" / "performance.md"
PICTURE = REPO / "docs" / "performance-peers.png"

PAYLOAD_BYTES = 96 * MIB  # several times a cache
STORE_BYTES = 384 * MIB
ANSWER_S = 60.0
STARTERS = 3  # contestants that start, or fill up, at a time
OPS = ("get", "put", "exists", "match", "pull")
QUICK_SHAPES = (SMALL, MIDDLE, LARGE, (4 * MIB, 8))
MORE_SHAPES = ((16 * KIB, 128), (256 * KIB, 64))
TUNED = {"MC_TCP_LANES_PER_PEER": "16", "MC_TCP_SLICE_SIZE": str(MIB)}
# Without larger segments UCX reads over TCP 8 KiB at a time.
UCX_TCP = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
UCX_SHM = {"UCX_TLS": "posix,cma,tcp"}


class OutError(Exception):
    """A contestant cannot start, has ended, or gave wrong bytes."""


@dataclass
class Entry:
    """A contestant before it runs.

    servers: starts what it talks to; gives its options, and the processes that work for it.
    """

    name: str
    kind: str
    servers: Callable[[ExitStack], tuple[dict[str, Any], Callable[[], list[int]]]]
    python: str = str(PEERS_PYTHON)
    variables: Mapping[str, str] = field(default_factory=dict)
    script: str = "peers_worker.py"


class Worker:
    """A contestant's process. One thread at a time."""

    def __init__(self, stack: ExitStack, entry: Entry, folder: Path, payload_fd: int) -> None:
        self.name = entry.name
        options, self._pids = entry.servers(stack)
        self._log = folder / f"{entry.name.replace(' ', '-')}.log"
        command = [entry.python, str(HERE / entry.script), entry.kind, str(payload_fd)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(PAYLOAD_BYTES), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[payload_fd],
                env={**os.environ, **entry.variables},
                cwd=HERE,
            )
        stack.callback(self._end)
        self.ops: tuple[str, ...] = tuple(self.ask("ops"))

    def burst(self, op: str, count: int) -> tuple[list[float], float]:
        answer = self.ask("burst", op, count, self._pids())
        return answer["seconds"], answer["cpu_s"]

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise OutError(self._last_words()) from None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise OutError(f"no answer to {command[0]} in {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise OutError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise OutError(answer["error"])
        return answer["answer"]

    def _last_words(self) -> str:
        status = self._process.wait(timeout=10)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"ended with status {status}: {lines[-1] if lines else 'nothing said'}"

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# ---- who takes part ----------------------------------------------------------------------------------


def nobody() -> list[int]:
    return []


def needs_peers_python() -> None:
    if not PEERS_PYTHON.exists():
        raise OutError("there is no .venv-peers: scripts/peers-venv failed")


@contextlib.contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is told to stop in the end. Its standard input is a pipe."""
    with log.open("wb") as file:
        running = subprocess.Popen(
            [*ENDS_WITH_PARENT, *command], stdin=subprocess.PIPE, stdout=file, stderr=file
        )
    try:
        yield running
    finally:
        assert running.stdin is not None
        running.stdin.close()
        running.terminate()
        try:
            running.wait(timeout=10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def wait_for(ready: Callable[[], bool], running: subprocess.Popen[bytes], log: Path) -> None:
    """Raises `OutError` when the process ends first, or takes too long."""
    deadline = time.monotonic() + START_S
    while not ready():
        if running.poll() is not None or time.monotonic() > deadline:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise OutError(f"did not start: {lines[-1] if lines else 'nothing said'}")
        time.sleep(0.05)


def connects(family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family) as probe:
        return probe.connect_ex(address) == 0


MOONCAKE_STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
print("STORE READY" if code == 0 else f"setup: {code}", flush=True)
sys.stdin.read()
store.close()
"""


def mooncake(folder: Path, variables: Mapping[str, str]) -> Any:
    """A master and a process with the segment, on ports of their own."""

    def start(stack: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        needs_peers_python()
        program = PEERS_PYTHON.parent / "mooncake_master"
        if not program.exists():
            raise OutError("the wheel mooncake-transfer-engine-non-cuda is not in .venv-peers")
        port, admin = free_port(), free_port()
        log = folder / f"master-{port}.log"
        command = [str(program), f"--port={port}", f"--metrics_port={admin}"]
        master = stack.enter_context(process(command, log))
        wait_for(lambda: connects(socket.AF_INET, ("127.0.0.1", port)), master, log)
        address = f"127.0.0.1:{port}"
        log = folder / f"segment-{port}.log"
        owner = [str(PEERS_PYTHON), "-c", MOONCAKE_STORE, address, str(STORE_BYTES)]
        settings = [f"{name}={value}" for name, value in variables.items()]
        segment = stack.enter_context(process(["env", *settings, *owner], log))
        wait_for(lambda: "STORE READY" in log.read_text(errors="replace"), segment, log)
        return {"master": address}, lambda: [master.pid, segment.pid]

    return start


def redis(folder: Path, *, unix: bool) -> Any:
    def start(stack: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        needs_peers_python()
        program = find_server("redis-server")
        port = free_port()
        path = folder / f"redis-{port}.sock"
        log = folder / f"redis-{port}.log"
        where = ["--port", "0", "--unixsocket", str(path)] if unix else ["--port", str(port)]
        kept = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        server = stack.enter_context(process([program, *where, *kept], log))
        if unix:
            wait_for(lambda: connects(socket.AF_UNIX, str(path)), server, log)
            return {"url": f"unix://{path}"}, lambda: [server.pid]
        wait_for(lambda: connects(socket.AF_INET, ("127.0.0.1", port)), server, log)
        return {"url": f"redis://127.0.0.1:{port}"}, lambda: [server.pid]

    return start


def alone(**options: Any) -> Any:
    """A contestant that starts its other processes by itself."""

    def start(_: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        needs_peers_python()
        return options, nobody

    return start


def pids_of(*daemons: Daemon) -> Callable[[], list[int]]:
    return lambda: [pid for one in daemons for pid in one.pids]


def kvpool_shm(folder: Path) -> Any:
    def start(stack: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        one = stack.enter_context(daemon(folder, "shm", str(STORE_BYTES)))
        return {"socket_path": one.socket}, pids_of(one)

    return start


def kvpool_tcp(folder: Path, etcd: str) -> Any:
    def start(stack: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        a, b, pids = joined(stack, folder, etcd, "tcp")
        return {"socket_path": b.socket, "owner": a.socket}, pids

    return start


def joined(
    stack: ExitStack,
    folder: Path,
    etcd: str,
    name: str,
    *flags: str,
    variables: Mapping[str, str] | None = None,
) -> tuple[Daemon, Daemon, Callable[[], list[int]]]:
    """Two daemons that are `members`; and whose CPU counts."""
    memories = (STORE_BYTES, STORE_BYTES)
    (a, b), kept = members(stack, folder, etcd, name, memories, *flags, variables=variables)
    assert kept.process is not None
    server = kept.process.pid
    daemons = pids_of(a, b)
    return a, b, lambda: [*daemons(), server]


def members(
    stack: ExitStack,
    folder: Path,
    etcd: str,
    name: str,
    memories: Sequence[int],
    *flags: str,
    variables: Mapping[str, str] | None = None,
) -> tuple[list[Daemon], Redis]:
    """Daemons with so much memory, a cluster of their own, that have met through etcd and share a directory; and that."""
    kept = stack.enter_context(Redis(folder / f"directory-{name}"))
    directory = ("--directory", f"redis://127.0.0.1:{kept.port}")
    common = ("--listen", "tcp://127.0.0.1:0", "--join", etcd, "--cluster", name, *directory)
    nodes = [
        stack.enter_context(
            daemon(folder, f"{name}-{number}", str(memory), *common, *flags, variables=variables)
        )
        for number, memory in enumerate(memories)
    ]
    deadline = time.monotonic() + START_S
    with OperatorClient(nodes[-1].socket, connect=True) as client:
        while len(client.cluster()["nodes"]) < len(nodes):
            if time.monotonic() > deadline:
                raise OutError(f"the nodes of {name} did not meet")
            time.sleep(0.05)
    return nodes, kept


def kvpool_nixl(folder: Path, etcd: str, lane: str, variables: Mapping[str, str]) -> Any:
    def start(stack: ExitStack) -> tuple[dict[str, Any], Callable[[], list[int]]]:
        a, b, pids = joined(
            stack,
            folder,
            etcd,
            f"nixl-{lane}",
            *("--listen", "nixl://127.0.0.1:0"),
            variables={**variables, "KVPOOL_PULL_OVER": "nixl"},
        )
        options = {"socket_path": b.socket, "owner": a.socket, "over_nixl": True}
        return options, pids

    return start


def entries(folder: Path, etcd: str) -> list[Entry]:
    ours = sys.executable
    return [
        Entry("kvpool shm", "kvpool", kvpool_shm(folder), ours),
        Entry("kvpool tcp", "kvpool-remote", kvpool_tcp(folder, etcd), ours),
        Entry("kvpool nixl tcp", "kvpool-remote", kvpool_nixl(folder, etcd, "tcp", UCX_TCP), ours),
        Entry("kvpool nixl shm", "kvpool-remote", kvpool_nixl(folder, etcd, "shm", UCX_SHM), ours),
        Entry("mooncake", "mooncake", mooncake(folder, {})),
        Entry("mooncake tuned", "mooncake", mooncake(folder, TUNED), variables=TUNED),
        Entry("redis unix", "redis", redis(folder, unix=True)),
        Entry("redis tcp", "redis", redis(folder, unix=False)),
        Entry("nixl tcp", "nixl", alone(), variables=UCX_TCP),
        Entry("nixl shm", "nixl", alone(), variables=UCX_SHM),
        Entry("stream", "streams", lambda _: ({"count": 1}, nobody), ours),
        Entry("4 streams", "streams", lambda _: ({"count": 4}, nobody), ours),
        Entry("memcpy", "memcpy", lambda _: ({}, nobody), ours),
    ]


# ---- the race ----------------------------------------------------------------------------------------


def make_payload(stack: ExitStack) -> int:
    """Random bytes that every contestant maps: the descriptor of a memfd."""
    fd = os.memfd_create("payload")
    stack.callback(os.close, fd)
    os.truncate(fd, PAYLOAD_BYTES)
    random_bytes = np.random.default_rng(11)
    for at in range(0, PAYLOAD_BYTES, 32 * MIB):
        os.pwrite(fd, random_bytes.bytes(32 * MIB), at)
    return fd


@dataclass(frozen=True)
class Plan:
    """Rounds, the batches of one turn, and when no further round begins, after two at least."""

    rounds: int
    batches: int
    seconds: float


def plan(shape: Shape, *, quick: bool) -> Plan:
    """A turn is long enough that what it finds in the caches is its own."""
    nbytes, n = shape
    if nbytes * n < 8 * MIB:
        return Plan(7, 8, 1.0) if quick else Plan(25, 16, 30)
    return Plan(4, 2, 1.5) if quick else Plan(15, 3, 60)


def race(
    report: Report,
    results: Results,
    entries_in: Callable[[Path], list[Entry]],
    shapes: Mapping[Shape, Sequence[str]],
) -> None:
    """entries_in: the contestants, whose files go into this folder. shapes: with the operations of each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-bench-")))
        payload_fd = make_payload(stack)
        # Until the end: what a thread has started may be told to end with it (`ENDS_WITH_PARENT`).
        starters = stack.enter_context(ThreadPoolExecutor(STARTERS))
        listed = entries_in(folder)
        # Each of its own, so that what a contestant has started ends with it.
        stacks = [stack.enter_context(ExitStack()) for _ in listed]

        def start(entry: Entry, servers: ExitStack) -> Worker | None:
            try:
                return Worker(servers, entry, folder, payload_fd)
            except (OutError, SystemExit, OSError, RuntimeError) as error:
                out(results, entry.name, str(error))
                servers.close()
                return None

        began = time.monotonic()
        started = list(starters.map(start, listed, stacks))
        print(f"({len(listed)} contestants started in {time.monotonic() - began:.1f} s)")
        workers = [worker for worker in started if worker is not None]
        for shape, ops in shapes.items():
            racing = [
                worker
                for worker in workers
                if worker.name not in results.absent and not set(ops).isdisjoint(worker.ops)
            ]
            one_shape(report, results, racing, shape, ops, starters)


def one_shape(
    report: Report,
    results: Results,
    workers: list[Worker],
    shape: Shape,
    ops: Sequence[str],
    starters: ThreadPoolExecutor,
) -> None:
    print(f"{size(shape[0])} x {shape[1]}", flush=True)
    began = time.monotonic()
    opened = list(starters.map(lambda worker: tried(results, worker, "open", *shape), workers))
    racing = [worker for worker, well in zip(workers, opened, strict=True) if well]
    filled = time.monotonic()
    planned = plan(shape, quick=report.quick)
    order = list(racing)
    for op in ops:
        ends = time.monotonic() + planned.seconds
        for number in range(planned.rounds + 1):
            if number > 2 and time.monotonic() > ends:
                break
            order.reverse()
            for worker in order:
                if op not in worker.ops or worker.name in results.absent:
                    continue
                try:
                    times, cpu_s = worker.burst(op, planned.batches)
                except OutError as error:
                    out(results, worker.name, str(error))
                    continue
                if number:  # the first is for warming up
                    results.add(worker.name, op, shape, times, cpu_s)
    for worker in racing:
        if worker.name not in results.absent:
            tried(results, worker, "verify", 2)
    print(f"  (filled in {filled - began:.1f} s, raced in {time.monotonic() - filled:.1f} s)")
    for row in results.rows():
        if (row["block_bytes"], row["blocks"]) == shape:
            shown = "keys_s" if row["op"] in ASKS else "gb_s"
            print(
                f"  {row['op']:<7}{row['who']:<17}"
                f"{row[shown]:>12,.2f} {shown:<7} p50 {row['p50_ms']:.3g} ms  "
                f"p99 {row['p99_ms']:.3g} ms",
                flush=True,
            )


def tried(results: Results, worker: Worker, *command: Any) -> bool:
    try:
        worker.ask(*command)
    except OutError as error:
        out(results, worker.name, str(error))
        return False
    return True


def out(results: Results, name: str, why: str) -> None:
    print(f"  OUT: {name}: {why}", flush=True)
    results.drop(name, why)


# ---- what comes of it --------------------------------------------------------------------------------


def make_environment() -> None:
    if subprocess.run([str(REPO / "scripts" / "peers-venv")], check=False).returncode:
        print("scripts/peers-venv failed: going on with what is there", flush=True)


def write_pictures(report: Report, absent: dict[str, str], *, docs: bool) -> None:
    text = markdown([row for row in report.rows if "op" in row], report.checks, absent)
    assert report.json_path is not None
    path = Path(report.json_path)
    path.with_suffix(".md").write_text(text)
    picture = path.with_suffix(".png")
    drawn = subprocess.run(
        [str(PEERS_PYTHON), str(HERE / "peers_plot.py"), str(path), str(picture)], check=False
    )
    if drawn.returncode:
        print("NO PLOT: matplotlib of .venv-peers failed", flush=True)
    if docs:
        shown = "--quick " if report.quick else ""
        text = f"`bench/peers.py {shown}--json ...`, {os.cpu_count()} cores:\n\n{text}"
        if not drawn.returncode:
            shutil.copy(picture, PICTURE)
            text += f"\n![the same, drawn]({PICTURE.name})\n"
        DOCUMENT.write_text(between_marks(DOCUMENT.read_text(), "peers", text))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within a minute")
    parser.add_argument("--json", metavar="FILE", help="write rows and checks here")
    parser.add_argument(
        "--docs", action="store_true", help="put the result into docs/performance.md"
    )
    arguments = parser.parse_args()
    if arguments.docs and not arguments.json:
        parser.error("--docs needs --json")
    report, results = Report(arguments.quick, arguments.json), Results()
    make_environment()
    taken = seconds(lambda: run(report, results))
    report.row("run", seconds=round(taken, 1), cores=os.cpu_count() or 0, absent=results.absent)
    report.finish()
    if arguments.json:
        write_pictures(report, results.absent, docs=arguments.docs)
    # A peer that is not there is no failure of ours; wrong bytes of kvpool are.
    return int(any(name.startswith("kvpool") and "WrongBytes" in why
                   for name, why in results.absent.items()))  # fmt: skip


def run(report: Report, results: Results) -> None:
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder, Etcd(Path(folder)) as etcd:
        chosen = QUICK_SHAPES if report.quick else tuple(sorted(QUICK_SHAPES + MORE_SHAPES))
        shapes: dict[Shape, Sequence[str]] = dict.fromkeys(chosen, OPS)
        shapes |= {MIDDLE_MANY: ("pull",), MIDDLE_ONE: ("get",)}
        race(report, results, lambda into: entries(into, etcd.url), shapes)
    judge(report, results, checks(results))


def judge(report: Report, results: Results, found: Iterable[Check]) -> None:
    """Into the report, for people and for machines."""
    for row in results.rows():
        name = f"{row['op']} {row['who']} {size(row['block_bytes'])} x {row['blocks']}"
        report.rows.append({"name": name, **row})
    for check in found:
        if check.value is None:
            report.not_run(check.name, check.why, at_least=check.at_least, at_most=check.at_most)
        else:
            report.check(check.name, check.value, at_least=check.at_least, at_most=check.at_most)


if __name__ == "__main__":
    sys.exit(main())
