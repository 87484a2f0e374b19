"""Speeds of an engine, as configured or as measured: of computing prompts, and of loading blocks instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.engine_plugins.vllm.scheduler.load_cost import LoadCost
from kvpool.engine_plugins.vllm.scheduler.request_state import RequestState, Shared
from kvpool.prefill_cost import PrefillFit, StepWork
from kvpool.types import Recompute

STEPS_MAX = 64
"""How many steps may be under way whose forward pass is measured."""


@dataclass
class RunningStep:
    """A step whose forward pass is measured, with the sum of what pipeline stages have reported so far."""

    work: StepWork
    stages_left: int
    seconds: float = 0.0


class SpeedModel:
    """Learns from steps and loads how long both take. Scheduling thread only."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._steps: OrderedDict[int, RunningStep] = OrderedDict()
        self._last_step = 0
        self._prefill = PrefillFit()
        self._load_costs = {True: LoadCost(), False: LoadCost()}  # of synchronous loads, and others

    def recompute(self, start: int, end: int) -> Recompute | None:
        """Return the price of computing blocks [start, end) of a chain, or None if it is not known yet."""
        tokens, given = self._shared.engine.hash_tokens, self._shared.config.prefill_tokens_per_s
        if given:
            return Recompute(tokens / given)
        return self._prefill.recompute(start * tokens, tokens, end - start)

    def computes_sooner(self, start: int, blocks: int, *, sync: bool) -> bool:
        """Whether a request would wait longer for so few blocks than the engine takes to compute them."""
        load_s = self._load_costs[sync].seconds(blocks, self._shared.clock())
        price = None if load_s is None else self.recompute(start, start + blocks)
        return load_s is not None and price is not None and price.seconds(0, blocks) < load_s

    def observe_load(self, blocks: int, *, begun: float, copy_s: float, sync: bool) -> None:
        """Learn from a load that ended well. copy_s: of its copies; a request of an asynchronous load waits from its begin."""
        now = self._shared.clock()
        self._load_costs[sync].observe(blocks, copy_s if sync else now - begun, now)

    def begin_step(self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState]) -> int:
        """Return the number of a step from which the prefill speed is learnt; 0 for other steps.

        These are steps that compute more of prompts than of answers: the time of the others is spent on
        reading weights and KV, whatever the number of tokens.
        """
        if self._shared.config.prefill_tokens_per_s or not self._shared.engine.loads:
            return 0
        prompts = deepest = 0
        attended = 0.0
        for request_id, tokens in scheduled.items():
            state = requests.get(request_id)
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
        self._steps[self._last_step] = RunningStep(work, self._shared.engine.stages)
        if len(self._steps) > STEPS_MAX:
            self._steps.popitem(last=False)
        return self._last_step

    def end_stages(self, number: int, seconds: float, stages: int) -> None:
        """Learn that some of a step's pipeline stages took so long: a prompt goes through one after the other."""
        step = self._steps.get(number)
        if step is None:
            return  # so many steps came after it that it was given up
        step.seconds += seconds
        step.stages_left -= stages
        if step.stages_left == 0:
            del self._steps[number]
            self._prefill.observe(step.work, step.seconds)
            self._shared.counters.add(prefill_tokens=step.work.tokens, prefill_seconds=step.seconds)
