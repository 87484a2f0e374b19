"""What vLLM's events say of an engine's cache, beside what the engine has in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, hash_block_tokens

from kvpool.placement.kv_events.engine_blocks import EngineBlocks, short_hash
from kvpool.placement.kv_events.subscriber import EngineFeed, EngineSource, EventSubscriber
from kvpool.types import PartKind, PartSpec

PATIENCE_S = 180.0
BLOCKS = {"llama": 50, "gemma": 90}


class Listener:
    """A subscriber on a loop of its own, that runs while it is waited for."""

    def __init__(self, source: EngineSource, feed: type[EngineFeed] = EngineFeed) -> None:
        self._runner = asyncio.Runner()
        self._name = source.name
        self._subscriber = EventSubscriber([source], clock=time.monotonic, changed=lambda _: None)
        self._subscriber.feed = feed
        self._task = self._runner.get_loop().create_task(self._subscriber.run())
        self.until(lambda: self._subscriber.engines and self.feed.connected, "it is connected")

    @property
    def feed(self) -> EngineFeed:
        return self._subscriber.engines[self._name]

    @property
    def blocks(self) -> EngineBlocks:
        return self.feed.blocks

    def until(self, condition: Callable[[], Any], what: str) -> None:
        async def poll() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while not condition():
                assert not self._task.done()
                assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
                await asyncio.sleep(0.002)

        self._runner.run(poll())

    def close(self) -> None:
        self._task.cancel()
        self._runner.close()


def engine_source(folder: Path) -> tuple[EngineSource, KVEventsConfig]:
    endpoint = f"ipc://{folder / 'e'}"
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=f"{endpoint}.replay",
        topic="kv@test",
    )
    return EngineSource("engine", endpoint, f"{endpoint}.replay", "kv@test"), config


def cached(engine: Any) -> dict[bytes, int]:
    """What the engine has: our key of each block to the groups that hold it, as bits."""
    found: dict[bytes, int] = {}
    for each in engine.pool.cached_block_hash_to_block._cache:
        key = bytes(get_block_hash(each))[-16:]
        found[key] = found.get(key, 0) | 1 << get_group_id(each)
    return found


def copies(engine: Any) -> dict[int, dict[int, int]]:
    """How often the engine has each block: by group and by the block's name in events."""
    found: dict[int, dict[int, int]] = {}
    for each, held in engine.pool.cached_block_hash_to_block._cache.items():
        name = short_hash(bytes(get_block_hash(each)))
        found.setdefault(get_group_id(each), {})[name] = len(held) if isinstance(held, dict) else 1
    return found


def chain(engine: Any, tokens: list[int], block: int) -> list[bytes]:
    """The keys of a prompt's blocks, by vLLM's own hash."""
    config = engine.llm.llm_engine.vllm_config.cache_config
    hash_of = get_hash_fn_by_name(config.prefix_caching_hash_algo)
    keys, parent = [], None
    for at in range(0, len(tokens) - block + 1, block):
        parent = hash_block_tokens(hash_of, parent, tokens[at : at + block])
        keys.append(bytes(parent)[-16:])
    return keys


def rules(engine: Any, block: int) -> dict[int, PartSpec]:
    """What a hit needs of each group."""
    found = {}
    for number, group in enumerate(engine.scheduler.kv_cache_config.kv_cache_groups):
        window = getattr(group.kv_cache_spec, "sliding_window", None)
        blocks = -(-(window - 1) // block) if window else 0
        kind = PartKind.WINDOW if window else PartKind.FULL
        found[number] = PartSpec(nbytes=1, kind=kind, window_blocks=blocks)
    return found


class Beside:
    """A listener and the engine that it listens to."""

    def __init__(self, engine: Any, listener: Listener, kit: Any) -> None:
        self.engine, self.listener, self.kit = engine, listener, kit
        self.ever: set[bytes] = set()  # keys that the engine has had

    def compare(self) -> dict[bytes, int]:
        """Wait until all that was published has arrived; then both must say the same."""
        has = cached(self.engine)
        self.ever |= set(has)
        keys = sorted(self.ever)
        expected = [has.get(key, 0) for key in keys]
        counted = copies(self.engine)
        blocks = self.listener.blocks
        self.listener.until(
            lambda: (
                blocks.masks(keys) == expected
                and len(blocks) == sum(mask.bit_count() for mask in expected)
                # A further copy changes nothing of the above: its event would not be waited for.
                and {n: each.copies for n, each in blocks._groups.items() if each.copies} == counted
            ),
            f"the engine's {len(has)} blocks are known, and no others",
        )
        assert blocks.complete
        return has

    def usable(self, prompt: list[int]) -> int:
        """Tokens of the prompt that the engine should find in its cache."""
        block = self.kit.BLOCK
        keys = chain(self.engine, prompt[:-1], block)  # the last token is always computed
        return block * self.listener.blocks.usable(rules(self.engine, block), keys)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("z")


@pytest.fixture(params=list(BLOCKS))
def beside(
    request: pytest.FixtureRequest, kit: Any, models: Callable[[str], Path], folder: Path
) -> Iterator[Beside]:
    """A small cache, so that prompts push out one another; and the listener comes late."""
    source, config = engine_source(folder)
    small = {"max_model_len": 1024, "num_gpu_blocks_override": BLOCKS[request.param]}
    options = {"kv_events_config": config, **small}
    with kit.run_engine(models(request.param), **options) as engine:
        engine.generate([kit.TINY.prompt(1, 100)], 2)
        listener = Listener(source)
        try:
            yield Beside(engine, listener, kit)
        finally:
            listener.close()


def test_the_index_says_what_the_engine_has(beside: Beside, kit: Any) -> None:
    engine = beside.engine
    assert beside.compare()  # of the prompt before the listener came
    evicted = hits = 0
    prompts = [kit.TINY.prompt(50 + i, length) for i, length in enumerate((700, 333, 64, 900))]
    for asked in [
        *prompts,
        *prompts,
        prompts[2],
        prompts[0][:320],
        prompts[0][:320] + prompts[1],
        prompts[1],
    ]:
        before = set(beside.compare())
        expected = beside.usable(asked)
        (output,) = engine.generate([asked], 5)
        assert output.cached == expected
        hits += expected > 0
        evicted += len(before - set(beside.compare()))
    assert evicted > 10
    assert hits >= 2
    assert beside.usable(prompts[1]) > 0
    assert engine.llm.reset_prefix_cache()
    engine.core.step_fn()  # events are published at a step
    assert beside.compare() == {}
    assert beside.usable(prompts[1]) == 0
    engine.generate([prompts[1]], 5)
    assert beside.compare()
    assert beside.usable(prompts[1]) == (333 - 1) // kit.BLOCK * kit.BLOCK
    assert beside.listener.feed.stats()["gaps"] == 0


def test_blocks_that_are_there_more_than_once(beside: Beside, kit: Any) -> None:
    """A prompt that ends with a block has that one computed each time, and kept each time."""
    asked = kit.TINY.prompt(70, 8 * kit.BLOCK)
    for _ in range(3):
        beside.engine.generate([asked], 3)
        beside.compare()
    assert max(max(group.values()) for group in copies(beside.engine).values()) == 3
    gone = 0
    for seed in range(80, 90):
        beside.engine.generate([kit.TINY.prompt(seed, 200)], 3)
        gone += not beside.compare().keys() >= set(chain(beside.engine, asked, kit.BLOCK))
    assert gone


# With sliding windows vLLM reports blocks too that the window no longer holds.
@pytest.mark.parametrize("beside", ["llama"], indirect=True)
def test_reports_of_reuse(beside: Beside, kit: Any) -> None:
    asked = TokensPrompt(prompt_token_ids=kit.TINY.prompt(71, 300))
    full = SamplingParams(max_tokens=3, temperature=0, extra_args={"kv_cache_report_mode": "full"})
    for _ in range(3):
        beside.engine.llm.generate([asked], full, use_tqdm=False)
        beside.compare()
    for seed in range(80, 83):
        beside.engine.generate([kit.TINY.prompt(seed, 900)], 3)
        beside.compare()


def test_hashes_as_bytes(
    kit: Any, llama: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    source, config = engine_source(folder)
    with kit.run_engine(llama, kv_events_config=config) as engine:
        listener = Listener(source)
        try:
            engine.generate([kit.TINY.prompt(1, 300)], 2)
            assert len(Beside(engine, listener, kit).compare()) == 300 // kit.BLOCK
        finally:
            listener.close()


# ---- vLLM's publisher by itself ------------------------------------------------------------------------


def stored(*hashes: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(hashes),
        parent_block_hash=1,
        token_ids=[1] * 16 * len(hashes),
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=list(hashes), medium="GPU")


class Publisher:
    def __init__(self, folder: Path, buffer_steps: int = 100) -> None:
        source, config = engine_source(folder)
        self.source = source
        self._publisher = ZmqEventPublisher(
            0, config.endpoint, config.replay_endpoint, buffer_steps, topic=config.topic
        )

    def publish(self, *events: Any) -> None:
        self._publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))

    def flush(self) -> None:
        """Wait until all of it was sent and is in the buffer: a thread of the publisher's does that."""
        self._publisher._event_queue.join()

    def close(self) -> None:
        self._publisher.shutdown()


def holds(listener: Listener, *hashes: int) -> None:
    keys = [bytes(8) + each.to_bytes(8, "big") for each in range(2000)]
    assert [short_hash(key) for key in keys] == [*range(2000)]
    expected = [int(each in hashes) for each in range(2000)]
    listener.until(
        lambda: not listener.feed.stats()["replaying"] and listener.blocks.masks(keys) == expected,
        f"{sorted(hashes)} are held",
    )


def test_a_late_listener_and_a_restart(folder: Path) -> None:
    first = Publisher(folder)
    first.publish(stored(1, 2), stored(3))
    first.publish(removed(2))
    listener = Listener(first.source)
    try:
        holds(listener, 1, 3)
        first.publish(AllBlocksCleared(), stored(4))
        holds(listener, 4)
        first.close()
        second = Publisher(folder)
        try:
            second.publish(stored(7))
            holds(listener, 7)
            assert listener.blocks.complete
        finally:
            second.close()
    finally:
        listener.close()


class Small(EngineFeed):
    """One whose sockets queue few messages."""

    HWM = 10
    REPLAY_SILENT_S = 0.3


def test_a_burst_that_the_queues_do_not_hold(folder: Path) -> None:
    """Nothing is read meanwhile: batches are dropped, and replayed afterwards, in several rounds."""
    publisher = Publisher(folder, buffer_steps=5000)
    listener = Listener(publisher.source, Small)
    try:
        for each in range(2000):
            publisher.publish(stored(each), *([removed(each - 3)] if each >= 3 else []))
        holds(listener, 1997, 1998, 1999)
        assert listener.blocks.complete
    finally:
        listener.close()
        publisher.close()


def test_a_buffer_that_is_too_short(folder: Path) -> None:
    publisher = Publisher(folder, buffer_steps=2)
    for each in range(10):
        publisher.publish(stored(each))
    publisher.flush()
    listener = Listener(publisher.source)
    try:
        holds(listener, 8, 9)
        assert not listener.blocks.complete
    finally:
        listener.close()
        publisher.close()
