"""An engine under load in a process of its own, whose weights are changed by commands. Run by `test_weights.py`.

Arguments: the model's folder, the daemon's socket, prompts as JSON. It answers them one after the other, again and again,
each time from the pool alone. Lines of its output, as JSON: what it answered, and under which weights. A line of its input
is a folder with weights to change to; an empty line ends it.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import conftest as kit  # type: ignore[import-not-found]


def main() -> None:
    model, socket, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.strip())

    threading.Thread(target=read, daemon=True).start()
    weights = model
    with kit.run_engine(Path(model), socket, {"prefill_tokens_per_s": 1e-3}) as engine:
        for number in cycle(range(len(prompts))):
            if not lines.empty():
                weights = lines.get()
                if not weights:
                    return
                # As a training loop does.
                engine.drain()
                core = engine.llm.llm_engine.engine_core
                core.sleep(0)
                assert engine.llm.reset_prefix_cache(reset_connector=True)
                engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
                core.wake_up(["scheduling"])
            (output,) = engine.generate([prompts[number]], 8)
            said = {"weights": weights, "prompt": number, "cached": output.cached}
            said |= {"tokens": output.tokens, "shut_out": engine.metric("shut_out")}
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
            engine.forget()


if __name__ == "__main__":
    main()
