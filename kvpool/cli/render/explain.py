"""What `kvpool explain` asks of a router, and prints: why a request went where, and where one would go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from rich.markup import escape

from kvpool.cli.render.misses import lines_of, sentence
from kvpool.cli.render.text import make_console, make_table, size_text
from kvpool.errors import InvalidRequest
from kvpool.wire.answers import MissedBlock, Missing

if TYPE_CHECKING:
    from rich.console import Console

    from kvpool.router.client import RouterHttp

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


def the_model(router: RouterHttp) -> str:
    """The model that there is. Raises `InvalidRequest` unless there is one."""
    found = [str(row["id"]) for row in router.ask("/v1/models")["data"]]
    if len(found) != 1:
        raise InvalidRequest(f"name one with --model: the router has {', '.join(found) or 'none'}")
    return found[0]


def show_past(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what became of a request."""
    console = console or make_console()
    facts = {k: v for k, v in told.items() if k not in {"request", "outcome", "steps", "missing"}}
    console.print(f"request {told['request']}: {told['outcome']}", markup=False)
    console.print(", ".join(_words(facts)), markup=False)
    if (why := told.get("missing")) is not None:
        said = why.get("error") or sentence(msgspec.convert(why, MissedBlock), why["asked"])
        console.print(f"missed on {why['engine']}: {said}", markup=False)
    for step in told["steps"]:
        nested = {k: v for k, v in step.items() if isinstance(v, (list, dict))}
        plain = {k: v for k, v in step.items() if k not in {"at_s", "what", *nested}}
        console.print()
        text = f"{step['at_s']:9.3f} s  {step['what']}"
        console.print("  ".join([text, *_words(plain)]), markup=False)
        if nested.get("candidates"):
            _print_rows(nested["candidates"], _OUTLOOK, plain.get("engine"), console)
        if nested.get("decode_candidates"):
            _print_rows(nested["decode_candidates"], _DECODER, plain.get("decode"), console)


def show_possible(told: Mapping[str, Any], console: Console | None = None) -> None:
    """Print where a request would go."""
    console = console or make_console()
    shown = f"{told['prompt_tokens']:,} tokens of prompt, {told['prompt_blocks']:,} blocks"
    if "rejected" in told:
        why = told["rejected"]
        console.print(f"{shown}: would be refused, {why['code']}: {why['reason']}", markup=False)
        return
    console.print(f"{shown}: would go to {told['engine']}", markup=False)
    console.print()
    _print_rows(told["candidates"], _OUTLOOK, told["engine"], console)
    if told["decode_candidates"]:
        console.print()
        _print_rows(told["decode_candidates"], _DECODER, None, console)
    if (why := told.get("missing")) is not None:
        console.print()
        lines = [why["error"]] if "error" in why else _lines(told["engine"], why)
        for line in lines:
            console.print(line, markup=False)


def _lines(node: str, why: Mapping[str, Any]) -> Iterable[str]:
    return lines_of(node, msgspec.convert(why, Missing))


def _print_rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Mapping[str, str],
    chosen: str | None,
    console: Console,
) -> None:
    """Engines that might have had it; * is the one that was chosen."""
    table = make_table("", "  engine", *columns.values())
    for row in rows:
        mark = "*" if row["engine"] == chosen else " "
        cells = (escape(_text(name, row.get(name))) for name in columns)
        table.add_row(escape(f"{mark} {row['engine']}"), *cells)
    console.print(table)


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
