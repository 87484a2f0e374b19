"""Asking nodes of the cluster, one after the other, each of which may not answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpool.errors import InvalidRequest, KvpoolError

if TYPE_CHECKING:
    from kvpool.client.gateway import Operator
    from kvpool.wire import frame


def nodes_of(cluster: Mapping[str, Any]) -> list[str]:
    """The nodes of the cluster by name, the one that is asked first. cluster: from `Client.cluster`."""
    others = sorted(r["node"] for r in cluster["nodes"] if r["state"] != "gone")
    return list(dict.fromkeys([cluster["node"], *others]))


def ask_each(
    client: Operator, nodes: Iterable[str], message: frame.Message | None, *, tenant: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers of nodes, by name; and the nodes that gave none, with why. message: None: their statistics."""
    found: dict[str, Any] = {}
    silent: dict[str, str] = {}
    for node in nodes:
        try:
            found[node] = (
                client.inspect(node)
                if message is None
                else client.ask_node(message, node=node, tenant=tenant)
            )
        except KvpoolError as error:
            silent[node] = str(error)
    return found, silent


def holders(
    client: Operator, nodes: Sequence[str], tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """Of these nodes those that have the tenant, and its namespace open if one is given; those that do not answer."""
    answers, silent = ask_each(client, nodes, None)
    found = [
        node
        for node, stats in answers.items()
        if tenant in stats.tenants and (not digest or digest in stats.tenants[tenant].namespaces)
    ]
    if not found and not silent:
        what = f"namespace {digest} open" if digest else f"tenant {tenant}"
        raise InvalidRequest(
            f"no node has {what}: no memory holds any of its blocks; `kvpool namespaces` shows what there is"
        )
    return found, silent
