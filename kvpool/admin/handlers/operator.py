"""The routes of operators' commands, which forward each to a node: what `kvpool` asks from another machine.

They come from the declarations (`kvpool.wire.command`). A token may do here what it may do on the other routes, and no
more: `tests/unit/test_operator_commands.py` compares them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec

from kvpool.admin.cluster_view import Answers, Cluster
from kvpool.admin.problems import not_found
from kvpool.admin.routing import Call, Route
from kvpool.admin.scope import chosen_nodes, holders, sees_event, tenant_of, whole_only
from kvpool.admin.tokens import Principal
from kvpool.admin.types import AnyNode, OfTenant, Unreachable
from kvpool.decoding import decode_json
from kvpool.errors import ProtocolError
from kvpool.telemetry.cluster_stats import ClusterStats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Event, Events
from kvpool.wire.command import COMMANDS, Command, Scope, message_of, shape_of
from kvpool.wire.jobs import JobView, ScrubJob, parse_job

WAIT_S_MAX = 60.0
LOOK_S_MAX = 10.0  # of what changes nothing
CHANGE_S = 10.0  # of each of all nodes, for pins on disks and the answers of others
ANSWER_S = 20.0  # beyond what is asked for: etcd may take as long
EVENTS_MAX, EVENT_PAGES_MAX = 1000, 8  # in a page, as a daemon has it; more than it remembers


class OnNodes(OfTenant, frozen=True, kw_only=True):
    """Whose objects are meant, and on which nodes."""

    node: AnyNode = ""


class ForNode(OfTenant, frozen=True):
    """The node that answers, and how long it may take beyond the usual."""

    node: AnyNode = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0


def _answers(command: Command) -> Any:
    """The type of `Answers` to a command, with a name for its description."""
    by_node: Any = dict
    fields = [("nodes", by_node[str, command.answer]), ("unreachable", Unreachable)]
    return msgspec.defstruct(f"{command.kind.__name__}Answers", fields)


class Forwarding:
    """Forwards requests of the command line to nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def routes(self) -> Iterator[Route]:
        """One for each command that the gateway forwards, and one for each that it asks all nodes."""
        for command in COMMANDS.values():
            whole = command.scope is Scope.WHOLE
            if command.everywhere:
                method, _, path = command.everywhere.partition(" ")
                asked = method in {"GET", "DELETE"}
                yield Route(
                    *(method, path, self._asks_all(command), command.role),
                    answer=_answers(command),
                    params=shape_of(command.kind, OnNodes) if asked else OnNodes,
                    body=None if asked else shape_of(command.kind),
                    whole=whole,
                )
            if command.role is not None:
                yield Route(
                    *("POST", command.path, self._forwards(command), command.role),
                    answer=command.answer,
                    params=ForNode,
                    body=shape_of(command.kind),
                    whole=whole,
                )

    def _asks_all(self, command: Command) -> Callable[..., Awaitable[Any]]:
        async def ask_all(call: Call, wanted: OnNodes, body: Any = None) -> Answers[Any]:
            message = message_of(command.kind, wanted if body is None else body)
            if command.scope is Scope.WHOLE:
                tenant, silent = "", dict[str, str]()
                nodes = chosen_nodes(await self._cluster.view(), [wanted.node] * bool(wanted.node))
            else:
                tenant = tenant_of(call.who, wanted.tenant)
                digest = getattr(message, "digest", b"").hex()
                nodes, _, _, silent = await holders(
                    self._cluster, tenant, digest, wanted.node, now=True
                )
            wait_s = CHANGE_S if command.changes else 0.0
            found = await self._cluster.get_each(
                nodes, message, tenant=tenant, by=call.by, wait_s=wait_s, one_at_least=True
            )
            if command.changes:
                self._cluster.changed()
            return Answers(dict(sorted(found.nodes.items())), {**silent, **found.unreachable})

        ask_all.__name__ = f"{command.kind.__name__}Everywhere"
        ask_all.__doc__ = command.kind.__doc__
        return ask_all

    def _forwards(self, command: Command) -> Callable[..., Awaitable[Any]]:
        async def forward(call: Call, wanted: ForNode, body: Any) -> Any:
            message = message_of(command.kind, body)
            tenant = check(call.who, message, wanted.tenant)
            if command.scope is Scope.NAMED:
                message = narrowed(call.who, message)
            if command.scope is Scope.JOB:
                await self._check_job(call, body.job, wanted.node)
            if isinstance(message, operator_wire.Events) and not call.who.whole:
                return await self._events(call, tenant, message, wanted)
            answer = await self._cluster.daemon.ask(
                message,
                node=wanted.node,
                tenant=tenant,
                by=call.by,
                wait_s=wanted.wait_s if command.changes else min(wanted.wait_s, LOOK_S_MAX),
                within_s=ANSWER_S,
            )
            if command.changes:
                self._cluster.changed()
            if isinstance(answer, frame.Done):
                return answer.value
            shows = command.scope is Scope.SHOWN
            return msgspec.Raw(shown(call.who, message, answer.data) if shows else answer.data)

        forward.__name__ = command.kind.__name__
        forward.__doc__ = command.kind.__doc__
        return forward

    async def _check_job(self, call: Call, job: str, node: str) -> None:
        """Raises `Refused` for a job that this token does not see, as if there were none; or may not stop."""
        views: list[JobView] = await self._cluster.daemon.get(
            operator_wire.Jobs([job]), node=node, within_s=ANSWER_S
        )
        if not all(call.who.sees(view.tenant) for view in views) or not views:
            raise not_found(f"there is no job {job!r}, or it has expired")
        if any(view.kind == "scrub" for view in views):
            whole_only(call.who)

    async def _events(
        self, call: Call, tenant: str, message: operator_wire.Events, wanted: ForNode
    ) -> Events:
        """As many of the events that a limited token sees as it asks for, among all that are remembered."""
        count = min(max(1, message.count), EVENTS_MAX)
        message = msgspec.structs.replace(message, count=EVENTS_MAX)
        seen: list[Event] = []
        for _ in range(EVENT_PAGES_MAX):
            page: Events = await self._cluster.daemon.get(
                message, node=wanted.node, tenant=tenant, within_s=ANSWER_S
            )
            seen += _seen(call.who, page)
            if len(seen) >= count or len(page.events) < EVENTS_MAX:
                break
            message = msgspec.structs.replace(message, after=page.events[-1].number)
        return msgspec.structs.replace(page, events=seen[:count])


def _seen(who: Principal, page: Events) -> list[Event]:
    return [event for event in page.events if sees_event(who, event.details)]


def check(who: Principal, message: frame.Message, tenant: str) -> str:
    """Return the tenant that is meant. Raises `Refused` for what this principal may not ask for."""
    if isinstance(message, operator_wire.BeginJob) and isinstance(
        parse_job(message.spec), ScrubJob
    ):
        whole_only(who)
    return tenant_of(who, tenant)


def narrowed(who: Principal, message: frame.Message) -> frame.Message:
    """Return a request of `Scope.NAMED` for tenants of the token only. Raises `Refused`."""
    assert isinstance(message, (operator_wire.ListAccounts, operator_wire.ListReceipts))
    tenants = [tenant_of(who, tenant) for tenant in message.tenants if tenant]
    if not tenants and who.tenants is not None:
        tenants = sorted(who.tenants)
    return msgspec.structs.replace(message, tenants=tenants)


def shown(who: Principal, message: frame.Message, answer: bytes) -> bytes:
    """Return an answer to a request of `Scope.SHOWN` as this principal may see it. Raises `ProtocolError`."""
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


def _jobs(who: Principal, raw: bytes) -> list[JobView]:
    jobs = decode_json(raw, list[JobView], "a list of jobs")
    return [job for job in jobs if who.sees(job.tenant)]


def _events(who: Principal, raw: bytes) -> Events:
    found = decode_json(raw, Events, "a page of events")
    return msgspec.structs.replace(found, events=_seen(who, found))


SHOWN: dict[type[frame.Message], Callable[[Principal, bytes], Any]] = {
    operator_wire.Cluster: _cluster,
    operator_wire.Inspect: _stats,
    client_wire.Stats: _stats,
    operator_wire.Jobs: _jobs,
    operator_wire.Events: _events,
}
