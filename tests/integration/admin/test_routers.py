"""What routers know, through the gateway: a real router before a stub engine."""

import contextlib
import urllib.request
from json import dumps, loads

import pytest

from tests.integration.admin.conftest import open_gate
from tests.support.programs import program
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

TOKEN = "a router's token, long enough"


@pytest.fixture
def routed(start_cluster, tmp_path):
    """(gateway, engine's name, request's id)."""
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        engine = loads(line)["url"]
        url = f"http://127.0.0.1:{free_port()}"
        command = ("kvpool.cli", "router", "--engine", engine, "--no-daemon", "--listen", url[7:])
        stack.enter_context(program(*command, KVPOOL_ROUTER_TOKEN=TOKEN))
        gate = open_gate(
            start_cluster(nodes=1),
            tmp_path,
            KVPOOL_ROUTERS=f"{url},http://127.0.0.1:{free_port()}",
            KVPOOL_ROUTER_TOKEN=TOKEN,
        )
        request = urllib.request.Request(
            f"{url}/v1/completions",
            dumps({"model": "stub", "prompt": "hello there", "max_tokens": 2}).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            ident = answer.headers["x-kvpool-request-id"]
        yield gate, engine, ident, url


def test_ranks_of_one_url_are_listed_and_drained_one_by_one(start_cluster, tmp_path):
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(program("tests.support.stub_engine", "--ranks", "2"))
        engine = loads(line)["url"]
        url = f"http://127.0.0.1:{free_port()}"
        flags = ("--engine", f"{engine},data_parallel_size=2", "--no-daemon", "--listen", url[7:])
        stack.enter_context(program("kvpool.cli", "router", *flags, KVPOOL_ROUTER_TOKEN=TOKEN))
        gate = open_gate(
            start_cluster(nodes=1), tmp_path, KVPOOL_ROUTERS=url, KVPOOL_ROUTER_TOKEN=TOKEN
        )
        found = gate.get("/v1/engines")["items"]
        host = engine.removeprefix("http://")
        assert [(each["name"], each["rank"]) for each in found] == [
            (f"{host}-dp0", 0),
            (f"{host}-dp1", 1),
        ]
        assert {each["url"] for each in found} == {engine}
        gate.change("PUT", f"/v1/engines/{host}-dp1/drain")
        found = gate.get("/v1/engines")["items"]
        assert [each["routers"][url]["state"] for each in found] == ["serving", "drained"]


def test_engines_and_requests(routed):
    gate, engine, ident, url = routed
    found = gate.get("/v1/engines")
    assert [each["url"] for each in found["items"]] == [engine]
    assert list(found["items"][0]["routers"]) == [url]
    assert len(found["unreachable"]) == 1, "nobody is at the second URL"
    assert gate.of("red").get("/v1/engines")["items"] == []
    name = found["items"][0]["name"]
    account = gate.get(f"/v1/requests/{ident}")
    assert account["router"] == url and account["account"]["request"] == ident
    assert gate.ask("GET", "/v1/requests/unknown").code == "unavailable", "the other one might know"
    assert gate.of("red").ask("GET", f"/v1/requests/{ident}").status in {404, 503}

    drained = gate.change("PUT", f"/v1/engines/{name}/drain")
    assert drained["routers"] == [url] and drained["draining"]
    assert not gate.change("DELETE", f"/v1/engines/{name}/drain")["draining"]
    weighed = gate.change("PUT", f"/v1/engines/{name}/weight", {"weight": 0.25})
    assert weighed["weight"] == 0.25 and weighed["routers"] == [url]

    explained = gate.change("POST", "/v1/explain", {"model": "stub", "prompt": "hello there"})
    assert explained["account"]["engine"] == name
    body = {"model": "stub", "prompt": "hello there"}
    looked = gate.change("POST", "/v1/lookup", body)
    assert [each["engine"] for each in looked["items"]] == [name]
    assert gate.of("redeye").ask("POST", "/v1/lookup", body).status == 403
    assert gate.ask("POST", "/v1/explain", {"model": "stub"}).code == "invalid"
    assert gate.ask("POST", "/v1/explain", {"model": "other", "prompt": "x"}).code == "not_found"
