"""From prefill to decode: how long after a prompt is computed on one node does another node's engine answer?

Two real vLLM processes on the CPU, each with a daemon of its own, and between the daemons a link of
`LINK_BYTES_S` (a proxy), beside which a prompt's KV is not small. One engine computes a prompt in chunks of
`STEP_TOKENS`, whose blocks it commits step by step. The other one gets the same prompt

    pull     when it is computed: all blocks come then
    follow   when it begins to be: blocks come as they are committed, in the end the last chunk's

in turns, each time another prompt. Quoted is the time from the first engine's first token to the second one's.
Then the first engine is killed in the middle of a prompt that the second one follows: what was committed is
not computed again.

    .venv/bin/python bench/handover.py [--quick] [--json FILE]      (--quick ends within 180 s)

Checks: handover_follow_vs_pull; resumed_share, of the committed tokens that were not computed again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from engines import (
    BLOCK_TOKENS,
    PARTS,
    Answer,
    Broken,
    EngineProcess,
    end_on_sigterm,
    kvpool_transfer,
    tiny_model,
)
from harness import Daemon, Report, daemon, median, parse_arguments
from tiny_models import prompt

from kvpool.client import Client
from tests.support.proxy import Fault, Proxy

PROMPT_TOKENS, STEP_TOKENS, NEW_TOKENS = 3840, 256, 8
TOKEN_BYTES = 2048
"""KV of a token of the tiny model: 4 layers, keys and values, 2 heads, 64 elements of two bytes."""
LINK_BYTES_S = 40e6
ROUNDS, ROUNDS_QUICK = 8, 4
SPIN_S = 1.2
"""A vLLM worker spins for a second after its last step, on the core that the others need too."""
FOLLOW_S = 30.0
KILLED_FOLLOW_S = 3.0
WARM_SEED = 1000
POLL_S = 0.002
WAIT_S = 60.0


def main() -> int:
    report, _ = parse_arguments(__doc__ or "")
    end_on_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
            run(report, Path(folder))
    except Broken as error:
        print(f"bench failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return report.finish()


def run(report: Report, folder: Path) -> None:
    with ExitStack() as stack:
        memory = "512MiB"
        a = stack.enter_context(daemon(folder, "a", memory, "--listen", "tcp://127.0.0.1:0"))
        there = urlsplit(a.url)
        link = stack.enter_context(Proxy((there.hostname or "", there.port or 0)))
        link.set(Fault(bytes_s=LINK_BYTES_S))
        b = stack.enter_context(daemon(folder, "b", memory, "--peer", link.url))
        cores = sorted(os.sched_getaffinity(0))
        prefill, decode = (
            stack.enter_context(
                EngineProcess(
                    name,
                    tiny_model(),
                    folder,
                    kvpool_transfer(node.socket, pull_wait_s=10.0),
                    step_tokens=STEP_TOKENS,
                    # An engine that waits for a prompt spins, as any vLLM does that has work.
                    VLLM_CPU_OMP_THREADS_BIND=str(core),
                )
            )
            for name, node, core in (("prefill", a, cores[0]), ("decode", b, cores[-1]))
        )
        for engine in (prefill, decode):
            engine.wait_ready()
        for number, engine in enumerate((prefill, decode)):
            engine.ask(prompt(WARM_SEED + number, PROMPT_TOKENS), NEW_TOKENS)
        hand_over(report, prefill, decode)
        resume(report, a, prefill, decode)
        decode.finish()


def hand_over(report: Report, prefill: EngineProcess, decode: EngineProcess) -> None:
    taken: dict[str, list[float]] = {"pull": [], "follow": []}
    found: dict[str, list[int]] = {"pull": [], "follow": []}
    for number in range(2 * (ROUNDS_QUICK if report.quick else ROUNDS)):
        how = ("pull", "follow", "follow", "pull")[number % 4]
        asked = prompt(number, PROMPT_TOKENS)
        time.sleep(SPIN_S)
        prefill.begin(asked, NEW_TOKENS)
        if how == "follow":
            decode.begin(asked, NEW_TOKENS, {"kvpool": {"follow_s": FOLLOW_S}})
            computed = prefill.answer()
        else:
            computed = prefill.answer()
            decode.begin(asked, NEW_TOKENS)
        answered = decode.answer()
        # Computed like the other one's: from the same blocks, but its own. In chunks, the last bits differ.
        expected = prefill.ask(asked, NEW_TOKENS)
        if answered.tokens != expected.tokens or not loaded(expected):
            raise Broken(f"{how}: {answered} instead of {expected}")
        taken[how].append(1000 * (answered.first_at - computed.first_at))
        # Whoever does not follow finds what was committed when it was asked: the last chunk may not have been.
        found[how].append(answered.cached_tokens)
        if how == "follow" and not loaded(answered):
            raise Broken(f"followed and not there: {answered}")
    chunk_ms = 1000 * STEP_TOKENS * TOKEN_BYTES / LINK_BYTES_S
    report.row(
        "the link, ms",
        whole_prompt=chunk_ms * PROMPT_TOKENS / STEP_TOKENS,
        last_chunk=chunk_ms,
    )
    for how, times in taken.items():
        spread = {"median": median(times), "least": min(times), "most": max(times)}
        report.row(f"{how}, ms", **spread, cached_tokens=median(found[how]))
    ratio = median(taken["follow"]) / median(taken["pull"])
    report.check("handover_follow_vs_pull", ratio, at_most=0.5)


def loaded(answer: Answer) -> bool:
    """Whether all that could be loaded was."""
    return answer.cached_tokens >= (PROMPT_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def resume(report: Report, a: Daemon, prefill: EngineProcess, decode: EngineProcess) -> None:
    """The first engine dies in the middle; the second one goes on from what was committed."""
    asked = prompt(WARM_SEED + 2, PROMPT_TOKENS)
    time.sleep(SPIN_S)
    with Client(a.socket, connect=True) as client:

        def committed() -> int:
            return int(client.stats().counters.committed) // PARTS

        before = committed()
        prefill.begin(asked, NEW_TOKENS)
        decode.begin(asked, NEW_TOKENS, {"kvpool": {"follow_s": KILLED_FOLLOW_S}})
        half = before + PROMPT_TOKENS // BLOCK_TOKENS // 2
        ends = time.monotonic() + WAIT_S
        while committed() < half:
            if time.monotonic() > ends:
                raise Broken("the prompt is not being computed")
            time.sleep(POLL_S)
        prefill.kill()
        tokens = (committed() - before) * BLOCK_TOKENS
    answered = decode.answer()
    report.row(
        "prefill killed",
        prompt_tokens=PROMPT_TOKENS,
        committed_tokens=tokens,
        not_computed_again=answered.cached_tokens,
    )
    report.check("resumed_share", answered.cached_tokens / tokens, at_least=1.0)


if __name__ == "__main__":
    sys.exit(main())
