"""What `kvpool receipts` prints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from kvpool.cli.render.text import DIGEST_SHOWN, Parts, duration, rows_table, size_text
from kvpool.telemetry.receipts import AccountItem, Amount, ReceiptItem

GIB_H = float(1 << 30) * 3600


_SHORT = {"read tokens": "read", "written tokens": "written", "kept GiB h": "kept"}
_LONG = {
    "read tokens": "read",
    "read": "read_bytes",
    "written tokens": "written",
    "written": "written_bytes",
    "refused": "refused_bytes",
    "kept GiB h": "kept",
}


def accounts_view(items: Sequence[AccountItem], *, periods: bool = False) -> Parts:
    """Accounts: of all nodes and periods together, or each by itself."""
    if not items:
        yield Text("nothing was counted in this time")
        return
    if periods:
        names = {"ended": "ended", "node": "node", "tenant": "tenant", "namespace": "namespace"}
        rows = [_together([item]) | {"namespace": _namespace(item)[:6]} for item in items]
        yield rows_table("", rows, names | _SHORT)
        return
    groups: dict[tuple[str, str], list[AccountItem]] = {}
    for item in items:
        groups.setdefault((item.tenant, item.namespace), []).append(item)
    rows = [_together(some) for _, some in sorted(groups.items())]
    names = {"tenant": "tenant", "namespace": "namespace"}
    yield rows_table("", rows, names | _LONG, wraps={"tenant", *_LONG})
    begin, end = min(item.begin_s for item in items), max(item.end_s for item in items)
    since = datetime.fromtimestamp(begin, UTC).isoformat(timespec="seconds")
    yield Text(f"since {since}: {duration(end - begin)}. `--format csv` has all columns")


def _together(items: Sequence[AccountItem]) -> dict[str, Any]:
    """A row for rows of one tenant and namespace."""
    first = items[0]
    reads = [amount for item in items for amount in item.reads.values()]
    kept = sum(sum(item.kept_byte_s.values()) for item in items)
    return {
        "ended": "open"
        if first.open
        else f"{datetime.fromtimestamp(first.end_s, UTC):%m-%d %H:%M}",
        "node": first.node,
        "tenant": first.tenant,
        "namespace": _namespace(first),
        "read": sum(each.tokens for each in reads),
        "read_bytes": sum(each.nbytes for each in reads),
        "written": sum(item.written.tokens for item in items),
        "written_bytes": sum(item.written.nbytes for item in items),
        "refused_bytes": sum(each.nbytes for item in items for each in item.refused.values()),
        "kept": round(kept / GIB_H, 3),
    }


def receipts_view(items: Sequence[ReceiptItem]) -> Parts:
    """Receipts of requests, and where their tokens came from."""
    if not items:
        yield Text("no node remembers such a request: its client names none, or it was long ago")
    for item in items:
        yield Text.assemble((_shown(item.request), "bold"), f" on {item.node}")
        took = "not ended"
        if item.ended_s is not None:
            took = f"ended after {duration(item.ended_s - item.begun_s)}"
        session = f", session {_shown(item.session)}" if item.session else ""
        model = _shown(item.model) or "no model"
        yield Text(f"  tenant {item.tenant}, {_namespace(item)}, {model}{session}: {took}")
        for tier, amount in item.reads.items():
            yield Text(f"  read from {tier}: {_amount(amount)}")
        yield Text(f"  written: {_amount(item.written)}")
        for reason, refused in item.refused.items():
            yield Text(
                f"  refused ({reason}): {refused.parts:,} parts of blocks, "
                f"{size_text(refused.nbytes)}"
            )


def _namespace(item: AccountItem | ReceiptItem) -> str:
    return item.namespace[:DIGEST_SHOWN] or "(others)"


def _shown(text: str) -> str:
    """A client's text, without what moves the cursor."""
    return "".join(filter(str.isprintable, text))


def _amount(amount: Amount) -> str:
    return f"{amount.tokens:,} tokens in {amount.blocks:,} blocks, {size_text(amount.nbytes)}"
