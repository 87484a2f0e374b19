"""Data-parallel ranks behind one URL: each is an engine of its own for the router, and gets what is its own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvpool.router.hashing import HashSpec, chain, none_hash
from kvpool.types import EngineRecord, NamespaceRecord
from tests.integration.router.conftest import World
from tests.integration.router.test_knowledge import learning
from tests.support.servers.etcd import free_ports
from tests.support.stub_engine import Settings, StubEngine
from tests.support.waiting import until_async

BLOCK = 16
SPEC = HashSpec(BLOCK, "sha256_cbor", none_hash("sha256_cbor"))


def table_of(url: str, ports: int, ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "url": url,
        "name": "e",
        "data_parallel_size": ranks,
        "events": f"tcp://127.0.0.1:{ports}",
        "replay": f"tcp://127.0.0.1:{ports + ranks}",
        "block_tokens": BLOCK,
        **more,
    }


async def ranked(world: World, ranks: int, **settings: Any) -> StubEngine:
    """An engine with ranks for the router that is started next, as an operator would configure it."""
    ports = free_ports(2 * ranks)
    engine = await world.start(
        "e",
        ranks=ranks,
        events=f"tcp://127.0.0.1:{ports}",
        replay=f"tcp://127.0.0.1:{ports + ranks}",
        **settings,
    )
    world.tables.append(table_of(engine.url, ports, ranks))
    return engine


async def heard(world: World, engine: StubEngine) -> bool:
    """Whether the router knows all that the ranks have in their caches."""
    known = (await world.get("/engines"))["knowledge"]["engines"]
    return all(
        known[f"e-dp{number}"]["events"]["blocks"] == rank.core.blocks
        for number, rank in enumerate(engine.ranks)
    )


async def test_a_prefix_goes_to_the_rank_that_has_it(world: World) -> None:
    engine = await ranked(world, 3)
    await world.router()
    rows = {row["name"]: row for row in (await world.get("/engines"))["engines"]}
    assert set(rows) == {"e-dp0", "e-dp1", "e-dp2"}
    assert {row["url"] for row in rows.values()} == {engine.url}
    places: dict[int, int] = {}
    for number in range(6):
        prompt = world.prompt(number, 40 * BLOCK)
        answer = await world.complete(prompt, max_tokens=4)
        assert answer.text == world.right(prompt, 4)
        places[number] = world.asked(engine)[-1].rank
        first = chain(SPEC, prompt)[0]
        assert [first in rank.core for rank in engine.ranks].index(True) == places[number]
    assert len(set(places.values())) > 1
    await world.until(lambda: heard(world, engine), "the router has heard of the blocks")
    for number in (3, 1, 0, 5, 2, 4):
        prompt = world.prompt(number, 40 * BLOCK)
        answer = await world.complete([*prompt, 7, 8, 9], max_tokens=2)
        assert answer.text == world.right([*prompt, 7, 8, 9], 2)
        seen = world.asked(engine)[-1]
        assert (seen.asked_rank, seen.rank) == (str(places[number]), places[number])
        assert seen.jobs[0].cached == 40 * BLOCK


async def test_work_without_a_prefix_is_spread_over_the_ranks(world: World) -> None:
    engine = await ranked(world, 2)
    await world.router()
    answers = await world.all(
        *(world.complete(world.prompt(number, 8 * BLOCK), max_tokens=8) for number in range(24))
    )
    assert [each.status for each in answers] == [200] * 24
    counts = Counter(seen.rank for seen in world.asked(engine))
    assert set(counts) == {0, 1}
    assert min(counts.values()) >= 6


async def test_a_rank_that_the_engine_does_not_have_costs_no_request(world: World) -> None:
    """An operator has configured more ranks than there are."""
    engine = await world.start("e", ranks=1)
    for rank in range(2):
        world.tables.append({"url": engine.url, "rank": rank, "name": f"r{rank}"})
    await world.router(verified=False)
    answers = [await world.complete(world.prompt(n, 64), max_tokens=2) for n in range(8)]
    assert [each.status for each in answers] == [200] * 8
    assert "it has no rank 1" in world.routers[0].said


def record(engine: StubEngine, events: str, rank: int | None, **more: Any) -> EngineRecord:
    end = f"-dp{rank}" if rank else ""
    return EngineRecord(
        engine.url,
        model="stub",
        events=f"ipc://{events}{end}",
        replay=f"ipc://{events}r{end}",
        groups=(0,),
        hash_algorithm="sha256_cbor",
        none_hash=none_hash("sha256_cbor").hex(),
        block_tokens=BLOCK,
        rank=rank,
        **more,
    )


@pytest.mark.parametrize("configured", [False, True])
async def test_ranks_that_announce_themselves(start: Any, folder: Any, configured: bool) -> None:
    """And those of a server whose URL is configured, such as for its key."""
    daemon = start("--node", "n")
    namespace = NamespaceRecord.simple("stub", block_bytes=4096, block_tokens=BLOCK)
    settings = Settings(
        ranks=2, events=f"ipc://{folder}/e", replay=f"ipc://{folder}/er", api_key="k" * 16
    )
    with (
        daemon.client() as one,
        daemon.client() as two,
        daemon.client() as router,
    ):
        plugins = {0: one, 1: two}
        opened = {rank: client.open(namespace) for rank, client in plugins.items()}
        async with StubEngine(settings) as engine:
            tables = [{"url": engine.url, "name": "e"}] if configured else []
            async with learning(router, tables) as learner:
                know = learner.knowledge
                base = "e" if configured else engine.url.removeprefix("http://")
                assert set(know.engines) == ({"e"} if configured else set())
                for rank, client in plugins.items():
                    said = record(engine, f"{folder}/e", rank, capacity_tokens=1000 + rank)
                    client.engine.announce(opened[rank], said)
                names = {f"{base}-dp0", f"{base}-dp1"}
                await until_async(lambda: set(know.engines) == names, "both are known")
                second = know.engines[f"{base}-dp1"]
                assert (second.rank, second.capacity_tokens, second.node) == (1, 1001, "n")
                assert len(know._servers) == 1
                # One has gone, the other is still announced: a server has ended with its last one.
                two.engine.announce(opened[1], None)
                await until_async(lambda: set(know.engines) == {f"{base}-dp0"}, "one has left")
                # An older plugin does not tell ranks apart.
                one.engine.announce(opened[0], record(engine, f"{folder}/e", None))
                await until_async(lambda: set(know.engines) == {base}, "the whole server")
                assert know.engines[base].rank is None
