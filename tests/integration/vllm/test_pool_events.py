"""The pool in an engine's KV events, as Dynamo's indexer reads them: beside what the pool says that it has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpool.client import Client, Presence
from kvpool.engine_plugins.vllm.plan import pack
from tests.support.servers.etcd import free_port

PATIENCE_MS = 180_000
MODEL = "tiny"
MEMORY = "8MiB"
"""64 blocks of the tiny model."""
SCRIPT = Path(__file__).with_name("dynamo_indexer.py")
OWN_NETWORK = ["unshare", "--user", "--map-root-user", "--net", "--kill-child", "--fork"]


class Indexer:
    """Dynamo's, in a process of its own."""

    def __init__(self) -> None:
        alone = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False)
        port = free_port()
        own = OWN_NETWORK if alone.returncode == 0 else []
        self._process = subprocess.Popen(
            [*own, sys.executable, str(SCRIPT), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, path: str, body: Any = None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([path, body]) + "\n")
        self._process.stdin.flush()
        status, answer = json.loads(self._process.stdout.readline())
        assert status < 300, answer
        return json.loads(answer)

    def follow(self, number: int, config: KVEventsConfig, block: int, kit: Any) -> None:
        """Read an engine's events; once they flow, what it has missed is repeated to it."""
        self.ask(
            "/register",
            {
                "instance_id": number,
                "endpoint": config.endpoint,
                "replay_endpoint": config.replay_endpoint,
                "model_name": MODEL,
                "block_size": block,
            },
        )
        kit.until(lambda: self._follows(number), "Dynamo follows the engine")

    def _follows(self, number: int) -> bool:
        (worker,) = [one for one in self.ask("/workers") if one["instance_id"] == number]
        return bool(worker["listeners"]["0"]["status"] == "active")

    def tokens(self, number: int, prompt: Sequence[int]) -> tuple[int, int, int]:
        """How much of a prompt there is: in the engine's own cache, down to memory, down to disks."""
        found = self.ask("/query", {"token_ids": list(prompt), "model_name": MODEL})
        one = found["instances"].get(str(number), {"gpu": 0, "cpu": 0, "disk": 0})
        return one["gpu"], one["cpu"], one["disk"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    one = Indexer()
    yield one
    one.close()


@pytest.fixture
def events(tmp_path_factory: pytest.TempPathFactory) -> KVEventsConfig:
    endpoint = f"ipc://{tmp_path_factory.mktemp('z') / 'e'}"
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=endpoint,
        replay_endpoint=f"{endpoint}.replay",
    )


class Pool:
    """What the pool says itself, to a client that is no engine."""

    def __init__(self, engine: Any, daemon: Any, kit: Any) -> None:
        self._engine, self._kit = engine, kit
        self._client = Client(daemon.socket, timeout_s=PATIENCE_MS / 1000)
        self._namespace = self._client.open(engine.connector._scheduler._namespace.record)
        self.hashes: dict[str, list[bytes]] = {}

    def learn(self, prompt: Sequence[int]) -> None:
        """The hashes of a prompt's blocks, by vLLM's own functions."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        config = self._engine.llm.llm_engine.vllm_config.cache_config
        hash_of = get_hash_fn_by_name(config.prefix_caching_hash_algo)
        chain: list[bytes] = []
        for at in range(0, len(prompt) - self._kit.BLOCK + 1, self._kit.BLOCK):
            parent = chain[-1] if chain else None
            tokens = prompt[at : at + self._kit.BLOCK]
            chain.append(bytes(hash_block_tokens(hash_of, parent, tokens)))
        self.hashes[str(prompt)] = chain

    def keys(self, prompt: Sequence[int]) -> bytes:
        return pack(self.hashes[str(prompt)])

    def tokens(self, prompt: Sequence[int]) -> tuple[int, int]:
        """How much of a prompt's beginning is in memory, and in memory and on disks."""
        keys = self.keys(prompt)
        nearest = [Presence.MEMORY] * (len(keys) // 16)
        for part in range(len(self._namespace.parts)):
            found = self._client.present(self._namespace, keys, part=part, wait_s=0.0)
            nearest = [min(one, Presence(at)) for one, at in zip(nearest, found, strict=True)]
        counts = []
        for least in (Presence.MEMORY, Presence.DISK):
            some = [at < least for at in nearest]
            counts.append(some.index(True) if True in some else len(some))
        return counts[0] * self._kit.BLOCK, counts[1] * self._kit.BLOCK

    def remove(self, prompt: Sequence[int], blocks: slice) -> int:
        gone = [one[-16:] for one in self.hashes[str(prompt)][blocks]]
        return self._client.remove(self._namespace, gone)

    def close(self) -> None:
        self._client.close()


def compute(engine: Any, prompts: list[list[int]]) -> None:
    """Have the pool hold prompts, and the engine's own cache nothing: Dynamo adds up what it has and what is below."""
    engine.generate(prompts, 2)
    engine.forget()


def agree(
    indexer: Indexer, number: int, engine: Any, pool: Pool, prompts: Sequence[list[int]], kit: Any
) -> list[tuple[int, int]]:
    """Wait until Dynamo says of each prompt what the pool says, and return that."""
    found: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []

    def same() -> bool:
        engine.core.step_fn()  # vLLM publishes at its steps
        found[:] = [pool.tokens(prompt) for prompt in prompts]
        told[:] = [indexer.tokens(number, prompt)[1:] for prompt in prompts]
        return told == found

    try:
        kit.until(same, "Dynamo's index and the pool agree")
    except AssertionError as error:
        error.add_note(f"Dynamo: {told}, the pool: {found}")
        raise
    return found


def test_dynamo_knows_what_the_pool_has(
    kit: Any,
    llama: Path,
    indexer: Indexer,
    events: KVEventsConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    asked = [kit.TINY.prompt(900 + at, length) for at, length in enumerate((704, 320, 640, 512))]
    extra = {"pool_events": True, "resave_s": 0.0}
    with (
        kit.run_daemon(folder, MEMORY) as daemon,
        kit.run_engine(llama, daemon, extra, kv_events_config=events) as engine,
    ):
        pool = Pool(engine, daemon, kit)
        for prompt in asked:
            pool.learn(prompt)
        indexer.follow(1, events, kit.BLOCK, kit)
        compute(engine, asked[:2])
        # Only the pool has them now, as its own cache is empty.
        assert agree(indexer, 1, engine, pool, asked, kit)[:2] == [(704, 704), (320, 320)]
        assert pool.remove(asked[0], slice(10, 12)) == 2
        assert agree(indexer, 1, engine, pool, asked[:1], kit) == [(320, 320)]
        # They come back by the engine's saves, and go by later ones.
        compute(engine, asked[:1])
        assert agree(indexer, 1, engine, pool, asked[:1], kit) == [(704, 704)]
        evicted = False
        for seed in range(920, 926):
            compute(engine, [kit.TINY.prompt(seed, 512)])
            evicted |= agree(indexer, 1, engine, pool, asked, kit)[0] != (704, 704)
        assert evicted
        compute(engine, asked[:1])
        assert agree(indexer, 1, engine, pool, asked, kit)[0][0] > 0
        pool.close()
        daemon.kill()
        kit.until(
            lambda: (
                engine.core.step_fn()
                and {indexer.tokens(1, prompt) for prompt in asked} == {(0, 0, 0)}
            ),
            "nothing of the pool is left",
        )


def test_blocks_on_disks_and_of_other_engines(
    kit: Any,
    llama: Path,
    indexer: Indexer,
    events: KVEventsConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    disk = folder / "disk"
    disk.mkdir()
    asked = [kit.TINY.prompt(950 + at, 512) for at in range(6)]
    more = ["--ssd", f"{disk}=64MiB", "--ssd-write", "through"]
    with kit.run_daemon(folder, MEMORY, more=more) as daemon:
        with kit.run_engine(llama, daemon) as engine:
            for prompt in asked:
                compute(engine, [prompt])
        with kit.run_engine(
            llama, daemon, {"pool_events": True}, kv_events_config=events
        ) as engine:
            pool = Pool(engine, daemon, kit)
            for prompt in asked:
                pool.learn(prompt)
            indexer.follow(2, events, kit.BLOCK, kit)
            assert indexer.tokens(2, asked[0]) == (0, 0, 0)
            # An engine knows the tokens of what it has met.
            compute(engine, asked)
            found = agree(indexer, 2, engine, pool, asked, kit)
            assert any(memory for memory, _ in found)
            assert any(below > memory for memory, below in found)
            pool.close()


def test_the_daemons_stream_is_of_vllms_form(
    kit: Any, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As vLLM's classes decode it; and blocks have the names of the engine's own events."""
    folder = tmp_path_factory.mktemp("d")
    endpoint = f"ipc://{folder}/e"
    settings = folder / "kvpool.toml"
    settings.write_text(
        f'[publish_events.one]\nmodel = "{llama}"\nendpoint = "{endpoint}"\ntopic = "t"\n'
    )
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    prompt = kit.TINY.prompt(980, 320)
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as stream,
        kit.run_daemon(folder, MEMORY, more=["--config", str(settings)]) as daemon,
        kit.run_engine(llama, daemon) as engine,
    ):
        stream.linger = 0
        stream.subscribe(b"t")
        stream.connect(endpoint)
        assert stream.poll(PATIENCE_MS)  # it is connected
        pool = Pool(engine, daemon, kit)
        pool.learn(prompt)
        compute(engine, [prompt])
        names = {maybe_convert_block_hash(name) for name in pool.hashes[str(prompt)]}
        known: set[int] = set()
        while known != names:
            assert stream.poll(PATIENCE_MS)
            topic, _, payload = stream.recv_multipart()
            assert topic == b"t"
            for event in decoder.decode(payload).events:
                if isinstance(event, BlockStored):
                    assert (event.medium, event.block_size) == ("CPU", kit.BLOCK)
                    known.update(event.block_hashes)
        pool.close()
