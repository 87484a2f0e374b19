"""What engines have in caches of their own is known everywhere, as tier gpu, and never relied on."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "engine_with_events.py"


class Engine:
    """A process beside a node, that says what its cache holds."""

    def __init__(self, socket: str, endpoint: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), socket, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.followed = self._heard()

    def _heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, command: str, numbers: Iterable[int] = ()) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {' '.join(map(str, numbers))}\n")
        self.process.stdin.flush()
        return self._heard()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def engine_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts engines beside nodes; all end with the test."""
    engines: list[Engine] = []
    folder = tmp_path_factory.mktemp("z")

    def begin(node: Any) -> Engine:
        engine = Engine(node.socket, f"ipc://{folder}/{len(engines)}")
        engines.append(engine)
        assert engine.followed == "True"
        return engine

    yield begin
    for engine in engines:
        engine.end()


def tiers(seat: Any, numbers: Iterable[int]) -> dict[int, set[tuple[str, str]]]:
    """Where each block is, as (node, tier), by the word of a seat's node."""
    keys = [number.to_bytes(16, "big") for number in numbers]
    return {
        int(row.key, 16): {(each.node, each.tier) for each in row.replicas}
        for row in seat.client.locate(keys, digest=seat.ns.digest)
    }


def in_engines(seat: Any, numbers: Iterable[int]) -> dict[int, set[str]]:
    """The nodes whose engines have each block."""
    found = {
        n: {node for node, tier in at if tier == "gpu"} for n, at in tiers(seat, numbers).items()
    }
    return {number: nodes for number, nodes in found.items() if nodes}


def test_an_engines_cache_is_known_elsewhere_until_the_engine_is_killed(
    start_cluster: Any, engine_at: Any, numbers: Any, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    some = list(numbers(20))
    first, second = engine_at(world.node("a")), engine_at(world.node("a"))
    a.put(some[:10])
    first.does("stored", some[5:])
    second.does("stored", some[:7])
    both = set(some[:10])
    until(lambda: in_engines(b, some) == {n: {"a"} for n in both}, what="what was put is announced")
    first.does("match", some)  # names the keys of the others
    until(lambda: in_engines(b, some) == {n: {"a"} for n in some})
    assert in_engines(a, some) == {n: {"a"} for n in some}
    assert tiers(b, some[:1]) == {some[0]: {("a", "gpu"), ("a", "dram")}}
    assert b.read(some) == 10, "no engine gives blocks away"

    first.kill()
    until(lambda: set(in_engines(b, some)) == set(some[:7]), what="the second engine's are left")
    assert second.does("stop") == "False"
    until(lambda: in_engines(b, some) == {})
    assert {node for node, _ in tiers(b, some[:1])[some[0]]} == {"a", "b"}
    assert a.stats.tenants["default"].engines.followed == []


def test_a_daemon_that_starts_again_is_told_again(
    start_cluster: Any, engine_at: Any, numbers: Any, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB", environ={"KVPOOL_MEMBER_TTL_S": "5"})
    _, b = world.seats()
    some = list(numbers(5))
    engine = engine_at(world.node("a"))
    engine.does("stored", some)
    engine.does("match", some)
    until(lambda: set(in_engines(b, some)) == set(some))
    world.node("a").kill()
    world.node("a").start()
    with world.node("a").client(connect=True) as client:
        incarnation = client.incarnation

    def told_again() -> bool:
        engine.does("match", some)
        keys = [number.to_bytes(16, "big") for number in some]
        replicas = [
            each for row in b.client.locate(keys, digest=b.ns.digest) for each in row.replicas
        ]
        return [(each.incarnation, each.tier) for each in replicas] == [(incarnation, "gpu")] * len(
            some
        )

    until(told_again, what="the engine has repeated all of it")


def test_epochs_end_what_engines_had(
    start_cluster: Any, engine_at: Any, numbers: Any, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB")
    _, b = world.seats()
    some = list(numbers(5))
    reset, behind = engine_at(world.node("a")), engine_at(world.node("b"))
    for engine in (reset, behind):
        engine.does("stored", some)
        engine.does("match", some)
    until(lambda: in_engines(b, some) == {n: {"a", "b"} for n in some})
    # An operator's clear: what engines have is as good as before.
    b.client.clear(b.ns.digest)
    until(lambda: in_engines(b, some) == {n: {"a", "b"} for n in some})
    # New weights in one of them.
    reset.does("reset")
    until(lambda: in_engines(b, some) == {})
    reset.does("stored", some[:2])
    reset.does("match", some)
    until(lambda: in_engines(b, some) == {n: {"a"} for n in some[:2]})
    behind.does("reset")
    behind.does("stored", some[1:])
    behind.does("match", some)
    until(lambda: set(in_engines(b, some)) == set(some))
    assert in_engines(b, some)[some[1]] == {"a", "b"}


def test_what_an_engine_has_is_no_copy_to_rely_on(
    start_cluster: Any, engine_at: Any, numbers: Any, until: Any
) -> None:
    world = start_cluster(nodes=2, memory="32MiB")
    a, b = world.seats()
    some = list(numbers(30))
    a.put(some)
    engine = engine_at(world.node("b"))
    engine.does("stored", some)
    engine.does("match", some)
    until(lambda: in_engines(a, some) == {n: {"b"} for n in some})
    b.client.drain("a")
    until(lambda: "a" not in b.members, "it has left")
    world.node("a").stop()
    until(lambda: b.announced)
    assert b.read(some) == 30
