"""Gateways of real daemons, and a plain client that shows what HTTP says."""

import contextlib
import http.client
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvpool.admin.tokens import add_token
from kvpool.errors import ConfigError
from tests.integration.cluster.conftest import (  # noqa: F401  (fixtures of this folder, too)
    World,
    numbers,
    servers,
    shared_cluster,
    start_cluster,
)
from tests.support.local_cluster import LocalNode
from tests.support.servers.chromium import chromium
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S, until

TENANTS = """
[tenants.default]
memory = "8MiB"
[tenants.red]
memory = "8MiB"
token = "the red tenant's own secret"
[tenants.blue]
memory = "8MiB"
token = "the blue tenant's own secret"
"""
TENANT_TOKENS = {
    "red": "the red tenant's own secret",
    "blue": "the blue tenant's own secret",
    "default": None,
}
# Name, role, tenants.
PRINCIPALS = (
    ("root", "admin", []),
    ("op", "operator", []),
    ("eye", "viewer", []),
    ("red", "admin", ["red"]),
    ("redop", "operator", ["red"]),
    ("redeye", "viewer", ["red"]),
    ("blue", "admin", ["blue"]),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium; where none can be had, its tests are skipped."""
    try:
        with chromium() as found:
            yield found
    except ConfigError as error:
        pytest.skip(str(error))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of a problem, which has its form."""
        found = self.json
        assert self.headers["content-type"].startswith("application/problem+json"), self
        assert set(found) == {"type", "title", "status", "detail", "code", "instance"}
        assert found["status"] == self.status and found["detail"]
        assert found["instance"].endswith(self.headers["x-request-id"])
        return found["code"]


def lacks_nodes(answer: Answer) -> bool:
    """Whether some did not answer in time."""
    if answer.status in {503, 504}:
        return True
    return b'"unreachable"' in answer.body and bool(answer.json.get("unreachable"))


@dataclass
class Gate:
    """A gateway and a token for it. Every request has a connection of its own.

    whole: of a cluster in which nothing is broken. A node that does not answer the gateway within its two seconds is
    waited for where something is looked at.
    """

    port: int
    token: str = ""
    unix: str = ""
    tokens: dict[str, str] = field(default_factory=dict)
    source: str = "127.0.0.1"
    whole: bool = False

    def stranger(self, token: str = "") -> "Gate":
        """Somebody at an address of their own, which others' wrong tokens are not counted for."""
        source = f"127.{secrets.randbelow(250) + 1}.{secrets.randbelow(250) + 1}.9"
        return Gate(self.port, token, self.unix, source=source)

    def of(self, name: str) -> "Gate":
        """The same with somebody else's token."""
        return replace(self, token=self.tokens.get(name, name))

    def connect(self) -> socket.socket:
        if self.unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(PATIENCE_S)
            try:
                sock.connect(self.unix)
            except OSError:
                sock.close()
                raise
            return sock
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S, (self.source, 0))

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """body: bytes as they are, else JSON. headers: with _ for -."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            named.setdefault("Authorization", f"Bearer {self.token}")
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        if raw is not None:
            named.setdefault("Content-Type", "application/json")
        connection = http.client.HTTPConnection("localhost", self.port, timeout=PATIENCE_S)
        connection.sock = self.connect()
        with contextlib.closing(connection):
            connection.request(method, path, raw, named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())

    def patient(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Asks again as often as it is told to wait: for a token's rate, or for others' jobs to end."""
        end = time.monotonic() + PATIENCE_S
        while (answer := self.ask(method, path, body, **headers)).status == 429:
            wait_s = float(answer.headers["retry-after"])
            assert time.monotonic() + wait_s < end, answer
            time.sleep(wait_s)
        return answer

    def get(self, path: str, **headers: str) -> Any:
        """The JSON of what is there."""

        def told() -> Answer | None:
            answer = self.patient("GET", path, **headers)
            return None if self.whole and lacks_nodes(answer) else answer

        answer = until(told, f"all nodes answer {path}")
        assert answer.status == 200, (path, answer)
        return answer.json

    def change(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = self.patient(method, path, body, **headers)
        assert answer.status in {200, 202}, (path, answer)
        return answer.json

    def every(self, path: str, **query: Any) -> list[Any]:
        """All items of all pages."""
        found, cursor, pages = [], "", 0
        while cursor is not None:
            words = {**query, "cursor": cursor}
            text = "&".join(f"{name}={quote(str(word))}" for name, word in words.items())
            page = self.get(f"{path}?{text}")
            assert len(page["items"]) <= int(query.get("limit", 100))
            found += page["items"]
            cursor = page["next"]
            pages += 1
            assert pages < 10_000
        return found

    def wait(self, path: str = "/readyz") -> "Gate":
        """Until it answers, and its daemon does."""

        def ready() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.ask("GET", path).status == 200
            return False

        until(ready, f"a gateway at {self.port or self.unix}")
        return self


def tokens_in(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file of tokens for all of `PRINCIPALS`, and these."""
    path = folder / f"tokens-{secrets.token_hex(4)}.toml"
    return path, {name: add_token(path, name, role, who) for name, role, who in PRINCIPALS}


def gateway_pid(node: LocalNode) -> int:
    """The process of a node's gateway."""
    for pid in node.pids[1:]:
        with contextlib.suppress(OSError):
            if b"kvpool.admin" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def open_gate(world: World, folder: Path, name: str = "g", **environ: str) -> Gate:
    """One more node with a gateway, whose tokens are `PRINCIPALS`'."""
    port = free_port()
    path, tokens = tokens_in(folder)
    node = world.make(
        name,
        environ={
            "KVPOOL_HTTP": f"127.0.0.1:{port}",
            "KVPOOL_HTTP_TOKENS": str(path),
            "KVPOOL_HTTP_RATE": "5000",  # so that tests may poll
            **environ,
        },
    )
    node.start()
    gate = Gate(port, tokens["root"], tokens=tokens).wait()
    wanted = {node.name for node in world.nodes if node.process is not None}
    until(lambda: {each["node"] for each in gate.get("/v1/nodes")["items"]} == wanted, "all nodes")
    return gate


def tenants_file(folder: Path) -> str:
    path = folder / "tenants.toml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def two(shared_cluster: Callable[..., Any], tmp_path_factory: Any) -> Iterator[World]:  # noqa: F811
    """Two nodes with three tenants, one of them with a gateway, for tests that break nothing. `gate` is its way in."""
    folder = tmp_path_factory.mktemp("gate")
    flags = ("--config", tenants_file(folder))
    with shared_cluster(
        nodes=1, flags=flags, environ={"KVPOOL_MEMORY": "8MiB"}, ssd="64MiB"
    ) as world:
        world.gate = replace(open_gate(world, folder), whole=True)
        yield world


@pytest.fixture
def gate(two: World) -> Gate:
    """As `root`."""
    found: Gate = two.gate  # type: ignore[attr-defined]
    return found


@pytest.fixture
def seat_of(two: World) -> Callable[..., Any]:
    """A client of a tenant at a node."""

    def make(node: str, tenant: str = "default", **settings: Any) -> Any:
        return two.seat(node, tenant=tenant, token=TENANT_TOKENS[tenant], **settings)

    return make
