"""What `kvpool receipts` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from kvpool.cli.render.text import DIGEST_SHOWN, duration, make_console, make_table, size_text

if TYPE_CHECKING:
    from rich.console import Console

GIB_H = float(1 << 30) * 3600


def show_accounts(
    items: Sequence[Mapping[str, Any]], console: Console | None = None, *, periods: bool = False
) -> None:
    """Print accounts: of all nodes and periods together, or each by itself."""
    console = console or make_console()
    if not items:
        console.print("nothing was counted in this time")
        return
    if periods:
        table = make_table("", "ended", "node", "tenant", "namespace", *_SHORT)
        for item in items:
            end = datetime.fromtimestamp(item["end_s"], UTC).strftime("%m-%d %H:%M")
            names = (escape(item["node"]), escape(item["tenant"]), _namespace(item)[:6])
            read, _, written, _, _, kept = _numbers([item])
            table.add_row("open" if item["open"] else end, *names, read, written, kept)
        console.print(table)
        return
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for item in items:
        groups.setdefault((item["tenant"], item["namespace"]), []).append(item)
    table = make_table("", "tenant", "namespace", *_COLUMNS)
    for (tenant, _), some in sorted(groups.items()):
        table.add_row(escape(tenant), _namespace(some[0]), *_numbers(some))
    console.print(table)
    begin = min(item["begin_s"] for item in items)
    end = max(item["end_s"] for item in items)
    since = datetime.fromtimestamp(begin, UTC).isoformat(timespec="seconds")
    console.print(f"since {since}: {duration(end - begin)}. `--format csv` has all columns")


def show_receipts(items: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print receipts of requests, and where their tokens came from."""
    console = console or make_console()
    if not items:
        console.print("no node remembers such a request: its client names none, or it was long ago")
        return
    for item in items:
        console.print(f"[bold]{_shown(item['request'])}[/] on {escape(item['node'])}")
        ended = item["ended_s"]
        took = "not ended" if ended is None else f"ended after {duration(ended - item['begun_s'])}"
        session = f", session {_shown(item['session'])}" if item["session"] else ""
        console.print(
            f"  tenant {escape(item['tenant'])}, {_namespace(item)}, "
            f"{_shown(item['model']) or 'no model'}{session}: {took}"
        )
        for tier, amount in item["reads"].items():
            console.print(f"  read from {tier}: {_amount(amount)}")
        console.print(f"  written: {_amount(item['written'])}")
        for reason, refused in item["refused"].items():
            console.print(
                f"  refused ({reason}): {refused['parts']:,} parts of blocks, "
                f"{size_text(refused['nbytes'])}"
            )


_COLUMNS = (">read tokens", ">read", ">written tokens", ">written", ">refused", ">kept GiB h")

_SHORT = (">read tokens", ">written tokens", ">kept GiB h")


def _numbers(items: Sequence[Mapping[str, Any]]) -> list[str]:
    reads = [amount for item in items for amount in item["reads"].values()]
    written = [item["written"] for item in items]
    refused = [each for item in items for each in item["refused"].values()]
    kept = sum(sum(item["kept_byte_s"].values()) for item in items)
    return [
        f"{sum(each['tokens'] for each in reads):,}",
        size_text(sum(each["nbytes"] for each in reads)),
        f"{sum(each['tokens'] for each in written):,}",
        size_text(sum(each["nbytes"] for each in written)),
        size_text(sum(each["nbytes"] for each in refused)),
        f"{kept / GIB_H:,.3f}",
    ]


def _namespace(item: Mapping[str, Any]) -> str:
    return item["namespace"][:DIGEST_SHOWN] or "(others)"


def _shown(text: str) -> str:
    """A client's text, without what moves the cursor."""
    return escape("".join(filter(str.isprintable, text)))


def _amount(amount: Mapping[str, Any]) -> str:
    blocks, tokens = amount["blocks"], amount["tokens"]
    return f"{tokens:,} tokens in {blocks:,} blocks, {size_text(amount['nbytes'])}"
