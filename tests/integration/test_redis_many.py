"""A hundred thousand blocks: what publishing, finding and sweeping them costs. Prints what it measured (-s)."""

import asyncio
import os
import random
import resource
import sys
import time
from pathlib import Path

import pytest
import uvloop

from kvpool.placement.directory.base import BATCH_MAX, TIERS, Entry
from kvpool.placement.directory.redis import open_directory
from kvpool.placement.redis.settings import parse_url
from tests.contract.suites.directory import NAMESPACE, node, sweep_all
from tests.support.servers.redis import Redis, RedisCluster

BLOCKS = 100_000
LOOKUPS = 1000
DRAM = TIERS["dram"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [Redis, RedisCluster])
def test_many_blocks(tmp_path: Path, kind: type[Redis] | type[RedisCluster]) -> None:
    packed = os.urandom(16 * BLOCKS)
    keys = [packed[at : at + 16] for at in range(0, len(packed), 16)]
    chance = random.Random(1)

    async def main(url: str) -> None:
        directory = await open_directory(
            parse_url(url), cluster="c", timeout_s=20.0, publish_timeout_s=60.0
        )

        async def publish(number: int) -> tuple[float, float]:
            began, cpu = time.perf_counter(), process_s()
            for at in range(0, BLOCKS, BATCH_MAX):
                part = keys[at : at + BATCH_MAX]
                await directory.publish(NAMESPACE, 8, node(number), DRAM, part, [255] * len(part))
            return time.perf_counter() - began, process_s() - cpu

        for what, number in (("empty", 1), ("that has them", 1), ("with another's", 2)):
            took_s, cpu_s = await publish(number)
            say(f"publish to a Redis {what}: {took_s:.2f} s, {cpu_s:.2f} s of CPU here")
        expected = [Entry(node(1), DRAM, 255), Entry(node(2), DRAM, 255)]
        times = []
        for _ in range(LOOKUPS):
            at = chance.randrange(BLOCKS - 256)
            began = time.perf_counter()
            found = await directory.locate(NAMESPACE, 8, keys[at : at + 256])
            times.append(time.perf_counter() - began)
            assert found == [expected] * 256
        times.sort()
        say(f"locate 256 keys: p50 {1e6 * times[500]:.0f} us, p99 {1e6 * times[990]:.0f} us")
        began = time.perf_counter()
        dropped, calls = await asyncio.wait_for(sweep_all(directory, [node(1)], 1000), 300)
        assert dropped == BLOCKS
        took_s = time.perf_counter() - began
        say(f"sweep a dead node: {took_s:.2f} s in {calls} calls")
        await directory.close()

    with kind(tmp_path) as server:
        uvloop.run(main(server.url))


def say(text: str) -> None:
    sys.stdout.write(f"\n{text}")


def process_s() -> float:
    """CPU that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
