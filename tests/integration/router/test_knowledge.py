"""What the router learns of stub engines and of a real daemon: engines, caches, the pool, hashes."""

import contextlib
import threading
import time
from typing import Any

import aiohttp
import msgspec
import pytest

from kvpool.client import Client
from kvpool.errors import Unavailable
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.engines.engine_catalog import EngineCatalog
from kvpool.router.engines.pool_view import PoolViews
from kvpool.router.hashing import chain, none_hash
from kvpool.router.prompts.rendering import Renderer
from kvpool.router.prompts.tokens import Tokenizer, TokenizeRefused, UnknownModel
from kvpool.router.requests.prompts import Prompts
from kvpool.router.upstream.specs import EngineSpec, scheduled
from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.index import PrefixIndex
from kvpool.types import EngineRecord, NamespaceRecord
from tests.support.patient_router import be_patient
from tests.support.servers.etcd import free_port
from tests.support.stub_engine import Settings, StubEngine
from tests.support.stub_engine.tokens import tokens_of
from tests.support.waiting import PATIENCE_S, until_async

BLOCK = 16
BLOCK_BYTES = 4096
RECORD = NamespaceRecord.simple("stub", block_bytes=BLOCK_BYTES, block_tokens=BLOCK)
TEXT = "one two three four five six seven " * 30


class Learner:
    """What is known of engines and prompts, and all that is said of them."""

    def __init__(
        self, session: aiohttp.ClientSession, client: Client | None, tables: Any, pace: float
    ) -> None:
        self.index = PrefixIndex()
        nodes: dict[str, str] = {}
        self.cluster = Cluster({}, nodes, Traffic())
        self.pools = PoolViews(self.index, nodes, {})
        self.daemon = None if client is None else DaemonLink(client)
        self.said: list[tuple[str, str]] = []
        self.knowledge = EngineCatalog(
            engines=tables,
            daemon=self.daemon,
            session=session,
            index=self.index,
            pools=self.pools,
            cluster=self.cluster,
            joined=lambda spec: self.said.append(("joined", spec.name)),
            left=lambda name: self.said.append(("left", name)),
            changed=lambda spec: self.said.append(("changed", spec.name)),
            clock=lambda: pace * time.monotonic(),
        )
        self.prompts = Prompts(
            self.knowledge, self.daemon, Tokenizer(session), Renderer(session), self.pools
        )

    def lengths(self, keys: Any) -> dict[str, int]:
        return self.index.match(keys, time.monotonic()).lengths

    def at(self, url: str) -> EngineSpec:
        """The engine at this address."""
        (spec,) = [each for each in self.knowledge.engines.values() if each.url == url]
        return spec

    async def discover(self) -> None:
        """Ask the daemon now, as is done every second."""
        await self.knowledge._discover()

    def feed(self, name: str) -> Any:
        """What an engine's events are read into."""
        return self.knowledge._caches.feed(name)

    def announced(self, name: str) -> bool:
        """Whether the daemon's last answer had the engine."""
        return bool(self.knowledge.stats()["engines"][name]["announced"])

    def holders(self, name: str) -> Any:
        return scheduled(self.knowledge.engines[name])


@contextlib.asynccontextmanager
async def learning(client: Client | None = None, tables: Any = (), pace: float = 1.0) -> Any:
    """pace: of the catalog's clock, beside the machine's."""
    with pytest.MonkeyPatch.context() as patch:
        be_patient(patch.setattr)
        async with aiohttp.ClientSession() as session:
            learner = Learner(session, client, tables, pace)
            await learner.knowledge.start()
            try:
                yield learner
            finally:
                await learner.prompts.close()
                await learner.knowledge.close()
                if learner.daemon is not None:
                    learner.daemon.close()


def table_of(engine: StubEngine, folder: Any, **more: Any) -> dict[str, Any]:
    events = f"ipc://{folder}/e"
    return {
        "url": engine.url,
        "name": "e",
        "events": events,
        "replay": f"{events}r",
        "block_tokens": BLOCK,
        **more,
    }


def settings(folder: Any, **more: Any) -> Settings:
    return Settings(events=f"ipc://{folder}/e", replay=f"ipc://{folder}/er", **more)


async def complete(engine: StubEngine, text: str, **more: Any) -> None:
    body = {"model": "stub", "prompt": text, "max_tokens": 1, **more}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def test_a_cache_is_learnt_and_forgotten(folder: Any) -> None:
    port = free_port()  # of its successors, too
    async with (
        StubEngine(settings(folder, loras=("tuned",), port=port)) as engine,
        learning(tables=[table_of(engine, folder)]) as learner,
    ):
        know = learner.knowledge
        assert learner.said[0] == ("joined", "e")
        assert know.engines["e"].models == ("stub", "tuned")
        assert await know.verify("e") == "verified"
        prompt = await learner.prompts.prompt({"model": "stub", "prompt": TEXT}, "completions")
        assert list(prompt.tokens) == tokens_of(TEXT)
        assert prompt.hashes == chain(know.engines["e"].hashing, tokens_of(TEXT))
        assert learner.lengths(prompt.keys) == {}
        await complete(engine, TEXT)
        whole = {"gpu:e": len(prompt.keys)}
        await until_async(lambda: learner.lengths(prompt.keys) == whole, "the cache is known")
        stats = know.stats()
        assert stats["lag_p99_s"] is not None
        assert stats["engines"]["e"]["hashes"] == "verified"
        # A router that is started anew.
        async with learning(tables=[table_of(engine, folder)]) as again:
            await until_async(
                lambda: again.lengths(prompt.keys) == whole, "the events are replayed"
            )
        # Blocks under a salt, or of an adapter, are others.
        for body in ({"prompt": TEXT, "cache_salt": "s"}, {"prompt": TEXT, "model": "tuned"}):
            other = await learner.prompts.prompt({"model": "stub", **body}, "completions")
            assert not set(other.keys) & set(prompt.keys)
            await complete(engine, TEXT, **{k: v for k, v in body.items() if k != "prompt"})
            await until_async(
                lambda o=other: learner.lengths(o.keys).get("gpu:e") == len(o.keys), "held"
            )
    # Its successor at the same place has an empty cache.
    async with learning(tables=[table_of(engine, folder)]) as learner:
        async with StubEngine(settings(folder, port=port)) as engine:
            await complete(engine, TEXT)
            await until_async(lambda: learner.lengths(prompt.keys) == whole, "it is heard")
        async with StubEngine(settings(folder, port=port)) as engine:
            await complete(engine, "another prompt " * 40)
            await until_async(lambda: learner.lengths(prompt.keys) == {}, "it began anew")


async def test_hashes_that_are_not_the_engines(folder: Any, caplog: Any) -> None:
    async with (
        StubEngine(settings(folder, hash_seed="other")) as engine,
        learning(tables=[table_of(engine, folder)], pace=2.5) as learner,
    ):
        know = learner.knowledge
        assert len((await learner.prompts.prompt({"prompt": TEXT}, "completions")).keys) > 0
        assert await know.verify("e") == "mismatch"
        asked = engine.counts()
        assert await know.verify("e") == "mismatch"
        assert engine.counts() == asked
        assert "does not hash blocks as announced" in caplog.text
        prompt = await learner.prompts.prompt({"prompt": TEXT}, "completions")
        assert prompt.tokens
        assert (prompt.keys, prompt.spec) == ((), None)
        assert know.engines["e"].hashing is None
        assert know.stats()["engines"]["e"]["hashes"] == "mismatch"
        assert ("left", "e") not in learner.said


async def test_hashes_of_an_engine_that_is_not_heard_are_not_called_wrong(folder: Any) -> None:
    async with (
        StubEngine(settings(folder)) as engine,
        learning(tables=[table_of(engine, folder) | {"topic": "another"}], pace=50) as learner,
    ):
        assert await learner.knowledge.verify("e") == "unverified"
        assert learner.knowledge.engines["e"].hashing is not None


async def test_an_engine_without_events_is_not_verified(folder: Any) -> None:
    async with (
        StubEngine(Settings()) as engine,
        learning(tables=[{"url": engine.url, "name": "e", "block_tokens": BLOCK}]) as learner,
    ):
        assert await learner.knowledge.verify("e") == "unverified"
        with pytest.raises(Unavailable):
            await learner.knowledge.verify("nobody")


async def test_prompts_that_cannot_be_had(folder: Any) -> None:
    async with (
        StubEngine(settings(folder)) as engine,
        learning(tables=[table_of(engine, folder)]) as learner,
    ):
        with pytest.raises(UnknownModel):
            await learner.prompts.prompt({"model": "other", "prompt": "x"}, "completions")
        with pytest.raises(TokenizeRefused):
            await learner.prompts.prompt({"messages": [5]}, "chat")
        for body in ({"prompt": ["a", "b"]}, {"prompt": "x", "prompt_embeds": "y"}):
            prompt = await learner.prompts.prompt(body, "completions")
            assert (prompt.tokens, prompt.keys, prompt.kinds) == ((), (), frozenset({"stub"}))
        ids = await learner.prompts.prompt({"prompt": [*range(40)]}, "completions")
        assert (len(ids.keys), len(ids.tokens)) == (2, 40)
        too_large = await learner.prompts.prompt({"prompt": [2**32] * 16}, "completions")
        assert too_large.keys == ()
    async with learning(tables=[table_of(engine, folder, model="stub")]) as learner:
        with pytest.raises(Unavailable):
            await learner.prompts.prompt({"prompt": "x"}, "completions", deadline_s=1.0)


def announced(engine: StubEngine, folder: Any, **more: Any) -> EngineRecord:
    return EngineRecord(
        engine.url,
        model="stub",
        events=f"ipc://{folder}/e",
        replay=f"ipc://{folder}/er",
        groups=(0,),
        hash_algorithm="sha256_cbor",
        none_hash=none_hash("sha256_cbor").hex(),
        block_tokens=BLOCK,
        **more,
    )


async def test_engines_that_announce_themselves(start: Any, folder: Any) -> None:
    daemon = start("--node", "n", "--label", "zone=z")
    with daemon.client() as plugin, daemon.client() as client:
        ns = plugin.open(RECORD)
        async with StubEngine(settings(folder)) as engine, learning(client) as learner:
            know = learner.knowledge
            assert not know.engines
            plugin.engine.announce(ns, announced(engine, folder))
            await until_async(lambda: know.engines, "it is found")
            (name,) = know.engines
            assert learner.said[0] == ("joined", name)
            spec = know.engines[name]
            assert (spec.node, spec.labels, spec.namespace) == ("n", {"zone": "z"}, ns.digest)
            assert await know.verify(name) == "verified"
            # What the pool has is asked for.
            prompt = await learner.prompts.prompt({"model": "stub", "prompt": TEXT}, "completions")
            assert await learner.prompts.look(prompt, 5.0)
            assert learner.lengths(prompt.keys) == {}
            keys = [each[-16:] for each in prompt.hashes[:5]]
            plugin.put(ns, keys, [bytes(BLOCK_BYTES)] * 5)
            assert await learner.prompts.look(prompt, 5.0)
            dram, ssd = scheduled(spec).tiers
            assert learner.lengths(prompt.keys) == {dram: 5, ssd: 5}
            assert learner.cluster.nodes == {dram: "n", ssd: "n"}
            plugin.remove(ns, keys[2:])
            assert await learner.prompts.look(prompt, 5.0)
            assert learner.lengths(prompt.keys) == {dram: 2, ssd: 2}
            why = await learner.prompts.why(prompt, name)
            assert why is not None
            assert (why["blocks"], why["missing"]["block"]) == (2, 2)
            assert why["missing"]["reason"] == "removed"
            assert await learner.prompts.why(prompt, "nobody") is None
            # It says something else of itself.
            plugin.engine.announce(ns, announced(engine, folder, follows_max=3))
            await until_async(lambda: know.engines[name].follows_max == 3, "the change is heard of")
            assert ("changed", name) in learner.said
            # Its daemon has gone: it stays, since it answers.
            daemon.kill()
            assert not await learner.prompts.look(prompt, 5.0)
            assert list(await learner.prompts.why(prompt, name) or ()) == ["error"]
            assert know.stats()["daemon"] is False
            again = start("--socket", daemon.socket, "--node", "n", name="again")
            await until_async(lambda: know.stats()["daemon"], "the new daemon is asked")
            assert again.process.poll() is None
            await until_async(lambda: not learner.announced(name), "it is announced no more")
            for _ in range(3):
                await learner.discover()
            assert name in know.engines
            assert ("left", name) not in learner.said


async def test_an_engine_that_has_gone_is_forgotten(start: Any, folder: Any) -> None:
    daemon = start("--node", "n")
    with daemon.client() as plugin, daemon.client() as client:
        ns = plugin.open(RECORD)
        engine = StubEngine(settings(folder))
        async with engine:
            plugin.engine.announce(ns, announced(engine, folder))
            learning_on = learning(client)
            learner = await learning_on.__aenter__()
            prompt = await learner.prompts.prompt({"prompt": TEXT}, "completions")
            keys = [each[-16:] for each in prompt.hashes]
            plugin.put(ns, keys[:3], [bytes(BLOCK_BYTES)] * 3)
            assert await learner.prompts.look(prompt, 5.0)
            assert learner.prompts.stats()["pool_keys"] == 3
        try:
            (name,) = learner.knowledge.engines
            plugin.engine.announce(ns, None)
            await until_async(lambda: ("left", name) in learner.said, "it has left")
            assert not learner.knowledge.engines
            assert learner.cluster.nodes == {}
            assert learner.prompts.stats()["pool_keys"] == 0
            # What is told of its namespace only now is of no use.
            assert not await learner.prompts.look(prompt, 5.0)
            await learner.prompts._look(learner.daemon, ns.digest, keys[0], prompt.keys, 5.0)
            assert learner.cluster.nodes == {}
        finally:
            await learning_on.__aexit__(None, None, None)


async def test_a_slow_daemon_keeps_nobody_waiting(start: Any, folder: Any) -> None:
    daemon = start("--node", "n")
    with daemon.client() as plugin, daemon.client() as client:
        ns = plugin.open(RECORD)
        async with StubEngine(settings(folder)) as engine:
            plugin.engine.announce(ns, announced(engine, folder))
            async with learning(client) as learner:
                prompt = await learner.prompts.prompt(
                    {"model": "stub", "prompt": TEXT}, "completions"
                )
                plugin.put(ns, [prompt.hashes[0][-16:]], [bytes(BLOCK_BYTES)])
                answers: list[dict[str, tuple[int, int]]] = []
                ask = client.routing.prefixes
                gate = threading.Event()

                def wait(*arguments: Any, **more: Any) -> Any:
                    gate.wait(PATIENCE_S)
                    answers.append(ask(*arguments, **more))
                    return answers[-1]

                client.routing.prefixes = wait
                assert not await learner.prompts.look(prompt, 0.01)
                assert learner.lengths(prompt.keys) == {}
                gate.set()
                await until_async(
                    lambda: learner.lengths(prompt.keys), "the late answer is written, too"
                )
                assert learner.prompts.stats()["late_looks"] == 1


async def test_engines_that_do_not_answer_are_not_asked_to_tokenise(folder: Any) -> None:
    async with StubEngine(settings(folder)) as engine:
        dead = [
            {"url": f"http://127.0.0.1:{n}", "name": str(n), "model": "stub"} for n in range(1, 7)
        ]
        async with learning(tables=[table_of(engine, folder, model="stub"), *dead]) as learner:
            know = learner.knowledge
            await until_async(
                lambda: not any(know.answers(learner.at(d["url"])) for d in dead), "they are asked"
            )
            for number in range(20):
                body = {"model": "stub", "prompt": f"{number}"}
                assert (await learner.prompts.prompt(body, "completions")).tokens == tokens_of(
                    f"{number}"
                )


class Said:
    """Stands for a daemon's client: engines as they are announced, whatever that is."""

    def __init__(self, *engines: dict[str, Any]) -> None:
        self.said = list(engines)
        self.asked = 0
        self.routing = self

    def engines(self) -> list[dict[str, Any]]:
        self.asked += 1
        return self.said


def said_of(engine: StubEngine, folder: Any, **more: Any) -> dict[str, Any]:
    record = msgspec.to_builtins(announced(engine, folder))
    return {**record, "node": "n", "labels": {}, "here": True, "incarnation": "0", **more}


async def test_an_announcement_that_makes_no_sense_is_passed_over(folder: Any, caplog: Any) -> None:
    """It may come from a newer node. The others count, and are heard of further on."""
    async with StubEngine(settings(folder)) as engine:
        good = said_of(engine, folder)
        cook, odd, strange = ({**good, "url": f"http://127.0.0.1:{n}"} for n in (1, 2, 3))
        cook["role"] = "cook"
        odd["groups"] = [-1]
        strange["hash_algorithm"] = "md5"
        client: Any = Said(cook, odd, strange)
        async with learning(client) as learner:
            know = learner.knowledge
            assert [spec.url for spec in know.engines.values()] == [strange["url"]]
            client.said.append(good)
            await until_async(lambda: len(know.engines) == 2, "the good one is found")
            asked = client.asked
            client.said[-1] = {**good, "role": "cook"}
            await until_async(lambda: client.asked > asked + 2, "it is asked on")
            assert learner.at(engine.url).role.name == "BOTH"
            assert caplog.text.count("engine http://127.0.0.1:1 is ignored") == 1
            assert caplog.text.count("engine http://127.0.0.1:2 is ignored") == 1
            prompt = await learner.prompts.prompt({"model": "stub", "prompt": TEXT}, "completions")
            assert prompt.spec == learner.at(engine.url).hashing


async def test_engines_are_not_announced_from_anywhere(folder: Any, caplog: Any) -> None:
    """Nor are their events read from anywhere."""
    async with StubEngine(settings(folder)) as engine:
        good = said_of(engine, folder, events="tcp://10.9.8.7:5557", replay="tcp://10.9.8.7:5558")
        urls = (
            "http://10.9.8.7:8000",
            "http://169.254.169.254",
            "http://evil.example",
            "http://u:p@127.0.0.1:1",
        )
        client: Any = Said(*({**good, "url": url} for url in urls), good)
        async with learning(client) as learner:
            know = learner.knowledge
            (spec,) = know.engines.values()
            assert spec.url == engine.url
            assert (spec.events, spec.replay) == ("", "")
            asked = client.asked
            await until_async(lambda: client.asked > asked + 2, "it is asked on")
            for url in urls:
                assert caplog.text.count(f"engine {url} is ignored") == 1
            assert "10.9.8.7 is in no network of announced_from" in caplog.text


async def test_a_configured_engine_stays_as_announced_while_it_answers(folder: Any) -> None:
    """Its node's daemon begins anew, and knows nothing of it for a while."""
    async with StubEngine(settings(folder)) as engine:
        client: Any = Said(said_of(engine, folder))
        table = {"url": engine.url, "name": "e"}
        async with learning(client, tables=[table]) as learner:
            know = learner.knowledge
            await until_async(lambda: know.engines["e"].models, "it answers")
            before, feed = know.engines["e"], learner.feed("e")
            assert (before.node, feed is None) == ("n", False)
            told = list(learner.said)
            client.said = []
            for _ in range(5):
                await learner.discover()
            await until_async(lambda: not learner.announced("e"), "it is missed")
            assert know.stats()["engines"]["e"]["announced"] is False
            client.said = [said_of(engine, folder, incarnation="1")]
            await learner.discover()
            assert know.engines["e"] == before
            assert learner.feed("e") is feed
            assert learner.said == told
        # One that has ended is what the configuration says.
        client.said = [said_of(engine, folder)]
        async with learning(client, tables=[table]) as learner:
            know = learner.knowledge
            assert know.engines["e"].node == "n"
            await engine.__aexit__(None, None, None)
            client.said = []
            await until_async(lambda: know.engines["e"].node == "", "its announcement is void")
            assert ("left", "e") not in learner.said


@pytest.mark.parametrize(
    ("changes", "answer"),
    [([{"groups": [0], "topic": "t"}, {"follows_max": 7}], "mismatch"), (None, "unverified")],
)
async def test_an_engine_that_changes_while_its_hashes_are_verified(
    folder: Any, monkeypatch: Any, changes: list[dict[str, Any]] | None, answer: str
) -> None:
    """changes: of its announcement, during one verification after another; None: it is listened to anew each time."""
    async with StubEngine(settings(folder)) as engine:
        client: Any = Said(said_of(engine, folder))
        async with learning(client) as learner:
            spec = learner.at(engine.url)
            await until_async(lambda: learner.at(engine.url).models, "it answers")
            feeds: list[Any] = []
            said: dict[str, Any] = {}

            async def in_vain(spec: Any, hashing: Any, feed: Any, **_: Any) -> str:
                said.update(changes[len(feeds)] if changes else {"topic": "t" * (len(feeds) + 1)})
                feeds.append(feed)
                client.said = [said_of(engine, folder, **said)]
                await learner.discover()
                return "mismatch"

            monkeypatch.setattr("kvpool.router.engines.engine_catalog.verify", in_vain)
            assert await learner.knowledge.verify(spec.name) == answer
            assert len(set(map(id, feeds))) == (2 if changes else 3)
            found = learner.at(engine.url)
            if changes:
                assert (found.follows_max, found.hashing) == (7, None)
            else:
                assert found.hashing is not None
