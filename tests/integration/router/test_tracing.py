"""One trace per request, as a collector gets it from a router before stub engines."""

from typing import Any

from kvpool import __version__
from tests.support.otlp_collector import Collector, Received

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
ALL_SPANS = {"kvpool.request", "kvpool.prepare", "kvpool.queue"}


async def spans_of(world: Any, collector: Collector, trace: str, count: int) -> list[Received]:
    async def came() -> list[Received]:
        found = collector.spans(trace)
        return found if len(found) >= count else []

    found: list[Received] = await world.until(came, f"{count} spans of {trace}")
    return found


def within(child: Received, parent: Received) -> bool:
    times = (parent.start_ns, child.start_ns, child.end_ns, parent.end_ns)
    return list(times) == sorted(times)


async def test_prompt_and_answer_on_one_engine(world: Any) -> None:
    engine = await world.engine()
    with Collector() as collector:
        await world.router(otlp=collector.url)
        prompt = world.prompt(1, 100)
        said = await world.complete(
            prompt, max_tokens=4, stream=True, headers={"x-request-id": "one", **SAMPLED}
        )
        assert said.text == world.right(prompt, 4)
        found = {one.name: one for one in await spans_of(world, collector, TRACE, 4)}
    assert found.keys() == ALL_SPANS | {"kvpool.generate"}
    root, call = found["kvpool.request"], found["kvpool.generate"]
    assert (root.parent, root.kind, root.error) == (CALLER, "server", None)
    for name, one in found.items():
        assert one.trace == TRACE
        if one is not root:
            assert one.parent == root.span and within(one, root), name
    assert found["kvpool.prepare"].end_ns <= found["kvpool.queue"].start_ns
    assert found["kvpool.queue"].end_ns <= call.start_ns
    (seen,) = world.asked(engine)
    assert seen.traceparent == f"00-{TRACE}-{call.span}-01"
    facts = root.attributes
    assert facts["kvpool.model"] == "stub" and facts["kvpool.request"] == "one"
    assert (facts["kvpool.prompt_tokens"], facts["kvpool.outcome"]) == (100, "answered")
    assert (facts["kvpool.engine"], facts["kvpool.cached_tokens_expected"]) == ("a", 0)
    took_s = (root.end_ns - root.start_ns) / 1e9
    assert 0 < facts["kvpool.ttft_s"] <= took_s
    assert call.attributes["kvpool.engine"] == "a"
    assert (root.resource["service.name"], root.resource["service.version"]) == (
        "kvpool-router",
        __version__,
    )


async def test_prompt_and_answer_on_two_engines(world: Any) -> None:
    engines = {
        name: await world.engine(name, role=role)
        for name, role in (("a", "prefill"), ("b", "decode"))
    }
    with Collector() as collector:
        await world.router(otlp=collector.url)
        prompt = world.prompt(2, 200)
        said = await world.complete(prompt, max_tokens=4, headers=SAMPLED)
        assert said.text == world.right(prompt, 4)
        found = await spans_of(world, collector, TRACE, 5)
        seen = {name: world.asked(engine) for name, engine in engines.items()}
    (root,) = [one for one in found if one.name == "kvpool.request"]
    calls = [one for one in found if one.name in {"kvpool.prefill", "kvpool.decode"}]
    assert {one.name for one in calls} == {"kvpool.prefill", "kvpool.decode"}
    for call in calls:
        assert call.parent == root.span and within(call, root)
        name = "a" if call.name == "kvpool.prefill" else "b"
        assert call.attributes["kvpool.engine"] == name
        parents = [one.traceparent for one in seen[name]]
        assert f"00-{TRACE}-{call.span}-01" in parents
    assert len(calls) == sum(map(len, seen.values()))


async def test_a_call_that_fails_is_in_the_trace_and_the_next_one_too(world: Any) -> None:
    for name in "ab":
        await world.engine(name)
    with Collector() as collector:
        await world.router(otlp=collector.url)
        for name in "ab":
            await world.fault(name, {"kind": "cut", "times": 1})
        prompt = world.prompt(3, 100)
        await world.complete(prompt, max_tokens=2, headers=SAMPLED)

        async def ended() -> list[Received]:
            found = collector.spans(TRACE)
            return found if any(one.name == "kvpool.request" for one in found) else []

        found = await world.until(ended, "the request's span")
    calls = [one for one in found if one.name == "kvpool.generate"]
    assert len(calls) >= 2
    assert any("closed" in (one.error or "") for one in calls)


async def test_what_is_not_sampled_is_passed_on_as_it_came(world: Any) -> None:
    engine = await world.engine()
    with Collector() as collector:
        await world.router(otlp=collector.url, trace_share=1.0)
        header = f"00-{TRACE}-{CALLER}-00"
        await world.complete(world.prompt(4, 50), max_tokens=2, headers={"traceparent": header})
        (seen,) = world.asked(engine)
        assert seen.traceparent == header
        # Of what comes after it, all is there.
        await world.complete(world.prompt(5, 50), max_tokens=2)
        _, second = world.asked(engine)
        begun = second.traceparent.split("-")[1]
        found = await spans_of(world, collector, begun, 4)
        assert {one.trace for one in collector.spans()} == {begun}
    (root,) = [one for one in found if one.name == "kvpool.request"]
    assert root.parent == ""


async def test_of_requests_without_a_context_a_share_begins_a_trace(world: Any) -> None:
    engine = await world.engine()
    with Collector() as collector:
        await world.router(otlp=collector.url, trace_share=0.0)
        for number in range(3):
            await world.complete(world.prompt(number, 50), max_tokens=2)
        await world.complete(world.prompt(9, 50), max_tokens=2, headers=SAMPLED)
        await spans_of(world, collector, TRACE, 4)
        assert {one.trace for one in collector.spans()} == {TRACE}
    flags = [seen.traceparent[-2:] for seen in world.asked(engine)]
    assert flags == ["00", "00", "00", "01"]


async def test_a_router_serves_while_the_collector_is_away(world: Any) -> None:
    await world.engine()
    with Collector() as collector:
        collector.status = (
            403  # a batch that is refused so is tried again by the router, and not by its exporter
        )
        process = await world.router(otlp=collector.url)
        for number in range(5):
            prompt = world.prompt(number, 60)
            said = await world.complete(prompt, max_tokens=3, headers=SAMPLED)
            assert said.text == world.right(prompt, 3)

        async def tried() -> bool:
            return collector.requests > 0 and "does not accept traces" in process.said

        await world.until(tried, "the outage is logged")
        collector.status = 200
        later = "0" * 31 + "7"
        await world.complete(
            world.prompt(8, 60), max_tokens=3, headers={"traceparent": f"00-{later}-{CALLER}-01"}
        )
        await spans_of(world, collector, later, 4)

        async def counted() -> bool:
            # A batch that was tried once or twice came in the end.
            lines = [
                line
                for line in (await world.get("/metrics")).splitlines()
                if "spans_total{" in line
            ]
            counts = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
            assert counts.keys() == {"exported", "lost", "dropped"}
            return counts["exported"] == len(collector.spans()) and sum(counts.values()) == 24

        await world.until(counted, "what became of the spans is counted")
        assert process.said.count("does not accept traces") == 1
        assert "opentelemetry" not in process.said


async def test_spans_of_the_last_requests_are_sent_before_the_end(world: Any) -> None:
    import signal

    await world.engine()
    with Collector() as collector:
        process = await world.router(otlp=collector.url)
        await world.complete(world.prompt(1, 60), max_tokens=3, headers=SAMPLED)
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert len(collector.spans(TRACE)) == 4


async def test_without_a_collector_nothing_is_made_of_it(world: Any) -> None:
    engine = await world.engine()
    await world.router()
    await world.complete(world.prompt(1, 60), max_tokens=3, headers=SAMPLED)
    (seen,) = world.asked(engine)
    assert seen.traceparent == SAMPLED["traceparent"]
