"""An engine whose two ranks have a daemon each, as on two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NEW = 6
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_each_rank_at_its_own_daemon(kit: Any, llama: Path, tmp_path: Path) -> None:
    asked = kit.prompts(7, [700, 100])
    hits = [kit.hit(len(each)) for each in asked]
    socket = str(tmp_path / "{rank}.sock")
    folders = [tmp_path / name for name in "ab"]
    blocks = sum((len(each) + NEW - 1) // kit.BLOCK for each in asked)
    with (
        kit.run_daemon(folders[0], socket=socket.format(rank=0)) as a,
        kit.run_daemon(folders[1], socket=socket.format(rank=1)) as b,
        kit.run_engine(llama, socket, **TWO) as engine,
    ):
        outputs = engine.generate(asked, NEW)
        expected = [output.tokens for output in outputs]
        assert [output.cached for output in outputs] == [0, 0]
        engine.assert_nothing_held(a)
        engine.assert_nothing_held(b)
        # Each rank's shard is at its own node, and nowhere else.
        assert a.counters().committed == b.counters().committed == blocks
        engine.forget()
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == hits
        assert engine.metric("loads") == 2 * len(asked)
        assert engine.metric("failed_loads") == 0
        engine.assert_nothing_held(a)
        engine.assert_nothing_held(b)
        # One rank's blocks are lost: a miss for all, which is computed, and answered.
        engine.forget()
        namespace = engine.namespace
        lost = keys_of(engine, asked[0])[10 * 16 :]
        assert b.client.remove(b.client.open(namespace.record), lost) > 0
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [10 * kit.BLOCK, hits[1]]
        engine.drain()
        # And when its daemon is lost.
        engine.forget()
        b.kill()
        outputs = engine.generate(asked, NEW)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [0, 0]
        engine.assert_nothing_held(a)


def keys_of(engine: Any, prompt: list[int]) -> bytes:
    """Packed keys of a prompt's blocks, as the engine names them."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    hasher = engine.core.request_block_hasher
    request = Request("keys", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return b"".join(each[-16:] for each in request.block_hashes)
