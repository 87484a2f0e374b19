"""What `kvpool explain` prints: why a request went where, and where one would go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from rich.markup import escape
from rich.text import Text

from kvpool.cli.render.misses import sentence, why_view
from kvpool.cli.render.text import Part, Parts, make_table, size_text
from kvpool.wire.answers import MissedBlock, Missing

_OUTLOOK = {
    "cached_blocks": ">cached",
    "loaded_blocks": ">loaded",
    "pulled_blocks": ">pulled",
    "source": "from",
    "link": "by a link",
    "starts_s": ">starts",
    "prefill_s": ">prefill",
    "ttft_s": ">first token",
    "cost": ">cost",
}
_DECODER = {
    "tpot_s": ">a token",
    "lacks_blocks": ">lacks",
    "handover_s": ">handover",
    "link": "by a link",
    "cost": ">cost",
}


def past_view(told: Mapping[str, Any]) -> Parts:
    """What became of a request."""
    facts = {k: v for k, v in told.items() if k not in {"request", "outcome", "steps", "missing"}}
    yield Text(f"request {told['request']}: {told['outcome']}")
    yield Text(", ".join(_words(facts)))
    if (why := told.get("missing")) is not None:
        said = why.get("error") or sentence(msgspec.convert(why, MissedBlock), why["asked"])
        yield Text(f"missed on {why['engine']}: {said}")
    for step in told["steps"]:
        nested = {k: v for k, v in step.items() if isinstance(v, (list, dict))}
        plain = {k: v for k, v in step.items() if k not in {"at_s", "what", *nested}}
        yield Text()
        text = f"{step['at_s']:9.3f} s  {step['what']}"
        yield Text("  ".join([text, *_words(plain)]))
        if nested.get("candidates"):
            yield _engines(nested["candidates"], _OUTLOOK, plain.get("engine"))
        if nested.get("decode_candidates"):
            yield _engines(nested["decode_candidates"], _DECODER, plain.get("decode"))


def possible_view(told: Mapping[str, Any]) -> Parts:
    """Where a request would go."""
    shown = f"{told['prompt_tokens']:,} tokens of prompt, {told['prompt_blocks']:,} blocks"
    if "rejected" in told:
        why = told["rejected"]
        yield Text(f"{shown}: would be refused, {why['code']}: {why['reason']}")
        return
    yield Text(f"{shown}: would go to {told['engine']}")
    yield Text()
    yield _engines(told["candidates"], _OUTLOOK, told["engine"])
    if told["decode_candidates"]:
        yield Text()
        yield _engines(told["decode_candidates"], _DECODER, None)
    if (why := told.get("missing")) is not None:
        yield Text()
        if "error" in why:
            yield Text(why["error"])
        else:
            yield from why_view({told["engine"]: msgspec.convert(why, Missing)})


def _engines(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], chosen: str | None
) -> Part:
    """Engines that might have had it; * is the one that was chosen."""
    table = make_table("", "  engine", *columns.values())
    for row in rows:
        mark = "*" if row["engine"] == chosen else " "
        cells = (escape(_text(name, row.get(name))) for name in columns)
        table.add_row(escape(f"{mark} {row['engine']}"), *cells)
    return table


def _words(facts: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_text(name, value)}" for name, value in facts.items()]


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f} s" if name.endswith("_s") else f"{value:.3f}"
    if name == "link":
        return f"{size_text(value['bytes_s'])}/s, {value['known']}"
    return str(value)
