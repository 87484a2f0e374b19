"""The requests that are planned for: a trace's, or some of a described shape. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from kvpool.errors import ConfigError
from kvpool.scheduler.values import Request
from kvpool.simulator.recordings import Trace
from kvpool.simulator.traces import BLOCK_TOKENS, Entry

PREFIXES = 16
"""How many different prefixes the prompts of a described workload share."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in a few words. rate: requests a second. prompt_tokens, output_tokens: on average.

    shared: the share of a prompt's tokens that other prompts have too, from 0 to 1.
    """

    rate: float = 4.0
    prompt_tokens: int = 4000
    output_tokens: int = 300
    shared: float = 0.5

    def __post_init__(self) -> None:
        if self.rate <= 0 or min(self.prompt_tokens, self.output_tokens) < 1:
            raise ConfigError(
                "a workload needs a rate, and prompts and outputs of at least one token"
            )
        if not 0 <= self.shared <= 1:
            raise ConfigError("the shared part of prompts must be a share from 0 to 1")

    def entries(self, requests: int, seed: int) -> list[Entry]:
        """So many of them.

        Arrivals are a Poisson process. What prompts share are whole blocks of one of `PREFIXES`, the
        second half as popular as the first, the third a third, and so on. The rest of a prompt and the
        output have exponential lengths.
        """
        rng = Random(seed)
        ids = count()
        blocks = round(self.shared * self.prompt_tokens / BLOCK_TOKENS)
        prefixes = [tuple(next(ids) for _ in range(blocks)) for _ in range(PREFIXES)]
        weights = [1 / (rank + 1) for rank in range(PREFIXES)]
        own = max(1.0, self.prompt_tokens - blocks * BLOCK_TOKENS)
        found = []
        when = 0.0
        for _ in range(requests):
            when += rng.expovariate(self.rate)
            prefix = rng.choices(prefixes, weights)[0]
            tokens = blocks * BLOCK_TOKENS + _length(rng, own)
            new = -(-tokens // BLOCK_TOKENS) - blocks
            keys = (*prefix, *(next(ids) for _ in range(new)))
            found.append(Entry(when, tokens, _length(rng, self.output_tokens), keys))
        return found


def at_rate(trace: Trace, rate: float, seed: int) -> list[Request]:
    """The requests of a trace, faster or slower, so that so many come a second; 0: as they are."""
    entries = trace.entries
    span_s = entries[-1].timestamp_s - entries[0].timestamp_s + trace.step_s
    scale = len(entries) / (rate * span_s) if rate and span_s else 1.0
    return trace.requests(seed, scale)


def unique_tokens(requests: Sequence[Request], block_tokens: int = BLOCK_TOKENS) -> int:
    """What a pool holds that forgets nothing."""
    return len({key for request in requests for key in request.keys}) * block_tokens


def _length(rng: Random, mean: float) -> int:
    return max(1, round(rng.expovariate(1 / mean)))
