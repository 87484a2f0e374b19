"""Requests to simulate: from traces in Mooncake's format, or generated. Deterministic by seed. What routers record:
`recordings.py`.

A trace is JSON lines: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and
`hash_ids`, the prompt's prefix chain, one id a block of `block_tokens` tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

from kvpool.errors import InvalidRequest
from kvpool.scheduler.values import Request

BLOCK_TOKENS = 512
STEP_S = 3.0
"""Mooncake's traces of real requests tell arrival times in steps of so many seconds."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of a trace. session, agent, tenant: ids; empty: it has none."""

    timestamp_s: float
    tokens: int
    output_tokens: int
    keys: tuple[int, ...]
    session: str = ""
    agent: str = ""
    tenant: str = ""
    priority: int = 0


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[Entry]:
    """All of a trace, in its order. Raises `InvalidRequest`, with the line that is wrong."""
    entries: list[Entry] = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                entries.append(_parse(line, f"{path}, line {number}", block_tokens))
                if len(entries) > 1 and entries[-1].timestamp_s < entries[-2].timestamp_s:
                    raise InvalidRequest(f"{path}, line {number}: earlier than the previous line")
    if not entries:
        raise InvalidRequest(f"there are no requests in {path}")
    return entries


def _parse(line: str, where: str, block_tokens: int) -> Entry:
    try:
        found = json.loads(line)
        entry = Entry(
            float(found["timestamp"]) / 1e3,
            int(found["input_length"]),
            int(found["output_length"]),
            tuple(map(int, found["hash_ids"])),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequest(f"{where}: not a valid request: {error!r}") from None
    blocks = -(-entry.tokens // block_tokens)
    if entry.tokens < 1 or entry.output_tokens < 1 or len(entry.keys) != blocks:
        raise InvalidRequest(
            f"{where}: {entry.tokens} tokens in blocks of {block_tokens} need {blocks} hash_ids, "
            f"and there are {len(entry.keys)}; both lengths must be at least 1"
        )
    return entry


def step_of(entries: Sequence[Entry]) -> float:
    """In what steps a trace tells times: 3 s if all are multiples of that, 0 if times are exact."""
    return 0.0 if any(entry.timestamp_s % STEP_S for entry in entries) else STEP_S


def arrivals(
    entries: Sequence[Entry],
    seed: int,
    scale: float = 1.0,
    *,
    step_s: float = 0.0,
    block_tokens: int = BLOCK_TOKENS,
) -> list[Request]:
    """The requests in the order in which they arrive, each somewhere within its step of the trace.

    scale: 2 makes the trace twice as long, and halves the load. step_s: of the trace's times; 0 where
    these are exact.
    """
    rng = Random(seed)
    first = entries[0].timestamp_s
    timed = sorted(
        ((entry.timestamp_s - first + rng.random() * step_s) * scale, number)
        for number, entry in enumerate(entries)
    )
    return [_request(number, entries[number], when, block_tokens) for when, number in timed]


def _request(number: int, entry: Entry, arrived_s: float, block_tokens: int) -> Request:
    # Without a session: what follows the first `BLOCK_TOKENS` tells conversations apart.
    second = min(max(1, BLOCK_TOKENS // block_tokens), len(entry.keys) - 1)
    return Request(
        number,
        entry.keys,
        entry.tokens,
        entry.output_tokens,
        arrived_s,
        session=entry.session or entry.keys[second],
        priority=entry.priority,
        tenant=entry.tenant,
    )


def ideal_hits(requests: Sequence[Request]) -> list[int]:
    """Of each request, the blocks that an infinite cache would have, filled the moment they are asked for."""
    seen: set[object] = set()
    hits = []
    for request in requests:
        blocks = 0
        for key in request.keys:
            if key not in seen:
                break
            blocks += 1
        hits.append(blocks)
        seen.update(request.keys)
    return hits


GENERATORS = ("shared-prefixes", "multi-turn", "agent")


def generate(shape: str, requests: int, seed: int, rate: float = 4.0) -> list[Entry]:
    """A trace of this shape, with so many requests a second.

    shared-prefixes: 16 system prompts of 4 k tokens, of which few are popular, and short questions.
    multi-turn: conversations of some turns, each with all before it. agent: long contexts that grow by
    the results of tools, in quick succession.
    """
    if shape not in GENERATORS:
        raise InvalidRequest(
            f"there is no trace shape {shape!r}; known are {', '.join(GENERATORS)}"
        )
    rng = Random(seed)
    ids = count()
    if shape == "shared-prefixes":
        entries = _shared_prefixes(requests, rng, ids, rate)
    elif shape == "multi-turn":
        entries = _turns(requests, rng, ids, rate, first=2000, more=800, turns=6, pause_s=40.0)
    else:
        entries = _turns(requests, rng, ids, rate, first=12000, more=1500, turns=20, pause_s=4.0)
    entries = sorted(entries, key=lambda entry: entry.timestamp_s)[:requests]
    first = entries[0].timestamp_s
    return [replace(entry, timestamp_s=entry.timestamp_s - first) for entry in entries]


def _length(rng: Random, mean: float) -> int:
    return max(1, round(rng.expovariate(1 / mean)))


def _entry(
    rng: Random, ids: Iterator[int], when: float, prefix: Sequence[int], tokens: int
) -> Entry:
    new = -(-tokens // BLOCK_TOKENS) - len(prefix)
    keys = (*prefix, *(next(ids) for _ in range(new)))
    return Entry(when, tokens, _length(rng, 300), keys)


def _shared_prefixes(requests: int, rng: Random, ids: Iterator[int], rate: float) -> list[Entry]:
    prompts = [[next(ids) for _ in range(8)] for _ in range(16)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    entries = []
    when = 0.0
    for _ in range(requests):
        when += rng.expovariate(rate)
        prompt = rng.choices(prompts, weights)[0]
        tokens = len(prompt) * BLOCK_TOKENS + _length(rng, 500)
        entries.append(_entry(rng, ids, when, prompt, tokens))
    return entries


def _turns(
    requests: int,
    rng: Random,
    ids: Iterator[int],
    rate: float,
    *,
    first: int,
    more: int,
    turns: int,
    pause_s: float,
) -> list[Entry]:
    entries: list[Entry] = []
    begins = 0.0
    while (
        len(entries) < 2 * requests
    ):  # the sparse end, where few conversations overlap, is cut off
        begins += rng.expovariate(rate / turns)
        when, tokens = begins, _length(rng, first)
        prefix: tuple[int, ...] = ()
        for _ in range(_length(rng, turns)):
            entry = _entry(rng, ids, when, prefix, tokens)
            entries.append(entry)
            prefix = entry.keys[
                : tokens // BLOCK_TOKENS
            ]  # what is not full changes with the next turn
            when += rng.expovariate(1 / pause_s)
            tokens += entry.output_tokens + _length(rng, more)
    return entries
