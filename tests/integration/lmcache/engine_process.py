"""A vLLM engine on the CPU, for one test: computes prompts, says their tokens, ends.

Arguments: a JSON object with `model` (a folder), `prompts` (token ids), `server` (the address of an LMCache server,
or null for an engine alone). Says a JSON list of [tokens, cached tokens], one a prompt, as its last line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any
from urllib.parse import urlsplit

BLOCK = 32
NEW = 24

os.environ.update(
    HF_HUB_OFFLINE="1",
    LMCACHE_TRACK_USAGE="false",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0|1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
)


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])

    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig
    from vllm.triton_utils import dispatcher

    # It looks for kernels in all attributes of all modules, and an attribute of cffi's libraries, which LMCache
    # loads, raises there.
    dispatcher.vars = lambda value: value.__dict__ if hasattr(value.__dict__, "get") else {}
    transfer = None
    if asked["server"] is not None:
        at = urlsplit(asked["server"])
        transfer = KVTransferConfig(
            kv_connector="LMCacheMPConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "lmcache.mp.host": f"{at.scheme}://{at.hostname}",
                "lmcache.mp.port": at.port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        )
    engine = LLM(
        model=asked["model"],
        enforce_eager=True,
        max_model_len=2048,
        block_size=BLOCK,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        kv_transfer_config=transfer,
    )
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in asked["prompts"]],
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        use_tqdm=False,
    )
    found = [[list(output.outputs[0].token_ids), output.num_cached_tokens] for output in outputs]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
