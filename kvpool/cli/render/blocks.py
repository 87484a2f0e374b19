"""The output of `kvpool blocks lookup` and `kvpool blocks list`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.text import Text

from kvpool.cli.asking import holders, nodes_of
from kvpool.cli.render.text import DIGEST_SHOWN, Column, Parts, count, rows_table
from kvpool.client.operator import OperatorRequests
from kvpool.errors import InvalidRequest
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Block, columns_of

PAGE = 1000  # blocks in one answer


def prefixes_view(found: Mapping[str, tuple[int, int]], keys: int) -> Parts:
    """What `Client.prefixes` gives for this number of keys, the longest prefix first."""
    if not found:
        yield Text(f"no node has the first of {count(keys, 'block')}")
        return
    rows = sorted(found.items(), key=lambda row: (-row[1][1], -row[1][0], row[0]))
    some = [
        {"node": node, "memory": memory, "both": both, "of": keys} for node, (memory, both) in rows
    ]
    columns = {"node": "node", "in memory": "memory", "with disks": "both", "of": "of"}
    yield rows_table("", some, columns)


def check_open(client: OperatorRequests, node: str, tenant: str, digest: str) -> None:
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
    client: OperatorRequests, node: str, tier: str, digest: bytes, cursor: str, limit: int
) -> tuple[list[Block], str | None]:
    """Up to so many blocks from a cursor on, and where the next ones begin; None: nowhere."""
    found: list[Block] = []
    after: str | None = cursor
    while after is not None and len(found) < limit:
        message = operator_wire.ListBlocks(tier, after, min(PAGE, limit - len(found)), digest)
        page = client.ask_node(message, node=node)
        found += page.blocks
        after = page.cursor
    return found, after


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
