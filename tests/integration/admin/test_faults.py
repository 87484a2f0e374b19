"""What breaks, hangs, floods: the gateway answers in time, or comes back."""

import contextlib
import os
import signal
import socket
import time

import pytest

from kvpool.admin.api import BODY_BYTES_MAX, OF_TOKEN_MAX
from tests.integration.admin.conftest import Gate, gateway_pid, open_gate
from tests.integration.cluster.conftest import PLAIN
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

DIGEST = PLAIN.digest().hex()


@pytest.fixture
def pair(start_cluster, tmp_path):
    # Who hangs is a member still.
    world = start_cluster(nodes=1, environ={"KVPOOL_MEMBER_TTL_S": "120"})
    world.gate = open_gate(world, tmp_path)
    return world


def test_a_node_that_hangs_is_named_and_the_others_answer(pair, numbers, until):
    gate = pair.gate
    a, g = pair.seats()
    a.put(numbers(3))
    g.put(numbers(4))
    pair.node("a").signal(signal.SIGSTOP)
    try:
        until(lambda: list(gate.get("/v1/tenants")["unreachable"]) == ["a"])
        assert gate.get("/v1/tenants")["items"][0]["nodes"] == 1
        found = gate.get(f"/v1/namespaces/{DIGEST}")
        assert found["nodes"]["g"]["blocks"] == [4] and list(found["unreachable"]) == ["a"]
        assert list(gate.get("/v1/jobs")["unreachable"]) == ["a"]
        job = gate.change("POST", "/v1/jobs", {"spec": {"kind": "scrub"}})
        assert "a" in job["unreachable"] and [each["node"] for each in job["nodes"]] == ["g"]
        assert gate.ask("GET", "/v1/nodes/a").code == "unavailable"
        assert gate.ask("GET", "/v1/nodes/g").status == 200
    finally:
        pair.node("a").signal(signal.SIGCONT)


def test_a_gateway_that_is_killed_comes_back(pair, until):
    gate, node = pair.gate, pair.node("g")
    for _ in range(3):
        old = gateway_pid(node)
        os.kill(old, signal.SIGKILL)
        until(lambda old=old: gateway_pid(node) not in {0, old})
        gate.wait()
    assert gate.get("/v1/me")["name"] == "root"
    assert node.process.poll() is None


def test_a_gateway_dies_with_its_daemon(pair, until):
    pid = gateway_pid(pair.node("g"))
    pair.node("g").kill()
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_daemon_that_is_restarted_has_its_gateway_again(pair):
    pair.node("g").restart()
    assert pair.gate.wait().get("/v1/cluster")["node"] == "g"


def test_a_daemon_that_hangs_is_told_of_and_goes_on(pair, until):
    """Only the control process: its gateway answers, and says what is the matter."""
    gate, node = pair.gate, pair.node("g")
    node.signal(signal.SIGSTOP, workers=False)
    try:
        assert gate.of("").ask("GET", "/healthz").status == 200
        until(lambda: gate.of("").ask("GET", "/readyz").status == 503)
        assert gate.ask("GET", "/v1/jobs").code == "unavailable"
    finally:
        node.signal(signal.SIGCONT, workers=False)
    gate.wait()


def test_an_address_in_use_is_said_and_tried_again(start, until, folder):
    port = free_port()  # nobody else's when it is given up
    with socket.create_server(("127.0.0.1", port)):
        daemon = start("--http", f"127.0.0.1:{port}")
        until(lambda: f"cannot listen on 127.0.0.1:{port}" in daemon.stderr)
        with daemon.client(connect=True) as client:
            assert client.stats().node, "it is a daemon all the same"
    Gate(port, (daemon.folder / "http.token").read_text().strip()).wait()


def raw(gate, data, seconds=PATIENCE_S):
    """What comes back for these bytes, and how long until the connection ended."""
    begun = time.monotonic()
    with gate.connect() as sock:
        sock.settimeout(seconds)
        found = b""
        # Who has enough closes with the rest unread, which ends what is still sent, and not what was answered.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                found += piece
    return found, time.monotonic() - begun


def head(gate, *lines):
    return "\r\n".join(
        (
            "GET /v1/me HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {gate.token}",
            *lines,
            "",
            "",
        )
    ).encode()


def test_heads_that_are_too_large(gate):
    for lines in (
        ["x: " + "y" * 9000],
        [f"x-{n}: y" for n in range(200)],
        [f"x-{n}: " + "y" * 8000 for n in range(60)] + [f"z-{n}: 1" for n in range(30)],
    ):
        found, _ = raw(gate, head(gate, *lines))
        assert found.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431")), found[:100]
    found, _ = raw(gate, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")
    assert b" 400 " in found.split(b"\r\n")[0] or b" 414 " in found.split(b"\r\n")[0]
    assert gate.get("/v1/me")


def test_bodies_that_are_too_large(gate):
    answer = gate.ask("POST", "/v1/pins", b" " * (BODY_BYTES_MAX + 1))
    assert (answer.status, answer.code) == (413, "too_large")
    begin = (
        f"POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gate.token}\r\n"
        "Content-Type: application/json\r\n"
    ).encode()
    found, _ = raw(gate, begin + b"Content-Length: 99999999999\r\n\r\n{}")
    assert b" 413 " in found.split(b"\r\n")[0]
    chunks = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    found, _ = raw(gate, begin + b"Transfer-Encoding: chunked\r\n\r\n" + 5 * chunks + b"0\r\n\r\n")
    assert b" 413 " in found.split(b"\r\n")[0] or found == b""
    assert gate.get("/v1/me")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/ui/", "/v1/me"])
def test_a_body_that_nobody_takes_is_not_waited_for(gate, path):
    """Whoever needs no token could keep all the places by promising one."""
    begin = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gate.token}\r\n"
    for body in ("Content-Length: 100\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n"):
        found, _ = raw(gate, (begin + body).encode())
        assert found.startswith(b"HTTP/1.1 400") and b"must not have a body" in found


def test_the_requests_of_one_token_leave_others_places(gate, until):
    begin = (
        f"POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gate.tokens['redop']}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    ).encode()
    socks = []
    try:
        for _ in range(OF_TOKEN_MAX):
            socks.append(gate.connect())
            socks[-1].sendall(begin)
        red = gate.of("redop")
        refused = until(lambda: (a := red.ask("GET", "/v1/me")).status == 429 and a)
        assert refused.code == "limit" and "in progress" in refused.json["detail"]
        assert gate.of("redeye").get("/v1/me")["name"] == "redeye"
    finally:
        for sock in socks:
            sock.close()
    until(lambda: red.ask("GET", "/v1/me").status == 200)


@pytest.mark.slow
def test_slow_ones_are_let_go(gate):
    """Heads and bodies that do not come, and connections that say nothing."""
    body = (
        f"POST /v1/pins HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gate.token}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
    ).encode()
    with gate.connect() as silent, gate.connect() as half, gate.connect() as bodiless:
        half.sendall(b"GET /v1/me HTTP/1.1\r\nHost: loc")
        bodiless.sendall(body)
        for sock in (silent, half, bodiless):
            sock.settimeout(60)
        assert b" 408 " in bodiless.recv(1000)
        assert half.recv(1000) == b"" and silent.recv(1000) == b""
    assert gate.get("/v1/me")


def test_many_connections_do_not_keep_others_out(gate, two):
    """More than are kept: the later ones are closed, and when they have gone there is room."""
    socks = []
    try:
        socks.extend(gate.connect() for _ in range(560))
    finally:
        for sock in socks:
            sock.close()
    gate.wait()
    assert gateway_pid(two.node("g"))
