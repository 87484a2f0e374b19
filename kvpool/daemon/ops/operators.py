"""Operators' requests to a node: one place for all ways in. Event loop only.

A request arrives over the control socket, bare (about this node, for the connection's tenant) or in an `OnNode`,
which names node, tenant and on whose behalf; or from another node in an `Operate`, made from its operator's
`OnNode` there. Every change is one audit event (`event_log.AUDIT`), on the node that makes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpool.config import DaemonConfig
from kvpool.daemon.core.blocks import Holder, Tenant
from kvpool.daemon.core.node import Node
from kvpool.daemon.ops.changes import Changes
from kvpool.daemon.ops.commands import Asker, asking_others, handlers_of
from kvpool.daemon.ops.jobs import JobRunner
from kvpool.daemon.ops.peer_requests import Answer, OtherNodes
from kvpool.daemon.ops.session_commands import CLIENT
from kvpool.errors import InvalidRequest, KvpoolError, NotAuthenticated
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire.command import COMMANDS

WAIT_S_MAX = 60.0
BY_CHARACTERS_MAX = 200

_OF_CLIENTS = {client_wire.Engines, client_wire.Prefixes, client_wire.Stats, client_wire.WhyMissing}


@dataclass(eq=False)
class Operators:
    """See the module."""

    node: Node
    changes: Changes
    others: OtherNodes
    jobs: JobRunner
    reports: Sequence[object]
    """Objects with methods that answer commands, in addition to `changes`."""

    def __post_init__(self) -> None:
        self._handlers = handlers_of(Asker, self.changes, *self.reports)

    @property
    def config(self) -> DaemonConfig:
        """The current one, including operators' changes."""
        return self.changes.config

    @property
    def requests(self) -> dict[type, Callable[[Holder, Any], Awaitable[Answer]]]:
        """Handlers of requests without an envelope, by their kind. Clients make some of these themselves."""
        return {kind: self.own if kind in _OF_CLIENTS else self.bare for kind in self._handlers}

    async def close(self) -> None:
        """End all jobs."""
        await self.jobs.close()

    # ---- ways in -----------------------------------------------------------------------------------

    async def bare(self, holder: Holder, message: frame.Message) -> Answer:
        """A request about this node from a connection of an operator."""
        check_operator(holder)
        return await self._answer(holder.tenant, _user(holder), message)

    async def own(self, holder: Holder, message: frame.Message) -> Answer:
        """A request that a client makes about this node, for its own tenant."""
        return await self.for_client(holder, "", message)

    async def on_node(self, holder: Holder, m: operator_wire.OnNode) -> Answer:
        """A request in an envelope. Raises `KvpoolError`; `ClusterUnavailable` if another node fails."""
        check_operator(holder)
        tenant, by = m.tenant or holder.tenant.name, m.by[:BY_CHARACTERS_MAX] or _user(holder)
        wait_s = min(max(0.0, m.wait_s), WAIT_S_MAX)
        if m.node in {"", self.config.node}:
            return await self._answer(
                self._tenant(tenant), by, client_wire.decode_client(m.request)
            )
        with asking_others():
            return await self.others.pass_on(m.node, tenant, by, m.request, wait_s)

    async def operated(self, order: peer_wire.Operate) -> frame.Bytes:
        """A request from another node; returns the payload of the answer."""
        by = f"{order.by[:BY_CHARACTERS_MAX]} on {order.node[:63]}"
        try:
            self._check_may_operate(order.node)
            answer: frame.Message = await self._answer(
                self._tenant(order.tenant), by, client_wire.decode_client(order.request)
            )
        except KvpoolError as error:
            answer = frame.error_message(error)
        return frame.Bytes(frame.encode(answer, 0)[frame.HEADER.size :])

    def _check_may_operate(self, node: str) -> None:
        """Raises `NotAuthenticated` where the configuration names nodes, and this is none of them."""
        allowed = self.config.operated_by
        if allowed and node not in allowed:
            raise NotAuthenticated(
                f"node {self.config.node} takes no operators' requests from node {node:.63}: use a node that its "
                "setting operated_by names, or its own socket"
            )

    def _tenant(self, name: str) -> Tenant:
        found = self.node.tenants.get(name)
        if found is None:
            raise InvalidRequest(f"node {self.config.node} has no tenant {name!r:.80}")
        return found

    async def _answer(self, tenant: Tenant, by: str, message: frame.Message) -> Answer:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise InvalidRequest(f"a {type(message).__name__} is not an operator's request")
        found = await handler(Asker(tenant, by), message)
        if COMMANDS[type(message)].answer is int:
            return frame.Done(found)
        return frame.Bytes(msgspec.json.encode(found))

    async def for_client(
        self, holder: Holder, node: str, message: frame.Message, wait_s: float = 0.0
    ) -> Answer:
        """Answer a tenant's own client, about this node or another one: for that tenant, and nothing else."""
        by = f"{CLIENT}{holder.name}"
        if node in {"", self.config.node}:
            return await self._answer(holder.tenant, by, message)
        with asking_others():
            return await self.others.ask(node, holder.tenant.name, by, message, wait_s)


def check_operator(holder: Holder) -> None:
    """Only operators see and change other tenants' state. Raises `NotAuthenticated`."""
    if not holder.operator:
        raise NotAuthenticated(
            "this is reserved for operators: those who can open the operators' socket (operator_socket), as the daemon's "
            "own user, or have the operator_token if one is set (KVPOOL_OPERATOR_TOKEN)"
        )


def _user(holder: Holder) -> str:
    return f"uid {holder.uid}" if holder.uid >= 0 else "local"
