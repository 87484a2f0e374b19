"""Which operators' requests the gateway forwards: every message is decided, and no role may more than on the typed routes."""

from typing import Any, get_args

import msgspec
import pytest

from kvpool.admin.handlers.operator import check, narrowed, shown
from kvpool.admin.problems import Refused
from kvpool.admin.scope import check_role, whole_only
from kvpool.admin.tokens import ROLES, Principal
from kvpool.telemetry.memory_stats import TenantStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import operator as o
from kvpool.wire.answers import Event, Events
from kvpool.wire.command import COMMANDS, Scope, message_of, shape_of, to_json
from tests.support import rest

OF_CLIENTS = {client_wire.Stats, client_wire.Engines, client_wire.Prefixes, client_wire.WhyMissing}
NOT_FORWARDED = {o.OnNode, o.Evict, o.TakeSpans}
RULES = {kind: each for kind, each in COMMANDS.items() if each.role is not None}
# The typed route that gives the same, by its handler's name.
TYPED = {
    o.Cluster: "list_nodes",
    o.Inspect: "get_node",
    client_wire.Stats: "get_node",
    o.Jobs: "list_jobs",
    o.Events: "stream_events",
    client_wire.Engines: "list_engines",
    o.HitCurves: "get_memory",
    o.ListBlocks: "list_blocks",
    o.ListAccounts: "list_accounts",
    o.ListReceipts: "list_receipts",
    o.BeginJob: "begin_job",
    o.StopJob: "stop_job",
    o.Clear: "clear_namespace",
    o.Configure: "configure_namespace",
}
EVERYWHERE = {kind for kind, each in RULES.items() if each.everywhere}
EXAMPLES = {
    o.PinBlocks: o.PinBlocks(bytes(32), "soft"),
    o.IntendBlocks: o.IntendBlocks("keep", bytes(16), bytes(16), for_s=1.0),
    o.BeginJob: o.BeginJob("evict-1", b'{"kind":"evict","everything":true}'),
    o.ChangeSettings: o.ChangeSettings(b'{"forward":"true"}'),
}


ROUTES = {route.name: route for route in rest.TYPED}
FORWARDED = {route.name: route for route in rest.FORWARDED}


def example(kind) -> Any:
    if kind in EXAMPLES:
        return EXAMPLES[kind]
    values = {"str": "x", "bytes": b"", "int": 1, "float": 0.0, "bool": False}
    needed = []
    for each in msgspec.structs.fields(kind):
        if each.name == "digest" and each.required:
            needed.append(bytes(16))
        elif each.required:
            hint = each.type if isinstance(each.type, type) else get_args(each.type)[0]
            needed.append(values[hint.__name__])
    return kind(*needed)


def test_every_message_is_decided():
    assert set(get_args(o.OperatorMessage)) | OF_CLIENTS == COMMANDS.keys()
    assert COMMANDS.keys() - RULES.keys() == NOT_FORWARDED
    assert RULES.keys() - TYPED.keys() - EVERYWHERE == {client_wire.Prefixes, o.Drain, o.Locate}
    names = {kind.__name__ for kind in RULES} | {
        f"{kind.__name__}Everywhere" for kind in EVERYWHERE
    }
    assert FORWARDED.keys() == names


@pytest.mark.parametrize("kind", [each for each in RULES if each in TYPED or each in EVERYWHERE])
def test_no_more_than_on_the_other_route(kind):
    forwarded = FORWARDED[kind.__name__]
    route = ROUTES[TYPED[kind]] if kind in TYPED else FORWARDED[f"{kind.__name__}Everywhere"]
    assert forwarded.role == route.role
    assert RULES[kind].changes == forwarded.changes == route.changes
    assert forwarded.whole or not route.whole


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("tenants", [None, frozenset({"red"})])
@pytest.mark.parametrize("tenant", ["", "red", "blue"])
def test_who_may_what(kind, role, tenants, tenant):
    who, rule = Principal("n", role, tenants), RULES[kind]
    allowed = ROLES.index(role) >= ROLES.index(rule.role)
    whole = tenants is None
    if not allowed or (rule.scope is Scope.WHOLE and not whole):
        wanted = 403
    else:
        wanted = 404 if not whole and tenant == "blue" else 200
    if wanted != 200:
        with pytest.raises(Refused) as refused:
            meant_by(who, kind, tenant)
        assert refused.value.status == wanted
    else:
        assert meant_by(who, kind, tenant) == (tenant or ("default" if whole else "red"))


def meant_by(who: Principal, kind, tenant: str) -> str:
    """The tenant of a request, after the checks that `Api` makes for its route."""
    route = FORWARDED[kind.__name__]
    assert route.role is not None
    check_role(who, route.role)
    if route.whole:
        whole_only(who)
    return check(who, example(kind), tenant)


def test_a_scrub_is_for_whole_tokens():
    scrub = o.BeginJob("scrub-1", b'{"kind":"scrub"}')
    check(Principal("n", "operator"), scrub, "")
    with pytest.raises(Refused, match="all tenants"):
        check(Principal("n", "admin", frozenset({"red"})), scrub, "red")


def test_accounts_are_of_the_tokens_tenants():
    red, whole = Principal("n", "viewer", frozenset({"red"})), Principal("n", "viewer")
    ask = o.ListReceipts(0.0, 1.0, 1)
    assert narrowed(whole, ask) == ask
    assert narrowed(red, ask) == o.ListReceipts(0.0, 1.0, 1, tenants=["red"])
    with pytest.raises(Refused):
        narrowed(red, o.ListReceipts(0.0, 1.0, 1, tenants=["red", "blue"]))


def test_a_limited_token_sees_its_own():
    red = Principal("n", "viewer", frozenset({"red"}))
    stats = NodeStats(node="a", clients=7, tenants={"red": TenantStats(), "blue": TenantStats()})
    raw = msgspec.json.encode(stats)
    assert shown(Principal("n", "viewer"), o.Inspect(), raw) == raw
    assert b"blue" not in shown(red, o.Inspect(), raw) and b'"clients":7' not in shown(
        red, o.Inspect(), raw
    )
    numbers = dict.fromkeys(("seen", "total", "blocks", "nbytes", "kept", "age_s", "took_s"), 0)
    about = {"node": "a", "kind": "evict", "state": "done", "dry_run": False, "by": "x", **numbers}
    jobs = [{"job": name, "tenant": of, **about} for name, of in (("1", "red"), ("2", "blue"))]
    found = msgspec.json.decode(shown(red, o.Jobs(), msgspec.json.encode(jobs)))
    assert [job["job"] for job in found] == ["1"]
    details: list[dict[str, Any]] = [{"tenant": "red"}, {"tenant": "blue"}, {}]
    page = Events([Event(1, 0.0, "a", "change", each) for each in details], 1, 3)
    found = msgspec.json.decode(shown(red, o.Events(0, 9), msgspec.json.encode(page)))
    assert [event["details"] for event in found["events"]] == details[:1] and found["last"] == 3


@pytest.mark.parametrize("kind", RULES)
def test_there_and_back(kind):
    message = example(kind)
    shape = msgspec.json.decode(msgspec.json.encode(to_json(message)), type=shape_of(kind))
    again: Any = message_of(kind, shape)
    if kind is o.BeginJob:
        assert again.job == message.job and msgspec.json.decode(again.spec)["everything"]
    else:
        assert again == message
