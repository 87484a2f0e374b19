"""Accounts and receipts as lines and tables, for the programs of others. No I/O.

In a table, what is nested has a column of its own, named by the way to it: `reads_ssd_tokens`. The columns are the same
whatever was counted, so that tables of several days can be put together.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Format = Literal["json", "jsonl", "csv"]
MEDIA = {"jsonl": "application/x-ndjson", "csv": "text/csv"}
TIERS = ("dram", "device", "ssd", "peer", "object")
KEPT_TIERS = ("dram", "device", "ssd")
REASONS = ("quota", "full", "limit", "draining", "epoch", "invalid")
AMOUNTS = ("blocks", "tokens", "nbytes")
REFUSED = ("requests", "parts", "nbytes")
_BOOKED = (
    *(f"reads_{tier}_{what}" for tier in TIERS for what in AMOUNTS),
    *(f"written_{what}" for what in AMOUNTS),
    *(f"refused_{reason}_{what}" for reason in REASONS for what in REFUSED),
    *(f"kept_byte_s_{tier}" for tier in KEPT_TIERS),
)
_OF_PERIODS = (
    *("node", "incarnation", "number", "begin_s", "end_s", "seconds", "open"),
    *("tenant", "namespace", "model"),
)
_OF_REQUESTS = (
    *("node", "request", "tenant", "namespace", "model", "session"),
    *("begun_s", "used_s", "ended_s"),
)


def flat(item: Mapping[str, Any], way: str = "") -> dict[str, Any]:
    """An item's numbers and names by their columns."""
    found: dict[str, Any] = {}
    for name, value in item.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{way}{name}_"))
        else:
            found[f"{way}{name}"] = value
    return found


def to_csv(items: Sequence[Mapping[str, Any]], *, requests: bool = False) -> str:
    """A table with its head. requests: of receipts, not of accounts. What was not counted is 0."""
    columns = (*(_OF_REQUESTS if requests else _OF_PERIODS), *_BOOKED)
    out = io.StringIO()
    table = csv.DictWriter(out, columns, restval=0, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for item in items:
        row = flat(item)
        for name in ("namespace", "model", "session"):
            row.setdefault(name, "")
        table.writerow({name: _cell(value) for name, value in row.items()})
    return out.getvalue()


def to_lines(items: Sequence[Mapping[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items)


def _cell(value: Any) -> Any:
    """A client's text must not become a formula in somebody's spreadsheet, nor move what is beside it."""
    if isinstance(value, str):
        plain = "".join(letter if letter.isprintable() else " " for letter in value)
        return f"'{plain}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else plain
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value
