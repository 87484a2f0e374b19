"""Whether blocks that are not in memory here are loaded, or left to the engine to compute. No I/O, no clock.

A prompt's missing blocks may lie on several sources, of which some are faster than the engine computes and
some are not. So prefixes of several lengths are compared: one ends wherever the next block lies on other
sources than the one before it. Within such a run each block takes as long as the one before it to load,
and no less to compute, so that its ends are the only lengths that can be best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvpool.daemon.core.blocks import PartTable
from kvpool.hit_rule import needed
from kvpool.placement.directory.base import Entry
from kvpool.placement.peer_selection import Candidate, Forecast, forecast
from kvpool.placement.peers import Peers
from kvpool.storage.stack import worth_loading
from kvpool.types import Recompute

ENDS_MAX, ENDS_MAX_OF_MANY = 4, 2
MANY = 2048
"""Lengths that are compared, and how many of a prefix of so many parts of blocks; of more, as many evenly
chosen ones. Each costs as much as planning its transfers, and nothing else runs meanwhile."""


class Choice(NamedTuple):
    """blocks: of the prefix that is to be there. declined: what is not loaded, by who would have delivered it."""

    blocks: int
    declined: dict[bytes, list[tuple[PartTable, bytes]]]


class Sources(NamedTuple):
    """Who can be asked for what is missing.

    candidates: of a part of a block, given the block's entries. delivering: those who are delivering it now.
    """

    candidates: Callable[[PartTable, bytes, Sequence[Entry]], Sequence[Candidate]]
    delivering: Callable[[PartTable, bytes], Sequence[bytes]]
    peers: Peers
    slice_bytes: int


def choose(
    tables: Sequence[PartTable],
    keys: Sequence[bytes],
    here: int,
    located: Mapping[bytes, Sequence[Entry]],
    usable: Callable[[Sequence[bytes]], int],
    sources: Sources,
    recompute: Recompute,
    now: float,
) -> Choice:
    """How much of a prefix is to be there, of which the first `here` blocks are in memory.

    usable: how much of a prefix could be there. recompute: of all keys.
    """
    there = usable(keys)
    if there <= here:
        return Choice(there, {})
    forecasts: dict[int, tuple[Forecast, list[list[bytes]]]] = {}
    most = ENDS_MAX if (there - here) * len(tables) <= MANY else ENDS_MAX_OF_MANY
    for end in _ends(keys, here, there, located, most):
        blocks = usable(keys[:end])
        if blocks > here and blocks not in forecasts:
            forecasts[blocks] = _forecast(tables, keys[:blocks], located, sources, now)
    loads = [(blocks, found.seconds) for blocks, (found, _) in forecasts.items()]
    blocks = worth_loading(here, loads, recompute)
    if blocks == there:
        return Choice(there, {})
    kept = set(keys[:blocks])
    found, missing = forecasts[there]
    declined = {
        incarnation: [
            (tables[part], key)
            for part, index in share
            if (key := missing[part][index]) not in kept
        ]
        for incarnation, share in found.shares.items()
    }
    return Choice(blocks, {who: parts for who, parts in declined.items() if parts})


def _ends(
    keys: Sequence[bytes],
    here: int,
    there: int,
    located: Mapping[bytes, Sequence[Entry]],
    most: int,
) -> list[int]:
    """Lengths of prefixes behind whose last block the sources change; the last one is `there`."""
    ends = [
        index
        for index in range(here + 1, there)
        if located.get(keys[index], ()) != located.get(keys[index - 1], ())
    ]
    step = -(-len(ends) // (most - 1)) or 1
    return [*ends[::step], there]


def _forecast(
    tables: Sequence[PartTable],
    keys: Sequence[bytes],
    located: Mapping[bytes, Sequence[Entry]],
    sources: Sources,
    now: float,
) -> tuple[Forecast, list[list[bytes]]]:
    """How long a prefix takes to come; and which keys of each part it lacks, that nobody delivers yet."""
    sought: list[tuple[int, list[Sequence[Candidate]]]] = []
    missing: list[list[bytes]] = []
    delivering: set[bytes] = set()
    for table in tables:
        wanted: list[Sequence[Candidate]] = []
        lacking: list[bytes] = []
        for key in needed(table.spec, keys):
            if key in table.blocks:
                continue
            if sources_now := sources.delivering(table, key):
                delivering.update(sources_now)
                continue
            wanted.append(sources.candidates(table, key, located.get(key, ())))
            lacking.append(key)
        sought.append((table.spec.nbytes, wanted))
        missing.append(lacking)
    found = forecast(
        sought, sorted(delivering), sources.peers, now, slice_bytes=sources.slice_bytes
    )
    return found, missing
