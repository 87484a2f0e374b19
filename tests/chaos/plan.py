"""Which faults happen when, from a seed: rules without I/O.

A run is rounds. In each, faults of all kinds begin at random and overlap, at most one on a target at a time; then all
are healed, and a node dies while many prompts are read that another one holds (`Death`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TargetKind = Literal[
    "node", "peer", "pair", "worker", "disk", "client", "etcd", "redis", "sentinel"
]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. on: what it is done to. weight: how often, beside the others. lasts_s: from, to."""

    name: str
    on: TargetKind
    weight: float
    lasts_s: tuple[float, float]
    what: str


KINDS = (
    Kind("kill", "node", 3, (0.0, 4.0), "SIGKILL to a daemon, which is started again later"),
    Kind("stop", "node", 3, (0.5, 8.0), "SIGSTOP to a daemon and its workers, SIGCONT later"),
    Kind("terminate", "node", 1, (0.0, 2.0), "SIGTERM to a daemon, which is started again later"),
    Kind("restarts", "node", 0.5, (2.0, 20.0), "SIGKILL to a daemon whenever it serves"),
    Kind("descriptors", "node", 1, (0.5, 6.0), "the control process gets no new descriptors"),
    Kind("memory", "node", 0.5, (0.5, 6.0), "the control process gets no more memory"),
    Kind("kill-worker", "worker", 2, (0.0, 0.0), "SIGKILL to a transfer worker"),
    Kind("stop-worker", "worker", 2, (0.5, 8.0), "SIGSTOP to a transfer worker, SIGCONT later"),
    Kind("memory-worker", "worker", 1, (0.5, 6.0), "a transfer worker gets no more memory"),
    Kind("kill-disk", "disk", 1, (0.0, 0.0), "SIGKILL to a disk worker"),
    Kind("hung-disk", "disk", 2, (0.5, 8.0), "SIGSTOP to a disk worker, SIGCONT later"),
    Kind("full-disk", "disk", 1, (0.5, 8.0), "no write of the disk worker succeeds (EFBIG)"),
    Kind("read-only-disk", "disk", 1, (0.5, 8.0), "nothing on a disk may be changed (EROFS)"),
    Kind("memory-disk", "disk", 1, (0.5, 6.0), "a disk worker gets no more memory"),
    Kind("one-way", "peer", 2, (0.5, 8.0), "peers cannot reach a node, which reaches them"),
    Kind("unheard", "peer", 1, (0.5, 8.0), "a node hears its peers, and its answers do not arrive"),
    Kind("refused", "peer", 1, (0.5, 8.0), "connections to a node are reset"),
    Kind("wrong-bytes", "peer", 2, (0.5, 8.0), "one bit of each 16 KiB from a node is wrong"),
    Kind("slow-peer", "peer", 2, (0.5, 8.0), "what a node is told and says takes 0.1 s each"),
    Kind("lost", "peer", 1, (0.5, 6.0), "each connection to a node ends after 100,000 bytes"),
    Kind(
        "bridge", "pair", 3, (0.5, 8.0), "two nodes do not reach each other, a third reaches both"
    ),
    Kind("etcd-stop", "etcd", 1, (0.5, 12.0), "SIGSTOP to etcd: no quorum, no answer"),
    Kind("etcd-kill", "etcd", 1, (0.0, 8.0), "SIGKILL to etcd, which is started again later"),
    Kind("etcd-slow", "etcd", 1, (2.0, 10.0), "all that etcd is told and says takes 0.3 s"),
    Kind("etcd-refused", "etcd", 1, (0.5, 10.0), "connections to etcd are reset"),
    Kind("etcd-restored", "etcd", 0.5, (1.0, 10.0), "etcd is set back to where it was"),
    Kind("redis-stop", "redis", 1, (0.5, 8.0), "SIGSTOP to Redis"),
    Kind("redis-kill", "redis", 1, (0.0, 4.0), "SIGKILL to Redis, which starts again with nothing"),
    Kind("redis-emptied", "redis", 1, (0.0, 0.0), "FLUSHALL"),
    Kind("redis-slow", "redis", 1, (1.0, 8.0), "all that Redis is told and says takes 0.2 s"),
    Kind("redis-full", "redis", 1, (0.5, 8.0), "Redis takes no more writes (maxmemory)"),
    Kind("redis-forbidden", "redis", 1, (0.5, 8.0), "Redis forbids all commands"),
    Kind("redis-failover", "sentinel", 2, (0.0, 4.0), "a Sentinel makes the replica the primary"),
    Kind("kill-clients", "client", 2, (0.0, 1.0), "SIGKILL to a process of clients; others come"),
    Kind("stop-clients", "client", 2, (0.5, 6.0), "SIGSTOP to a process of clients, SIGCONT later"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
DEATHS = ("kill", "stop")

GAP_S = 2.5
"""Between the beginnings of two faults, on average."""
ROUND_S = 60.0
CALM_S = 20.0
"""The end of a round, for healing and a death."""


@dataclass(frozen=True, slots=True)
class Fault:
    """at_s: since the run began."""

    number: int
    at_s: float
    lasts_s: float
    what: str
    target: str


@dataclass(frozen=True, slots=True)
class Death:
    """Of a node, at a quiet time, while prompts are read at another that a third one holds too."""

    number: int
    at_s: float
    how: str
    victim: str
    holder: str
    reader: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Both by time."""

    faults: tuple[Fault, ...]
    deaths: tuple[Death, ...]


def has_sentinel(seed: int) -> bool:
    """Whether the directory of a seed is a Redis with a replica and a Sentinel: of each other one."""
    return seed % 2 == 1


def make(
    seed: int,
    seconds: float,
    targets: Mapping[TargetKind, Sequence[str]],
    kinds: Iterable[Kind] = KINDS,
) -> Plan:
    """The plan of a seed: the same for the same arguments.

    targets: by kind, such as the names of nodes. What there is no target for does not happen.
    """
    chance = random.Random(seed)
    usable = [kind for kind in kinds if targets.get(kind.on)]
    rounds = max(1, round(seconds / ROUND_S))
    length_s = seconds / rounds
    calm_s = min(CALM_S, length_s / 2)
    faults: list[Fault] = []
    deaths: list[Death] = []
    for turn in range(rounds):
        begin_s, end_s = turn * length_s, (turn + 1) * length_s - calm_s
        faults += _faults(chance, begin_s, end_s, targets, usable, len(faults))
        nodes = list(targets.get("node", ()))
        if len(nodes) >= 3:
            victim, holder, reader = chance.sample(nodes, 3)
            how = DEATHS[turn % len(DEATHS)]
            deaths.append(Death(turn, end_s, how, victim, holder, reader))
    return Plan(tuple(faults), tuple(deaths))


def _faults(
    chance: random.Random,
    begin_s: float,
    end_s: float,
    targets: Mapping[TargetKind, Sequence[str]],
    kinds: Sequence[Kind],
    known: int,
) -> list[Fault]:
    found: list[Fault] = []
    busy_until: dict[tuple[TargetKind, str], float] = {}
    at_s = begin_s
    while kinds:
        at_s += chance.expovariate(1 / GAP_S)
        if at_s >= end_s:
            break
        kind = chance.choices(kinds, [one.weight for one in kinds])[0]
        target = chance.choice(list(targets[kind.on]))
        lasts_s = min(chance.uniform(*kind.lasts_s), end_s - at_s)
        if busy_until.get((kind.on, target), 0.0) > at_s:
            continue
        busy_until[kind.on, target] = at_s + lasts_s
        found.append(Fault(known + len(found), at_s, lasts_s, kind.name, target))
    return found
