"""Inventory: cluster, nodes, segments, namespaces, tenants. Reads only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvpool.admin.cluster_view import Answers, Cluster, View
from kvpool.admin.paging import listed
from kvpool.admin.problems import Refused
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import check_namespace, check_node, check_tenant, having, tenant_of
from kvpool.admin.tokens import ALL, Principal
from kvpool.admin.types import (
    ClusterInfo,
    Listed,
    Me,
    NamespaceInfo,
    Node,
    NodeDetail,
    Nothing,
    OfNamespace,
    OfNode,
    OfTenant,
    Page,
    Status,
    TenantInfo,
    TenantPage,
)
from kvpool.decoding import decode_json
from kvpool.errors import KvpoolError, ProtocolError
from kvpool.placement.records import NamespaceSettings, NodeRecord, NodeState, TierRecord
from kvpool.telemetry.hit_curve import Memory, MemoryPlan, curve, misses_of
from kvpool.telemetry.memory_stats import TenantStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import operator as operator_wire

SERVING = "serving"
STANDINGS = ("member", "away")


class Looking:
    """Handlers. routers: how many this gateway asks."""

    def __init__(self, cluster: Cluster, routers: int) -> None:
        self._cluster = cluster
        self._routers = routers

    # ---- the gateway itself ------------------------------------------------------------------------

    @route("GET", "/healthz", None)
    async def get_health(self, _call: Call, _: Nothing) -> Status:
        """Whether this process is alive."""
        return Status("ok")

    @route("GET", "/readyz", None)
    async def get_readiness(self, _call: Call, _: Nothing) -> Status:
        """Whether the daemon is a member of its cluster, and serves."""
        try:
            view = await self._cluster.view()
        except KvpoolError:
            raise Refused(503, "unavailable", "the daemon does not answer") from None
        if view.state != SERVING or view.standing not in STANDINGS:
            raise Refused(
                503,
                "unavailable",
                f"the daemon's membership is {view.standing}, and its state is {view.state}",
            )
        return Status("ok")

    @route("GET", "/v1/me", "viewer")
    async def get_me(self, call: Call, _: Nothing) -> Me:
        """The token's name, role and tenants."""
        who = call.who
        return Me(who.name, who.role, [ALL] if who.tenants is None else sorted(who.tenants))

    # ---- cluster and nodes -------------------------------------------------------------------------

    @route("GET", "/v1/cluster", "viewer")
    async def get_cluster(self, call: Call, _: Nothing) -> ClusterInfo:
        """The cluster as this gateway's node sees it."""
        view = await self._cluster.view()
        tiers: dict[str, list[TierRecord]] = {}
        for record in view.nodes if call.who.whole else ():
            for tier in record.tiers:
                tiers.setdefault(tier.name, []).append(tier)
        return ClusterInfo(
            cluster=view.cluster,
            node=view.node,
            standing=view.standing,
            state=view.state,
            states=dict(Counter(str(record.state) for record in view.nodes)),
            tiers=[_sum(name, some) for name, some in tiers.items()],
            versions=dict(Counter(record.version for record in view.nodes)),
            namespaces=sum(call.who.sees(entry.tenant) for entry in view.namespaces),
            routers=self._routers,
        )

    @route("GET", "/v1/nodes", "viewer")
    async def list_nodes(self, call: Call, wanted: Page) -> Listed[Node]:
        """The nodes of the cluster, by name."""
        view = await self._cluster.view()
        nodes = [show_node(view, name, call.who) for name in view.names()]
        return listed(nodes, lambda node: node.node, wanted, {})

    @route("GET", "/v1/nodes/{node}", "viewer")
    async def get_node(self, call: Call, wanted: OfNode) -> NodeDetail:
        """One node, and its statistics."""
        view = await self._cluster.view()
        node = check_node(view, wanted.node)
        stats = await self._of(node)
        return NodeDetail(
            show_node(view, node, call.who), stats.uptime_s, _sections(stats, call.who)
        )

    async def _of(self, node: str) -> NodeStats:
        """A node's statistics. Raises `Refused` when it does not answer."""
        answers = await self._cluster.stats()
        if node not in answers.nodes:
            why = answers.unreachable.get(node, "it has left")
            raise Refused(503, "unavailable", f"node {node} does not answer: {why}")
        return answers.nodes[node]

    # ---- namespaces and tenants --------------------------------------------------------------------

    @route("GET", "/v1/namespaces", "viewer")
    async def list_namespaces(self, call: Call, wanted: TenantPage) -> Listed[NamespaceInfo]:
        """Namespaces known in the cluster, or open on a node."""
        view, answers = await self._cluster.view(), await self._cluster.stats()
        found = gather_namespaces(view, answers, _seen(call.who, wanted.tenant))
        return listed(
            found, lambda each: f"{each.tenant}/{each.digest}", wanted, answers.unreachable
        )

    @route("GET", "/v1/namespaces/{digest}", "viewer")
    async def get_namespace(self, call: Call, wanted: OfNamespace) -> NamespaceInfo:
        """One namespace."""
        tenant = tenant_of(call.who, wanted.tenant)
        return await self.namespace(tenant, wanted.digest)

    async def namespace(self, tenant: str, digest: str) -> NamespaceInfo:
        """Raises `Refused` when there is none."""

        def find(view: View, answers: Answers[NodeStats]) -> NamespaceInfo:
            check_namespace(view, answers, tenant, digest)
            found = gather_namespaces(view, answers, tenant.__eq__)
            one = next(each for each in found if each.digest == digest)
            return msgspec.structs.replace(one, unreachable=answers.unreachable)

        return await self._cluster.consult(find)

    @route("GET", "/v1/tenants", "viewer")
    async def list_tenants(self, call: Call, wanted: TenantPage) -> Listed[TenantInfo]:
        """Tenants, with their usage on all nodes together."""
        answers = await self._cluster.stats()
        found = gather_tenants(answers, _seen(call.who, wanted.tenant))
        return listed(found, lambda each: each.tenant, wanted, answers.unreachable)

    @route("GET", "/v1/memory", "viewer")
    async def get_memory(self, call: Call, wanted: OfTenant) -> MemoryPlan:
        """The hit rate over memory, and why blocks are missed now."""
        tenant = tenant_of(call.who, wanted.tenant)
        answers = await self._cluster.stats()
        if wanted.tenant:
            check_tenant(answers, tenant)
        found = await self._cluster.get_each(
            having(answers, tenant), operator_wire.HitCurves(), Memory, tenant=tenant
        )
        return MemoryPlan(
            tenant=tenant,
            nodes=len(found.nodes),
            curve=curve(list(found.nodes.values())),
            misses=misses_of(answers.nodes.values(), tenant),
            unreachable={**answers.unreachable, **found.unreachable},
        )


def show_node(view: View, name: str, who: Principal) -> Node:
    """A node as this principal sees it; one that is alone has no record."""
    record = next((each for each in view.nodes if each.node == name), None)
    if record is None:
        record = NodeRecord(name, view.incarnation, NodeState(view.state))
    if not who.whole:
        engines = tuple(engine for engine in record.engines if who.sees(engine.tenant))
        record = msgspec.structs.replace(
            record, tiers=(), drain=None, engines=engines, host="", numa=-1, links=()
        )
    return Node(**msgspec.structs.asdict(record), drain_wanted=name in view.drains)


def gather_namespaces(
    view: View, answers: Answers[NodeStats], seen: Callable[[str], bool]
) -> list[NamespaceInfo]:
    """What the cluster has agreed on, and what each node holds of it in memory."""
    found: dict[tuple[str, str], NamespaceInfo] = {}
    for entry in view.namespaces:
        if seen(entry.tenant):
            found[entry.tenant, entry.digest] = NamespaceInfo(
                digest=entry.digest,
                tenant=entry.tenant,
                fields=_fields(entry.fields),
                epoch=entry.epoch,
                generation=entry.generation,
                settings=entry.settings,
                part_bytes=[part[0] for part in entry.parts],
                nodes={},
            )
    for node, stats in sorted(answers.nodes.items()):
        for tenant, held in stats.tenants.items():
            for digest, each in held.namespaces.items() if seen(tenant) else ():
                info = found.get((tenant, digest))
                if info is None:
                    info = found[tenant, digest] = NamespaceInfo(
                        digest=digest,
                        tenant=tenant,
                        fields=each.fields,
                        epoch=each.epoch,
                        generation=0,
                        settings=msgspec.convert(each.settings, NamespaceSettings),
                        part_bytes=each.part_bytes,
                        nodes={},
                    )
                info.nodes[node] = each
    return list(found.values())


def gather_tenants(answers: Answers[NodeStats], seen: Callable[[str], bool]) -> list[TenantInfo]:
    """The tenants that a caller may see, summed over the nodes that answered."""
    held: dict[str, list[TenantStats]] = {}
    for stats in answers.nodes.values():
        for name, tenant in stats.tenants.items():
            if seen(name):
                held.setdefault(name, []).append(tenant)
    return [_tenant(name, some) for name, some in held.items()]


def _sum(name: str, tiers: Sequence[TierRecord]) -> TierRecord:
    sums = ("capacity_bytes", "used_bytes", "secondary_bytes")
    return TierRecord(name, *(sum(getattr(tier, each) for tier in tiers) for each in sums))


def _tenant(name: str, held: Sequence[TenantStats]) -> TenantInfo:
    disks = [disk for each in held for disk in each.usage.ssd]
    return TenantInfo(
        tenant=name,
        segment_bytes=sum(each.segment_bytes for each in held),
        used_bytes=sum(each.space.bytes_used for each in held),
        ssd_bytes=sum(disk.part_bytes for disk in disks),
        ssd_used_bytes=sum(disk.used_bytes for disk in disks),
        blocks=sum(each.blocks for each in held),
        soft_pinned_bytes=sum(each.soft_pinned_bytes for each in held),
        hard_pinned_bytes=sum(each.hard_pinned_bytes for each in held),
        namespaces=len({digest for each in held for digest in each.namespaces}),
        nodes=len(held),
    )


def _seen(who: Principal, tenant: str) -> Callable[[str], bool]:
    """The tenants to show. Raises `Refused`."""
    return tenant_of(who, tenant).__eq__ if tenant else who.sees


def _sections(stats: NodeStats, who: Principal) -> dict[str, Any]:
    """All statistics, or for a token with limited tenants those of its tenants."""
    tenants = {name: each for name, each in stats.tenants.items() if who.sees(name)}
    return (msgspec.structs.asdict(stats) if who.whole else {}) | {"tenants": tenants}


def _fields(text: str) -> dict[str, Any]:
    """A namespace's fields; none if its record in etcd has something else there, whose epoch counts all the same."""
    try:
        return decode_json(text, dict[str, Any], "the record of a namespace")
    except ProtocolError:
        return {}
