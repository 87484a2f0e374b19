"""What to fetch from which source. Rules only: no I/O, no clock.

A `FetchRequest` is a run of adjacent keys of a chain that the same sources may have. `missing` makes them from
the located replicas; `assign` gives each of their blocks to the source that should deliver it soonest.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse, groupby, repeat
from typing import NamedTuple, Protocol

from kvpool.daemon.core.blocks import PartTable
from kvpool.hit_rule import needed
from kvpool.placement.directory.base import TIERS, Entry
from kvpool.placement.peer_estimates import faster
from kvpool.placement.peer_selection import Candidate, plan
from kvpool.placement.peers import Peers
from kvpool.wire.frame import KEYS_MAX

SLICE_BYTES = 8 << 20  # given to one source at a time, so that others can share the work
ORDER_BYTES = 64 << 20  # in one transfer
TOGETHER_BYTES = 16 << 20  # in one transfer of several parts

Located = dict[bytes, Sequence[Entry]]
"""The known replicas of each key. Keys may share their entries: they are replaced, never changed."""


@dataclass(eq=False, slots=True)
class FetchRequest:
    """Blocks of one part that are not here, in the order of their chain, and the sources that may have all of
    them.

    tried: sources that were asked for them already.
    """

    table: PartTable
    keys: list[bytes]
    candidates: Sequence[Candidate]
    tried: frozenset[bytes] = frozenset()


class Candidates:
    """Sources of a part: each once, in its fastest tier that has the part.

    Adjacent keys mostly have the same sources: the list made for one of them is returned for the next too.
    """

    def __init__(self, lives: Callable[[bytes], bool] = lambda _: True) -> None:
        self._lives = lives
        self._last: tuple[int, Sequence[Entry]] = (-1, ())
        self._found: list[Candidate] = []

    def __call__(self, entries: Sequence[Entry], part: int) -> list[Candidate]:
        last_part, last = self._last
        if last_part == part and (last is entries or last == entries):
            return self._found
        tiers: dict[bytes, int] = {}
        for entry in filter(may_be_had, entries):
            if entry.mask >> part & 1 and self._lives(entry.incarnation):
                best = tiers.get(entry.incarnation, entry.tier)
                tiers[entry.incarnation] = faster(entry.tier, best)
        self._last = part, entries
        self._found = [Candidate(incarnation, tier) for incarnation, tier in tiers.items()]
        return self._found


def may_be_had(entry: Entry) -> bool:
    """Whether a replica can be pulled: one in an engine's own cache (tier gpu) cannot."""
    return entry.tier != TIERS["gpu"]


def merge(located: Located, more: Mapping[bytes, Sequence[Entry]]) -> None:
    """Add known entries of further sources. Entries that keys share are not changed."""
    if not located:
        located.update(more)
        return
    for key, entries in more.items():
        known = located.get(key)
        located[key] = [*known, *entries] if known else entries


def entries_of(masks: Mapping[bytes, int], source: bytes, tier: int) -> Located:
    """A source's blocks in the form of directory entries. Keys with the same mask share their entries."""
    by_mask = {mask: [Entry(source, tier, mask)] for mask in set(masks.values())}
    return {key: by_mask[mask] for key, mask in masks.items()}


def lacking(held: Container[bytes], keys: Iterable[bytes]) -> list[bytes]:
    """The keys that are not in `held`."""
    return list(filterfalse(held.__contains__, keys))


def requests_for(
    table: PartTable,
    keys: Iterable[bytes],
    located: Mapping[bytes, Sequence[Entry]],
    candidates: Candidates,
) -> list[FetchRequest]:
    """Requests for the keys that a table lacks in memory."""
    requests: list[FetchRequest] = []
    known: Sequence[Entry] | None = None
    for key in lacking(table.blocks, keys):
        entries = located.get(key, ())
        if entries is not known:
            known = entries
            found = candidates(entries, table.part)
            if not requests or found is not requests[-1].candidates:
                requests.append(FetchRequest(table, [], found))
        requests[-1].keys.append(key)
    return requests


def requests_for_each(
    wanted: Mapping[PartTable, Mapping[bytes, Sequence[Entry]]],
) -> list[FetchRequest]:
    """Requests for these blocks of several tables, given their replicas."""
    candidates = Candidates()
    return [
        request
        for table, located in wanted.items()
        for request in requests_for(table, located, located, candidates)
    ]


def missing(
    tables: Sequence[PartTable],
    keys: Sequence[bytes],
    located: Mapping[bytes, Sequence[Entry]],
    besides: Callable[[PartTable], Container[bytes]] | None = None,
) -> list[FetchRequest]:
    """Requests for the missing blocks of a prefix, in the order of the chain, part by part.

    besides: of a table, blocks that are not needed, because they are read where they are.
    """
    candidates = Candidates()
    requests: list[FetchRequest] = []
    for table in tables:
        wanted = needed(table.spec, keys)
        if besides is not None:
            wanted = lacking(besides(table), wanted)
        requests += requests_for(table, wanted, located, candidates)
    return requests


class Having(Protocol):
    """For each key of a table, the candidates that were not found to lack it."""

    def __call__(
        self, table: PartTable, keys: Sequence[bytes], candidates: Sequence[Candidate], now: float
    ) -> Iterable[Sequence[Candidate]]: ...


class Share(NamedTuple):
    """Blocks that one source should deliver."""

    incarnation: bytes
    keys: list[bytes]


def assign(
    table: PartTable,
    found: Sequence[tuple[FetchRequest, Sequence[Candidate]]],
    having: Having,
    peers: Peers,
    now: float,
) -> tuple[list[Share], list[FetchRequest]]:
    """The sources for blocks of requests for one table, and the requests with these added to `tried`.

    found: requests, and the sources that may be asked for each now.
    """
    keys: list[bytes] = []
    candidates: list[Sequence[Candidate]] = []
    of: list[FetchRequest] = []
    for request, askable in found:
        keys += request.keys
        candidates += having(table, request.keys, askable, now)
        of += repeat(request, len(request.keys))
    shares = plan(candidates, table.spec.nbytes, peers, now, slice_bytes=SLICE_BYTES)
    assignments = [
        Share(incarnation, [keys[index] for index in indices]) for incarnation, indices in shares
    ]
    if len(shares) == 1 and len(shares[0].indices) == len(keys):
        only = shares[0].incarnation
        return assignments, [replace(request, tried=request.tried | {only}) for request, _ in found]
    asked: list[bytes | None] = [None] * len(keys)
    for incarnation, indices in shares:
        for index in indices:
            asked[index] = incarnation
    # A request is split where another source was asked, so that `tried` is right for all of its blocks.
    cut: list[FetchRequest] = []
    for (request, source), group in groupby(zip(keys, of, asked, strict=True), lambda one: one[1:]):
        tried = request.tried if source is None else request.tried | {source}
        cut.append(FetchRequest(table, [key for key, _, _ in group], request.candidates, tried))
    return assignments, cut


def orders(
    wanted: Sequence[tuple[PartTable, Sequence[bytes]]], *, apart: bool
) -> Iterator[dict[PartTable, Sequence[bytes]]]:
    """Blocks that one source should deliver, as transfers: by part, the parts of one namespace together.

    A transfer costs about as much as a megabyte, so that parts with few blocks go together, but no more than
    `TOGETHER_BYTES`: several transfers may go by different network cards, and what has arrived is used before the rest
    comes. apart: each part by itself.
    """
    together: dict[PartTable, Sequence[bytes]] = {}
    nbytes = count = 0
    for table, all_keys in wanted:
        most = max(1, min(KEYS_MAX, ORDER_BYTES // table.spec.nbytes))
        alone = (len(all_keys) - 1) // most * most
        for at in range(0, alone, most):
            yield {table: all_keys[at : at + most]}
        keys = all_keys[alone:]
        size = len(keys) * table.spec.nbytes
        if together and (
            apart
            or table in together
            or next(iter(together)).namespace is not table.namespace
            or nbytes + size > TOGETHER_BYTES
            or count + len(keys) > KEYS_MAX
        ):
            yield together
            together, nbytes, count = {}, 0, 0
        together[table] = keys
        nbytes += size
        count += len(keys)
    if together:
        yield together
