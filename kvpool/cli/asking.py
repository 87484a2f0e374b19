"""Questions to nodes of the cluster, one after the other, each of which may not answer; and what the answers come to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvpool.client.operator import OperatorRequests
from kvpool.errors import ClusterUnavailable, InvalidRequest, KvpoolError, Unavailable
from kvpool.telemetry.hit_curve import Memory, MemoryPlan, curve, misses_of
from kvpool.telemetry.memory_stats import NamespaceStats, TenantStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Block, Located, Missing

PAGE = 1000  # blocks in one answer

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


def ask_why(
    client: OperatorRequests, tenant: str, digest: bytes, keys: Sequence[bytes]
) -> tuple[dict[str, Missing], dict[str, str]]:
    """Each node's reasons, by name; and the nodes that gave none, with why. Nodes without the namespace are left out."""
    message = client_wire.WhyMissing(digest, b"".join(keys))
    nodes = nodes_of(client.ask_node(operator_wire.Cluster()))
    told, silent = ask_each(client, nodes, message, tenant=tenant)
    return told, {node: why for node, why in silent.items() if "is not open on" not in why}


def memory_plan(client: OperatorRequests, tenant: str) -> MemoryPlan:
    """Ask all nodes."""
    nodes = nodes_of(client.ask_node(operator_wire.Cluster()))
    told, silent = ask_each(client, nodes, operator_wire.HitCurves(), tenant=tenant)
    memories = [msgspec.convert(each, Memory, strict=False) for each in told.values()]
    stats, others = each_of(told, client.inspect)
    misses = misses_of(stats.values(), tenant)
    return MemoryPlan(tenant, len(memories), curve(memories), misses, silent | others)


def replicas(
    client: OperatorRequests, keys: Sequence[bytes], digest: bytes, nodes: Sequence[str]
) -> tuple[list[Located], dict[str, str]]:
    """Where blocks are; and nodes that do not answer, with why. nodes: of the cluster, this one first.

    A node finds blocks of the namespaces that are open on it, wherever they are. So the others are asked, one after
    the other, for what was not found yet. Raises what the first one said when all of them refuse.
    """
    found: list[Located] = []
    silent: dict[str, str] = {}
    refused: InvalidRequest | None = None
    missing, answered = list(keys), False
    for node in nodes:
        try:
            found += client.ask_node(operator_wire.Locate(b"".join(missing), digest), node=node)
            answered = True
        except InvalidRequest as error:
            refused = refused or error
        except (Unavailable, ClusterUnavailable) as error:
            silent[node] = str(error)
        there = {block.key for block in found}
        missing = [key for key in missing if key.hex() not in there]
        if not missing:
            break
    if refused is not None and not answered:
        raise refused
    return found, silent


def namespace_rows(
    cluster: Mapping[str, Any], stats: NodeStats, tenant: str
) -> list[dict[str, Any]]:
    """One dict for each namespace: what the cluster has agreed on, and what this node holds of it.

    `agreed` is False for those of which the cluster does not know yet; a node that is alone agrees with itself.
    `blocks` and `bytes` are in this node's memory, `ssd_bytes` on its disks; `asked` and `hits` are the blocks that
    reads asked it for, and got, since it was started. All are None for other tenants, whose pools are not shown to this
    one, and `ssd_bytes` without disks, too.
    """
    here = stats.tenants[tenant].namespaces
    rows = [
        {**entry, "fields": json.loads(entry["fields"]), "agreed": True}
        for entry in cluster["namespaces"]
    ]
    known = {row["digest"] for row in rows if row["tenant"] == tenant}
    rows += [
        {
            "tenant": tenant,
            "digest": digest,
            "fields": one.fields,
            "parts": [[nbytes] for nbytes in one.part_bytes],
            "epoch": one.epoch,
            "fence": 0,
            "settings": one.settings,
            "agreed": not cluster["joined"],
        }
        for digest, one in sorted(here.items())
        if digest not in known
    ]
    for row in rows:
        row.update(dict.fromkeys(("blocks", "bytes", "ssd_bytes", "asked", "hits")))
        if row["tenant"] == tenant:
            row.update(_held(row["digest"], stats.tenants[tenant]))
    return rows


def _held(digest: str, tenant: TenantStats) -> dict[str, int | None]:
    disks = tenant.usage.ssd
    on = [disk.namespaces[digest].held_bytes for disk in disks if digest in disk.namespaces]
    one = tenant.namespaces.get(digest, NamespaceStats())
    hits = one.reads.local + one.reads.fetched
    return {
        "asked": hits + one.reads.missed,
        "hits": hits,
        "blocks": max(one.blocks, default=0),
        "bytes": one.bytes_in_blocks(),
        "ssd_bytes": sum(on) if disks else None,
    }


def holdings(
    client: OperatorRequests, nodes: Sequence[str], tenant: str, digest: str
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """What each node holds of a namespace: as `namespace_rows` has it; and the nodes that do not answer."""
    answers, silent = each_of(nodes, client.inspect)
    rows = [
        {"node": node, **_held(digest, mine)}
        for node, found in answers.items()
        if (mine := found.tenants.get(tenant)) is not None
    ]
    return rows, silent
