"""A lone daemon with object storage: what it wrote is found again, and what cannot work is told at once."""

import numpy as np
import pytest

from kvpool.types import NamespaceRecord
from tests.support.waiting import PATIENCE_S

NBYTES = 64 << 10
RECORD = NamespaceRecord.simple("store", block_bytes=NBYTES, block_tokens=16)
BLOCKS = 40


def key(number):
    return number.to_bytes(16, "big")


KEYS = [key(number) for number in range(BLOCKS)]


def block(number):
    return np.random.default_rng(number).bytes(NBYTES)


@pytest.fixture(params=["s3", "file"])
def begin(request, start, folder, proxy, until):
    """Starts a daemon with a client beside it, once the daemon knows what is in its store."""
    url = f"s3://{proxy.bucket}/a/b" if request.param == "s3" else f"file://{folder}/store"
    stack = []

    def begin_one():
        daemon = start(
            *("--memory", "4MiB", "--object-store", url, "--data-dir", str(folder / "data")),
            *("--node", "alone"),
            **proxy.environ,
        )
        client = daemon.client(connect=True)
        stack.append(client)
        until(lambda: tier(client).stocked and tier(client).state == "serving")
        return daemon, client, client.open(RECORD)

    yield begin_one
    for client in stack:
        client.close()


def tier(client):
    (found,) = client.stats().tiers.object
    return found


def fill(client, ns):
    """Blocks that are read again."""
    assert client.put(ns, KEYS, [block(number) for number in range(BLOCKS)]) == BLOCKS
    assert client.get(ns, KEYS) == [block(number) for number in range(BLOCKS)]


def test_a_daemon_that_was_told_to_stop_finds_all_again_by_a_scan(begin, until):
    daemon, client, ns = begin()
    fill(client, ns)
    assert daemon.stop() == 0
    _, client, ns = begin()
    assert client.match(ns, KEYS) == 0, "memory has forgotten"
    assert client.get(ns, KEYS, wait_s=PATIENCE_S) == [block(number) for number in range(BLOCKS)]
    assert client.match(ns, KEYS) == BLOCKS
    found = tier(client)
    assert found.read_blocks == BLOCKS and found.mismatches == 0
    until(lambda: tier(client).blocks == BLOCKS)
    assert BLOCKS * NBYTES < tier(client).used_bytes < 2 * BLOCKS * NBYTES


def test_what_is_removed_or_reset_is_not_found_again(begin, until):
    daemon, client, ns = begin()
    fill(client, ns)
    assert daemon.stop() == 0
    daemon, client, ns = begin()
    assert client.remove(ns, KEYS[:4]) == 4
    found = client.get(ns, KEYS[:8], wait_s=PATIENCE_S)
    assert found == [None] * 4 + [block(number) for number in range(4, 8)]
    client.namespaces.reset(ns)
    assert client.get(ns, KEYS, wait_s=1.0) == [None] * BLOCKS
    until(lambda: tier(client).used_bytes == 0)
    daemon.kill()
    _, client, ns = begin()
    assert client.get(ns, KEYS, wait_s=1.0) == [None] * BLOCKS, "the data_dir knows the epoch"


@pytest.mark.parametrize(
    ("environ", "args", "told"),
    [
        ({"AWS_ACCESS_KEY_ID": ""}, (), "no credentials"),
        ({}, ("--object-store", "s3://key:topsecret@bucket/x"), "environment"),
    ],
)
def test_settings_that_cannot_work_end_the_daemon(start, folder, proxy, environ, args, told):
    daemon = start(
        *("--object-store", f"s3://{proxy.bucket}/x", "--data-dir", str(folder / "data"), *args),
        ready=False,
        **{**proxy.environ, **environ},
    )
    assert daemon.wait_end() != 0
    assert told in daemon.stderr
    assert "topsecret" not in daemon.stderr and "Traceback" not in daemon.stderr


def test_without_the_package_it_says_what_to_install(start, folder):
    (folder / "lib" / "obstore").mkdir(parents=True)
    (folder / "lib" / "obstore" / "__init__.py").write_text("raise ImportError('not installed')\n")
    daemon = start(
        *("--object-store", f"file://{folder}/store", "--data-dir", str(folder / "data")),
        ready=False,
        PYTHONPATH=str(folder / "lib"),
    )
    assert daemon.wait_end() != 0
    assert "kvpool[object]" in daemon.stderr and "Traceback" not in daemon.stderr


def test_a_store_that_is_away_holds_up_no_start(start, folder, until):
    daemon = start(
        *("--object-store", "s3://bucket/x", "--data-dir", str(folder / "data")),
        AWS_ENDPOINT_URL="http://127.0.0.1:1",
        AWS_ALLOW_HTTP="true",
        AWS_REGION="r",
        AWS_ACCESS_KEY_ID="AKIDEXAMPLE",
        AWS_SECRET_ACCESS_KEY="topsecret",
    )
    with daemon.client(connect=True) as client:
        until(lambda: tier(client).state == "failing")
        assert "reached" in tier(client).error
        ns = client.open(RECORD)
        fill(client, ns)
        assert client.get(ns, [key(1000)], wait_s=1.0) == [None]
    assert daemon.stop() == 0
    assert "topsecret" not in daemon.stderr
