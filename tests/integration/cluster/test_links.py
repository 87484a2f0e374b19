"""What daemons have measured of their pulls decides at a router: one node's link is slow, which no label says."""

import contextlib
import json
import urllib.request
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvpool.router.hashing import none_hash
from kvpool.types import EngineRecord
from tests.support.programs import program
from tests.support.proxy import Fault, Proxy
from tests.support.waiting import PATIENCE_S

SLOW_BYTES_S = 2e6  # far below what a busy machine moves over loopback
BLOCK_TOKENS = 16
BLOCK_BYTES = 2 << 20
"""Of KV, as the engines say; nothing of it moves here."""


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.fixture
def seats(start_cluster: Any):
    """Nodes a, which is reached through a proxy that carries little, b and d."""
    target = []
    with Proxy(lambda: target[0]) as proxy:
        world = start_cluster(nodes=0, memory="64MiB", environ={"KVPOOL_PROBE_S": "0"})
        a = world.make("a", environ={"KVPOOL_ADVERTISE": proxy.url})
        target.append((urlsplit(a.url).hostname, urlsplit(a.url).port))
        for node in (a, world.make("b"), world.make("d")):
            node.start()
        proxy.set(Fault(bytes_s=SLOW_BYTES_S))
        yield world.seats()


def test_an_answer_goes_where_the_link_is_fast(seats: Any, numbers: Any, until: Any) -> None:
    a, b, d = seats
    engines = {"a": ("prefill", a), "b": ("prefill", b), "d": ("decode", d)}
    with contextlib.ExitStack() as stack:
        names = {}
        for name, (role, seat) in engines.items():
            line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
            url = json.loads(line)["url"]
            names[urlsplit(url).netloc] = name
            seat.client.engine.announce(
                seat.ns,
                EngineRecord(
                    url,
                    role=role,
                    model="stub",
                    groups=(0,),
                    hash_algorithm="sha256_cbor",
                    none_hash=none_hash("sha256_cbor").hex(),
                    block_tokens=BLOCK_TOKENS,
                    block_bytes=BLOCK_BYTES,
                    capacity_tokens=1 << 16,
                    step_tokens=2048,
                ),
            )
        line = stack.enter_context(
            program(
                *("kvpool.cli", "router", "--listen", "127.0.0.1:0"),
                *("--socket", str(b.node.socket)),
            )
        )
        router = line.split("router at ")[1].split(",")[0].split()[0]
        until(lambda: len(ask(f"{router}/engines")["engines"]) == 3, "all are known")

        def would_go() -> tuple[str, dict[str, Any]]:
            """Who would compute a prompt, and the link to who answers."""
            asked = {"model": "stub", "prompt": "well " * 400, "max_tokens": 4}
            told = ask(f"{router}/explain", asked)
            (decoder,) = told["decode_candidates"]
            assert decoder["lacks_blocks"] > 20
            return names[told["engine"]], decoder["link"]

        # Nobody has pulled anything: it is assumed, and either is as good.
        assert would_go()[1]["known"] == "assumed"
        until(lambda: {would_go()[0] for _ in range(8)} == {"a", "b"})

        def pull(seat: Any) -> None:
            some = numbers(100)
            seat.put(some)
            until(lambda: seat.announced)
            assert d.read(some) == 100

        for seat in (a, b):
            pull(seat)

        def told() -> dict[str, Any] | None:
            """The link to b, once it is in d's record, which may have had that to a before."""
            where, link = would_go()
            if link["known"] != "measured by d":
                return None
            if where == "b" and link["bytes_s"] > 4 * SLOW_BYTES_S:
                return link
            pull(b)  # the machine may have been busy
            return None

        assert until(told)["age_s"] >= 32

        def slow() -> float | None:
            links = b.members["d"]["links"]
            return next((one["bytes_s"] for one in links if one["node"] == "a"), None)

        assert until(slow) < 2 * SLOW_BYTES_S
        assert [would_go()[0] for _ in range(8)] == ["b"] * 8
