"""An engine whose core has a process of its own, reset and put to sleep right after its answers. Run by `test_resets.py`.

Arguments: the model's folder, the daemon's socket, prompts as JSON. A line of its output for each prompt, as JSON: what
was answered, and whether the reset that followed succeeded. Its last line has the answers after a sleep.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import conftest as kit  # type: ignore[import-not-found]

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def main() -> None:
    from vllm import LLM, SamplingParams

    model, socket, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(model=model, **kit.engine_options(socket))
    core = llm.llm_engine.engine_core
    for prompt in prompts:
        # The last step completes a block, whose save is under way when the answer is there.
        new = 2 * kit.BLOCK + 1 - len(prompt) % kit.BLOCK
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        asked = {"prompt_token_ids": prompt}
        (first,) = llm.generate([asked], params, use_tqdm=False)
        reset = llm.reset_prefix_cache(reset_connector=len(prompt) % 2 == 0)
        (again,) = llm.generate([asked], params, use_tqdm=False)
        core.sleep(1)
        asleep = core.is_sleeping()
        core.wake_up()
        (last,) = llm.generate([asked], params, use_tqdm=False)
        said = [list(output.outputs[0].token_ids) for output in (first, again, last)]
        cached = [output.num_cached_tokens for output in (first, again, last)]
        sys.stdout.write(
            json.dumps({"said": said, "cached": cached, "reset": reset, "asleep": asleep}) + "\n"
        )
    core.shutdown()


if __name__ == "__main__":
    main()
