"""Scheduler half: what to load, save and pin, and for how long to hold the pool's blocks.

Runs on the engine's scheduling thread only, where every wait stalls all requests: it looks up once a
request, with a short deadline, and once more after other nodes were asked for the rest (`pulls.py`). A
lookup takes the lease at once, so that the blocks promised to the scheduler are still there when the
workers copy them; a lookup that waits for allocation longer than half its lease is repeated. However
a request ends, its lease is released: when all ranks ended the load, when the request ends before
one, or when the engine computes it after all.

The namespace names the engine's weights. At a reset they may be about to change, and the pool is left alone
until the ranks have looked at them in the first step after it: with the weights of its start the engine is in the
namespace of its start, with others in one that is named by them. Whoever ends the namespace's epoch for all
(`Client.reset`) fences the engine out until its own reset.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from kvpool.engine_plugins.vllm.adapters import Adapters
from kvpool.engine_plugins.vllm.ahead import PARTS_AT_ONCE, SLICE_BLOCKS, Ahead
from kvpool.engine_plugins.vllm.config import LoadMode, PluginConfig
from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.following import (
    Following,
    SaveReport,
    following,
    wants_report,
)
from kvpool.engine_plugins.vllm.load_cost import LoadCost
from kvpool.engine_plugins.vllm.metrics import Counters
from kvpool.engine_plugins.vllm.pins import Pins
from kvpool.engine_plugins.vllm.plan import (
    QUIET_S,
    GroupRule,
    GroupSave,
    Handover,
    LoadJob,
    Offered,
    Opening,
    SaveJob,
    SaveTimes,
    StepDone,
    StepPlan,
    block_key,
    label_of,
    pack,
    plan_load,
    plan_save,
    plan_states,
    state_name,
)
from kvpool.engine_plugins.vllm.presence import Presence
from kvpool.engine_plugins.vllm.pulls import Pull, Pulls
from kvpool.engine_plugins.vllm.rank_lookups import Question, RankLease, RankLookups
from kvpool.engine_plugins.vllm.session_turns import SessionTurn, session_turn
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.prefill_cost import PrefillFit, StepWork
from kvpool.retry import Backoff
from kvpool.types import (
    KEY_BYTES,
    EngineRecord,
    Namespace,
    NamespaceRecord,
    PartKind,
    Recompute,
)

if TYPE_CHECKING:
    from kvpool.client import Client, Lease

log = logging.getLogger("kvpool.vllm")

STEPS_MAX = 64
"""How many steps may be under way whose forward pass is measured."""
OFFERED_PER_BLOCK = 8
"""How many offered keys are remembered, in multiples of what the engine's own cache holds."""
AHEAD_TIMES = 2
"""How many times the workers' deadline a lookup of very many blocks may take, with those before it in its thread."""
CHANGED_TTL_S = 3600.0
"""Blocks of weights that were changed in place are dropped when they were not used for so long: more sets follow."""
TURN_BLOCKS_MAX = 1 << 16
"""Of a turn of a session, from its beginning: as many keys as a request to the daemon may have."""
TRACEPARENT = "traceparent"


@dataclass
class Lookup:
    """The pool's answer for one request: chain indices [start, end) are there, under `lease`.

    preemptions: of the request when it was asked; a preempted request is looked up anew, since
        its own blocks may be in the pool by now.
    known: chain index up to which the pool has all but states; None: it was not asked yet.
    keys: packed, of all blocks that were asked for, if they were very many.
    declined: it is computed, which was counted.
    """

    start: int
    end: int
    lease: Lease | RankLease | None
    preemptions: int
    keys: bytes = b""
    sync: bool = False
    known: int | None = None
    declined: bool = False


@dataclass
class Asking:
    """A lookup of very many blocks: [start, end) of the chain.

    keys: of those before `at`, packed. lease: the answer, once all keys are there; False: the daemon refused.
    begun: when the question was put.
    before, pull: what had been found when a pull, this one, was waited for.
    """

    start: int
    end: int
    keys: bytearray = field(default_factory=bytearray)
    at: int = -1
    before: Lookup | None = None
    pull: Pull | None = None
    lease: Future[Lease | Literal[False] | None] | None = None
    begun: float = 0.0

    def __post_init__(self) -> None:
        if self.at < 0:
            self.at = self.start


@dataclass
class RequestState:
    """The scheduler half's state of one live request.

    asking: the lookup is under way, since it is one of very many blocks.
    pull: other nodes are asked for blocks missing in the lookup. pulled: preemptions when they were; a
        request waits for them once, and once more each time it starts again.
    limit: chain index from which nothing is loaded any more, because a load from there failed.
        An engine asks again after a failed load; without this it would fail forever.
    following: the prompt is being computed elsewhere. Once: a preempted request's missing blocks are pulled.
    asked: what its ranks are asked for, where each leases by itself.
    local: chain index up to which the engine itself had blocks at the last lookup.
    saved: chain index up to which blocks were offered to the pool, loaded from it, or dropped.
    reports: whether its answer says what was saved.
    turn: what it says of its session.
    label: by which the pool knows it. served: the pool has given it blocks, or taken some.
    trace: the W3C `traceparent` that the engine got with it, or empty.
    adapter: what its LoRA adapter contains; empty: it has none; None: not known, so its blocks are not shared.
    """

    request: Any
    lookup: Lookup | None = None
    asking: Asking | None = None
    pull: Pull | None = None
    pulled: int = -1
    limit: int | None = None
    following: Following | None = None
    asked: Question | None = None
    local: int = 0
    saved: int = 0
    reports: bool = False
    turn: SessionTurn | None = None
    trace: str = ""
    adapter: bytes | None = b""
    served: bool = False
    _derived: list[bytes] = field(default_factory=list)

    @property
    def label(self) -> str:
        return label_of(self.request.request_id)

    def hashes(self, end: int) -> list[bytes]:
        """Of the chain, at least to that index: the engine's, or with an adapter, of these and what it contains."""
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


@dataclass
class RunningLoad:
    """start: chain index of its first block. blocks: how many. begun: when it was ordered.

    suspects: of a synchronous load: the engine's blocks that hold what they should if the load succeeds, and
    anything if it fails: those that are loaded, and those that the request computes in the same step.
    """

    state: RequestState
    lease: Lease | RankLease
    start: int
    sync: bool
    ranks_left: int
    suspects: set[int]
    blocks: int
    begun: float
    failed: bool = False


@dataclass
class RunningSave:
    """A save that not all ranks have finished.

    generation: of the namespace that it is for.
    """

    generation: int
    keys: list[bytes]
    ranks_left: int


@dataclass
class RunningStep:
    """A step whose forward pass is measured, and what pipeline stages have said of it so far."""

    work: StepWork
    stages_left: int
    seconds: float = 0.0


@dataclass
class Engine:
    """What the scheduler half must know of its engine.

    hash_tokens: tokens of a block of the chain. blocks: how many blocks the engine's cache has.
    sync_loads: whether failed synchronous loads can be reported, and lead to nothing else that is wrong.
    answer_states: whether states that it hands over are right behind the prompt too: not where it drafts tokens, since
        a state does not go back behind those that are rejected.
    draft_blocks: at the end of a hit, computed all the same (`namespace.draft_blocks`).
    events: of its own cache.
    stages: of its pipeline. record: what routers are told of it; None: nothing.
    watches: whether its ranks hear of blocks that are used again before they write into these.
    """

    rules: Sequence[GroupRule]
    hash_tokens: int
    blocks: int
    ranks: int
    sync_loads: bool
    loads: bool = True
    saves: bool = True
    answer_states: bool = True
    draft_blocks: int = 0
    stages: int = 1
    events: Publisher | None = None
    record: EngineRecord | None = None
    watches: bool = True


class SchedulerHalf:
    """Lookups, leases, pins of one engine.

    client: its time-out is the longest that a lookup may take.
    pulls: None where blocks of other nodes are not asked for.
    ahead: asks for very many blocks; None: they are asked for as others are.
    new_weights: names weights that cannot be seen, as nobody else does.
    """

    def __init__(
        self,
        client: Client,
        config: PluginConfig,
        engine: Engine,
        *,
        pulls: Pulls | None,
        new_weights: Callable[[], str],
        ahead: Ahead | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._config = config
        self._engine = engine
        self._pulls = pulls
        self._new_weights = new_weights
        self._ahead = ahead
        self._clock = clock
        self._make_record: Callable[[str], NamespaceRecord] | None = None
        self._first_weights = ""
        self._namespace: Namespace | None = None
        self._life = 0
        self._states = [at for at, rule in enumerate(engine.rules) if rule.state]
        self._whole_parts: list[int] = []
        self._rank_bytes = self._block_bytes = 0
        self._part_groups: list[int] = []
        self._generation = 0
        self._weights = -1
        self._reset = 0  # its number
        self._unsure = False  # which weights there are since then
        self._shut = False
        self._pinned = True
        self._quiet = Backoff(*QUIET_S)
        self._adapters = Adapters()
        self._pool: Any = None
        self._requests: dict[str, RequestState] = {}
        self._next_job = 0
        self._plan = StepPlan()
        self._loads: dict[int, RunningLoad] = {}
        self._saves: dict[int, RunningSave] = {}
        self._steps: OrderedDict[int, RunningStep] = OrderedDict()
        self._last_step = 0
        self._prefill = PrefillFit()
        self._load_costs = {True: LoadCost(), False: LoadCost()}  # of synchronous loads, and others
        self._ended: list[Lease | RankLease] = []
        self._save_times = SaveTimes()
        self._by_rank: RankLookups | None = None
        self._presence: Presence | None = None
        self._offered = Offered(engine.blocks * OFFERED_PER_BLOCK, config.resave_s)
        self.pins = Pins(max(1, int(engine.blocks * config.pin_share)), watches=engine.watches)
        self.counters = Counters()

    # --- start-up -----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the namespace is known; until then everything is a miss and nothing is saved."""
        return self._namespace is not None

    @property
    def _usable(self) -> bool:
        """Whether blocks may be looked up and saved: the namespace is known, with its weights and epoch ours, and
        the ranks may copy.
        """
        return self.ready and self._pinned and not self._shut and not self._unsure

    def set_namespace(
        self,
        make_record: Callable[[str], NamespaceRecord],
        weights: str,
        *,
        groups: Sequence[int],
        rank_bytes: int,
        several_nodes: bool = False,
    ) -> None:
        """Learn the namespace. Raises what `Client.open` raises.

        make_record: the namespace with weights of that name; with an empty one, with those that the engine began with.
        weights: the digest of these (`plan.common_weights`). groups: vLLM's, of each part. rank_bytes: the most that a
        rank has of a block. several_nodes: not all ranks reach this one's daemon.
        """
        if several_nodes:
            self._by_rank = RankLookups(
                self._engine.ranks,
                windows=any(rule.kind is not PartKind.FULL for rule in self._engine.rules),
                lease_s=self._config.lease_s,
                wait_s=self._config.pull_wait_s,
                answer_s=self._config.request_timeout_s,
                next_job=self._job,
                clock=self._clock,
            )
        self._make_record, self._first_weights = make_record, weights
        self._part_groups, self._rank_bytes = list(groups), rank_bytes
        self._enter(self._client.open(make_record("")))

    def use_weights(self, weights: str | None) -> None:
        """Learn the weights since the last reset, if they were asked for: a digest, or empty: they cannot be seen."""
        if not self._unsure or weights is None or self._make_record is None:
            return
        name = "" if weights == self._first_weights else weights
        if not weights:
            name = self._new_weights()
            log.warning(
                "this engine's weights cannot be compared with those before its reset: it shares no more blocks with other "
                "engines until it is restarted"
            )
        self._unsure = False
        self.counters.add(new_weights=bool(name))
        try:
            ttl_s = CHANGED_TTL_S if name else 0.0
            self._enter(self._client.open(self._make_record(name), ttl_s=ttl_s))
        except KvpoolError as error:
            # Refused, for example since the tenant has too many namespaces open.
            self._shut = True
            self.counters.add(failed_resets=1)
            log.warning("this engine does not use the pool until it is reset again: %s", error)

    @property
    def last_reset(self) -> int:
        """Number of the last reset, failed ones counted too; 0: there was none."""
        return self._reset

    def _enter(self, namespace: Namespace) -> None:
        """Use a namespace in the epoch that it was just opened in, on all ranks."""
        left, self._namespace = self._namespace, namespace
        if left is not None and left.digest != namespace.digest:
            self._client.close_namespace(left)
            if self._ahead is not None:
                self._ahead.close_namespace(left)
        self._open_on_ranks(namespace)
        if self._pulls is not None:
            self._pulls.enter(namespace.record)
        self._whole_parts = [
            at for at, part in enumerate(namespace.parts) if part.kind is PartKind.FULL
        ]
        # A prefix needs few blocks of windows and states, however long it is.
        longer = [namespace.parts[at] for at in self._whole_parts] or namespace.parts
        self._block_bytes = sum(part.nbytes // part.stride for part in longer)
        if self._engine.events is not None:
            self._tell_events(namespace, self._engine.events)
        if self._engine.record is not None and self._presence is None:
            self._presence = Presence(self._announce)
            self._presence.begin()

    def _announce(self) -> None:
        """Announce this engine to routers, in its current namespace. In the thread of `Presence`."""
        namespace, record = self._namespace, self._engine.record
        assert namespace is not None and record is not None  # noqa: PT018  (the thread begins with both)
        self._client.announce_engine(namespace, replace(record, block_bytes=self._block_bytes))

    def _withdraw(self) -> None:
        assert self._namespace is not None
        try:
            self._client.announce_engine(self._namespace, None)
        except KvpoolError as error:
            log.warning("this engine stays announced to routers until its process ends: %s", error)

    def _tell_events(self, namespace: Namespace, events: Publisher) -> None:
        """Have the daemon follow this engine's KV events. The client repeats that itself."""
        groups = self._part_groups
        try:
            self._client.follow_events(
                namespace, events.endpoint, replay=events.replay, topic=events.topic, groups=groups
            )
        except KvpoolError as error:
            log.warning("the daemon does not subscribe to this engine's KV events: %s", error)

    def _open_on_ranks(self, namespace: Namespace) -> None:
        """Have the ranks open it, with the weights that this half has it with."""
        self._generation += 1
        self._weights = self._client.generation(namespace)
        self._plan.opening = Opening(self._generation, namespace.record, self._weights)
        if self._ahead is not None:
            self._ahead.enter(namespace.record, self._weights)

    def use_device(self, life: int) -> None:
        """From now on all ranks read the daemon's device memory of this life by themselves; 0: not all, or none."""
        self._life = life

    def use_memory(self, *, pinned: bool) -> None:
        """Whether all ranks may copy from and to the pool's memory from now on."""
        self._pinned = pinned

    def bind_pool(self, block_pool: Any) -> None:
        """The engine's own block pool, in which saves pin their blocks."""
        self._pool = block_pool
        self.pins.use(block_pool)

    # --- lookups ------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        state = self._state(request)
        state.trace = (request.trace_headers or {}).get(TRACEPARENT, "")
        state.reports = wants_report(request.kv_transfer_params)
        try:
            state.turn = session_turn(request.kv_transfer_params)
        except InvalidRequest:
            self.counters.add(bad_requests=1)
        try:
            state.following = following(request.kv_transfer_params)
        except InvalidRequest as error:
            self.counters.add(bad_requests=1)
            log.warning(
                "the blocks of request %s are not streamed to this node: %s",
                request.request_id,
                error,
            )

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the pool can add to the engine's own hit, and whether beside other steps.

        None: blocks may come from other nodes; the engine asks again at its next step. It also does
        so while it cannot allocate; only the first time costs.
        """
        if self._unsure and self._make_record is not None and not self._shut:
            # The engine is about to compute, so the weights are in place again. It asks again, with the answer.
            self._plan.reset = self._reset
            return (None, False) if self._engine.loads else (0, False)
        if not self._engine.loads or not self._usable or request.skip_reading_prefix_cache:
            return 0, False
        state = self._state(request)
        if not self._shares(state):
            return 0, False
        tokens = self._engine.hash_tokens
        if self._is_loading(request, local_tokens // tokens):
            return None, False
        state.local = local_tokens // tokens
        lookup = self._current_lookup(state)
        if lookup is None:
            return None, False
        if self._states:
            self._keep_state(state, lookup)
        blocks = lookup.end - state.local - self._engine.draft_blocks
        lookup.sync = self._synchronous(blocks)
        if lookup.sync:
            # A synchronous load must leave a token to compute in the step that it is for.
            blocks = min(blocks, (request.num_tokens - 1) // tokens - state.local)
        if lookup.lease is None or blocks < self._config.min_load_blocks:
            return 0, False
        if self._computes_sooner(state.local, blocks, sync=lookup.sync):
            if not lookup.declined:
                lookup.declined = True
                self.counters.add(declined_blocks=blocks)
            return 0, False
        return blocks * tokens, not lookup.sync

    def _keep_state(self, state: RequestState, lookup: Lookup) -> None:
        """Have the engine keep the state where the prompt parts from another one that the pool knows.

        Whoever shares its beginning finds it there. The engine does so by itself where its own cache knows the other
        prompt; what it is told here is as if that were so. It says anew what it found at each try to allocate.
        """
        end = self._end(state)
        if lookup.known is None:
            lookup.known = lookup.end
            if lookup.end < end and self._engine.saves and self._quiet.due(self._clock()):
                keys = pack(state.hashes(end)[lookup.start : end])
                lookup.known = lookup.start + self._match(keys, self._whole_parts)
        request = state.request
        if lookup.known > lookup.end:
            request.shared_prefix_boundary = max(
                request.shared_prefix_boundary, lookup.known * self._engine.hash_tokens
            )

    def _match(self, keys: bytes, parts: Sequence[int]) -> int:
        """How many blocks the pool has of these parts: a hint. None if there are no such parts."""
        assert self._namespace is not None
        try:
            return self._client.match(self._namespace, keys, parts=parts) if parts else 0
        except KvpoolError:
            self.counters.add(failed_lookups=1)
            return 0

    def _computes_sooner(self, start: int, blocks: int, *, sync: bool) -> bool:
        """Whether a request would wait longer for so few blocks than the engine takes to compute them."""
        load_s = self._load_costs[sync].seconds(blocks, self._clock())
        price = None if load_s is None else self._recompute(start, start + blocks)
        return load_s is not None and price is not None and price.seconds(0, blocks) < load_s

    def _is_loading(self, request: Any, local: int) -> bool:
        """Whether blocks of the engine's own hit are to be loaded by another request at the start of this step.

        The engine counts them as cached already, and would let this one compute on top of them. If the load
        failed, it would not know of all who did.
        """
        for job in self._plan.loads:
            load = self._loads[job.job]
            if not job.sync or local <= load.start:
                continue
            at = load.start
            if load.state.hashes(at + 1)[at] == self._state(request).hashes(at + 1)[at]:
                return True
        return False

    def _synchronous(self, blocks: int) -> bool:
        if not self._engine.sync_loads or self._config.load_mode is LoadMode.ASYNC:
            return False
        if self._config.load_mode is LoadMode.SYNC:
            return True
        return blocks * self._rank_bytes <= self._config.sync_load_bytes

    def _current_lookup(self, state: RequestState) -> Lookup | None:
        """The cached answer where it still holds for the engine's present hit, else a new one.

        None while the pool is asked for very many blocks, or other nodes for more.
        """
        if self._by_rank is not None:
            return self._look_up_by_rank(self._by_rank, state)
        if state.asking is not None and not self._answered(state, state.asking):
            return None
        lookup = state.lookup
        if lookup is None or not self._holds(state, lookup):
            self._drop_lookup(state)
            self._look_up(state)
            if state.lookup is None:
                return None
            lookup = state.lookup
        if state.pull is None:
            return lookup
        return self._after_pull(state, state.pull, lookup)

    def _holds(self, state: RequestState, lookup: Lookup) -> bool:
        if lookup.start > state.local or lookup.preemptions != self._preemptions(state):
            return False
        if lookup.lease is None:
            return True
        if lookup.lease.life not in (0, self._life):
            return False  # the ranks could not read all of it any more
        return lookup.lease.deadline - self._clock() >= self._config.lease_s / 2

    def _look_up(self, state: RequestState) -> None:
        """Lease what the node has beyond the engine's own hit, or begin to."""
        start, end = state.local, self._end(state)
        lease = None
        if end - start >= self._config.min_load_blocks and self._quiet.due(self._clock()):
            self.counters.add(lookups=1)
            assert self._namespace is not None
            parts = len(self._namespace.parts)
            if self._ahead is not None and (end - start) * parts > PARTS_AT_ONCE:
                state.asking = Asking(start, end)
                self._answered(state, state.asking)
                return
            lease = self._acquire(pack(state.hashes(end)[start:end]), state)
        self._found(state, start, lease)

    def _found(
        self, state: RequestState, start: int, lease: Lease | None, keys: bytes = b""
    ) -> None:
        """A first answer, which other nodes may have more than."""
        blocks = 0 if lease is None else lease.blocks
        self.counters.add(hit_blocks=blocks)
        state.lookup = Lookup(start, start + blocks, lease, self._preemptions(state), keys)
        self._ask_others(state, state.lookup)

    def _answered(self, state: RequestState, asking: Asking) -> bool:
        """Go on with a lookup of very many blocks: a slice of their keys, or a look whether the answer has come."""
        assert self._ahead is not None and self._namespace is not None  # noqa: PT018  (both are needed to ask)
        if asking.lease is None:
            end = min(asking.at + SLICE_BLOCKS, asking.end)
            asking.keys += pack(state.hashes(end)[asking.at : end])
            asking.at = end
            if end < asking.end:
                return False
            keys = bytes(asking.keys)
            life, trace = self._life, state.trace
            asking.lease = self._ahead.submit(self._namespace, keys, life, trace, state.label)
            asking.begun = self._clock()
            return False
        waited_s = self._clock() - asking.begun
        late = waited_s >= AHEAD_TIMES * self._config.request_timeout_s
        if not asking.lease.done() and not late:
            return False
        state.asking = None
        lease = None
        if asking.lease.done():
            lease = asking.lease.result()
        else:
            asking.lease.add_done_callback(self._release_late)
            asking.lease.cancel()
        self._quiet.note(self._clock(), failed=late and not lease)
        self.counters.add(failed_lookups=lease is False)
        lease = lease or None
        if asking.before is None or asking.pull is None:
            self._found(state, asking.start, lease, bytes(asking.keys))
        else:
            self._gain(state, asking.before, lease, asking.pull)
        return True

    def _look_up_by_rank(self, ranks: RankLookups, state: RequestState) -> Lookup | None:
        """The same where each rank leases at its own daemon; None while they are asked."""
        lookup = state.lookup
        if lookup is not None and self._holds(state, lookup):
            return lookup
        self._drop_lookup(state)
        start, end = state.local, self._end(state)
        lease = None
        if state.asked is None and end - start >= self._config.min_load_blocks:
            self.counters.add(lookups=1)
            following, state.following = state.following, None
            state.asked = ranks.ask(
                start,
                pack(state.hashes(end)[start:end]),
                self._recompute(start, end),
                following,
                state.trace,
            )
        if state.asked is not None:
            if not ranks.ended(state.asked):
                return None
            start = state.asked.start
            lease, state.asked = ranks.lease(state.asked), None
            if lease is not None and start > state.local:
                # The engine has evicted blocks of its own hit meanwhile: what was asked does not cover the range.
                ranks.release(lease)
                lease = None
        blocks = 0 if lease is None else lease.blocks
        self.counters.add(hit_blocks=blocks)
        state.lookup = Lookup(start, start + blocks, lease, self._preemptions(state))
        return state.lookup

    def _release(self, lease: Lease | RankLease) -> None:
        if isinstance(lease, RankLease):
            assert self._by_rank is not None
            self._by_rank.release(lease)
        else:
            self._client.release(lease)

    def _end(self, state: RequestState) -> int:
        """Chain index behind the last block that may be loaded."""
        request = state.request
        # The last token is computed in any case: on top of a state behind it, it would count twice.
        tokens = int(request.num_tokens) - bool(self._states)
        end = min(tokens // self._engine.hash_tokens, len(request.block_hashes))
        return end if state.limit is None else min(end, state.limit)

    def _acquire(self, keys: bytes, state: RequestState) -> Lease | None:
        """A lease for the ranks, who join it if it is used."""
        assert self._namespace is not None
        begun = self._clock()
        lease = None
        try:
            lease = self._client.acquire(
                self._namespace,
                keys,
                lease_s=self._config.lease_s,
                life=self._life,
                trace=state.trace,
                request=state.label,
                for_others=True,
            )
        except KvpoolError:
            # Refused, for example by a quota: the request computes, and the count shows it.
            self.counters.add(failed_lookups=1)
        # A lookup that used up its deadline met a hanging daemon: it is not asked for a while,
        # so that requests do not each pay for it.
        now = self._clock()
        late = now - begun >= 0.9 * self._config.lookup_timeout_s
        self._quiet.note(now, failed=lease is None and late)
        return lease

    # --- blocks of other nodes ------------------------------------------------------------------

    def _ask_others(self, state: RequestState, lookup: Lookup) -> None:
        """Have what the lookup lacks brought here, unless it is too little to wait for."""
        if self._pulls is None or state.pulled == lookup.preemptions:
            return
        # The block of a prompt's last token is computed in part anyway.
        worth = min(self._end(state), (state.request.num_tokens - 1) // self._engine.hash_tokens)
        if worth - lookup.end < self._config.min_load_blocks or not self._quiet.due(self._clock()):
            return
        end = self._end(state)
        keys = lookup.keys or pack(state.hashes(end)[lookup.start : end])
        price = self._recompute(lookup.start, end)
        followed = state.following if state.pulled < 0 else None
        state.pull = self._pulls.begin(lookup.start, keys, price, self._life, followed, state.trace)
        if state.pull is not None:
            state.pulled = lookup.preemptions
            self.counters.add(pulls=1, follows=followed is not None)

    def _recompute(self, start: int, end: int) -> Recompute | None:
        """The price of computing blocks of a chain, as configured or as measured; None: not known yet."""
        tokens, given = self._engine.hash_tokens, self._config.prefill_tokens_per_s
        if given:
            return Recompute(tokens / given)
        return self._prefill.recompute(start * tokens, tokens, end - start)

    def _after_pull(self, state: RequestState, pull: Pull, lookup: Lookup) -> Lookup | None:
        """The lookup with what a pull brought, or None while the request is to wait for it."""
        assert self._pulls is not None
        if not self._pulls.ended(pull):
            return None
        state.pull = None
        blocks = self._pulls.blocks(pull)
        lease = None
        # One that is late may have brought a part.
        if blocks is None or pull.start + blocks > lookup.end:
            end = self._end(state)
            if lookup.keys:
                asking = Asking(lookup.start, end, bytearray(lookup.keys), end, lookup, pull)
                state.asking = asking
                return None
            lease = self._acquire(pack(state.hashes(end)[lookup.start : end]), state)
        return self._gain(state, lookup, lease, pull)

    def _gain(self, state: RequestState, before: Lookup, lease: Lease | None, pull: Pull) -> Lookup:
        """A lookup of more than before, or that one if there is not."""
        assert self._pulls is not None
        lookup = before
        if lease is not None and before.start + lease.blocks <= before.end:
            self._client.release(lease)
        elif lease is not None:
            self._drop_lookup(state)
            end = before.start + lease.blocks
            lookup = Lookup(before.start, end, lease, self._preemptions(state), before.keys)
            state.lookup = lookup
        gained = lookup.end - before.end
        self.counters.add(
            late_pulls=self._pulls.blocks(pull) is None,
            pulled_blocks=gained,
            hit_blocks=gained,
            pull_wait_seconds=self._pulls.note(pull, gained),
        )
        return lookup

    def _drop_pull(self, state: RequestState) -> None:
        if state.asked is not None and self._by_rank is not None:
            self._by_rank.drop(state.asked)
            state.asked = None
        if state.pull is not None:
            state.pull.dropped = True
            state.pull = None

    def _preemptions(self, state: RequestState) -> int:
        return int(state.request.num_preemptions)

    def _drop_lookup(self, state: RequestState) -> None:
        asking, state.asking = state.asking, None
        if asking is not None and asking.lease is not None:
            asking.lease.add_done_callback(self._release_late)
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.lease is not None:
            self._release(lookup.lease)

    def _release_late(self, answer: Future[Lease | Literal[False] | None]) -> None:
        """The answer to a question that nobody asks any more; in a thread of `Ahead`."""
        if not answer.cancelled() and (lease := answer.result()):
            self._client.release(lease)

    # --- loads --------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine gave the request its blocks, and loads `tokens` into them (0: none)."""
        state = self._state(request)
        lookup = state.lookup
        if tokens == 0 or lookup is None or lookup.lease is None:
            assert tokens == 0, "an engine loads what a lookup promised"
            self._drop_lookup(state)
            return
        start = state.local
        end = start + tokens // self._engine.hash_tokens
        job = LoadJob(
            job=self._job(),
            request_id=request.request_id,
            token=lookup.lease.token,
            sync=lookup.sync,
            groups=plan_load(self._engine.rules, tables, lookup.start, start, end),
            lookup=lookup.lease.job if isinstance(lookup.lease, RankLease) else 0,
        )
        state.lookup = None
        state.served = True
        state.saved = max(state.saved, end)
        keys = [*map(block_key, state.hashes(end)[start:end])]
        self._offered.add([*keys, *self._state_names(keys[-1:])], self._clock())
        suspects: set[int] = set()
        if lookup.sync:
            (rule,) = self._engine.rules
            suspects.update(tables[rule.group][start // rule.stride :])
        self._loads[job.job] = RunningLoad(
            state,
            lookup.lease,
            start,
            lookup.sync,
            self._engine.ranks,
            suspects,
            end - start,
            self._clock(),
        )
        self._plan.loads.append(job)

    # --- a step -------------------------------------------------------------------------------

    def plan_step(
        self,
        scheduled: dict[str, int],
        table_of: Callable[[str], Sequence[Sequence[int]]],
        handed: Mapping[str, Sequence[Handover]] | None = None,
    ) -> StepPlan:
        """What the ranks are to do in this step.

        scheduled: tokens that it computes, by request. handed: the states that the engine keeps, which this step or
        one before it completes; the engine changes them no more, and reuses their blocks if they are not pinned.
        """
        reused = self.pins.take_reused()
        self._give_up(reused)
        self._plan.reused = sorted(reused & self._saves.keys())
        # Whether the blocks of a synchronous load were there is known after the step. A rank saves nothing then if its
        # own were not, but does not know of the others', whose part it has computed with.
        doubtful = self._engine.ranks > 1 and any(job.sync for job in self._plan.loads)
        opened = self._namespace
        if opened is not None and self._weights < 0 and self._client.generation(opened) >= 0:
            self._open_on_ranks(opened)  # the daemon has answered since
        saving = self._engine.saves and self._usable and not doubtful
        for request_id, states in (handed or {}).items() if saving else ():
            # Ahead of other blocks, which are of no use without them and can wait for pins.
            state = self._requests.get(request_id)
            if state is not None and self._shares(state):
                self._save_states(state, states)
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None or not self._usable or not self._shares(state):
                continue
            whole = self._whole(state, state.request.num_computed_tokens + tokens)
            if saving and whole > state.saved:
                self._save(state, table_of(request_id), whole)
        self._release_ended()
        if not scheduled and self._pulls is not None:
            waiting = [state.pull for state in self._requests.values() if state.pull is not None]
            self._pulls.wait(waiting)
        plan, self._plan = self._plan, StepPlan()
        if self._by_rank is not None:
            plan.lookups, plan.released = self._by_rank.take()
        plan.want_report = not self.ready
        plan.measured = self._measure(scheduled)
        return plan

    def _give_up(self, saves: Collection[int]) -> None:
        """Drop those of these saves that no rank has begun."""
        for job in [job for job in self._plan.saves if job.job in saves]:
            self._plan.saves.remove(job)
            self.counters.add(dropped_saves=len(self._saves[job.job].keys))
            self._lost(self._saves.pop(job.job))
            self.pins.give_back(job.job)

    def _lost(self, save: RunningSave) -> None:
        """A save has failed: its blocks are offered again, unless they are those of weights of before."""
        if save.generation == self._generation:
            self._offered.forget(save.keys)
            self._tell_dropped(save.keys)

    def _measure(self, scheduled: dict[str, int]) -> int:
        """Number of a step from which the engine's prefill speed is learnt; 0 for others.

        These are steps that compute more of prompts than of answers: the time of the others is spent on
        reading weights and KV, whatever the number of tokens.
        """
        if self._config.prefill_tokens_per_s or not self._engine.loads:
            return 0
        prompts = deepest = 0
        attended = 0.0
        for request_id, tokens in scheduled.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            before = state.request.num_computed_tokens
            if before < state.request.num_prompt_tokens:
                prompts += tokens
                attended += tokens * (before + tokens / 2)
                deepest = max(deepest, before + tokens)
        total = sum(scheduled.values())
        if 2 * prompts <= total:
            return 0
        self._last_step += 1
        work = StepWork(total, attended, deepest)
        self._steps[self._last_step] = RunningStep(work, self._engine.stages)
        if len(self._steps) > STEPS_MAX:
            self._steps.popitem(last=False)
        return self._last_step

    def _whole(self, state: RequestState, computed_tokens: int) -> int:
        """Blocks of the chain whose tokens are known and computed at the end of the step.

        Hashes exist for known tokens only, so drafts that may be rejected are never counted.
        """
        if not self._config.save_generated:
            computed_tokens = min(computed_tokens, state.request.num_prompt_tokens)
        return min(computed_tokens // self._engine.hash_tokens, len(state.request.block_hashes))

    def _save(self, state: RequestState, tables: Sequence[Sequence[int]], whole: int) -> None:
        """Queue the request's blocks up to `whole`, as far as the pins allow.

        What does not fit is tried again in the request's next step, while it holds its blocks
        anyhow; only what is left at its end is dropped.
        """
        now = self._clock()
        hashes = state.hashes(whole)
        wanted: list[int] = []
        room = self.pins.room() // max(1, len(self._engine.rules) - len(self._states))
        index = state.saved
        while index < whole and len(wanted) < room:
            if not self._offered.holds(block_key(hashes[index]), now):
                wanted.append(index)
            index += 1
        state.saved = index
        saves = plan_save(self._engine.rules, tables, hashes, wanted)
        if saves:
            self._pin(state, saves, [block_key(hashes[index]) for index in wanted], now)

    def _save_states(self, state: RequestState, handed: Sequence[Handover]) -> None:
        """Queue the states of a request that the engine hands over, if they fit: they are handed over once."""
        now, hashes = self._clock(), state.hashes(len(state.request.block_hashes))
        tokens = self._engine.hash_tokens
        end = len(hashes)
        if not self._engine.answer_states:
            end = state.request.num_prompt_tokens // tokens
        for found in plan_states(self._engine.rules, handed, hashes, tokens, end).values():
            fresh = {
                name: save
                for save in found
                if not self._offered.holds(name := state_name(save.keys, save.rule), now)
            }
            if len(fresh) > self.pins.room():
                self.counters.add(dropped_saves=1)
                self._tell_dropped(fresh)
            elif fresh:
                self._pin(state, [*fresh.values()], [*fresh], now)

    def _pin(
        self, state: RequestState, saves: list[GroupSave], keys: list[bytes], now: float
    ) -> None:
        """Queue saves, and pin their blocks until all ranks have copied them. keys: to be known as offered."""
        blocks = sorted({block for save in saves for block in save.block_ids})
        job = SaveJob(self._job(), state.request.request_id, self._generation, saves)
        state.served = True
        self.pins.take(job.job, blocks)
        self._offered.add(keys, now)
        self._saves[job.job] = RunningSave(self._generation, keys, self._engine.ranks)
        self._plan.saves.append(job)

    def step_done(self, done: StepDone) -> None:
        """Ranks ended loads and saves: release leases and pins, remember what failed."""
        for job in done.failed_loads & self._loads.keys():
            load = self._loads[job]
            limit = load.state.limit
            load.state.limit = load.start if limit is None else min(limit, load.start)
            load.state.saved = min(load.state.saved, load.start)
            load.failed = True
            self._forget(load)
            if load.sync:
                # The engine computes them again for the requests that are left, but has had them in its cache since
                # it allocated them: another request would find them there if these are aborted before.
                self._pool.evict_blocks(load.suspects)
                self._plan.acknowledged.append(job)
        for job in done.failed_saves & self._saves.keys():
            self._lost(self._saves[job])
        # While it is asked for the weights, the namespace that it had before its reset is behind it.
        if self._generation in done.outdated and not self._shut and not self._unsure:
            self._shut = True
            self.counters.add(shut_out=1)
            log.warning(
                "the epoch of this engine's namespace was ended from outside: it can neither load nor store blocks until "
                "it is reset (reset_prefix_cache with reset_connector) or restarted"
            )
        if self._by_rank is not None:
            self._by_rank.note(done.lookups)
        for job, ranks in done.loads.items():
            load = self._loads[job]
            load.ranks_left -= ranks
            if load.ranks_left == 0:
                del self._loads[job]
                self._ended.append(load.lease)
                self._learn_load(load, done.load_seconds.get(job, 0.0))
        for job, ranks in done.saves.items():
            save = self._saves[job]
            save.ranks_left -= ranks
            if save.ranks_left == 0:
                del self._saves[job]
                self.pins.give_back(job)
            if job in done.save_seconds:
                self._save_times.learn(len(save.keys), done.save_seconds[job])
        for number, (seconds, stages) in done.steps.items():
            self._learn_speed(number, seconds, stages)

    def _learn_load(self, load: RunningLoad, seconds: float) -> None:
        """A load ended. seconds: of its copies, if it was synchronous; for others the request has waited all the time."""
        if load.failed:
            return
        now = self._clock()
        cost = self._load_costs[load.sync]
        cost.observe(load.blocks, seconds if load.sync else now - load.begun, now)

    def _learn_speed(self, number: int, seconds: float, stages: int) -> None:
        """Some of a step's pipeline stages took so long: a prompt goes through one after the other."""
        step = self._steps.get(number)
        if step is None:
            return  # so many came after it that it was given up
        step.seconds += seconds
        step.stages_left -= stages
        if step.stages_left == 0:
            del self._steps[number]
            self._prefill.observe(step.work, step.seconds)
            self.counters.add(prefill_tokens=step.work.tokens, prefill_seconds=step.seconds)

    def _release_ended(self) -> None:
        """Give back leases of ended loads: a step later, when no first token waits for it."""
        while self._ended:
            self._release(self._ended.pop())

    def _forget(self, load: RunningLoad) -> None:
        """Offer the blocks of a failed load again once they are computed."""
        end = len(load.state.request.block_hashes)
        keys = [*map(block_key, load.state.hashes(end)[load.start : end])]
        self._offered.forget([*keys, *self._state_names(keys)])

    def _state_names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [state_name(key, at) for key in keys for at in self._states]

    # --- ends ---------------------------------------------------------------------------------

    def request_finished(
        self, request: Any, tables: Sequence[Sequence[int]], *, completed: bool
    ) -> SaveReport | None:
        """A request ends. What it still held back for want of pins is saved now, or dropped.

        completed: it ended by itself; the blocks of a failed or aborted one are not trusted. Returns what became of its
        prompt's blocks, if its answer is to say that.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        report = self._finish(state, tables, completed=completed)
        if state.served and self._namespace is not None and self._quiet.due(self._clock()):
            session = "" if state.turn is None else state.turn.id
            self._client.end_request(self._namespace, state.label, session=session)
        if not self._requests:
            self.pins.let_go()
        return report

    def _finish(
        self, state: RequestState, tables: Sequence[Sequence[int]], *, completed: bool
    ) -> SaveReport | None:
        request = state.request
        self._drop_lookup(state)
        self._drop_pull(state)
        shared = self._usable and self._shares(state)
        whole = self._whole(state, request.num_computed_tokens)
        if shared and completed and state.turn is not None:
            self._tell_turn(state, state.turn, whole)
        if not self._engine.saves or not shared:
            return SaveReport(0, 0, None) if state.reports else None
        if completed and whole > state.saved:
            self._save(state, tables, whole)
        if whole > state.saved:
            self.counters.add(dropped_saves=whole - state.saved)
        prompt = request.num_prompt_tokens // self._engine.hash_tokens
        if completed:  # otherwise who follows may wait for another engine, which goes on with it
            self._tell_dropped(state.hashes(prompt)[state.saved : prompt])
        return self._report(state.hashes(prompt)[:prompt]) if state.reports else None

    def _tell_turn(self, state: RequestState, turn: SessionTurn, whole: int) -> None:
        """The daemon hears which blocks a session has used, unless it hangs. One message a request."""
        assert self._namespace is not None, "its blocks are shared"
        whole = min(whole, TURN_BLOCKS_MAX)
        if not whole or not self._quiet.due(self._clock()):
            return
        self._client.session_turn(
            self._namespace,
            turn.id,
            pack(state.hashes(whole)[:whole]),
            agent=turn.strand(state.adapter or b""),
            ended=turn.end,
            shared=turn.shared,
        )

    def _tell_dropped(self, hashes: Iterable[bytes]) -> None:
        """Who follows a prompt does not wait for these any more. Without any, nothing happens."""
        assert self._namespace is not None, "nothing is saved before it is known"
        self._client.dropped(self._namespace, pack(hashes))

    def _report(self, hashes: Sequence[bytes]) -> SaveReport:
        """What became of a prompt's blocks. Those that were offered before, and since evicted, count as saved."""
        now, tokens = self._clock(), self._engine.hash_tokens
        keys = [block_key(one) for one in hashes]
        kept = next(
            (at for at, key in enumerate(keys) if not self._offered.holds(key, now)), len(keys)
        )
        running = {key for save in self._saves.values() for key in save.keys}
        saved = next((at for at, key in enumerate(keys[:kept]) if key in running), kept)
        saving_s = self._save_times.expect(len(save.keys) for save in self._saves.values())
        return SaveReport(saved * tokens, (kept - saved) * tokens, saving_s)

    def has_work(self) -> bool:
        """Whether steps are needed without requests, so that leases and pins are given back."""
        return bool(
            self._saves
            or self._loads
            or self._ended
            or self._plan.saves
            or self._plan.opening
            or (self._by_rank is not None and self._by_rank.has_work)
        )

    def reset(self) -> bool:
        """The engine's weights may be others from now on, and all that it held is gone.

        False while the engine holds KV of before, in running requests or loads: none of it may be saved beside new
        KV, so the pool is left alone until a reset finds none. Saves under way end in the namespace that they are for.
        """
        self._offered.clear()
        for state in self._requests.values():
            self._drop_lookup(state)
            self._drop_pull(state)
            state.pulled = -1
            state.limit = None
            state.saved = 0
        self._reset += 1  # of a failed one too, so that what ranks say since the one before is none of its answer
        if self._loads or self._pool.get_num_free_blocks() < len(self._pool.blocks) - 1:
            self._shut = True
            self.counters.add(failed_resets=1)
            log.warning(
                "the engine was reset while it held blocks: it does not use the pool until it is reset again with "
                "no requests running"
            )
            return False
        # Others end before the engine sleeps, which may empty the blocks of these.
        self._give_up(self._saves)
        self._unsure, self._shut = True, False
        self._adapters.reset()
        for state in self._requests.values():  # which may compute with what was loaded before
            state.use_adapter(self._adapters.content(state.request.lora_request))
        self.counters.add(resets=1)
        return True

    def close(self) -> None:
        """Release every lease. Loads that run fail or end by their deadline."""
        if self._presence is not None:
            self._presence.end()
            self._withdraw()
        if self._engine.events is not None and self._namespace is not None:
            self._tell_events(self._namespace, Publisher(""))
        self._release_ended()
        for state in self._requests.values():
            self._drop_lookup(state)
        if self._pulls is not None:
            self._pulls.close()
        if self._ahead is not None:
            self._ahead.close()

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            self.pins.hold()
            state = self._requests[request.request_id] = RequestState(request)
            state.use_adapter(self._adapters.content(request.lora_request))
        return state

    def _shares(self, state: RequestState) -> bool:
        """Whether it is known what its adapter contains, and what the engine's own cache has of it."""
        return state.adapter is not None and self._adapters.shares(state.request.lora_request)

    def _job(self) -> int:
        self._next_job += 1
        return self._next_job
