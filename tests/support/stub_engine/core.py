"""The stub engine's work: batches of steps, a prefix cache, and what is loaded from a pool. No clock.

As in vLLM, a step computes one token for each sequence that decodes, and with what is left of its tokens
the next chunks of prompts, in the order of their arrival. A prompt that is found in the cache is computed
from there on, its last token always. Full blocks enter the cache when they are computed, the answer's too.

What a prompt's blocks are worth ends with memory: running sequences hold theirs, others are forgotten in
the order of their last use. (The cache counts blocks that nobody runs on apart from what running sequences
take: a stub of memory, not of fragmentation.)

One thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from kvpool.placement.kv_events.engine_blocks import short_hash

FOLLOW_POLL_S = 0.005
"""How often the pool is looked at for a prompt that is followed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """prefill_tokens_s, load_tokens_s: of prompts; load: from the pool. decode_s: what a step takes in which
    any job decodes. step_tokens: the most that a step computes. Infinities and zeros: nothing takes time.
    """

    prefill_tokens_s: float = 50_000.0
    load_tokens_s: float = math.inf
    decode_s: float = 0.002
    step_tokens: int = 2048


class Pool:
    """Blocks that stub engines share, also in different processes: empty files, named by their hashes.

    It stands for kvpool and its daemons: what one engine computed, the others load. `folder` exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            (self._folder / each.hex()).touch()

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """How many blocks of a chain are here, from its first one on."""
        for count, each in enumerate(hashes):
            if not (self._folder / each.hex()).exists():
                return count
        return len(hashes)


@dataclass(slots=True, eq=False)
class Job:
    """One prompt and its answer. Made by the caller, who also reads it; changed by `Core`.

    hashes: of the full blocks of the prompt and the answer. emit: called with each token of the answer.
    follow_until: the prompt is computed elsewhere, and waited for until then.

    cached, loaded: tokens of the prompt that were found in the own cache and in the pool, once it is begun.
    computed: tokens that need not be computed any more. emitted: of the answer. held: blocks it runs on.
    """

    tokens: list[int]
    answer: list[int]
    hashes: list[bytes]
    emit: Callable[[int], None]
    follow_until: float = -math.inf
    lora: str = ""
    cached: int = 0
    loaded: int = 0
    computed: int = 0
    emitted: int = 0
    held: list[bytes] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.emitted == len(self.answer)


@dataclass(slots=True)
class Step:
    """What is computed in one step, and how long it takes. chunks: of prompts, with their tokens."""

    seconds: float
    decodes: list[Job]
    chunks: list[tuple[Job, int]]


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that entered the cache: `hashes`, the `start`th of their job's on."""

    job: Job
    start: int
    hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: list[bytes]


Event = Stored | Removed


class Core:
    """See the module. capacity_blocks: of the cache, and of what runs. pool: None, nothing is shared."""

    def __init__(
        self, speed: Speed, block_tokens: int, capacity_blocks: int, pool: Pool | None
    ) -> None:
        self.speed = speed
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.prompt_tokens = self.cached_tokens = self.loaded_tokens = self.generated_tokens = 0
        self._pool = pool
        self._cache: OrderedDict[bytes, int] = OrderedDict()  # how many run on it; the oldest first
        self._events: list[Event] = []

    def __contains__(self, block: bytes) -> bool:
        return block in self._cache

    @property
    def blocks(self) -> int:
        """In the cache."""
        return len(self._cache)

    @property
    def taken_blocks(self) -> int:
        """Of running sequences, each with its whole context."""
        return sum(map(self._needs, self.running))

    def add(self, job: Job) -> None:
        self.waiting.append(job)

    def abort(self, job: Job) -> None:
        """It is no more. What was computed of it stays in the cache."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.running:
            self._end(job)

    def clear(self) -> None:
        """Forget the cache, but what sequences run on."""
        self._events.append(Removed([each for each, users in self._cache.items() if not users]))
        self._cache = OrderedDict((each, users) for each, users in self._cache.items() if users)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def begin(self, now: float) -> Step | None:
        """The next step; None: there is nothing to do now, though prompts may be followed."""
        self._admit(now)
        budget = self.speed.step_tokens
        decodes = [s for s in self.running if s.computed >= len(s.tokens)][:budget]
        budget -= len(decodes)
        chunks: list[tuple[Job, int]] = []
        for each in self.running:
            left = min(len(each.tokens) - each.computed, budget)
            if left > 0:
                chunks.append((each, left))
                budget -= left
        if not decodes and not chunks:
            return None
        computed = sum(tokens for _, tokens in chunks)
        seconds = computed / self.speed.prefill_tokens_s
        fresh = sum(s.loaded for s, _ in chunks if s.computed == s.cached + s.loaded)
        seconds += fresh / self.speed.load_tokens_s
        return Step(seconds + (self.speed.decode_s if decodes else 0.0), decodes, chunks)

    def end(self, step: Step) -> None:
        """The step is computed. Sequences that were aborted meanwhile are passed over."""
        for job, tokens in step.chunks:
            if job in self.running:
                self._advance(job, tokens)
        for job in step.decodes:
            if job in self.running:
                self._advance(job, 1)

    def _needs(self, job: Job) -> int:
        return -(-(len(job.tokens) + len(job.answer)) // self.block_tokens)

    def _admit(self, now: float) -> None:
        """What waits begins, in order; who follows a prompt is passed over until that is there."""
        for job in list(self.waiting):
            reusable = (len(job.tokens) - 1) // self.block_tokens
            hashes = job.hashes[:reusable]
            if job.follow_until > now and self._found(hashes) < reusable:
                continue
            if self.taken_blocks + self._needs(job) > self.capacity_blocks:
                return
            self.waiting.remove(job)
            self.running.append(job)
            cached = self._cached(hashes)
            found = self._found(hashes)
            job.cached = cached * self.block_tokens
            job.loaded = (found - cached) * self.block_tokens
            job.computed = job.cached + job.loaded
            self.prompt_tokens += len(job.tokens)
            self.cached_tokens += job.cached
            self.loaded_tokens += job.loaded
            self._store(job, 0, hashes[:found])
            self._use(job, hashes[:found])

    def _cached(self, hashes: Sequence[bytes]) -> int:
        for count, each in enumerate(hashes):
            if each not in self._cache:
                return count
        return len(hashes)

    def _found(self, hashes: Sequence[bytes]) -> int:
        cached = self._cached(hashes)
        return cached if self._pool is None else cached + self._pool.prefix(hashes[cached:])

    def _use(self, job: Job, hashes: Sequence[bytes]) -> None:
        for each in hashes:
            self._cache[each] = self._cache.get(each, 0) + 1
        job.held += hashes
        surplus = len(self._cache) - self.capacity_blocks
        if surplus > 0:
            idle = (each for each, users in self._cache.items() if not users)
            victims = [each for each, _ in zip(idle, range(surplus), strict=False)]
            for each in victims:
                del self._cache[each]
            self._events.append(Removed(victims))

    def _advance(self, job: Job, tokens: int) -> None:
        before = job.computed // self.block_tokens
        job.computed += tokens
        after = min(job.computed // self.block_tokens, len(job.hashes))
        new = job.hashes[before:after]
        if new:
            self._store(job, before, new)
            self._use(job, new)
            if self._pool is not None:
                self._pool.put(new)
        if job.computed >= len(job.tokens):
            job.emitted += 1
            self.generated_tokens += 1
            token = job.answer[job.emitted - 1]
            if job.done:
                self._end(job)
            job.emit(token)

    def _store(self, job: Job, start: int, hashes: Sequence[bytes]) -> None:
        """An event for each run of blocks that are new to the cache."""
        for present, run in groupby(enumerate(hashes, start), lambda pair: pair[1] in self._cache):
            if not present:
                blocks = list(run)
                self._events.append(Stored(job, blocks[0][0], [each for _, each in blocks]))

    def _end(self, job: Job) -> None:
        self.running.remove(job)
        # The tail first, so that it is forgotten before its head.
        for each in reversed(job.held):
            users = self._cache[each] - 1
            self._cache[each] = users
            self._cache.move_to_end(each)
        job.held.clear()


def event_maps(events: Sequence[Event], block_tokens: int) -> list[dict[str, object]]:
    """Events as vLLM writes them."""
    maps: list[dict[str, object]] = []
    for event in events:
        if isinstance(event, Removed):
            hashes = [short_hash(each) for each in event.hashes]
            maps.append(
                {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
            )
            continue
        job = event.job
        tokens = job.tokens + job.answer
        first = event.start * block_tokens
        parent = job.hashes[event.start - 1] if event.start else None
        maps.append(
            {
                "type": "BlockStored",
                "block_hashes": [short_hash(each) for each in event.hashes],
                "parent_block_hash": None if parent is None else short_hash(parent),
                "token_ids": tokens[first : first + len(event.hashes) * block_tokens],
                "block_size": block_tokens,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": job.lora or None,
                "extra_keys": None,
                "group_idx": 0,
            }
        )
    return maps
