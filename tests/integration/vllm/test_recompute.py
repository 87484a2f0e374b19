"""Load or recompute, on real engines: how fast one computes is learnt from its steps and decides what is pulled."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.prefill_cost import PrefillFit, StepWork
from kvpool.telemetry.cluster_stats import FetchStats

Oracle = Callable[..., list[list[int]]]
PATIENT = {"pull_wait_s": 30.0}
FAST, SLOW = 1e12, 1e-3  # tokens a second


def publish(kit: Any, engine: Any, node: Any) -> None:
    """Until the cluster knows what the engine has computed."""
    engine.drain()
    kit.until(node.settled, "the directory knows what the node holds")


def remote(node: Any) -> FetchStats:
    return node.client.stats().fetch


def test_what_an_engine_computes_sooner_is_not_pulled(
    kit: Any, llama: Path, tmp_path: Path, oracle: Oracle
) -> None:
    # One request: how several are batched would depend on when the daemon answers, and the last bits with it.
    asked = kit.prompts(11)[:1]
    expected = oracle("llama", asked)
    hit, whole = kit.hit(len(asked[0])), len(asked[0]) // kit.BLOCK
    with kit.run_cluster(tmp_path, 2) as (a, b):
        with kit.run_engine(llama, a) as engine:
            assert [output.tokens for output in engine.generate(asked)] == expected
            publish(kit, engine, a)
        # Before slower ones: what is pulled stays on the node. So do the blocks that it computes itself.
        fast = {**PATIENT, "prefill_tokens_per_s": FAST}
        with kit.run_engine(llama, b, fast) as engine:
            outputs = engine.generate(asked)
            assert [output.tokens for output in outputs] == expected
            assert [output.cached for output in outputs] == [0]
            assert engine.metric("pulls") == 1
            assert engine.metric("pulled_blocks") == engine.metric("late_pulls") == 0
            assert engine.metric("prefill_tokens") == 0, "it was told"
            assert remote(b).declined == kit.SHARDS * whole
            engine.drain()
        assert b.client.evict(tier="dram") > 0
        slow = {**PATIENT, "prefill_tokens_per_s": SLOW}
        with kit.run_engine(llama, b, slow) as engine:
            outputs = engine.generate(asked)
            assert [output.tokens for output in outputs] == expected
            assert [output.cached for output in outputs] == [hit]
            assert engine.metric("pulled_blocks") == whole
            assert remote(b).declined == kit.SHARDS * whole
            engine.assert_nothing_held(b)


def test_an_engine_learns_how_fast_it_computes(
    kit: Any, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = (40, 900, 300, 1800, 150, 1300, 600, 1900)
    steps: list[tuple[StepWork, float]] = []
    fits: set[PrefillFit] = set()
    observe = PrefillFit.observe

    def listen(fit: PrefillFit, work: StepWork, seconds: float) -> None:
        fits.add(fit)
        steps.append((work, seconds))
        observe(fit, work, seconds)

    monkeypatch.setattr(PrefillFit, "observe", listen)
    measured = {"prefill_tokens_per_s": 0}
    with kit.run_daemon(tmp_path) as daemon, kit.run_engine(llama, daemon, measured) as engine:
        speeds = engine.half._speeds
        assert speeds.recompute(0, 1) is None
        begun = time.perf_counter()
        for seed in range(3):
            for prompt in kit.prompts(60 + seed, lengths):
                engine.generate([prompt], 2)
        taken = time.perf_counter() - begun
        # Each prompt in chunks of 512 tokens, each token attending to those before it; no decode.
        assert sum(work.tokens for work, _ in steps) == 3 * sum(lengths)
        assert sum(work.attended for work, _ in steps) == 3 * sum(n * n / 2 for n in lengths)
        assert max(work.deepest for work, _ in steps) == max(lengths)
        assert engine.metric("prefill_tokens") == 3 * sum(lengths)
        assert 0 < sum(seconds for _, seconds in steps) < taken
        # Steps differ much on a busy machine; of all of them together it is about right.
        (fit,) = fits
        a, b, c = fit.coefficients
        learnt_s = sum(a + b * work.tokens + c * work.attended for work, _ in steps)
        assert 0.2 < learnt_s / sum(seconds for _, seconds in steps) < 5
        price = speeds.recompute(0, 60)
        assert price.seconds(0, 60) == pytest.approx(
            b * 60 * kit.BLOCK + c * (60 * kit.BLOCK) ** 2 / 2, rel=0.01
        )
