"""`kvpool top`: what the nodes of a cluster do now, from what they tell of themselves, two looks apart."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvpool.cli.asking import nodes_of
from kvpool.cli.render.cluster import STATE_STYLES
from kvpool.cli.render.jobs import jobs_table
from kvpool.cli.render.text import (
    DIGEST_SHOWN,
    Column,
    Rows,
    cluster_title,
    make_console,
    rows_table,
    size_text,
    used_text,
)
from kvpool.cli.render.text import count as counted
from kvpool.client.operator import OperatorRequests
from kvpool.errors import KvpoolError
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.rates import Fill, Rates, count, fills, rates
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobState, JobView

NODES_MAX = 256  # that are looked at, in the order of their names
ASKING_MAX = 8  # nodes at a time
FIRST_LOOK_S = 5.0  # for all nodes' first answers
Answer = Future[tuple[Any, Any, float]]
"""A node's numbers, its jobs, and when they came."""
INTERRUPT = 3  # Ctrl-C, where no terminal makes a signal of it
QUIT = frozenset((*b"qQ", INTERRUPT))
NAMESPACES_SHOWN = 10  # those of which most blocks are asked for
RATES = ("put/s", "read/s", "pulled/s", "hits")


class Asked(NamedTuple):
    """Of a namespace, the blocks that reads asked for, and those that they got: since a node was started, or in a second,
    as `kvpool namespaces` counts them."""

    asked: float
    hits: float


ByNamespace = dict[tuple[str, str], Asked]
"""By tenant and digest, in hex."""


@dataclass(slots=True)
class Seen:
    """What is known of one node. at_s: when it was told. namespaces: what was asked for in a second, of those that were
    asked for. error: why it is not known better."""

    stats: NodeStats | None = None
    jobs: Sequence[JobView] = ()
    at_s: float = 0.0
    rates: Rates = field(default_factory=Rates)
    namespaces: ByNamespace = field(default_factory=dict)
    error: str = ""
    asked: Answer | None = field(default=None, repr=False)


def asked_of(stats: NodeStats) -> ByNamespace:
    """Since the node was started."""
    found = {}
    for tenant, known in stats.tenants.items():
        for digest, one in known.namespaces.items():
            hits = one.reads.local + one.reads.fetched
            found[tenant, digest] = Asked(hits + one.reads.missed, hits)
    return found


def asked_between(before: ByNamespace, after: ByNamespace, seconds: float) -> ByNamespace:
    """In a second, without those that nobody asked for, or whose counts began anew."""
    found = {}
    for name, new in after.items():
        old = before.get(name, Asked(0, 0))
        asked, hits = new.asked - old.asked, new.hits - old.hits
        if seconds > 0 and asked > 0 and hits >= 0:
            found[name] = Asked(asked / seconds, hits / seconds)
    return found


class Watch:
    """Looks at all nodes at once, a turn at a time. One thread calls it."""

    def __init__(
        self, client: OperatorRequests, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seen: dict[str, Seen] = {}
        self.cluster: Mapping[str, Any] = {}
        self._client = client
        self._clock = clock
        self._wanted: SimpleQueue[tuple[str, Answer] | None] = SimpleQueue()
        # An executor's threads would hold up the end of the process where a node hangs.
        for _ in range(ASKING_MAX):
            Thread(target=self._work, name="kvpool-top", daemon=True).start()

    def close(self) -> None:
        """Answers that have not come are not waited for."""
        for _ in range(ASKING_MAX):
            self._wanted.put(None)

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            name, answer = wanted
            try:
                answer.set_result(self._ask(name))
            except KvpoolError as error:
                answer.set_exception(error)

    def turn(self, wait_s: float) -> None:
        """Ask the nodes that owe no answer, and take what comes in this time. Raises `KvpoolError`."""
        self.cluster = self._client.cluster()
        states = {record["node"]: record["state"] for record in self.cluster["nodes"]}
        names = nodes_of(self.cluster)[:NODES_MAX]
        self.seen = {name: self.seen.get(name, Seen()) for name in names}
        for name, seen in self.seen.items():
            if seen.asked is None:
                seen.asked = Future()
                self._wanted.put((name, seen.asked))
        asked = [seen.asked for seen in self.seen.values() if seen.asked is not None]
        wait(asked, timeout=wait_s)
        for name, seen in self.seen.items():
            if seen.asked is not None and seen.asked.done():
                _take(seen)
            elif seen.stats is None:
                seen.error = f"no answer yet ({states.get(name, 'not a member')})"

    def _ask(self, name: str) -> tuple[Any, Any, float]:
        stats = self._client.inspect(name)
        return stats, self._client.ask_node(operator_wire.Jobs(), node=name), self._clock()


def _take(seen: Seen) -> None:
    """An answer has come, or none will."""
    assert seen.asked is not None, "it was asked"
    asked, seen.asked = seen.asked, None
    try:
        stats, jobs, at_s = asked.result()
    except KvpoolError as error:
        seen.error = str(error)
        return
    seen.rates, seen.namespaces = Rates(), {}
    if seen.stats is not None and seen.stats.incarnation == stats.incarnation:
        seconds = at_s - seen.at_s
        seen.rates = rates(count(seen.stats), count(stats), seconds)
        seen.namespaces = asked_between(asked_of(seen.stats), asked_of(stats), seconds)
    seen.stats, seen.jobs, seen.at_s, seen.error = stats, jobs, at_s, ""


def plain(watch: Watch) -> dict[str, Any]:
    """For `--json`."""
    rows = []
    for name, seen in watch.seen.items():
        row: dict[str, Any] = {"node": name, "error": seen.error}
        if seen.stats is not None:
            row |= {
                "state": seen.stats.cluster.state,
                "standing": seen.stats.cluster.standing,
                "tiers": fills(seen.stats),
                "rates": seen.rates,
                "totals": count(seen.stats),
                "namespaces": [
                    {"tenant": tenant, "digest": digest, "asked_s": one.asked, "hits_s": one.hits}
                    for (tenant, digest), one in seen.namespaces.items()
                ],
                "leases": seen.stats.leases,
                "clients": seen.stats.clients,
                "jobs": _running(seen),
            }
        rows.append(row)
    return {"cluster": watch.cluster["cluster"], "nodes": rows}


def _table(watch: Watch, tiers: Sequence[str]) -> Rows:
    """A row for each node. On narrow screens tiers are in percent only, and leases and clients are left out."""
    columns: dict[str, Column] = {"node": lambda row: row[0], "state": lambda row: _state(row[1])}
    for tier in tiers:
        columns[f">{tier}"] = partial(_fill, tier, _percent)
        columns[f">{tier} used"] = partial(_fill, tier, _used)
    columns |= {
        ">put/s": lambda row: _rate(row[1].rates.put_bytes_s),
        ">read/s": lambda row: _rate(row[1].rates.read_bytes_s),
        ">pulled/s": lambda row: _rate(row[1].rates.pulled_bytes_s),
        ">hits": lambda row: "" if (hits := row[1].rates.hit_rate) is None else f"{hits:.0%}",
        ">leases": lambda row: f"{row[1].stats.leases:,}" if row[1].stats else "",
        ">clients": lambda row: f"{row[1].stats.clients:,}" if row[1].stats else "",
    }
    if any(seen.error for seen in watch.seen.values()):
        columns[""] = lambda row: Text(row[1].error, style="yellow")
    spare = ("leases", "clients", *(f"{tier} used" for tier in tiers))
    return rows_table("", watch.seen.items(), columns, wraps={"node", "", *RATES}, spare=spare)


def _state(seen: Seen) -> Text:
    if seen.stats is None:
        return Text("unknown", style="bold red")
    state = seen.stats.cluster.state
    return Text(state, style=STATE_STYLES.get(state, ""))


def _fill(tier: str, show: Callable[[Fill], str], row: tuple[str, Seen]) -> str:
    found = None if row[1].stats is None else fills(row[1].stats).get(tier)
    return show(found) if found else ""


def _used(fill: Fill) -> str:
    return used_text(fill.used_bytes, fill.size_bytes)


def _percent(fill: Fill) -> str:
    return f"{fill.used_bytes / fill.size_bytes:.0%}" if fill.size_bytes else ""


def _rate(bytes_s: float | None) -> str:
    return "" if bytes_s is None else f"{size_text(bytes_s)}/s"


def _namespaces_table(found: ByNamespace) -> Rows:
    """A row for each namespace of which blocks are asked for."""
    columns: dict[str, Column] = {"namespace": lambda row: row[0][1][:DIGEST_SHOWN]}
    if len({tenant for tenant, _ in found}) > 1:
        columns["tenant"] = lambda row: row[0][0]
    columns[">asked/s"] = lambda row: f"{row[1].asked:,.0f}"
    columns[">hits"] = lambda row: f"{row[1].hits / row[1].asked:.0%}"
    busiest = sorted(found.items(), key=lambda item: (-item[1].asked, item[0]))
    return rows_table("", busiest[:NAMESPACES_SHOWN], columns)


def _on_all(seen: Iterable[Seen]) -> ByNamespace:
    """All nodes together."""
    found: ByNamespace = {}
    for each in seen:
        for name, one in each.namespaces.items():
            before = found.get(name, Asked(0, 0))
            found[name] = Asked(before.asked + one.asked, before.hits + one.hits)
    return found


def view(watch: Watch, *, hint: str = "") -> RenderableType:
    """The whole screen."""
    known = [seen for seen in watch.seen.values() if seen.stats is not None]
    names = {tier for seen in known if seen.stats is not None for tier in fills(seen.stats)}
    tiers = [tier for tier in ("device", "dram", "ssd") if tier in names]
    jobs = [job for seen in known for job in _running(seen)]
    running = f"{counted(len(jobs), 'job')} running"
    title = cluster_title(watch.cluster["cluster"], counted(len(watch.seen), "node"), running)
    parts: list[RenderableType] = [title, Text(), _table(watch, tiers)]
    if namespaces := _on_all(known):
        parts += [Text(), _namespaces_table(namespaces)]
    if jobs:
        parts += [Text(), jobs_table(jobs)]
    if hint:
        parts += [Text(), Text(hint, style="dim")]
    return Group(*parts)


def _running(seen: Seen) -> list[JobView]:
    return [job for job in seen.jobs if job.state is JobState.RUNNING]


def once(
    client: OperatorRequests, every_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> Watch:
    """Two looks, so that there are rates."""
    with closing(Watch(client)) as watch:
        watch.turn(FIRST_LOOK_S)
        sleep(every_s)
        watch.turn(FIRST_LOOK_S)
    return watch


def run(client: OperatorRequests, every_s: float) -> None:
    """Until q, on a terminal. Raises `KeyboardInterrupt`."""
    with closing(Watch(client)) as watch:
        watch.turn(FIRST_LOOK_S)
        with (
            _single_keys() as keys,
            Live(console=make_console(), screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.update(view(watch, hint="q ends"), refresh=True)
                if typed := keys(every_s) & QUIT:
                    if INTERRUPT in typed:
                        raise KeyboardInterrupt
                    return
                watch.turn(every_s)


@contextmanager
def _single_keys() -> Iterator[Callable[[float], frozenset[int]]]:
    """The keys that are typed within so many seconds, without Enter; nothing where nobody can type."""
    if not sys.stdin.isatty():

        def nothing(seconds: float) -> frozenset[int]:
            time.sleep(seconds)
            return frozenset()

        yield nothing
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def typed(seconds: float) -> frozenset[int]:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([fd], [], [], left)
            if readable:
                found = frozenset(os.read(fd, 64))
                if found & QUIT:
                    return found
        return frozenset()

    try:
        tty.setcbreak(fd)
        yield typed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
