"""One vLLM engine for demo and benches, driven by JSON lines. Runs in the vLLM environment.

`engines.EngineProcess` starts it. The engine core is a process of its own, as in a server: inside one
process it would spin on the interpreter lock while a load runs. Ends when its standard input does, so
that it outlives nobody.

    in   {"prompt": [ids], "max_tokens": n, "params": kv_transfer_params or null}, or
         {"prompts": [[ids], ...], "max_tokens": n}: all at once
    out  {"ready": {what the engine chose}} once, then {"ttft_ms", "total_ms", "cached_tokens", "tokens", "first_at"}
         for each prompt; first_at: when its first token came, in seconds of the machine's monotonic clock;
         {"total_ms"} for prompts at once
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    settings = json.loads(sys.argv[1])
    # The engine's processes print to standard output; the answers need one of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    asyncio.run(serve(settings, answers))


async def serve(settings: dict[str, Any], answers: TextIO) -> None:
    from vllm import SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = settings.get("transfer")
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **settings["engine"],
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        )
    )
    numbers = itertools.count()

    async def answer(prompt: list[int], max_tokens: int, params: Any = None) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        asked = TokensPrompt(prompt_token_ids=prompt)
        first = None
        begun = time.monotonic()
        output: Any = None
        async for output in engine.generate(asked, sampling, str(next(numbers))):  # noqa: B007
            first = first or time.monotonic()
        ended = time.monotonic()
        return {
            "ttft_ms": 1000 * ((first or ended) - begun),
            "total_ms": 1000 * (ended - begun),
            "cached_tokens": output.num_cached_tokens,
            "tokens": list(output.outputs[0].token_ids),
            "first_at": first or ended,
        }

    try:
        print(json.dumps({"ready": chosen(engine.vllm_config)}), file=answers)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            said: dict[str, Any]
            if "prompts" in asked:
                begun = time.monotonic()
                await asyncio.gather(
                    *(answer(one, asked["max_tokens"]) for one in asked["prompts"])
                )
                said = {"total_ms": 1000 * (time.monotonic() - begun)}
            else:
                said = await answer(asked["prompt"], asked["max_tokens"], asked["params"])
            print(json.dumps(said), file=answers)
    finally:
        engine.shutdown()


def chosen(config: Any) -> dict[str, Any]:
    """What vLLM made of its defaults: how it computes."""
    return {
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "second_model_runner": bool(config.use_v2_model_runner),
        "cuda_graphs": str(config.compilation_config.cudagraph_mode),
    }


if __name__ == "__main__":
    main()
