"""How kvpool is installed with an extra: the one place that says it.

It is not on the Python Package Index yet (docs/release.md), so the name there may be anybody's.
"""

from __future__ import annotations


def install(extra: str) -> str:
    """What to type, for messages."""
    return f"pip install '.[{extra}]' in a checkout of kvpool"
