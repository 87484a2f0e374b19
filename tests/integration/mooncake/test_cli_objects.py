"""`kvpool put`, `get`, `ls` and `rm`: the same objects that programs of `mooncake.store` have."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.engine_plugins.mooncake.objects import Objects
from kvpool.engine_plugins.mooncake.store import MooncakeDistributedStore
from tests.support.waiting import PATIENCE_S

KIB, MIB = 1 << 10, 1 << 20
LONG = "k" * 300


def data_of(seed: int, size: int) -> bytes:
    return np.random.default_rng([seed, size]).bytes(size)


class Command:
    """`kvpool` against one daemon, for the names of one test."""

    def __init__(self, environ: dict[str, str], socket: str, tenant_id: str) -> None:
        self._environ = environ
        self._options = ["--socket", socket, "--tenant-id", tenant_id]

    def __call__(self, *words: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        done = subprocess.run(
            [sys.executable, "-m", "kvpool.cli", *words, *self._options],
            input=given,
            capture_output=True,
            env=self._environ,
            timeout=PATIENCE_S,
            check=False,
        )
        assert b"Traceback" not in done.stderr
        return done

    def names(self, *words: str) -> list[str]:
        listed = json.loads(self("ls", "--json", *words).stdout)
        assert not listed["more"]
        return sorted(each["name"] for each in listed["items"])


@pytest.fixture(scope="module")
def pool(start_one):
    with start_one("--memory", "64MiB") as daemon:
        yield daemon


@pytest.fixture
def store(pool, request):
    store = MooncakeDistributedStore()
    settings = {"kvpool_socket": pool.socket, "tenant_id": request.node.name}
    assert store.setup(settings) == 0
    yield store
    store.close()


@pytest.fixture
def kvpool(pool, request, clean_environ, tmp_path) -> Command:
    return Command(clean_environ(tmp_path), pool.socket, request.node.name)


@pytest.mark.parametrize("size", [1, 768, 769, 5 * MIB])
def test_what_the_command_puts_the_facade_reads_and_the_reverse(store, kvpool, tmp_path, size):
    first, second = data_of(1, size), data_of(2, size)
    file = tmp_path / "first"
    file.write_bytes(first)
    done = kvpool("put", "a", str(file))
    assert (done.returncode, done.stderr) == (0, b"")
    assert store.get("a") == first
    assert store.put(LONG, second) == 0
    done = kvpool("get", LONG)
    assert (done.returncode, done.stdout == second, done.stderr) == (0, True, b"")
    assert kvpool("put", "a", "-", given=second).returncode == 0, "in place of the first"
    assert store.get("a") == second
    assert kvpool("get", "a", str(file)).returncode == 0
    assert file.read_bytes() == second
    assert [each.name for each in tmp_path.iterdir() if "part" in each.name] == []
    assert kvpool("rm", "a", LONG).returncode == 0
    assert store.get("a") == store.get(LONG) == b""


def test_objects_of_a_usual_size_are_listed_and_read_too(store, kvpool):
    """Each is a block of a namespace of their size, without a head."""
    page = data_of(3, 64 * KIB)
    assert store.put_batch(["page/1", "page/2"], [page, page]) == 0
    assert kvpool("put", "other", given=b"x").returncode == 0
    assert kvpool.names() == ["other", "page/1", "page/2"]
    assert kvpool.names("page/") == ["page/1", "page/2"]
    assert kvpool("get", "page/2").stdout == page
    listed = json.loads(kvpool("ls", "page", "--json").stdout)
    assert [each["bytes"] for each in listed["items"]] == [64 * KIB] * 2
    assert kvpool("rm", "page/1").returncode == 0
    assert kvpool.names() == ["other", "page/2"]


def test_a_list_has_an_end_and_says_whether_it_is_all(store, kvpool):
    assert b"no objects in dram" in kvpool("ls").stdout
    names = [f"name/{number}" for number in range(5)]
    assert store.put_batch([*names, LONG], [b"x"] * 6) == 0
    listed = json.loads(kvpool("ls", "--limit", "3", "--json").stdout)
    assert (len(listed["items"]), listed["more"]) == (3, True)
    assert b"there is more" in kvpool("ls", "--limit", "3").stdout
    digest = hashlib.sha256(LONG.encode()).hexdigest()
    assert kvpool.names() == [*names, f"sha256:{digest}"], "a long name is not kept"


def test_what_is_not_there_and_what_cannot_be(kvpool, tmp_path):
    done = kvpool("get", "absent")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"absent" in done.stderr
    file = tmp_path / "kept"
    file.write_bytes(b"before")
    assert kvpool("get", "absent", str(file)).returncode == 1
    assert file.read_bytes() == b"before"
    done = kvpool("put", "empty", given=b"")
    assert (done.returncode, b"standard input is empty" in done.stderr) == (1, True)
    assert kvpool("put", "x", str(tmp_path / "none")).returncode == 1
    assert kvpool("get", "x", "-", "--json").returncode == 1
    done = kvpool("put", "huge", given=bytes(80 * MIB))
    assert (done.returncode, b"not stored" in done.stderr) == (1, True)
    kvpool("put", "here", given=b"1")
    done = kvpool("rm", "here", "absent", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["removed"], list(told["failed"])) == (1, ["here"], ["absent"])


@pytest.mark.parametrize("size", [5, 3000])
def test_damaged_bytes_are_no_object(pool, store, kvpool, request, size):
    """In a head, and in a chunk: the facade reads them, since its memory is its tenant's own to damage."""
    assert store.put("a", data_of(4, size)) == 0
    with Client(pool.socket, timeout_s=PATIENCE_S, connect=True) as client:
        objects = Objects(client, request.node.name)
        objects.spaces.look()
        [head] = objects.heads.find([b"a"])
        if size <= 768:
            ns, key, at = objects.spaces.heads.ns, objects.spaces.packed([b"a"]), 256
        else:
            [(rung, [chunk])] = head.chunks().items()
            ns, key, at = objects.spaces.chunks(rung), chunk.key, 0
        with client.acquire_each(ns, key) as lease:
            slots = lease.slots[0]
            slots.table[slots.rows[0], at] ^= 1
    assert len(store.get("a")) == size
    done = kvpool("get", "a")
    assert (done.returncode, done.stdout) == (1, b"")
    assert store.get("a") == b"", "and it is dropped"


def test_names_on_a_disk(start, clean_environ, tmp_path, until):
    ssd = "--ssd", f"{tmp_path / 'disk'}=64MiB", "--ssd-write", "through"
    daemon = start(*ssd)
    kvpool = Command(clean_environ(tmp_path), daemon.socket, "default")
    assert kvpool("put", "a", given=b"12345").returncode == 0
    assert daemon.stop() == 0
    daemon = start(*ssd)
    # A node does not wait long for its disk before it is ready.
    until(lambda: daemon.stats().tiers.ssd[0].state == "serving", "the disk is open")
    assert kvpool.names() == []
    assert kvpool.names("--tier", "ssd") == ["a"]
    assert kvpool("get", "a").stdout == b"12345"
    assert kvpool("ls", "--tier", "tape").returncode == 1
