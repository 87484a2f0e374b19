"""A cluster is upgraded node by node, and back: real daemons of this version and of the one before it."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.errors import ConfigError, InvalidRequest, Unavailable
from kvpool.types import NamespaceRecord
from kvpool.wire import frame
from tests.integration.cluster.conftest import Load
from tests.support import version_before
from tests.support.waiting import PATIENCE_S

OLD_CLIENT = """
import json, sys
try:
    from kvpool.wire.frame import PROTOCOL_VERSION
except ImportError:  # the version before has one module
    from kvpool.wire import PROTOCOL_VERSION
from kvpool.client import Client
from kvpool.types import NamespaceRecord
with Client(sys.argv[1]) as client:
    ns = client.open(NamespaceRecord.simple("both", block_bytes=4096, block_tokens=16))
    keys = [n.to_bytes(16, "big") for n in range(20)]
    stored = client.put(ns, keys[:10], [bytes([n]) * 4096 for n in range(10)])
    found = client.get(ns, keys)
    right = [data == bytes([n]) * 4096 for n, data in enumerate(found)]
    if hasattr(client, "written"):  # a hint, up to protocol 9
        with client.reserve(ns, [b"w" * 16]) as held:
            client.written(held, 4096)
            assert client.commit(held) == 1
    print(json.dumps([PROTOCOL_VERSION, stored, right]))
"""


@pytest.fixture(scope="session")
def before(tmp_path_factory) -> dict[str, str]:
    """The environment in which Python finds the version before."""
    try:
        return version_before.unpack(tmp_path_factory.mktemp("before"))
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def as_before(before):
    """Makes a node's next life one of the version before, or of this one again."""

    def become(node, *, old: bool) -> None:
        for name, value in before.items():
            node.environ.pop(name, None)
            if old:
                node.environ[name] = value

    return become


def protocols(seat) -> dict[str, int]:
    return {name: record["protocol"] for name, record in seat.members.items()}


def answers(seat) -> bool:
    """A client finds out by itself, after a moment, that its daemon is back."""
    try:
        return bool(seat.stats)
    except Unavailable:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_node_by_node_and_back(start_cluster, as_before, numbers, until):
    old, new = frame.PROTOCOL_VERSION - 1, frame.PROTOCOL_VERSION
    world = start_cluster(nodes=3, ssd="64MiB", environ={"KVPOOL_SSD_WRITE": "through"})
    nodes = [world.node(name) for name in "abc"]
    for node in nodes:
        as_before(node, old=True)
        node.restart()
    seats = world.seats()
    assert set(protocols(seats[0]).values()) == {old}
    kept = {seat.name: numbers(30) for seat in seats}
    for seat in seats:
        seat.put(kept[seat.name])
        until(lambda seat=seat: seat.announced)

    def reads_of_the_others(turn: int) -> None:
        reader, other = seats[turn % 3], seats[(turn + 1) % 3]
        reader.read(kept[other.name], wait_s=0.5)

    def everything_is_read() -> None:
        """By everybody, wherever it is: what is read is compared with what is right."""
        for reader in seats:
            for blocks in kept.values():
                until(lambda r=reader, b=blocks: r.read(b, wait_s=2.0) == 30)

    for to_old in (False, True):
        for node in nodes:
            with Load(reads_of_the_others):
                node.stop()
                as_before(node, old=to_old)
                node.start()
            until(lambda: all(map(answers, seats)))
            world.until_all_see(seats)
            everything_is_read()
            more = numbers(10)
            writer = next(seat for seat in seats if seat.name == node.name)
            writer.put(more)
            until(lambda w=writer: w.announced)
            for reader in seats:
                assert reader.read(more) == 10
            if to_old:
                continue
            for seat in seats:  # operators of either version are answered by either
                assert writer.client.inspect(seat.name).node == seat.name
                assert seat.client.inspect(writer.name).node == writer.name
        assert set(protocols(seats[0]).values()) == {old if to_old else new}


@pytest.mark.slow
@pytest.mark.parametrize("old", ["a", "b"])
def test_a_prompt_is_followed_between_versions(start_cluster, as_before, numbers, until, old):
    world = start_cluster(nodes=2)
    as_before(world.node(old), old=True)
    world.node(old).restart()
    a, b = world.seats()
    world.until_all_see([a, b])
    some = numbers(20)
    keys = [n.to_bytes(16, "big") for n in some]
    with ThreadPoolExecutor(1) as pool, b.node.client(connect=True) as client:
        following = pool.submit(
            client.follow, client.open(b.record), keys, wait_s=PATIENCE_S, source="a"
        )
        until(lambda: b.stats.prefix_streams.under_way == 1)
        for at in range(0, 20, 4):
            assert not following.done()
            a.put(some[at : at + 4])
            until(lambda upto=some[: at + 4]: b.here(upto) == len(upto))
        assert following.result() == 20
    assert b.read(some, wait_s=0) == 20


def test_engines_may_be_older_or_newer_than_their_daemon(start_cluster, as_before, before):
    """Their library is in the engine's environment, which is upgraded at another time."""
    world = start_cluster(nodes=1)
    node = world.node("a")
    command = [sys.executable, "-c", OLD_CLIENT, node.socket]
    for old_daemon in (False, True):
        as_before(node, old=old_daemon)
        node.restart()
        for old_client in (False, True):
            environ = before if old_client else {}
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
                env=environ,
            )
            assert done.returncode == 0, done.stderr
            version, stored, right = json.loads(done.stdout)
            assert version == frame.PROTOCOL_VERSION - old_client
            assert stored == (0 if old_client else 10), (
                "the second one finds what the first one put"
            )
            assert right == [True] * 10 + [False] * 10
    # What it does not know is no miss: that would look like an empty pool.
    with node.client() as client:
        ns = client.open(NamespaceRecord.simple("new", block_bytes=64, block_tokens=1))
        for ask in (
            lambda: client.present(ns, bytes(16)),
            lambda: client.present_in([ns, ns], bytes(16)),
            lambda: client.remove_each([ns], bytes(16)),
            lambda: client.clear_namespace(ns),
            lambda: client.remove(ns, bytes(16), others_s=1.0),
        ):
            with pytest.raises(InvalidRequest, match="upgrade"):
                ask()
