"""`kvpool demo`: what the pool gains, in seconds, without an engine."""

from __future__ import annotations

import sys

from kvpool.cli import base
from kvpool.cli.base import AsJson, app


@app.command()
def demo(as_json: AsJson = False) -> None:
    """Show in ten seconds what a pool gains: a real daemon and router, and two engines that simulate computing.

    Needs no engine and no other server. Leaves nothing behind.

    Example: kvpool demo
    """
    import asyncio
    from functools import partial

    from kvpool.cli.render.demo import rounds_view
    from kvpool.demo.play import play

    with base.in_foreground():
        rounds = asyncio.run(play(partial(print, file=sys.stderr, flush=True)))
    base.show(rounds, rounds_view(rounds), as_json=as_json)
