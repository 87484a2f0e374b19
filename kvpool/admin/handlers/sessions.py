"""Sessions: lists of them, one of them, their end; and what is wanted for their blocks, or for a prompt's."""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.handlers.routers import Routers
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.problems import Refused, not_found
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import holders, tenant_of
from kvpool.admin.types import (
    IntentInfo,
    IntentOn,
    IntentRequest,
    OfSession,
    OfTenant,
    SessionDetail,
    SessionDetailOn,
    SessionEnded,
    SessionInfo,
    SessionList,
    SessionOn,
    SessionPage,
)
from kvpool.types import IntentAnswer
from kvpool.wire import operator as operator_wire

INTENT_S = 10.0  # for pins on disks, and the answers of others


class _Listed(msgspec.Struct, frozen=True):
    sessions: list[dict[str, Any]]
    more: bool


class Sessions:
    """Handlers."""

    def __init__(self, cluster: Cluster, routers: Routers) -> None:
        self._cluster = cluster
        self._routers = routers

    # ---- sessions ----------------------------------------------------------------------------------

    @route("GET", "/v1/sessions", "viewer")
    async def list_sessions(self, call: Call, wanted: SessionPage) -> SessionList:
        """Sessions, by their names, and what each node knows of them."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, _, unreachable = await holders(self._cluster, tenant, node=wanted.node)
        after = unpack_cursor(wanted.cursor, tuple[str])[0] if wanted.cursor else ""
        listed = await self._cluster.json_each(
            nodes, operator_wire.ListSessions(after, wanted.limit), _Listed, tenant=tenant
        )
        found: dict[str, list[SessionOn]] = {}
        ends = []  # up to where a node has told all
        for node, some in sorted(listed.by_node.items()):
            for each in some.sessions:
                found.setdefault(str(each["session"]), []).append(_on(node, each, SessionOn))
            if some.more and some.sessions:
                ends.append(str(some.sessions[-1]["session"]))
        names = sorted(name for name in found if not ends or name <= min(ends))
        shown = heapq.nsmallest(wanted.limit, names)
        more = bool(ends) or len(shown) < len(names)
        return SessionList(
            [SessionInfo(name, found[name]) for name in shown],
            pack_cursor(shown[-1]) if more and shown else None,
            {**unreachable, **listed.unreachable},
        )

    @route("GET", "/v1/sessions/{session}", "viewer")
    async def get_session(self, call: Call, wanted: OfSession) -> SessionDetail:
        """A session: on each node that knows it, the prompts of its agents, and where their blocks are."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, _, unreachable = await holders(self._cluster, tenant)
        shown = await self._cluster.json_each(
            nodes,
            operator_wire.ShowSession(wanted.session),
            list[dict[str, Any]],
            tenant=tenant,
        )
        unreachable = {**unreachable, **shown.unreachable}
        on = [
            _on(node, each, SessionDetailOn)
            for node, known in sorted(shown.by_node.items())
            for each in known
        ]
        if not on and not unreachable:
            raise _unknown(wanted.session)
        return SessionDetail(wanted.session, on, unreachable)

    @route("DELETE", "/v1/sessions/{session}", "operator")
    async def end_session(self, call: Call, wanted: OfSession) -> SessionEnded:
        """End a session: its blocks go before others."""
        tenant = tenant_of(call.who, wanted.tenant)
        nodes, _, _, unreachable = await holders(self._cluster, tenant, now=True)
        found = await self._cluster.number_each(
            nodes, operator_wire.EndSession(wanted.session), tenant=tenant, by=call.by
        )
        unreachable = {**unreachable, **found.unreachable}
        ended = sorted(node for node, known in found.by_node.items() if known)
        if not ended and not unreachable:
            raise _unknown(wanted.session)
        return SessionEnded(wanted.session, ended, unreachable)

    # ---- intents -----------------------------------------------------------------------------------

    @route("POST", "/v1/intents", "operator", routers=True)
    async def intend(self, call: Call, wanted: OfTenant, body: IntentRequest) -> IntentInfo:
        """Pin, keep, prefetch, expend or drop blocks of a prompt or a session; each node tells for how many it holds."""
        tenant = tenant_of(call.who, wanted.tenant)
        by_prompt = [bool(body.prompt), bool(body.messages), bool(body.tokens)].count(True)
        if by_prompt:
            others = body.namespace or body.keys or body.session
            named = by_prompt == 1 and bool(body.model) and not others
        else:
            one = bool(body.keys) != bool(body.session)
            named = one and not body.model and bool(body.namespace or not body.keys)
        if not named:
            raise Refused(
                *(400, "invalid"),
                "name namespace and keys of a prompt, or model and one of prompt, messages, tokens, or a session",
            )
        if (body.intent == "keep") != (body.for_s > 0) or (body.hard and body.intent != "pin"):
            raise Refused(400, "invalid", "for_s belongs to keep, and hard to pin only")
        if by_prompt:
            if wanted.tenant:
                raise Refused(
                    400, "invalid", "a router asks for its own tenant of the pool: leave tenant out"
                )
            answer = await self._routers.intend(call, body)
            if not body.dry_run:
                self._cluster.changed()
            return answer
        if body.keys and body.intent == "prefetch" and not body.node:
            raise Refused(400, "invalid", "name the node into whose memory the prompt is brought")
        # A node is filled before its engines open the namespace.
        nodes, _, _, unreachable = await holders(
            self._cluster, tenant, body.namespace, body.node, now=True, unopened=True
        )
        message = operator_wire.IntendBlocks(
            body.intent,
            bytes.fromhex(body.namespace),
            b"".join(map(bytes.fromhex, body.keys)),
            body.session,
            body.hard,
            body.for_s,
            body.dry_run,
        )
        found = await self._cluster.json_each(
            nodes, message, IntentAnswer, tenant=tenant, by=call.by, wait_s=INTENT_S
        )
        if not body.dry_run:
            self._cluster.changed()
        items = [
            msgspec.convert({**msgspec.to_builtins(answer), "node": node}, IntentOn)
            for node, answer in sorted(found.by_node.items())
        ]
        return IntentInfo(items, {**unreachable, **found.unreachable})


def _on(node: str, session: dict[str, Any], kind: type[Any]) -> Any:
    return msgspec.convert({**session, "node": node}, kind)


def _unknown(session: str) -> Refused:
    return not_found(f"no node knows a session {session!r:.100}: it has ended, or was forgotten")
