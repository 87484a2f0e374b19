"""Tenants' accounts and requests' receipts, of all nodes, as JSON, as lines, or as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from aiohttp import web

from kvpool.admin.cluster_view import Cluster
from kvpool.admin.paging import pack_cursor, unpack_cursor
from kvpool.admin.routing import Call
from kvpool.admin.scope import check_node, tenant_of
from kvpool.admin.types import (
    AccountItem,
    AccountList,
    AccountPage,
    ReceiptItem,
    ReceiptList,
    ReceiptPage,
)
from kvpool.telemetry.receipts import PeriodRow, PeriodRows, Receipts
from kvpool.telemetry.receipts_export import (
    MEDIA,
    Format,
    account_item,
    receipt_item,
    to_csv,
    to_lines,
)
from kvpool.wire import operator as operator_wire

EVER_S = 1e12
NEXT = "x-next-cursor"
UNREACHABLE = "x-unreachable"


class Accounting:
    """Handlers; see `routes.py`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list_accounts(
        self, call: Call, wanted: AccountPage
    ) -> AccountList | web.StreamResponse:
        """Tenants' accounts: what was read, written, refused and kept, in periods of a minute or all together.

        Pages end with a period, of all nodes; as `csv` or `jsonl` the next page's cursor is the header `x-next-cursor`.
        """
        nodes = await self._nodes(wanted.node)
        tenants = self._tenants(call, wanted.tenant)
        after_s = unpack_cursor(wanted.cursor, tuple[float])[0] if wanted.cursor else 0.0
        message = operator_wire.ListAccounts(
            *(wanted.since, wanted.until or EVER_S, after_s, wanted.limit, tenants),
            *(bytes.fromhex(wanted.namespace), wanted.total),
        )
        listed = await self._cluster.json_each(nodes, message, PeriodRows)
        found: list[tuple[float, str, PeriodRow]] = []
        told_s = []  # up to when a node has told all
        for node, some in listed.by_node.items():
            found += [(row.end_s, node, row) for row in some.rows if call.who.sees(row.row.tenant)]
            if some.more and some.rows:
                told_s.append(some.rows[-1].end_s)
        found.sort(key=lambda each: (*each[:2], each[2].row.tenant, each[2].row.namespace))
        next_ = None
        if not wanted.total:
            until_s = min(told_s, default=EVER_S)
            whole = [each for each in found if each[0] <= until_s]
            if len(whole) > wanted.limit:
                until_s = whole[wanted.limit - 1][0]
                whole = [each for each in whole if each[0] <= until_s]
            if whole and (told_s or len(whole) < len(found)):
                next_ = pack_cursor(until_s)
            found = whole
        items = [
            msgspec.convert(account_item(node, msgspec.to_builtins(row)), AccountItem)
            for _, node, row in found
        ]
        answer = AccountList(items, next_, listed.unreachable)
        text = _text(wanted.format, answer.items, requests=False)
        return answer if text is None else _response(wanted.format, text, answer.unreachable, next_)

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
        listed = await self._cluster.json_each(nodes, message, Receipts)
        items = [
            msgspec.convert(receipt_item(node, msgspec.to_builtins(receipt)), ReceiptItem)
            for node, some in listed.by_node.items()
            for receipt in some.receipts
            if call.who.sees(receipt.tenant)
        ]
        items.sort(key=lambda each: (each.begun_s, each.node))
        more = len(items) > wanted.limit or any(some.more for some in listed.by_node.values())
        answer = ReceiptList(items[-wanted.limit :], more, listed.unreachable)
        text = _text(wanted.format, answer.items, requests=True)
        return answer if text is None else _response(wanted.format, text, answer.unreachable, None)

    async def _nodes(self, node: str) -> Sequence[str]:
        view = await self._cluster.view()
        return [check_node(view, node)] if node else view.names()

    @staticmethod
    def _tenants(call: Call, tenant: str) -> list[str]:
        """Those that are asked for; none: all. Raises `Refused`."""
        if tenant or call.who.tenants == frozenset():
            return [tenant_of(call.who, tenant)]
        return [] if call.who.tenants is None else sorted(call.who.tenants)


def _text(
    kind: Format, items: Sequence[AccountItem] | Sequence[ReceiptItem], *, requests: bool
) -> str | None:
    """In the format that is wanted; None: as any answer."""
    if kind == "json":
        return None
    plain = [msgspec.to_builtins(item) for item in items]
    return to_csv(plain, requests=requests) if kind == "csv" else to_lines(plain)


def _response(
    kind: Format, text: str, unreachable: Mapping[str, str], next_: str | None
) -> web.Response:
    """A text, and in its headers what it has no place for."""
    headers = {"Content-Type": MEDIA[kind]}
    if next_ is not None:
        headers[NEXT] = next_
    if unreachable:
        headers[UNREACHABLE] = ",".join(sorted(unreachable))
    return web.Response(body=text.encode(), headers=headers)
