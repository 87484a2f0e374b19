"""Which operators' requests the gateway forwards as they are, and for whom. No I/O.

A token may do here what it may do on the typed routes of `routes.py`, and no more: `tests/unit/test_operator_rules.py`
compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from kvpool.admin.scope import check_role, sees_event, tenant_of, whole_only
from kvpool.admin.tokens import Principal
from kvpool.admin.types import Role
from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError
from kvpool.telemetry.cluster_stats import ClusterStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import ScrubJob, parse_job
from kvpool.wire.operator_json import CHANGES


class Scope(Enum):
    """What a request is about."""

    TENANT = "tenant"  # the objects of one
    WHOLE = "whole"  # what is of no one tenant: for a token that is not limited
    SHOWN = "shown"  # of all tenants; a limited token gets what is of its own, by `SHOWN`
    NAMED = "named"  # of the tenants that it names; none: of the token's
    JOB = "job"  # a job, whose tenant is to be asked for first


@dataclass(frozen=True, slots=True)
class Rule:
    """role: the least one."""

    role: Role
    scope: Scope


RULES: dict[type[frame.Message], Rule] = {
    operator_wire.Cluster: Rule("viewer", Scope.SHOWN),
    operator_wire.Inspect: Rule("viewer", Scope.SHOWN),
    client_wire.Stats: Rule("viewer", Scope.SHOWN),
    operator_wire.Jobs: Rule("viewer", Scope.SHOWN),
    operator_wire.Events: Rule("viewer", Scope.SHOWN),
    operator_wire.Locate: Rule("viewer", Scope.TENANT),
    client_wire.Prefixes: Rule("viewer", Scope.TENANT),
    client_wire.WhyMissing: Rule("viewer", Scope.TENANT),
    client_wire.Engines: Rule("viewer", Scope.TENANT),
    operator_wire.HitCurves: Rule("viewer", Scope.TENANT),
    operator_wire.ListBlocks: Rule("viewer", Scope.TENANT),
    operator_wire.ListSessions: Rule("viewer", Scope.TENANT),
    operator_wire.ShowSession: Rule("viewer", Scope.TENANT),
    operator_wire.ListAccounts: Rule("viewer", Scope.NAMED),
    operator_wire.ListReceipts: Rule("viewer", Scope.NAMED),
    operator_wire.Settings: Rule("viewer", Scope.WHOLE),
    operator_wire.PinBlocks: Rule("operator", Scope.TENANT),
    operator_wire.IntendBlocks: Rule("operator", Scope.TENANT),
    operator_wire.EndSession: Rule("operator", Scope.TENANT),
    operator_wire.BeginJob: Rule("operator", Scope.TENANT),
    operator_wire.StopJob: Rule("operator", Scope.JOB),
    operator_wire.Drain: Rule("operator", Scope.WHOLE),
    operator_wire.Scrub: Rule("operator", Scope.WHOLE),
    operator_wire.Clear: Rule("admin", Scope.TENANT),
    operator_wire.Configure: Rule("admin", Scope.TENANT),
    operator_wire.ChangeSettings: Rule("admin", Scope.WHOLE),
}

NOT_FORWARDED: dict[type[frame.Message], str] = {
    operator_wire.OnNode: "the gateway makes it itself, of what it forwards",
    operator_wire.Evict: "commands evict by jobs, which can be stopped",
    operator_wire.ShowBlocks: "no command needs it: GET /v1/blocks/{key}",
    operator_wire.TakeSpans: "it takes spans away from the collector that they are for",
}
"""And why. Other messages of clients are not operators' requests."""


def rule_for(who: Principal, message: frame.Message, tenant: str) -> tuple[Rule, str]:
    """The rule, and the tenant that is meant. Raises `Refused` for what this principal may not ask for."""
    rule = RULES[type(message)]
    check_role(who, rule.role, f"a {type(message).__name__}")
    if rule.scope is Scope.WHOLE or _is_scrub(message):
        whole_only(who)
    return rule, tenant_of(who, tenant)


def changes(who: Principal, name: str) -> bool:
    """Whether this is the name of a message that changes something, and that this principal may send."""
    kind = _BY_NAME.get(name)
    return kind is not None and who.may(RULES[kind].role)


_BY_NAME = {kind.__name__: kind for kind in CHANGES}


def _is_scrub(message: frame.Message) -> bool:
    return isinstance(message, operator_wire.BeginJob) and isinstance(
        parse_job(message.spec), ScrubJob
    )


def narrowed(who: Principal, message: frame.Message) -> frame.Message:
    """A request of `Scope.NAMED`, for tenants of the token only. Raises `Refused`."""
    assert isinstance(message, (operator_wire.ListAccounts, operator_wire.ListReceipts))
    tenants = [tenant_of(who, tenant) for tenant in message.tenants if tenant]
    if not tenants and who.tenants is not None:
        tenants = sorted(who.tenants)
    return msgspec.structs.replace(message, tenants=tenants)


def shown(who: Principal, message: frame.Message, answer: bytes) -> bytes:
    """An answer to a request of `Scope.SHOWN`, as this principal may see it. Raises `ProtocolError`."""
    if who.whole:
        return answer
    try:
        return msgspec.json.encode(SHOWN[type(message)](who, answer))
    except (KeyError, TypeError) as error:
        raise ProtocolError(
            f"the answer to a {type(message).__name__} is not one of this version ({error}): upgrade that node"
        ) from None


def _cluster(who: Principal, raw: bytes) -> dict[str, Any]:
    found = decode_json(raw, dict[str, Any], "a cluster")
    sees = [entry for entry in found["namespaces"] if who.sees(entry["tenant"])]
    nodes = []
    for record in found["nodes"]:
        engines = [engine for engine in record["engines"] if who.sees(engine["tenant"])]
        about = {name: record[name] for name in _OF_NODES}
        nodes.append(about | {"tiers": [], "drain": None, "engines": engines})
    return {
        **{name: found[name] for name in _OF_CLUSTER},
        "nodes": nodes,
        "namespaces": sees,
        "peers": [],
        "silent_peers": [],
        "links": [],
        "directory": None,
        "errors": {},
    }


_OF_CLUSTER = ("cluster", "node", "incarnation", "standing", "state", "joined", "drains")
_OF_NODES = ("node", "incarnation", "state", "transports", "labels", "version", "protocol")


def _stats(who: Principal, raw: bytes) -> NodeStats:
    found = decode_json(raw, NodeStats, "the statistics of a node")
    return NodeStats(
        node=found.node,
        incarnation=found.incarnation,
        version=found.version,
        uptime_s=found.uptime_s,
        cluster=ClusterStats(standing=found.cluster.standing, state=found.cluster.state),
        tenants={name: each for name, each in found.tenants.items() if who.sees(name)},
    )


def _jobs(who: Principal, raw: bytes) -> list[dict[str, Any]]:
    jobs = decode_json(raw, list[dict[str, Any]], "a list of jobs")
    return [job for job in jobs if who.sees(job["tenant"])]


def _events(who: Principal, raw: bytes) -> dict[str, Any]:
    found = decode_json(raw, dict[str, Any], "a page of events")
    some = [event for event in found["events"] if sees_event(who, event["details"])]
    return {**found, "events": some}


SHOWN: dict[type[frame.Message], Callable[[Principal, bytes], Any]] = {
    operator_wire.Cluster: _cluster,
    operator_wire.Inspect: _stats,
    client_wire.Stats: _stats,
    operator_wire.Jobs: _jobs,
    operator_wire.Events: _events,
}
