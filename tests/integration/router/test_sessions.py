"""Sessions through a router: what its engines are told in bodies, and its daemon beside that."""

import asyncio
from typing import Any

from kvpool.types import NamespaceRecord
from tests.support.local_cluster import UNHURRIED, LocalCluster

RECORD = NamespaceRecord.simple("sessions", block_bytes=4096, block_tokens=16)
CHAT = {"x-session-id": "chat"}


def told(seen: Any) -> Any:
    return (seen.body.get("kv_transfer_params") or {}).get("kvpool_session")


async def test_prefill_and_decode_engines_are_told(world: Any) -> None:
    prefill = await world.engine("p", role="prefill")
    decode = await world.engine("d", role="decode")
    await world.router()
    for stream in (False, True):
        metadata = {"agent_id": "sub", "session_end": "true"}
        text = f"a question of some length {stream} " * 20
        said = await world.chat(text, headers=CHAT, metadata=metadata, stream=stream, max_tokens=5)
        assert said.text == world.right_chat(text, 5)
    assert [told(seen) for seen in world.asked(decode)] == [
        {"id": "chat", "agent": "sub", "end": True}
    ] * 2
    *parts, last = (told(seen) for seen in world.asked(prefill))
    assert last == {"id": "chat", "agent": "sub"}
    assert set(map(str, parts)) <= {"None", str(last)}


async def test_a_session_goes_on_where_another_engine_failed(world: Any) -> None:
    engines = {name: await world.engine(name) for name in "ab"}
    await world.router()
    for name in "ab":
        await world.fault(name, {"kind": "cut", "times": 1})
    said = await world.complete("a question", headers=CHAT, max_tokens=5)
    assert said.text == world.right("a question", 5)
    calls = [seen for engine in engines.values() for seen in world.asked(engine)]
    assert [told(seen) for seen in calls] == [{"id": "chat"}] * len(calls)


async def test_absurd_hints_are_counted_and_cost_nothing(world: Any) -> None:
    engine = await world.engine()
    await world.router()
    own = {"kvpool_session": {"id": "x" * 1_000_000, "agent": 7, "end": ["tool"]}}
    said = await world.complete("a question", kv_transfer_params=own, metadata=7, max_tokens=5)
    assert said.text == world.right("a question", 5)
    await world.all(
        *(
            world.complete("a question", headers={"x-session-id": f"s-{number}"}, max_tokens=1)
            for number in range(200)
        )
    )
    (first, *others) = world.asked(engine)
    assert first.body["kv_transfer_params"] is None
    assert sorted(told(seen)["id"] for seen in others) == sorted(f"s-{n}" for n in range(200))
    metrics = await world.get("/metrics")
    assert "kvpool_router_session_hints_ignored_total 4.0" in metrics
    assert "kvpool_router_session_requests_total 200.0" in metrics


async def test_tenants_have_no_session_in_common(world: Any, folder: Any) -> None:
    engine = await world.engine()
    tenants = {}
    for name in ("red", "blue"):
        (folder / name).write_text(f"token-of-{name}-which-is-long-enough")
        (folder / name).chmod(0o600)
        tenants[name] = {"token_file": str(folder / name)}
    operator = "token-of-the-operator-long-enough"
    await world.router(environ={"KVPOOL_ROUTER_TOKEN": operator}, tenants=tenants)
    for name in ("red", "blue"):
        world.token = f"token-of-{name}-which-is-long-enough"
        await world.complete("a question", headers=CHAT, max_tokens=1)
    assert [told(seen)["id"] for seen in world.asked(engine)] == ["red/chat", "blue/chat"]
    world.token = "token-of-red-which-is-long-enough"
    assert (await world.call("POST", "/sessions/chat/end")).body == {
        "session": "chat",
        "ended": True,
    }
    again = await world.call("POST", "/sessions/chat/end")
    assert (again.status, again.body["error"]["type"]) == (404, "NotFoundError")
    world.token = operator
    assert (await world.call("POST", "/sessions/blue/chat/end")).status == 404
    world.token = "nobody"
    assert (await world.call("POST", "/sessions/chat/end")).status == 401
    world.token = "token-of-blue-which-is-long-enough"
    assert (await world.call("POST", f"/sessions/{'x' * 300}/end")).status == 400
    assert (await world.call("POST", "/sessions/chat/end")).status == 200


async def test_the_daemon_of_the_engine_hears_that_a_session_ends(world: Any, start: Any) -> None:
    daemon = start("--node", "node-a")
    await world.engine("a")
    await world.router(daemon=True, socket=daemon.socket)
    with daemon.client() as plugin:
        ns = plugin.open(RECORD)
        keys = [number.to_bytes(16, "big") for number in range(4)]
        plugin.put(ns, keys, [bytes(4096)] * 4)

        def expended() -> int:
            return int(plugin.stats().counters.expended)

        async def said_after(count: int) -> bool:
            return f'session_news_total{{outcome="told"}} {count}.0' in await world.get("/metrics")

        # As the plugin does at the end of each turn.
        plugin.sessions.turn(ns, "chat", keys)
        await world.chat("a question", headers=CHAT, max_tokens=300)
        assert expended() == 0
        assert (await world.call("POST", "/sessions/chat/end")).status == 200
        await world.until(lambda: asyncio.to_thread(lambda: expended() == 4), "it has ended")
        plugin.sessions.turn(ns, "chat", keys[:2])
        end = {**CHAT, "x-dynamo-session-final": "true"}
        await world.chat("a question", headers=end, max_tokens=300)
        await world.until(lambda: said_after(2), "the daemon was told of the end")


async def test_a_session_that_goes_on_at_another_node_has_ended_where_it_was(
    world: Any, folder: Any
) -> None:
    with LocalCluster(folder / "c", nodes=0, environ=UNHURRIED) as cluster:
        nodes = [cluster.add(f"node-{name}", "--memory", "32MiB") for name in "ab"]
        cluster.wait_acquainted()
        engines = {name: await world.engine(name) for name in "ab"}
        await world.router(daemon=True, socket=nodes[0].socket)
        keys = [number.to_bytes(16, "big") for number in range(4)]
        with nodes[0].client(connect=True) as a, nodes[1].client(connect=True) as b:

            async def turn(plugin: Any, name: str, other: str) -> None:
                """Served by one engine; and what its plugin does then."""
                await world.call("DELETE", f"/engines/{name}/drain")
                assert (await world.call("POST", f"/engines/{other}/drain")).status == 200
                await world.chat(f"a question to {name}", headers=CHAT, max_tokens=300)
                assert told(world.asked(engines[name])[-1]) == {"id": "chat"}
                ns = plugin.open(RECORD)
                plugin.put(ns, keys, [bytes(4096)] * 4)
                plugin.sessions.turn(ns, "chat", keys)

            async def ended(plugin: Any) -> bool:
                stats = await asyncio.to_thread(plugin.stats)
                return bool(stats.counters.expended == 4)

            await turn(a, "a", "b")
            await turn(b, "b", "a")
            await world.until(lambda: ended(a), "it has ended at the first node")
            assert not await ended(b)
            assert (await world.call("POST", "/sessions/chat/end")).status == 200
            await world.until(lambda: ended(b), "it has ended at the second node")
