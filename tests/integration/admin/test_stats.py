"""What other daemons tell of themselves is checked before anything is made of it."""

import asyncio
import copy
from types import SimpleNamespace

import pytest

from kvpool.admin.cluster_view import Answers, Cluster, View
from kvpool.admin.handlers.inventory import Looking, gather_namespaces, gather_tenants
from kvpool.admin.handlers.monitoring import hottest_prefixes
from kvpool.admin.history import count
from kvpool.admin.node_stats import check
from kvpool.admin.scope import having
from kvpool.admin.types import OfNode
from kvpool.errors import ProtocolError
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
        return client.ask_node(operator_wire.Inspect())


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

    looking = Looking(SimpleNamespace(view=view, stats=known))
    call = SimpleNamespace(who=SimpleNamespace(sees=all_of_them, whole=True))
    await looking.list_segments(call, OfNode("a"))
    count(stats, 1.0)
    gather_tenants(answers, all_of_them)
    gather_namespaces(VIEW, answers, all_of_them)
    hottest_prefixes([stats], all_of_them)
    having(answers, "default", RECORD.digest().hex())


def test_what_passes_can_be_shown(stats):
    check(stats)
    asyncio.run(show(stats))
    passed = refused = 0
    for path, changed in wrongs(stats):
        try:
            check(changed)
        except ProtocolError:
            refused += 1
        else:
            passed += 1
            try:
                asyncio.run(show(changed))
            except Exception as error:
                raise AssertionError(f"wrong at {path}") from error
    assert passed > 100 and refused > 100


def test_a_node_with_wrong_numbers_is_named_and_the_others_are_shown(stats):
    async def answer(message, kind, **more):
        if isinstance(message, operator_wire.Cluster):
            return VIEW
        return stats if more["node"] == "a" else {**stats, "tenants": 7}

    async def ask():
        cluster = Cluster(SimpleNamespace(json=answer), clock=lambda: 0.0)
        return await cluster.stats_of(["a", "b"])

    found = asyncio.run(ask())
    assert found.by_node == {"a": stats}
    assert set(found.unreachable) == {"b"} and "tenants" in found.unreachable["b"]
