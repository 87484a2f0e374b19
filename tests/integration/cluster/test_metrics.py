"""What nodes of a cluster count of each other, beside what the test has done."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvpool.admin.metrics import Shown, render
from kvpool.telemetry.metrics import collect

NBYTES = 32 << 10
# There is nothing to be told of these here: no RDMA, no spare device memory, nobody is drained.
NOT_HERE = {
    "kvpool_nixl_failovers_total",
    "kvpool_device_write_queue_parts",
    "kvpool_drain_phase",
    "kvpool_drain_blocks",
    "kvpool_drain_copied_bytes",
    # Nothing is refused here: tests/unit/test_accounts.py, tests/integration/test_receipts.py.
    "kvpool_account_refused_parts_total",
    # Without an audit file, and without a failed login: tests/integration/test_audit.py.
    "kvpool_audit_records_total",
    "kvpool_audit_lost_records_total",
    "kvpool_audit_errors_total",
    "kvpool_failed_logins_total",
    "kvpool_internal_errors_total",
    "kvpool_subscriptions_ended_total",
    # Without streams of KV events: tests/integration/test_event_streams.py.
    "kvpool_published_batches_total",
    "kvpool_published_blocks",
    "kvpool_published_replays_total",
}


@pytest.fixture(scope="module")
def world(shared_cluster):
    with shared_cluster(nodes=2, memory="16MiB", flags=["--no-forward"], ssd="32MiB") as world:
        yield world


def inspect(seat):
    return seat.client.inspect()


def told(seat):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render(inspect(seat)).decode())
        for sample in family.samples
    }


def at(found, name, **labels):
    return found.get((f"kvpool_{name}", frozenset(labels.items())), 0)


def test_pulls_are_counted_by_who_delivered_them(world, numbers, until) -> None:
    a, b = world.seats()
    listed = list(numbers(12))
    a.put(listed)
    until(lambda: a.announced, what="the directory knows of them")
    before = told(b)
    lent_before = told(a)
    assert b.read(listed) == 12
    after, lent = told(b), told(a)

    def more(name, **labels):
        return at(after, name, **labels) - at(before, name, **labels)

    assert more("peer_pull_parts_total", peer="a", outcome="loaded") == 12
    assert more("peer_pull_bytes_total", peer="a") == 12 * NBYTES
    assert more("load_parts_total", tenant="default", tier="peer", outcome="loaded") == 12
    assert more("load_bytes_total", tenant="default", tier="peer") == 12 * NBYTES
    assert more("read_blocks_total", tenant="default", result="fetched") == 12
    transfers = more("load_seconds_count", tier="peer")
    assert transfers >= 1
    assert more("peer_pull_seconds_count", peer="a", transport="tcp") == transfers
    paths = {
        labels: value
        for (name, labels), value in after.items()
        if name == "kvpool_path_bytes_total" and dict(labels)["peer"] == "a"
    }
    was = sum(
        value
        for (name, labels), value in before.items()
        if labels in paths and "path_bytes" in name
    )
    assert sum(paths.values()) - was == 12 * NBYTES
    assert at(lent, "loaned_parts_total") - at(lent_before, "loaned_parts_total") == 12
    assert at(lent, "loaned_bytes_total") - at(lent_before, "loaned_bytes_total") == 12 * NBYTES


def test_the_cluster_is_told_of(world) -> None:
    a, _ = world.seats()
    found = told(a)
    assert at(found, "membership_standing", standing="member") == 1
    assert at(found, "membership_connected") == 1
    assert at(found, "directory_connected") == 1
    assert at(found, "node_state", state="serving") == 1
    assert at(found, "cluster_peers") == 1


def test_every_metric_is_told(world, numbers, until) -> None:
    """All places in the stats that the table names are there, and something stands there."""
    a, b = world.seats()
    for reader, writer in ((a, b), (b, a)):
        listed = list(numbers(4))
        writer.put(listed)
        until(lambda writer=writer: writer.announced)
        assert reader.read(listed) == 4
    assert a.read(list(numbers(2))) == 0

    def misses():
        return a.stats.tenants["default"].namespaces[a.ns.digest.hex()].misses

    until(misses, "a miss is counted, some seconds later")
    stats = inspect(a)
    samples = collect(stats, Shown(stats, 200, 200))
    silent = {name for name, found in samples.items() if not found}
    assert silent == NOT_HERE
