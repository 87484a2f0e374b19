"""`kvpool events`: shows the nodes' events."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import base
from kvpool.cli.base import EXIT_ERROR, EXIT_INTERRUPTED, OPERATORS, OnNodes, Session, asks, option

if TYPE_CHECKING:
    from kvpool.wire.answers import Event


@asks(panel=OPERATORS)
def events(
    at: Session,
    follow: Annotated[bool, option("Continue until Ctrl-C.", "--follow", "-f")] = False,
    node: OnNodes = None,
    kind: Annotated[
        list[str] | None,
        option('Only events of this kind: "node joined", "job ended", change; may be repeated.'),
    ] = None,
    limit: Annotated[int, option("Number of recent events to show.", min=1)] = 100,
) -> None:
    """Show the nodes' events: joins and failures, jobs, and operators' changes.

    With --json one event per line with --follow, otherwise an array.

    Example: kvpool events --kind change --limit 20
    """
    from kvpool.cli.asking import nodes_of
    from kvpool.cli.render.events import Feed, chosen, show_events
    from kvpool.cli.render.events import follow as go_on
    from kvpool.daemon.ops.event_log import KINDS
    from kvpool.errors import InvalidRequest

    for each in kind or ():
        if each not in KINDS:
            raise InvalidRequest(f"--kind {each!r:.40}: must be one of {', '.join(KINDS)}")
    feed = Feed(at.client, list(dict.fromkeys(node or nodes_of(at.client.cluster()))))
    found = chosen(feed.news(), kind or (), limit)
    show = _print_lines if at.as_json else show_events
    try:
        if not follow and at.as_json:
            base.print_json(found)
        else:
            show(found)
        silent = _complain_of(feed.silent, {})
        if follow:
            for _ in go_on(feed, kind or (), show):
                sys.stdout.flush()
                silent = _complain_of(feed.silent, silent)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if silent:
        raise typer.Exit(EXIT_ERROR)


def _print_lines(found: Sequence[Event]) -> None:
    import msgspec

    for event in found:
        print(msgspec.json.encode(event).decode(), flush=True)


def _complain_of(silent: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """For nodes that have just stopped answering."""
    for name, why in silent.items():
        if name not in before:
            base.complain(f"{name} does not answer: {why}")
    return dict(silent)
