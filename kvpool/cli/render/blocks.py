"""The output of `kvpool blocks lookup` and `kvpool blocks list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.text import Text

from kvpool.cli.render.text import DIGEST_SHOWN, Column, Parts, count, rows_table
from kvpool.wire.answers import Block, columns_of


def prefixes_view(found: Mapping[str, tuple[int, int]], keys: int) -> Parts:
    """What `Client.routing.prefixes` gives for this number of keys, the longest prefix first."""
    if not found:
        yield Text(f"no node has the first of {count(keys, 'block')}")
        return
    rows = sorted(found.items(), key=lambda row: (-row[1][1], -row[1][0], row[0]))
    some = [
        {"node": node, "memory": memory, "both": both, "of": keys} for node, (memory, both) in rows
    ]
    columns = {"node": "node", "in memory": "memory", "with disks": "both", "of": "of"}
    yield rows_table("", some, columns)


def blocks_view(found: Sequence[Block], after: str | None, *, of_one: bool = False) -> Parts:
    """Blocks, and how to get the next ones. of_one: all are of one namespace, which is known."""
    # The name of a namespace in a column would take 80 columns too many.
    for namespace, some in groupby(found, lambda block: block.namespace):
        title = "" if of_one else f"namespace {namespace[:DIGEST_SHOWN]}"
        columns: dict[str, Column] = {**columns_of(Block), "": _remarks}
        yield rows_table(title, some, columns, wraps=[""])
    if not found:
        yield Text("no blocks here")
    if after is not None:
        yield Text(f"there is more: --cursor {after}")


def _remarks(block: Block) -> str:
    pin = [] if block.pin == "none" else [f"pin {block.pin}"]
    words = ((block.copy, "a copy"), (block.reused, "read again"))
    return ", ".join([*pin, *(text for so, text in words if so)])
