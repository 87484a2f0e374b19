"""`kvpool receipts`: what tenants, and requests, have used of the cache."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated, Any, Literal

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, OPERATORS, AnyNode, Socket, app
from kvpool.errors import ConfigError, InvalidRequest, KvpoolError
from kvpool.types import DEFAULT_TENANT

EVER_S = 1e12
PAGE = 1000
INCOMPLETE = "its files of receipts cannot all be read: see its log"


@app.command(rich_help_panel=OPERATORS)
def receipts(
    tenant: Annotated[str, typer.Option(help="Of this tenant only.")] = "",
    namespace: Annotated[
        str, typer.Option(help="Of this namespace only: all of its digest.", metavar="DIGEST")
    ] = "",
    node: AnyNode = "",
    since: Annotated[
        str,
        typer.Option(
            help="From then on: 24h, 7d, or 2026-12-01T00:00:00Z. Empty: all that is kept.",
            metavar="TIME",
        ),
    ] = "",
    until: Annotated[str, typer.Option(help="Before then. Empty: now.", metavar="TIME")] = "",
    request: Annotated[
        str,
        typer.Option(
            help="Of the requests whose label contains this, one by one, instead of tenants' accounts.",
            metavar="ID",
        ),
    ] = "",
    periods: Annotated[
        bool, typer.Option("--periods", help="Each period by itself, instead of all together.")
    ] = False,
    as_: Annotated[
        Literal["table", "json", "jsonl", "csv"],
        typer.Option("--format", help="How they are printed."),
    ] = "table",
    socket: Socket = None,
) -> None:
    """Show what tenants have read from the cache, written to it, been refused, and kept, on all nodes.

    Example: kvpool receipts --since 24h

    Example: kvpool receipts --tenant search --since 2026-12-01T00:00:00Z --periods --format csv
    """
    from kvpool.cli.render.receipts import show_accounts, show_receipts
    from kvpool.config import secret_of
    from kvpool.telemetry.receipts_export import to_csv, to_lines

    now_s = time.time()
    began = moment(since, now_s, "--since") if since else 0.0
    ends = moment(until, now_s, "--until") if until else EVER_S
    try:
        digest = bytes.fromhex(namespace)
    except ValueError:
        raise InvalidRequest("--namespace: give all 32 hex digits of its digest") from None
    silent: dict[str, str] = {}
    lacking: list[str] = []  # what is said of answers that are not whole
    items: list[dict[str, Any]] = []
    # Whoever has a tenant's token may have no other; operators need none.
    login = tenant if tenant and secret_of("KVPOOL_TOKEN") else DEFAULT_TENANT
    with base.client_of(socket, login) as client:
        nodes = [node] if node else sorted(each["node"] for each in client.cluster()["nodes"])
        for name in nodes:
            try:
                if request:
                    some, lack = _requests(client, name, began, ends, request, tenant, digest)
                else:
                    some, lack = _accounts(
                        client, name, began, ends, tenant, digest, total=not periods
                    )
                items += some
                lacking += [f"{name}: {lack}"] if lack else []
            except KvpoolError as error:
                silent[name] = str(error)
    items.sort(key=lambda item: (item.get("begin_s", item.get("begun_s")), item["node"]))
    match as_:
        case "json":
            base.print_json({"items": items, "unreachable": silent})
        case "jsonl":
            print(to_lines(items), end="")
        case "csv":
            print(to_csv(items, requests=bool(request)), end="")
        case _ if request:
            show_receipts(items)
        case _:
            show_accounts(items, periods=periods)
    for name, why in silent.items():
        base.complain(f"{name}: {why}")
    for text in lacking:
        base.complain(text)
    if silent or (lacking and not request):
        raise typer.Exit(EXIT_ERROR)


def _accounts(
    client: Any,
    node: str,
    since_s: float,
    until_s: float,
    tenant: str,
    digest: bytes,
    *,
    total: bool,
) -> tuple[list[dict[str, Any]], str]:
    """All rows of a node, page by page; and what they lack, if anything."""
    from kvpool.telemetry.receipts_export import account_item
    from kvpool.wire import operator as operator_wire

    items: list[dict[str, Any]] = []
    incomplete = False
    sequence = row = 0
    while True:
        message = operator_wire.ListAccounts(
            *(since_s, until_s, sequence, PAGE, [tenant] if tenant else [], digest, total, row)
        )
        found = client.ask_node(message, node=node)
        items += [account_item(node, each) for each in found["rows"]]
        incomplete |= found["incomplete"]
        if not found["more"]:
            return items, INCOMPLETE if incomplete else ""
        sequence, row = found["next_sequence"], found["next_row"]


def _requests(
    client: Any,
    node: str,
    since_s: float,
    until_s: float,
    request: str,
    tenant: str,
    digest: bytes,
) -> tuple[list[dict[str, Any]], str]:
    """The last receipts of a node; and what they lack, if anything."""
    from kvpool.telemetry.receipts_export import receipt_item
    from kvpool.wire import operator as operator_wire

    message = operator_wire.ListReceipts(
        *(since_s, until_s, PAGE, request, [tenant] if tenant else [], digest)
    )
    found = client.ask_node(message, node=node)
    lack = f"there are more: these are its last {PAGE:,}" if found["more"] else ""
    return [receipt_item(node, each) for each in found["receipts"]], lack


def moment(text: str, now_s: float, option: str) -> float:
    """Seconds since 1970: of a time, or of so long before now. Raises `ConfigError`."""
    from kvpool.cli.render.naming import period

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
