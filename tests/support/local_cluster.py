"""A whole cluster on one machine: a real etcd, a real Redis, and daemons that join them.

    with LocalCluster(folder, nodes=3) as cluster:
        client = cluster.nodes[0].client()

All listens on loopback, on free ports; everything is in `folder` and ends with the `with`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvpool.client import OperatorClient
from tests.support.servers.etcd import Etcd, free_port
from tests.support.servers.redis import Redis
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S

KVPOOL = (sys.executable, "-m", "kvpool.cli")
SECRET = "a secret for one machine only"
UNHURRIED = {"KVPOOL_DIRECTORY_TIMEOUT_S": "20", "KVPOOL_MEMBER_TTL_S": "30"}
"""For daemons whose servers and peers are well, and machines that stand still for seconds: then a lookup in Redis is
late, which is a miss, and a lease ends, which is the end of an incarnation. Whoever waits for the end of a node that
was killed sets a shorter lease."""


class LocalNode:
    """One daemon of the cluster. `restart` begins a new incarnation under the same name and address.

    program: what is run in place of `kvpool`, for daemons that are to be wrong in some way, or elsewhere.
    environ: its settings, of its next life. host: the address that it listens on. advertise: the URL that peers are told, given the one it listens on; None: that one.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        program: Sequence[str] = KVPOOL,
        host: str = "127.0.0.1",
        advertise: Callable[[str], str] | None = None,
    ) -> None:
        self.name = name
        self.http = environ.get("KVPOOL_HTTP", "")
        self.socket = str(folder / f"{name}.sock")
        self.log = folder / f"{name}.log"
        self._said_before = 0
        self.url = f"tcp://{host}:{free_port()}"  # the same over restarts
        self._arguments = list(arguments)
        self.environ = dict(environ)
        self._program = list(program)
        if advertise is not None:
            self.environ["KVPOOL_ADVERTISE"] = advertise(self.url)
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def pids(self) -> list[int]:
        """The control process and its transfer workers."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            children = []  # it has just died
        return [self.pid, *map(int, children)]

    @property
    def said(self) -> str:
        """All that it has written to stderr since it was started last."""
        return self.log.read_text()[self._said_before :] if self.log.exists() else ""

    def start(self) -> None:
        """Start it and wait until it is ready. Raises `RuntimeError` with what it said if it is not."""
        self.begin()
        self.wait_ready()

    def begin(self) -> None:
        """Start it; `wait_ready` or `wait_end` has to follow."""
        self._said_before += len(self.said)
        command = [*self._program, "serve", "--socket", self.socket, "--node", self.name]
        command += ["--listen", self.url, *self._arguments]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVPOOL_")}
        environ |= self.environ
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ
            )

    def wait_ready(self) -> None:
        """Wait for the line that says so. Raises `RuntimeError` with what it said if it does not come."""
        assert self.process is not None, "not begun"
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        line = self.process.stdout.readline() if readable else ""
        if " ready: " not in line:
            self.kill()
            raise RuntimeError(f"node {self.name} did not start: {line}{self.said}")

    def wait_end(self, seconds: float = PATIENCE_S) -> int:
        """Its exit status, when it ends by itself. Raises `subprocess.TimeoutExpired`."""
        assert self.process is not None, "not begun"
        status = self.process.wait(seconds)
        self.kill()
        return status

    def client(self, **settings: Any) -> OperatorClient:
        settings.setdefault("timeout_s", PATIENCE_S)
        return OperatorClient(self.socket, **settings)

    def signal(self, number: int, *, workers: bool = True) -> None:
        """Send a signal to its control process, and to its transfer workers too, unless told otherwise."""
        for pid in self.pids if workers else [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                send(pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait. Its transfer workers end with it. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def terminate(self) -> None:
        """SIGTERM, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()

    def stop(self) -> None:
        """SIGTERM, and wait; whatever state it is in. Idempotent."""
        if self.process is None:
            return
        self.terminate()
        if self.process.poll() is None:
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def restart(self) -> None:
        """SIGTERM, if it runs, and a start at the same address."""
        self.stop()
        self.start()


class LocalCluster:
    """See the module. Owns its daemons, and its servers unless they are given.

    nodes: how many, named a, b, c, …; ssd: the size of a disk for each. flags: for all daemons. labels: per node, by name.
    environ: further settings of all daemons, KVPOOL_*. name: of the cluster, for several on one etcd.
    etcd, redis: the servers, to be killed and restarted by tests; started here unless given.
    etcd_url: by node, where it finds etcd instead, such as a proxy. directory: likewise, of Redis, for all.
    advertise: by node and its URL, what its peers are told instead. http: whether each has a gateway.
    program: by node, of those that `make` is given none for.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        memory: str = "256MiB",
        ssd: str = "",
        etcd_members: int = 1,
        flags: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
        name: str = "kvpool",
        etcd: Etcd | None = None,
        redis: Redis | None = None,
        etcd_url: Callable[[str], str] | None = None,
        directory: str | None = None,
        advertise: Callable[[str, str], str] | None = None,
        http: bool = False,
        program: Callable[[str], Sequence[str]] = lambda _: KVPOOL,
    ) -> None:
        self._folder = folder
        self._names = [chr(ord("a") + number) for number in range(nodes)]
        self._memory = memory
        self._ssd = ssd
        self._members = etcd_members
        self._flags = list(flags)
        self._labels = labels or {}
        self._environ = dict(environ or {})
        self.name = name
        self._given_etcd = etcd
        self._given_redis = redis
        self._etcd_url = etcd_url
        self._directory = directory
        self._advertise = advertise
        self._http = http
        self._program = program
        self._stack = contextlib.ExitStack()
        self.etcd: Etcd
        self.redis: Redis
        self.nodes: list[LocalNode] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.etcd = self._given_etcd or stack.enter_context(
                Etcd(self._folder / "etcd", members=self._members)
            )
            if self._given_redis is not None:
                self.redis = self._given_redis
            elif self._directory is None:
                self.redis = stack.enter_context(Redis(self._folder / "redis"))
            stack.callback(self.stop)
            begun = [self.make(name) for name in self._names]
            for node in begun:
                node.begin()
            for node in begun:
                node.wait_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stop(self) -> None:
        """All daemons, at a time: with a server away, each takes seconds to leave."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.stop()

    def wait_acquainted(self) -> None:
        """Wait until each daemon knows of all others. Raises `RuntimeError` when that takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        for node in self.nodes:
            with node.client(connect=True) as client:
                while client.stats().cluster.others < len(self.nodes) - 1:
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"node {node.name} does not see all others")
                    time.sleep(0.01)

    @property
    def directory_url(self) -> str:
        return self.redis.url if self._directory is None else self._directory

    def node(self, name: str) -> LocalNode:
        return next(node for node in self.nodes if node.name == name)

    def add(self, name: str, *extra: str) -> LocalNode:
        """Start one more daemon. It ends with the cluster."""
        node = self.make(name, *extra)
        node.start()
        return node

    def make(
        self,
        name: str,
        *extra: str,
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> LocalNode:
        """One more daemon, not started; environ: settings of its own. It ends with the cluster."""
        join = self.etcd.url if self._etcd_url is None else self._etcd_url(name)
        settings = {
            "KVPOOL_JOIN": join,
            "KVPOOL_DIRECTORY": self.directory_url,
            "KVPOOL_CLUSTER": self.name,
            "KVPOOL_CLUSTER_SECRET": SECRET,
            "KVPOOL_LABELS": self._labels.get(name, ""),
            "KVPOOL_MEMORY": self._memory,
            **self._environ,
            **(environ or {}),
        }
        if self._ssd:
            settings["KVPOOL_SSD"] = f"{self._folder / f'{name}-ssd'}={self._ssd}"
        if self._http:
            settings["KVPOOL_HTTP"] = f"127.0.0.1:{free_port()}"
        advertise = self._advertise
        node = LocalNode(
            name,
            self._folder,
            [*self._flags, *extra],
            settings,
            program=program or self._program(name),
            host=host,
            advertise=None if advertise is None else lambda url: advertise(name, url),
        )
        self.nodes.append(node)
        return node
