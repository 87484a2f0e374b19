"""The scheduler half and an engine around it, driven by hand: no engine, no daemon, no clock but the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool.engine_plugins.vllm.config import PluginConfig
from kvpool.engine_plugins.vllm.events import Publisher
from kvpool.engine_plugins.vllm.plan import GroupRule, StepDone, StepPlan, block_key, pack
from kvpool.engine_plugins.vllm.scheduler.half import SchedulerHalf
from kvpool.engine_plugins.vllm.scheduler.pulls import Pulls
from kvpool.engine_plugins.vllm.scheduler.request_state import Engine
from kvpool.types import NamespaceRecord, PartSpec

TOKENS = 4
PART_BYTES = 64


class Harness:
    """A scheduler half and the engine around it, driven by hand."""

    def __init__(
        self,
        pool: Any,
        block_pool: Any,
        *,
        rules: Iterable[GroupRule] = (GroupRule(0),),
        ranks: int = 1,
        loads: bool = True,
        saves: bool = True,
        answer_states: bool = True,
        draft_blocks: int = 0,
        stages: int = 1,
        blocks: int | None = None,
        threads: Any = None,
        events: Publisher | None = None,
        several_nodes: bool = False,
        ahead: Any = None,
        known: bool = True,
        **extra: Any,
    ) -> None:
        self.pool, self.block_pool = pool, block_pool
        self.ahead = ahead
        self.now = 100.0
        pool.clock = lambda: self.now
        rules = list(rules)
        engine = Engine(
            rules,
            TOKENS,
            blocks or len(block_pool.blocks),
            ranks,
            sync_loads=len(rules) == 1,
            loads=loads,
            saves=saves,
            answer_states=answer_states,
            draft_blocks=draft_blocks,
            stages=stages,
            events=events,
        )
        parts = tuple(
            PartSpec(PART_BYTES, rule.kind, rule.window_blocks, rule.stride)
            for _ in range(ranks)
            for rule in rules
        )
        unseen = iter(range(1, 99))
        config = PluginConfig.from_given(extra)
        pulls = None
        if threads is not None:
            pulls = Pulls(pool, threads, config, lambda: self.now)
        self.half = SchedulerHalf(
            pool,
            config,
            engine,
            pulls=pulls,
            ahead=ahead,
            new_weights=lambda: f"unseen-{next(unseen)}",
            clock=lambda: self.now,
        )
        self.half.bind_pool(block_pool)
        self.make: Callable[[str], NamespaceRecord] = lambda weights: NamespaceRecord(
            {"weights": weights or "as started"}, parts
        )
        if known:
            self.half.set_namespace(
                self.make,
                "first",
                groups=[rule.group for _ in range(ranks) for rule in rules],
                rank_bytes=sum(PART_BYTES // rule.stride for rule in rules),
                several_nodes=several_nodes,
            )
        self.ns = pool.open(self.make(""))
        if threads is not None:
            threads.run()

    def store(self, hashes: Iterable[bytes], parts: Iterable[int] = (0,)) -> None:
        for part in parts:
            reservation = self.pool.reserve(self.ns, pack(hashes), part=part)
            reservation.slots.table[reservation.slots.rows] = np.uint8(part + 1)
            self.pool.commit(reservation)

    def store_elsewhere(self, hashes: Iterable[bytes]) -> None:
        self.pool.elsewhere.update((self.ns.digest, block_key(each)) for each in hashes)

    def request(
        self,
        name: str,
        blocks: int,
        *,
        extra_tokens: int = 1,
        first: int = 0,
        params: dict[str, Any] | None = None,
        adapter: Any = None,
    ) -> Any:
        request = SimpleNamespace(
            request_id=name,
            block_hashes=[bytes([first + i]) * 32 for i in range(blocks)],
            num_tokens=blocks * TOKENS + extra_tokens,
            num_prompt_tokens=blocks * TOKENS + extra_tokens,
            num_computed_tokens=0,
            num_preemptions=0,
            shared_prefix_boundary=0,
            skip_reading_prefix_cache=False,
            kv_transfer_params=params,
            trace_headers=None,
            lora_request=adapter,
        )
        self.half.on_new_request(request)
        return request

    def reset(self, weights: str = "first") -> None:
        """Reset, and have the ranks say which weights they have."""
        assert self.half.reset()
        self.half.entered.use_weights(weights)

    def step(
        self,
        request: Any,
        tokens: int,
        tables: list[list[int]],
        states: Sequence[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """A step that computes `tokens` of the request. states: that the engine hands over."""
        plan = self.half.plan_step(
            {request.request_id: tokens}, lambda _: tables, {request.request_id: states}
        )
        request.num_computed_tokens += tokens
        return plan

    def end(self, plan: StepPlan, *, failed: bool = False, ranks: int = 1) -> None:
        """The ranks end all that a plan asked for."""
        loads, saves = [job.job for job in plan.loads], [job.job for job in plan.saves]
        self.half.step_done(
            StepDone(
                loads=dict.fromkeys(loads, ranks),
                saves=dict.fromkeys(saves, ranks),
                failed_loads=set(loads) if failed else set(),
                failed_saves=set(saves) if failed else set(),
            )
        )


def tables(blocks: int, first: int = 1) -> list[list[int]]:
    return [list(range(first, first + blocks))]


def hashes(blocks: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(blocks)]
