"""How many file descriptors this process may have: whoever serves many connections asks for as many as may be."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """To what the hard limit allows: each client or engine costs some, and soft limits are often low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
