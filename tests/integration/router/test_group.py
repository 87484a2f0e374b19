"""Several routers as processes: one schedules for all, and its end hurts nobody."""

import asyncio
import signal
from typing import Any

from tests.integration.router.conftest import Answer, Process, World
from tests.support.servers.etcd import free_port
from tests.support.stub_engine import Speed

SPEED = Speed(prefill_tokens_s=20_000.0, decode_s=0.005)


async def group(world: World, count: int = 3, **config: Any) -> list[tuple[str, Process]]:
    """Routers that know each other, in the order of their beginning: the first one schedules."""
    ports = [free_port() for _ in range(count)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    routers = []
    for port in ports:
        process = await world.router(
            verified=False, listen=f"127.0.0.1:{port}", routers=urls, **config
        )
        routers.append((world.url, process))
    for url, _ in routers:
        world.url = url
        await world.until(lambda: connected(world, count), "all routers see each other")
    return routers


async def connected(world: World, count: int) -> bool:
    shown = await world.get("/engines")
    known = {each["hashes"] for each in shown["knowledge"]["engines"].values()}
    return known == {"verified"} and len(shown["group"]["routers"]) == count


async def led_by(world: World, url: str) -> str:
    world.url = url
    leader: str = (await world.get("/engines"))["group"]["leader"]
    return leader


async def ask(world: World, url: str, prompt: Any, **body: Any) -> Answer:
    world.url = url
    return await world.complete(prompt, **body)


async def test_one_schedules_for_all(world: World) -> None:
    """Whoever is asked, the prompt goes where its blocks are, and each router tells the same of it."""
    engines = {name: await world.engine(name) for name in "ab"}
    routers = await group(world)
    leaders = {await led_by(world, url) for url, _ in routers}
    assert len(leaders) == 1
    prompt = world.prompt(1, 400)
    first = await ask(world, routers[1][0], prompt, max_tokens=3)
    assert first.text == world.right(prompt, 3)
    (holder,) = [name for name, engine in engines.items() if world.asked(engine)]
    for number, (url, _) in enumerate(routers * 2):
        # What one router has answered the leader learns a moment later; until then its engine looks busy, and another
        # one may rightly be chosen.
        await world.until(
            lambda: idle(world, routers[0][0]), "the leader knows of no active request"
        )
        said = await ask(world, url, prompt + [7] * (16 + number), max_tokens=3, stream=True)
        assert said.done
        assert said.text == world.right(prompt + [7] * (16 + number), 3)
    others = [name for name, engine in engines.items() if name != holder and world.asked(engine)]
    assert not others, "all of them went where the prefix is"
    ident = said.headers["x-kvpool-request-id"]
    for url, _ in routers:
        world.url = url
        steps = (await world.get(f"/explain/{ident}"))["steps"]
        assert [step["engine"] for step in steps if step["what"] == "order"] == [holder]
    learned = []
    for url, _ in routers:
        world.url = url
        learned.append((await world.get("/engines"))["knowledge"]["kinds"])
    assert learned[0] == learned[1] == learned[2], "what was measured is told by whoever is asked"
    (kind,) = {row["kind"] for row in (await world.get("/engines"))["engines"]}
    assert learned[0][kind]["prefill"]["count"] > 0


async def test_the_leader_dies_under_load(world: World) -> None:
    """Requests of the others end right, none of them later than its prompt takes."""
    for name in "pqde":
        role = "prefill" if name in "pq" else "decode"
        await world.engine(name, role=role, speed=SPEED)
    routers = await group(world)
    assert await led_by(world, routers[2][0]) == await led_by(world, routers[0][0])
    urls = [url for url, _ in routers[1:]]
    tasks = [
        asyncio.create_task(
            ask(world, urls[number % 2], world.prompt(number, 600), max_tokens=20, stream=True)
        )
        for number in range(40)
    ]
    await world.until(lambda: waiting(world, routers[0][0]), "the leader has requests")
    routers[0][1].kill()
    answers = await asyncio.gather(*tasks)
    for number, said in enumerate(answers):
        assert said.done, said
        assert said.text == world.right(world.prompt(number, 600), 20)
    assert await led_by(world, urls[0]) == await led_by(world, urls[1])

    async def nothing_left() -> bool:
        rows = (await world.get("/engines"))["engines"]
        return all(row["prefills"] == row["decodes"] == row["context_tokens"] == 0 for row in rows)

    await world.until(nothing_left, "the new leader hears of the end of each")


async def idle(world: World, url: str) -> bool:
    world.url = url
    rows = (await world.get("/engines"))["engines"]
    return not any(row["prefills"] or row["decodes"] or row["free_in_s"] for row in rows)


async def waiting(world: World, url: str) -> bool:
    world.url = url
    text = await world.get("/metrics")
    return any(
        float(line.split()[-1]) >= 10
        for line in text.splitlines()
        if line.startswith("kvpool_router_requests_waiting")
    )


async def test_a_leader_that_shuts_down_gives_its_place_away(world: World) -> None:
    await world.engine("a")
    routers = await group(world)
    before = await led_by(world, routers[1][0])
    routers[0][1].signal(signal.SIGTERM)
    assert await routers[0][1].ended() == 0
    for url, _ in routers[1:]:
        said = await ask(world, url, "after the first one", max_tokens=3)
        assert said.text == world.right("after the first one", 3)
        assert await led_by(world, url) != before


async def test_an_operators_word_reaches_all(world: World) -> None:
    """And a router that comes later."""
    await world.engine("a")
    await world.engine("b")
    routers = await group(world, 2)
    world.url = routers[1][0]
    assert (await world.call("POST", "/engines/a/drain")).status == 200
    assert (await world.call("PUT", "/engines/b/weight", b'{"weight": 0.5}')).status == 200

    async def known() -> bool:
        rows = {row["name"]: row for row in (await world.get("/engines"))["engines"]}
        return rows["a"]["state"] == "drained" and rows["b"]["weight"] == 0.5

    for url, _ in routers:
        world.url = url
        await world.until(known)
    routers[0][1].kill()
    await world.router(
        listen=routers[0][0].removeprefix("http://"), routers=[url for url, _ in routers]
    )
    await world.until(known)


async def test_processes_share_a_port(world: World) -> None:
    """Each has a share of the connections, and an address of its own; one schedules for all."""
    for name in "ab":
        await world.engine(name)
    shared, *own = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in own]
    for url in urls:
        await world.router(
            verified=False,
            listen=f"127.0.0.1:{shared}",
            own_listen=url.removeprefix("http://"),
            reuse_port=True,
            routers=urls,
        )
    for url in urls:
        world.url = url
        await world.until(lambda: connected(world, 2), "the routers see each other")
    prompts = [world.prompt(number, 60) for number in range(64)]
    answers = await world.all(
        *(ask(world, f"http://127.0.0.1:{shared}", prompt, max_tokens=3) for prompt in prompts)
    )
    assert [said.text for said in answers] == [world.right(prompt, 3) for prompt in prompts]
    for url in urls:
        world.url = url
        text = await world.get("/metrics")
        assert 'kvpool_router_requests_total{outcome="answered"} 0.0' not in text
    assert len({await led_by(world, url) for url in urls}) == 1
