"""Answers are right while SGLang's own switches make its backend fail and wait at random."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

LENGTHS = (700, 333, 450, 90)
ROUNDS = 6


@pytest.mark.parametrize("policy", ["wait_complete", "timeout", "best_effort"])
def test_answers_are_right_whatever_fails(
    kit: ModuleType, models: Any, daemon: Any, tmp_path: Path, policy: str
) -> None:
    prompts = [kit.TINY.prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    with kit.run_engine(
        models("llama"),
        tmp_path / "e",
        kit.backend_config(daemon.socket, epoch=policy),
        {
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        },
        hicache_storage_prefetch_policy=policy,
    ) as engine:
        engine.ready()
        computed = [engine.generate(each) for each in prompts]
        assert [each.cached for each in computed] == [0] * len(prompts)
        found = 0
        for _ in range(ROUNDS):
            engine.flush()
            for asked, expected in zip(prompts, computed, strict=True):
                answer = engine.generate(asked)
                assert answer.tokens == expected.tokens
                found += answer.storage
        assert found or policy == "best_effort"
