"""Estimates find what produced their observations, and know how wrong they are."""

import pytest

from kvpool.scheduler.estimates import Error, LoadEstimate, StepEstimate


def test_steps_are_learnt_from_a_wrong_start() -> None:
    a, b, c = 0.004, 1.1e-4, 1.0e-9
    estimate = StepEstimate((0.0, 5e-4, 0.0))
    for number in range(1, 500):
        tokens, start = 256 * (number % 8 + 1), 4096 * (number % 13)
        attended = tokens * (start + tokens / 2)
        estimate.observe(tokens, attended, start + tokens, a + b * tokens + c * attended)
    whole = a * 4 + b * 8000 + c * 8000 * (1000 + 9000) / 2
    assert estimate.prefill_s(1000, 9000, 2048) == pytest.approx(whole, rel=0.02)
    assert estimate.error.mean < 0.05


def test_a_prompt_whose_blocks_are_all_there_still_takes_a_step() -> None:
    estimate = StepEstimate((0.004, 1e-4, 0.0))
    assert estimate.prefill_s(511, 512, 2048) == pytest.approx(0.0041)


def test_loads_are_learnt_and_bytes_ahead_are_no_slowness() -> None:
    estimate = LoadEstimate(0.001, 100e9)
    for number in range(300):
        nbytes, ahead = 1e9 * (number % 5 + 1), 2e9 * (number % 3)
        estimate.observe(nbytes, ahead, 0.001 + (nbytes + ahead) / 10e9)
    assert estimate.seconds(5e9) == pytest.approx(0.501, rel=0.01)
    assert estimate.seconds(5e9, 5e9) == pytest.approx(1.001, rel=0.01)
    assert estimate.seconds(0, 5e9) == 0.0


def test_errors_tell_size_and_direction() -> None:
    error = Error()
    for _ in range(50):
        error.note(1.2, 1.0)
    assert error.mean == pytest.approx(0.2)
    assert error.bias == pytest.approx(0.2)
    for _ in range(500):
        error.note(0.5, 1.0)
    assert error.mean == pytest.approx(0.5, rel=0.01)
    assert error.bias == pytest.approx(-0.5, rel=0.01)
