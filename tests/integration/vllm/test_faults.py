"""What goes wrong while an engine loads. One engine for each way of loading, its own cache emptied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm.layout.pages import HostPages
from kvpool.errors import ConfigError, LeaseLost

Oracle = Callable[..., list[list[int]]]
LEASE_S = 2.0


@pytest.fixture(scope="module")
def asked(kit: Any) -> list[list[int]]:
    return kit.prompts(3)


@pytest.fixture(scope="module")
def expected(oracle: Oracle, asked: list[list[int]]) -> list[list[int]]:
    return oracle("llama", asked)


@pytest.fixture(scope="module", params=["async", "sync"])
def shared(
    kit: Any,
    llama: Path,
    daemon: Any,
    expected: list[list[int]],
    asked: list[list[int]],
    request: pytest.FixtureRequest,
) -> Iterator[Any]:
    extra = {"load_mode": request.param}
    with kit.run_engine(llama, daemon, extra) as engine:
        engine.mode = request.param
        assert [output.tokens for output in engine.generate(asked)] == expected
        yield engine


@pytest.fixture
def engine(shared: Any, daemon: Any) -> Iterator[Any]:
    """The engine with the prompts' blocks in the pool only; afterwards it must hold nothing."""
    shared.forget()
    yield shared
    shared.assert_nothing_held(daemon)


def test_a_load_that_always_fails_is_tried_once_a_request(
    kit: Any,
    engine: Any,
    asked: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"))
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    assert len(tries) == len(asked)


def test_a_reader_that_outlives_its_lease_uses_nothing(
    kit: Any,
    engine: Any,
    asked: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stops between two copies until its lease is over, as if it had been suspended."""
    stopped = []

    def stop(
        copy: Callable[..., None], pages: HostPages, slots: Any, rows: Any, blocks: Any, ready: Any
    ) -> None:
        copy(pages, slots, rows, blocks, ready)
        if not stopped:
            stopped.append(len(rows))
            time.sleep(LEASE_S)
        # What the slots hold by now is not the request's.
        for layer in kit.layers_of(pages):
            layer[blocks] = 0

    before = engine.metric("failed_loads")
    kit.copies_through(monkeypatch, "from_slots", stop)
    with kit.lookups_seen(engine, lambda *_: None, lease_s=LEASE_S):
        outputs = engine.generate(asked[:1])
    assert outputs[0].tokens == expected[0]
    assert stopped
    assert engine.metric("failed_loads") == before + 1


def test_an_abort_while_blocks_are_loaded(
    kit: Any,
    engine: Any,
    asked: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if engine.mode == "sync":
        pytest.skip("a synchronous load ends within its step")
    from vllm import SamplingParams, TokensPrompt

    begun, go_on = threading.Event(), threading.Event()

    def wait(copy: Callable[..., None], *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        copy(*arguments)

    kit.copies_through(monkeypatch, "from_slots", wait)
    core = engine.llm.llm_engine
    core.add_request(
        "aborted",
        TokensPrompt(prompt_token_ids=asked[0]),
        SamplingParams(max_tokens=4, temperature=0),
    )
    while not begun.is_set():
        core.step()
    core.abort_request(["aborted"])
    for _ in range(3):
        core.step()
    # The copy may still write into the blocks: they are not given to anybody.
    assert engine.pool.get_num_free_blocks() < engine.idle_free
    go_on.set()
    engine.drain()
    monkeypatch.undo()
    assert engine.pool.get_num_free_blocks() == engine.idle_free
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    assert [output.cached > 0 for output in outputs] == [True] * 3


@pytest.mark.parametrize("ends", ["in the step that loads", "before it is computed again"])
def test_an_abort_after_a_failed_load_leaves_nothing_in_the_engines_cache(
    kit: Any,
    engine: Any,
    asked: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
) -> None:
    from vllm import SamplingParams, TokensPrompt

    tried = threading.Event()
    core = engine.llm.llm_engine

    def meanwhile(job: Any) -> None:
        if ends == "in the step that loads" and engine.mode == "sync" and not tried.is_set():
            # As the engine's own process does it during a step.
            engine.core.abort_requests([job.request_id])
        tried.set()

    kit.fail_loads(engine, monkeypatch, LeaseLost("made to fail"), meanwhile)
    for name in ("aborted", "beside it"):
        core.add_request(
            name,
            TokensPrompt(prompt_token_ids=asked[0]),
            SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
        )
    said: list[int] = []
    while not tried.is_set():
        core.step()
    core.abort_request(["aborted"])
    while core.has_unfinished_requests():
        for output in core.step():
            if output.request_id == "beside it":
                said = list(output.outputs[0].token_ids)
    assert said == expected[0][:4]
    engine.drain()
    monkeypatch.undo()
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected


def test_an_abort_before_allocation_releases_the_lease(
    kit: Any, engine: Any, daemon: Any, asked: list[list[int]]
) -> None:
    """Blocks for one prompt only: the other waits with its lease until it is aborted."""
    from vllm import SamplingParams, TokensPrompt

    core = engine.llm.llm_engine
    held = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 4)
    core.add_request(
        "waits",
        TokensPrompt(prompt_token_ids=asked[0]),
        SamplingParams(max_tokens=4, temperature=0),
    )
    looked_up = []
    with kit.lookups_seen(engine, lambda *found: looked_up.append(found)):
        for _ in range(20):
            core.step()
    assert len(looked_up) == 1
    assert daemon.leases() == 1
    core.abort_request(["waits"])
    engine.pool.free_blocks(held)
    core.step()
    kit.until(lambda: daemon.leases() == 0, "the lease is released")


def test_a_reset_keeps_what_was_saved_while_the_weights_are_the_same(
    kit: Any, engine: Any, asked: list[list[int]], expected: list[list[int]]
) -> None:
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    outputs = engine.generate(asked)
    assert [output.tokens for output in outputs] == expected
    for each, output in zip(asked, outputs, strict=True):
        assert output.cached >= kit.hit(
            len(each)
        )  # an asynchronous load may bring the last block too


@pytest.mark.parametrize("mode", ["auto", "sync"])
def test_where_vllm_cannot_go_back_no_load_is_synchronous(
    kit: Any, llama: Path, daemon: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """As with async scheduling, which vLLM switches off on CPUs."""
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", 2)
    if mode == "sync":
        with (
            pytest.raises(ConfigError, match="load_mode sync needs vLLM's first model runner"),
            kit.run_engine(llama, daemon, {"load_mode": mode}),
        ):
            pass
        return
    with kit.run_engine(llama, daemon, {"load_mode": mode}) as engine:
        found = []
        matched = engine.connector.get_num_new_matched_tokens

        def look(*arguments: Any) -> Any:
            found.append(matched(*arguments))
            return found[-1]

        engine.connector.get_num_new_matched_tokens = look
        engine.generate(kit.prompts(3)[:1])
        engine.forget()
        engine.generate(kit.prompts(3)[:1])
    loads = [asynchronous for tokens, asynchronous in found if tokens]
    assert loads and all(loads)


@pytest.mark.parametrize(
    ("batches", "second", "can"), [(1, False, True), (2, False, False), (1, True, False)]
)
def test_vllm_goes_back_where_steps_do_not_overlap(batches: int, second: bool, can: bool) -> None:
    from kvpool.engine_plugins.vllm.connector import can_go_back

    config = SimpleNamespace(max_concurrent_batches=batches, use_v2_model_runner=second)
    assert can_go_back(config) is can
