"""What the scheduler speaks of: requests, engines, what a decision looks like. No I/O, no clock.

Times are seconds of one clock, lengths are tokens, prefixes are counted in blocks. Nothing here is
thread-safe; the process that decides has one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import NamedTuple


class Role(Flag):
    """What an engine is used for."""

    PREFILL = auto()
    DECODE = auto()
    BOTH = PREFILL | DECODE


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be served.

    ident: unique among the requests in flight. keys: its prefix chain, one key a block, the last of
    which may be of a block that the prompt does not fill. tokens: of the prompt. output_tokens: how
    many it is expected to generate, or the most it may. session: what a session hash goes by.
    priority: higher ones are served first.
    """

    ident: Hashable
    keys: Sequence[Hashable]
    tokens: int
    output_tokens: int
    arrived_s: float
    session: Hashable = None
    priority: int = 0


@dataclass(slots=True)
class Engine:
    """One engine as the scheduler keeps it in mind. Changed by `Scheduler` only.

    kind: engines of one kind are alike, and share their estimates. gpu, tiers: the names under which the
    prefix index knows its own cache, and its node's tiers from the fastest to the slowest.

    free_at: when it will have computed what was sent to it. queued_tokens: of prompts, uncached ones
    only, until the first token. prefills: sent and not computed yet. blocks: of these, whole, each
    with how many of them have it. decodes, context_tokens: of requests that decode here or hold a reservation for it, each with its
    whole context, of at most `capacity_tokens`.
    """

    name: str
    node: str
    role: Role
    kind: str
    gpu: str
    tiers: tuple[str, ...]
    capacity_tokens: int
    free_at: float = 0.0
    queued_tokens: int = 0
    prefills: int = 0
    blocks: dict[Hashable, int] = field(default_factory=dict)
    decodes: int = 0
    context_tokens: int = 0


class Outlook(NamedTuple):
    """What would become of a request on one engine.

    cached: blocks that need not be computed, of which `loaded` are to be brought to the GPU, `pulled`
    from `source`, another node, among them. starts_s: from now until computing can begin; prefill_s:
    from then to the first token. cost: what the policy compares, in a unit of its own.
    """

    engine: Engine
    cached: int
    loaded: int
    pulled: int
    source: str | None
    load_s: float
    starts_s: float
    prefill_s: float
    cost: float
    pending: bool = False

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.starts_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Order:
    """Send this part of this request there now.

    outlook: what is expected of it. end: compute the prompt up to this token; `last`: that is its end,
    and the answer holds the first token. decode: where it goes on, with its reservation; None where
    engines that decode are none of the scheduler's business. candidates: what was compared.
    """

    request: Request
    outlook: Outlook
    end: int
    last: bool
    decode: Engine | None
    candidates: Sequence[Outlook] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that is not taken: 429.

    retry_after_s: when it may fit, as far as one can tell; infinite if it never will.
    """

    request: Request
    reason: str
    retry_after_s: float
