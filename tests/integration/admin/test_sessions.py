"""Sessions and intents over HTTP: two real nodes with disks, `a` and `g`, which has the gateway."""

import pytest

from kvpool.wire import operator as operator_wire
from tests.integration.cluster.conftest import NBYTES, PLAIN, keys_of

DIGEST = PLAIN.digest().hex()


def hexed(numbers):
    return [key.hex() for key in keys_of(numbers)]


@pytest.fixture
def told(seat_of, numbers, until):
    """A function that has a turn of a session told to a node, whose blocks are there; returns their numbers."""

    def tell(session: str, node: str, count: int = 6, **more) -> list[int]:
        seat = seat_of(node)
        some = numbers(count)
        assert seat.put(some) == count
        seat.client.sessions.turn(seat.ns, session, keys_of(some), **more)

        def known() -> bool:
            return bool(seat.client.ask_node(operator_wire.ShowSession(session)))

        until(known)
        return some

    return tell


def test_sessions_are_listed_by_name_with_the_nodes_that_know_them(gate, told):
    names = [f"list-{n}" for n in range(7)]
    for number, name in enumerate(names):
        told(name, "ag"[number % 2])
    told("list-3", "a")

    def listed(node: str, count: int) -> list[dict]:
        found, after, more = [], "", True
        while more:
            page = gate.get(f"/v1/sessions?node={node}&count={count}&after={after}")["nodes"][node]
            found, more = found + page["sessions"], page["more"]
            after = found[-1]["session"] if found else ""
        return [each for each in found if each["session"].startswith("list-")]

    for count in (1, 3, 100):
        at = {n: [each["session"] for each in listed(n, count)] for n in "ag"}
        assert at == {"a": [*names[::2][:2], "list-3", *names[::2][2:]], "g": names[1::2]}
    on = listed("a", 100)[1]
    assert (on["turns"], on["agents"], on["blocks"], on["nbytes"]) == (1, 1, 6, 6 * NBYTES)
    assert 0 <= on["idle_s"] < 600
    assert set(gate.get("/v1/sessions")["nodes"]) == {"a", "g"}


def test_one_session_is_shown_and_ended(gate, seat_of, told, until):
    name = "show / me %"
    some = told(name, "a", 5)
    seat = seat_of("a")
    seat.client.sessions.turn(seat.ns, name, keys_of(range(10**9, 10**9 + 2)), agent="helper")
    path = "/v1/sessions/show%20%2F%20me%20%25"
    chains = until(
        lambda: len(c := gate.get(path)["nodes"]["a"]["chains"]) == 2 and c, "the second agent"
    )
    main = {
        "namespace": DIGEST,
        "agent": "",
        "blocks": 5,
        "in_memory": 5,
        "on_disk": 0,
        "missing": 0,
    }
    assert chains[0] == main
    assert (chains[1]["agent"], chains[1]["missing"]) == ("helper", 2)
    assert gate.change("DELETE", path)["nodes"] == {"a": 1, "g": 0}
    assert gate.get(path)["nodes"] == {"a": None, "g": None}
    assert gate.change("DELETE", path)["nodes"] == {"a": 0, "g": 0}
    assert seat.here(some) == 5, "nothing is dropped"

    def ended() -> list[str]:
        events = gate.get("/v1/audit?limit=1000")["items"]
        changes = (each["details"] for each in events)
        return [each["session"] for each in changes if each.get("what") == "end session"]

    assert until(ended, "the gateway hears of it") == [name]


def at_a(gate, body):
    return gate.change("POST", "/v1/intents?node=a", body)["nodes"]["a"]


def test_each_node_answers_an_intent(gate, seat_of, told, until):
    some = told("intend", "a", 8)
    seat_of("g")
    until(lambda: {"a", "g"} <= set(gate.get(f"/v1/namespaces/{DIGEST}")["nodes"]))
    body = {"intent": "pin", "namespace": DIGEST, "keys": hexed(some), "hard": True}
    nodes = gate.change("POST", "/v1/intents", {**body, "dry_run": True})["nodes"]
    a, g = nodes["a"], nodes["g"]
    assert (a["outcome"], a["blocks"], a["asked"]) == ("accepted", 8, 8)
    assert (g["outcome"], g["missing"]) == ("missing", 8)
    item = at_a(gate, {**body, "keys": hexed(some[:3])})
    assert (item["blocks"], item["nbytes"]) == (3, 3 * NBYTES)
    item = at_a(gate, {"intent": "drop", "session": "intend"})
    assert (item["outcome"], item["blocks"], item["asked"]) == ("clipped", 5, 8)
    assert "pinned" in item["reason"]
    assert seat_of("a").here(some) == 3
    gate.change("POST", "/v1/intents", {**body, "intent": "unpin", "hard": False})
    events = gate.get("/v1/audit?limit=1000")["items"]
    noted = [each["details"] for each in events if each["details"].get("session") == "intend"]
    assert [(each["what"], each["blocks"]) for each in noted] == [("drop", 5)]
    assert noted[0]["by"].startswith("token root")


def test_a_prompt_is_prefetched_into_the_node_that_is_named(gate, seat_of, told, until):
    some = told("prefetch", "a", 8)
    until(lambda: seat_of("a").announced)
    body = {"intent": "prefetch", "namespace": DIGEST, "keys": hexed(some)}

    def found():
        """It asks others where the blocks are, and does not wait long for them."""
        item = gate.change("POST", "/v1/intents?node=g", body)["nodes"]["g"]
        return item["outcome"] != "missing" and item

    item = until(found, "the blocks are found")
    assert (item["outcome"], item["blocks"]) == ("accepted", 8)
    until(lambda: seat_of("g").here(some) == 8)


def test_what_cannot_be_meant_is_refused(gate):
    for wrong in (
        {"intent": "pin"},
        {"intent": "pin", "keys": ["0" * 32]},
        {"intent": "pin", "keys": ["0" * 32], "namespace": DIGEST, "session": "x"},
        {"intent": "borrow", "session": "x"},
        {"intent": "keep", "session": "x"},
        {"intent": "keep", "session": "x", "for_s": 1e9},
        {"intent": "drop", "session": "x", "hard": True},
        {"intent": "pin", "session": "a\nb"},
    ):
        assert gate.ask("POST", "/v1/intents", wrong).code == "invalid", wrong
    item = at_a(gate, {"intent": "pin", "session": "nobody"})
    assert item["outcome"] == "missing" and "nobody" in item["reason"]


def test_a_token_sees_its_own_tenants_sessions_only(gate, told):
    told("theirs", "a")
    red = gate.of("red")
    listed = red.get("/v1/sessions")["nodes"]
    assert [each["sessions"] for each in listed.values()] == [[], []]
    assert set(red.get("/v1/sessions/theirs")["nodes"].values()) == {None}
    assert red.ask("GET", "/v1/sessions/theirs?tenant=default").status == 404
    assert gate.of("eye").ask("DELETE", "/v1/sessions/theirs").status == 403
    body = {"intent": "drop", "session": "theirs"}
    assert gate.of("eye").ask("POST", "/v1/intents", body).status == 403
    found = red.change("POST", "/v1/intents", body)["nodes"]
    assert {item["outcome"] for item in found.values()} == {"missing"}
