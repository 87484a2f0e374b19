"""Which faults happen when, from a seed: rules without I/O.

A run is rounds. In each, faults of all kinds begin at random and overlap, at most one on a target at a time; then all
are healed, and a node dies while many prompts are read that another one holds (`Death`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TargetKind = Literal["node", "peer", "worker", "disk", "client", "etcd", "redis"]


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
    Kind("one-way", "peer", 3, (0.5, 8.0), "peers cannot reach a node, which reaches them"),
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
