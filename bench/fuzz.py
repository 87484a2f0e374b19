"""Does anything that comes from outside break the gateway or the daemon? REST and wire inputs, from a seed.

    python bench/fuzz.py --count 20000 --seed 1 --json

Two kinds, half of each. REST: requests that are right by the description, with parts replaced, cut, repeated or
flooded, and raw bytes. Wire: frames of real messages to the control socket, with bytes and fields changed, as an
operator's. Counted: processes that died, answers of 500, requests that nobody answered, and by how much the two
processes have grown in the second half, when what they remember of the past is as much as they ever remember. Exit
status 1 if any died, there was a 500 or no answer, or one has grown by more than 32 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import secrets
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from kvpool.client import Client
from kvpool.net import operator_socket_of
from kvpool.types import NamespaceRecord
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from tests.fuzz.mutation import damaged, with_surplus
from tests.support.local_cluster import SECRET, LocalNode
from tests.support.servers.etcd import free_port

RECORD = NamespaceRecord.simple("fuzz", block_bytes=256, block_tokens=16)
PATIENCE_S = 20.0
ALIVE_EVERY = 500
GREW_BYTES_MAX = 32 << 20
NO_NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e308)
STRANGE: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        1 << 63,
        1 << 70,
        1e308,
        "",
        "x",
        "\0",
        "a" * 5000,
        "../..",
        "%00",
        "é\u202e",
    ),
    *([], {}, [[]] * 50, {"kind": "evict"}, "0" * 32, "f" * 32, ["0" * 32] * 300),
)


class Rest:
    """Requests to the gateway. shapes: of its description."""

    def __init__(self, port: int, token: str, rng: random.Random) -> None:
        self._port = port
        self._token = token
        self._rng = rng
        status, body = self._send("GET", "/openapi.json", None, {})
        assert status == 200, body
        self._document = json.loads(body)
        self._shapes = [
            (method.upper(), path, about)
            for path, methods in self._document["paths"].items()
            for method, about in methods.items()
            if path != "/v1/events"
        ]

    def one(self) -> int:
        """The status; 0: the connection ended without one, as it may after what is no HTTP."""
        rng = self._rng
        if rng.random() < 0.1:
            return self._raw()
        method, path, about = rng.choice(self._shapes)
        query = []
        for each in about["parameters"]:
            value = self._value(each["schema"], each["name"])
            text = value if isinstance(value, str) else json.dumps(value)
            if each["in"] == "path":
                path = path.replace(f"{{{each['name']}}}", _quoted(text))
            elif each["in"] == "query" and rng.random() < 0.5:
                query.append(f"{each['name']}={_quoted(text)}")
        if rng.random() < 0.1:
            query.append(
                f"{rng.choice(['x', 'limit', 'cursor', 'tenant'])}={_quoted(str(rng.choice(STRANGE)))}"
            )
        body = None
        if "requestBody" in about:
            body = json.dumps(
                self._shape(about["requestBody"]["content"]["application/json"]["schema"])
            ).encode()
            if rng.random() < 0.2:
                body = damaged(body, rng)
        if rng.random() < 0.05:
            method = rng.choice(["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "BREW"])
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if rng.random() < 0.1:
            headers["Idempotency-Key"] = str(rng.randrange(50))
        if rng.random() < 0.05:
            headers[
                rng.choice(["Host", "Origin", "Last-Event-ID", "x-request-id", "Content-Type"])
            ] = rng.choice(["evil", "a b", "x" * 3000, "null", "text/plain"])
        return self._send(method, path + ("?" + "&".join(query) if query else ""), body, headers)[0]

    def _shape(self, schema: dict[str, Any], depth: int = 0) -> Any:
        """Something of this schema, or nearly."""
        rng = self._rng
        if rng.random() < 0.08 or depth > 6:
            return rng.choice(STRANGE)
        if "$ref" in schema:
            return self._shape(
                self._document["components"]["schemas"][schema["$ref"].rpartition("/")[2]],
                depth + 1,
            )
        if "anyOf" in schema:
            return self._shape(rng.choice(schema["anyOf"]), depth + 1)
        match schema.get("type"):
            case "object":
                found = {
                    name: self._shape(inner, depth + 1)
                    for name, inner in schema.get("properties", {}).items()
                    if name in schema.get("required", ()) or rng.random() < 0.4
                }
                if rng.random() < 0.05:
                    found["strange"] = rng.choice(STRANGE)
                return found
            case "array":
                return [
                    self._shape(schema.get("items", {}), depth + 1) for _ in range(rng.randrange(4))
                ]
            case _:
                return self._value(schema)

    def _value(self, schema: dict[str, Any], name: str = "") -> Any:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(STRANGE)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        match schema.get("type"):
            case "integer" | "number":
                return rng.choice(
                    [schema.get("minimum", 0), schema.get("maximum", 5), rng.randrange(100)]
                )
            case "boolean":
                return rng.random() < 0.5
            case _:
                digest = RECORD.digest().hex()
                return rng.choice(
                    [digest, "n", "0" * 31 + "1", "default", "", secrets.token_hex(16), name]
                )

    def _raw(self) -> int:
        rng = self._rng
        request = (
            f"POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._token}\r\n"
            "Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        ).encode()
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port), PATIENCE_S) as sock,
        ):
            sock.sendall(damaged(request, rng))
            sock.shutdown(socket.SHUT_WR)
            found = sock.recv(100)
            if found.startswith(b"HTTP/1."):
                return int(found.split(b" ")[1])
        return 0

    def _send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        named = {"Authorization": f"Bearer {self._token}", **headers}
        connection = http.client.HTTPConnection("localhost", self._port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, body, named)
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (http.client.HTTPException, ConnectionError, UnicodeError, ValueError):
                return 0, b""  # it was no HTTP, and has been hung up on
            except TimeoutError:
                return -1, b""


class Wire:
    """Frames to the operators' socket."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self._path = path
        self._rng = rng
        digest, key = RECORD.digest(), bytes(15) + b"\1"
        self._messages: tuple[frame.Message, ...] = (
            *(
                operator_wire.Cluster(),
                operator_wire.Inspect(),
                operator_wire.Settings(),
                operator_wire.Jobs(),
                operator_wire.Events(0, 10),
            ),
            *(
                operator_wire.Locate(key, digest),
                operator_wire.ListBlocks("dram", "", 10, digest),
                operator_wire.ShowBlocks(digest, key),
            ),
            *(
                operator_wire.Evict(key, digest),
                operator_wire.PinBlocks(key, "soft", digest),
            ),
            *(
                client_wire.Prefixes(digest, key, 0.1),
                operator_wire.StopJob("j"),
                operator_wire.Clear(digest),
                operator_wire.Drain("n"),
            ),
            *(
                operator_wire.Configure(digest, ttl_s=1.0),
                operator_wire.ChangeSettings(b'{"forward":true}'),
            ),
            operator_wire.BeginJob("j", b'{"kind":"evict","keys":["' + b"0" * 32 + b'"]}'),
        )

    def one(self) -> int:
        """How many frames came back; -1: the daemon neither answered nor hung up."""
        rng = self._rng
        hello = client_wire.Hello(frame.PROTOCOL_VERSION, "default", "fuzz", secrets.token_hex(8))
        with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(self._path)
            first = frame.encode(hello, 1)
            if rng.random() < 0.1:
                sock.sendall(damaged(first, rng))
                sock.shutdown(socket.SHUT_WR)
                return _drained(sock)
            sock.sendall(first)
            _, fds, _, _ = socket.recv_fds(sock, 1 << 16, 2)
            for fd in fds:
                os.close(fd)
            for number in range(rng.randrange(1, 6)):
                sock.sendall(self._frame(number + 2))
            sock.shutdown(socket.SHUT_WR)
            return _drained(sock)
        return 0

    def _frame(self, request: int) -> bytes:
        rng = self._rng
        message = rng.choice(self._messages)
        if rng.random() < 0.5:
            inner = frame.encode(message, 0)[frame.HEADER.size :]
            message = operator_wire.OnNode(
                rng.choice(["", "n", "z"]), inner, rng.choice([0.0, 0.1]), "", "fuzz"
            )
        plain = msgspec.msgpack.decode(frame.encode(message, 0)[frame.HEADER.size :])
        for _ in range(rng.randrange(3)):
            if len(plain) > 1:
                plain[rng.randrange(1, len(plain))] = rng.choice(
                    (
                        *STRANGE[:4],
                        *STRANGE[6:8],
                        b"",
                        bytes(16),
                        bytes(17),
                        b"\xff" * 300,
                        [],
                        {},
                        -1,
                        *NO_NUMBERS,
                    )
                )
        payload = msgspec.msgpack.encode(plain)
        if rng.random() < 0.1:
            payload = with_surplus(payload, rng)
        if rng.random() < 0.2:
            payload = damaged(payload, rng)
        return frame.HEADER.pack(len(payload), request) + payload


def _drained(sock: socket.socket) -> int:
    count = 0
    try:
        while sock.recv(1 << 16):
            count += 1
    except TimeoutError:
        return -1
    return count


def _quoted(text: str) -> str:
    return "".join(
        c if c.isalnum() and c.isascii() else "".join(f"%{b:02X}" for b in c.encode()) for c in text
    )


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _gateway(node: LocalNode) -> int:
    for pid in node.pids[1:]:
        with contextlib.suppress(OSError):
            if b"kvpool.admin" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def run(count: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvpool-fuzz-") as folder:
        environ = {
            "KVPOOL_HTTP": f"127.0.0.1:{port}",
            "KVPOOL_HTTP_RATE": "100000",
            "KVPOOL_MEMORY": "16MiB",
            "KVPOOL_CLUSTER_SECRET": SECRET,
        }
        node = LocalNode("n", Path(folder), [], environ)
        node.start()
        try:
            with Client(node.socket, connect=True) as client:
                space = client.open(RECORD)
                client.put(space, [bytes(15) + b"\1"], [bytes(256)])
                return _attack(
                    node, port, (Path(folder) / "http.token").read_text().strip(), count, rng
                )
        finally:
            node.stop()


def _attack(
    node: LocalNode, port: int, token: str, count: int, rng: random.Random
) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        assert time.monotonic() < deadline, node.said
        time.sleep(0.05)
    rest, frames = Rest(port, token, rng), Wire(operator_socket_of(node.socket), rng)
    gateway, daemon = _gateway(node), node.pid
    statuses: Counter[int] = Counter()
    unanswered = deaths = 0
    before = (_resident(daemon), _resident(gateway))
    begun = time.monotonic()
    for number in range(count):
        if number % 2:
            statuses[rest.one()] += 1
        else:
            unanswered += frames.one() < 0
        if number == count // 2:
            before = (_resident(daemon), _resident(gateway))
        if number % ALIVE_EVERY == 0 or number == count - 1:
            assert node.process is not None
            if node.process.poll() is not None:
                deaths += 1
                break
            if _gateway(node) != gateway:
                deaths, gateway = deaths + 1, _gateway(node) or gateway
    alive = node.process is not None and node.process.poll() is None
    after = (_resident(daemon), _resident(gateway)) if alive else before
    return {
        "count": count,
        "seconds": round(time.monotonic() - begun, 1),
        "deaths": deaths,
        "internal_errors": statuses[500],
        "unanswered": unanswered + statuses[-1],
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "daemon_grew_bytes": after[0] - before[0],
        "gateway_grew_bytes": after[1] - before[1],
        "said": node.said[-2000:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = run(given.count, given.seed)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            print(f"{name:20} {value}")
    grew = max(found["daemon_grew_bytes"], found["gateway_grew_bytes"])
    wrong = found["deaths"] or found["internal_errors"] or found["unanswered"]
    sys.exit(bool(wrong or grew > GREW_BYTES_MAX))


if __name__ == "__main__":
    main()
