"""vLLM's own Mooncake connector, as it is, over the pool: what one engine stores a fresh one loads."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.engine_plugins.vllm import register

Oracle = Callable[..., list[list[int]]]


@pytest.fixture(name="transfer")
def over_the_pool(tmp_path: Path, daemon: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's configuration, with its module in place as a plugin of vLLM's puts it there."""
    from vllm.config import KVTransferConfig

    config = tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "mode": "standalone-store",
                "protocol": "tcp",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": "nobody:1",
                "global_segment_size": 0,
                "local_buffer_size": 1 << 20,
            }
        )
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(config))
    monkeypatch.setenv("KVPOOL_SOCKET", daemon.socket)
    monkeypatch.setenv("KVPOOL_MOONCAKE", "1")
    register()
    yield KVTransferConfig(
        kv_connector="MooncakeStoreConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    gc.collect()  # the connector leaves its sockets to be closed so, with a warning each
    del sys.modules["mooncake.store"]
    del sys.modules["mooncake"].store


def test_a_fresh_engine_loads_what_another_stored(
    kit: Any, llama: Path, daemon: Any, oracle: Oracle, transfer: Any
) -> None:
    asked = kit.prompts(61)
    expected = oracle("llama", asked)
    before = daemon.counters().committed
    with kit.run_engine(llama, kv_transfer_config=transfer) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert [output.cached for output in outputs] == [0, 0, 0]
        blocks = sum(len(each) // kit.BLOCK for each in asked)
        kit.until(lambda: daemon.counters().committed >= before + blocks, "all blocks are stored")
    stored = daemon.counters().committed
    with kit.run_engine(llama, kv_transfer_config=transfer) as engine:
        outputs = engine.generate(asked)
        assert [output.tokens for output in outputs] == expected
        assert all(
            output.cached >= (len(each) - 1) // kit.BLOCK * kit.BLOCK
            for output, each in zip(outputs, asked, strict=True)
        )
    assert daemon.counters().leased_blocks > 0
    assert stored > before
