"""One stub engine until it is interrupted. Its first line of output is JSON: where it is."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

from tests.support.stub_engine import Settings, Speed, StubEngine


def settings() -> Settings:
    """By the command line."""
    usual = Settings()
    parser = argparse.ArgumentParser(prog="tests.support.stub_engine", description=__doc__)
    parser.add_argument("--model", default=usual.model)
    parser.add_argument("--host", default=usual.host)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--events", default="", help="such as tcp://127.0.0.1:5557")
    parser.add_argument("--replay", default="")
    parser.add_argument("--topic", default="")
    parser.add_argument("--ranks", type=int, default=usual.ranks)
    parser.add_argument("--block-tokens", type=int, default=usual.block_tokens)
    parser.add_argument("--capacity-tokens", type=int, default=usual.capacity_tokens)
    parser.add_argument("--max-len", type=int, default=usual.max_len)
    parser.add_argument("--prefill-tokens-s", type=float, default=usual.speed.prefill_tokens_s)
    parser.add_argument("--load-tokens-s", type=float, default=usual.speed.load_tokens_s)
    parser.add_argument("--decode-s", type=float, default=usual.speed.decode_s)
    parser.add_argument("--step-tokens", type=int, default=usual.speed.step_tokens)
    parser.add_argument("--pool", type=Path, help="a folder that engines share")
    parser.add_argument(
        "--hash-seed",
        default=usual.hash_seed,
        help="PYTHONHASHSEED of the engine that it stands for",
    )
    parser.add_argument("--api-key", default="")
    parser.add_argument("--lora", action="append", default=[])
    given = parser.parse_args()
    return Settings(
        model=given.model,
        host=given.host,
        port=given.port,
        events=given.events,
        replay=given.replay,
        topic=given.topic,
        ranks=given.ranks,
        block_tokens=given.block_tokens,
        capacity_tokens=given.capacity_tokens,
        max_len=given.max_len,
        speed=Speed(given.prefill_tokens_s, given.load_tokens_s, given.decode_s, given.step_tokens),
        pool=given.pool,
        hash_seed=given.hash_seed,
        api_key=given.api_key,
        loras=tuple(given.lora),
    )


async def serve(what: Settings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with StubEngine(what) as engine:
        place = {"url": engine.url, "events": what.events, "replay": what.replay}
        sys.stdout.write(json.dumps(place) + "\n")
        sys.stdout.flush()
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(settings()))
