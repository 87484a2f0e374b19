"""What `kvpool events` prints: what nodes have noted, merged by time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.text import Text

from kvpool.cli.render.text import make_console
from kvpool.client.operator import OperatorRequests
from kvpool.errors import KvpoolError, NotAuthenticated
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Event

if TYPE_CHECKING:
    from rich.console import Console


LOOK_S = 0.5
PAGE = 1000  # events in one answer
PAGES_MAX = 8  # a node remembers 4096
KIND_STYLES = {
    "change": "yellow",
    "login failed": "red",
    "node left": "red",
    "node joined": "green",
}


class Feed:
    """Events of some nodes, each once, the oldest first. silent: nodes that do not answer, and why."""

    def __init__(self, client: OperatorRequests, nodes: Sequence[str]) -> None:
        self.silent: dict[str, str] = {}
        self._client = client
        self._after = dict.fromkeys(nodes, 0)

    def news(self) -> list[Event]:
        """What has come since the last call. Raises `NotAuthenticated`."""
        found: list[Event] = []
        for node in self._after:
            try:
                found += self._of(node)
            except NotAuthenticated:
                raise
            except KvpoolError as error:
                self.silent[node] = str(error)
            else:
                self.silent.pop(node, None)
        return sorted(found, key=lambda event: (event.at_s, event.node, event.number))

    def _of(self, node: str) -> list[Event]:
        found: list[Event] = []
        for _ in range(PAGES_MAX):
            page = self._client.ask_node(operator_wire.Events(self._after[node], PAGE), node=node)
            if page.last < self._after[node]:
                self._after[node] = 0  # it was started anew, and counts from 1 again
                continue
            found += page.events
            if not page.events:
                break
            self._after[node] = page.events[-1].number
        return found


def chosen(events: Sequence[Event], kinds: Sequence[str], limit: int) -> list[Event]:
    """The last so many of these kinds; of all kinds where none is named."""
    found = [event for event in events if not kinds or event.kind in kinds]
    return found[max(0, len(found) - limit) :]


def show_events(events: Sequence[Event], console: Console | None = None) -> None:
    """Print a line for each."""
    console = console or make_console()
    for event in events:
        console.print(line(event), soft_wrap=True)


def line(event: Event) -> Text:
    """An event as one line."""
    at = datetime.fromtimestamp(event.at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = Text(f"{at}  {event.node}  ")
    text.append(event.kind, style=KIND_STYLES.get(event.kind, "bold"))
    for name, value in event.details.items():
        if value == "":
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        text.append(f"  {name}={shown}")
    return text


def follow(
    feed: Feed,
    kinds: Sequence[str],
    show: Callable[[Sequence[Event]], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Show what comes, without end; one turn each time it is asked for the next."""
    while True:
        sleep(LOOK_S)
        show(chosen(feed.news(), kinds, PAGE * PAGES_MAX))
        yield
