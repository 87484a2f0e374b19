"""What other daemons tell of themselves is checked before anything is made of it."""

import asyncio
import copy
import time
from types import SimpleNamespace

import msgspec
import pytest

from kvpool.admin.cluster_view import NODE_S, Answers, Cluster, View, check
from kvpool.admin.handlers.inventory import Looking, gather_namespaces, gather_tenants
from kvpool.admin.handlers.monitoring import hottest_prefixes
from kvpool.admin.scope import having
from kvpool.admin.types import OfNode
from kvpool.errors import ProtocolError
from kvpool.placement.records import NamespaceEntry, NamespaceSettings
from kvpool.telemetry.node_stats import decode
from kvpool.telemetry.rates import count, fills
from kvpool.types import NamespaceRecord
from kvpool.wire import operator as operator_wire

RECORD = NamespaceRecord.simple("stats", block_bytes=4096, block_tokens=16)
WRONG = ("x", None, -1.5, [], {}, [0], {"x": 0}, {"default": {}})
VIEW = View("c", "a", "1", "member", "serving", (), (), ())


@pytest.fixture
def stats(start, folder):
    """Those of a real daemon with blocks in memory and a disk."""
    daemon = start("--ssd", f"{folder}/disk=16MiB")
    with daemon.client(connect=True) as client:
        keys = [bytes([number]) * 16 for number in range(8)]
        namespace = client.open(RECORD)
        client.put(namespace, keys, [bytes(4096)] * 8)
        client.acquire(namespace, keys).release()
        return msgspec.to_builtins(client.inspect())


def wrongs(stats):
    """The same with one value left out or wrong, at every place."""

    def places(value, path=()):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*path, key)
            if isinstance(value[key], (dict, list)):
                yield from places(value[key], (*path, key))

    for path in list(places(stats)):
        for wrong in (KeyError, *WRONG):
            changed = copy.deepcopy(stats)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if wrong is KeyError:
                del inner[path[-1]]
            else:
                inner[path[-1]] = wrong
            yield path, changed


async def show(stats):
    """All that the gateway makes of them."""
    answers = Answers({"a": stats})

    def all_of_them(_):
        return True

    async def view():
        return VIEW

    async def known():
        return answers

    looking = Looking(SimpleNamespace(view=view, stats=known), 0)
    call = SimpleNamespace(who=SimpleNamespace(sees=all_of_them, whole=True))
    await looking.get_node(call, OfNode("a"))
    count(stats)
    fills(stats)
    gather_tenants(answers, all_of_them)
    gather_namespaces(VIEW, answers, all_of_them)
    hottest_prefixes([stats], all_of_them)
    having(answers, "default", RECORD.digest().hex())


def read(stats):
    known = decode(msgspec.json.encode(stats))
    check(known)
    return known


def test_what_passes_can_be_shown(stats):
    asyncio.run(show(read(stats)))
    passed = refused = 0
    for path, changed in wrongs(stats):
        try:
            known = read(changed)
        except ProtocolError:
            refused += 1
        else:
            passed += 1
            try:
                asyncio.run(show(known))
            except Exception as error:
                raise AssertionError(f"wrong at {path}") from error
    assert passed > 100 and refused > 100


def test_a_node_with_wrong_numbers_is_named_and_the_others_are_shown(stats):
    async def answer(message, kind, **more):
        if isinstance(message, operator_wire.Cluster):
            return VIEW
        numbers = stats if more["node"] == "a" else {**stats, "tenants": 7}
        try:
            return msgspec.convert(numbers, kind)
        except msgspec.ValidationError as error:
            raise ProtocolError(str(error)) from None

    async def ask():
        cluster = Cluster(SimpleNamespace(get=answer), clock=lambda: 0.0)
        return await cluster.stats_of(["a", "b"])

    found = asyncio.run(ask())
    assert found.nodes == {"a": read(stats)}
    assert set(found.unreachable) == {"b"} and "tenants" in found.unreachable["b"]


def test_a_change_at_another_node_is_waited_for():
    """Our own node hears of it a moment later."""

    def view(node, replicas):
        settings = NamespaceSettings(replicas=replicas)
        entry = NamespaceEntry("red", "ab" * 16, "{}", (), settings=settings)
        return msgspec.structs.replace(VIEW, node=node, namespaces=(entry,))

    looks = []

    async def answer(message, kind, node="a", **more):
        if node == "b":
            return view("b", 3)
        looks.append(node)
        return view("a", 3 if len(looks) > 3 else 2)

    async def scenario():
        cluster = Cluster(SimpleNamespace(get=answer), clock=time.monotonic)
        await cluster.follow("b", "red", "ab" * 16)
        return (await cluster.view()).namespace("red", "ab" * 16)

    assert asyncio.run(scenario()).settings.replicas == 3
    assert len(looks) == 4


def test_a_change_that_is_never_heard_of_is_not_waited_for_longer_than_an_answer():
    now = [0.0]

    async def answer(message, kind, node="a", **more):
        now[0] += 0.5
        return msgspec.structs.replace(VIEW, node=node) if node == "a" else theirs

    entry = NamespaceEntry("red", "ab" * 16, "{}", ())
    theirs = msgspec.structs.replace(VIEW, node="b", namespaces=(entry,))

    async def scenario():
        cluster = Cluster(SimpleNamespace(get=answer), clock=lambda: now[0])
        await cluster.follow("b", "red", "ab" * 16)

    asyncio.run(scenario())
    assert NODE_S <= now[0] <= NODE_S + 2.0


@pytest.mark.parametrize("fields", ["", "{", "[]", "7", "[" * 5_000])
def test_a_namespace_with_an_unreadable_record_is_shown_beside_the_others(fields):
    """Anybody who writes to etcd can make one; its epoch counts all the same."""
    right = NamespaceEntry("default", RECORD.digest().hex(), RECORD.canonical().decode(), ())
    wrong = NamespaceEntry("default", "00" * 16, fields, (), epoch=7)
    view = View("c", "a", "1", "member", "serving", (), (), (wrong, right))
    found = {each.digest: each for each in gather_namespaces(view, Answers({}), lambda _: True)}
    assert found[right.digest].fields["model"] == "stats"
    assert (found[wrong.digest].fields, found[wrong.digest].epoch) == ({}, 7)
