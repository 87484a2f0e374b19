"""What a router process records, and that `kvpool sim` replays it: lengths, times, and which prompts begin alike."""

import asyncio
import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.errors import InvalidRequest
from kvpool.router.hashing import HashSpec, chain, index_keys, none_hash, salt_of
from kvpool.simulator.recordings import RecordedRequest, load_trace, parse_line
from kvpool.simulator.traces import ideal_hits
from tests.integration.router.conftest import MODEL, Process, World
from tests.integration.router.test_group import group
from tests.support.stub_engine.tokens import tokens_of

BLOCK = 16
SPEC = HashSpec(BLOCK, "sha256_cbor", none_hash("sha256_cbor"))
SYSTEM = "You are the secret assistant of Mrs. Abernathy in Littlehampton. " * 4
TENANT_TOKEN = "the-token-of-the-tenant-magpie"
OPERATOR = "the-token-of-the-operator"


@dataclass
class Sent:
    """Requests, with the times between which each of them was under way."""

    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    streams: list[bool] = field(default_factory=list)

    async def send(
        self, world: World, prompt: str, count: int, *, stream: bool, **headers: str
    ) -> None:
        began = time.monotonic()
        body: dict[str, Any] = {"max_tokens": count, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        said = await world.complete(prompt, headers=named, **body)
        self.spans.append((began, time.monotonic()))
        assert said.text == world.right(prompt, count)
        usage = said.messages[-1]["usage"] if stream else said.body["usage"]
        self.prompts.append(tokens_of(prompt))
        self.outputs.append(usage["completion_tokens"])
        self.cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        self.streams.append(stream)


PROMPTS = [
    SYSTEM + "What is in the red ledger?",
    SYSTEM + "What is in the red ledger? And who has signed it, and when, and with which pen?",
    "Nothing to do with it. " * 12,
    SYSTEM + "Another question.",
    SYSTEM + "What is in the red ledger? And who has signed it, and when, and with which pen?",
    "short",
]


async def conversation(world: World, **headers: str) -> Sent:
    sent = Sent()
    for number, prompt in enumerate(PROMPTS):
        await sent.send(world, prompt, 3 + number, stream=number % 2 == 0, **headers)
    return sent


async def end(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0, process.said


def lines_of(path: Path) -> list[RecordedRequest]:
    return list(map(parse_line, path.read_bytes().splitlines(keepends=True)))


def shared(one: list[int], other: list[int], block_tokens: int) -> int:
    """How many full blocks two prompts have in common, from the first on."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    least = min(len(one), len(other)) if same is None else same
    return least // block_tokens


@pytest.mark.parametrize("block_tokens", [16, 64])
async def test_what_was_sent_is_replayed(world: World, block_tokens: int) -> None:
    await world.engine()
    path = world.folder / "trace.jsonl"
    before = time.monotonic()
    router = await world.router(record=str(path), record_block_tokens=block_tokens)
    sent = await conversation(world, x_session_id="the session of Mrs. Abernathy")
    await end(router)
    assert path.stat().st_mode & 0o777 == 0o600
    found = lines_of(path)

    # Lengths.
    assert [each.input_length for each in found] == [len(prompt) for prompt in sent.prompts]
    assert [each.output_length for each in found] == sent.outputs
    assert [each.cached_tokens for each in found] == sent.cached
    assert {each.outcome for each in found} == {"answered"}
    assert {each.model for each in found} == {MODEL}
    assert len({each.session for each in found}) == 1

    # Times: one moment of the recording's start explains all of them.
    starts = [
        (began - each.timestamp / 1e3, ended - each.timestamp / 1e3)
        for each, (began, ended) in zip(found, sent.spans, strict=True)
    ]
    earliest, latest = max(first for first, _ in starts), min(last for _, last in starts)
    assert before < latest
    assert earliest <= latest + 1e-6
    for each, streams in zip(found, sent.streams, strict=True):
        assert (each.ttft_ms is not None) == streams
        assert 0 < (each.ttft_ms or each.duration_ms) <= each.duration_ms

    # Blocks.
    for a, one in enumerate(found):
        assert len(one.hash_ids) == -(-one.input_length // block_tokens)
        for b, other in enumerate(found[:a]):
            same = shared(sent.prompts[a], sent.prompts[b], block_tokens)
            assert one.hash_ids[:same] == other.hash_ids[:same]
            assert not set(one.hash_ids[same:]) & set(other.hash_ids)

    # The replay.
    trace = load_trace(path)
    requests = trace.requests(seed=3)
    assert trace.said == ""
    assert [request.tokens for request in requests] == [len(prompt) for prompt in sent.prompts]
    assert [request.output_tokens for request in requests] == sent.outputs
    first = found[0].timestamp
    for each, request in zip(found, requests, strict=True):
        assert request.arrived_s == pytest.approx((each.timestamp - first) / 1e3, abs=1e-9)
    expected = [
        max((shared(prompt, other, block_tokens) for other in sent.prompts[:at]), default=0)
        for at, prompt in enumerate(sent.prompts)
    ]
    assert ideal_hits(requests) == expected
    rows = world.folder / "rows.json"
    arguments = ["sim", str(path), "--prefill", "1", "--decode", "1", "--json", str(rows)]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exception is None, result.output
    (row,) = json.loads(rows.read_text())["rows"]
    assert row["requests"] == len(PROMPTS)
    assert row["seconds"] >= requests[-1].arrived_s


async def test_nothing_that_was_said_is_in_it(world: World) -> None:
    await world.engine()
    token_file = world.folder / "magpie.token"
    token_file.write_text(TENANT_TOKEN)
    token_file.chmod(0o600)
    path = world.folder / "trace.jsonl"
    router = await world.router(
        record=str(path),
        record_block_tokens=BLOCK,
        tenants={"magpie": {"token_file": str(token_file)}},
        environ={"KVPOOL_ROUTER_TOKEN": OPERATOR},
    )
    world.token = TENANT_TOKEN
    sent = await conversation(
        world, x_session_id="session-of-abernathy", x_request_id="request-of-abernathy"
    )
    await world.complete(PROMPTS[0], max_tokens=2, user="user-of-abernathy")
    await end(router)
    text = path.read_text()
    said = {word for prompt in PROMPTS for word in prompt.split() if len(word) > 4}
    said |= {"magpie", "abernathy", TENANT_TOKEN, OPERATOR}
    answers = {world.right(prompt, 4) for prompt in PROMPTS}
    said |= {answer for answer in answers if set(answer) - set("abcdef")}  # ids have those letters
    assert [word for word in said if word.lower() in text.lower()] == []

    # Neither tokens, nor the hashes by which engines, the pool and the router know the blocks.
    found = lines_of(path)
    ids = {each for one in found for each in one.hash_ids}
    for prompt in sent.prompts:
        assert not ids & set(prompt)
        assert f"{prompt[0]},{prompt[1]},{prompt[2]}" not in text
        hashes = chain(SPEC, prompt)
        for each in hashes:
            assert each.hex() not in text
            numbers = {int.from_bytes(each[at : at + 8]) for at in range(0, 32, 8)}
            numbers |= {number >> 1 for number in numbers}
            assert not ids & numbers
        keys = index_keys(hashes, salt_of(MODEL, SPEC))
        assert not ids & {*keys, *(key >> 1 for key in keys)}
    assert len({each.tenant for each in found}) == 1


async def test_two_recordings_of_the_same_have_no_id_in_common(world: World) -> None:
    await world.engine()
    path = world.folder / "trace.jsonl"
    for _ in range(2):
        router = await world.router(record=str(path), record_block_tokens=BLOCK)
        await conversation(world, x_session_id="one")
        await end(router)
    one, other = lines_of(path.with_name("trace.jsonl.1")), lines_of(path)
    assert [each.input_length for each in one] == [each.input_length for each in other]
    for name in ("recording", "session"):
        assert not {getattr(e, name) for e in one} & {getattr(e, name) for e in other}
    assert not {i for e in one for i in e.hash_ids} & {i for e in other for i in e.hash_ids}
    both = world.folder / "both.jsonl"
    both.write_bytes(path.with_name("trace.jsonl.1").read_bytes() + path.read_bytes())
    with pytest.raises(InvalidRequest, match=f"line {len(one) + 1}: it is of another recording"):
        load_trace(both)


async def test_a_full_disk_costs_lines_and_no_answer(world: World) -> None:
    await world.engine()
    path = world.folder / "trace.jsonl"
    router = await world.router(record=str(path), prefix=("prlimit", "--fsize=4000"))
    sent = Sent()
    for number in range(30):
        await sent.send(world, f"request {number}: {SYSTEM}", 3, stream=bool(number % 2))

    async def counted() -> dict[str, float] | None:
        counts = {
            line.split('"')[1]: float(line.split()[-1])
            for line in (await world.get("/metrics")).splitlines()
            if line.startswith("kvpool_router_recorded_requests_total{")
        }
        return counts if sum(counts.values()) == 30 else None

    counts = await world.until(counted, "all are counted")
    assert counts["queue_full"] == counts["file_full"] == 0
    assert counts["written"] > 0 < counts["write_failed"]
    assert router.said.count("cannot be written") == 1
    await end(router)
    assert path.stat().st_size <= 4000
    found = lines_of(path)
    assert len(found) == counts["written"]
    assert len(load_trace(path).entries) == len(found)


async def test_files_are_rotated_and_read_as_one(world: World) -> None:
    await world.engine()
    path = world.folder / "trace.jsonl"
    router = await world.router(record=str(path), record_file_bytes=4096, record_files=100)
    sent = Sent()
    for number in range(30):
        await sent.send(world, f"{SYSTEM}request {number}", 3, stream=False)
    await end(router)
    files = list(world.folder.glob("trace.jsonl*"))
    assert len(files) > 2
    assert all(file.stat().st_size <= 4096 for file in files)
    oldest = sorted(files, key=lambda file: int(file.suffix[1:] or 0) if file != path else 0)
    whole = world.folder / "whole.jsonl"
    whole.write_bytes(b"".join(file.read_bytes() for file in reversed(oldest)))
    trace = load_trace(whole)
    assert [entry.tokens for entry in trace.entries] == [len(prompt) for prompt in sent.prompts]
    hits = ideal_hits(trace.requests(seed=0))
    assert hits == [0, *[shared(sent.prompts[0], p, 64) for p in sent.prompts[1:]]]


async def test_a_router_that_is_killed_leaves_whole_lines(world: World) -> None:
    await world.engine()
    path = world.folder / "trace.jsonl"
    router = await world.router(record=str(path))

    async def go_on(number: int) -> None:
        """Until there is no router any more."""
        while True:
            await world.complete(world.prompt(number, 200), max_tokens=4)

    tasks = [asyncio.create_task(go_on(number)) for number in range(4)]

    async def begun() -> bool:
        return path.read_bytes().count(b"\n") > 20

    await world.until(begun, "some lines are written")
    router.kill()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, aiohttp.ClientError) for error in ends)
    trace = load_trace(path)
    # On a busy machine some may have no hashes, as engines were not in time to tokenise them.
    read = len(trace.entries) + trace.without_hashes + trace.without_answer
    assert read == path.read_bytes().count(b"\n") > 20
    router = await world.router(record=str(path))
    await world.complete(world.prompt(0, 200), max_tokens=4)
    await end(router)
    assert len(load_trace(path).entries) == 1
    assert load_trace(path.with_name("trace.jsonl.1")) == trace


async def test_without_the_engines_hashing_there_are_no_ids(world: World) -> None:
    await world.engine()
    for name in ("hash", "block_tokens", "events", "replay"):
        del world.tables[0][name]
    path = world.folder / "trace.jsonl"
    router = await world.router(record=str(path), verified=False)
    sent = await conversation(world)
    await end(router)
    found = lines_of(path)
    assert [each.hash_ids for each in found] == [()] * len(PROMPTS)
    assert [each.input_length for each in found] == [len(prompt) for prompt in sent.prompts]
    with pytest.raises(InvalidRequest, match=f"{len(PROMPTS)} without block hashes"):
        load_trace(path)


async def test_each_router_of_a_group_records_what_it_serves(world: World) -> None:
    await world.engine()
    tables = list(world.tables)
    paths = [world.folder / f"trace-{number}.jsonl" for number in range(2)]
    records = iter(paths)
    begin = world._begin_router

    def recording(environ: Any, config: Any, prefix: Any = ()) -> Process:
        return begin(environ, config | {"record": str(next(records))}, prefix)

    world._begin_router = recording  # type: ignore[method-assign]
    routers = await group(world, 2)
    assert world.tables == tables
    counts = (2, 3)
    for (url, _), count in zip(routers, counts, strict=True):
        world.url = url
        for number in range(count):
            prompt = SYSTEM + f"question {number}"
            said = await world.complete(prompt, max_tokens=3)
            assert said.text == world.right(prompt, 3)
    for _, process in routers:
        await end(process)
    assert [len(lines_of(path)) for path in paths] == list(counts)
    assert all(each.hash_ids for path in paths for each in lines_of(path))


async def test_a_file_that_is_no_recording_is_left_alone(world: World) -> None:
    path = world.folder / "diary.txt"
    path.write_text("Dear diary,\n")
    said = await world.refused_router(record=str(path))
    assert "diary.txt is there, and is no recording" in said
    assert path.read_text() == "Dear diary,\n"
