"""An SGLang engine on the CPU, driven by lines of JSON: `engine_process.py ENGINE-ARGUMENTS`.

A program of its own: an engine starts processes that import the main module, and its logs are not ours. Reads
requests from standard input, one a line, and writes one answer to each; the first line says that it runs.

    {"prompt": [token, ...], "new": 16, "more": {...}}  ->  {"tokens": [...], "cached": 0, "storage": 0}
    {"flush": true}                                     ->  {}       forgets its own caches, host memory included
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

FLUSH_S = 60.0


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if "flush" in request:
        # Once it is idle: while a request is being finished or stored it would refuse, and go on with what it has.
        flushing = engine.tokenizer_manager.flush_cache(timeout_s=FLUSH_S)
        flushed = engine.loop.run_until_complete(flushing)
        assert flushed.success, flushed.message
        return {}
    found = engine.generate(
        input_ids=[request["prompt"]],
        sampling_params={
            "temperature": 0,
            "max_new_tokens": request["new"],
            "ignore_eos": True,
        },
        **request.get("more", {}),
    )[0]
    meta = found["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    return {
        "tokens": found["output_ids"],
        "cached": meta["cached_tokens"],
        "storage": details.get("storage", 0),
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SGLang prints

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    try:
        say({"runs": True})
        for line in sys.stdin:
            say(answer(engine, json.loads(line)))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
