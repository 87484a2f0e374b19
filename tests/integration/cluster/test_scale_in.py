"""A node is taken away as an autoscaler does it: its engine at the routers first, then what only the node has."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.placement.records import NodeState
from tests.integration.cluster.conftest import keys_of
from tests.integration.test_cluster_cli import Commands, hear
from tests.support.programs import program
from tests.support.waiting import PATIENCE_S


def ask(url: str, body: Any = None, method: str | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def complete(url: str) -> None:
    ask(f"{url}/v1/completions", {"model": "stub", "prompt": "hello there", "max_tokens": 2})


def seen(engine: str) -> list[dict[str, Any]]:
    """Requests of clients that came to an engine."""
    found: list[dict[str, Any]] = ask(f"{engine}/stub/state")["requests"]
    return [each for each in found if each["request_id"]]


def state_of(url: str, name: str) -> str:
    (state,) = [row["state"] for row in ask(f"{url}/engines")["engines"] if row["name"] == name]
    return str(state)


@contextlib.contextmanager
def streaming(url: str) -> Iterator[None]:
    """A stream through the router that has begun; the client goes away at the end."""
    host = url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE_S)) as connection:
        body = {"model": "stub", "prompt": "a b c", "max_tokens": 200, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline()
        yield
        answer.close()


@pytest.fixture
def kvpool(clean_environ: Any, tmp_path: Path) -> Commands:
    return Commands(clean_environ(tmp_path))


def test_an_engine_finishes_and_what_only_its_node_has_goes_elsewhere(
    start_cluster: Any, numbers: Any, kvpool: Commands, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    sole = numbers(100)
    a.put(sole)
    until(lambda: a.announced)
    # The node cannot leave, within a second of its last word, before the command has seen that.
    lease = a.client.acquire(a.ns, keys_of(sole[:1]), lease_s=PATIENCE_S)
    with contextlib.ExitStack() as stack:
        engines = {
            name: json.loads(
                stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
            )["url"]
            for name in "ab"
        }
        flags = [f"{url},node={name},name=e-{name}" for name, url in engines.items()]
        line = stack.enter_context(
            program(
                *("kvpool.cli", "router", "--listen", "127.0.0.1:0", "--no-daemon"),
                *(word for flag in flags for word in ("--engine", flag)),
            )
        )
        router = line.split("router at ")[1].split(",")[0].split()[0]
        until(lambda: {state_of(router, f"e-{name}") for name in "ab"} == {"serving"})
        # The engine on a answers a stream, which does not end by itself.
        ask(f"{engines['a']}/stub/faults", [{"kind": "hang", "after_tokens": 2}])
        ask(f"{router}/engines/e-b/drain", {})
        with streaming(router):
            assert [each["outcome"] for each in seen(engines["a"])] == ["running"]
            ask(f"{router}/engines/e-b/drain", method="DELETE")
            drain = stack.enter_context(
                kvpool.begin(b.node, *("drain", "a", "--router", router, "--timeout", "600"))
            )
            stack.callback(drain.kill)
            until(lambda: state_of(router, "e-a") == "draining")
            for _ in range(4):
                complete(router)
            assert len(seen(engines["a"])) == 1
            assert len(seen(engines["b"])) == 4
            # The node itself goes on, since the engine may yet store something.
            assert b.members["a"]["state"] == NodeState.SERVING
            assert drain.poll() is None
        hear(drain, "waiting for 1 lease to end")
        lease.release()
        a.client.stats()  # carries the release
        out, err = drain.communicate(timeout=PATIENCE_S)
        assert drain.returncode == 0, err
        assert "engines that are drained: e-a; no requests are left at the engines" in out
        assert "100 blocks that only it held were copied to others" in out
        world.node("a").stop()
        until(lambda: b.announced)
        assert b.read(sole) == 100
        complete(router)
        assert len(seen(engines["a"])) == 1


def test_a_time_limit_ends_it_and_it_can_be_taken_back(
    start_cluster: Any, numbers: Any, kvpool: Commands, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    sole = numbers(10)
    a.put(sole)
    until(lambda: a.announced)
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        engine = json.loads(line)["url"]
        line = stack.enter_context(
            program(
                *("kvpool.cli", "router", "--listen", "127.0.0.1:0", "--no-daemon"),
                *("--engine", f"{engine},node=a,name=e"),
            )
        )
        router = line.split("router at ")[1].split(",")[0].split()[0]
        until(lambda: state_of(router, "e") == "serving")
        ask(f"{engine}/stub/faults", [{"kind": "hang", "after_tokens": 2}])
        with streaming(router):
            only = kvpool(b.node, "drain", "--engine", engine, "--router", router, "--timeout", "0")
            assert only.status == 1
            assert "after 0 s 1 engine still had requests: e" in only.err
            assert b.members["a"]["state"] == NodeState.SERVING
            # With a node, its blocks go elsewhere although the engine does not end in its half of the time.
            both = kvpool(b.node, "drain", "a", "--router", router, "--timeout", "8")
            assert both.status == 1
            assert "after 4 s 1 engine still had requests: e" in both.err
            until(lambda: "a" not in b.members)
            assert b.read(sole) == 10
        back = kvpool(b.node, "drain", "a", "--router", router, "--cancel")
        assert back.status == 0
        assert "engines that get requests again: e" in back.out
        until(lambda: state_of(router, "e") == "serving")
        until(lambda: "a" in b.members)
