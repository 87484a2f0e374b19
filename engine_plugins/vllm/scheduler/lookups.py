"""Lookups of requests' blocks in the pool, with a lease of what is found.

A lookup takes the lease at once, so that the blocks promised to the scheduler are still there when the workers copy
them; a lookup that waits for allocation longer than half its lease is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvpool.engine_plugins.vllm.plan import QUIET_S, LookupJob, pack
from kvpool.engine_plugins.vllm.scheduler.ahead import Ahead
from kvpool.engine_plugins.vllm.scheduler.engine_namespace import EngineNamespace
from kvpool.engine_plugins.vllm.scheduler.pulls import Pull, Pulls
from kvpool.engine_plugins.vllm.scheduler.rank_lookups import RankLookups
from kvpool.engine_plugins.vllm.scheduler.request_state import (
    LargeLookup,
    Lookup,
    RankLease,
    RequestState,
    Shared,
)
from kvpool.engine_plugins.vllm.scheduler.speeds import SpeedModel
from kvpool.errors import KvpoolError
from kvpool.retry import Backoff

if TYPE_CHECKING:
    from kvpool.client import Lease

AHEAD_TIMES = 2
"""How many times the workers' deadline a lookup of very many blocks may take, with those before it in its thread."""


@dataclass(eq=False, repr=False, slots=True)
class Lookups:
    """Asks the pool once a request, with a short deadline, and once more after other nodes were asked for the rest.

    pulls: None where blocks of other nodes are not asked for. ahead: asks for very many blocks; None: they are asked for
    as others are. Scheduling thread only, where every wait stalls all requests.
    """

    _shared: Shared
    _entered: EngineNamespace
    _speeds: SpeedModel
    _pulls: Pulls | None
    _ahead: Ahead | None
    _has_states: bool = field(init=False)
    _quiet: Backoff = field(default_factory=lambda: Backoff(*QUIET_S), init=False)
    life: int = field(default=0, init=False)
    """Life of the daemon's device memory that all ranks read by themselves; 0: not all do, or there is none."""
    by_rank: RankLookups | None = field(default=None, init=False)
    """Lookups of ranks that lease by themselves, since not all reach the daemon of this node."""

    def __post_init__(self) -> None:
        self._has_states = any(rule.state for rule in self._shared.engine.rules)

    @property
    def answered(self) -> bool:
        """Whether the daemon may be asked now: a hanging one is not asked for a while."""
        return self._quiet.due(self._shared.clock())

    def current(self, state: RequestState) -> Lookup | None:
        """Return the known answer where it still holds for the engine's present hit, else a new one.

        None while the pool is asked for very many blocks, or other nodes for more.
        """
        if self.by_rank is not None:
            return self._ask_ranks(self.by_rank, state)
        if state.large is not None and not self._go_on(state, state.large):
            return None
        lookup = state.lookup
        if lookup is None or not self._holds(state, lookup):
            self.drop(state)
            self._ask(state)
            if state.lookup is None:
                return None
            lookup = state.lookup
        if state.pull is None:
            return lookup
        return self._after_pull(state, state.pull, lookup)

    def keep_state(self, state: RequestState, lookup: Lookup) -> None:
        """Have the engine keep the state where the prompt parts from another one that the pool knows.

        Whoever shares the prompt's beginning finds the state there. The engine does so by itself where its own cache
        knows the other prompt; what it is told here is as if that were so. It says anew what it found at each try to
        allocate.
        """
        if not self._has_states:
            return
        end = self._end(state)
        if lookup.known is None:
            lookup.known = lookup.end
            if lookup.end < end and self._shared.engine.saves and self.answered:
                keys = pack(state.hashes(end)[lookup.start : end])
                lookup.known = lookup.start + self._match(keys, self._entered.whole_parts)
        request = state.request
        if lookup.known > lookup.end:
            request.shared_prefix_boundary = max(
                request.shared_prefix_boundary, lookup.known * self._shared.engine.hash_tokens
            )

    def drop(self, state: RequestState) -> None:
        """Give back what a request's lookup has found, or will find."""
        large, state.large = state.large, None
        if large is not None and large.lease is not None:
            large.lease.add_done_callback(self._release_late)
        lookup, state.lookup = state.lookup, None
        if lookup is not None and lookup.lease is not None:
            self.release(lookup.lease)

    def drop_pull(self, state: RequestState) -> None:
        """Wait no longer for what other nodes, or the ranks, were asked for."""
        if state.asked is not None and self.by_rank is not None:
            self.by_rank.drop(state.asked)
            state.asked = None
        if state.pull is not None:
            state.pull.dropped = True
            state.pull = None

    def release(self, lease: Lease | RankLease) -> None:
        if isinstance(lease, RankLease):
            assert self.by_rank is not None
            self.by_rank.release(lease)
        else:
            self._shared.client.release(lease)

    def wait(self, states: Iterable[RequestState]) -> None:
        """Wait a moment for pulls, in a step in which nothing runs."""
        if self._pulls is not None:
            self._pulls.wait([state.pull for state in states if state.pull is not None])

    def take(self) -> tuple[list[LookupJob], list[int]]:
        """Return what the next step asks of ranks that lease by themselves: lookups, and leases to give back."""
        return ([], []) if self.by_rank is None else self.by_rank.take()

    @property
    def has_work(self) -> bool:
        return self.by_rank is not None and self.by_rank.has_work

    def close(self) -> None:
        if self._pulls is not None:
            self._pulls.close()
        if self._ahead is not None:
            self._ahead.close()

    # --- this node --------------------------------------------------------------------------------

    def _holds(self, state: RequestState, lookup: Lookup) -> bool:
        if lookup.start > state.local or lookup.preemptions != state.preemptions:
            return False
        if lookup.lease is None:
            return True
        if lookup.lease.life not in (0, self.life):
            return False  # the ranks could not read all of it any more
        return lookup.lease.deadline - self._shared.clock() >= self._shared.config.lease_s / 2

    def _ask(self, state: RequestState) -> None:
        """Lease what the node has beyond the engine's own hit, or begin to."""
        start, end = state.local, self._end(state)
        lease = None
        if end - start >= self._shared.config.min_load_blocks and self.answered:
            self._shared.counters.add(lookups=1)
            parts = len(self._entered.open.parts)
            if self._ahead is not None and (end - start) * parts > self._ahead.PARTS_AT_ONCE:
                state.large = LargeLookup(start, end)
                self._go_on(state, state.large)
                return
            lease = self._acquire(pack(state.hashes(end)[start:end]), state)
        self._found(state, start, lease)

    def _found(
        self, state: RequestState, start: int, lease: Lease | None, keys: bytes = b""
    ) -> None:
        """Note a first answer, which other nodes may have more than."""
        blocks = 0 if lease is None else lease.blocks
        self._shared.counters.add(hit_blocks=blocks)
        state.lookup = Lookup(start, start + blocks, lease, state.preemptions, keys)
        self._ask_others(state, state.lookup)

    def _go_on(self, state: RequestState, large: LargeLookup) -> bool:
        """Go on with a lookup of very many blocks: send a slice of the keys, or look whether the answer has come."""
        assert self._ahead is not None, "a lookup is large where something asks ahead"
        if large.lease is None:
            end = min(large.at + self._ahead.SLICE_BLOCKS, large.end)
            large.keys += pack(state.hashes(end)[large.at : end])
            large.at = end
            if end < large.end:
                return False
            keys, trace = bytes(large.keys), state.trace
            large.lease = self._ahead.submit(
                self._entered.open, keys, self.life, trace, state.label
            )
            large.begun = self._shared.clock()
            return False
        waited_s = self._shared.clock() - large.begun
        late = waited_s >= AHEAD_TIMES * self._shared.config.request_timeout_s
        if not large.lease.done() and not late:
            return False
        state.large = None
        lease = None
        if large.lease.done():
            lease = large.lease.result()
        else:
            large.lease.add_done_callback(self._release_late)
            large.lease.cancel()
        self._quiet.note(self._shared.clock(), failed=late and not lease)
        self._shared.counters.add(failed_lookups=lease is False)
        lease = lease or None
        if large.before is None or large.pull is None:
            self._found(state, large.start, lease, bytes(large.keys))
        else:
            self._gain(state, large.before, lease, large.pull)
        return True

    def _acquire(self, keys: bytes, state: RequestState) -> Lease | None:
        """Take a lease for the ranks, who join it if it is used."""
        begun = self._shared.clock()
        lease = None
        try:
            lease = self._shared.client.acquire(
                self._entered.open,
                keys,
                lease_s=self._shared.config.lease_s,
                life=self.life,
                trace=state.trace,
                request=state.label,
                for_others=True,
            )
        except KvpoolError:
            # Refused, for example by a quota: the request computes, and the count shows it.
            self._shared.counters.add(failed_lookups=1)
        # A lookup that used up its deadline met a hanging daemon: it is not asked for a while,
        # so that requests do not each pay for it.
        now = self._shared.clock()
        late = now - begun >= 0.9 * self._shared.config.lookup_timeout_s
        self._quiet.note(now, failed=lease is None and late)
        return lease

    def _match(self, keys: bytes, parts: Sequence[int]) -> int:
        """Return how many blocks the pool has of these parts, as a hint; 0 without parts."""
        try:
            return self._shared.client.match(self._entered.open, keys, parts=parts) if parts else 0
        except KvpoolError:
            self._shared.counters.add(failed_lookups=1)
            return 0

    def _end(self, state: RequestState) -> int:
        """Return the chain index after the last block that may be loaded."""
        request = state.request
        # The last token is computed in any case: on top of a state behind it, it would count twice.
        tokens = int(request.num_tokens) - self._has_states
        end = min(tokens // self._shared.engine.hash_tokens, len(request.block_hashes))
        return end if state.limit is None else min(end, state.limit)

    def _release_late(self, answer: Future[Lease | Literal[False] | None]) -> None:
        """Release the answer to a question that nobody asks any more; in a thread of `Ahead`."""
        if not answer.cancelled() and (lease := answer.result()):
            self._shared.client.release(lease)

    # --- each rank by itself ----------------------------------------------------------------------

    def _ask_ranks(self, ranks: RankLookups, state: RequestState) -> Lookup | None:
        """Do the same where each rank leases at its own daemon. Return None while they are asked."""
        lookup = state.lookup
        if lookup is not None and self._holds(state, lookup):
            return lookup
        self.drop(state)
        start, end = state.local, self._end(state)
        lease = None
        if state.asked is None and end - start >= self._shared.config.min_load_blocks:
            self._shared.counters.add(lookups=1)
            following, state.following = state.following, None
            keys = pack(state.hashes(end)[start:end])
            price = self._speeds.recompute(start, end)
            state.asked = ranks.ask(start, keys, price, following, state.trace)
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
        self._shared.counters.add(hit_blocks=blocks)
        state.lookup = Lookup(start, start + blocks, lease, state.preemptions)
        return state.lookup

    # --- other nodes ------------------------------------------------------------------------------

    def _ask_others(self, state: RequestState, lookup: Lookup) -> None:
        """Have what the lookup lacks brought here, unless it is too little to wait for."""
        if self._pulls is None or state.pulled == lookup.preemptions:
            return
        # The block of a prompt's last token is computed in part anyway.
        worth = min(
            self._end(state), (state.request.num_tokens - 1) // self._shared.engine.hash_tokens
        )
        if worth - lookup.end < self._shared.config.min_load_blocks or not self.answered:
            return
        end = self._end(state)
        keys = lookup.keys or pack(state.hashes(end)[lookup.start : end])
        price = self._speeds.recompute(lookup.start, end)
        followed = state.following if state.pulled < 0 else None
        state.pull = self._pulls.begin(lookup.start, keys, price, self.life, followed, state.trace)
        if state.pull is not None:
            state.pulled = lookup.preemptions
            self._shared.counters.add(pulls=1, follows=followed is not None)

    def _after_pull(self, state: RequestState, pull: Pull, lookup: Lookup) -> Lookup | None:
        """Return the lookup with what a pull brought, or None while the request is to wait for it."""
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
                keys = bytearray(lookup.keys)
                state.large = LargeLookup(lookup.start, end, keys, end, lookup, pull)
                return None
            lease = self._acquire(pack(state.hashes(end)[lookup.start : end]), state)
        return self._gain(state, lookup, lease, pull)

    def _gain(self, state: RequestState, before: Lookup, lease: Lease | None, pull: Pull) -> Lookup:
        """Return a lookup of more than before, or that one if there is not more."""
        assert self._pulls is not None
        lookup = before
        if lease is not None and before.start + lease.blocks <= before.end:
            self._shared.client.release(lease)
        elif lease is not None:
            self.drop(state)
            end = before.start + lease.blocks
            lookup = Lookup(before.start, end, lease, state.preemptions, before.keys)
            state.lookup = lookup
        gained = lookup.end - before.end
        self._shared.counters.add(
            late_pulls=self._pulls.blocks(pull) is None,
            pulled_blocks=gained,
            hit_blocks=gained,
            pull_wait_seconds=self._pulls.note(pull, gained),
        )
        return lookup
