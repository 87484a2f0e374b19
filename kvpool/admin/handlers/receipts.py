"""Tenants' accounts and requests' receipts, of all nodes, as JSON, as lines, or as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.routing import Call, route
from kvpool.admin.scope import check_node, tenant_of
from kvpool.admin.types import AccountList, AccountPage, ReceiptList, ReceiptPage
from kvpool.telemetry.receipts import AccountItem, PeriodRows, Receipts
from kvpool.telemetry.receipts_export import MEDIA, Format, to_csv, to_lines
from kvpool.wire import operator as operator_wire

EVER_S = 1e12
NEXT = "x-next-cursor"
UNREACHABLE = "x-unreachable"
INCOMPLETE = "x-incomplete"
NODES_A_PAGE = 16
SEQUENCE_MAX = 1 << 62

_Number = Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)]
Place = tuple[str, _Number, _Number]
"""Of a row: its node, its period's sequence number, and where it is in the period."""
NOWHERE = ("", 0, 0)
L = TypeVar("L", AccountList, ReceiptList)


class Accounting:
    """Handlers."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @route("GET", "/v1/receipts", "viewer", texts=tuple(MEDIA.values()), answer=AccountList)
    async def list_accounts(
        self, call: Call, wanted: AccountPage
    ) -> AccountList | web.StreamResponse:
        """Tenants' accounts: what was read, written, refused and kept, in periods of a minute or all together.

        Pages go through the nodes by name, and through each in the order of its periods; one may be short although there
        is a next one. As `csv` or `jsonl` the next page's cursor is the header `x-next-cursor`.
        """
        nodes = await self._nodes(wanted.node)
        tenants = self._tenants(call, wanted.tenant)
        items: list[AccountItem] = []
        unreachable: dict[str, str] = {}
        incomplete: list[str] = []
        next_ = None

        async def ask(names: Sequence[str], sequence: int, row: int) -> PeriodRows | None:
            """The last one's answer."""
            message = operator_wire.ListAccounts(
                *(wanted.since, wanted.until or EVER_S, sequence, wanted.limit - len(items)),
                *(tenants, bytes.fromhex(wanted.namespace), wanted.total, row),
            )
            listed = await self._cluster.get_each(names, message, PeriodRows)
            unreachable.update(listed.unreachable)
            some = None
            for node, some in sorted(listed.nodes.items()):
                items.extend(each for each in some.rows if call.who.sees(each.tenant))
                if some.incomplete:
                    incomplete.append(node)
            return some

        if wanted.total:
            await ask(nodes, 0, 0)
        else:
            first, sequence, row = unpack_cursor(wanted.cursor, Place) if wanted.cursor else NOWHERE
            names = sorted(name for name in nodes if name >= first)
            for asked, name in enumerate(names):
                # One that is silent takes its time: the next page asks the others.
                if len(items) >= wanted.limit or unreachable or asked == NODES_A_PAGE:
                    next_ = pack_cursor(name, 0, 0)
                    break
                some = await ask([name], *((sequence, row) if name == first else (0, 0)))
                if some is not None and some.more:
                    next_ = pack_cursor(name, some.next_sequence, some.next_row)
                    break
        return _as(wanted.format, AccountList(items, next_, unreachable, incomplete))

    @route(
        "GET", "/v1/receipts/requests", "viewer", texts=tuple(MEDIA.values()), answer=ReceiptList
    )
    async def list_receipts(
        self, call: Call, wanted: ReceiptPage
    ) -> ReceiptList | web.StreamResponse:
        """Receipts of requests, the newest ones: those that nodes remember, of requests that their clients name."""
        nodes = await self._nodes(wanted.node)
        tenants = self._tenants(call, wanted.tenant)
        message = operator_wire.ListReceipts(
            *(wanted.since, wanted.until or EVER_S, wanted.limit, wanted.request, tenants),
            bytes.fromhex(wanted.namespace),
        )
        listed = await self._cluster.get_each(nodes, message, Receipts)
        items = [
            receipt
            for some in listed.nodes.values()
            for receipt in some.receipts
            if call.who.sees(receipt.tenant)
        ]
        items.sort(key=lambda each: (each.begun_s, each.node))
        more = len(items) > wanted.limit or any(some.more for some in listed.nodes.values())
        return _as(wanted.format, ReceiptList(items[-wanted.limit :], more, listed.unreachable))

    async def _nodes(self, node: str) -> Sequence[str]:
        view = await self._cluster.view()
        return [check_node(view, node)] if node else view.names()

    @staticmethod
    def _tenants(call: Call, tenant: str) -> list[str]:
        """Those that are asked for; none: all. Raises `Refused`."""
        if tenant or call.who.tenants == frozenset():
            return [tenant_of(call.who, tenant)]
        return [] if call.who.tenants is None else sorted(call.who.tenants)


def _as(kind: Format, answer: L) -> L | web.Response:
    """The answer in the format that is wanted. A text has in its headers what it has no place for."""
    if kind == "json":
        return answer
    plain = [msgspec.to_builtins(item) for item in answer.items]
    requests = isinstance(answer, ReceiptList)
    text = to_csv(plain, requests=requests) if kind == "csv" else to_lines(plain)
    headers = {
        "Content-Type": MEDIA[kind],
        NEXT: getattr(answer, "next", None),
        UNREACHABLE: ",".join(sorted(answer.unreachable)),
        INCOMPLETE: ",".join(sorted(getattr(answer, "incomplete", ()))),
    }
    return web.Response(body=text.encode(), headers={k: v for k, v in headers.items() if v})
