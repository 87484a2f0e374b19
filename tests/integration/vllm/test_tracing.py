"""A request's trace context reaches the daemons through a real engine: its lookups and pulls are in its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PULLING = {"pull_wait_s": 30.0, "prefill_tokens_per_s": 1e-3}


def ask(kit: Any, engine: Any, prompt: list[int], headers: dict[str, str] | None) -> int:
    """One request, as the engine's own server makes it of an HTTP request; tokens that were not computed."""
    llm = engine.llm.llm_engine
    params = kit.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    tokens = kit.TokensPrompt(prompt_token_ids=prompt)
    llm.add_request(f"request-{len(prompt)}", tokens, params, trace_headers=headers)
    cached = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            cached = output.num_cached_tokens or cached
    return cached


def leased_blocks(spans: list[dict[str, Any]]) -> list[int]:
    """Of each lookup."""
    return [one["attributes"]["kvpool.blocks"] for one in spans if one["name"] == "kvpool.acquire"]


def test_lookups_and_pulls_of_a_request_are_in_its_trace(
    kit: Any, llama: Path, tmp_path: Path
) -> None:
    traced, other = kit.prompts(21, (333, 300))
    with kit.run_cluster(tmp_path, 2, traced=True) as (a, b):
        with kit.run_engine(llama, a) as engine:
            engine.generate([traced, other])
            engine.drain()
            kit.until(a.settled, "the directory knows what the node holds")
        with kit.run_engine(llama, b, PULLING) as engine:
            assert ask(kit, engine, other, None) == kit.hit(len(other))
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
            assert ask(kit, engine, traced, headers) == kit.hit(len(traced))
            engine.drain()
        wanted = {"acquire", "pull", "lookup", "transfer", "lend"}
        names = {f"kvpool.{name}" for name in wanted}

        def came() -> list[dict[str, Any]]:
            """All spans, once the last one of the node is there: that of the lookup behind the pull."""
            spans: list[dict[str, Any]] = b.spans(TRACE)
            most = max(leased_blocks(spans), default=0)
            whole = names <= {one["name"] for one in spans} and most == len(traced) // kit.BLOCK
            return spans if whole else []

        found = kit.until(came, "all spans came")
        spans = {one["span"]: one for one in found}
        parents = {
            (one["name"], spans[one["parent"]]["name"] if one["parent"] in spans else one["parent"])
            for one in found
        }
    assert parents == {
        ("kvpool.acquire", CALLER),
        ("kvpool.pull", CALLER),
        ("kvpool.lookup", "kvpool.pull"),
        ("kvpool.transfer", "kvpool.pull"),
        ("kvpool.lend", "kvpool.transfer"),
    }
    assert max(leased_blocks(found)) == len(traced) // kit.BLOCK
