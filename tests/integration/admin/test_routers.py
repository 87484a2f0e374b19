"""What routers know, through the gateway: a real router before a stub engine."""

import contextlib
import urllib.request
from json import dumps, loads

import pytest

from kvpool.router.hashing import DEFAULT_SEED, HashSpec, chain, none_hash
from tests.integration.admin.conftest import open_gate
from tests.integration.cluster.conftest import NBYTES
from tests.support.programs import program
from tests.support.servers.etcd import free_port
from tests.support.stub_engine.tokens import chat_tokens
from tests.support.waiting import PATIENCE_S

TOKEN = "a router's token, long enough"
MESSAGES = [{"role": "user", "content": "a question of some length " * 10}]
SPEC = HashSpec(16, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))


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
    assert drained["routers"] == [url]
    assert gate.change("DELETE", f"/v1/engines/{name}/drain")["routers"] == [url]
    weighed = gate.change("PUT", f"/v1/engines/{name}/weight", {"weight": 0.25})
    assert weighed["routers"] == [url]

    explained = gate.change("POST", "/v1/explain", {"model": "stub", "prompt": "hello there"})
    assert explained["account"]["engine"] == name
    body = {"model": "stub", "prompt": "hello there"}
    looked = gate.change("POST", "/v1/prompts/lookup", body)
    assert [each["engine"] for each in looked["items"]] == [name]
    assert gate.of("redeye").ask("POST", "/v1/prompts/lookup", body).status == 403
    assert gate.ask("POST", "/v1/explain", {"model": "stub"}).code == "invalid"
    assert gate.ask("POST", "/v1/explain", {"model": "other", "prompt": "x"}).code == "not_found"


def test_a_prompt_is_kept_and_dropped_by_its_text(start_cluster, tmp_path):
    with contextlib.ExitStack() as stack:
        world = start_cluster(nodes=1)
        (seat,) = world.seats()
        tokens, _ = chat_tokens(MESSAGES)
        keys = [each[-16:] for each in chain(SPEC, tokens)]
        assert len(keys) > 4
        seat.client.put(seat.ns, keys[:4], [bytes(NBYTES)] * 4)
        line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        digest = seat.ns.digest.hex()
        engine = f"{loads(line)['url']},node={seat.name},namespace={digest},hash=sha256_cbor,block_tokens=16"
        routers = []
        for _ in "xy":
            url = f"http://127.0.0.1:{free_port()}"
            flags = ("--engine", engine, "--socket", seat.node.socket, "--listen", url[7:])
            stack.enter_context(program("kvpool.cli", "router", *flags, KVPOOL_ROUTER_TOKEN=TOKEN))
            routers.append(url)
        gate = open_gate(
            world,
            tmp_path,
            # The first of them is away, and the next one is asked.
            KVPOOL_ROUTERS=",".join([f"http://127.0.0.1:{free_port()}", *routers]),
            KVPOOL_ROUTER_TOKEN=TOKEN,
        )
        chat = {"model": "stub", "messages": MESSAGES}
        keep = {"intent": "keep", "for_s": 600, **chat}
        kept = gate.of("op").change("POST", "/v1/prompts/intents", keep)
        (item,) = kept["items"]
        assert (item["node"], item["namespace"]) == (seat.name, digest)
        assert (item["outcome"], item["blocks"], item["nbytes"]) == ("accepted", 4, 4 * NBYTES)
        assert (item["asked"], item["missing"]) == (len(keys), len(keys) - 4)
        assert kept["unreachable"] == {}

        drop = {"intent": "drop", **chat}
        # Who is limited to a tenant, or may only look, may not, and does nothing.
        for who, body in (
            ("redop", drop),
            ("red", drop),
            ("red", {**drop, "dry_run": True}),
            ("eye", drop),
        ):
            answer = gate.of(who).ask("POST", "/v1/prompts/intents", body)
            assert answer.status == 403 and answer.code, who
        answer = gate.of("red").ask("POST", "/v1/prompts/intents?tenant=red", drop)
        assert answer.status in {400, 403}
        assert gate.ask("POST", "/v1/prompts/intents?tenant=default", drop).code == "invalid"
        for wrong in (
            {**drop, "model": ""},
            {**drop, "prompt": "x"},
            {**drop, "session": "x"},
            {**drop, "namespace": digest},
            {"intent": "drop", "model": "stub"},
            {**drop, "for_s": 5},
        ):
            assert gate.ask("POST", "/v1/prompts/intents", wrong).status == 400, wrong
        other = gate.ask("POST", "/v1/prompts/intents", {**drop, "model": "other"})
        assert other.code == "not_found"
        assert seat.client.match(seat.ns, keys) == 4

        # By tokens, and only to look; on a node that is not there.
        by_tokens = {"intent": "drop", "model": "stub", "tokens": list(tokens)}
        looked = gate.change("POST", "/v1/prompts/intents", {**by_tokens, "dry_run": True})
        assert [each["blocks"] for each in looked["items"]] == [4]
        nowhere = gate.change("POST", "/v1/prompts/intents", {**by_tokens, "node": "nowhere"})
        assert nowhere["items"] == [] and "nowhere" in nowhere["unreachable"]["nowhere"]
        assert seat.client.match(seat.ns, keys) == 4
        dropped = gate.change("POST", "/v1/prompts/intents", by_tokens)
        assert [each["outcome"] for each in dropped["items"]] == ["accepted"]
        assert seat.client.match(seat.ns, keys) == 0


def test_why_a_router_passes_no_intent_on_is_told(routed):
    gate, _, _, url = routed
    body = {"intent": "drop", "model": "stub", "messages": MESSAGES}
    answer = gate.ask("POST", "/v1/prompts/intents", body)
    assert (answer.status, answer.code) == (400, "invalid")
    assert url in answer.json["detail"] and "no daemon" in answer.json["detail"]
