"""The stub engine's HTTP side: vLLM's endpoints as far as the router and its clients use them, and `/stub/`.

    /v1/completions  /v1/chat/completions  /v1/models  /tokenize  /detokenize  /health  /metrics
    /reset_prefix_cache
    /stub/state    what runs and waits, the last requests with their headers and how they ended, and the last
                   questions to /tokenize
    /stub/faults   POST a list of `Fault`s; they replace those that were set
    /stub/hold     POST {"computed": tokens}: no step begins while a running job has so many computed; null: it goes on
    /stub/gap      POST {"forgotten": bool}: the next events are lost; forgotten: no replay has them either

Of several data-parallel ranks the header `X-data-parallel-rank` chooses one, or else the one with the least to do.
An engine notices that a client has left, aborts what it computed for it, and counts that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from kvpool.errors import InvalidRequest
from kvpool.router.hashing import DEFAULT_SEED, HashSpec, Item, chain, none_hash
from tests.support.stub_engine.bodies import (
    ANSWER_TOKENS,
    Asked,
    Prompt,
    Reader,
    Refused,
    asked_of,
    chat_prompt,
    completion_prompts,
    error_body,
    piece,
    read_object,
)
from tests.support.stub_engine.core import Core, Job, Pool, Speed
from tests.support.stub_engine.events import EventPublisher
from tests.support.stub_engine.faults import Fault, Faults
from tests.support.stub_engine.rank import Rank
from tests.support.stub_engine.tokens import answer, text_of

BODY_BYTES_MAX = 64 << 20
LOG_KEPT = 10_000
FOLLOW_S_MAX = 600.0
ALGORITHM = "sha256_cbor"


Handler = Callable[[web.Request, Fault | None], Awaitable[web.StreamResponse]]
"""Fault: what is to happen while it answers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """port: 0: any. events, replay: where events are published, as ZeroMQ binds; empty: nowhere. Ranks: of how many
    caches; further ones publish at the next ports, as vLLM's do, or at the path with `-dp` and their number.

    pool: a folder that engines share in place of kvpool. api_key: asked for, if given. loras: names of
    adapters. details: tell of cached tokens in answers, as `--enable-prompt-tokens-details` does.
    """

    model: str = "stub"
    host: str = "127.0.0.1"
    port: int = 0
    events: str = ""
    replay: str = ""
    topic: str = ""
    ranks: int = 1
    block_tokens: int = 16
    capacity_tokens: int = 1 << 20
    max_len: int = 1 << 15
    speed: Speed = field(default_factory=Speed)
    pool: Path | None = None
    hash_seed: str = DEFAULT_SEED
    api_key: str = ""
    loras: tuple[str, ...] = ()
    details: bool = True

    def __post_init__(self) -> None:
        if self.max_len > self.capacity_tokens:
            raise InvalidRequest("a prompt of the longest kind would not fit into the cache")


@dataclass(slots=True)
class Seen:
    """A request, and what became of it. rank: what computes it; asked_rank: what its header says.

    outcome: running, finished, aborted, refused, failed.
    """

    path: str
    request_id: str | None
    traceparent: str | None
    body: dict[str, Any]
    jobs: list[Job] = field(default_factory=list)
    outcome: str = "running"
    asked_rank: str | None = None
    rank: int = 0

    def shown(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "request_id": self.request_id,
            "traceparent": self.traceparent,
            "body": self.body,
            "outcome": self.outcome,
            "rank": self.rank,
            "asked_rank": self.asked_rank,
            "prompt_tokens": sum(len(job.tokens) for job in self.jobs),
            "cached": sum(job.cached for job in self.jobs),
            "loaded": sum(job.loaded for job in self.jobs),
            "computed": sum(job.computed for job in self.jobs),
            "emitted": sum(job.emitted for job in self.jobs),
        }


class _Broken(Exception):
    """A fault closes the connection."""


class StubEngine:
    """`async with StubEngine(settings) as engine:` serves at `engine.url` meanwhile. Event loop only."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.faults = Faults()
        self.seen: deque[Seen] = deque(maxlen=LOG_KEPT)
        self.tokenized: deque[dict[str, Any]] = deque(maxlen=LOG_KEPT)
        self.url = ""
        capacity = settings.capacity_tokens // settings.block_tokens
        pool = None if settings.pool is None else Pool(settings.pool)
        self._cores = [
            Core(settings.speed, settings.block_tokens, capacity, pool)
            for _ in range(settings.ranks)
        ]
        self.core = self._cores[0]
        self.ranks: list[Rank] = []
        first = none_hash(ALGORITHM, settings.hash_seed)
        self.spec = HashSpec(settings.block_tokens, ALGORITHM, first)
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        settings = self.settings
        async with self._stack:
            for number, core in enumerate(self._cores):
                publisher = None
                if settings.events:
                    publisher = EventPublisher(
                        _of_rank(settings.events, number),
                        _of_rank(settings.replay, number),
                        settings.topic,
                    )
                self.ranks.append(await self._stack.enter_async_context(Rank(core, publisher)))
            runner = web.AppRunner(
                self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.0
            )
            await runner.setup()
            self._stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, settings.host, settings.port, reuse_address=True)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://{settings.host}:{port}"
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def publish(self, events: list[dict[str, object]]) -> None:
        """Events as if something had happened. Only where it publishes any."""
        self.ranks[0].publish(events)

    def hold(self, computed: int | None) -> None:
        """See `Rank.hold`; of all ranks."""
        for rank in self.ranks:
            rank.hold(computed)

    def counts(self) -> dict[str, int]:
        """Requests by outcome."""
        found: dict[str, int] = {}
        for each in self.seen:
            found[each.outcome] = found.get(each.outcome, 0) + 1
        return found

    # ---- HTTP ----------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
            ("GET", "/v1/models", self._models),
            ("POST", "/v1/completions", partial(self._generate, chat=False)),
            ("POST", "/v1/chat/completions", partial(self._generate, chat=True)),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("POST", "/reset_prefix_cache", self._reset),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, partial(self._guarded, handler))
        app.router.add_get("/stub/state", self._state)
        app.router.add_post("/stub/faults", self._set_faults)
        app.router.add_post("/stub/hold", self._hold)
        app.router.add_post("/stub/gap", self._lose)
        return app

    async def _guarded(
        self,
        handler: Handler,
        request: web.Request,
    ) -> web.StreamResponse:
        """The fault that is set for the request, the key, and refusals."""
        fault = self.faults.take(request.path)
        key = self.settings.api_key
        try:
            if fault is not None and not fault.after_tokens:
                await self._suffer(fault)
            if key and request.path.startswith("/v1") and _bearer(request) != key:
                return web.json_response({"error": "Unauthorized"}, status=401)
            return await handler(request, fault)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.status)
        except _Broken:
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    async def _suffer(self, fault: Fault) -> None:
        """Raises `Refused` or `_Broken`, hangs, or kills the process."""
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "cut":
            raise _Broken
        raise Refused("the stub was told to fail", "InternalServerError", fault.status)

    async def _health(self, _: web.Request, fault: Fault | None) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request, fault: Fault | None) -> web.Response:
        loras = self.settings.loras
        models = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": self.settings.model if name not in loras else f"/adapters/{name}",
                "parent": self.settings.model if name in loras else None,
                "max_model_len": self.settings.max_len,
            }
            for name in (self.settings.model, *loras)
        ]
        return web.json_response({"object": "list", "data": models})

    async def _metrics(self, _: web.Request, fault: Fault | None) -> web.Response:
        lines = [line for number in range(len(self.ranks)) for line in self._metrics_of(number)]
        return web.Response(text="\n".join(lines) + "\n")

    def _metrics_of(self, rank: int) -> list[str]:
        core, settings = self._cores[rank], self.settings
        label = f'{{engine="{rank}",model_name="{settings.model}"}}'
        usage = core.taken_blocks / core.capacity_blocks
        values = {
            ("vllm:num_requests_running", "gauge"): len(core.running),
            ("vllm:num_requests_waiting", "gauge"): len(core.waiting),
            ("vllm:kv_cache_usage_perc", "gauge"): usage,
            ("vllm:prompt_tokens_total", "counter"): core.prompt_tokens,
            ("vllm:generation_tokens_total", "counter"): core.generated_tokens,
            ("vllm:prefix_cache_queries_total", "counter"): core.prompt_tokens,
            ("vllm:prefix_cache_hits_total", "counter"): core.cached_tokens,
        }
        lines = [
            line
            for (name, kind), value in values.items()
            for line in (f"# TYPE {name.removesuffix('_total')} {kind}", f"{name}{label} {value}")
        ]
        info = f'engine="{rank}",block_size="{core.block_tokens}",num_gpu_blocks="{core.capacity_blocks}"'
        return [
            *lines,
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{info}}} 1.0",
        ]

    async def _tokenize(self, request: web.Request, fault: Fault | None) -> web.Response:
        body = read_object(await request.read(), request.content_type)
        self._check_model(Reader(body).take("model", str, self.settings.model))
        self.tokenized.append(body)
        prompt = chat_prompt(body) if "messages" in body else completion_prompts(body)[0]
        answered: dict[str, Any] = {
            "count": len(prompt.tokens),
            "max_model_len": self.settings.max_len,
            "tokens": prompt.tokens,
            "token_strs": None,
        }
        if body.get("return_token_strs"):
            answered["token_strs"] = [text_of([token]) for token in prompt.tokens]
        return web.json_response(answered)

    async def _detokenize(self, request: web.Request, fault: Fault | None) -> web.Response:
        body = read_object(await request.read(), request.content_type)
        return web.json_response({"prompt": text_of(Reader(body).take("tokens", list, []))})

    async def _reset(self, _: web.Request, fault: Fault | None) -> web.Response:
        for rank in self.ranks:
            rank.clear()
        return web.Response()

    # ---- what it was told, and what it saw -------------------------------------------------------------

    async def _state(self, _: web.Request) -> web.Response:
        core = self.core
        state = {
            "running": len(core.running),
            "waiting": len(core.waiting),
            "blocks": core.blocks,
            "prompt_tokens": core.prompt_tokens,
            "cached_tokens": core.cached_tokens,
            "loaded_tokens": core.loaded_tokens,
            "generated_tokens": core.generated_tokens,
            "counts": self.counts(),
            "requests": [each.shown() for each in self.seen],
            "tokenized": list(self.tokenized),
        }
        return web.json_response(state)

    async def _set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults.set(msgspec.json.decode(await request.read(), type=list[Fault]))
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response()

    async def _hold(self, request: web.Request) -> web.Response:
        self.hold((await request.json())["computed"])
        return web.Response()

    async def _lose(self, request: web.Request) -> web.Response:
        forgotten = bool((await request.json()).get("forgotten"))
        self.ranks[0].lose(forgotten=forgotten)
        return web.Response()

    # ---- answers -------------------------------------------------------------------------------------

    def _check_model(self, name: str) -> None:
        if name not in (self.settings.model, *self.settings.loras):
            message = f"The model `{name}` does not exist."
            raise Refused(message, "NotFoundError", 404, "model")

    async def _generate(
        self, request: web.Request, fault: Fault | None, *, chat: bool
    ) -> web.StreamResponse:
        headers = request.headers
        seen = Seen(request.path, headers.get("X-Request-Id"), headers.get("traceparent"), {})
        seen.asked_rank = headers.get("X-data-parallel-rank")
        self.seen.append(seen)
        try:
            body = read_object(await request.read(), request.content_type)
            seen.body = {
                name: value for name, value in body.items() if name not in ("prompt", "messages")
            }
            settings = self.settings
            asked = asked_of(body, chat=chat, model=settings.model, max_len=settings.max_len)
            self._check_model(asked.model)
            seen.rank = self._rank(seen.asked_rank)
            response = await self._answer(request, asked, seen, fault)
        except Refused:
            seen.outcome = "refused"
            raise
        except (asyncio.CancelledError, ConnectionError):
            seen.outcome = "aborted"
            raise
        except _Broken:
            seen.outcome = "failed"
            raise
        else:
            seen.outcome = "finished"
        finally:
            for job in seen.jobs:
                self._cores[seen.rank].abort(job)
        return response

    def _rank(self, said: str | None) -> int:
        """Raises `Refused`, in vLLM's words."""
        if said is None or not said.isdecimal():
            return min(range(len(self.ranks)), key=lambda number: self.ranks[number].requests)
        rank, ranks = int(said), len(self.ranks)
        if rank >= ranks:
            raise Refused(f"data_parallel_rank {rank} is out of range [0, {ranks}).")
        return rank

    async def _answer(
        self, request: web.Request, asked: Asked, seen: Seen, fault: Fault | None
    ) -> web.StreamResponse:
        spoken: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        finishes: list[str] = []
        for at, prompt in enumerate(asked.prompts):
            for choice in range(asked.choices):
                index = at * asked.choices + choice
                job, finish = self._job(asked, prompt, choice, partial(_say, spoken, index))
                finishes.append(finish)
                seen.jobs.append(job)
                self.ranks[seen.rank].add(job)
        about = {
            "id": ("chatcmpl-" if asked.chat else "cmpl-")
            + (seen.request_id or os.urandom(16).hex()),
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        if asked.stream:
            return await self._stream(request, asked, seen.jobs, finishes, spoken, about, fault)
        left = sum(len(job.answer) for job in seen.jobs)
        heard = 0
        while heard < left:
            await spoken.get()
            heard += 1
            if fault is not None and heard >= fault.after_tokens:
                await self._suffer(fault)
        choices = []
        for number, (job, finish) in enumerate(zip(seen.jobs, finishes, strict=True)):
            choices.append(piece(asked, number, job.answer, finish, self._echo(asked, job)))
        return web.json_response(
            about | {"choices": choices, "usage": self._usage(asked, seen.jobs)}
        )

    def _job(
        self, asked: Asked, prompt: Prompt, choice: int, emit: Callable[[int], None]
    ) -> tuple[Job, str]:
        """What is computed for one choice, and why it ends."""
        lora = asked.model if asked.model in self.settings.loras else ""
        images = [name for name, _, _ in prompt.images]
        count = asked.max_tokens if asked.ignore_eos else min(asked.max_tokens, ANSWER_TOKENS)
        tokens = answer(prompt.tokens, count, lora=lora, images=images, choice=choice)
        finish = "length" if count == asked.max_tokens else "stop"
        text = text_of(tokens)
        for stop in asked.stop:
            at = text.find(stop)
            if at >= 0:
                text, tokens, finish = text[:at], tokens[: max(at, 1)], "stop"
        hashes = chain(
            self.spec,
            prompt.tokens + tokens,
            salt=asked.salt,
            lora=(lora, f"/adapters/{lora}") if lora else None,
            multimodal=[Item(*image) for image in prompt.images],
        )
        follow = (asked.transfer or {}).get("kvpool") or {}
        until = -math.inf
        if self.settings.pool is not None and "follow_s" in follow:
            follow_s = min(float(follow["follow_s"]), FOLLOW_S_MAX)
            until = asyncio.get_running_loop().time() + follow_s
        return Job(prompt.tokens, tokens, hashes, emit, until, lora), finish

    async def _stream(
        self,
        request: web.Request,
        asked: Asked,
        jobs: list[Job],
        finishes: list[str],
        spoken: asyncio.Queue[tuple[int, int]],
        about: dict[str, Any],
        fault: Fault | None,
    ) -> web.StreamResponse:
        """Server-sent events, a token each, from the first token on."""
        if asked.chat:
            about = about | {"object": "chat.completion.chunk"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        said = [0] * len(jobs)
        heard, left = 0, sum(len(job.answer) for job in jobs)
        while heard < left:
            index, token = await spoken.get()
            if not response.prepared:
                await response.prepare(request)
            if not said[index] and asked.chat:
                delta = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                await _send(response, about | {"choices": [first]})
            said[index] += 1
            heard += 1
            job = jobs[index]
            finish = finishes[index] if said[index] == len(job.answer) else None
            echo = self._echo(asked, job) if said[index] == 1 else ""
            await _send(response, about | {"choices": [piece(asked, index, [token], finish, echo)]})
            if fault is not None and heard >= fault.after_tokens:
                await self._suffer_streaming(fault, response)
                await response.write_eof()
                return response
        if asked.usage:
            await _send(response, about | {"choices": [], "usage": self._usage(asked, jobs)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _suffer_streaming(self, fault: Fault, response: web.StreamResponse) -> None:
        """The same in a stream, where an error is a message, as vLLM's is."""
        if fault.kind == "end":
            return
        if fault.kind != "error":
            await self._suffer(fault)
        message = error_body("the stub was told to fail", "InternalServerError", fault.status)
        await _send(response, message)
        await response.write(b"data: [DONE]\n\n")

    def _echo(self, asked: Asked, job: Job) -> str:
        return text_of(job.tokens) if asked.echo else ""

    def _usage(self, asked: Asked, jobs: list[Job]) -> dict[str, Any]:
        prompts = sum(len(prompt.tokens) for prompt in asked.prompts)
        answered = sum(len(job.answer) for job in jobs)
        usage: dict[str, Any] = {
            "prompt_tokens": prompts,
            "total_tokens": prompts + answered,
            "completion_tokens": answered,
        }
        if self.settings.details:
            usage["prompt_tokens_details"] = {"cached_tokens": jobs[0].cached + jobs[0].loaded}
        return usage


def _say(spoken: asyncio.Queue[tuple[int, int]], index: int, token: int) -> None:
    spoken.put_nowait((index, token))


async def _send(response: web.StreamResponse, message: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n")


def _of_rank(endpoint: str, rank: int) -> str:
    if not rank or not endpoint:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if endpoint.startswith("tcp") else f"{endpoint}-dp{rank}"


def _bearer(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")
