"""What happens, told as it happens: nothing is missed by those who come back."""

import contextlib
import http.client
import json
import os
import signal
import threading
import time

import pytest

from kvpool.admin.event_feed import NODES_LOOK_S
from kvpool.secret_files import write_whole
from tests.integration.admin.conftest import Gate, gateway_pid, open_gate
from tests.support.waiting import PATIENCE_S

PIN = {"keys": ["1" * 32], "kind": "soft"}


class Stream:
    """Server-sent events. `events`: (id, kind, data) as they come."""

    def __init__(self, gate, path="/v1/events", last=None, timeout_s=PATIENCE_S):
        self.connection = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {gate.token}"}
        if last is not None:
            headers["Last-Event-ID"] = last
        self.connection.request("GET", path, headers=headers)
        self.answer = self.connection.getresponse()

    def __enter__(self):
        assert self.answer.status == 200
        assert self.answer.getheader("Content-Type") == "text/event-stream"
        return self

    def __exit__(self, *_):
        self.answer.close()
        self.connection.close()

    def next(self):
        """The next event: (id, kind, data); comments are passed over."""
        found = {}
        while True:
            line = self.answer.readline().decode().rstrip("\n")
            if line.startswith((":", "retry:")):
                continue
            if line:
                name, _, value = line.partition(": ")
                found[name] = value
            elif found:
                return found.get("id"), found["event"], json.loads(found["data"])

    def pins(self, count):
        """So many events of pins."""
        found = []
        while len(found) < count:
            ident, kind, data = self.next()
            if kind == "change" and data["details"]["what"] == "pin":
                assert ident == f"{data['node']}:{data['number']}"
                found.append((ident, data))
        return found


@pytest.fixture
def pair(start_cluster, tmp_path):
    world = start_cluster(nodes=1)
    world.gate = open_gate(world, tmp_path)
    world.folder = tmp_path
    return world


def pin(gate, node):
    """One event of the node."""
    assert gate.change("POST", f"/v1/pins?node={node}", PIN)["nodes"].keys() == {node}


def test_events_of_all_nodes_come(pair):
    with Stream(pair.gate) as stream, Stream(pair.gate, "/v1/events?nodes=a") as only:
        for node in ("a", "g", "a"):
            pin(pair.gate, node)
        assert sorted(data["node"] for _, data in stream.pins(3)) == ["a", "a", "g"]
        assert [data["node"] for _, data in only.pins(2)] == ["a", "a"]


def test_what_was_missed_comes(pair):
    gate = pair.gate
    with Stream(gate) as stream:
        pin(gate, "a")
        ((seen, _),) = stream.pins(1)
    for node in ("a", "g", "a", "g"):
        pin(gate, node)
    with Stream(gate, last=seen) as stream:
        found = stream.pins(4)
        assert sorted(data["node"] for _, data in found) == ["a", "a", "g", "g"]
        assert seen not in [ident for ident, _ in found]
    with Stream(gate, "/v1/events?replay=2") as stream:
        assert len(stream.pins(2)) == 2


def test_what_is_not_remembered_is_told(pair):
    with Stream(pair.gate, last="a:999999") as stream:
        ident, kind, data = stream.next()
        assert (ident, kind) == (None, "gap") and data["why"]


def test_a_new_gateway_goes_on(pair, until):
    """Killed, and another one is there: what happened meanwhile is told, from the nodes' journals."""
    gate = pair.gate
    with Stream(gate) as stream:
        pin(gate, "a")
        ((seen, _),) = stream.pins(1)
    old = gateway_pid(pair.node("g"))
    os.kill(old, signal.SIGKILL)
    seat = pair.seat("a")
    for _ in range(3):
        seat.client.pin_blocks(b"2" * 16, "soft", digest=seat.ns.digest)
    until(lambda: gateway_pid(pair.node("g")) not in {0, old})
    gate.wait()
    with Stream(gate, last=seen) as stream:
        found = dict(stream.pins(3))
        assert len(found) == 3 and seen not in found


def test_a_node_that_was_restarted_is_heard_again(pair, until):
    gate = pair.gate
    with Stream(gate) as stream:
        pin(gate, "a")
        stream.pins(1)
        pair.node("a").restart()
        gate.wait()
        until(lambda: gate.patient("POST", "/v1/pins?node=a", PIN).json.get("nodes"))
        assert stream.pins(1)[0][1]["node"] == "a"


def test_a_tenant_hears_of_itself_alone(two):
    gate = two.gate
    with Stream(gate.of("redeye")) as stream:
        for tenant in ("blue", "default", "red"):
            gate.change("POST", f"/v1/pins?node=a&tenant={tenant}", PIN)
        ((_, data),) = stream.pins(1)
        assert data["details"]["tenant"] == "red"


def test_a_stream_ends_with_its_token(pair, until):
    """Who has opened it hears nothing more when the token is taken back."""
    (file,) = pair.folder.glob("tokens-*.toml")
    with Stream(pair.gate.of("eye")) as stream:
        pin(pair.gate, "a")
        assert stream.pins(1)
        left = [e for e in file.read_text().split("\n\n") if 'name = "eye"' not in e]
        write_whole(file, "\n\n".join(left).encode())
        until(
            lambda: pair.gate.stranger(pair.gate.tokens["eye"]).ask("GET", "/v1/me").status == 401
        )
        pin(pair.gate, "a")
        assert b"change" not in stream.answer.read()
    assert pair.gate.get("/v1/me")["name"] == "root"


def test_so_many_listen_and_no_more(pair):
    gate = pair.gate
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(Stream(gate))
        refused = gate.ask("GET", "/v1/events")
        assert (refused.status, refused.code) == (429, "limit")
        stack.enter_context(Stream(gate.of("op")))


def test_one_who_does_not_read_holds_nobody_up(pair):
    """A listener that takes nothing is given up; the others hear all."""
    gate: Gate = pair.gate
    silent = gate.connect()
    silent.sendall(
        f"GET /v1/events?replay=1000 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {gate.token}\r\n\r\n".encode()
    )
    with silent, Stream(gate) as stream:
        heard = []
        thread = threading.Thread(target=lambda: heard.extend(stream.pins(300)))
        thread.start()
        seat = pair.seat("g")  # not through the gateway, which lets a token ask so many times only
        for _ in range(300):
            seat.client.pin_blocks(b"2" * 16, "soft", digest=seat.ns.digest)
        thread.join(PATIENCE_S)
        assert len(heard) == 300
        numbers = [data["number"] for _, data in heard]
        assert numbers == sorted(set(numbers))


def test_a_node_that_left_and_is_taken_back_is_not_heard_again(pair, until):
    """Its process lives on, and its journal with it."""
    gate = pair.gate

    def state() -> str:
        return next(
            (n["state"] for n in gate.get("/v1/nodes")["items"] if n["node"] == "a"), "gone"
        )

    pin(gate, "a")
    gate.change("POST", "/v1/operator/drain", {"node": "a"})
    until(lambda: state() == "gone")
    looked = time.monotonic() + 2 * NODES_LOOK_S  # by then the gateway has left it
    until(lambda: time.monotonic() > looked)
    gate.change("POST", "/v1/operator/drain", {"node": "a", "wanted": False})
    until(lambda: state() == "serving")
    pin(gate, "a")
    with Stream(gate, "/v1/events?replay=500") as stream:
        idents = []
        while len([i for i in idents if i[1]]) < 2:
            ident, kind, data = stream.next()
            idents.append((ident, kind == "change" and data["details"]["what"] == "pin"))
    names = [ident for ident, _ in idents if ident]
    assert len(names) == len(set(names)), names
    numbers = [int(name.partition(":")[2]) for name in names if name.startswith("a:")]
    assert numbers == sorted(numbers)
