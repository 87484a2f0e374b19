"""Regenerate the tables of `docs/metrics.md` from the code.

    .venv/bin/python scripts/document_metrics.py

Text outside the marked parts is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from kvpool.router.metrics import Metrics
from kvpool.telemetry.metrics import families
from kvpool.telemetry.node_stats import NodeStats

Row = tuple[str, str, tuple[str, ...], str]


def daemon_rows() -> Iterable[Row]:
    for metric in families(NodeStats).values():
        yield metric.name, metric.kind.value, metric.labels, metric.help


def router_rows() -> Iterable[Row]:
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, tuple(metric._labelnames), family.documentation


def table(found: Iterable[Row]) -> str:
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, text in found:
        shown = ", ".join(f"`{label}`" for label in labels)
        escaped = text.replace("|", r"\|")
        lines.append(f"| `{name}` | {kind} | {shown} | {escaped} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Escape the replacement text of a regular expression."""
    return text.replace("\\", "\\\\")


def document(text: str) -> str:
    """The document with regenerated tables."""
    for mark, found in (("daemon", daemon_rows()), ("router", router_rows())):
        part = re.compile(rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text, count = part.subn(rf"\g<1>{_escaped(table(found))}\g<2>", text)
        assert count == 1, f"docs/metrics.md has no place for the table of the {mark}"
    return text


if __name__ == "__main__":
    path = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
    path.write_text(document(path.read_text()))
