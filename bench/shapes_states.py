"""Part of `shapes.py`: how much less is stored of a model with linear attention than the states of all its blocks?

A tiny model of gated delta nets, of which each fourth layer attends, in real vLLM on the CPU; one prompt of 32,768 tokens.

`kept`: vLLM as it is by default, with steps of 8,192 tokens. `all`: with steps of one block and each block's state kept.
`loaded`: a fresh engine with the first one's prompt; its tokens must be the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engines import ENVIRONMENT, kvpool_transfer, tiny_model
from tiny_models import prompt

from kvpool.client import Client

if TYPE_CHECKING:
    from harness import Daemon, Report

TOKENS, NEW_TOKENS = 32768, 8
BLOCK, STEP = 128, 8192
KV_BYTES = 384 << 20


def hybrid(report: Report, client: Client, running: Daemon) -> None:
    kept, answer = stored(client, running, 1, STEP)
    every, _ = stored(client, running, 2, BLOCK, prefix_cache_retention_interval=BLOCK)
    blocks = TOKENS // BLOCK
    for name, (nbytes, parts) in (("kept", kept), ("all", every)):
        report.row(f"hybrid {name}", mib=nbytes / (1 << 20), states=(parts - blocks) / 3)
    with engine(running, STEP) as ask:
        tokens, cached = ask(prompt(1, TOKENS))
    report.row("hybrid loaded", cached_tokens=cached, same_tokens=tokens == answer)
    report.check("hybrid_bytes_vs_all_states", kept[0] / every[0], at_most=0.3)


def stored(
    client: Client, running: Daemon, seed: int, step: int, **options: Any
) -> tuple[tuple[int, int], list[int]]:
    """What an engine stores of a prompt: bytes and parts of blocks; and its answer."""
    before = client.stats().counters
    with engine(running, step, **options) as ask:
        tokens, _ = ask(prompt(seed, TOKENS))
    after = client.stats().counters
    return (
        after.committed_bytes - before.committed_bytes,
        after.committed - before.committed,
    ), tokens


@contextmanager
def engine(running: Daemon, step: int, **options: Any) -> Iterator[Any]:
    """A function that answers a prompt: its tokens, and how many of the prompt's were loaded. Saves have ended then."""
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        model=str(tiny_model("qwen-next")),
        dtype="bfloat16",  # its kernels for CPUs know no other
        block_size=32,  # at least: a block is as large as a state
        enforce_eager=True,
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=TOKENS + BLOCK,
        max_num_batched_tokens=step,
        max_num_seqs=1,
        seed=0,
        kv_transfer_config=KVTransferConfig(
            **kvpool_transfer(running.socket, lookup_timeout_s=5.0)
        ),
        **options,
    )
    core = llm.llm_engine.engine_core

    def ask(tokens: list[int]) -> tuple[list[int], int]:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], sampling, use_tqdm=False)
        while core.engine_core.scheduler.connector.has_pending_push_work():
            llm.llm_engine.step()
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    try:
        yield ask
    finally:
        core.shutdown()
        cleanup_dist_env_and_memory()
