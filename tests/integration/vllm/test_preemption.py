"""An engine with too few blocks: requests are preempted and come back, from the pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]
BLOCKS, REQUESTS, LENGTH, NEW = 30, 6, 150, 60


@pytest.mark.parametrize("mode", ["async", "auto"])
def test_preempted_requests_say_the_same(
    kit: Any, llama: Path, tmp_path: Path, oracle: Oracle, mode: str
) -> None:
    asked = kit.prompts(5, [LENGTH] * REQUESTS)
    options = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 512}
    expected = oracle("llama", asked, NEW, **options)
    with (
        kit.run_daemon(tmp_path) as daemon,
        kit.run_engine(llama, daemon, {"load_mode": mode}, **options) as engine,
    ):
        preempted = []
        preempt = engine.scheduler._preempt_request

        def count(*arguments: Any, **options: Any) -> None:
            preempted.append(1)
            preempt(*arguments, **options)

        most = []
        plan = engine.connector.build_connector_meta

        def watch(*arguments: Any) -> Any:
            planned = plan(*arguments)
            most.append(engine.half.pins)
            return planned

        engine.scheduler._preempt_request = count
        engine.connector.build_connector_meta = watch
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert preempted
        assert 0 < max(most) <= BLOCKS // 10
        engine.assert_nothing_held(daemon)
        again = engine.generate(asked, NEW)
        assert [output.tokens for output in again] == expected
        assert engine.metric("loads") > 0
        engine.assert_nothing_held(daemon)
        assert daemon.counters().duplicates == 0
