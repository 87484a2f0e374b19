"""vLLM's own Mooncake connector, as it is, over the pool: what one engine stores a fresh one loads.

Its engines are in processes of their own, where vLLM loads the plugin by its entry point: the connector leaves threads
and sockets that only end with their process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

Oracle = Callable[..., list[list[int]]]

ENGINE = """
import json, os, sys
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
given = json.loads(sys.argv[1])
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
transfer = KVTransferConfig(
    kv_connector="MooncakeStoreConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
)
llm = LLM(**given["engine"], kv_transfer_config=transfer)
outputs = llm.generate(
    [TokensPrompt(prompt_token_ids=each) for each in given["asked"]],
    SamplingParams(max_tokens=given["new"], temperature=0, ignore_eos=True),
    use_tqdm=False,
)
print(json.dumps([[list(o.outputs[0].token_ids), o.num_cached_tokens] for o in outputs]), file=answers)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture(name="environment")
def over_the_pool(tmp_path: Path, daemon: Any) -> dict[str, str]:
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
    return {
        **os.environ,
        "KVPOOL_MOONCAKE": "1",
        "KVPOOL_SOCKET": daemon.socket,
        "MOONCAKE_CONFIG_PATH": str(config),
    }


@contextmanager
def answers(
    kit: Any, model: Path, environment: dict[str, str], asked: list[list[int]], log: Path
) -> Iterator[list[tuple[list[int], int]]]:
    """Of a fresh engine, which lives until the end: tokens, and how many of the prompt's were cached."""
    engine = {
        "model": str(model),
        "dtype": "float32",
        "block_size": kit.BLOCK,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 128 << 20,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "seed": 0,
    }
    given = json.dumps({"engine": engine, "asked": asked, "new": kit.NEW})
    with (
        log.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, given],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            pytest.fail(log.read_text()[-4000:])
        yield [(tokens, cached) for tokens, cached in json.loads(line)]
        process.communicate()


def test_a_fresh_engine_loads_what_another_stored(
    kit: Any, llama: Path, daemon: Any, oracle: Oracle, environment: dict[str, str], tmp_path: Path
) -> None:
    asked = kit.prompts(61)
    expected = oracle("llama", asked)
    before = daemon.counters().committed
    with answers(kit, llama, environment, asked, tmp_path / "log") as found:
        assert [tokens for tokens, _ in found] == expected
        assert [cached for _, cached in found] == [0, 0, 0]
        blocks = sum(len(each) // kit.BLOCK for each in asked)
        kit.until(lambda: daemon.counters().committed >= before + blocks, "all blocks are stored")
    with answers(kit, llama, environment, asked, tmp_path / "log") as found:
        assert [tokens for tokens, _ in found] == expected
        for (_, cached), each in zip(found, asked, strict=True):
            assert cached >= (len(each) - 1) // kit.BLOCK * kit.BLOCK
    assert daemon.counters().leased_blocks > 0
