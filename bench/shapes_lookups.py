"""Part of `shapes.py`: how long does the lookup of a very long prompt hold an engine's scheduler?

A real daemon has all blocks of the prompt, and the plugin's scheduler half asks for them as vLLM has it do: once a step until
it answers. The longest of these calls counts, as every call holds all requests up. Beside it: the whole, from the first
call to the answer, and the same lookup asked for at once, in one call.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from engines import daemon

from kvpool.client import Client
from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.plan import GroupRule, pack
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.engine_plugins.vllm.scheduler.half import SchedulerHalf
from kvpool.engine_plugins.vllm.scheduler.request_state import Engine
from kvpool.types import NamespaceRecord, PartSpec

if TYPE_CHECKING:
    from harness import Report

BLOCK_TOKENS = 16
PART_BYTES = 64
MEMORY = "512MiB"
STEP_S = 0.001
BOUND_MS = 5.0


def lookup_block_ms(tokens: int = 1_000_000, ranks: int = 1, rounds: int = 5) -> dict[str, float]:
    """Medians over rounds, in milliseconds. block: the longest call. whole: from the first call to the answer. at_once: the
    same in one call.
    """
    hashes = [
        blake2b(index.to_bytes(8, "little"), digest_size=32).digest()
        for index in range(tokens // BLOCK_TOKENS)
    ]
    found: dict[str, list[float]] = {"block": [], "whole": [], "at_once": []}
    with tempfile.TemporaryDirectory() as folder, _half(Path(folder), hashes, ranks) as half:
        for number in range(rounds + 1):
            lookups = half._lookups
            ahead, lookups._ahead = lookups._ahead, None
            at_once, _ = _look_up(half, f"at-once-{number}", hashes)
            lookups._ahead = ahead
            block, whole = _look_up(half, f"ahead-{number}", hashes)
            if number:  # the first ones warm up
                for name, seconds in (("block", block), ("whole", whole), ("at_once", at_once)):
                    found[name].append(1e3 * seconds)
    return {name: statistics.median(each) for name, each in found.items()}


@contextmanager
def _half(folder: Path, hashes: list[bytes], ranks: int) -> Iterator[SchedulerHalf]:
    """A scheduler half whose pool has all these blocks."""
    with daemon(folder, MEMORY) as socket:
        client = Client(socket, timeout_s=10.0)
        engine = Engine([GroupRule(0)], BLOCK_TOKENS, 1000, ranks, sync_loads=False)
        config = PluginConfig(socket=socket, lookup_timeout_s=10.0, request_timeout_s=10.0)
        half = SchedulerHalf(
            client,
            config,
            engine,
            pulls=None,
            new_weights=str,
            ahead=Ahead(Client(socket, timeout_s=10.0), config.lease_s),
        )
        record = NamespaceRecord({"bench": "lookups"}, (PartSpec(PART_BYTES),) * ranks)
        half.set_namespace(lambda _: record, "", groups=[0] * ranks, rank_bytes=PART_BYTES)
        ns = client.open(record)
        for part in range(ranks):
            for at in range(0, len(hashes), 8192):
                some = hashes[at : at + 8192]
                client.put(ns, pack(some), bytes(PART_BYTES * len(some)), part=part)
        yield half
        half.close()
        client.close()


def _look_up(half: SchedulerHalf, name: str, hashes: list[bytes]) -> tuple[float, float]:
    """Seconds of the longest call, and of all until the answer."""
    tokens = len(hashes) * BLOCK_TOKENS
    request = SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=tokens + 1,
        num_prompt_tokens=tokens + 1,
        num_computed_tokens=0,
        num_preemptions=0,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        trace_headers=None,
        lora_request=None,
    )
    half.on_new_request(request)
    longest, begun = 0.0, time.perf_counter()
    while True:
        at = time.perf_counter()
        answer, _ = half.matched_tokens(request, 0)
        now = time.perf_counter()
        longest = max(longest, now - at)
        if answer is not None:
            break
        time.sleep(STEP_S)
    assert answer == tokens, f"{answer} of {tokens} tokens were found"
    half.request_finished(request, [[]], completed=False)
    return longest, now - begun


def lookups(report: Report) -> None:
    rounds = 3 if report.quick else 9
    for tokens, ranks in ((128_000, 1), (128_000, 8), (1_000_000, 1)):
        report.row(f"{tokens} tokens, {ranks} ranks", **lookup_block_ms(tokens, ranks, rounds))
    report.check("lookup_1m_tokens_block_ms", report.rows[-1]["block"], at_most=BOUND_MS)
