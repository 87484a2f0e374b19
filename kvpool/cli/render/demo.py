"""What `kvpool demo` prints."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from kvpool.cli.render.text import Parts, rows_table
from kvpool.demo.engine import PREFILL_TOKENS_PER_S
from kvpool.demo.play import Round


def rounds_view(rounds: Sequence[Round]) -> Parts:
    """Yield the table of the rounds, what it says in one sentence, and what to do next."""
    yield ""
    yield rows_table(
        "Where KV blocks came from, in tokens",
        rounds,
        {
            "blocks": "name",
            ">first token": lambda row: f"{mean(row.first_token_s) * 1000:,.0f} ms",
            ">computed": lambda row: f"{row.computed:,}",
            ">own cache": lambda row: f"{row.from_own_cache:,}",
            ">pool": lambda row: f"{row.from_pool:,}",
        },
    )
    computed, pool, *_ = (mean(row.first_token_s) for row in rounds)
    yield ""
    yield (
        f"{computed / pool:.0f} times faster than computing: engine 2 answered with blocks that engine 1 "
        "had computed, read through shared memory and compared byte by byte."
    )
    yield (
        f"The engines only simulate computing, at {PREFILL_TOKENS_PER_S:,.0f} tokens a second; the daemon, the router "
        "and the blocks are real."
    )
    yield "Next: `make demo` does the same with vLLM, and docs/quickstart.md sets up your own."
