"""The cluster's secret is replaced on one node after the other, under load, and nobody misses a block."""

import contextlib
import hashlib
import hmac
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from kvpool.errors import NotAuthenticated
from kvpool.security.cluster_secrets import (
    ClusterSecrets,
    create_secrets,
    read_secrets,
    rotate_secrets,
)
from kvpool.transfer.base import Deadline, Identity, Stop, TransferLimits
from kvpool.transfer.connections import Connections
from kvpool.transfer.stream import Closed, Stream
from kvpool.wire import peer as peer_wire
from tests.integration.cluster.conftest import keys_of
from tests.support.waiting import PATIENCE_S

KEEP_S = 3600.0


def give(source: Path, target: Path) -> None:
    """As an operator copies it: whole or not at all."""
    beside = target.with_suffix(".new")
    shutil.copy(source, beside)
    beside.chmod(0o600)
    beside.replace(target)


class Files:
    """The operator's file, and each node's copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = folder / "own"
        create_secrets(self.own)

    def of(self, name: str) -> Path:
        return self.folder / name

    def environ(self, name: str) -> dict[str, str]:
        give(self.own, self.of(name))
        return {
            "KVPOOL_CLUSTER_SECRET": "",
            "KVPOOL_CLUSTER_SECRET_FILE": str(self.of(name)),
        }


@pytest.fixture
def rolled(start_cluster, tmp_path):
    files = Files(tmp_path)
    world = start_cluster(nodes=0)
    for name in "abc":
        world.make(name, environ=files.environ(name)).start()
    seats = [world.seat(name) for name in "abc"]
    world.until_all_see(seats)
    return world, files, seats


def connect(world, name: str, secret: bytes) -> Stream:
    us = Identity(world.name, "x", "0" * 16, ClusterSecrets.of(secret.decode()))
    connections = Connections(us, TransferLimits())
    with contextlib.closing(connections):
        return connections.connect(world.node(name).url, Deadline(PATIENCE_S), Stop())


def proofs(world) -> list[str]:
    """Of secrets, in the cluster's record."""
    config = json.loads(world.etcd.get(f"/kvpool/{world.name}/config"))
    return [config["secret_proof"], *config["other_proofs"]]


def accepts(world, name: str, secret: bytes) -> bool:
    try:
        connect(world, name, secret).close()
    except NotAuthenticated:
        return False
    return True


def test_nobody_misses_a_block_while_the_secret_is_replaced(rolled, numbers, until):
    world, files, (a, b, c) = rolled
    missed: list[str] = []
    stop = threading.Event()
    rounds = {"ab": 0, "bc": 0, "ca": 0}

    def load(name: str, some: list[int], reader) -> None:
        """Blocks of another node are pulled anew, again and again."""
        while not stop.is_set():
            reader.client.remove(reader.ns, keys_of(some))
            if reader.read(some, wait_s=PATIENCE_S) != len(some):
                missed.append(name)
            rounds[name] += 1

    pairs = []
    for name, writer, reader in (("ab", a, b), ("bc", b, c), ("ca", c, a)):
        some = numbers(4)
        assert writer.put(some) == 4
        until(lambda reader=reader, some=some: reader.read(some) == 4, what="they are announced")
        pairs.append((name, some, reader))
    threads = [threading.Thread(target=load, args=each) for each in pairs]
    for thread in threads:
        thread.start()

    def further() -> None:
        """Each pair has read several times more."""
        before = dict(rounds)
        until(lambda: all(rounds[name] > before[name] + 3 for name in rounds))

    try:
        further()
        [old] = read_secrets(str(files.own))
        rotate_secrets(files.own, KEEP_S, time.time())
        new = read_secrets(str(files.own))[0]
        text = f"kvpool cluster {world.name}".encode()
        proof = hmac.new(new.secret, text, hashlib.sha256).hexdigest()
        for name in "abc":
            give(files.own, files.of(name))
            until(lambda name=name: accepts(world, name, new.secret))
            assert accepts(world, name, old.secret)
            further()
        until(lambda: proof in proofs(world), what="etcd's record has the new one's proof")
        # The end of the old one, before its time, by a file without it.
        files.own.write_bytes(new.secret + b"\n")
        for name in "abc":
            give(files.own, files.of(name))
            until(lambda name=name: not accepts(world, name, old.secret))
            further()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert missed == []
    assert min(rounds.values()) > 20
    # Whoever was started with the old one alone is told so; the new one alone will do.
    late = world.make("d", environ=files.environ("d"))
    late.start()
    files.of("e").write_bytes(old.secret)
    files.of("e").chmod(0o600)
    stale = world.make(
        "e",
        environ={"KVPOOL_CLUSTER_SECRET": "", "KVPOOL_CLUSTER_SECRET_FILE": str(files.of("e"))},
    )
    stale.start()
    assert world.seat("e").read(numbers(1), wait_s=0) == 0


def test_a_connection_of_the_old_secret_ends_with_it(rolled, until):
    """Whoever knows only that one is heard until then, and not afterwards."""
    world, files, _ = rolled
    [old] = read_secrets(str(files.own))
    stream = connect(world, "a", old.secret)
    rotate_secrets(files.own, KEEP_S, time.time())
    give(files.own, files.of("a"))
    new = read_secrets(str(files.own))[0]
    until(lambda: accepts(world, "a", new.secret))
    files.own.write_bytes(new.secret)
    give(files.own, files.of("a"))
    until(lambda: not accepts(world, "a", old.secret))
    stream.deadline = Deadline(PATIENCE_S)
    ask = peer_wire.Ask("default", b"d" * 16, [0], b"k" * 16)
    stream.send(ask, 1)
    with pytest.raises(Closed):
        stream.receive(1 << 16)
    stream.close()
