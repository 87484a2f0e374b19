"""Scheduler half: what to load, save and pin, and for how long to hold the pool's blocks.

Runs on the engine's scheduling thread only, where every wait stalls all requests. However a request ends, its lease is
released: when all ranks ended the load, when the request ends before one, or when the engine computes it after all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.engine_plugins.vllm.config import LoadMode, PluginConfig
from kvpool.engine_plugins.vllm.following import SaveReport, following, wants_report
from kvpool.engine_plugins.vllm.plan import Handover, StepDone, StepPlan, pack
from kvpool.engine_plugins.vllm.scheduler.adapters import Adapters
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.engine_plugins.vllm.scheduler.engine_namespace import EngineNamespace
from kvpool.engine_plugins.vllm.scheduler.loads import Loads
from kvpool.engine_plugins.vllm.scheduler.lookups import Lookups
from kvpool.engine_plugins.vllm.scheduler.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler.rank_lookups import RankLookups
from kvpool.engine_plugins.vllm.scheduler.request_state import Engine, RequestState, Shared
from kvpool.engine_plugins.vllm.scheduler.saves import Saves
from kvpool.engine_plugins.vllm.scheduler.session_turns import SessionTurn, session_turn
from kvpool.engine_plugins.vllm.scheduler.speeds import SpeedModel
from kvpool.errors import InvalidRequest
from kvpool.types import NamespaceRecord

if TYPE_CHECKING:
    from kvpool.client import Client

log = logging.getLogger("kvpool.vllm")

TURN_BLOCKS_MAX = 1 << 16
"""Of a turn of a session, from its beginning: as many keys as a request to the daemon may have."""
TRACEPARENT = "traceparent"


class SchedulerHalf:
    """Decides what one engine loads and saves.

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
        self._shared = shared = Shared(client, config, engine, clock)
        self._rank_bytes = 0
        self._adapters = Adapters()
        self._pool: Any = None
        self._requests: dict[str, RequestState] = {}
        self.entered = EngineNamespace(shared, new_weights, pulls, ahead)
        """The namespace in use. Until it is known, everything is a miss and nothing is saved."""
        self._speeds = SpeedModel(shared)
        self._lookups = Lookups(shared, self.entered, self._speeds, pulls, ahead)
        self._saves = Saves(shared, self.entered)
        self._loads = Loads(shared, self._lookups, self._saves, self._speeds)
        self.counters = shared.counters

    # --- start-up -----------------------------------------------------------------------------

    @property
    def pins(self) -> int:
        """How many of the engine's blocks saves pin."""
        return self._saves.pins.pinned

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
            self._lookups.by_rank = RankLookups(self._shared)
        self._rank_bytes = rank_bytes
        self.entered.begin(make_record, weights, groups)

    def use_device(self, life: int) -> None:
        """Learn that all ranks read the daemon's device memory of this life by themselves from now on; 0: not all, or none."""
        self._lookups.life = life

    def use_memory(self, *, pinned: bool) -> None:
        """Learn whether all ranks may copy from and to the pool's memory from now on."""
        self.entered.pinned = pinned

    def bind_pool(self, block_pool: Any) -> None:
        """Take the engine's own block pool, in which saves pin their blocks."""
        self._pool = block_pool
        self._saves.pins.use(block_pool)

    # --- requests -----------------------------------------------------------------------------

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
        """Return how many tokens the pool can add to the engine's own hit, and whether beside other steps.

        None: blocks may come from other nodes; the engine asks again at its next step. It also does
        so while it cannot allocate; only the first time costs.
        """
        if self.entered.ask_weights():
            return (None, False) if self._shared.engine.loads else (0, False)
        if (
            not self._shared.engine.loads
            or not self.entered.usable
            or request.skip_reading_prefix_cache
        ):
            return 0, False
        state = self._state(request)
        if not self._shares(state):
            return 0, False
        tokens = self._shared.engine.hash_tokens
        if self._loads.is_loading(state, local_tokens // tokens):
            return None, False
        state.local = local_tokens // tokens
        lookup = self._lookups.current(state)
        if lookup is None:
            return None, False
        self._lookups.keep_state(state, lookup)
        blocks = lookup.end - state.local - self._shared.engine.draft_blocks
        lookup.sync = self._synchronous(blocks)
        if lookup.sync:
            # A synchronous load must leave a token to compute in the step that it is for.
            blocks = min(blocks, (request.num_tokens - 1) // tokens - state.local)
        if lookup.lease is None or blocks < self._shared.config.min_load_blocks:
            return 0, False
        if self._speeds.computes_sooner(state.local, blocks, sync=lookup.sync):
            if not lookup.declined:
                lookup.declined = True
                self.counters.add(declined_blocks=blocks)
            return 0, False
        return blocks * tokens, not lookup.sync

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Learn that the engine gave the request its blocks, and loads `tokens` into them (0: none)."""
        state = self._state(request)
        if tokens:
            self._loads.begin(state, tables, tokens)
        else:
            self._lookups.drop(state)

    def request_finished(
        self, request: Any, tables: Sequence[Sequence[int]], *, completed: bool
    ) -> SaveReport | None:
        """End a request. What it still held back for want of pins is saved now, or dropped.

        completed: it ended by itself; the blocks of a failed or aborted one are not trusted. Returns what became of its
        prompt's blocks, if its answer is to say that.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        report = self._finish(state, tables, completed=completed)
        if state.served and self.entered.namespace is not None and self._lookups.answered:
            session = "" if state.turn is None else state.turn.id
            self._shared.client.sessions.end_request(
                self.entered.namespace, state.label, session=session
            )
        if not self._requests:
            self._saves.pins.let_go()
        return report

    # --- a step -------------------------------------------------------------------------------

    def plan_step(
        self,
        scheduled: dict[str, int],
        table_of: Callable[[str], Sequence[Sequence[int]]],
        handed: Mapping[str, Sequence[Handover]] | None = None,
    ) -> StepPlan:
        """Return what the ranks are to do in this step.

        scheduled: tokens that it computes, by request. handed: the states that the engine keeps, which this step or
        one before it completes; the engine changes them no more, and reuses their blocks if they are not pinned.
        """
        reused = self._saves.take_reused()
        # Whether the blocks of a synchronous load were there is known after the step. A rank saves nothing then if its
        # own were not, but does not know of the others', whose part it has computed with.
        doubtful = self._shared.engine.ranks > 1 and self._loads.synchronous
        opening, asked_reset = self.entered.take()
        saving = self._shared.engine.saves and self.entered.usable and not doubtful
        for request_id, states in (handed or {}).items() if saving else ():
            # Ahead of other blocks, which are of no use without them and can wait for pins.
            state = self._requests.get(request_id)
            if state is not None and self._shares(state):
                self._saves.save_states(state, states)
        for request_id, tokens in scheduled.items() if saving else ():
            state = self._requests.get(request_id)
            if state is None or not self._shares(state):
                continue
            whole = self._saves.whole(state, state.request.num_computed_tokens + tokens)
            if whole > state.saved:
                self._saves.save(state, table_of(request_id), whole)
        self._loads.release_ended()
        if not scheduled:
            self._lookups.wait(self._requests.values())
        loads, acknowledged = self._loads.take()
        lookups, released = self._lookups.take()
        return StepPlan(
            loads=loads,
            saves=self._saves.take(),
            opening=opening,
            reused=reused,
            acknowledged=acknowledged,
            want_report=self.entered.namespace is None,
            measured=self._speeds.begin_step(scheduled, self._requests),
            reset=asked_reset,
            lookups=lookups,
            released=released,
        )

    def step_done(self, done: StepDone) -> None:
        """Learn which loads and saves ranks ended: release leases and pins, remember what failed."""
        self._loads.note_failed(done, self._pool)
        self._saves.note(done)
        self.entered.note_outdated(done.outdated)
        if self._lookups.by_rank is not None:
            self._lookups.by_rank.note(done.lookups)
        self._loads.note_ended(done)
        for number, (seconds, stages) in done.steps.items():
            self._speeds.end_stages(number, seconds, stages)

    def has_work(self) -> bool:
        """Whether steps are needed without requests, so that leases and pins are given back."""
        parts = self._saves, self._loads, self.entered, self._lookups
        return any(part.has_work for part in parts)

    # --- ends ---------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Learn that the engine's weights may be others from now on, and all that it held is gone.

        False while the engine holds KV of before, in running requests or loads: none of it may be saved beside new
        KV, so the pool is left alone until a reset finds none. Saves under way end in the namespace that they are for.
        """
        self._saves.reset()
        for state in self._requests.values():
            self._lookups.drop(state)
            self._lookups.drop_pull(state)
            state.pulled = -1
            state.limit = None
            state.saved = 0
        holds = self._pool.get_num_free_blocks() < len(self._pool.blocks) - 1
        clean = not self._loads.running and not holds
        if clean:
            # Others end before the engine sleeps, which may empty the blocks of these.
            self._saves.give_up()
            self._adapters.reset()
            for state in self._requests.values():  # which may compute with what was loaded before
                state.use_adapter(self._adapters.content(state.request.lora_request))
        self.entered.reset(clean=clean)
        return clean

    def close(self) -> None:
        """Release every lease. Loads that run fail or end by their deadline."""
        self.entered.close()
        self._loads.release_ended()
        for state in self._requests.values():
            self._lookups.drop(state)
        self._lookups.close()

    def _synchronous(self, blocks: int) -> bool:
        if not self._shared.engine.sync_loads or self._shared.config.load_mode is LoadMode.ASYNC:
            return False
        if self._shared.config.load_mode is LoadMode.SYNC:
            return True
        return blocks * self._rank_bytes <= self._shared.config.sync_load_bytes

    def _finish(
        self, state: RequestState, tables: Sequence[Sequence[int]], *, completed: bool
    ) -> SaveReport | None:
        self._lookups.drop(state)
        self._lookups.drop_pull(state)
        shared = self.entered.usable and self._shares(state)
        whole = self._saves.whole(state, state.request.num_computed_tokens)
        if shared and completed and state.turn is not None:
            self._report_turn(state, state.turn, whole)
        if not self._shared.engine.saves or not shared:
            return SaveReport(0, 0, None) if state.reports else None
        self._saves.finish(state, tables, whole, completed=completed)
        return self._saves.report(state) if state.reports else None

    def _report_turn(self, state: RequestState, turn: SessionTurn, whole: int) -> None:
        """Tell the daemon which blocks a session has used, unless it hangs. One message a request."""
        whole = min(whole, TURN_BLOCKS_MAX)
        if not whole or not self._lookups.answered:
            return
        self._shared.client.sessions.turn(
            self.entered.open,
            turn.id,
            pack(state.hashes(whole)[:whole]),
            agent=turn.strand(state.adapter or b""),
            ended=turn.end,
            shared=turn.shared,
        )

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            self._saves.pins.hold()
            state = self._requests[request.request_id] = RequestState(request)
            state.use_adapter(self._adapters.content(request.lora_request))
        return state

    def _shares(self, state: RequestState) -> bool:
        """Whether it is known what the request's adapter contains, and what the engine's own cache has of it."""
        return state.adapter is not None and self._adapters.shares(state.request.lora_request)
