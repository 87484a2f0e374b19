"""Intents for prompts: which nodes are told of which blocks, and what becomes of those that do not answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.errors import ClusterUnavailable, InvalidRequest, Unavailable
from kvpool.router.hashing import DEFAULT_SEED, HashSpec, Prompt, chain, none_hash
from kvpool.router.http.bodies import BadRequest, Body, Kind, parse
from kvpool.router.prompts.tokens import TokenizeRefused, UnknownModel
from kvpool.router.records.metrics import Metrics
from kvpool.router.requests.intake import Rejected
from kvpool.router.requests.intents import EACH, PLACES_MAX, TOGETHER, Intents, Wanted
from kvpool.router.upstream.specs import EngineSpec
from kvpool.types import Intent, IntentAnswer, Outcome
from tests.support.stats import value_of
from tests.support.virtual_time import virtually

X, Y = b"x" * 16, b"y" * 16
TOKENS = list(range(64))
PIN = Wanted(Intent.PIN)
LONG_S = 60.0
Asked = tuple[str, bytes, bytes]


def hashing(block_tokens: int = 16) -> HashSpec:
    return HashSpec(block_tokens, "sha256_cbor", none_hash("sha256_cbor", DEFAULT_SEED))


def keys_of(block_tokens: int = 16) -> bytes:
    return b"".join(each[-16:] for each in chain(hashing(block_tokens), TOKENS))


def engine(name: str, node: str | None = None, **settings: Any) -> EngineSpec:
    given: dict[str, Any] = {"model": "m", "namespace": X, "hashing": hashing(), **settings}
    return EngineSpec(
        url=f"http://{name}", name=name, node=f"node-{name}" if node is None else node, **given
    )


class World:
    """Stands for the catalog, the prompts, and the daemon's link and client.

    fails: by (node, namespace) or node, what asking it raises. silent: nodes that answer once `release` is set.
    """

    def __init__(self, *engines: EngineSpec) -> None:
        self.engines = {spec.name: spec for spec in engines}
        self.asked: list[Asked] = []
        self.said: list[dict[str, Any]] = []
        self.fails: dict[object, Exception] = {}
        self.silent: set[str] = set()
        self.release = asyncio.Event()
        self.refuses: Exception | None = None
        self.deadlines: list[float] = []
        self.metrics = Metrics()

    async def prompt(
        self,
        body: Mapping[str, Any],
        kind: str,
        *,
        deadline_s: float = 5.0,
        like: EngineSpec | None = None,
    ) -> Prompt:
        self.deadlines.append(deadline_s)
        if self.refuses is not None:
            raise self.refuses
        assert like is not None and like.hashing is not None and kind == "completions"
        hashes = chain(like.hashing, body["prompt"])
        return Prompt("m", body["prompt"], hashes, (), frozenset(), like.hashing)

    async def ask(self, question: Callable[[Any], IntentAnswer]) -> IntentAnswer:
        answer = question(SimpleNamespace(intents=self))  # notes who is asked
        if self.asked[-1][0] in self.silent:
            await self.release.wait()
        return answer

    def declare_on(
        self, digest: bytes, intent: Intent, keys: bytes, *, node: str, **said: Any
    ) -> IntentAnswer:
        self.asked.append((node, digest, keys))
        self.said.append({"intent": intent, **said})
        for place in ((node, digest), node):
            if place in self.fails:
                raise self.fails[place]
        return IntentAnswer(Outcome.ACCEPTED, len(keys) // 16, len(keys), len(keys) // 16)

    def intents(self, *, linked: bool = True) -> Intents:
        return Intents(self, self, self if linked else None, self.metrics)  # type: ignore[arg-type]

    def counted(self, outcome: str) -> float:
        return value_of(self.metrics.intents.labels(outcome))


def body(tokens: list[int] = TOKENS, model: str = "m") -> Body:
    raw = f'{{"model": "{model}", "prompt": {tokens}}}'.encode()
    return parse(Kind.COMPLETIONS, raw, [model])


def run(work: Callable[[World], Awaitable[None]], *engines: EngineSpec) -> None:
    async def main() -> None:
        async with asyncio.timeout(LONG_S):
            await work(World(*engines))

    virtually(main)


def test_each_node_is_told_once_for_every_namespace_and_way_of_hashing() -> None:
    async def work(world: World) -> None:
        wanted = Wanted(Intent.KEEP, for_s=9.0, dry_run=True)
        found = await world.intents().answer("t", body(), wanted, LONG_S)
        assert sorted(world.asked) == sorted(
            [
                ("node-a", X, keys_of(16)),
                ("node-b", X, keys_of(16)),
                ("node-a", Y, keys_of(16)),
                ("node-c", X, keys_of(32)),
            ]
        )
        assert (
            world.said
            == [{"intent": Intent.KEEP, "hard": False, "for_s": 9.0, "dry_run": True}] * 4
        )
        assert (found["prompt_tokens"], found["prompt_blocks"]) == (64, 4)
        assert found["unreachable"] == {}
        assert {(each["node"], each["namespace"], each["blocks"]) for each in found["items"]} == {
            (node, namespace.hex(), len(keys) // 16) for node, namespace, keys in world.asked
        }
        assert (world.counted("accepted"), world.counted("unreachable")) == (4, 0)

    run(
        work,
        engine("a"),
        engine("a2", "node-a"),
        engine("b"),
        engine("a3", "node-a", namespace=Y),
        engine("c", hashing=hashing(32)),
        engine("other", model="others"),
    )


def test_where_blocks_are_longer_than_the_prompt_there_are_none_of_it() -> None:
    async def work(world: World) -> None:
        found = await world.intents().answer("t", body(TOKENS[:32]), PIN, LONG_S)
        assert [node for node, *_ in world.asked] == ["node-a", "node-b"]
        assert set(found["unreachable"]) == {"node-c"}, "b has others"
        assert "longer" in found["unreachable"]["node-c"]
        with pytest.raises(BadRequest, match="less than one") as caught:
            await world.intents().answer("t", body(TOKENS[:15]), PIN, LONG_S)
        assert caught.value.status == 400

    long = hashing(64)
    run(
        work,
        engine("a"),
        engine("b"),
        engine("b2", "node-b", hashing=long),
        engine("c", hashing=long),
    )


def test_named_nodes_are_told_instead_of_those_of_the_engines() -> None:
    async def work(world: World) -> None:
        wanted = Wanted(Intent.DROP, nodes=("node-z", "node-a", "node-z"))
        found = await world.intents().answer("t", body(), wanted, LONG_S)
        assert world.asked == [
            (node, namespace, keys_of()) for namespace in (X, Y) for node in ("node-z", "node-a")
        ]
        assert found["unreachable"] == {}

    run(
        work,
        engine("a"),
        engine("b", namespace=Y),
        engine("nowhere", ""),
        engine("unknown", namespace=b""),
    )


def test_engines_whose_node_or_blocks_are_not_known_are_left_out_with_the_reason() -> None:
    async def work(world: World) -> None:
        found = await world.intents().answer("t", body(), PIN, LONG_S)
        assert [node for node, *_ in world.asked] == ["node-a"]
        why = found["unreachable"]
        assert set(why) == {"nowhere", "node-new", "node-odd"}, "a's node has another engine"
        assert "node of engine nowhere" in why["nowhere"]
        assert "engine new " in why["node-new"] and "engine odd " in why["node-odd"]
        assert world.counted("unreachable") == 3

    run(
        work,
        engine("a"),
        engine("a2", "node-a", hashing=None),
        engine("nowhere", ""),
        engine("new", namespace=b""),
        engine("odd", hashing=None),
    )


def test_more_places_than_are_told_at_once_are_told_about() -> None:
    async def work(world: World) -> None:
        found = await world.intents().answer("t", body(), PIN, LONG_S)
        assert len(world.asked) == len(found["items"]) == PLACES_MAX
        assert set(found["unreachable"]) == {f"node-{n}" for n in (PLACES_MAX, PLACES_MAX + 1)}
        assert f"only {PLACES_MAX}" in found["unreachable"][f"node-{PLACES_MAX}"]

    run(work, *(engine(str(n)) for n in range(PLACES_MAX + 2)))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (engine("a", model="others"), "no engine serves m"),
        (engine("a", namespace=b""), "engine a are not known"),
        (engine("a", hashing=None), "engine a are not known"),
    ],
)
def test_without_an_engine_whose_blocks_are_known_nothing_can_be_named(
    spec: EngineSpec, says: str
) -> None:
    async def work(world: World) -> None:
        for nodes in ((), ("node-a",)):
            with pytest.raises(Rejected, match=says) as caught:
                await world.intents().answer("t", body(), Wanted(Intent.PIN, nodes=nodes), LONG_S)
            assert (caught.value.status, caught.value.why) == (503, "no_blocks")
        assert not world.asked

    run(work, spec)


def test_without_a_daemon_nobody_can_be_told() -> None:
    async def work(world: World) -> None:
        with pytest.raises(BadRequest, match="daemon") as caught:
            await world.intents(linked=False).answer("t", body(), PIN, LONG_S)
        assert caught.value.status == 400

    run(work, engine("a"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TokenizeRefused(400, b"too long", "text/plain"), 400),
        (UnknownModel("no engine serves it"), 404),
        (Unavailable("no engine answers"), 503),
    ],
)
def test_a_prompt_without_tokens_is_refused(error: Exception, status: int) -> None:
    async def work(world: World) -> None:
        world.refuses = error
        with pytest.raises(BadRequest) as caught:
            await world.intents().answer("t", body(), PIN, LONG_S)
        assert caught.value.status == status and not world.asked
        world.refuses = None
        assert (await world.intents().answer("t", body(), PIN, LONG_S))["items"]

    run(work, engine("a"))


def test_answers_that_come_late_are_not_waited_for() -> None:
    async def work(world: World) -> None:
        world.silent = {"node-b"}
        found = await world.intents().answer("t", body(), PIN, 0.2)
        assert [each["node"] for each in found["items"]] == ["node-a"]
        assert set(found["unreachable"]) == {"node-b"}
        assert "no answer" in found["unreachable"]["node-b"]
        assert (world.counted("accepted"), world.counted("unreachable")) == (1, 1)
        assert max(world.deadlines) <= 0.2, "an engine has no longer for the tokens either"

    run(work, engine("a"), engine("b"))


def test_of_two_in_progress_a_third_is_refused_and_a_place_is_free_again() -> None:
    async def work(world: World) -> None:
        world.silent = {"node-a"}
        intents = world.intents()
        first = [
            asyncio.create_task(intents.answer("t", body(), PIN, LONG_S)) for _ in range(EACH + 1)
        ]
        done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        (error,) = [task.exception() for task in done]
        assert isinstance(error, Rejected)
        assert (error.status, error.why, error.retry_after_s) == (429, "intents", 1.0)
        assert value_of(world.metrics.rejections.labels("intents")) == 1
        waiting = [task for task in first if task not in done]
        # A client that leaves frees its place, and so does an answer.
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        world.release.set()
        assert (await waiting[1])["items"]
        assert [
            (await intents.answer("t", body(), PIN, LONG_S))["unreachable"] for _ in range(3)
        ] == [{}] * 3

    run(work, engine("a"))


def test_one_tenant_takes_no_places_of_others_and_none_of_operators() -> None:
    async def work(world: World) -> None:
        world.silent = {"node-a"}
        intents = world.intents()
        tenants = [str(number // EACH) for number in range(TOGETHER)]
        waiting = [
            asyncio.create_task(intents.answer(tenant, body(), PIN, LONG_S)) for tenant in tenants
        ]
        await asyncio.sleep(0)  # they begin
        with pytest.raises(Rejected):
            await intents.answer("another", body(), PIN, LONG_S)
        operator = asyncio.create_task(intents.answer("", body(), PIN, LONG_S))
        await asyncio.sleep(0)
        world.release.set()
        assert (await operator)["items"]
        assert all(found["items"] for found in await asyncio.gather(*waiting))

    run(work, engine("a"))


def test_what_a_node_says_of_one_namespace_is_no_failure_if_it_answers_for_another() -> None:
    async def work(world: World) -> None:
        named = Wanted(Intent.DROP, nodes=("node-a",))
        world.fails = {("node-a", Y): InvalidRequest("namespace is not open on this node")}
        found = await world.intents().answer("t", body(), named, LONG_S)
        assert [each["namespace"] for each in found["items"]] == [X.hex()]
        assert found["unreachable"] == {}
        # It may have blocks of a namespace of which it says nothing: so that must be told.
        world.fails = {("node-a", Y): ClusterUnavailable("it is busy")}
        found = await world.intents().answer("t", body(), named, LONG_S)
        assert [each["namespace"] for each in found["items"]] == [X.hex()]
        assert found["unreachable"] == {"node-a": f"namespace {Y.hex()}: it is busy"}
        world.fails[("node-a", X)] = InvalidRequest("namespace is not open on this node")
        found = await world.intents().answer("t", body(), named, LONG_S)
        assert found["items"] == [] and found["unreachable"] == {"node-a": "it is busy"}
        world.fails = {"node-a": InvalidRequest("there is no node 'node-a'")}
        found = await world.intents().answer("t", body(), named, LONG_S)
        assert found["items"] == []
        assert found["unreachable"] == {"node-a": "there is no node 'node-a'"}

    run(work, engine("a"), engine("b", namespace=Y))


def test_an_error_of_the_router_itself_is_not_taken_for_an_answer() -> None:
    async def work(world: World) -> None:
        world.fails = {"node-a": ZeroDivisionError()}
        with pytest.raises(ZeroDivisionError):
            await world.intents().answer("t", body(), PIN, LONG_S)

    run(work, engine("a"), engine("b"))
