"""Forwards operators' requests to a node: what `kvpool` asks from another machine."""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.operator_rules import RULES, Scope, changes, narrowed, rule_for, shown
from kvpool.admin.problems import not_found
from kvpool.admin.routing import Call
from kvpool.admin.scope import whole_only
from kvpool.admin.tokens import Principal
from kvpool.admin.types import AnyNode, Given, OfTenant
from kvpool.decoding import JsonDecoder, decode_json
from kvpool.errors import ProtocolError
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobView
from kvpool.wire.operator_json import CHANGES, OperatorAnswer, message_of, shape_of

WAIT_S_MAX = 60.0
LOOK_S_MAX = 10.0  # of what changes nothing
ANSWER_S = 20.0  # beyond what is asked for: etcd may take as long
EVENTS_MAX, EVENT_PAGES_MAX = 1000, 8  # in a page, as a daemon has it; more than it remembers

_KINDS = {shape_of(kind): kind for kind in RULES}
Requests: Any = Union[tuple(_KINDS)]  # noqa: UP007  (made of the table)


class OperatorRequest(Given, frozen=True):
    """request: a message, by its name and fields; bytes are base64. node: which one answers; empty: the gateway's.
    wait_s: how long the answer may take beyond the usual.
    """

    request: Requests
    node: AnyNode = ""
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.0


class _Name(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct):
    request: _Name


_decode_name = JsonDecoder[_Body](_Body, "a request with a message")


def is_change(who: Principal, raw: bytes) -> bool:
    """Whether this body, of a request that may be invalid, changes something."""
    try:
        return changes(who, _decode_name(raw).request.message)
    except ProtocolError:
        return False


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
        if isinstance(message, operator_wire.Events) and not call.who.whole:
            return await self._events(call, tenant, message, body)
        answer = await self._ask(call, tenant, message, body)
        if type(message) in CHANGES:
            self._cluster.changed()
        if isinstance(answer, frame.Done):
            return OperatorAnswer(answer.value, msgspec.Raw(b"null"))
        data = answer.data
        if rule.scope is Scope.SHOWN:
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
            wait_s=body.wait_s if type(message) in CHANGES else min(body.wait_s, LOOK_S_MAX),
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
        self, call: Call, tenant: str, message: operator_wire.Events, body: OperatorRequest
    ) -> OperatorAnswer:
        """As many of the events that a limited token sees as it asks for, among all that are remembered."""
        wanted = min(max(1, message.count), EVENTS_MAX)
        message = msgspec.structs.replace(message, count=EVENTS_MAX)
        seen: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        for _ in range(EVENT_PAGES_MAX):
            answer = await self._ask(call, tenant, message, body)
            assert isinstance(answer, frame.Bytes), "events are no number"
            page = decode_json(shown(call.who, message, answer.data), dict[str, Any], "events")
            seen += page["events"]
            every = decode_json(answer.data, _Page, "events").events
            if len(seen) >= wanted or len(every) < EVENTS_MAX:
                break
            message = msgspec.structs.replace(message, after=every[-1].number)
        return OperatorAnswer(
            None, msgspec.Raw(msgspec.json.encode({**page, "events": seen[:wanted]}))
        )


class _Numbered(msgspec.Struct):
    number: int


class _Page(msgspec.Struct):
    events: list[_Numbered]
