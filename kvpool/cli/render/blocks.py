"""The output of `kvpool blocks lookup` and `kvpool blocks list`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from kvpool.cli.render.jobs import Asks, holders, nodes_of
from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    count,
    duration,
    make_console,
    make_table,
    size_text,
)
from kvpool.errors import InvalidRequest
from kvpool.wire import operator as operator_wire

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PAGE = 1000  # blocks in one answer


def show_prefixes(
    found: Mapping[str, tuple[int, int]], keys: int, console: Console | None = None
) -> None:
    """Print what `Client.prefixes` gives for so many keys, the longest prefix first."""
    console = console or make_console()
    if not found:
        console.print(f"no node has the first of {count(keys, 'block')}")
        return
    table = make_table("", "node", ">in memory", ">with disks", ">of")
    rows = sorted(found.items(), key=lambda row: (-row[1][1], -row[1][0], row[0]))
    for node, (memory, both) in rows:
        table.add_row(escape(node), f"{memory:,}", f"{both:,}", f"{keys:,}")
    console.print(table)


def check_open(client: Asks, node: str, tenant: str, digest: str) -> None:
    """Raises `InvalidRequest`, which names the nodes that have the namespace, where this one does not. node: empty for
    the one that is asked."""
    own = client.inspect(node)
    if tenant not in own.tenants or digest in own.tenants[tenant].namespaces:
        return
    having, _ = holders(client, nodes_of(client.ask_node(operator_wire.Cluster())), tenant, digest)
    raise InvalidRequest(
        f"node {own.node} has nothing of namespace {digest}; these have it: "
        f"{', '.join(having) or 'none that answers'} (--node NAME)"
    )


def list_some(
    client: Asks, node: str, tier: str, digest: bytes, cursor: str, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Up to so many blocks from a cursor on, and where the next ones begin; None: nowhere."""
    found: list[dict[str, Any]] = []
    after: str | None = cursor
    while after is not None and len(found) < limit:
        message = operator_wire.ListBlocks(tier, after, min(PAGE, limit - len(found)), digest)
        page = client.ask_node(message, node=node)
        found += page["blocks"]
        after = page["cursor"]
    return found, after


def show_blocks(
    found: Sequence[Mapping[str, Any]],
    after: str | None,
    console: Console | None = None,
    *,
    of_one: bool = False,
) -> None:
    """Print blocks, and how to get the next ones. of_one: all are of one namespace, which is known."""
    console = console or make_console()
    if found:
        for namespace, some in groupby(found, lambda block: block["namespace"]):
            title = "" if of_one else f"namespace {namespace[:DIGEST_SHOWN]}"
            console.print(_table(title, some))
    else:
        console.print("no blocks here")
    if after is not None:
        console.print(f"there is more: --cursor {after}", markup=False)


def _table(title: str, some: Iterable[Mapping[str, Any]]) -> Table:
    """Of one namespace; its name in a column would take 80 columns too many."""
    table = make_table(title, "key", ">depth", ">parts", ">bytes", ">unused", "")
    for block in some:
        table.add_row(
            block["key"],
            f"{block['depth']:,}",
            str(block["parts"]),
            size_text(block["bytes"]),
            duration(block["age_s"]),
            _remarks(block),
        )
    for column in table.columns:
        column.no_wrap = column.header != ""
        column.overflow = "fold"
    return table


def _remarks(block: Mapping[str, Any]) -> str:
    words = (("copy", "a copy"), ("reused", "read again"))
    pin = [] if block["pin"] == "none" else [f"pin {block['pin']}"]
    return ", ".join([*pin, *(text for name, text in words if block[name])])
