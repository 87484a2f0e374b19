"""Regenerate the tables of `docs/compatibility.md` from `docs/compatibility.toml`.

    .venv/bin/python scripts/document_compatibility.py

Text outside the marked part is kept.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"


def document(text: str, table: dict[str, Any]) -> str:
    """The page with regenerated tables: one of all engines, what is to be said of each one, and other programs."""
    engines = table["engine"]
    heads = [f"[{one['name']}]({one['page']})" for one in engines]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(engines)) + "|"]
    for name, shown in table["features"]:
        lines.append(f"| {shown} | " + " | ".join(one[name]["state"] for one in engines) + " |")
    for one in engines:
        lines += ["", f"## {one['name']}", "", f"Tested with {one['versions']}.", ""]
        for name, shown in table["features"]:
            cell = one[name]
            said = f" ({cell['note']})" if "note" in cell else ""
            by = f": `{path_of(one, cell)}`" if "by" in cell else ""
            if cell["state"] != "none" or said:
                state = "there is none" if cell["state"] == "none" else cell["state"]
                lines.append(f"- {shown}: {state}{said}{by}")
    lines += ["", "## Programs written for Mooncake Store", ""]
    lines += ["Run unchanged over [`kvpool.engine_plugins.mooncake`](mooncake.md).", ""]
    for one in table["program"]:
        lines.append(
            f"- {one['name']} {one['versions']}: {one['state']} ({one['note']}): `{one['by']}`"
        )
    part = re.compile(r"(<!-- engines -->\n).*?(\n<!-- end -->)", re.DOTALL)
    made, count = part.subn(lambda found: found[1] + "\n".join(lines) + found[2], text)
    assert count == 1, "docs/compatibility.md has no place for the tables"
    return made


def path_of(engine: dict[str, Any], cell: dict[str, Any]) -> str:
    """The test of a cell, from the repository's root."""
    by = str(cell["by"])
    return by if by.startswith("tests/") else f"{engine['folder']}/{by}"


if __name__ == "__main__":
    page = DOCS / "compatibility.md"
    page.write_text(
        document(page.read_text(), tomllib.loads((DOCS / "compatibility.toml").read_text()))
    )
