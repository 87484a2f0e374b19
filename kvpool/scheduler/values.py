"""The scheduler's values: requests, engines, decisions. No I/O, no clock.

Times are seconds of one clock, lengths are tokens, prefixes are counted in blocks. Nothing here is
thread-safe; the process that decides has one thread.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Literal, NamedTuple, get_args

from kvpool.scheduler.decay import Decaying
from kvpool.scheduler.links import Link

COMPUTING_S = 30.0
"""Averaging time of an engine's share of seconds with prompts."""


class Role(Flag):
    """What an engine is used for."""

    PREFILL = auto()
    DECODE = auto()
    BOTH = PREFILL | DECODE


class Among(NamedTuple):
    """A group of engines: those of these kinds, and with these names; None for all."""

    kinds: frozenset[str] | None = None
    engines: frozenset[str] | None = None

    def has(self, engine: Engine) -> bool:
        return (self.kinds is None or engine.kind in self.kinds) and (
            self.engines is None or engine.name in self.engines
        )

    def meets(self, other: Among) -> bool:
        """Whether an engine may be in both groups."""
        return _meet(self.kinds, other.kinds) and _meet(self.engines, other.engines)


def _meet(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    return one is None or other is None or not one.isdisjoint(other)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be served.

    ident: unique among the requests in flight. keys: its prefix chain, one key a block, the last of
    which may be of a block that the prompt does not fill. tokens: of the prompt. output_tokens: how
    many it is expected to generate, or the most it may. session: for session hashing.
    priority: higher ones of a tenant are served first. tenant: whose share of the engines it uses.
    deadline_s: after which its first token is useless, by the clock of `arrived_s`. kinds: of engines
    that can serve it; None for all. engines: the names of those that can, if not all of these kinds can; `among`: both.
    whole: one engine must do its prompt and its answer, in one order; any that decodes can. segments: whether
    its prompt may be computed in several orders.
    """

    ident: Hashable
    keys: Sequence[Hashable]
    tokens: int
    output_tokens: int
    arrived_s: float
    session: Hashable = None
    priority: int = 0
    tenant: str = ""
    deadline_s: float = math.inf
    kinds: frozenset[str] | None = None
    whole: bool = False
    segments: bool = True
    engines: frozenset[str] | None = None
    among: Among = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "among", Among(self.kinds, self.engines))


@dataclass(slots=True)
class Engine:
    """One engine in the scheduler's state. Changed by `Scheduler` only.

    role: its current role; flexible: whether it may change between prefill and decode. kind: engines of
    one kind are alike, and share their estimates. namespace: of its blocks in the pool, which only engines of the same
    one can use. gpu, tiers: the names under which the prefix index
    knows its own cache, and its node's tiers from the fastest to the slowest. labels: its location, as
    `rack` and `zone`. follows_max: prompts that its node can follow at a time for it.

    steps_at_once: its pipeline's stages, times its data-parallel ranks where they are one engine.

    free_at: when it will have computed what was sent to it. queued_tokens: of prompts, uncached ones only, until
    the first token; `in_step` of them are in the step that began at `step_began`. work_s: seconds that they take
    beside those of steps. prefills: sent and not computed yet. blocks: of these, whole, each with how many of them
    share it; kept for policies that use it. decodes, context_tokens: of requests that decode here or hold a
    reservation for it, each with its whole context. held_tokens: of those among them that were sent to decode, at
    most `capacity_tokens`. others_tokens: of its memory, what it says is used beyond that, by requests that did not come
    from here. follows: prompts that are followed for it now. computing: seconds of prompts that were
    sent to it.
    """

    name: str
    node: str
    role: Role
    kind: str
    gpu: str
    tiers: tuple[str, ...]
    capacity_tokens: int
    labels: Mapping[str, str] = field(default_factory=dict)
    follows_max: int = 0
    flexible: bool = False
    steps_at_once: int = 1
    namespace: str = ""
    free_at: float = 0.0
    queued_tokens: int = 0
    in_step: int = 0
    step_began: float = 0.0
    work_s: float = 0.0
    prefills: int = 0
    blocks: dict[Hashable, int] = field(default_factory=dict)
    decodes: int = 0
    context_tokens: int = 0
    held_tokens: int = 0
    others_tokens: int = 0
    follows: int = 0
    computing: Decaying = field(default_factory=lambda: Decaying(COMPUTING_S))

    @property
    def idle(self) -> bool:
        """Whether it has no requests."""
        return not self.prefills and not self.decodes

    def has_room(self, needed: int, held: int, most: float, *, waits: bool = False) -> bool:
        """Whether so much more fits into `most` tokens, beside `held`, a sum of what is counted here, and others'.

        waits: a first request may also wait there for others to end, so that they do not keep out all.
        """
        others = 0 if waits and not held else self.others_tokens
        return held + others + needed <= most

    def shares(self, other: Engine) -> bool:
        """Whether it can use the other's blocks, through the pool. Without tiers there is nothing to pull into."""
        return bool(self.tiers and other.tiers) and self.namespace == other.namespace


Place = str | tuple[str]


def place(engine: Engine) -> Place:
    """Its node; an engine without a known node is alone at its place."""
    return engine.node or (engine.name,)


def together(one: Engine, other: Engine) -> bool:
    """Whether they are at one place."""
    return one is other or (one.node == other.node and one.node != "")


class Estimate(NamedTuple):
    """Prediction for a request on one engine.

    cached: blocks that need not be computed; `loaded` of them are to be loaded to the GPU, of these `pulled`
    from `source`, another node. starts_s: from now until computing can begin; prefill_s:
    from then to the first token. cost: what the policy compares, in a unit of its own. link: from `source`.
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
    link: Link | None = None

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.starts_s + self.prefill_s


class DecodeEstimate(NamedTuple):
    """Prediction for a request that decodes on one engine.

    tpot_s: seconds per token with this request. lacks: blocks of the prompt that neither the engine nor its
    node has. handover_s: from the end of the prompt until all of it is there. fits: whether there is
    memory for its whole context. cost: seconds from the end of the prompt to the end of the answer. link: by which
    these blocks come; None: none come.
    """

    engine: Engine
    tpot_s: float
    lacks: int
    handover_s: float
    fits: bool
    cost: float
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """Send this part of this request there now.

    estimate: its prediction. end: compute the prompt up to this token; `last`: that is its end,
    and the answer holds the first token. decode: its decode engine, with its reservation; None if
    the scheduler does not choose decode engines.

    Decoding. `whole`: this order is for prompt and answer both. `follow`: send the request to
    `decode` now, too; it waits there for the prompt, whose blocks are pulled while they are computed. At
    most one order of a request says so. Otherwise a `DecodeOrder` comes when the prompt is computed and
    there is room, maybe for another engine.

    candidates: the compared engines; decoders: the same for `decode`, best first. number: of this order among those of
    its request.
    """

    request: Request
    estimate: Estimate
    end: int
    last: bool
    decode: Engine | None
    whole: bool = False
    follow: bool = False
    candidates: Sequence[Estimate] = field(repr=False, default=())
    decoders: Sequence[DecodeEstimate] = field(repr=False, default=())
    number: int = 0


class Saves(NamedTuple):
    """What an engine says of a prompt's blocks when it has computed them, in tokens from the prompt's beginning.

    stored: in the pool, or on their way there; what is behind was not saved. saving: the last ones of these, on their
    way; for about `saving_s` still, None if the engine does not know.
    """

    stored: int
    saving: int
    saving_s: float | None


@dataclass(frozen=True, slots=True)
class DecodeOrder:
    """The prompt of this request is computed: send it to this engine now, for its answer.

    computed_by: the engine that computed its end. wait_s: so long it may wait for blocks that are still being saved
    there; 0: not at all.
    """

    request: Request
    engine: Engine
    computed_by: Engine
    estimate: DecodeEstimate
    decoders: Sequence[DecodeEstimate] = field(repr=False, default=())
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begun:
    """How far a request has come with another scheduler, in engines of the one that goes on with it.

    orders: not computed yet, as they were given. done: tokens of its prompt computed before them. computed_by: the
    engine that computed its end. decode: where it was sent for its answer; `follows`: it follows the prompt there.
    failures: failed orders; avoid: engines where one failed.
    """

    orders: Sequence[Order] = ()
    done: int = 0
    computed_by: Engine | None = None
    decode: Engine | None = None
    follows: bool = False
    failures: int = 0
    avoid: frozenset[str] = frozenset()


Code = Literal[
    "queue_full", "tenant_share", "too_long", "decode_full", "ttft", "tpot", "deadline", "no_engine"
]
"""Why a request is refused; `docs/scheduling.md` says when."""
CODES: frozenset[Code] = frozenset(get_args(Code))


@dataclass(frozen=True, slots=True)
class Rejection:
    """A refused request: 429.

    retry_after_s: when it may be accepted, as an estimate; infinite: never.
    """

    request: Request
    reason: str
    retry_after_s: float
    code: Code


class Left(NamedTuple):
    """The requests affected by an engine that has left.

    queued: their orders there are void; they wait again, and other orders come. given_up: forgotten, because they
    have failed too often, or no remaining engine is large enough for them. decoding: they were sent there for
    their answer, and the caller must report how that ended: `decode_failed` if no token came yet, `abandoned`
    otherwise.
    """

    queued: list[Hashable]
    given_up: list[Hashable]
    decoding: list[Hashable]
