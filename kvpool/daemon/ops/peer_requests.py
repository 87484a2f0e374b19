"""Requests of this node to other nodes, for operators and their jobs. Event loop only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvpool.daemon.cluster.member import ClusterMember
from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.masks import pack_masks, width_for
from kvpool.decoding import decode_hex
from kvpool.errors import InvalidRequest, ProtocolError
from kvpool.wire import client as client_wire
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire import peer as peer_wire
from kvpool.wire import worker as worker_wire
from kvpool.wire.answers import Blocks
from kvpool.wire.command import answer_of

LIST_BLOCKS_MAX = 1000
ANSWER_S = 5.0  # beyond a request's own wait, for the round trip

Answer = frame.Done | frame.Bytes


class Asks(Protocol):
    """How other nodes are asked: `Paths`."""

    async def ask(self, order: worker_wire.AskPeer) -> frame.Done | frame.Bytes: ...


@dataclass(frozen=True, eq=False, slots=True)
class OtherNodes:
    """See the module."""

    name: str
    """The name of this node."""
    cluster: ClusterMember
    transport: Asks

    async def ask(
        self, node: str, tenant: str, by: str, message: frame.Message, wait_s: float
    ) -> Answer:
        """Another node's answer."""
        payload = frame.encode(message, 0)[frame.HEADER.size :]
        return await self.pass_on(node, tenant, by, payload, wait_s)

    async def pass_on(
        self, node: str, tenant: str, by: str, request: bytes, wait_s: float
    ) -> Answer:
        """The same with the payload of a request."""
        order = peer_wire.Operate(self.name, request, wait_s, tenant, by, node)
        answer = await self.transport.ask(
            worker_wire.AskPeer(self._url(node), order, wait_s + ANSWER_S)
        )
        if not isinstance(answer, frame.Bytes):
            raise ProtocolError("the answer to an Operate is not a Bytes message")
        found = client_wire.decode_daemon(answer.data)
        if isinstance(found, frame.Error):
            frame.raise_error(found)
        if not isinstance(found, (frame.Done, frame.Bytes)):
            raise ProtocolError(f"the answer to an Operate is a {type(found).__name__}")
        return found

    def _url(self, node: str) -> str:
        record = self.cluster.view.nodes.get(node)
        if record is None or not record.url:
            raise InvalidRequest(
                f"there is no node {node!r:.80} in this cluster, or it does not listen; `kvpool nodes` lists the "
                "nodes"
            )
        return record.url

    async def list_blocks(
        self, node: str, namespace: NamespaceState, cursor: str
    ) -> tuple[list[bytes], str | None]:
        """Blocks that another node has in memory or on its disks, and the next cursor."""
        tier, _, inner = cursor.partition(":") if cursor else ("dram", "", "")
        ask = operator_wire.ListBlocks(tier, inner, LIST_BLOCKS_MAX, namespace.base)
        answer = await self.ask(node, namespace.tenant.name, "", ask, 0.0)
        found: Blocks = answer_of(ask, answer)
        after = found.cursor
        if after is not None:
            after = f"{tier}:{after}"
        elif tier == "dram":
            after = "ssd:"
        return [decode_hex(each.key, "a block's key") for each in found.blocks], after

    async def evict(
        self, node: str, namespace: NamespaceState, taken: Mapping[bytes, int], by: str
    ) -> int:
        """Have another node evict blocks of which it has only these parts; returns how many it had."""
        masks = pack_masks(list(taken.values()), width_for(len(namespace.tables)))
        request = operator_wire.Evict(b"".join(taken), namespace.base, masks=masks)
        answer = await self.ask(node, namespace.tenant.name, by, request, ANSWER_S)
        return int(answer_of(request, answer))
