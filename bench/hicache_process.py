"""One SGLang engine for `bench/hicache.py`, driven by JSON lines. Runs in the SGLang environment.

Started with `python -P`: beside it lie modules whose names SGLang uses. Its scheduler is a process of its own, as in a
server. Ends when its standard input does, so that it outlives nobody.

    in   {"prompt": [ids], "max_tokens": n}
    out  {"ready": true} once, then {"ttft_ms", "cached_tokens", "sources": {"device", "host", "storage"}, "tokens"}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    # The engine's processes print to standard output; the answers need one of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    try:
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(answer(engine, **json.loads(line))) + "\n")
    finally:
        engine.shutdown()


def answer(engine: Any, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    begun = time.monotonic()
    first, found = 0.0, {}
    for found in engine.generate(  # noqa: B007
        input_ids=prompt, sampling_params=sampling, stream=True
    ):
        first = first or time.monotonic()
    meta = found["meta_info"]
    return {
        "ttft_ms": 1000 * (first - begun),
        "cached_tokens": meta["cached_tokens"],
        "sources": meta.get("cached_tokens_details") or {},
        "tokens": found["output_ids"],
    }


if __name__ == "__main__":
    main()
