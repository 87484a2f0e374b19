"""Real Redis on loopback, in a private folder: one server, one behind Sentinels, or a Cluster.

Nothing is ever written to a disk but configuration: a server that is killed comes back empty.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import hiredis

from kvpool.errors import Unavailable
from tests.support.servers.certificates import Certificates
from tests.support.servers.etcd import free_port
from tests.support.servers.find import find_server
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S

STARTS_MAX = 5  # with another port each time: somebody may have taken one meanwhile
CLUSTER_SLOTS = 16384
SERVICE = "kvpool"


class Redis:
    """One server; ready when the `with` block begins, stopped when it ends. Its port stays the same.

    password: of everyone. tls: serve over TLS only, with these certificates; with `client_auth` only
        clients that show one which the authority has signed. options: more lines of configuration.
        announced: the port of loopback at which others reach it, such as a proxy's, given its own.
    One thread. Starting raises `Unavailable` with the end of its log when it does not come up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        password: str = "",
        tls: Certificates | None = None,
        client_auth: bool = False,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        announced: Callable[[int], int] | None = None,
    ) -> None:
        self.folder = folder
        self.password = password
        self.tls = tls
        self.port = 0
        self.announced_port = 0
        self.paused = False
        self.process: subprocess.Popen[bytes] | None = None
        self._options = options
        self._arguments = arguments
        self._announced = announced
        self._client_auth = client_auth
        self._context = None if tls is None else tls.client_context()

    # ---- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """The first start, or another one at the same port, after `kill` or `close`."""
        first = self.port == 0
        for attempt in range(STARTS_MAX):
            if first:
                self._choose_port()
            try:
                self._run()
            except Unavailable as error:
                self.close()
                if attempt == STARTS_MAX - 1 or "ddress already in use" not in str(error):
                    raise
            except BaseException:
                self.close()
                raise
            else:
                return
        raise AssertionError("unreachable: the last start returns or raises")

    def _run(self) -> None:
        self.paused = False
        command = [find_server("redis-server"), str(self._config), *self._arguments]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        wait_for(self._answers, f"a Redis at {self.address}", self.log_tail)

    def _answers(self) -> bool:
        if not self.alive:
            raise Unavailable(f"Redis did not start: {self.log_tail()}")
        try:
            self.command("PING")
        except Unavailable:
            return False
        return True

    def _choose_port(self) -> None:
        self.port = free_port()
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = [
            "bind 127.0.0.1",
            f"dir {self.folder}",
            f"port {0 if self.tls else self.port}",
            *self._options,
        ]
        sentinel = "--sentinel" in self._arguments
        self.announced_port = self.port
        if self._announced is not None:
            self.announced_port = self._announced(self.port)
            name = "sentinel announce" if sentinel else "replica-announce"
            lines += [f"{name}-ip 127.0.0.1", f"{name}-port {self.announced_port}"]
        if self.password:
            lines += [f"requirepass {self.password}", f"masterauth {self.password}"]
        if self.tls is not None:
            lines += [
                f"tls-port {self.port}",
                f"tls-cert-file {self.tls.server_cert}",
                f"tls-key-file {self.tls.server_key}",
                f"tls-ca-cert-file {self.tls.ca}",
                f"tls-auth-clients {'yes' if self._client_auth else 'no'}",
                "tls-replication yes",
            ]
        if not sentinel:
            lines += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        self._config.write_text("\n".join(lines) + "\n")

    @property
    def _config(self) -> Path:
        return self.folder / "redis.conf"

    @property
    def _log(self) -> Path:
        return self.folder / "redis.log"

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def restart(self) -> None:
        """SIGKILL, if it runs, and a start at the same port, with nothing in it."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it holds its connections, takes new ones, and answers nothing."""
        assert self.process is not None
        send(self.process.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.paused = False

    def close(self) -> None:
        """Stop it, paused or not. Idempotent; the folder is the caller's."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    # ---- what is asked of it --------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """As `kvpool serve --directory` takes it, without a password."""
        return f"{scheme(self.tls)}://{self.address}"

    def command(self, *words: str | int | bytes) -> Any:
        """One command on a connection of its own. Raises `Unavailable` on any refusal."""
        commands = [words]
        if self.password:
            commands.insert(0, ("AUTH", self.password))
        try:
            with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as plain:
                sock = plain
                if self._context is not None:
                    sock = self._context.wrap_socket(plain, server_hostname="localhost")
                with sock:
                    # hiredis' stub knows only tuples of one element.
                    sock.sendall(b"".join(hiredis.pack_command(c) for c in commands))  # type: ignore[arg-type]
                    replies = _receive(sock, len(commands))
        except OSError as error:
            raise Unavailable(f"Redis at {self.address} did not answer: {error}") from None
        for reply in replies:
            if isinstance(reply, hiredis.ReplyError):
                raise Unavailable(f"Redis at {self.address} refused {words[0]!r}: {reply}")
        return replies[-1]

    def info(self, section: str) -> dict[str, str]:
        lines = self.command("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def flush(self) -> None:
        """Lose all keys, while the server goes on."""
        self.command("FLUSHALL")


class RedisSentinel:
    """A primary, its replica, and the sentinels that make the one the other when it dies.

    Ready when the `with` block begins: the replica is in step, and all sentinels know it.
    servers: the two, in no order. password: of the servers; sentinel_password: of the sentinels.
    announced: as of `Redis`: all of them, and whoever asks a sentinel, use these ports.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sentinels: int = 1,
        password: str = "",
        sentinel_password: str = "",
        tls: Certificates | None = None,
        down_after_ms: int = 500,
        announced: Callable[[int], int] | None = None,
    ) -> None:
        self.tls = tls
        self.service = SERVICE
        self.servers = [
            Redis(folder / f"server-{n}", password=password, tls=tls, announced=announced)
            for n in (0, 1)
        ]
        self.sentinels: list[Redis] = []
        self._folder = folder
        self._sentinels = sentinels
        self._password = password
        self._sentinel_password = sentinel_password
        self._down_after_ms = down_after_ms
        self._announced = announced

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        primary, replica = self.servers
        primary.start()
        replica.start()
        replica.command("REPLICAOF", "127.0.0.1", primary.announced_port)
        wait_for(
            lambda: replica.info("replication")["master_link_status"] == "up",
            "a replica in step",
            replica.log_tail,
        )
        options = [
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary.announced_port} {self._sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE} {self._down_after_ms}",
            f"sentinel failover-timeout {SERVICE} 5000",
        ]
        if self._password:
            options.append(f"sentinel auth-pass {SERVICE} {self._password}")
        if self._sentinel_password:
            options.append(f"sentinel sentinel-pass {self._sentinel_password}")
        for number in range(self._sentinels):
            sentinel = Redis(
                self._folder / f"sentinel-{number}",
                password=self._sentinel_password,
                tls=self.tls,
                options=options,
                arguments=("--sentinel",),
                announced=self._announced,
            )
            self.sentinels.append(sentinel)
            sentinel.start()
        for sentinel in self.sentinels:
            wait_for(lambda s=sentinel: self._ready(s), "sentinels", sentinel.log_tail)  # type: ignore[misc]

    def _ready(self, sentinel: Redis) -> bool:
        replicas = [_pairs(r) for r in sentinel.command("SENTINEL", "replicas", SERVICE)]
        others = sentinel.command("SENTINEL", "sentinels", SERVICE)
        in_step = [r for r in replicas if r.get("master-link-status") == "ok"]
        return len(in_step) == 1 and len(others) == self._sentinels - 1

    @property
    def url(self) -> str:
        """As `kvpool serve --directory` takes it, without a password."""
        hosts = ",".join(f"127.0.0.1:{sentinel.announced_port}" for sentinel in self.sentinels)
        return f"{scheme(self.tls)}+sentinel://{hosts}/{SERVICE}"

    @property
    def primary(self) -> Redis:
        """By the word of the first sentinel that runs."""
        sentinel = next(one for one in self.sentinels if one.alive and not one.paused)
        _, port = sentinel.command("SENTINEL", "get-master-addr-by-name", SERVICE)
        return next(server for server in self.servers if server.announced_port == int(port))

    def fail_over(self) -> None:
        """Have the replica become the primary. Raises `Unavailable` if the first sentinel cannot do so now."""
        self.sentinels[0].command("SENTINEL", "FAILOVER", SERVICE)

    def close(self) -> None:
        """Stop everything. Idempotent."""
        for server in (*self.sentinels, *self.servers):
            server.close()


class RedisCluster:
    """A Cluster of primaries without replicas, with an equal share of the slots each.

    Ready when the `with` block begins: all nodes know one another and say that the cluster is well.
    full_coverage: whether all shards refuse everything while one of them is away. node_timeout_ms: for how long one
    may be silent before the others, and it itself, think that it is.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shards: int = 3,
        password: str = "",
        tls: Certificates | None = None,
        full_coverage: bool = False,
        node_timeout_ms: int = 2000,
    ) -> None:
        self.tls = tls
        options = [
            "cluster-enabled yes",
            f"cluster-node-timeout {node_timeout_ms}",
            f"cluster-require-full-coverage {'yes' if full_coverage else 'no'}",
            *(["tls-cluster yes"] if tls else []),
        ]
        self.shards = [
            Redis(folder / f"shard-{n}", password=password, tls=tls, options=options)
            for n in range(shards)
        ]

    def __enter__(self) -> Self:
        try:
            for shard in self.shards:
                shard.start()
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self) -> None:
        count = len(self.shards)
        for number, shard in enumerate(self.shards):
            first, end = (CLUSTER_SLOTS * n // count for n in (number, number + 1))
            shard.command("CLUSTER", "ADDSLOTS", *range(first, end))
            shard.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for shard in self.shards[1:]:
            self.shards[0].command("CLUSTER", "MEET", "127.0.0.1", shard.port)
        for shard in self.shards:
            wait_for(lambda s=shard: self._ready(s), "a cluster", shard.log_tail)  # type: ignore[misc]

    def _ready(self, shard: Redis) -> bool:
        lines = shard.command("CLUSTER", "INFO").decode().splitlines()
        info = dict(line.split(":", 1) for line in lines)
        owners = {int(primary[1]) for _, _, primary, *_ in shard.command("CLUSTER", "SLOTS")}
        return (
            info["cluster_state"] == "ok"
            and info["cluster_slots_assigned"] == str(CLUSTER_SLOTS)
            and owners == {one.port for one in self.shards}
        )

    def owner(self, key: str | bytes) -> Redis:
        """The shard that has a key now, by the word of the first that runs."""
        asked = next(shard for shard in self.shards if shard.alive)
        slot = asked.command("CLUSTER", "KEYSLOT", key)
        ranges = asked.command("CLUSTER", "SLOTS")
        port = next(int(p[1]) for first, last, p, *_ in ranges if first <= slot <= last)
        return next(shard for shard in self.shards if shard.port == port)

    def move(self, slots: Sequence[int], target: Redis) -> None:
        """Give slots to another shard. They must be empty, since their keys stay behind."""
        name = target.command("CLUSTER", "MYID")
        for shard in [target, *[s for s in self.shards if s is not target and s.alive]]:
            for slot in slots:
                shard.command("CLUSTER", "SETSLOT", slot, "NODE", name)

    @property
    def url(self) -> str:
        """As `kvpool serve --directory` takes it, without a password."""
        hosts = ",".join(shard.address for shard in self.shards)
        return f"{scheme(self.tls)}+cluster://{hosts}"

    def flush(self) -> None:
        for shard in self.shards:
            shard.flush()

    def close(self) -> None:
        """Stop all shards. Idempotent."""
        for shard in self.shards:
            shard.close()


def scheme(tls: Certificates | None) -> str:
    return "redis" if tls is None else "rediss"


def wait_for(condition: Callable[[], bool], what: str, log: Callable[[], str]) -> None:
    """Poll until it is so. Raises `Unavailable`, with the end of a log, when it does not become so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"not within {PATIENCE_S:g} s: {what}. {log()}")
        time.sleep(0.02)


def _receive(sock: socket.socket, wanted: int) -> list[Any]:
    """So many replies. Raises `OSError` when the connection ends before."""
    more = object()
    replies: list[Any] = []
    reader = hiredis.Reader(notEnoughData=more)
    while len(replies) < wanted:
        data = sock.recv(1 << 16)
        if not data:
            raise ConnectionError("it closed the connection")
        reader.feed(data)
        while (reply := reader.gets()) is not more:
            replies.append(reply)
    return replies


def _pairs(flat: Sequence[bytes]) -> dict[str, str]:
    words = [word.decode() for word in flat]
    return dict(zip(words[::2], words[1::2], strict=True))
