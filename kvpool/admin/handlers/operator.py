"""Forwards operators' requests to a node: what `kvpool` asks from another machine."""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.operator_rules import RULES, Scope, narrowed, rule_for, shown
from kvpool.admin.problems import not_found
from kvpool.admin.routing import Call
from kvpool.admin.scope import whole_only
from kvpool.admin.types import AnyNode, Given, OfTenant
from kvpool.decoding import decode_json
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobView
from kvpool.wire.operator_json import CHANGES, OperatorAnswer, message_of, shape_of

WAIT_S_MAX = 60.0
ANSWER_S = 20.0  # beyond what is asked for: etcd may take as long
EVENT_PAGES_MAX = 8

_KINDS = {shape_of(kind): kind for kind in RULES}
Requests: Any = Union[tuple(_KINDS)]  # noqa: UP007  (made of the table)


class OperatorRequest(Given, frozen=True):
    """request: a message, by its name and fields; bytes are base64. node: which one answers; empty: the gateway's.
    wait_s: how long the answer may take beyond the usual.
    """

    request: Requests
    node: AnyNode = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class Forwarding:
    """Handlers; see `routes.py`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def forward_request(
        self, call: Call, wanted: OfTenant, body: OperatorRequest
    ) -> OperatorAnswer:
        """Forward a request of the command line to a node.

        For `kvpool` on other machines; programs are better off with the other routes. What a token may ask for is what
        it may do there: the least role depends on the request, and answers show a limited token its own tenants.
        """
        message = message_of(_KINDS[type(body.request)], body.request)
        rule, tenant = rule_for(call.who, message, wanted.tenant)
        if rule.scope is Scope.NAMED:
            message = narrowed(call.who, message)
        if isinstance(message, operator_wire.StopJob):
            await self._check_job(call, message.job, body.node)
        answer = await self._ask(call, tenant, message, body)
        if type(message) in CHANGES:
            self._cluster.changed()
        if isinstance(answer, frame.Done):
            return OperatorAnswer(answer.value, msgspec.Raw(b"null"))
        data = answer.data
        if isinstance(message, operator_wire.Events) and not call.who.whole:
            data = await self._events(call, tenant, message, body, data)
        elif rule.scope is Scope.SHOWN:
            data = shown(call.who, message, data)
        return OperatorAnswer(None, msgspec.Raw(data))

    async def _ask(
        self, call: Call, tenant: str, message: frame.Message, body: OperatorRequest
    ) -> frame.Done | frame.Bytes:
        return await self._cluster.daemon.ask(
            message,
            node=body.node,
            tenant=tenant,
            by=call.by,
            wait_s=body.wait_s,
            within_s=ANSWER_S,
        )

    async def _check_job(self, call: Call, job: str, node: str) -> None:
        """Raises `Refused` for a job that this token does not see, as if there were none; or may not stop."""
        views = await self._cluster.daemon.json(
            operator_wire.Jobs([job]), list[JobView], node=node, within_s=ANSWER_S
        )
        if not all(call.who.sees(view.tenant) for view in views) or not views:
            raise not_found(f"there is no job {job!r}, or it has expired")
        if any(view.kind == "scrub" for view in views):
            whole_only(call.who)

    async def _events(
        self,
        call: Call,
        tenant: str,
        message: operator_wire.Events,
        body: OperatorRequest,
        data: bytes,
    ) -> bytes:
        """The first page with events that a limited token sees: one without any would look like the last one."""
        for _ in range(EVENT_PAGES_MAX):
            page = shown(call.who, message, data)
            numbers = [event["number"] for event in decode_json(data, _Page, "events").events]
            if decode_json(page, _Page, "events").events or not numbers:
                break
            message = msgspec.structs.replace(message, after=numbers[-1])
            answer = await self._ask(call, tenant, message, body)
            assert isinstance(answer, frame.Bytes), "as before"
            data = answer.data
        return page


class _Page(msgspec.Struct):
    events: list[dict[str, Any]]
