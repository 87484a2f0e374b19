"""Processes that the demo and `bench/engine.py` share: the daemon, the peer's store, real engines.

Each is a context manager that leaves no process behind: children run in sessions of their own, end by
themselves when their parent is gone, and are killed with all their descendants otherwise.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from kvpool.client import Client
from kvpool.telemetry.node_stats import NodeStats

ROOT = Path(__file__).resolve().parent.parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
BLOCK_TOKENS = 32
PARTS = 2
"""Of a block: the tiny models have two KV heads."""
WAKE_TOKENS = BLOCK_TOKENS // 2
MAX_TOKENS = 4096
KV_BYTES = 128 << 20
SERVED_NAME = "tiny"
NEAR_TIE = 0.1
CORES = sorted(os.sched_getaffinity(0))
ENDS_WITH_PARENT = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
"""For programs that do not watch their input: ends them even when their parent is killed."""
START_S, ANSWER_S, STOP_S = 600.0, 60.0, 10.0  # engines on a busy machine take minutes to start


class Broken(Exception):
    """A process did not start, answer or end as it should. The message holds the end of its log."""


@dataclass(frozen=True)
class Answer:
    """What one prompt gave."""

    ttft_ms: float
    total_ms: float
    cached_tokens: int
    tokens: list[int]
    first_at: float
    margins: tuple[float, ...] = ()
    """By how much each token was likelier than the next one, in nats; where that was asked for."""

    def same(self, other: Answer) -> bool:
        """Whether both say the same. What was computed in other chunks has other last bits, so from a token on
        that was a near tie here, they may differ."""
        pairs = zip(self.tokens, other.tokens, strict=True)
        first = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        return first is None or (bool(self.margins) and self.margins[first] < NEAR_TIE)


class Child:
    """A process with a session of its own, its log in a file, and lines of its output in a queue."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, **environment: str) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                cwd=ROOT,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name=f"{name}-output").start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def line(self, timeout_s: float) -> str:
        """The next line of its output. Raises `Broken` when there is none in time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise Broken(f"{self.name} was silent for {timeout_s:.0f} s\n{self.tail()}") from None
        if line is None:
            raise Broken(f"{self.name} ended with {self.process.wait()}\n{self.tail()}")
        return line

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
        except BrokenPipeError:
            raise Broken(f"{self.name} is gone\n{self.tail()}") from None

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def end_input(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            try:
                self.process.stdin.close()
            except BrokenPipeError:
                pass

    def stop(self, asked_s: float = STOP_S) -> None:
        """Wait for its own end, then kill whatever its session still holds, interrupted or not."""
        try:
            self.end_input()
            self.process.wait(asked_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()


@contextmanager
def daemon(folder: Path, memory: str = "512MiB") -> Iterator[str]:
    """A daemon on a socket of its own. Gives the socket's path."""
    path = str(folder / "kvpool.sock")
    child = Child(
        "daemon",
        [
            *ENDS_WITH_PARENT,
            *(sys.executable, "-m", "kvpool.cli", "serve"),
            *("--socket", path, "--memory", memory, "--data-dir", str(folder / "data")),
        ],
        folder,
    )
    try:
        child.line(START_S)
        yield path
    finally:
        child.process.terminate()
        child.stop()


class EngineProcess:
    """A vLLM engine. It starts while the caller goes on, so that several can start side by side.

    engine: more of vLLM's arguments. python: an interpreter that has vLLM.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        transfer: dict[str, Any] | None = None,
        kv_bytes: int = KV_BYTES,
        step_tokens: int = 4096,
        engine: Mapping[str, Any] | None = None,
        python: Path = VLLM_PYTHON,
        **environment: str,
    ) -> None:
        arguments = {
            "model": str(model),
            "dtype": "bfloat16",
            "block_size": BLOCK_TOKENS,
            "enforce_eager": True,
            "kv_cache_memory_bytes": kv_bytes,
            "max_model_len": MAX_TOKENS,
            "max_num_batched_tokens": step_tokens,
            "seed": 0,
        }
        settings = {"engine": arguments | dict(engine or {}), "transfer": transfer}
        command = [str(python), str(ROOT / "bench/engine_process.py"), json.dumps(settings)]
        self._child = Child(name, command, folder, **(ENVIRONMENT | environment))

    def wait_ready(self) -> dict[str, Any]:
        """What vLLM chose by itself, once the engine can be asked."""
        return dict(json.loads(self._child.line(START_S))["ready"])

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        self.begin(prompt, max_tokens)
        return self.answer()

    def begin(
        self, prompt: Sequence[int], max_tokens: int, params: dict[str, Any] | None = None
    ) -> None:
        """Ask, and go on. params: the request's `kv_transfer_params`."""
        asked = {"prompt": list(prompt), "max_tokens": max_tokens, "params": params}
        self._child.tell(json.dumps(asked))

    def answer(self) -> Answer:
        """To what was asked first of what has no answer yet."""
        return Answer(**json.loads(self._child.line(ANSWER_S)))

    def ask_all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Ask all of them at once. Returns the milliseconds until the last answer."""
        self._child.tell(
            json.dumps({"prompts": list(map(list, prompts)), "max_tokens": max_tokens})
        )
        return float(json.loads(self._child.line(ANSWER_S))["total_ms"])

    def kill(self) -> None:
        """SIGKILL, all of its processes."""
        os.killpg(self._child.process.pid, signal.SIGKILL)
        self._child.process.wait()

    def measure(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """`ask`, awake: right after a prompt too short for any cache, so that what an engine pays
        after it has been idle is not counted as the time of one row or another."""
        self.ask(prompt[-WAKE_TOKENS:], 2)
        return self.ask(prompt, max_tokens)

    def finish(self) -> None:
        """Let it end without waiting, so that several end side by side: vLLM takes seconds."""
        self._child.end_input()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._child.stop(STOP_S if kind is None else 0)


class ApiServer:
    """vLLM's OpenAI-compatible server, with KV events. Starts at once; `wait_ready` waits for it.

    role: what it announces itself for. flags: more of vLLM's; extra: settings of the plugin. ranks: data-parallel ones,
    whose events begin at port `events_port`.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        socket_path: str,
        role: str,
        *flags: str,
        ranks: int = 1,
        events_port: int = 0,
        **extra: Any,
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # vLLM would connect to a TCP address without an asterisk, and listen on all interfaces at one with it.
        events, replay = (f"ipc://{folder}/{name}.{kind}" for kind in ("events", "replay"))
        if ranks > 1:  # which have no other addresses
            events, replay = (f"tcp://*:{events_port + first}" for first in (0, ranks))
        transfer = kvpool_transfer(socket_path, url=self.url, engine_role=role, **extra)
        kv_events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events,
            "replay_endpoint": replay,
        }
        command = [
            *ENDS_WITH_PARENT,
            *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", SERVED_NAME, "--seed", "0"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"),
            *("--block-size", str(BLOCK_TOKENS), "--max-model-len", str(MAX_TOKENS)),
            *("--kv-cache-memory-bytes", str(KV_BYTES), "--enforce-eager"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *("--kv-events-config", json.dumps(kv_events)),
            *("--enable-prompt-tokens-details", "--enable-request-id-headers"),
            *flags,
        ]
        if ranks > 1:
            command += ["--data-parallel-size", str(ranks)]
        # On no core of its own: vLLM's processes wait for each other in loops of sched_yield, for which Linux 6.18
        # takes so much of a task's future time that, beside another engine, it may not run again for minutes. A
        # task that may move is soon on another core.
        environment = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self._child = Child(name, command, folder, **environment)

    def wait_ready(self) -> None:
        wait_for_port(self.port, self._child)

    def computed_tokens(self) -> int:
        """Of all prompts so far, those that were in no cache."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as response:
            text = response.read().decode()
        found = re.findall(
            r'^vllm:prompt_tokens_by_source_total\{.*"local_compute".*\} (\S+)$', text, re.MULTILINE
        )
        return sum(int(float(value)) for value in found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.process.terminate()
        self._child.stop()


def measure(url: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    """`ask`, awake: see `EngineProcess.measure`."""
    ask(url, prompt[-WAKE_TOKENS:], 2)
    return ask(url, prompt, max_tokens)


def ask(
    url: str, prompt: Sequence[int], max_tokens: int, more: Mapping[str, Any] | None = None
) -> Answer:
    """Stream a completion from a server, or from a router. more: fields of the body.

    Raises `Broken` for anything but an answer.
    """
    parts = urlsplit(url)
    body = {
        "model": SERVED_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": 2,
        **(more or {}),
    }
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_S)
    with contextlib.closing(connection):
        begun = time.monotonic()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Broken(f"{url} answered {response.status}: {response.read(2000)!r}")
        first, usage = None, None
        tokens: list[int] = []
        margins: list[float] = []
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                raise Broken(f"{url} ended with {chunk}")
            first = first or time.monotonic()
            for choice in chunk["choices"]:
                tokens += choice["token_ids"] or ()
                for likeliest in choice["logprobs"]["top_logprobs"] if choice["logprobs"] else ():
                    best, second, *_ = sorted(likeliest.values(), reverse=True)
                    margins.append(best - second)
            usage = chunk.get("usage") or usage
        ended = time.monotonic()
    if usage is None or len(tokens) != max_tokens:
        raise Broken(f"{url} ended before its answer did: {len(tokens)} of {max_tokens} tokens")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    first = first or ended
    return Answer(
        1000 * (first - begun), 1000 * (ended - begun), cached, tokens, first, tuple(margins)
    )


@contextmanager
def router(
    folder: Path,
    name: str,
    socket_path: str,
    *flags: str,
    program: Sequence[str] = ("-m", "kvpool.cli"),
) -> Iterator[str]:
    """`kvpool router` beside that daemon. Gives its URL. program: what Python runs as `kvpool`."""
    command = [
        *ENDS_WITH_PARENT,
        *(sys.executable, *program, "router"),
        *("--socket", socket_path, "--listen", "127.0.0.1:0", *flags),
    ]
    child = Child(name, command, folder)
    try:
        ready = re.search(r"http://\S+?(?=,|\s)", child.line(START_S))
        if ready is None:
            raise Broken(f"the router does not say where it is\n{child.tail()}")
        yield ready[0]
    finally:
        child.process.terminate()
        child.stop()


ENVIRONMENT = {
    # One OpenMP thread, on a core of its own: vLLM takes all cores otherwise, whose threads spin
    # between parallel regions and keep every other process waiting for the kernel's next tick.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(CORES[0]),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def kvpool_transfer(socket_path: str, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvpoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": socket_path, **extra},
    }


PEER_TRANSFER = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}

PEER_STORE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"setup: {code}", flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def peer_store(
    folder: Path, segment_bytes: int = 512 << 20, python: Path = VLLM_PYTHON
) -> Iterator[dict[str, str]]:
    """The peer's master and a process that holds its segment. Gives the engines' environment.

    python: of an environment that has the peer. Raises `Broken` where its wheel is missing or cannot be loaded.
    """
    program = python.parent / "mooncake_master"
    if not program.exists():
        raise Broken("the peer's wheel (mooncake-transfer-engine-non-cuda) is not installed")
    port, admin = free_port(), free_port()
    command = [*ENDS_WITH_PARENT, str(program), f"--port={port}", f"--metrics_port={admin}"]
    master = Child("peer-master", command, folder)
    address = f"127.0.0.1:{port}"
    store = None
    try:
        wait_for_port(port, master)
        store = Child(
            "peer-store",
            [str(python), "-c", PEER_STORE, address, str(segment_bytes)],
            folder,
        )
        while not (line := store.line(START_S)).startswith("ready"):
            if line.startswith("setup"):
                raise Broken(f"the peer's store did not start: {line}\n{store.tail()}")
        config = folder / "peer.json"
        config.write_text(
            json.dumps(
                {
                    "mode": "standalone-store",
                    "protocol": "tcp",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": address,
                    "global_segment_size": 0,
                    "local_buffer_size": 256 << 20,
                }
            )
        )
        yield {
            "MOONCAKE_CONFIG_PATH": str(config),  # which vLLM reads; SGLang reads the others
            "MOONCAKE_MASTER": address,
            "MOONCAKE_MASTER_METRICS_PORT": str(admin),
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        }
    finally:
        if store is not None:
            store.stop()
        master.process.terminate()
        master.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, child: Child) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if child.process.poll() is not None:
            raise Broken(f"{child.name} ended with {child.process.returncode}\n{child.tail()}")
        time.sleep(0.05)
    raise Broken(f"{child.name} does not listen after {START_S:g} s\n{child.tail()}")


def tiny_model(kind: str = "llama", python: Path = VLLM_PYTHON) -> Path:
    """A model of `tiny_models.py`, made on first use. python: of an environment that has transformers."""
    out = ROOT / ".demo" / "models" / kind
    if not (out / "tokenizer.json").exists():
        script = str(ROOT / "bench" / "tiny_models.py")
        made = subprocess.run(
            [str(python), script, kind, str(out)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise Broken(f"the tiny model could not be made\n{made.stderr}")
    return out


def end_on_sigterm() -> None:
    """Let SIGTERM unwind like Ctrl-C does, so that every child is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def wait_for_blocks(socket_path: str, committed: int, parts: int = PARTS) -> None:
    """Wait until the daemon has committed so many blocks since it started. parts: of each; those of the tiny model."""
    wait_for_stats(
        socket_path,
        lambda stats: stats.counters.committed >= parts * committed,
        f"the pool did not get {committed} blocks",
    )


def wait_until_announced(socket_path: str) -> None:
    """Wait until the cluster's directory has all that this node holds."""
    wait_for_stats(
        socket_path,
        lambda stats: stats.cluster.directory is not None and stats.cluster.directory.settled,
        "the directory did not get the node's blocks",
    )


def counter(socket_path: str, name: str) -> int:
    """One of the daemon's counters."""
    with Client(socket_path) as client:
        return int(getattr(client.stats().counters, name))


def read_from_disk(socket_path: str) -> int:
    """Blocks that the daemon has read from its disks."""
    with Client(socket_path) as client:
        return sum(int(disk.read_blocks) for disk in client.stats().tiers.ssd)


def wait_for_stats(socket_path: str, good: Callable[[NodeStats], bool], otherwise: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    with Client(socket_path) as client:
        while not good(stats := client.stats()):
            if time.monotonic() > deadline:
                raise Broken(f"{otherwise}: {stats}")
            time.sleep(0.02)


def blocks_of(prompt_tokens: int, generated: int) -> int:
    """Whole blocks whose KV an engine computed: the last generated token's is not."""
    return (prompt_tokens + generated - 1) // BLOCK_TOKENS
