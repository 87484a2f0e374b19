"""State of one live request in the scheduler half, and what all parts of that half share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.following import Following
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.plan import GroupRule, label_of
from kvpool.engine_plugins.vllm.scheduler.pulls import Pull
from kvpool.engine_plugins.vllm.scheduler.session_turns import SessionTurn
from kvpool.types import KEY_BYTES, EngineRecord, Recompute

if TYPE_CHECKING:
    from kvpool.client import Client, Lease


@dataclass
class Engine:
    """The engine as the scheduler half sees it."""

    rules: Sequence[GroupRule]
    hash_tokens: int
    """Tokens of a block of the chain."""
    blocks: int
    """Blocks of the engine's cache."""
    ranks: int
    sync_loads: bool
    """Whether failed synchronous loads can be reported, and lead to nothing else that is wrong."""
    loads: bool = True
    saves: bool = True
    answer_states: bool = True
    """Whether states that the engine hands over are right after the prompt too: not where the engine drafts tokens,
    since a state does not go back before rejected tokens."""
    draft_blocks: int = 0
    """Blocks at the end of a hit that are computed all the same (`namespace.draft_blocks`)."""
    stages: int = 1
    """Stages of the engine's pipeline."""
    events: Publisher | None = None
    """Publisher of the events of the engine's own cache."""
    record: EngineRecord | None = None
    """What routers are told of the engine, or None for nothing."""
    watches: bool = True
    """Whether the ranks are told of reused blocks before they write into these."""


@dataclass(frozen=True)
class Shared:
    """What all parts of a scheduler half share."""

    client: Client
    """Client of this node's daemon, whose time-out is the longest that a lookup may take."""
    config: PluginConfig
    engine: Engine
    clock: Callable[[], float]
    """Seconds, monotonic."""
    counters: Counters = field(default_factory=Counters)
    jobs: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """Numbers of loads, saves and lookups."""


@dataclass
class RankLease:
    """What the scheduler has of the ranks' leases. deadline: of the first one that ends."""

    job: int
    blocks: int
    deadline: float
    life: int = 0
    token: str = ""


@dataclass
class Question:
    """A prefix that the ranks are asked for. start: chain index of the first of the packed keys. rounds: how often.

    since: when the ranks' leases begin at the earliest. until: when it is given up.
    """

    start: int
    keys: bytes
    until: float
    recompute: Recompute | None
    following: Following | None
    trace: str
    since: float = 0.0
    job: int = 0
    rounds: int = 0
    answers: list[int] = field(default_factory=list)


@dataclass
class Lookup:
    """The pool's answer for one request: blocks [start, end) of the chain are there, under `lease`."""

    start: int
    end: int
    lease: Lease | RankLease | None
    preemptions: int
    """Preemptions of the request at the time. A preempted request is looked up again, since its own blocks may be in
    the pool by now."""
    keys: bytes = b""
    """Packed keys of all blocks that were asked for, if they were very many."""
    sync: bool = False
    known: int | None = None
    """Chain index up to which the pool has all but states, or None if the pool was not asked yet."""
    declined: bool = False
    """Whether the blocks are computed instead, which was counted."""


@dataclass
class LargeLookup:
    """A lookup of very many blocks under way: blocks [start, end) of the chain."""

    start: int
    end: int
    keys: bytearray = field(default_factory=bytearray)
    """Packed keys of the blocks before `at`."""
    at: int = -1
    before: Lookup | None = None
    """What had been found when `pull` was waited for."""
    pull: Pull | None = None
    lease: Future[Lease | Literal[False] | None] | None = None
    """The answer, once all keys were sent. False: the daemon refused."""
    begun: float = 0.0
    """When the keys were sent."""

    def __post_init__(self) -> None:
        if self.at < 0:
            self.at = self.start


@dataclass
class RequestState:
    """The scheduler half's state of one live request."""

    request: Any
    lookup: Lookup | None = None
    large: LargeLookup | None = None
    """The lookup under way, if it is one of very many blocks."""
    pull: Pull | None = None
    """The wait for other nodes' blocks that are missing in `lookup`."""
    pulled: int = -1
    """Preemptions of the request when other nodes were asked: it waits for them once each time it starts."""
    limit: int | None = None
    """Chain index from which nothing is loaded any more, because a load from there failed. An engine asks again after
    a failed load; without this limit the load would fail forever."""
    following: Following | None = None
    """Where the prompt is being computed. Used once: a preempted request's missing blocks are pulled."""
    asked: Question | None = None
    """What the ranks are asked for, where each leases by itself."""
    local: int = 0
    """Chain index up to which the engine itself had blocks at the last lookup."""
    saved: int = 0
    """Chain index up to which blocks were offered to the pool, loaded from it, or dropped."""
    reports: bool = False
    """Whether the request's answer says what was saved."""
    turn: SessionTurn | None = None
    """What the request says of its session."""
    trace: str = ""
    """The W3C `traceparent` that the engine got with the request, or empty."""
    adapter: bytes | None = b""
    """Digest of the request's LoRA adapter, or empty without one. None: not known, so its blocks are not shared."""
    served: bool = False
    """Whether the pool has given the request blocks, or taken some."""
    _derived: list[bytes] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name by which the pool knows the request."""
        return label_of(self.request.request_id)

    @property
    def preemptions(self) -> int:
        return int(self.request.num_preemptions)

    def hashes(self, end: int) -> list[bytes]:
        """Return the chain's hashes, at least to that index: the engine's, or derived from these and the adapter."""
        theirs: list[bytes] = self.request.block_hashes
        if not self.adapter:
            return theirs
        del self._derived[len(theirs) :]
        for each in theirs[len(self._derived) : end]:
            self._derived.append(blake2b(each, key=self.adapter, digest_size=KEY_BYTES).digest())
        return self._derived

    def use_adapter(self, content: bytes | None) -> None:
        self.adapter = content
        self._derived.clear()
