"""Receipts over HTTP: two real nodes with disks, `a` and `g`, which has the gateway."""

import csv
import io
import json

import pytest

from kvpool.admin.paging import pack_cursor
from tests.integration.cluster.conftest import NBYTES, PLAIN, keys_of

DIGEST = PLAIN.digest().hex()


@pytest.fixture
def used(seat_of, numbers):
    """A function that has a node put blocks, and read them twice, on behalf of a request; returns their count."""

    def use(node: str, request: str, count: int = 5) -> int:
        seat = seat_of(node)
        some = numbers(count)
        blocks = bytes(count * NBYTES)
        assert seat.client.put(seat.ns, keys_of(some), blocks, request=request) == count
        for _ in range(2):
            lease = seat.client.acquire(seat.ns, keys_of(some), request=request)
            assert lease.blocks == count
            seat.client.release(lease)
        return count

    return use


def sums(items):
    """Of the plain namespace: blocks read from memory, and written, with their bytes."""
    here = [each for each in items if each["namespace"] == DIGEST]
    dram = [each["reads"].get("dram", {}) for each in here]
    return {
        "read": sum(each.get("blocks", 0) for each in dram),
        "read_bytes": sum(each.get("nbytes", 0) for each in dram),
        "written": sum(each["written"]["blocks"] for each in here),
        "written_bytes": sum(each["written"]["nbytes"] for each in here),
    }


def test_a_request_is_on_the_receipt_of_each_node_that_served_it(gate, seat_of, used, until):
    used("a", "chatcmpl-one-0", 5)
    used("g", "chatcmpl-one-0", 3)
    used("g", "other", 2)
    found = gate.get("/v1/receipts/requests?request=one-0")["items"]
    assert [(each["node"], each["request"]) for each in found] == [
        ("a", "chatcmpl-one-0"),
        ("g", "chatcmpl-one-0"),
    ]
    for each, count in zip(found, (5, 3), strict=True):
        assert (
            each["reads"]
            == {"dram": {"blocks": 2 * count, "tokens": 0, "nbytes": 2 * count * NBYTES}}
            or each["reads"]["dram"]["blocks"] == 2 * count
        )
        assert each["written"]["nbytes"] == count * NBYTES
        assert (each["namespace"], each["ended_s"]) == (DIGEST, None)
    seat = seat_of("a")
    seat.client.sessions.end_request(seat.ns, "chatcmpl-one-0", session="s1")

    def ended():
        first = gate.get("/v1/receipts/requests?request=one-0&node=a")["items"][0]
        return first["ended_s"] and first["session"] == "s1"

    until(ended)


def test_the_account_in_every_format_says_what_was_counted(gate, seat_of, used):
    before = sums(gate.get("/v1/receipts?total=true")["items"])
    stats = {node: seat_of(node).client.stats().tenants["default"].traffic for node in "ag"}
    counts = used("a", "", 4) + used("g", "r", 6)
    after = sums(gate.get("/v1/receipts?total=true")["items"])
    assert {name: after[name] - before[name] for name in after} == {
        "read": 2 * counts,
        "read_bytes": 2 * counts * NBYTES,
        "written": counts,
        "written_bytes": counts * NBYTES,
    }
    now = {node: seat_of(node).client.stats().tenants["default"].traffic for node in "ag"}
    assert sum(now[node].put_bytes - stats[node].put_bytes for node in "ag") == counts * NBYTES
    lines = [
        json.loads(line) for line in gate.ask("GET", "/v1/receipts?format=jsonl").body.splitlines()
    ]
    assert sums(lines)["written_bytes"] == after["written_bytes"]
    table = list(
        csv.DictReader(io.StringIO(gate.ask("GET", "/v1/receipts?format=csv").body.decode()))
    )
    plain = [row for row in table if row["namespace"] == DIGEST]
    assert sum(int(row["written_nbytes"]) for row in plain) == after["written_bytes"]
    assert sum(int(row["reads_dram_nbytes"]) for row in plain) == after["read_bytes"]
    assert all(float(row["kept_byte_s_dram"]) > 0 for row in plain)


def test_pages_of_all_nodes_share_no_row_and_leave_none_out(gate, used):
    used("a", "", 2)
    used("g", "", 2)
    whole = gate.get("/v1/receipts?limit=1000")
    assert (whole["next"], whole["incomplete"], whole["unreachable"]) == (None, [], {})
    names = ("node", "incarnation", "number", "tenant", "namespace")
    seen, cursor = [], ""
    while cursor is not None:
        page = gate.get(f"/v1/receipts?limit=1&cursor={cursor}")
        assert len(page["items"]) <= 1
        seen += [tuple(each[name] for name in names) for each in page["items"]]
        cursor = page["next"]
    rows = [tuple(each[name] for name in names) for each in whole["items"]]
    assert set(rows) <= set(seen)  # a minute may have ended meanwhile
    assert len(seen) == len(set(seen))
    assert {each[0] for each in seen} == {"a", "g"}


@pytest.mark.parametrize("place", [("a", -1, 0), ("a", 1 << 80, 0), (1, 2, 3), (5.0,)])
def test_what_is_no_cursor_is_refused(gate, place):
    assert gate.ask("GET", f"/v1/receipts?cursor={pack_cursor(*place)}").status == 400


def test_a_tenants_token_sees_its_own_receipts_only(gate, used):
    used("a", "of the default tenant", 2)
    assert {each["tenant"] for each in gate.get("/v1/receipts")["items"]} == {"default"}
    for path in ("/v1/receipts", "/v1/receipts/requests"):
        assert gate.of("red").get(path)["items"] == []
        assert gate.of("red").ask("GET", f"{path}?tenant=default").status == 404
        assert gate.of("red").ask("GET", f"{path}?format=csv").body.count(b"\n") == 1
