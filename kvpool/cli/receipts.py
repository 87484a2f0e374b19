"""`kvpool receipts`: what tenants, and requests, have used of the cache."""

from __future__ import annotations

import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AnyNode, Socket, app, option
from kvpool.errors import ConfigError, InvalidRequest
from kvpool.types import DEFAULT_TENANT

if TYPE_CHECKING:
    from kvpool.client.gateway import Operator
    from kvpool.telemetry.receipts import AccountItem, ReceiptItem
    from kvpool.wire import operator as operator_wire

EVER_S = 1e12
PAGE = 1000
INCOMPLETE = "its files of receipts cannot all be read: see its log"


@app.command(rich_help_panel=OPERATORS)
def receipts(
    tenant: Annotated[str, option("Of this tenant only.")] = "",
    namespace: Annotated[
        str, option("Of this namespace only: all of its digest.", metavar="DIGEST")
    ] = "",
    node: AnyNode = "",
    since: Annotated[
        str,
        option(
            "From then on: 24h, 7d, or 2026-12-01T00:00:00Z. Empty: all that is kept.",
            metavar="TIME",
        ),
    ] = "",
    until: Annotated[str, option("Before then. Empty: now.", metavar="TIME")] = "",
    request: Annotated[
        str,
        option(
            "Of the requests whose label contains this, one by one, instead of tenants' accounts.",
            metavar="ID",
        ),
    ] = "",
    periods: Annotated[
        bool, option("Each period by itself, instead of all together.", "--periods")
    ] = False,
    as_: Annotated[
        Literal["table", "json", "jsonl", "csv"], option("How they are printed.", "--format")
    ] = "table",
    socket: Socket = None,
) -> None:
    """Show what tenants have read from the cache, written to it, been refused, and kept, on all nodes.

    Example: kvpool receipts --since 24h

    Example: kvpool receipts --tenant search --since 2026-12-01T00:00:00Z --periods --format csv
    """
    import msgspec

    from kvpool.cli.asking import each_of
    from kvpool.cli.render.receipts import accounts_view, receipts_view
    from kvpool.config import secret_of
    from kvpool.telemetry.receipts_export import to_csv, to_lines
    from kvpool.wire import operator as operator_wire

    now_s = time.time()
    began = moment(since, now_s, "--since") if since else 0.0
    ends = moment(until, now_s, "--until") if until else EVER_S
    try:
        digest = bytes.fromhex(namespace)
    except ValueError:
        raise InvalidRequest("--namespace: give all 32 hex digits of its digest") from None
    tenants = [tenant] if tenant else []
    # Whoever has a tenant's token may have no other; operators need none.
    login = tenant if tenant and secret_of("KVPOOL_TOKEN") else DEFAULT_TENANT
    with base.client_of(socket, login) as client:
        nodes = [node] if node else sorted(each["node"] for each in client.cluster()["nodes"])
        ask: Any
        if request:
            receipts = operator_wire.ListReceipts(began, ends, PAGE, request, tenants, digest)
            ask = partial(_requests, client, receipts)
        else:
            accounts = operator_wire.ListAccounts(
                *(began, ends, 0, PAGE, tenants, digest, not periods)
            )
            ask = partial(_accounts, client, accounts)
        found, silent = each_of(nodes, ask)
    items = [item for some, _ in found.values() for item in some]
    # What is said of answers that are not whole.
    lacking = {name: lack for name, (_, lack) in found.items() if lack}
    items.sort(key=lambda item: (item.begun_s if request else item.begin_s, item.node))
    plain = msgspec.to_builtins(items)
    if as_ == "jsonl":
        print(to_lines(plain), end="")
    elif as_ == "csv":
        print(to_csv(plain, requests=bool(request)), end="")
    else:
        view = receipts_view(items) if request else accounts_view(items, periods=periods)
        base.show({"items": plain, "unreachable": silent}, view, as_json=as_ == "json")
    base.complain_of(silent, fatal=False)
    base.complain_of(lacking, fatal=False)
    if silent or (lacking and not request):
        raise typer.Exit(EXIT_ERROR)


def _accounts(
    client: Operator, wanted: operator_wire.ListAccounts, node: str
) -> tuple[list[AccountItem], str]:
    """All rows of a node, page by page; and what they lack, if anything."""
    import msgspec

    from kvpool.telemetry.receipts import PeriodRows

    items: list[AccountItem] = []
    incomplete, more = False, True
    while more:
        page = msgspec.convert(client.ask_node(wanted, node=node), PeriodRows)
        items += page.rows
        incomplete, more = incomplete or page.incomplete, page.more
        wanted = msgspec.structs.replace(
            wanted, from_sequence=page.next_sequence, from_row=page.next_row
        )
    return items, INCOMPLETE if incomplete else ""


def _requests(
    client: Operator, wanted: operator_wire.ListReceipts, node: str
) -> tuple[list[ReceiptItem], str]:
    """The last receipts of a node; and what they lack, if anything."""
    import msgspec

    from kvpool.telemetry.receipts import Receipts

    found = msgspec.convert(client.ask_node(wanted, node=node), Receipts)
    lack = f"there are more: these are its last {PAGE:,}" if found.more else ""
    return found.receipts, lack


def moment(text: str, now_s: float, option: str) -> float:
    """Seconds since 1970: of a time, or of so long before now. Raises `ConfigError`."""
    from kvpool.cli.naming import period

    try:
        return now_s - period(text)
    except InvalidRequest:
        pass  # a time, then
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(
            f"{option}: give a time such as 2026-12-01T00:00:00Z, or how long ago, such as 24h, not {text!r:.60}"
        ) from None
