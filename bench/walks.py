"""How many files of kvpool handle one remote read, one demotion to a disk, one routed request?

    .venv/bin/python bench/walks.py

Real processes run with a profiler that notes the files whose functions are called. What also runs while nothing is asked
is left out by its function, and so are files that hold messages, types, errors and numbers. `docs/architecture.md` has the lists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from harness import started

from kvpool.types import NamespaceRecord
from tests.support.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvpool"
NO_HANDLING = ("types.py", "errors.py", "retry.py", "decoding.py", "wire/", "telemetry/", "config/")
"""Messages, types, errors, settings and numbers."""
IDLE_S = 6.0
WALK_S = 1.5
BLOCK_BYTES = 1 << 16

PROFILER = """
import os, signal, sys, threading
folder, on, files = os.environ.get("WALK_FOLDER"), False, set()
def note(frame, event, _):
    if on and event == "call":
        files.add(frame.f_code.co_filename + " " + frame.f_code.co_qualname)
def switch(number, _):
    global on
    on = number == signal.SIGUSR1
    sys.setprofile(note)
    if on:
        files.clear()
    else:
        with open(f"{folder}/{os.getpid()}", "w") as out:
            out.write("\\n".join(files))
if folder:
    threading.setprofile(note)
    sys.setprofile(note)
    signal.signal(signal.SIGUSR1, switch)
    signal.signal(signal.SIGUSR2, switch)
"""


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(each for child in children for each in descendants(int(child)))]


def called(folder: Path, pids: Iterable[int], act: Callable[[], object]) -> set[str]:
    """Return the functions, as "FILE NAME", that are called in these processes while `act` runs, and shortly after."""
    for found in folder.iterdir():
        found.unlink()
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)
    act()
    time.sleep(WALK_S)
    for pid in pids:
        os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5)
    names = {line for found in folder.iterdir() for line in found.read_text().splitlines()}
    return {name.removeprefix(f"{PACKAGE}/") for name in names if name.startswith(str(PACKAGE))}


def in_each(folder: Path, pids: Iterable[int], acts: Iterable[Callable[[], object]]) -> set[str]:
    """Return the functions that are called for each of these: once, anything may happen beside it."""
    pids = list(pids)
    return set.intersection(*(called(folder, pids, act) for act in acts))


def shown(title: str, functions: Iterable[str]) -> None:
    files = {function.split()[0] for function in functions}
    kept = sorted(file for file in files if not file.startswith(NO_HANDLING))
    print(f"{title}: {len(kept)} files", *kept, sep="\n  ")


def called_here(act: Callable[[], object]) -> set[str]:
    """Return the files whose functions this process calls while `act` runs."""
    files: set[str] = set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        act()
    finally:
        sys.setprofile(None)
    return {str(Path(name).relative_to(PACKAGE)) for name in files if name.startswith(str(PACKAGE))}


def blocks_of(number: int, count: int = 4) -> tuple[list[bytes], list[np.ndarray]]:
    keys = [bytes([number, at]) * 8 for at in range(count)]
    return keys, [np.full(BLOCK_BYTES, number + at, np.uint8) for at in range(count)]


def pool_walks(folder: Path, traces: Path) -> None:
    """Count a remote read, and a demotion of a put block to a disk."""
    record = NamespaceRecord.simple("walks", block_bytes=BLOCK_BYTES, block_tokens=16)
    with LocalCluster(folder, nodes=2, ssd="256MiB") as cluster:
        cluster.wait_acquainted()
        a, b = cluster.nodes
        with a.client() as writer, b.client() as reader:
            ours, theirs = writer.open(record), reader.open(record)
            for number in range(5):  # the first ones open connections
                keys, blocks = blocks_of(number)
                writer.put(ours, keys, blocks)
                time.sleep(1.0)
                if number < 2:
                    assert len(reader.get(theirs, keys, wait_s=5.0)) == len(keys)
            pids = [*descendants(a.pid), *descendants(b.pid)]
            idle = called(traces, pids, lambda: time.sleep(IDLE_S))
            mine: set[str] = set()

            def read(number: int) -> None:
                keys, _ = blocks_of(number)
                mine.update(called_here(lambda: reader.get(theirs, keys, wait_s=5.0)))

            def write(number: int) -> None:
                writer.put(ours, *blocks_of(number))

            reads = in_each(traces, pids, [partial(read, number) for number in range(2, 5)])
            shown("remote get", (reads - idle) | mine)
            pids = descendants(a.pid)
            writes = in_each(traces, pids, [partial(write, number) for number in range(9, 12)])
            shown("put with demotion to a disk", writes - idle)


def routed_walk(folder: Path, traces: Path) -> None:
    """Count a request through a router to the one engine, whose prompt the pool is asked about."""
    free = ("--prefill-tokens-s", "inf", "--decode-s", "0")
    with ExitStack() as stack:
        node = stack.enter_context(LocalCluster(folder, nodes=1)).nodes[0]
        engine = json.loads(started(stack, "tests.support.stub_engine", *free)[0])["url"]
        path = folder / "router.toml"
        path.write_text(
            f'listen = "127.0.0.1:0"\nsocket = "{node.socket}"\n[[engines]]\nurl = "{engine}"\n'
            'node = "a"\ngroups = [0]\nhash = "sha256_cbor"\nblock_tokens = 16\n'
        )
        said, pid = started(stack, "kvpool.cli", "router", "--config", str(path))
        url = said.split("router at ")[1].split(",")[0].strip()

        def ask(seed: str) -> None:
            body = {"model": "stub", "prompt": f"{seed} " * 200, "max_tokens": 4, "stream": True}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                assert answer.read()

        for seed in ("one", "two"):
            ask(seed)
        idle = called(traces, [pid], lambda: time.sleep(IDLE_S))
        asked = in_each(traces, [pid], [partial(ask, seed) for seed in ("three", "four", "five")])
        shown("routed request", asked - idle)


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder, traces, hook = Path(made), Path(made) / "traces", Path(made) / "hook"
        traces.mkdir()
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(PROFILER)
        os.environ |= {"WALK_FOLDER": str(traces), "PYTHONPATH": str(hook)}
        for name, walk in (("pool", pool_walks), ("router", routed_walk)):
            (folder / name).mkdir()
            walk(folder / name, traces)


if __name__ == "__main__":
    main()
