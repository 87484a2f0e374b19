"""Real daemons in processes of their own, each with its socket in a fresh folder."""

import contextlib
import itertools
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from kvpool.client import Client, OperatorClient
from kvpool.telemetry.memory_stats import TenantStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from tests.support.s3 import Proxy
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S, until

MIB = 1 << 20


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    """`until(condition, what)`: see `tests.support.waiting`."""
    return until


def clean_environ(home: Path, **extra: str) -> dict[str, str]:
    """The environment without any setting of ours, and with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    return {**kept, "HOME": str(home), "XDG_RUNTIME_DIR": str(home), **extra}


@pytest.fixture(name="clean_environ")
def clean_environ_fixture() -> Callable[..., dict[str, str]]:
    return clean_environ


def children(pid: int) -> list[int]:
    """The living child processes of a process, by the kernel's word."""
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in found.read_text().split()] if found.exists() else []


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Daemon:
    """One `kvpool serve` in its own process. `stderr` is all it has said, once it has ended.

    program: what runs the module that is named after it.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        config: str = "",
        program: Sequence[str] = (sys.executable, "-Walways::ResourceWarning", "-m"),
        **environ: str,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.socket = str(folder / "kvpool.sock")
        self.log = folder / f"stderr-{secrets.token_hex(4)}"
        if config:
            (folder / "kvpool.toml").write_text(config)
            (folder / "kvpool.toml").chmod(0o600)
            args = ("--config", str(folder / "kvpool.toml"), *args)
        if "--socket" not in args:
            args = ("--socket", self.socket, *args)
        self.command = [*program, "kvpool.cli", "serve", *args]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environ(folder, **environ),
            )
        self.ready = ""
        self.stack = contextlib.ExitStack()

    def wait_ready(self) -> Self:
        """Wait for the line that says so."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        self.ready = self.process.stdout.readline().decode() if readable else ""
        assert " ready: " in self.ready, f"{self.ready!r}, stderr: {self.stderr}"
        return self

    def wait_end(self, seconds: float = PATIENCE_S) -> int:
        """The exit status; also that of a daemon which refuses to start."""
        return self.process.wait(seconds)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return self.log.read_text()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            send(self.process.pid, number)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.signal(signal.SIGTERM)
        return self.wait_end()

    def kill(self) -> None:
        """SIGKILL to the control process alone; its transfer workers have to end by themselves."""
        self.signal(signal.SIGKILL)
        self.wait_end()

    def client(self, **settings: Any) -> OperatorClient:
        settings.setdefault("timeout_s", PATIENCE_S)
        return OperatorClient(self.socket, **settings)

    def raw(self) -> "Raw":
        """A raw connection, closed with the daemon."""
        return self.stack.enter_context(Raw(self.socket))

    def script(self, code: str) -> "Script":
        """Code in another process, which ends at the latest with the daemon."""
        return self.stack.enter_context(Script(self.socket, code))

    def stats(self) -> NodeStats:
        with Client(self.socket, timeout_s=PATIENCE_S) as client:
            return client.stats()

    def space(self) -> TenantStats:
        """Of the default tenant."""
        return self.stats().tenants["default"]

    def end(self) -> None:
        """Whatever state it is in."""
        self.stack.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def family(self) -> list[int]:
        """All its processes."""
        return [self.pid, *children(self.pid)]

    @staticmethod
    def alive(pid: int) -> bool:
        return alive(pid)


Start = Callable[..., Daemon]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A fresh folder whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="kvpool-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def start_one() -> Callable[..., contextlib.AbstractContextManager[Daemon]]:
    """For files whose tests share a daemon."""

    @contextlib.contextmanager
    def begin(*args: str, **settings: Any) -> Iterator[Daemon]:
        with tempfile.TemporaryDirectory(prefix="kvpool-test-") as folder:
            daemon = Daemon(Path(folder) / "node", *args, **settings)
            try:
                yield daemon.wait_ready()
            finally:
                daemon.end()

    return begin


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts daemons and waits until they are ready; all end with the test."""
    daemons: list[Daemon] = []

    def begin(*args: str, ready: bool = True, name: str = "node", **settings: Any) -> Daemon:
        # A tenant's table may name a size too: without one of its own, the default tenant takes a share of the
        # machine's memory, and a slow machine needs a minute to clear that.
        top_level = re.split(r"^\[", settings.get("config", ""), maxsplit=1, flags=re.MULTILINE)[0]
        if "--memory" not in args and "memory" not in top_level:
            args = ("--memory", "32MiB", *args)
        daemon = Daemon(folder / name, *args, **settings)
        daemons.append(daemon)
        return daemon.wait_ready() if ready else daemon

    yield begin
    for daemon in daemons:
        daemon.end()


@pytest.fixture
def daemon(start: Start) -> Daemon:
    """One daemon with 32 MiB."""
    return start()


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, int]]:
    """A server of the S3 protocol, moto's: its host and port. Tests have buckets of their own."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


_buckets = itertools.count()


@pytest.fixture
def proxy(s3: tuple[str, int]) -> Iterator[Proxy]:
    """Before that server, with a new bucket."""
    with Proxy(s3) as proxy:
        proxy.make_bucket(f"bucket-{next(_buckets)}")
        yield proxy


@pytest.fixture
def client(daemon: Daemon) -> Iterator[OperatorClient]:
    """A client of that daemon, patient enough for a busy machine."""
    with daemon.client(connect=True) as client:
        yield client


class Raw:
    """A connection that says exactly what a test wants it to say."""

    def __init__(self, path: str, timeout_s: float = PATIENCE_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(timeout_s)
        self.sock.connect(path)
        self.reader = frame.FrameReader()
        self.frames: list[tuple[int, bytes]] = []
        self.requests = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def hello(self, **fields: Any) -> Any:
        """The daemon's answer to a Hello that is right but for what is given."""
        right = {
            "version": frame.PROTOCOL_VERSION,
            "tenant": "default",
            "instance": "test",
            "client": secrets.token_hex(16),
            "token": None,
        }
        self.send(client_wire.Hello(**(right | fields)))
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 1)
        for fd in fds:
            os.close(fd)
        self.frames += self.reader.feed(data)
        return self.receive()[1]

    def send(self, message: frame.Message) -> int:
        self.requests += 1
        self.sock.sendall(frame.encode(message, self.requests))
        return self.requests

    def ask(self, message: frame.Message) -> Any:
        request = self.send(message)
        answered, answer = self.receive()
        assert answered == request
        return answer

    def receive(self) -> tuple[int, Any]:
        """The next answer and the request it is for."""
        while not self.frames:
            data = self.sock.recv(1 << 16)
            assert data, "the daemon closed the connection"
            self.frames += self.reader.feed(data)
        request, payload = self.frames.pop(0)
        return request, client_wire.decode_daemon(payload)

    def ended(self) -> bool:
        """Whether the daemon closed the connection; what it said before is thrown away."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True


class Script:
    """Python code in a process of its own, which tells the test what it does line by line.

    In it, `say(text)` sends a line, `hear()` waits for one, `SOCKET` is the daemon's.
    """

    PRELUDE = """
import os, signal, sys
def say(text): print(text, flush=True)
def hear(): return sys.stdin.readline().strip()
SOCKET = sys.argv[1]
import kvpool.client
from kvpool.client import Client, OperatorClient
from kvpool.types import NamespaceRecord
RECORD = NamespaceRecord.simple("script", block_bytes=4096, block_tokens=16)
def key(number): return number.to_bytes(16, "big")
def block(number): return bytes([number % 251]) * 4096
"""

    def __init__(self, socket_path: str, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PRELUDE + code, socket_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._said = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        """The next line; fails when there is none in time, or the process has ended."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        # Not `readline`: what it reads beyond the line, `select` would not know of.
        while b"\n" not in self._said:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self.process.stdout], [], [], left)
            data = os.read(self.process.stdout.fileno(), 1 << 16) if readable else b""
            assert data, f"the script said nothing more than {self._said!r}"
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode().strip()

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            send(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Close its input and wait."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
