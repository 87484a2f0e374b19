"""What must hold in every history, whatever was broken: rules without I/O.

Each rule takes a history and returns what violates it. The rules know the pool's promises, and none of its code.

**Starvation.** Deadlines are promises of the pool, not of the machine. All processes of a run are on one machine, so
each measures how long it was ready to run and had no core (the kernel counts that for each thread; a process with
Python threads also measures how late a sleeping one of them wakes up). What the client, the nodes and the run itself
measured while an operation was under way is added to its deadline. A process that is stopped, or waits, is not
starved: that time counts.
"""

from __future__ import annotations

import bisect
import itertools
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos import blocks
from tests.chaos.history import (
    Begin,
    End,
    Exited,
    FaultBegan,
    FaultEnded,
    Held,
    Measured,
    Ordered,
    Record,
    Run,
    Said,
    Serving,
    Started,
    Starved,
    of,
)

GRACE_S = 1.0
"""After an operation's deadline the answer may take so much longer."""
FOUND_S = 1.0
"""A replica on a living node is found within so long of another's death."""
STOPS_S = 75.0
"""A daemon that is asked to end does so within this; systemd kills it after 90 s (deploy/systemd)."""
HARNESS = "harness"
DESCRIPTORS_MORE = 64
"""A process that was used may keep so many descriptors more than an unused one: idle connections to servers and peers,
of which a pair of nodes has up to 16 (two peers: 32)."""
MEMORY_MORE_BYTES = 96 << 20
"""And so much memory: allocators do not give back all that they had. In an hour a leak of 30 KiB a second shows."""
FATAL = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
ENDS_WORKERS = {
    *("stop", "stop-worker", "hung-disk", "full-disk", "read-only-disk", "descriptors"),
    *("memory", "memory-worker", "memory-disk"),
}
"""The faults because of which a daemon may end a worker, or a worker itself."""
ENDS_DAEMONS = {"memory"}
"""The faults of which a daemon may die."""
DEATHS = {"kill", "stop"}
"""The faults that are the end of a node for its peers."""


@dataclass(frozen=True, slots=True)
class Violation:
    """rule: its name. what: happened."""

    rule: str
    at: float
    what: str


class History:
    """Records by time, with what the rules look up in them."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = sorted(records, key=lambda record: record.at)
        self.runs = list(of(Run, self.records))
        self.begun = {one.operation: one for one in of(Begin, self.records)}
        self.ended = {one.operation: one for one in of(End, self.records)}
        self.last_at = self.records[-1].at if self.records else 0.0
        self.nodes = [node for run in self.runs for node in run.nodes]
        self._starved: dict[str, tuple[list[float], list[float]]] = {}
        for one in of(Starved, self.records):
            times, totals = self._starved.setdefault(one.who, ([], []))
            times.append(one.at)
            totals.append(one.total_s)

    def operations(self) -> Iterator[tuple[Begin, End]]:
        """Those that are over."""
        for operation, begin in self.begun.items():
            if operation in self.ended:
                yield begin, self.ended[operation]

    def starved_s(self, who: str, start: float, end: float) -> float:
        """At most so long had a process, or a node, no core between two times: the samples lie around them."""
        times, totals = self._starved.get(who, ([], []))
        if not times:
            return 0.0
        first = max(0, bisect.bisect_right(times, start) - 1)
        last = min(len(times) - 1, bisect.bisect_left(times, end))
        # A new life of a node begins at nothing again.
        steps = itertools.pairwise(totals[first : last + 1])
        return sum(max(0.0, after - before) for before, after in steps)

    def machine_s(self, begin: Begin, end: End | None, until: float) -> float:
        """What is added to a deadline: see the module."""
        others = [
            self.starved_s(node, begin.at, until) for node in self.nodes if node != begin.node
        ]
        return (
            (0.0 if end is None else end.starved_s)
            + self.starved_s(begin.client, begin.at, until)
            + self.starved_s(HARNESS, begin.at, until)
            + self.starved_s(begin.node, begin.at, until)
            + max(others, default=0.0)
        )

    def faults(self) -> list[tuple[FaultBegan, float]]:
        """With when each was healed."""
        healed = {one.fault: one.at for one in of(FaultEnded, self.records)}
        return [(one, healed.get(one.fault, self.last_at)) for one in of(FaultBegan, self.records)]


Rule = Callable[[History], Iterator[Violation]]


def no_wrong_byte(history: History) -> Iterator[Violation]:
    """What was read is what is right for the key, whoever put it and whatever broke."""
    for begin, end in history.operations():
        for part, index, seen in end.seen:
            right = blocks.right(begin.prompt, index, part)
            if seen != right:
                what = f"part {part} of block {index} of prompt {begin.prompt} was {seen}, right is {right}"
                yield Violation(
                    "no_wrong_byte", end.at, f"{begin.operation} at {begin.node}: {what}"
                )
        if end.blocks > begin.blocks:
            what = f"{end.blocks} blocks of {begin.blocks}"
            yield Violation("no_wrong_byte", end.at, f"{begin.operation} at {begin.node}: {what}")


def answered_in_time(history: History) -> Iterator[Violation]:
    """Every operation is answered by its deadline and a second, whatever the answer; see starvation.

    An operation without an end is late if its client lived that long.
    """
    ends_of_clients = {one.who: one.at for one in of(Exited, history.records)}
    for begin in history.begun.values():
        end = history.ended.get(begin.operation)
        if end is not None:
            answered = end.answered
        elif begin.client in ends_of_clients:
            answered = ends_of_clients[begin.client]
        else:
            answered = history.last_at
        late = answered - begin.deadline - GRACE_S
        if late <= 0:
            continue
        machine = history.machine_s(begin, end, answered)
        if late > machine:
            how = "no answer for" if end is None else "answered after"
            what = (
                f"{begin.does} {how} {answered - begin.at:.2f} s, deadline {begin.deadline - begin.at:.2f} s, "
                f"starved {machine:.2f} s"
            )
            yield Violation(
                "answered_in_time", answered, f"{begin.operation} at {begin.node}: {what}"
            )


def expected_errors(history: History) -> Iterator[Violation]:
    """A client sees an answer, a miss, or one of the errors that say that something is away or full."""
    for begin, end in history.operations():
        if end.error and not end.expected:
            what = f"{begin.operation}, {begin.does} at {begin.node}: {end.error}"
            yield Violation("expected_errors", end.at, what)


def found_after_a_death(history: History) -> Iterator[Violation]:
    """A prompt that another living node holds is read whole within a second of a node's death.

    One that is not whole has failed, unless there was no core for anybody for as long as it took: see starvation.
    """
    for read in reads_at_deaths(history):
        begin, end = read.begin, read.end
        took = end.answered - max(begin.at, read.death.at)
        machine = history.machine_s(begin, end, end.answered)
        missed = end.blocks < begin.blocks and end.answered - begin.at > machine
        if missed or took > FOUND_S + machine:
            what = (
                f"{begin.operation} at {begin.node}: prompt {begin.prompt}, which {read.holder} holds: "
                f"{end.blocks} of {begin.blocks} blocks, {took:.2f} s after {read.death.target} died "
                f"({read.death.what}), starved {machine:.2f} s"
            )
            yield Violation("found_after_a_death", end.at, what)


@dataclass(frozen=True, slots=True)
class ReadAtDeath:
    """A read under way when a node died, or begun up to a second later, of what another node held all the time."""

    begin: Begin
    end: End
    death: FaultBegan
    holder: str


def reads_at_deaths(history: History) -> Iterator[ReadAtDeath]:
    """Those that a promise is made for: nothing else was broken from the death, or the read's begin, to its end."""
    faults = history.faults()
    held: dict[tuple[str, int], list[Held]] = defaultdict(list)
    for one in of(Held, history.records):
        held[one.node, one.prompt].append(one)
    prompts = {prompt for _, prompt in held}
    reads = [
        (begin, end)
        for begin, end in history.operations()
        if begin.does == "read" and begin.prompt in prompts
    ]
    for death, _ in faults:
        if death.what not in DEATHS or death.target not in history.nodes:
            continue
        for begin, end in reads:
            first = min(begin.at, death.at)
            under_way = begin.at <= death.at + GRACE_S and end.answered >= death.at
            if begin.node == death.target or not under_way:
                continue
            if any(
                one is not death and one.at <= end.answered and healed >= first
                for one, healed in faults
            ):
                continue
            for node in history.nodes:
                said = [one.at for one in held[node, begin.prompt] if one.blocks >= begin.blocks]
                known = said and min(said) <= first and max(said) >= end.answered
                if known and node not in {death.target, begin.node}:
                    yield ReadAtDeath(begin, end, death, node)
                    break


def nothing_leaked(history: History) -> Iterator[Violation]:
    """Once all is quiet, nothing is held; descriptors and memory of a process are about those of an unused one."""
    fresh: dict[tuple[str, str], int] = {}
    for one in of(Measured, history.records):
        if not one.quiet:
            for name, amount in one.amounts.items():
                fresh[one.role, name] = max(amount, fresh.get((one.role, name), 0))
    more = {"descriptors": DESCRIPTORS_MORE, "memory_bytes": MEMORY_MORE_BYTES}
    for one in of(Measured, history.records):
        if not one.quiet:
            continue
        for name, amount in one.amounts.items():
            most = more.get(name, 0)
            if name in more:
                if (one.role, name) not in fresh:
                    continue
                most += fresh[one.role, name]
            if amount > most:
                what = f"{name} of {one.who} ({one.role}): {amount}, at most {most}"
                yield Violation("nothing_leaked", one.at, what)


def no_exit_unordered(history: History) -> Iterator[Violation]:
    """A process ends when it is told to, with status 0 if it was asked to, in time; a started daemon serves.

    A worker may also be ended by its daemon, if it, or its node, was stopped or is otherwise broken; a daemon may die
    of a lack of memory.
    """
    orders: dict[int, list[Ordered]] = defaultdict(list)
    for order in of(Ordered, history.records):
        orders[order.pid].append(order)
    faults = history.faults()
    ends = {"worker": ENDS_WORKERS, "daemon": ENDS_DAEMONS}
    served = {one.pid for one in of(Serving, history.records)}
    for one in of(Exited, history.records):
        fatal = [order for order in orders[one.pid] if order.signal in FATAL and order.at <= one.at]
        if not fatal:
            node = one.who.split("/")[0]
            touched = any(
                fault.what in ends.get(one.role, ())
                and fault.target == node
                and fault.at <= one.at <= healed + STOPS_S
                for fault, healed in faults
            )
            daemon_ends = any(
                order.who == node
                and order.signal in FATAL
                and order.at <= one.at <= order.at + STOPS_S
                for order in of(Ordered, history.records)
            )
            if touched or (one.role == "worker" and daemon_ends):
                continue
            refused = one.role == "daemon" and one.pid not in served
            if refused and any(
                fault.target in {"etcd", "redis"} and fault.at <= one.at <= healed + STOPS_S
                for fault, healed in faults
            ):
                continue  # a daemon does not start without them, and its unit starts it again
            what = f"{one.who} ({one.role}, process {one.pid}) ended by itself, status {one.status}"
            yield Violation("no_exit_unordered", one.at, what)
        elif all(order.signal != signal.SIGKILL for order in fatal):
            took = one.at - fatal[0].at
            if one.role == "daemon" and one.status != 0:
                what = f"{one.who} was asked to end: status {one.status}"
                yield Violation("no_exit_unordered", one.at, what)
            elif took > STOPS_S:
                what = f"{one.who} was asked to end and took {took:.1f} s"
                yield Violation("no_exit_unordered", one.at, what)


def nothing_broken_said(history: History) -> Iterator[Violation]:
    """No daemon wrote a traceback."""
    for one in of(Said, history.records):
        yield Violation("nothing_broken_said", one.at, f"{one.who}: {one.line}")


RULES: tuple[Rule, ...] = (
    no_wrong_byte,
    answered_in_time,
    expected_errors,
    found_after_a_death,
    nothing_leaked,
    no_exit_unordered,
    nothing_broken_said,
)


def check(records: Iterable[Record]) -> list[Violation]:
    """All that violates a rule, by time."""
    history = History(records)
    found = [violation for rule in RULES for violation in rule(history)]
    return sorted(found, key=lambda violation: violation.at)


def summary(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """What a history has in it: a rule proves nothing about what did not happen."""
    history = History(records)
    operations: Counter[str] = Counter()
    deaths = Counter({"reads": 0, "whole within a second": 0})
    for read in reads_at_deaths(history):
        took = read.end.answered - max(read.begin.at, read.death.at)
        deaths["reads"] += 1
        whole = read.end.blocks >= read.begin.blocks
        deaths["whole within a second"] += whole and took <= FOUND_S
    late = Counter({"beyond the deadline": 0, "beyond a second more, starved": 0})
    for begin, end in history.operations():
        if end.error:
            how = end.error.partition(":")[0]
        else:
            how = "whole" if end.blocks >= begin.blocks else "part" if end.blocks else "none"
        operations[f"{begin.does}, {how}"] += 1
        late["beyond the deadline"] += end.answered > begin.deadline
        late["beyond a second more, starved"] += end.answered > begin.deadline + GRACE_S
    return {
        "operations": dict(sorted(operations.items())),
        "without an end": {"operations": len(history.begun) - len(history.ended)},
        "at deaths": dict(deaths),
        "parts compared": {"parts": sum(len(end.seen) for end in history.ended.values())},
        "late": dict(late),
        "faults": dict(sorted(Counter(one.what for one, _ in history.faults()).items())),
        "starts": dict(sorted(Counter(one.role for one in of(Started, history.records)).items())),
        "starved_ms": {
            who: round(1e3 * history.starved_s(who, 0.0, history.last_at))
            for who in [HARNESS, *history.nodes]
        },
    }
