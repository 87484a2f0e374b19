"""The scope of a request, as visible to its token. Other tenants' objects appear missing. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvpool.admin.cluster_view import Answers, Cluster, View
from kvpool.admin.problems import Refused, not_found
from kvpool.admin.tokens import Principal
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import DEFAULT_TENANT
from kvpool.wire.command import Role


def tenant_of(who: Principal, tenant: str) -> str:
    """The tenant that is meant. Raises `Refused`."""
    if tenant:
        if not who.sees(tenant):
            raise not_found(f"there is no tenant {tenant!r}")
        return tenant
    if who.tenants is None or DEFAULT_TENANT in who.tenants:
        return DEFAULT_TENANT
    return min(who.tenants)


def check_node(view: View, node: str) -> str:
    """Raises `Refused`."""
    if node not in view.names():
        raise not_found(f"there is no node {node!r} in this cluster; GET /v1/nodes lists the nodes")
    return node


def chosen_nodes(view: View, names: list[str]) -> list[str]:
    """These, or all. Raises `Refused`."""
    return [check_node(view, name) for name in dict.fromkeys(names)] or view.names()


def having(answers: Answers[NodeStats], tenant: str, digest: str = "") -> list[str]:
    """The nodes that have this tenant and, where one is named, its namespace open."""
    found = []
    for node, stats in sorted(answers.nodes.items()):
        known = stats.tenants.get(tenant)
        if known is not None and (not digest or digest in known.namespaces):
            found.append(node)
    return found


def check_tenant(answers: Answers[NodeStats], tenant: str) -> None:
    """Raises `Refused` when no node that answers has it."""
    if not having(answers, tenant):
        raise not_found(f"there is no tenant {tenant!r}")


def check_namespace(view: View, answers: Answers[NodeStats], tenant: str, digest: str) -> None:
    """Raises `Refused` for one that neither the cluster nor a node knows."""
    in_cluster = any(entry.tenant == tenant and entry.digest == digest for entry in view.namespaces)
    if not in_cluster and not having(answers, tenant, digest):
        raise not_found(
            f"tenant {tenant!r} has no namespace {digest}; GET /v1/namespaces lists them"
        )


class Holders(NamedTuple):
    """The nodes that may have something of a tenant, or of its namespace, and what they were found by."""

    nodes: list[str]
    view: View
    answers: Answers[NodeStats]
    unreachable: dict[str, str]
    """Why other nodes, of those that are asked for, did not answer."""


async def holders(
    cluster: Cluster, tenant: str, digest: str = "", node: str = "", *, now: bool = False
) -> Holders:
    """Find them; with `node` that one, if it has the tenant. Raises `Refused` for what does not exist.

    now: as for a change.
    """

    def find(view: View, answers: Answers[NodeStats]) -> Holders:
        if digest:
            check_namespace(view, answers, tenant, digest)
        else:
            check_tenant(answers, tenant)
        if not node:
            return Holders(having(answers, tenant, digest), view, answers, answers.unreachable)
        check_node(view, node)
        nodes = having(answers, tenant)  # it need not have the namespace open
        unreachable = {k: why for k, why in answers.unreachable.items() if k == node}
        return Holders([each for each in nodes if each == node], view, answers, unreachable)

    return await cluster.consult(find, now=now)


def sees_event(who: Principal, details: Mapping[str, Any]) -> bool:
    """What names a tenant is for those who may see that one, what names none for those who see all."""
    if who.whole:
        return True
    tenant = details.get("tenant")
    return isinstance(tenant, str) and who.sees(tenant)


def check_role(who: Principal, role: Role, what: str = "this") -> None:
    """Raises `Refused` for a token whose role is less."""
    if not who.may(role):
        why = f"{what} requires the role {role}, but this token has the role {who.role}"
        raise Refused(403, "forbidden", why)


def whole_only(who: Principal) -> None:
    """Raises `Refused` for a token that is limited to tenants."""
    if not who.whole:
        raise Refused(
            403, "forbidden", "this concerns all tenants: use a token that is valid for all of them"
        )
