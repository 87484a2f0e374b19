"""Each route, on real daemons with real blocks."""

import http.client
from dataclasses import replace

import pytest

from kvpool.types import NamespaceRecord
from tests.integration.admin.conftest import open_gate
from tests.integration.cluster.conftest import NBYTES, PLAIN, key
from tests.support.waiting import PATIENCE_S

DIGEST = PLAIN.digest().hex()
DRAIN = "/v1/operator/drain"


def hexed(numbers):
    return [key(number).hex() for number in numbers]


def ended(gate, job, until):
    """The job, once it is no longer running."""
    return until(lambda: (j := gate.get(f"/v1/jobs/{job}"))["state"] != "running" and j)


def test_the_gateway_lives_and_knows_who_asks(gate):
    assert gate.of("").ask("GET", "/healthz").json == {"status": "ok"}
    assert gate.of("").ask("GET", "/readyz").json == {"status": "ok"}
    assert gate.get("/v1/me") == {"name": "root", "role": "admin", "tenants": ["*"]}
    assert gate.of("red").get("/v1/me") == {"name": "red", "role": "admin", "tenants": ["red"]}


def test_cluster_and_nodes(gate, two):
    found = gate.get("/v1/cluster")
    assert (found["cluster"], found["node"], found["standing"]) == (two.name, "g", "member")
    assert found["states"] == {"serving": 2}
    dram = next(tier for tier in found["tiers"] if tier["name"] == "dram")
    assert dram["capacity_bytes"] == 2 * 3 * (8 << 20)
    nodes = gate.get("/v1/nodes")["items"]
    assert [node["node"] for node in nodes] == ["a", "g"]
    assert [node["state"] for node in nodes] == ["serving", "serving"]
    assert nodes[0]["transports"][0]["url"] == two.node("a").url
    one = gate.get("/v1/nodes/a")
    assert one["node"] == nodes[0] or one["node"]["incarnation"] == nodes[0]["incarnation"]
    assert one["uptime_s"] > 0
    assert set(one["sections"]["tenants"]) == {"default", "red", "blue"}
    assert one["sections"]["node"] == "a"
    tenants = one["sections"]["tenants"]
    assert {name: each["space"]["size"] for name, each in tenants.items()} == dict.fromkeys(
        ("blue", "default", "red"), 8 << 20
    )
    assert gate.ask("GET", "/v1/nodes/zzz").code == "not_found"


def test_namespaces_blocks_and_tenants(gate, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(30)
    a.put(some)
    g.put(some[:10])

    def held():
        found = gate.get(f"/v1/namespaces/{DIGEST}")["nodes"]
        return {"a", "g"} <= set(found) and found["a"]["blocks"][0] >= 30 and found

    nodes = until(held)
    assert nodes["a"]["held_bytes"] >= 30 * NBYTES
    listed = {(n["tenant"], n["digest"]): n for n in gate.every("/v1/namespaces")}
    assert listed["default", DIGEST]["fields"]["model"] == "cluster"
    assert listed["default", DIGEST]["part_bytes"] == [NBYTES]
    assert gate.ask("GET", f"/v1/namespaces/{'0' * 32}").code == "not_found"

    blocks = gate.every(f"/v1/namespaces/{DIGEST}/blocks", limit=7, tier="dram")
    here = {(block["node"], block["key"]) for block in blocks}
    assert len(here) == len(blocks), "each once"
    assert {("a", each) for each in hexed(some)} <= here
    assert {("g", each) for each in hexed(some[:10])} <= here
    only = gate.every(f"/v1/namespaces/{DIGEST}/blocks", limit=1000, node="g", tier="dram")
    assert {block["node"] for block in only} == {"g"}
    by_key = {block["key"]: block for block in blocks if block["node"] == "a"}
    assert by_key[hexed(some)[3]]["parent"] == hexed(some)[2]
    assert by_key[hexed(some)[3]]["depth"] == 3

    body = {"namespace": DIGEST, "keys": hexed(some)[4:5]}

    def whole():
        (found,) = gate.change("POST", "/v1/operator/locate", body)
        return len(found["replicas"]) == 2 and found

    assert {each["node"] for each in until(whole)["replicas"]} == {"a", "g"}
    found = gate.change("POST", "/v1/blocks", body)["nodes"]
    assert {node: [each["tier"] for each in blocks] for node, blocks in found.items()} == {
        "a": ["dram"],
        "g": ["dram"],
    }
    nobody = gate.change("POST", "/v1/blocks", {**body, "keys": ["f" * 32]})
    assert nobody["nodes"] == {"a": [], "g": []}

    tenants = {each["tenant"]: each for each in gate.every("/v1/tenants", limit=1)}
    assert set(tenants) == {"default", "red", "blue"}
    assert tenants["default"]["segment_bytes"] == 2 * (8 << 20)
    assert tenants["default"]["blocks"] >= 40 and tenants["default"]["nodes"] == 2
    assert tenants["default"]["ssd_bytes"] > 0


def test_why_each_node_lacks_a_block(gate, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(8)
    a.put(some)
    a.client.remove(a.ns, [number.to_bytes(16, "big") for number in some[5:]])
    assert g.read(numbers(3)) == 0
    found = gate.change("POST", "/v1/why", {"namespace": DIGEST, "keys": hexed(some)})
    assert found["unreachable"] == {}
    at_a, at_g = found["nodes"]["a"], found["nodes"]["g"]
    assert (at_a["blocks"], at_g["blocks"]) == (5, 0)
    assert (at_a["missing"]["block"], at_a["missing"]["reason"]) == (5, "removed")
    assert at_a["missing"]["words"] == "removed by a client"
    assert at_g["missing"]["reason"] == "never_stored"
    for wrong in ({}, {"namespace": DIGEST, "keys": []}, {"namespace": DIGEST, "keys": ["x"]}):
        assert gate.ask("POST", "/v1/why", wrong).code == "invalid"

    def planned():
        told = gate.get("/v1/memory")
        return told if told["misses"] else None

    told = until(planned, "the miss is counted")
    assert (told["tenant"], told["nodes"], told["unreachable"]) == ("default", 2, {})
    assert told["misses"]["never_stored"]["blocks"] >= 3
    assert told["curve"]["asked"] >= 3
    assert 0 <= told["curve"]["ceiling"] <= 1
    assert [point["times"] for point in told["curve"]["points"]][-2:] == [32.0, None]


def test_prefixes_of_each_node(gate, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(20)
    a.put(some)
    g.put(some[:5])
    body = {"namespace": DIGEST, "keys": hexed(some), "wait_s": 1}
    path = "/v1/operator/prefixes"
    until(lambda: gate.change("POST", path, body) == {"a": [20, 20], "g": [5, 5]})
    for wrong in ({}, {"namespace": DIGEST}, {"keys": hexed(some)}, {**body, "prompt": "x"}):
        assert gate.ask("POST", path, wrong).code == "invalid"
    by_text = {"model": "m", "prompt": "x"}
    assert gate.ask("POST", "/v1/prompts/lookup", by_text).code == "no_routers"


def test_pins_stay_when_the_rest_is_evicted(gate, seat_of, numbers, until):
    a = seat_of("a")
    some = numbers(12)
    a.put(some)
    until(lambda: "a" in gate.get(f"/v1/namespaces/{DIGEST}")["nodes"])
    body = {"namespace": DIGEST, "keys": hexed(some[:3]), "kind": "hard"}
    assert gate.change("POST", "/v1/pins?node=a", body)["nodes"] == {"a": 3}
    spec = {"kind": "evict", "namespace": DIGEST, "keys": hexed(some)}
    dry = gate.change("POST", "/v1/jobs", {"spec": spec, "nodes": ["a"], "dry_run": True})
    view = ended(gate, dry["job"], until)
    assert (view["state"], view["blocks"], view["dry_run"], a.here(some)) == ("done", 9, True, 12)
    answer = gate.patient("POST", "/v1/jobs", {"spec": spec})
    assert answer.status == 202
    assert answer.headers["location"] == f"/v1/jobs/{answer.json['job']}"
    view = ended(gate, answer.json["job"], until)
    assert (view["blocks"], view["kept"], a.here(some)) == (9, 3, 3)
    assert {each["node"] for each in view["nodes"]} >= {"a"}
    assert view["by"].startswith("token root")
    assert answer.json["job"] in {job["job"] for job in gate.every("/v1/jobs", limit=1)}
    assert gate.change("POST", "/v1/pins", {**body, "kind": "none"})["nodes"]["a"] == 3


def test_blocks_are_brought_to_another_node(gate, seat_of, numbers, until):
    a, g = seat_of("a"), seat_of("g")
    some = numbers(8)
    a.put(some)
    until(lambda: a.announced and "g" in gate.get(f"/v1/namespaces/{DIGEST}")["nodes"])
    spec = {"kind": "warm", "namespace": DIGEST, "keys": hexed(some)}
    job = gate.change("POST", "/v1/jobs", {"spec": spec, "nodes": ["g"]})
    assert ended(gate, job["job"], until)["blocks"] == 8
    assert g.here(some) == 8
    spec = {"kind": "warm", "namespace": DIGEST, "source": "a", "move": True}
    job = gate.change("POST", "/v1/jobs", {"spec": spec})
    assert [each["node"] for each in job["nodes"]] == ["g"], "all, but the one they come from"
    assert ended(gate, job["job"], until)["state"] == "done"
    assert (a.here(some), g.here(some)) == (0, 8)
    only = gate.patient("POST", "/v1/jobs", {"spec": spec, "nodes": ["a"]})
    assert only.status == 409 and "both source and destination" in only.json["detail"]


def test_jobs_stop_and_are_not_there(gate, until):
    job = gate.change("POST", "/v1/jobs", {"spec": {"kind": "scrub"}})
    assert {each["node"] for each in job["nodes"]} == {"a", "g"}
    stopped = gate.change("DELETE", f"/v1/jobs/{job['job']}")
    assert stopped["job"] == job["job"]
    assert ended(gate, job["job"], until)["state"] in {"cancelled", "done"}
    assert gate.ask("GET", "/v1/jobs/nobody-s").code == "not_found"
    assert gate.ask("DELETE", "/v1/jobs/nobody-s").status == 404
    for wrong in (
        {"kind": "evict", "least_bytes": 1, "unused_s": 3},
        {"kind": "evict"},
        {"kind": "evict", "tiers": ["dram"]},
        {"kind": "evict", "everything": True, "unused_s": 3},
        {"kind": "warm", "namespace": "", "source": "a"},
    ):
        assert gate.ask("POST", "/v1/jobs?tenant=blue", {"spec": wrong}).code == "invalid"
    assert gate.get("/v1/nodes/a")["node"]["state"] == "serving"


def test_settings_and_a_new_epoch_of_a_namespace(gate, two, numbers, until):
    record = NamespaceRecord.simple("mine", block_bytes=4096, block_tokens=16)
    seat = two.seat("a", record)
    digest = record.digest().hex()
    some = numbers(5)
    seat.put(some)
    until(lambda: gate.ask("GET", f"/v1/namespaces/{digest}").status == 200)
    path = f"/v1/namespaces/{digest}"
    found = gate.change("PATCH", path, {"ttl_s": 90, "dram_quota": 0.5})
    assert (found["settings"]["ttl_s"], found["settings"]["dram_quota"]) == (90, 0.5)
    found = gate.change("PATCH", path, {"dram_quota": 1 << 20})
    assert (found["settings"]["ttl_s"], found["settings"]["dram_quota"]) == (90, 1 << 20)
    assert gate.ask("PATCH", path, {}).code == "invalid"
    assert gate.ask("PATCH", path, {"replicas": 0}).code == "invalid"
    assert gate.ask("PATCH", path, {"dram_quota": 7.5}).code == "invalid"
    assert gate.ask("PATCH", path, {"colour": 1}).code == "invalid"
    before = gate.get(path)["epoch"]
    would = gate.change("POST", f"{path}/clear", {"dry_run": True})
    assert (would["epoch"], would["dry_run"]) == (before + 1, True)
    assert gate.change("POST", f"{path}/clear")["epoch"] == before + 1
    until(lambda: seat.here(some) == 0)
    assert gate.change("POST", f"{path}/clear", {"fence": True})["epoch"] == before + 2
    until(lambda: gate.get(path)["epoch"] == before + 2)  # by way of etcd
    assert gate.ask("POST", f"/v1/namespaces/{'1' * 32}/clear").code == "not_found"


def test_a_node_is_drained_and_that_is_called_off(start_cluster, tmp_path, numbers, until):
    world = start_cluster(nodes=1)
    gate = replace(open_gate(world, tmp_path), whole=True)
    seat = world.seat("a")
    some = numbers(1)
    seat.put(some)
    # Until it ends the node does not leave.
    lease = seat.client.acquire(seat.ns, [key(number) for number in some], lease_s=60.0)
    assert lease is not None
    gate.change("POST", DRAIN, {"node": "a"})
    until(lambda: gate.get("/v1/nodes/a")["node"]["drain_wanted"])
    gate.change("POST", DRAIN, {"node": "a", "wanted": False})
    until(lambda: not gate.get("/v1/nodes/a")["node"]["drain_wanted"])
    lease.release()
    for wanted in (True, False):
        assert gate.ask("POST", DRAIN, {"node": "zzz", "wanted": wanted}).code == "invalid"


def test_a_node_that_was_drained_and_has_left_is_brought_back(start_cluster, tmp_path, until):
    world = start_cluster(nodes=2)
    gate = open_gate(world, tmp_path)
    gate.change("POST", DRAIN, {"node": "b"})
    until(lambda: gate.ask("GET", "/v1/nodes/b").status == 404)
    gate.change("POST", DRAIN, {"node": "b", "wanted": False})
    until(lambda: gate.ask("GET", "/v1/nodes/b").status == 200)


def test_settings_of_nodes(gate, until):
    found = gate.get("/v1/config")["nodes"]
    values = {each["name"]: each for each in found["a"]}
    assert values["cluster_secret"] == {
        "name": "cluster_secret",
        "value": True,
        "secret": True,
        "default": False,
        "changeable": False,
        "help": "The shared secret with which peers authenticate, at least 16 random characters",
        "form": "TEXT",
    }
    assert values["forward"]["value"] is True and values["forward"]["changeable"]
    changed = gate.change("PATCH", "/v1/config?node=a", {"changes": {"forward": False}})
    assert changed == {"nodes": {"a": 1}, "unreachable": {}}

    def forwards():
        nodes = gate.get("/v1/config")["nodes"]
        named = {
            node: {each["name"]: each["value"] for each in some} for node, some in nodes.items()
        }
        return {node: values["forward"] for node, values in named.items()}

    assert forwards() == {"a": False, "g": True}
    changed = gate.change("PATCH", "/v1/config", {"changes": {"forward": True}})
    assert changed["nodes"] == {"a": 1, "g": 1}
    assert gate.ask("PATCH", "/v1/config", {"changes": {"memory": 1}}).code == "invalid"
    assert gate.ask("PATCH", "/v1/config", {"changes": {}}).code == "invalid"


def test_what_was_read_and_done(gate, seat_of, numbers, until):
    a = seat_of("a", "red")
    some = numbers(16)
    a.put(some)
    assert a.read(some) == 16

    def charted():
        samples = gate.get("/v1/history?seconds=600")["samples"]
        return [s["nodes"]["a"] for s in samples if (s["nodes"]["a"]["read_bytes_s"] or 0) > 0]

    found = until(charted)
    assert found[-1]["hit_rate"] == 1.0 and found[-1]["tiers"]["dram"] >= 16 * NBYTES
    hot = gate.get("/v1/hot?by=tenant&seconds=600")
    assert hot["items"][0]["tenant"] == "red" and hot["items"][0]["read_bytes_s"] > 0
    by_prefix = until(lambda: gate.get("/v1/hot?by=prefix")["items"])
    assert by_prefix[0]["tenant"] == "red" and by_prefix[0]["key"] == hexed(some)[15]
    assert by_prefix[0]["blocks"] == 16
    assert gate.of("blue").get("/v1/hot?by=prefix")["items"] == []
    assert {each["tenant"] for each in gate.of("blue").get("/v1/hot?by=tenant")["items"]} <= {
        "blue"
    }
    assert gate.get("/v1/history?seconds=0.001")["samples"] == []


def test_numbers_for_prometheus(gate):
    answer = gate.of("eye").ask("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'kvpool_build_info{node="g"' in answer.body.decode()


def test_without_routers_nobody_knows_requests(gate):
    assert gate.get("/v1/engines") == {"items": [], "next": None, "unreachable": {}}
    assert gate.ask("GET", "/v1/requests/abc").code == "no_routers"
    assert gate.ask("PUT", "/v1/engines/e/drain").code == "no_routers"
    assert gate.ask("PUT", "/v1/engines/e/weight", {"weight": 0.5}).code == "no_routers"
    assert gate.ask("POST", "/v1/explain", {"model": "m", "prompt": "x"}).code == "no_routers"


def test_a_change_is_made_once(gate, seat_of, numbers, until):
    a = seat_of("a")
    a.put(numbers(3))
    until(lambda: "a" in gate.get(f"/v1/namespaces/{DIGEST}")["nodes"])
    body = {"spec": {"kind": "evict", "namespace": DIGEST, "keys": ["0" * 32]}, "nodes": ["a"]}
    first = gate.patient("POST", "/v1/jobs", body, Idempotency_Key="once")
    again = gate.patient("POST", "/v1/jobs", body, Idempotency_Key="once")
    assert first.status == again.status == 202
    assert first.json["job"] == again.json["job"]
    assert again.headers["location"] == first.headers["location"]
    other = gate.patient("POST", "/v1/jobs", {**body, "dry_run": True}, Idempotency_Key="once")
    assert (other.status, other.code) == (422, "idempotency")
    somebody = gate.of("op").patient("POST", "/v1/jobs", body, Idempotency_Key="once")
    assert somebody.json["job"] != first.json["job"]
    assert gate.patient("POST", "/v1/jobs", body, Idempotency_Key="x" * 129).code == "invalid"
    refused = gate.patient("POST", "/v1/jobs", {"spec": 1}, Idempotency_Key="bad")
    assert (
        refused.status,
        gate.patient("POST", "/v1/jobs", {"spec": 1}, Idempotency_Key="bad").status,
    ) == (
        400,
        400,
    )


def test_five_thousand_blocks_are_listed_once_each(gate, two, until):
    record = NamespaceRecord.simple("many", block_bytes=256, block_tokens=16)
    seat = two.seat("a", record)
    digest = record.digest().hex()
    expected = set(hexed(range(5000)))
    for first in range(0, 5000, 500):
        seat.client.put(
            seat.ns,
            [key(n) for n in range(first, first + 500)],
            [bytes([n % 251]) * 256 for n in range(500)],
        )
    until(lambda: "a" in gate.get(f"/v1/namespaces/{digest}")["nodes"])
    for limit in (1000, 333):
        listed = [
            b["key"]
            for b in gate.every(f"/v1/namespaces/{digest}/blocks", limit=limit, tier="dram")
        ]
        assert len(listed) == 5000 and set(listed) == expected


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nodes?limit=0",
        "/v1/nodes?limit=1001",
        "/v1/nodes?limit=x",
        "/v1/nodes?limit=1&limit=2",
        "/v1/nodes?colour=red",
        "/v1/nodes?cursor=zzz",
        "/v1/nodes?cursor=" + "A" * 600,
        "/v1/nodes/..%2f..",
        "/v1/namespaces/00",
        f"/v1/namespaces/{DIGEST}/blocks?tier=tape",
        f"/v1/namespaces/{DIGEST}/blocks?cursor=W10",
        "/v1/hot?by=colour",
        "/v1/history?seconds=nan",
        "/v1/history?seconds=-1",
        "/v1/tenants?tenant=%00",
    ],
)
def test_what_cannot_be_meant_is_refused(gate, path):
    assert gate.ask("GET", path).code in {"invalid", "not_found"}


def test_methods_and_bodies_that_are_not_taken(gate):
    answer = gate.ask("POST", "/v1/nodes")
    assert (answer.status, answer.code, answer.headers["allow"]) == (405, "method", "GET")
    assert gate.ask("HEAD", "/v1/nodes").status == 405
    assert gate.ask("GET", "/v1/nodes", {"a": 1}).code == "invalid"
    assert gate.ask("POST", "/v1/pins", b"{").code == "invalid"
    assert gate.ask("POST", "/v1/pins", b"").code == "invalid"
    assert gate.ask("POST", "/v1/pins", b"{}", Content_Type="text/plain").status == 415
    assert gate.ask("POST", "/v1/pins", b"[" * 200_000).code == "invalid"
    assert gate.ask("GET", "/nowhere").code == "not_found"


def test_every_answer_keeps_browsers_from_guessing(gate):
    for path in ("/v1/nodes", "/healthz", "/nowhere", "/metrics"):
        headers = gate.ask("GET", path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "python" not in headers.get("server", "").lower()
    assert gate.ask("GET", "/v1/nodes", x_request_id="mine-7").headers["x-request-id"] == "mine-7"
    assert gate.ask("GET", "/v1/nodes", x_request_id="<a>").headers["x-request-id"] != "<a>"


def test_the_dashboard_is_served_and_nothing_beside_it(gate):
    nobody = gate.of("")
    assert nobody.ask("GET", "/ui").headers["location"] == "/ui/"
    page = nobody.ask("GET", "/ui/")
    if page.status == 200:  # the files are another part's
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in (
        "/ui/../api.py",
        "/ui/..%2fapi.py",
        "/ui/%2e%2e/api.py",
        "/ui/.x",
        "/ui//etc/passwd",
        "/ui/a.py",
    ):
        assert nobody.ask("GET", path).status == 404


def test_browsers_at_the_root_are_sent_to_the_dashboard(gate):
    def at_root(**headers: str) -> tuple[int, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", gate.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", "/", headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Location")
        finally:
            connection.close()

    assert at_root(Accept="text/html,application/xhtml+xml,*/*;q=0.8") == (307, "/ui/")
    assert at_root(Accept="*/*") == (404, None)
