"""Asking nodes of the cluster, one after the other, each of which may not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvpool.client.operator import OperatorRequests
from kvpool.errors import InvalidRequest, KvpoolError
from kvpool.wire import frame

T = TypeVar("T")


def nodes_of(cluster: Mapping[str, Any]) -> list[str]:
    """The nodes of the cluster by name, the one that is asked first. cluster: from `Client.cluster`."""
    others = sorted(r["node"] for r in cluster["nodes"] if r["state"] != "gone")
    return list(dict.fromkeys([cluster["node"], *others]))


def each_of(
    nodes: Iterable[str], ask: Callable[[str], T], *, one_at_least: bool = False
) -> tuple[dict[str, T], dict[str, str]]:
    """The answers of nodes, by name; and the nodes that gave none, with why.

    one_at_least: raises the first node's error if none answers.
    """
    found: dict[str, T] = {}
    errors: dict[str, KvpoolError] = {}
    for node in nodes:
        try:
            found[node] = ask(node)
        except KvpoolError as error:
            errors[node] = error
    if one_at_least and errors and not found:
        raise next(iter(errors.values()))
    return found, {node: str(error) for node, error in errors.items()}


def ask_each(
    client: OperatorRequests, nodes: Iterable[str], message: frame.Message, **more: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers of nodes to one message. more: of `each_of`, and the `tenant` that is asked for."""
    tenant = more.pop("tenant", "")
    return each_of(nodes, lambda node: client.ask_node(message, node=node, tenant=tenant), **more)


def holders(
    client: OperatorRequests, nodes: Sequence[str], tenant: str, digest: str
) -> tuple[list[str], dict[str, str]]:
    """Of these nodes those that have the tenant, and its namespace open if one is given; those that do not answer."""
    answers, silent = each_of(nodes, client.inspect)
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
