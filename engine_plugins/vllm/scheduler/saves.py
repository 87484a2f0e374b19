"""Saves of requests' blocks: which are queued, and for how long the engine's blocks are pinned for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvpool.engine_plugins.vllm.following import SaveReport
from kvpool.engine_plugins.vllm.plan import (
    GroupSave,
    Handover,
    Offered,
    SaveJob,
    SaveTimes,
    StepDone,
    block_key,
    pack,
    plan_save,
    plan_states,
    state_name,
)
from kvpool.engine_plugins.vllm.scheduler.engine_namespace import EngineNamespace
from kvpool.engine_plugins.vllm.scheduler.pins import Pins
from kvpool.engine_plugins.vllm.scheduler.request_state import RequestState, Shared

OFFERED_PER_BLOCK = 8
"""How many offered keys are remembered, in multiples of what the engine's own cache holds."""


@dataclass
class RunningSave:
    """A save that not all ranks have finished."""

    generation: int
    """Opening of the namespace that the save is for."""
    keys: list[bytes]
    ranks_left: int


class Saves:
    """Queues saves within the budget of pins, and follows them until all ranks have copied. Scheduling thread only."""

    def __init__(self, shared: Shared, entered: EngineNamespace) -> None:
        engine, config = shared.engine, shared.config
        self._shared = shared
        self._entered = entered
        self._states = [at for at, rule in enumerate(engine.rules) if rule.state]
        self._queued: list[SaveJob] = []
        self._running: dict[int, RunningSave] = {}
        self._times = SaveTimes()
        self._offered = Offered(engine.blocks * OFFERED_PER_BLOCK, config.resave_s)
        self.pins = Pins(max(1, int(engine.blocks * config.pin_share)), watches=engine.watches)

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def take(self) -> list[SaveJob]:
        """Return the saves that the next step begins."""
        queued, self._queued = self._queued, []
        return queued

    def take_reused(self) -> list[int]:
        """Give up queued saves whose blocks are used again. Return those under way."""
        reused = self.pins.take_reused()
        self.give_up(reused)
        return sorted(reused & self._running.keys())

    def whole(self, state: RequestState, computed_tokens: int) -> int:
        """Return the blocks of the chain whose tokens are known and computed at the end of the step.

        Hashes exist for known tokens only, so drafts that may be rejected are never counted.
        """
        if not self._shared.config.save_generated:
            computed_tokens = min(computed_tokens, state.request.num_prompt_tokens)
        return min(
            computed_tokens // self._shared.engine.hash_tokens, len(state.request.block_hashes)
        )

    def save(self, state: RequestState, tables: Sequence[Sequence[int]], whole: int) -> None:
        """Queue the request's blocks up to `whole`, as far as the pins allow.

        What does not fit is tried again in the request's next step, while it holds its blocks
        anyhow; only what is left at its end is dropped.
        """
        now = self._shared.clock()
        hashes = state.hashes(whole)
        wanted: list[int] = []
        room = self.pins.room() // max(1, len(self._shared.engine.rules) - len(self._states))
        index = state.saved
        while index < whole and len(wanted) < room:
            if not self._offered.holds(block_key(hashes[index]), now):
                wanted.append(index)
            index += 1
        state.saved = index
        saves = plan_save(self._shared.engine.rules, tables, hashes, wanted)
        if saves:
            self._pin(state, saves, [block_key(hashes[index]) for index in wanted], now)

    def save_states(self, state: RequestState, handed: Sequence[Handover]) -> None:
        """Queue the states of a request that the engine hands over, if they fit: they are handed over once."""
        now, hashes = self._shared.clock(), state.hashes(len(state.request.block_hashes))
        tokens = self._shared.engine.hash_tokens
        end = len(hashes)
        if not self._shared.engine.answer_states:
            end = state.request.num_prompt_tokens // tokens
        for found in plan_states(self._shared.engine.rules, handed, hashes, tokens, end).values():
            fresh = {
                name: save
                for save in found
                if not self._offered.holds(name := state_name(save.keys, save.rule), now)
            }
            if len(fresh) > self.pins.room():
                self._shared.counters.add(dropped_saves=1)
                self._report_dropped(fresh)
            elif fresh:
                self._pin(state, [*fresh.values()], [*fresh], now)

    def finish(
        self, state: RequestState, tables: Sequence[Sequence[int]], whole: int, *, completed: bool
    ) -> None:
        """Save what a request that ends still held back for want of pins, or drop it.

        completed: the request ended by itself; the blocks of a failed or aborted one are not trusted.
        """
        if completed and whole > state.saved:
            self.save(state, tables, whole)
        if whole > state.saved:
            self._shared.counters.add(dropped_saves=whole - state.saved)
        prompt = state.request.num_prompt_tokens // self._shared.engine.hash_tokens
        if completed:  # otherwise who follows may wait for another engine, which goes on with it
            self._report_dropped(state.hashes(prompt)[state.saved : prompt])

    def report(self, state: RequestState) -> SaveReport:
        """Return what became of a prompt's blocks. Those that were offered before, and since evicted, count as saved."""
        now, tokens = self._shared.clock(), self._shared.engine.hash_tokens
        prompt = state.request.num_prompt_tokens // tokens
        keys = [block_key(one) for one in state.hashes(prompt)[:prompt]]
        kept = next(
            (at for at, key in enumerate(keys) if not self._offered.holds(key, now)), len(keys)
        )
        running = {key for save in self._running.values() for key in save.keys}
        saved = next((at for at, key in enumerate(keys[:kept]) if key in running), kept)
        saving_s = self._times.expect(len(save.keys) for save in self._running.values())
        return SaveReport(saved * tokens, (kept - saved) * tokens, saving_s)

    def note(self, done: StepDone) -> None:
        """Learn which saves have failed or ended on ranks."""
        for job in done.failed_saves & self._running.keys():
            self._lost(self._running[job])
        for job, ranks in done.saves.items():
            save = self._running[job]
            save.ranks_left -= ranks
            if save.ranks_left == 0:
                del self._running[job]
                self.pins.give_back(job)
            if job in done.save_seconds:
                self._times.learn(len(save.keys), done.save_seconds[job])

    def note_loaded(self, keys: Sequence[bytes]) -> None:
        """Learn that the pool has these blocks, with the states after the last one."""
        self._offered.add([*keys, *self._state_names(keys[-1:])], self._shared.clock())

    def note_not_loaded(self, keys: Sequence[bytes]) -> None:
        """Offer the blocks of a failed load again once they are computed."""
        self._offered.forget([*keys, *self._state_names(keys)])

    def reset(self) -> None:
        """Forget what was offered: the weights may be others."""
        self._offered.clear()

    def give_up(self, saves: Collection[int] | None = None) -> None:
        """Drop those of these saves, or of all, that no rank has begun."""
        for job in [job for job in self._queued if saves is None or job.job in saves]:
            self._queued.remove(job)
            self._shared.counters.add(dropped_saves=len(self._running[job.job].keys))
            self._lost(self._running.pop(job.job))
            self.pins.give_back(job.job)

    def _pin(
        self, state: RequestState, saves: list[GroupSave], keys: list[bytes], now: float
    ) -> None:
        """Queue saves, and pin their blocks until all ranks have copied them. keys: to be known as offered."""
        generation = self._entered.generation
        blocks = sorted({block for save in saves for block in save.block_ids})
        job = SaveJob(next(self._shared.jobs), state.request.request_id, generation, saves)
        state.served = True
        self.pins.take(job.job, blocks)
        self._offered.add(keys, now)
        self._running[job.job] = RunningSave(generation, keys, self._shared.engine.ranks)
        self._queued.append(job)

    def _lost(self, save: RunningSave) -> None:
        """A save has failed: its blocks are offered again, unless they are those of weights of before."""
        if save.generation == self._entered.generation:
            self._offered.forget(save.keys)
            self._report_dropped(save.keys)

    def _report_dropped(self, hashes: Iterable[bytes]) -> None:
        """Tell the daemon: who follows a prompt does not wait for these any more. Without any, nothing happens."""
        self._shared.client.dropped(self._entered.open, pack(hashes))

    def _state_names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [state_name(key, at) for key in keys for at in self._states]
