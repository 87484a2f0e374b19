"""What a daemon that does not answer yet waits for, from what it keeps beside its socket."""

from __future__ import annotations

from kvpool.cli.render.text import size_text, used_text
from kvpool.daemon.server.memory_wait import read_wait


def waiting(socket: str) -> str:
    """What the daemon at this socket waits for; empty if it does not, or there is none."""
    waits = read_wait(socket)
    if waits is None:
        return ""
    if waits.wanted_bytes:
        return (
            f"the daemon at {socket} is starting, and takes its memory: "
            f"{used_text(waits.taken_bytes, waits.wanted_bytes)} so far"
        )
    return (
        f"the daemon at {socket} is starting, and waits for memory: {size_text(waits.missing_bytes)} are missing, "
        f"{size_text(waits.free_bytes)} are free. It has waited for {waits.waited_s:.0f} s, and gives up in "
        f"{waits.left_s:.0f} s"
    )
